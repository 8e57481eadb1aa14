#include "report.h"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <system_error>

#include "memory/placement.h"

namespace hbm {
namespace {

// Our messages have quotes in them, and no other character that JSON would have escaped.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"') out += '\\';
    out += c;
  }
  return out + "\"";
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
  out << "]}\n" << std::ifstream("/proc/self/numa_maps").rdbuf();
  const std::string text = out.str();
  if (write(STDOUT_FILENO, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    throw std::system_error(errno, std::generic_category(), "cannot write the report");
  }
}

}  // namespace hbm
