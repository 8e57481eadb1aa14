#include "guest/pages.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "memory/placement.h"

namespace hbm {
namespace {

// Returns `text` as a JSON string. The messages of hbm contain quotes, and no other character that
// JSON escapes.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"') out += '\\';
    out += c;
  }
  return out + "\"";
}

// Reads a byte of each page that the process has in memory. If the kernel is moving the page, the
// read waits for the end of the move. Reads no other page, because the kernel would take memory
// for it.
void read_pages(const std::vector<Block>& blocks) {
  // Bits of an entry of pagemap. The kernel shows a page that it is moving as swapped.
  constexpr uint64_t kPresent = uint64_t{1} << 63, kSwapped = uint64_t{1} << 62;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  std::ifstream pagemap;
  pagemap.rdbuf()->pubsetbuf(nullptr, 0);  // the kernel reads whole entries only
  pagemap.open("/proc/self/pagemap", std::ios::binary);
  for (const Block& block : blocks) {
    const auto begin = reinterpret_cast<uintptr_t>(block.address);
    const uintptr_t first = begin / page, last = (begin + block.bytes - 1) / page;
    std::vector<uint64_t> entries(block.bytes == 0 ? 0 : last - first + 1);
    pagemap.seekg(static_cast<std::streamoff>(first * sizeof(uint64_t)));
    pagemap.read(reinterpret_cast<char*>(entries.data()),
                 static_cast<std::streamsize>(entries.size() * sizeof(uint64_t)));
    if (!pagemap) throw std::runtime_error("cannot read /proc/self/pagemap");
    for (size_t i = 0; i < entries.size(); ++i) {
      if ((entries[i] & (kPresent | kSwapped)) == 0) continue;
      const uintptr_t address = std::max(begin, (first + i) * page);
      static_cast<void>(*reinterpret_cast<const volatile char*>(address));
    }
  }
}

// Returns the text of /proc/self/numa_maps. The kernel does not count a page while it moves the
// page, which takes long if the kernel's thread loses its processor. So each reading begins when no
// page of the blocks is being moved, and the file is read until two readings are the same, at most
// kMostReadings times.
std::string numa_maps(const std::vector<Block>& blocks) {
  constexpr int kMostReadings = 20;
  constexpr std::chrono::milliseconds kPause{20};
  std::string before, now;
  for (int reading = 0; reading < kMostReadings && (reading < 2 || now != before); ++reading) {
    if (reading > 0) std::this_thread::sleep_for(kPause);
    read_pages(blocks);
    std::ostringstream text;
    text << std::ifstream("/proc/self/numa_maps").rdbuf();
    before = std::exchange(now, text.str());
  }
  return now;
}

}  // namespace

void report(const std::string& name, const std::vector<Block>& blocks, const std::string& refusal) {
  std::ostringstream out;
  out << "{\"name\": " << quoted(name) << ", \"refusal\": " << quoted(refusal) << ", \"blocks\": [";
  const char* separator = "";
  for (const Block& block : blocks) {
    out << separator << "{\"address\": " << reinterpret_cast<uintptr_t>(block.address)
        << ", \"bytes\": " << block.bytes << ", \"where\": {";
    const char* comma = "";
    for (const auto& [node, bytes] : memory::where(block.address, block.bytes)) {
      out << comma << '"' << node << "\": " << bytes;
      comma = ", ";
    }
    out << "}}";
    separator = ", ";
  }
  out << "]}\n" << numa_maps(blocks);
  const std::string text = out.str();
  if (write(STDOUT_FILENO, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    throw std::system_error(errno, std::generic_category(), "cannot write the report");
  }
}

}  // namespace hbm
