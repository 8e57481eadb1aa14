// The machine's memory, the location of blocks, and the binding of ranks to processors.
#include "memory/topology.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "expect_error.h"
#include "memory/cpu_binding.h"
#include "memory/hwloc_topology.h"
#include "memory/placement.h"
#include "memory_fixture.h"
#include "scratch.h"

namespace hbm::memory {
namespace {

TEST(Location, CountsTouchedBytesAlone) {
  constexpr size_t kPages = 3000;  // more than kPagesPerQuery
  char* pages = static_cast<char*>(
      mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(madvise(pages, kPages * kPage, MADV_NOHUGEPAGE), 0);
  EXPECT_EQ(bytes_anywhere(pages, kPages * kPage), 0u);
  EXPECT_TRUE(where(pages, 0).empty());

  pages[0] = pages[2 * kPage] = pages[2500 * kPage] = 1;
  EXPECT_EQ(bytes_anywhere(pages, kPages * kPage), 3 * kPage);
  EXPECT_EQ(bytes_anywhere(pages + 10, kPage), kPage - 10) << "starts inside a touched page";
  EXPECT_EQ(bytes_anywhere(pages + kPage, kPage + 20), 20u) << "ends inside a touched page";
  EXPECT_EQ(bytes_anywhere(pages + 5, 7), 7u) << "lies within one page";
  munmap(pages, kPages * kPage);
}

TEST(Location, CountsSharedPagesThatAnotherProcessFilled) {
  char* pages = static_cast<char*>(
      mmap(nullptr, 8 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(pages, MAP_FAILED);
  in_child([&] { pages[0] = pages[5 * kPage] = 1; });
  EXPECT_EQ(bytes_anywhere(pages, 8 * kPage), 2 * kPage);
  EXPECT_EQ(bytes_anywhere(pages, 8 * kPage), 2 * kPage) << "asking brings no page into being";
  munmap(pages, 8 * kPage);
}

TEST(Topology, ReportsNodesAndHowHbmWasFound) {
  with_hbm([] {
    const Topology found = discover();
    EXPECT_TRUE(found.hbm_available);
    EXPECT_NE(found.hbm_source.find("MEMKIND_HBW_NODES=0"), std::string::npos);
    EXPECT_TRUE(found.nodes.at(0).is_hbm);
    EXPECT_TRUE(found.nodes.at(0).has_cpus);
    EXPECT_GT(found.nodes.at(0).free_bytes, 0u);
    EXPECT_EQ(found.closest_hbm, std::vector<int>{0});
    EXPECT_GE(found.cpu_node, 0);
  });
  without_hbm([] {
    const Topology found = discover();
    EXPECT_TRUE(found.closest_hbm.empty());
    EXPECT_NE(found.hbm_source.find("memkind"), std::string::npos);
    for (const NodeInfo& node : found.nodes) EXPECT_FALSE(node.is_hbm);
  });
}

// Writes a machine of two CPUs in flat SNC-2 mode to a file, which hwloc reads instead of the real
// machine. The even nodes have cores and DDR. Each odd node has the fast memory of the cores of the
// node before it.
void write_snc2_machine(const char* path) {
  hwloc_topology_t raw = nullptr;
  ASSERT_EQ(hwloc_topology_init(&raw), 0);
  const HwlocTopology topology(raw);
  ASSERT_EQ(
      hwloc_topology_set_synthetic(raw, "Package:1 Group:2 [NUMANode] [NUMANode] Core:1 PU:1"), 0);
  ASSERT_EQ(hwloc_topology_load(raw), 0);
  for (hwloc_obj_t node = hwloc_get_next_obj_by_type(raw, HWLOC_OBJ_NUMANODE, nullptr);
       node != nullptr; node = hwloc_get_next_obj_by_type(raw, HWLOC_OBJ_NUMANODE, node)) {
    hwloc_location cores;
    cores.type = HWLOC_LOCATION_TYPE_CPUSET;
    cores.location.cpuset = node->cpuset;
    const hwloc_uint64_t megabytes = node->os_index % 2 == 0 ? 50'000 : 250'000;
    ASSERT_EQ(hwloc_memattr_set_value(raw, HWLOC_MEMATTR_ID_BANDWIDTH, node, &cores, 0, megabytes),
              0);
  }
  ASSERT_EQ(hwloc_topology_export_xml(raw, path, 0), 0);
}

TEST(Topology, FindsHbmByBandwidth) {
  if (sysconf(_SC_NPROCESSORS_CONF) < 2) GTEST_SKIP() << "memkind wants the CPUs to exist";
  in_child([] {
    const std::string path = testing::TempDir() + "/snc2." + std::to_string(getpid()) + ".xml";
    write_snc2_machine(path.c_str());
    unsetenv("MEMKIND_HBW_NODES");
    setenv("HWLOC_XMLFILE", path.c_str(), 1);
    const Topology found = discover();
    unlink(path.c_str());
    EXPECT_TRUE(found.hbm_available) << found.hbm_source;
    EXPECT_NE(found.hbm_source.find("HMAT"), std::string::npos) << found.hbm_source;
    EXPECT_NE(found.hbm_source.find(" MiB/s"), std::string::npos) << found.hbm_source;
    EXPECT_EQ(found.mode, MemoryMode::kFlat);
    EXPECT_EQ(found.cluster, "2 (SNC-2)");
    ASSERT_EQ(found.nodes.size(), 4u);
    for (const NodeInfo& node : found.nodes) {
      EXPECT_EQ(node.is_hbm, node.id % 2 == 1) << node.id;
      EXPECT_EQ(node.has_cpus, node.id % 2 == 0) << node.id;
    }
  });
}

// An imitation of the kernel's directory of NUMA nodes, made of files.
TEST(Topology, FollowsMemkindAndTheKernelOnHbmNodes) {
  const Scratch scratch;
  const auto may_have = [&] { return may_have_hbm(scratch / "nodes"); };
  in_child([&] {
    for (const char* name : {"MEMKIND_HBW_NODES", "HWLOC_XMLFILE"}) unsetenv(name);
    EXPECT_TRUE(may_have()) << "the kernel does not tell";
    std::filesystem::create_directories(scratch / "nodes/node1");
    const auto has_memory = [&](const char* nodes) {
      std::ofstream(scratch / "nodes/has_memory") << nodes << '\n';
    };
    has_memory("0-1");
    EXPECT_TRUE(may_have());
    has_memory("1");
    EXPECT_FALSE(may_have());
    setenv("MEMKIND_HBW_NODES", "0", 1);
    EXPECT_TRUE(may_have());
    unsetenv("MEMKIND_HBW_NODES");
    std::filesystem::create_directories(scratch / "nodes/node1/access0");
    EXPECT_TRUE(may_have()) << "the firmware tells of bandwidths";
  });
}

TEST(Topology, FindsWhatMemkindFinds) {
  in_child([] {
    unsetenv("MEMKIND_HBW_NODES");
    const std::string found = why_unavailable(Policy::kBind);
    const int code = memkind_check_available(MEMKIND_HBW);
    char text[MEMKIND_ERROR_MESSAGE_SIZE];
    memkind_error_message(code, text, sizeof(text));
    EXPECT_EQ(found, code == MEMKIND_SUCCESS ? std::string() : text);
  });
}

TEST(Bind, GivesEachRankItsCore) {
  in_child([] {
    cpu_set_t before;
    ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
    const std::string none = bind(BindMode::kNone, 0, 1);
    EXPECT_NE(none.find("not bound"), std::string::npos) << none;

    const std::string core = bind(BindMode::kCore, 0, 1);
    EXPECT_NE(core.find("one core"), std::string::npos) << core;
    cpu_set_t after;
    ASSERT_EQ(sched_getaffinity(0, sizeof(after), &after), 0);
    EXPECT_LE(CPU_COUNT(&after), CPU_COUNT(&before));

    bind(BindMode::kNuma, 0, 1);  // of the CPUs allowed at first, not of the one core
    cpu_set_t node;
    ASSERT_EQ(sched_getaffinity(0, sizeof(node), &node), 0);
    EXPECT_GE(CPU_COUNT(&node), CPU_COUNT(&after));
    expect_error(ErrorKind::kInvalid, {"cannot bind 100000 local ranks to"},
                 [] { bind(BindMode::kCore, 0, 100000); });
  });
}

TEST(Bind, StaysWithinTheCpusAllowed) {
  in_child([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<unsigned>(sched_getcpu()), &one);
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      const pid_t thread = std::stoi(task.path().filename());
      ASSERT_EQ(sched_setaffinity(thread, sizeof(one), &one), 0);
    }
    bind(BindMode::kNuma, 0, 1);
    cpu_set_t after;
    ASSERT_EQ(sched_getaffinity(0, sizeof(after), &after), 0);
    EXPECT_TRUE(CPU_EQUAL(&one, &after));
    expect_error(ErrorKind::kInvalid, {"to 1 cores"}, [] { bind(BindMode::kCore, 1, 2); });
  });
}

// hwloc shows an invented machine instead of the real one. It has four nodes with four cores each.
TEST(Bind, SpreadsRanksOverNodes) {
  in_child([] {
    setenv("HWLOC_SYNTHETIC", "Package:1 Group:4 [NUMANode] Core:4 PU:2", 1);
    EXPECT_EQ(bind(BindMode::kNuma, 2, 4), "NUMA node 2 (CPUs 16-23)");
    EXPECT_EQ(bind(BindMode::kNuma, 1, 2), "NUMA node 2 (CPUs 16-23)");
    EXPECT_EQ(bind(BindMode::kNuma, 7, 8), "NUMA node 3 (CPUs 24-31)");
    EXPECT_EQ(bind(BindMode::kCore, 1, 4), "one core (CPUs 8-9) on NUMA node 1");
    EXPECT_EQ(bind(BindMode::kCore, 15, 16), "one core (CPUs 30-31) on NUMA node 3");
    expect_error(ErrorKind::kInvalid, {"17 local ranks to 16 cores"},
                 [] { bind(BindMode::kCore, 0, 17); });
    EXPECT_EQ(discover().cluster, "4 (SNC-4)");
  });
}

TEST(Bind, AutoGivesEachRankItsPartOfTheMachine) {
  in_child([] {
    setenv("HWLOC_SYNTHETIC", "Package:2 Group:2 [NUMANode] L3:2 Core:2 PU:1", 1);
    const auto ranks = [](int size) {
      std::vector<std::string> all;
      for (int rank = 0; rank < size; ++rank) all.push_back(bind(BindMode::kAuto, rank, size));
      return all;
    };
    using Parts = std::vector<std::string>;
    EXPECT_EQ(ranks(1), Parts({"NUMA nodes 0-3 (CPUs 0-15)"}));
    EXPECT_EQ(ranks(2), Parts({"NUMA nodes 0-1 (CPUs 0-7)", "NUMA nodes 2-3 (CPUs 8-15)"}));
    EXPECT_EQ(ranks(3), Parts({"NUMA node 0 (CPUs 0-3)", "NUMA node 1 (CPUs 4-7)",
                               "NUMA nodes 2-3 (CPUs 8-15)"}));
    EXPECT_EQ(ranks(4), Parts({"NUMA node 0 (CPUs 0-3)", "NUMA node 1 (CPUs 4-7)",
                               "NUMA node 2 (CPUs 8-11)", "NUMA node 3 (CPUs 12-15)"}));
    EXPECT_EQ(
        ranks(6),  // the first and the third node have two ranks, and a cache for each
        Parts({"NUMA node 0 (CPUs 0-1)", "NUMA node 0 (CPUs 2-3)", "NUMA node 1 (CPUs 4-7)",
               "NUMA node 2 (CPUs 8-9)", "NUMA node 2 (CPUs 10-11)", "NUMA node 3 (CPUs 12-15)"}));
    const Parts many = ranks(16);  // two ranks share a cache
    EXPECT_EQ(many[0], "NUMA node 0 (CPUs 0-1)");
    EXPECT_EQ(many[1], many[0]);
    EXPECT_EQ(many[2], "NUMA node 0 (CPUs 2-3)");
    EXPECT_EQ(many[15], "NUMA node 3 (CPUs 14-15)");
  });
}

TEST(Bind, AutoWithoutL3CachesSharesTheNode) {
  in_child([] {
    setenv("HWLOC_SYNTHETIC", "Package:1 Group:2 [NUMANode] Core:4 PU:1", 1);
    EXPECT_EQ(bind(BindMode::kAuto, 0, 4), "NUMA node 0 (CPUs 0-3)");
    EXPECT_EQ(bind(BindMode::kAuto, 1, 4), "NUMA node 0 (CPUs 0-3)");
    EXPECT_EQ(bind(BindMode::kAuto, 3, 4), "NUMA node 1 (CPUs 4-7)");
  });
}

TEST(Bind, RejectsBadArguments) {
  expect_error(ErrorKind::kInvalid, {"none, core, numa and auto"},
               [] { parse_bind_mode("socket"); });
  expect_error(ErrorKind::kInvalid, {"local rank 2 of 2"}, [] { bind(BindMode::kNone, 2, 2); });
  expect_error(ErrorKind::kInvalid, {"local rank -1"}, [] { bind(BindMode::kCore, -1, 2); });
}

}  // namespace
}  // namespace hbm::memory
