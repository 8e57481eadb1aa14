// The options of a group: torch_hbmcomm.Options in Python, whose docstring is the reference. An
// environment variable sets the default of each field.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/group_transport.h"
#include "memory/policy.h"
#include "process_group/torch_version.h"

namespace hbm::process_group {

inline constexpr const char* kBackendName = "hbm";
inline constexpr const char* kGlooName = "gloo";  // under HBMCOMM_INSTEAD_OF=gloo

struct GroupOptions final : OptionsBase {
  using milliseconds = std::chrono::milliseconds;

  // Throws Error(kInvalid) for an invalid value. `parameter_server` is not checked here: errors in
  // it are reported to all ranks when the group is formed.
  GroupOptions(const std::string& memory, bootstrap::GroupTransport transport,
               int64_t staging_bytes, std::optional<int64_t> reduce_threads,
               const std::string& parameter_server, std::optional<milliseconds> heartbeat_timeout);
  // Copies the options for a group whose backend is named `backend`.
  GroupOptions(const GroupOptions& other, const std::string& backend);

  // Reads HBMCOMM_MEMORY, HBMCOMM_NODE, HBMCOMM_STAGING_BYTES, HBMCOMM_REDUCE_THREADS,
  // HBMCOMM_PARAMETER_SERVER and HBMCOMM_HEARTBEAT_TIMEOUT. Also checks
  // chosen_ports() and chosen_interfaces().
  static c10::intrusive_ptr<GroupOptions> from_environment();

  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<GroupOptions>(*this);
  }

  // Returns the time after which a machine that gives no answer counts as silent: heartbeat_timeout
  // if it is set, but at most the group's timeout.
  milliseconds heartbeat() const { return std::min(heartbeat_timeout.value_or(timeout), timeout); }

  // Returns each rank's number in the job, indexed by its rank in the group, which has `size`
  // ranks. If the options name no such numbers, each rank has the same number in the job as in the
  // group.
  std::vector<int> numbers_in_job(int size) const;

  const memory::Policy policy;
  const bootstrap::GroupTransport transport;
  const uint64_t staging_bytes;
  const size_t reduce_threads;
  const std::string parameter_server;  // "auto", addresses of boxes, or empty: none
  const std::optional<milliseconds> heartbeat_timeout;
};

// Parses "1073741824", "512M" or "1G" to bytes. Throws Error(kInvalid) naming `source`.
int64_t parse_bytes(const std::string& text, const std::string& source);

}  // namespace hbm::process_group
