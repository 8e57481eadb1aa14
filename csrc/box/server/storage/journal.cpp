#include "box/server/storage/journal.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>

#include "base/error.h"
#include "base/log.h"
#include "box/server/storage/files.h"

namespace hbm::box {
namespace {

// The file: a JournalHead, then for each record a RecordFrame and what it frames.
struct JournalHead {
  std::array<char, 8> magic{'H', 'B', 'M', 'J', 'O', 'U', 'R', 'N'};
  uint64_t version = 1;
};

struct RecordFrame {
  uint32_t bytes;     // that follow
  uint32_t checksum;  // of `bytes` and of what follows
};

struct Created {
  static constexpr uint64_t kTemporary = 1;

  uint64_t serial;
  uint64_t flags;
  smb::Id key;
  uint64_t size;
  smb::Id session;
  uint64_t number;
};
static_assert(sizeof(Created) == 64);

struct Deleted {
  uint64_t serial;
};
static_assert(sizeof(Deleted) == 8);

// SHA-256's first 32 bits: the box has that library in any case.
uint32_t checksum(uint32_t bytes, const std::byte* record) {
  std::array<std::byte, sizeof(uint32_t) + sizeof(Created)> text;
  std::memcpy(text.data(), &bytes, sizeof bytes);
  std::memcpy(text.data() + sizeof bytes, record, bytes);
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
  if (EVP_Digest(text.data(), sizeof bytes + bytes, digest.data(), nullptr, EVP_sha256(),
                 nullptr) != 1) {
    throw Error(ErrorKind::kUnavailable, "OpenSSL cannot compute SHA-256");
  }
  uint32_t first;
  std::memcpy(&first, digest.data(), sizeof first);
  return first;
}

template <class Record>
std::array<std::byte, sizeof(RecordFrame) + sizeof(Record)> framed(const Record& record) {
  std::array<std::byte, sizeof(RecordFrame) + sizeof(Record)> bytes;
  std::memcpy(bytes.data() + sizeof(RecordFrame), &record, sizeof record);
  const RecordFrame frame{sizeof record,
                          checksum(sizeof record, bytes.data() + sizeof(RecordFrame))};
  std::memcpy(bytes.data(), &frame, sizeof frame);
  return bytes;
}

Created created_of(const JournalEntry& entry) {
  const Creation& creation = entry.creation;
  return {entry.serial,
          creation.temporary ? Created::kTemporary : 0,
          creation.key,
          creation.size,
          creation.creator.session,
          creation.creator.number};
}

JournalEntry entry_of(const Created& created) {
  return {created.serial,
          {created.key,
           created.size,
           (created.flags & Created::kTemporary) != 0,
           {created.session, created.number}}};
}

template <class T>
T get(std::span<const std::byte> from) {
  T value;
  std::memcpy(&value, from.data(), sizeof value);
  return value;
}

std::vector<std::byte> whole_file(const std::string& path) {
  const Descriptor file = open_file(path, O_RDONLY);
  std::vector<std::byte> bytes(file_bytes(file.get(), path));
  bytes.resize(read_file(file.get(), bytes.data(), bytes.size(), path));
  return bytes;
}

}  // namespace

Journal::Contents Journal::read(const std::string& path) {
  Contents contents;
  if (!std::filesystem::exists(path)) return contents;
  const std::vector<std::byte> file = whole_file(path);
  const auto drop = [&](size_t at, const std::string& what) {
    contents.damaged = true;
    log::warn(path + ": dropped " + what + " at byte " + std::to_string(at));
  };
  std::span<const std::byte> rest = file;
  if (rest.size() < sizeof(JournalHead) || get<JournalHead>(rest).magic != JournalHead().magic) {
    drop(0, "all, for it does not start as a journal does");
    return contents;
  }
  if (const uint64_t version = get<JournalHead>(rest).version; version != JournalHead().version) {
    throw Error(ErrorKind::kUnavailable, path + " has version " + std::to_string(version) +
                                             ", this program's is " +
                                             std::to_string(JournalHead().version));
  }
  rest = rest.subspan(sizeof(JournalHead));

  std::map<uint64_t, Creation> live;
  std::map<smb::Id, uint64_t> keys;
  while (!rest.empty()) {
    const size_t at = file.size() - rest.size();
    const bool whole = rest.size() >= sizeof(RecordFrame);
    const RecordFrame frame = whole ? get<RecordFrame>(rest) : RecordFrame{};
    const bool known = frame.bytes == sizeof(Created) || frame.bytes == sizeof(Deleted);
    if (!known || rest.size() < sizeof(RecordFrame) + frame.bytes) {
      drop(at, "the last " + std::to_string(rest.size()) + " bytes, a record that was torn");
      break;
    }
    const auto record = rest.subspan(sizeof(RecordFrame), frame.bytes);
    rest = rest.subspan(sizeof(RecordFrame) + frame.bytes);
    if (checksum(frame.bytes, record.data()) != frame.checksum) {
      drop(at, "a record whose checksum is wrong");
    } else if (frame.bytes == sizeof(Deleted)) {
      live.erase(get<Deleted>(record).serial);
    } else {
      const JournalEntry entry = entry_of(get<Created>(record));
      // A key is created again only after its end, whose record must have been dropped.
      if (const auto older = keys.find(entry.creation.key); older != keys.end()) {
        live.erase(older->second);
      }
      live.insert_or_assign(entry.serial, entry.creation);
      keys.insert_or_assign(entry.creation.key, entry.serial);
    }
  }
  for (const auto& [serial, creation] : live) contents.live.push_back({serial, creation});
  return contents;
}

Journal::Journal(const std::string& path, bool sync, const std::vector<JournalEntry>& live)
    : path_(path), sync_(sync), named_(!sync) {
  const std::string fresh = path + ".new";
  file_ = open_file(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND);
  std::vector<std::byte> bytes(sizeof(JournalHead));
  const JournalHead head;
  std::memcpy(bytes.data(), &head, sizeof head);
  for (const JournalEntry& entry : live) {
    const auto record = framed(created_of(entry));
    bytes.insert(bytes.end(), record.begin(), record.end());
  }
  write_file(file_.get(), bytes.data(), bytes.size(), fresh);
  if (sync) sync_file(file_.get(), fresh);
  replace_file(fresh, path, false);  // the last that fails: the old journal is gone from here on
  size_ = bytes.size();
  records_ = live.size();
}

void Journal::created(const JournalEntry& entry) { append(framed(created_of(entry))); }

void Journal::deleted(uint64_t serial) { append(framed(Deleted{serial})); }

void Journal::append(std::span<const std::byte> record) {
  if (!named_) sync_directory(std::filesystem::path(path_).parent_path());
  named_ = true;
  try {
    write_file(file_.get(), record.data(), record.size(), path_);
    if (sync_) sync_file(file_.get(), path_);
  } catch (const Error&) {
    // Half a record would hide all that come after it.
    resize_file(file_.get(), size_, path_);
    throw;
  }
  size_ += record.size();
  ++records_;
}

}  // namespace hbm::box
