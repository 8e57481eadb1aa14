#include "process_group/options.h"

#include <cctype>
#include <charconv>
#include <cstdlib>
#include <limits>

#include "base/error.h"

namespace hbm {
namespace {

constexpr int64_t kLeastStagingBytes = 64 << 10;

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

}  // namespace

GroupOptions::GroupOptions(const std::string& memory, int64_t staging,
                           std::optional<int64_t> reduce_threads,
                           const std::string& parameter_server)
    : OptionsBase(kBackendName),
      policy(memory::parse_policy(memory)),
      staging_bytes(static_cast<uint64_t>(staging)),
      parameter_server(parameter_server) {
  if (staging < kLeastStagingBytes) {
    throw Error(ErrorKind::kInvalid, "staging_bytes is " + std::to_string(staging) +
                                         "; the least is " + std::to_string(kLeastStagingBytes));
  }
  if (reduce_threads && *reduce_threads != 1) {
    throw Error(ErrorKind::kUnsupported,
                "reduce_threads=" + std::to_string(*reduce_threads) +
                    ": in this version the thread that drives an operation reduces; use None or 1");
  }
}

GroupOptions::GroupOptions(const GroupOptions& other, const std::string& backend)
    : OptionsBase(backend, other.timeout),
      policy(other.policy),
      staging_bytes(other.staging_bytes),
      parameter_server(other.parameter_server) {
  group_name = other.group_name;
  group_desc = other.group_desc;
  global_ranks_in_group = other.global_ranks_in_group;
}

c10::intrusive_ptr<GroupOptions> GroupOptions::from_environment() {
  const std::string named = environment("HBMCOMM_MEMORY", "");
  const std::string memory = named.empty() ? "preferred" : named;
  const std::string staging = environment("HBMCOMM_STAGING_BYTES", "1G");
  const std::string threads = environment("HBMCOMM_REDUCE_THREADS", "1");
  const std::string parameter_server = environment("HBMCOMM_PARAMETER_SERVER", "");
  try {
    if (!named.empty()) memory::named_by_user(memory::parse_policy(named));
    return c10::make_intrusive<GroupOptions>(memory, parse_bytes(staging, "HBMCOMM_STAGING_BYTES"),
                                             parse_threads(threads), parameter_server);
  } catch (const Error& error) {
    throw Error(error.kind(), std::string(error.what()) +
                                  " (from the environment: HBMCOMM_MEMORY=" + memory +
                                  ", HBMCOMM_STAGING_BYTES=" + staging +
                                  ", HBMCOMM_REDUCE_THREADS=" + threads + ")");
  }
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

}  // namespace hbm
