#include "program.h"

#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <new>
#include <sstream>

#include "base/error.h"

namespace hbm::bench {
namespace {

void answer(const std::map<std::string, Command>& commands, const std::string& line) {
  std::istringstream in(line);
  std::string name;
  in >> name;
  Words words;
  for (std::string word; in >> word;) words.push_back(word);
  const auto command = commands.find(name);
  if (command == commands.end()) throw Error(ErrorKind::kInvalid, "no command \"" + name + "\"");
  const Numbers numbers = command->second(words);
  std::printf("ok");
  for (const double found : numbers) std::printf(" %.9g", found);
  std::printf("\n");
}

}  // namespace

int serve(const std::map<std::string, Command>& commands) {
  for (std::string line; std::getline(std::cin, line);) {
    try {
      answer(commands, line);
    } catch (const std::exception& error) {
      std::string text = error.what();
      for (char& c : text) c = c == '\n' ? ' ' : c;
      std::printf("error %s\n", text.c_str());
    }
    std::fflush(stdout);
  }
  return 0;
}

size_t number(const Words& words, size_t index) {
  if (index >= words.size() || words[index].find_first_not_of("0123456789") != std::string::npos) {
    throw Error(ErrorKind::kInvalid,
                "word " + std::to_string(index) + " of the command is no number");
  }
  return std::stoull(words[index]);
}

Numbers timed(const std::function<void()>& call, size_t samples, size_t calls) {
  using Clock = std::chrono::steady_clock;
  Numbers found(samples);
  call();
  for (double& sample : found) {
    const auto start = Clock::now();
    for (size_t done = 0; done < calls; ++done) call();
    const std::chrono::duration<double, std::micro> taken = Clock::now() - start;
    sample = taken.count() / static_cast<double>(calls);
  }
  return found;
}

Pages::Pages(size_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  std::memset(memory, 1, bytes);
  bytes_ = {static_cast<std::byte*>(memory), bytes};
}

Pages::~Pages() { munmap(bytes_.data(), bytes_.size()); }

}  // namespace hbm::bench
