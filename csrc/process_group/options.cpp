#include "process_group/options.h"

#include <cctype>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/tcp.h"
#include "process_group/tuning.h"

namespace hbm::process_group {
namespace {

std::string environment(const char* name, const std::string& fallback) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

int64_t parse_threads(const std::string& text) {
  int64_t threads = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), threads);
  if (failure != std::errc() || end != text.data() + text.size()) {
    throw Error(ErrorKind::kInvalid, "HBMCOMM_REDUCE_THREADS=" + text + " is not a number");
  }
  return threads;
}

std::optional<std::chrono::milliseconds> parse_seconds(const std::string& text) {
  if (text.empty()) return std::nullopt;
  double seconds = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (failure != std::errc() || end != text.data() + text.size() ||
      !(seconds < static_cast<double>(kHeartbeatTimeoutLimit.count()))) {
    throw Error(ErrorKind::kInvalid,
                "HBMCOMM_HEARTBEAT_TIMEOUT=" + text + " is not a number of seconds");
  }
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

}  // namespace

GroupOptions::GroupOptions(const std::string& memory, bootstrap::GroupTransport transport,
                           int64_t staging, std::optional<int64_t> reduce_threads,
                           const std::string& parameter_server,
                           std::optional<milliseconds> heartbeat_timeout)
    : OptionsBase(kBackendName),
      policy(memory::parse_policy(memory)),
      transport(transport),
      staging_bytes(static_cast<uint64_t>(staging)),
      reduce_threads(static_cast<size_t>(reduce_threads.value_or(1))),
      parameter_server(parameter_server),
      heartbeat_timeout(heartbeat_timeout) {
  if (heartbeat_timeout && *heartbeat_timeout < kLeastHeartbeatTimeout) {
    throw Error(ErrorKind::kInvalid,
                "heartbeat_timeout is " + std::to_string(heartbeat_timeout->count()) +
                    " ms; the least is " + std::to_string(kLeastHeartbeatTimeout.count()) + " ms");
  }
  if (staging < kLeastStagingBytes) {
    throw Error(ErrorKind::kInvalid, "staging_bytes is " + std::to_string(staging) +
                                         "; the least is " + std::to_string(kLeastStagingBytes));
  }
  if (reduce_threads && (*reduce_threads < 1 || *reduce_threads > kMostReduceThreads)) {
    throw Error(ErrorKind::kInvalid, "reduce_threads is " + std::to_string(*reduce_threads) +
                                         "; it must be between 1 and " +
                                         std::to_string(kMostReduceThreads));
  }
}

GroupOptions::GroupOptions(const GroupOptions& other, const std::string& backend)
    : OptionsBase(backend, other.timeout),
      policy(other.policy),
      transport(other.transport),
      staging_bytes(other.staging_bytes),
      reduce_threads(other.reduce_threads),
      parameter_server(other.parameter_server),
      heartbeat_timeout(other.heartbeat_timeout) {
  group_name = other.group_name;
  group_desc = other.group_desc;
  global_ranks_in_group = other.global_ranks_in_group;
}

c10::intrusive_ptr<GroupOptions> GroupOptions::from_environment() {
  chosen_ports();  // throws for a wrong HBMCOMM_PORTS
  chosen_interfaces();
  const std::string named = environment("HBMCOMM_MEMORY", "");
  const std::string memory = named.empty() ? "preferred" : named;
  const std::string staging = environment("HBMCOMM_STAGING_BYTES", "1G");
  const std::string threads = environment("HBMCOMM_REDUCE_THREADS", "1");
  const std::string parameter_server = environment("HBMCOMM_PARAMETER_SERVER", "");
  const std::string heartbeat = environment("HBMCOMM_HEARTBEAT_TIMEOUT", "");
  try {
    if (!named.empty()) memory::named_by_user(memory::parse_policy(named));
    return c10::make_intrusive<GroupOptions>(
        memory, bootstrap::default_transport(), parse_bytes(staging, "HBMCOMM_STAGING_BYTES"),
        parse_threads(threads), parameter_server, parse_seconds(heartbeat));
  } catch (const Error& error) {
    throw Error(error.kind(),
                std::string(error.what()) + " (from the environment: HBMCOMM_MEMORY=" + memory +
                    ", HBMCOMM_STAGING_BYTES=" + staging + ", HBMCOMM_REDUCE_THREADS=" + threads +
                    ", HBMCOMM_HEARTBEAT_TIMEOUT=" + heartbeat + ")");
  }
}

std::vector<int> GroupOptions::numbers_in_job(int size) const {
  std::vector<int> numbers(global_ranks_in_group.begin(), global_ranks_in_group.end());
  if (numbers.empty()) {
    numbers.resize(static_cast<size_t>(size));
    std::iota(numbers.begin(), numbers.end(), 0);
  }
  return numbers;
}

int64_t parse_bytes(const std::string& text, const std::string& source) {
  size_t digits = 0;
  while (digits < text.size() && std::isdigit(static_cast<unsigned char>(text[digits])) != 0) {
    ++digits;
  }
  const std::string unit = text.substr(digits);
  const int shift = unit.empty()                   ? 0
                    : unit == "K" || unit == "KiB" ? 10
                    : unit == "M" || unit == "MiB" ? 20
                    : unit == "G" || unit == "GiB" ? 30
                                                   : -1;
  if (digits == 0 || digits > 18 || shift < 0) {
    throw Error(ErrorKind::kInvalid,
                source + "=" + text + " is not a number of bytes such as 1073741824, 512M or 1G");
  }
  const int64_t number = std::stoll(text.substr(0, digits));
  if (number > (std::numeric_limits<int64_t>::max() >> shift)) {
    throw Error(ErrorKind::kInvalid, source + "=" + text + " is more than 63 bits hold");
  }
  return number << shift;
}

}  // namespace hbm::process_group
