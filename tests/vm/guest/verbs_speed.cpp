// Speeds and costs of the verbs transport, one JSON object a line.
//
//   verbs_speed transfers BYTES TOTAL   reads and writes of registered memory, several in flight
//   verbs_speed registration            times to register a segment's memory, and to bind a window
//   verbs_speed clients COUNT           memory for each client with 4 queue pairs
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <fstream>
#include <stdexcept>

#include "box/verbs/client/library.h"
#include "box/verbs/common/load_library.h"
#include "box/verbs/server/box_memory.h"
#include "guest/verbs_box.h"

namespace hbm::box::verbs {
namespace {

using Clock = std::chrono::steady_clock;
using protocol::Opcode;

constexpr size_t kInFlight = 16;  // transfers
constexpr int kRepeats = 5;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void finish(transport::Transport& transport, const transport::TransportRequest& request) {
  while (!request.finished()) transport.progress(std::chrono::seconds(1));
  if (request.status != protocol::Status::kOk) throw std::runtime_error(request.cause);
}

std::shared_ptr<transport::Grant> alloc(transport::Transport& transport, uint64_t size) {
  protocol::Alloc alloc{};
  alloc.sequence.number = 1;
  alloc.size = size;
  alloc.handle = 1;
  transport::TransportRequest request;
  request.opcode = Opcode::kAlloc;
  const auto* bytes = reinterpret_cast<const std::byte*>(&alloc);
  request.body.assign(bytes, bytes + sizeof(alloc));
  transport.post(request);
  finish(transport, request);
  return request.granted;
}

double move(transport::Transport& transport, const transport::Grant& grant, Opcode opcode,
            std::byte* local, uint64_t bytes, uint64_t total) {
  std::deque<transport::TransportRequest> requests;
  const auto start = Clock::now();
  for (uint64_t moved = 0; moved < total; moved += bytes) {
    if (requests.size() == kInFlight) {
      finish(transport, requests.front());
      requests.pop_front();
    }
    transport::TransportRequest& request = requests.emplace_back();
    request.opcode = opcode;
    request.grant = &grant;
    request.local = local;
    request.bytes = bytes;
    transport.post(request);
  }
  for (const transport::TransportRequest& request : requests) finish(transport, request);
  return static_cast<double>(total) / seconds_since(start) / (1 << 20);
}

void transfers(uint64_t bytes, uint64_t total) {
  const BoxProcess box;
  transport::TransportOptions opening;
  opening.host = kHost;
  opening.port = box.port();
  opening.token = kToken;
  const transport::OpenedTransport opened = common::load<client::ClientLibrary>().open(opening);
  const auto grant = alloc(*opened.transport, bytes);
  std::vector<std::byte> local(bytes);
  for (const bool registered : {true, false}) {
    const auto held = registered ? opened.transport->register_memory(local.data(), bytes) : nullptr;
    for (const Opcode opcode : {Opcode::kWrite, Opcode::kRead}) {
      const double speed = move(*opened.transport, *grant, opcode, local.data(), bytes, total);
      std::printf("{\"operation\": \"%s\", \"bytes\": %lu, \"registered\": %s, \"MiB/s\": %.1f}\n",
                  protocol::opcode_name(opcode), bytes, registered ? "true" : "false", speed);
    }
  }
}

// Returns the shortest time of kRepeats runs, in microseconds.
template <class Action>
double fastest_us(Action action) {
  double best = 1e12;
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = Clock::now();
    action();
    best = std::min(best, seconds_since(start) * 1e6);
  }
  return best;
}

void registration() {
  const BoxProcess box;
  RawClient client(box.port());
  client.connect(1);
  for (const uint64_t bytes : {uint64_t{4} << 10, uint64_t{1} << 20, uint64_t{64} << 20}) {
    const int file = memfd_create("segment", MFD_CLOEXEC);
    if (ftruncate(file, static_cast<off_t>(bytes)) != 0) throw std::runtime_error("ftruncate");
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND;
    const auto start = Clock::now();
    const common::MemoryRegion first(client.domain(), memory, bytes, kAccess);
    const double absent = seconds_since(start) * 1e6;
    const double present =
        fastest_us([&] { common::MemoryRegion(client.domain(), memory, bytes, kAccess); });
    const double window = fastest_us([&] { client.bind(first, memory, bytes); });
    std::printf(
        "{\"bytes\": %lu, \"register us\": %.0f, \"register touched us\": %.0f, "
        "\"window us\": %.0f}\n",
        bytes, absent, present, window);
    munmap(memory, bytes);
  }
}

// Returns the number of kilobytes that follows `name` in a file of /proc.
long kilobytes(const std::string& file, const std::string& name) {
  std::ifstream in(file);
  for (std::string word; in >> word;) {
    long value = 0;
    if (word == name && in >> value) return value;
  }
  throw std::runtime_error(file + " has no " + name);
}

long kernel_kilobytes() {
  return kilobytes("/proc/meminfo", "Slab:") + kilobytes("/proc/meminfo", "VmallocUsed:");
}

void clients(int count) {
  const BoxProcess box;
  const std::string status = "/proc/" + std::to_string(box.pid()) + "/status";
  std::vector<std::unique_ptr<RawClient>> clients;
  const auto add = [&] {
    clients.push_back(std::make_unique<RawClient>(box.port()));
    clients.back()->connect(4);
  };
  add();
  const long resident = kilobytes(status, "VmRSS:");
  const long kernel = kernel_kilobytes();
  for (int i = 0; i < count; ++i) add();
  std::printf("{\"clients\": %d, \"box KiB each\": %.1f, \"kernel KiB each, both ends\": %.1f}\n",
              count, static_cast<double>(kilobytes(status, "VmRSS:") - resident) / count,
              static_cast<double>(kernel_kilobytes() - kernel) / count);
}

void run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "transfers" && argc == 4) return transfers(std::stoul(argv[2]), std::stoul(argv[3]));
  if (what == "registration") return registration();
  if (what == "clients" && argc == 3) return clients(std::stoi(argv[2]));
  throw std::runtime_error("verbs_speed transfers BYTES TOTAL | registration | clients COUNT");
}

}  // namespace
}  // namespace hbm::box::verbs

int main(int argc, char** argv) {
  if (hbm::box::verbs::was_box(argc, argv)) return 0;
  try {
    hbm::box::verbs::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
