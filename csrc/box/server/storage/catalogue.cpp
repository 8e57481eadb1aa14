#include "box/server/storage/catalogue.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <type_traits>

#include "base/error.h"
#include "base/log.h"
#include "box/server/storage/checked_number.h"
#include "box/server/storage/files.h"

namespace hbm::box::server::storage {
namespace {

// The file format: a CatalogueHead, then the records.
struct CatalogueHead {
  std::array<char, 8> magic{'H', 'B', 'M', 'J', 'O', 'U', 'R', 'N'};
  uint64_t version = 2;
  protocol::Id generation;  // of the store
  uint64_t check = 0;       // checksum of the fields above
};
static_assert(sizeof(CatalogueHead) == 40);

struct CatalogueRecord {
  static constexpr uint64_t kTemporary = 1, kDeleted = 2;

  uint64_t serial = 0;
  uint64_t flags = 0;
  protocol::Id key;
  uint64_t size = 0;
  protocol::Id session;
  uint64_t number = 0;
  uint64_t check = 0;  // checksum of the fields above, and of the previous record's `check`
};
static_assert(sizeof(CatalogueRecord) == 72 && std::is_trivially_copyable_v<CatalogueRecord>);

constexpr uint64_t kSector = 512;  // bytes that a disk writes atomically

template <class Checked>
uint64_t check_of(uint64_t before, Checked checked) {
  checked.check = 0;
  return checksum(before, checked);
}

CatalogueHead head_of(const protocol::Id& generation) {
  CatalogueHead head;
  head.generation = generation;
  head.check = check_of(0, head);
  return head;
}

CatalogueRecord record_of(const CatalogueEntry& entry, bool deletion, uint64_t before) {
  const Creation& creation = entry.creation;
  CatalogueRecord record{.serial = entry.serial,
                         .flags = (creation.temporary ? CatalogueRecord::kTemporary : 0) |
                                  (deletion ? CatalogueRecord::kDeleted : 0),
                         .key = creation.key,
                         .size = creation.size,
                         .session = creation.creator.session,
                         .number = creation.creator.number};
  record.check = check_of(before, record);
  return record;
}

Creation creation_of(const CatalogueRecord& record) {
  return {record.key,
          record.size,
          (record.flags & CatalogueRecord::kTemporary) != 0,
          {record.session, record.number}};
}

template <class T>
T get(std::span<const std::byte> from) {
  T value;
  std::memcpy(&value, from.data(), sizeof value);
  return value;
}

uint64_t bytes_before(uint64_t record) {
  return sizeof(CatalogueHead) + record * sizeof(CatalogueRecord);
}

// Returns true if the bytes from `at` on can be a torn write. A torn write leaves a record that is
// too short, or only zeros from a sector boundary on. The zeros appear if the size of the file
// reached the disk before the data. REQUIRES: no complete record begins at `at`.
bool torn(std::span<const std::byte> file, uint64_t at) {
  if (file.size() - at < sizeof(CatalogueRecord)) return true;
  const uint64_t sector = (at + kSector - 1) / kSector * kSector;
  const auto zeros = file.subspan(sector < at + sizeof(CatalogueRecord) ? sector : at);
  return std::all_of(zeros.begin(), zeros.end(), [](std::byte b) { return b == std::byte{}; });
}

uint64_t require_head(const std::string& path, std::span<const std::byte> file,
                      const protocol::Id& generation) {
  const bool whole = file.size() >= sizeof(CatalogueHead);
  const CatalogueHead head = whole ? get<CatalogueHead>(file) : CatalogueHead();
  if (!whole || head.magic != CatalogueHead().magic) {
    throw damaged(path, "it does not start as a catalogue does");
  }
  if (head.version != CatalogueHead().version) {
    throw Error(ErrorKind::kUnavailable, path + " has version " + std::to_string(head.version) +
                                             ", this program's is " +
                                             std::to_string(CatalogueHead().version));
  }
  if (head.check != check_of(0, head)) throw damaged(path, "the checksum of its head is wrong");
  if (head.generation != generation) throw damaged(path, "it belongs to another store");
  return head.check;
}

}  // namespace

Catalogue::Contents Catalogue::read(const std::string& path, const protocol::Id& generation) {
  if (!std::filesystem::exists(path)) throw damaged(path, "it is missing");
  const std::vector<std::byte> bytes = whole_file(path);
  const std::span<const std::byte> file = bytes;
  Contents read;
  read.check = require_head(path, file, generation);

  std::map<uint64_t, Creation> live;
  for (uint64_t at; (at = bytes_before(read.records)) < file.size(); ++read.records) {
    const bool whole = file.size() - at >= sizeof(CatalogueRecord);
    const CatalogueRecord record =
        whole ? get<CatalogueRecord>(file.subspan(at)) : CatalogueRecord();
    if (!whole || record.check != check_of(read.check, record)) {
      read.torn = torn(file, at);
      if (read.torn) break;
      throw damaged(path, "the checksum of the record at byte " + std::to_string(at) +
                              " is wrong, and it is not the last one, or not half written");
    }
    read.check = record.check;
    if ((record.flags & CatalogueRecord::kDeleted) != 0) {
      live.erase(record.serial);
      read.deleted.insert(record.serial);
    } else {
      live.insert_or_assign(record.serial, creation_of(record));
      read.deleted.erase(record.serial);
    }
  }
  for (const auto& [serial, creation] : live) read.live.push_back({serial, creation});
  return read;
}

Catalogue::Catalogue(const std::string& path, const protocol::Id& generation, bool sync,
                     const std::vector<CatalogueEntry>& live, const std::set<uint64_t>& deleted)
    : path_(path), sync_(sync), named_(!sync) {
  const std::string fresh = path + ".new";
  try {
    file_ = open_file(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND);
    std::vector<std::byte> bytes;
    const auto add = [&](const auto& checked) {
      const auto more = std::as_bytes(std::span(&checked, 1));
      bytes.insert(bytes.end(), more.begin(), more.end());
      check_ = checked.check;
    };
    add(head_of(generation));
    for (const CatalogueEntry& entry : live) add(record_of(entry, false, check_));
    for (const uint64_t serial : deleted) add(record_of({serial, {}}, true, check_));
    write_file(file_.get(), bytes.data(), bytes.size(), fresh);
    sync_file(file_.get(), fresh);
    replace_file(fresh, path, false);  // the last call that can fail: it replaces the old catalogue
  } catch (...) {
    std::error_code ignored;
    if (file_) std::filesystem::remove(fresh, ignored);
    throw;
  }
  records_ = live.size() + deleted.size();
}

Catalogue::Catalogue(const std::string& path, bool sync, const Contents& left)
    : path_(path),
      sync_(sync),
      named_(!sync),
      file_(open_file(path, O_WRONLY | O_APPEND)),
      records_(left.records),
      check_(left.check) {
  resize_file(file_.get(), bytes_before(records_), path_);
}

void Catalogue::created(const CatalogueEntry& entry) { append(entry, false); }

void Catalogue::deleted(uint64_t serial) { append({serial, {}}, true); }

void Catalogue::append(const CatalogueEntry& entry, bool deletion) {
  if (!named_) sync_directory(std::filesystem::path(path_).parent_path());
  named_ = true;
  const CatalogueRecord record = record_of(entry, deletion, check_);
  try {
    write_file(file_.get(), &record, sizeof record, path_);
    if (sync_) sync_file(file_.get(), path_);
  } catch (const Error&) {
    // An incomplete record would hide all records after it.
    resize_file(file_.get(), bytes_before(records_), path_);
    throw;
  }
  check_ = record.check;
  ++records_;
}

}  // namespace hbm::box::server::storage
