// A program that repeats an operation and times it. benchmarks/programs.py drives it. Each line of
// the standard input is a command. The answer is "ok" and numbers, or "error" and the cause.
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

// A command. It gets the words after its name. Its exceptions become error answers.
using Command = std::function<Numbers(const Words&)>;

// Answers commands until the end of the input. Returns the exit status.
int serve(const std::map<std::string, Command>& commands);

// Returns the word at `index` as an integer. Throws Error(kInvalid) if it is missing or no integer.
size_t number(const Words& words, size_t index);

// Makes an uncounted call, then takes `samples` samples of `calls` calls each. Returns, for each
// sample, the mean microseconds of a call.
Numbers timed(const std::function<void()>& call, size_t samples, size_t calls);

// Private memory in whole pages. The constructor writes to all of them, so that they are in place.
class Pages {
 public:
  explicit Pages(size_t bytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  // The requested bytes; the last page may have more.
  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace hbm::bench
