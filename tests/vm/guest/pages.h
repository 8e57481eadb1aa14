// A program's report to pages.py on the memory that the program has taken.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace hbm {

struct Block {
  const void* address;
  size_t bytes;
};

// Prints a line of JSON with hbm's own view of each block, then the kernel's /proc/self/numa_maps.
// Prints both by one write, so that reports of processes that share an output do not mix. `refusal`
// says why the program got no more blocks; it is empty if the program got all.
void report(const std::string& name, const std::vector<Block>& blocks, const std::string& refusal);

}  // namespace hbm
