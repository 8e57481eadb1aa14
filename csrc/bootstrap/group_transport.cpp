#include "bootstrap/group_transport.h"

#include <cstdlib>

#include "base/error.h"

namespace hbm::bootstrap {
namespace {

constexpr const char* kVariable = "HBMCOMM_NODE";

}  // namespace

std::string transport_name(GroupTransport transport) {
  return transport == GroupTransport::kAuto  ? "auto"
         : transport == GroupTransport::kShm ? "shm"
                                             : "mpi";
}

GroupTransport parse_transport(const std::string& text, const std::string& source) {
  for (const auto each : {GroupTransport::kAuto, GroupTransport::kShm, GroupTransport::kMpi}) {
    if (text == transport_name(each)) return each;
  }
  throw Error(ErrorKind::kInvalid,
              source + " is \"" + text +
                  "\"; it must be \"auto\" (shared memory within a node, MPI between nodes), "
                  "\"shm\" (shared memory, on one node) or \"mpi\" (MPI between all ranks)");
}

GroupTransport default_transport() {
  const char* const value = std::getenv(kVariable);
  const bool is_set = value != nullptr && *value != '\0';
  return is_set ? parse_transport(value, kVariable) : GroupTransport::kAuto;
}

}  // namespace hbm::bootstrap
