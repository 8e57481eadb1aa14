// A program that repeats one thing and takes its time. benchmarks/programs.py drives it: each line
// of its standard input is a command, and the answer is "ok" and numbers, or "error" and why.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace hbm::bench {

using Words = std::vector<std::string>;
using Numbers = std::vector<double>;

// A command: takes the words behind its name; what it throws is answered as an error.
using Command = std::function<Numbers(const Words&)>;

// Answers until the end of the input. Returns the exit status.
int serve(const std::map<std::string, Command>& commands);

// The word at `index` as a whole number. Throws Error(kInvalid) if it is none.
size_t number(const Words& words, size_t index);

// For each of `samples`, the microseconds that one of its `calls` took. A call that does not count
// comes first.
Numbers timed(const std::function<void()>& call, size_t samples, size_t calls);

// Whole pages of private memory, every one of which has been written.
class Pages {
 public:
  explicit Pages(size_t bytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  // The bytes that were asked for; the last page may have more.
  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace hbm::bench
