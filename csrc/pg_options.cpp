#include "pg_options.h"

#include <cctype>
#include <cstdlib>
#include <limits>

#include "base/error.h"

namespace hbm {
namespace {

constexpr uint64_t kDefaultStagingBytes = uint64_t{1} << 30;
constexpr uint64_t kLeastStagingBytes = 64 << 10;

std::string environment(const char* name, const std::string& fallback) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

}  // namespace

GroupOptions::GroupOptions(std::string memory, uint64_t staging, std::optional<int64_t> reduce_threads,
                 std::optional<std::string> parameter_server)
    : c10d::Backend::Options(kBackendName),
      policy(memory::parse_policy(memory)),
      staging_bytes(staging) {
  if (staging_bytes < kLeastStagingBytes) {
    throw Error(ErrorKind::kInvalid, "staging_bytes is " + std::to_string(staging_bytes) +
                                         "; the least is " + std::to_string(kLeastStagingBytes));
  }
  if (reduce_threads && *reduce_threads != 1) {
    throw Error(ErrorKind::kUnsupported,
                "reduce_threads=" + std::to_string(*reduce_threads) +
                    ": in this version the thread that drives an operation reduces; use None or 1");
  }
  if (parameter_server) {
    throw Error(ErrorKind::kUnsupported, "parameter_server=\"" + *parameter_server +
                                             "\": this version has no parameter server; use None");
  }
}

c10::intrusive_ptr<GroupOptions> GroupOptions::from_environment() {
  const uint64_t staging = parse_bytes(
      environment("HBMCOMM_STAGING_BYTES", std::to_string(kDefaultStagingBytes)),
      "HBMCOMM_STAGING_BYTES");
  return c10::make_intrusive<GroupOptions>(environment("HBMCOMM_MEMORY", "preferred"), staging,
                                      std::nullopt, std::nullopt);
}

uint64_t parse_bytes(const std::string& text, const std::string& source) {
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
  const uint64_t number = std::stoull(text.substr(0, digits));
  if (number > (std::numeric_limits<uint64_t>::max() >> shift)) {
    throw Error(ErrorKind::kInvalid, source + "=" + text + " is more than 64 bits hold");
  }
  return number << shift;
}

}  // namespace hbm
