#include "communicator/mpi/environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

namespace hbm::communicator::mpi {
namespace {

// A variable, and its value during MPI_Init; null: unset.
struct Override {
  const char* name;
  const char* value;
};

constexpr std::array kOverrides = {
    Override{"PMI_FD", nullptr},
    Override{"PMI_RANK", nullptr},
    Override{"PMI_SIZE", nullptr},
    Override{"PMI_PORT", nullptr},
    Override{"PMI_ID", nullptr},
    Override{"PMI_LOCAL_RANK", nullptr},
    Override{"PMIX_NAMESPACE", nullptr},
    Override{"MPIR_CVAR_PMI_VERSION", "1"},    // the responder's version
    Override{"MPIR_CVAR_CH4_NUM_VCIS", "1"},   // MPICH 5.0.2 hangs with more
    Override{"UCX_POSIX_USE_PROC_LINK", "y"},  // otherwise files stay in /dev/shm
};

constexpr std::array<std::string_view, 9> kRiskyPrefixes = {
    "FI_", "HFI_", "I_MPI_", "MPICH_", "MPIR_CVAR_", "MPIR_PARAM_", "PSM2_", "PSM3_", "UCX_"};

// Values that work on every machine. hbm sets the first two, and recommends the third, which means
// the same as the fourth.
constexpr std::array<std::string_view, 4> kHarmless = {"UCX_TLS=^cma", "UCX_TLS=^sm",
                                                       "UCX_TLS=tcp,self", "UCX_TLS=self,tcp"};

void set_or_unset(const char* name, const char* value) {
  if (value != nullptr) {
    setenv(name, value, 1);
  } else {
    unsetenv(name);
  }
}

bool is_risky(std::string_view entry) {
  const std::string_view name = entry.substr(0, entry.find('='));
  const auto begins = [&](std::string_view prefix) { return name.starts_with(prefix); };
  const auto overridden = [&](const Override& variable) { return name == variable.name; };
  return std::any_of(kRiskyPrefixes.begin(), kRiskyPrefixes.end(), begins) &&
         std::none_of(kOverrides.begin(), kOverrides.end(), overridden) &&
         std::find(kHarmless.begin(), kHarmless.end(), entry) == kHarmless.end() &&
         entry != "UCX_TLS=";
}

}  // namespace

StartEnvironment::StartEnvironment() {
  for (const auto& [name, value] : kOverrides) {
    const char* const found = std::getenv(name);
    before_.emplace_back(name, found != nullptr ? std::optional<std::string>(found) : std::nullopt);
    set_or_unset(name, value);
  }
}

StartEnvironment::~StartEnvironment() {
  for (const auto& [name, value] : before_) set_or_unset(name, value ? value->c_str() : nullptr);
}

void set_transport_defaults(bool shares_memory) {
  const char* const chosen = std::getenv("UCX_TLS");
  if (chosen == nullptr || *chosen == '\0') setenv("UCX_TLS", shares_memory ? "^cma" : "^sm", 1);
}

std::string risky_variables() {
  std::vector<std::string> found;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (is_risky(*entry)) found.emplace_back(*entry);
  }
  std::sort(found.begin(), found.end());
  std::string text;
  for (const std::string& entry : found) text += (text.empty() ? "" : " ") + entry;
  return text;
}

}  // namespace hbm::communicator::mpi
