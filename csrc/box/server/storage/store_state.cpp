#include "box/server/storage/store_state.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "box/server/storage/files.h"

namespace hbm::box::server::storage {
namespace {

struct StateSector {
  std::array<char, 8> magic{'H', 'B', 'M', 'S', 'T', 'A', 'T', 'E'};
  protocol::Id generation;
  StoreState::Phase phase{};
  uint32_t sync = 0;
  std::array<char, 64> boot{};
  Digest checksums{};
  std::array<std::byte, 352> reserved{};
  Digest own{};  // digest of the fields above
};
static_assert(sizeof(StateSector) == 512 && std::is_trivially_copyable_v<StateSector>);

Digest own_digest(const StateSector& sector) {
  return digest_of(std::as_bytes(std::span(&sector, 1)).first(offsetof(StateSector, own)));
}

StateSector sector_of(const protocol::Id& generation, const StoreState& state) {
  StateSector sector;
  sector.generation = generation;
  sector.phase = state.phase;
  sector.sync = state.sync ? 1 : 0;
  std::copy_n(state.boot.begin(), std::min(state.boot.size(), sector.boot.size() - 1),
              sector.boot.begin());
  sector.checksums = state.checksums;
  sector.own = own_digest(sector);
  return sector;
}

}  // namespace

StoreState read_state(const std::string& path, const protocol::Id& generation) {
  const std::vector<std::byte> bytes = whole_file(path);
  if (bytes.size() != sizeof(StateSector)) {
    throw damaged(path, "it has " + std::to_string(bytes.size()) + " bytes instead of " +
                            std::to_string(sizeof(StateSector)));
  }
  StateSector sector;
  std::memcpy(&sector, bytes.data(), sizeof sector);
  if (sector.own != own_digest(sector)) throw damaged(path, "its checksum is wrong");
  if (sector.generation != generation) throw damaged(path, "it belongs to another store");
  return {sector.phase, sector.sync != 0, sector.boot.data(), sector.checksums};
}

void make_state(const std::string& path, const protocol::Id& generation, const StoreState& state) {
  const StateSector sector = sector_of(generation, state);
  {
    const Descriptor fresh = open_file(path + ".new", O_WRONLY | O_CREAT | O_TRUNC);
    write_file(fresh.get(), &sector, sizeof sector, path);
  }
  replace_file(path + ".new", path, true);
}

void write_state(const std::string& path, const protocol::Id& generation, const StoreState& state) {
  const StateSector sector = sector_of(generation, state);
  const Descriptor file = open_file(path, O_WRONLY);
  write_file(file.get(), &sector, sizeof sector, path);
  sync_file(file.get(), path);
}

}  // namespace hbm::box::server::storage
