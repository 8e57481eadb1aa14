// What a program has that repeats one thing and takes its time, as benchmarks/programs.py asks it:
// a line of words comes on standard input; "ok" and numbers, or "error" and why, are the answer.
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

// Is given the words behind its name; throws what is answered as an error.
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

  // As many as were asked for.
  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace hbm::bench
