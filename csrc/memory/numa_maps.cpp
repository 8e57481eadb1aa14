#include "memory/numa_maps.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

#include "base/error.h"

namespace hbm::memory {
namespace {

// Removes the number at the start of `text` and returns it; 0 if there is none.
uint64_t take_number(std::string_view& text, int base) {
  uint64_t number = 0;
  const auto taken = std::from_chars(text.data(), text.data() + text.size(), number, base);
  text.remove_prefix(static_cast<size_t>(taken.ptr - text.data()));
  return number;
}

std::ifstream open_table(const char* path) {
  std::ifstream table(path);
  if (!table) {
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot read ") + path + ": " + std::strerror(errno));
  }
  return table;
}

// Parses the words after the address, as in "bind:1 anon=3 N0=2 N1=1 kernelpagesize_kB=4".
void take_counts(Mapping& mapping, std::istream& words) {
  std::map<int, uint64_t> pages;
  uint64_t page_bytes = 0;
  for (std::string word; words >> word;) {
    std::string_view rest = word;
    constexpr std::string_view kPageSize = "kernelpagesize_kB=";
    if (rest.starts_with(kPageSize)) {
      rest.remove_prefix(kPageSize.size());
      page_bytes = take_number(rest, 10) << 10;
    } else if (rest.size() > 1 && rest[0] == 'N' && rest[1] >= '0' && rest[1] <= '9') {
      rest.remove_prefix(1);
      const auto node = static_cast<int>(take_number(rest, 10));
      if (!rest.starts_with('=')) continue;
      rest.remove_prefix(1);
      pages[node] = take_number(rest, 10);
    }
  }
  for (const auto& [node, count] : pages) mapping.bytes[node] = count * page_bytes;
}

std::string node_list(const Mapping& mapping) {
  std::string list;
  for (const auto& [node, bytes] : mapping.bytes) {
    list += (list.empty() ? "" : ", ") + std::to_string(node);
  }
  return list;
}

}  // namespace

std::vector<Mapping> parse_mappings(std::istream& maps, std::istream& numa_maps, uintptr_t begin,
                                    uintptr_t end) {
  std::map<uintptr_t, Mapping> found;  // by begin
  for (std::string line; std::getline(maps, line);) {
    std::string_view rest = line;
    Mapping mapping;
    mapping.begin = take_number(rest, 16);
    if (!rest.starts_with('-')) continue;
    rest.remove_prefix(1);
    mapping.end = take_number(rest, 16);
    if (mapping.begin < end && mapping.end > begin) found.emplace(mapping.begin, mapping);
  }
  for (std::string line; std::getline(numa_maps, line);) {
    std::string_view rest = line;
    const auto mapping = found.find(take_number(rest, 16));
    if (mapping == found.end()) continue;
    std::istringstream words{std::string(rest)};
    take_counts(mapping->second, words);
  }
  std::vector<Mapping> mappings;
  for (auto& [address, mapping] : found) mappings.push_back(std::move(mapping));
  return mappings;
}

std::vector<Mapping> mappings_over(uintptr_t begin, uintptr_t end) {
  std::ifstream numa_maps = open_table("/proc/self/numa_maps");
  std::ifstream maps = open_table("/proc/self/maps");
  return parse_mappings(maps, numa_maps, begin, end);
}

std::map<int, uint64_t> bytes_on_nodes(
    const std::vector<Mapping>& mappings, uintptr_t begin, uintptr_t end,
    const std::function<uint64_t(uintptr_t, uintptr_t)>& resident_bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first_page = begin - begin % page;
  const uintptr_t last_page = (end + page - 1) / page * page;
  std::map<int, uint64_t> sums;
  for (const Mapping& mapping : mappings) {
    if (mapping.bytes.size() == 1) {
      sums[mapping.bytes.begin()->first] +=
          resident_bytes(std::max(begin, mapping.begin), std::min(end, mapping.end));
    } else if (first_page <= mapping.begin && last_page >= mapping.end) {
      for (const auto& [node, bytes] : mapping.bytes) sums[node] += bytes;
    } else if (mapping.bytes.size() > 1) {
      throw Error(
          ErrorKind::kUnavailable,
          "/proc/self/numa_maps tells for a whole mapping only, and this memory is a part of "
          "a mapping on the NUMA nodes " +
              node_list(mapping));
    }
  }
  std::erase_if(sums, [](const auto& node) { return node.second == 0; });
  return sums;
}

}  // namespace hbm::memory
