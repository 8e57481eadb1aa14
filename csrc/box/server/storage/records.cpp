#include "box/server/storage/records.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <new>

#include "base/error.h"
#include "base/log.h"
#include "box/server/storage/files.h"

namespace hbm::box::server::storage {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHead = kPage;  // bytes of a file before its first record

// Begins each of the two files.
struct RecordsHead {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t record_bytes;
  protocol::Id generation;  // of the store
  RecordSizes sizes;
  uint64_t check;  // checksum of the fields above
};
static_assert(sizeof(RecordsHead) == 56);
constexpr std::array<char, 8> kSessions = {'H', 'B', 'M', 'S', 'E', 'S', 'S', 'N'};
constexpr std::array<char, 8> kOperations = {'H', 'B', 'M', 'O', 'P', 'E', 'R', 'N'};
constexpr uint32_t kVersion = 3;

uint64_t to_pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// The layout of an operation: record and parts, padded to pages, then the undo buffers.
uint64_t record_bytes(const RecordSizes& sizes) {
  return to_pages(sizeof(OperationRecord) + sizes.parts * sizeof(PartProgress));
}
uint64_t operation_bytes(const RecordSizes& sizes) {
  return record_bytes(sizes) + uint64_t{sizes.parts} * sizes.chunk;
}
uint64_t operations_bytes(const RecordSizes& sizes) {
  return kHead + sizes.operations * operation_bytes(sizes);
}
uint64_t sessions_bytes(const RecordSizes& sizes) {
  return to_pages(kHead + sizes.sessions * sizeof(SessionRecord));
}

uint64_t check_of(RecordsHead head) {
  head.check = 0;
  return checksum(0, head);
}

RecordsHead head_of(const std::array<char, 8>& magic, const protocol::Id& generation,
                    const RecordSizes& sizes) {
  const bool sessions = magic == kSessions;
  const size_t bytes = sessions ? sizeof(SessionRecord) : sizeof(OperationRecord);
  RecordsHead head{.magic = magic,
                   .version = kVersion,
                   .record_bytes = static_cast<uint32_t>(bytes),
                   .generation = generation,
                   .sizes = sizes,
                   .check = 0};
  head.check = check_of(head);
  return head;
}

MappedRegion open_checked(const std::string& path, const std::array<char, 8>& magic,
                          const protocol::Id& generation) {
  if (!std::filesystem::exists(path)) throw damaged(path, "it is missing");
  MappedRegion region = MappedRegion::open(path);
  if (region.size() < kHead) {
    throw damaged(path, "it has " + std::to_string(region.size()) + " bytes");
  }
  const RecordsHead& head = *reinterpret_cast<const RecordsHead*>(region.base());
  if (head.magic != magic) throw damaged(path, "it does not start as it should");
  if (head.check != check_of(head)) throw damaged(path, "the checksum of its head is wrong");
  const RecordsHead wanted = head_of(magic, generation, head.sizes);
  if (head.generation != generation) throw damaged(path, "it belongs to another store");
  if (head.version != wanted.version || head.record_bytes != wanted.record_bytes) {
    throw Error(ErrorKind::kUnavailable, path + " has version " + std::to_string(head.version) +
                                             ", this program's is " + std::to_string(kVersion));
  }
  const uint64_t bytes =
      magic == kSessions ? sessions_bytes(head.sizes) : operations_bytes(head.sizes);
  if (region.size() != bytes) {
    throw damaged(path, "it has " + std::to_string(region.size()) + " bytes instead of " +
                            std::to_string(bytes));
  }
  return region;
}

constexpr const char* kUnsound = " is not as any box leaves it";

std::string session_text(size_t index) { return "the record of session " + std::to_string(index); }
std::string operation_text(size_t index) {
  return "the record of operation " + std::to_string(index);
}

}  // namespace

bool SessionRecord::sound() const noexcept {
  if (!used.sound() || used > 1) return false;
  if (used == 0) return true;
  if (check != checksum(0, id) || !applied.sound()) return false;
  const uint64_t last = applied;
  const uint64_t kept = std::min<uint64_t>(last, protocol::kSequencedInFlight - 1);
  for (uint64_t number = last - kept + 1; number <= last; ++number) {
    const RequestOutcome& one = outcomes[number % protocol::kSequencedInFlight];
    if (one.number != number || one.check != check_of(one)) return false;
  }
  return true;
}

bool OperationRecord::sound(const PartProgress* progress, uint32_t most_parts) const noexcept {
  if (!active.sound() || active > 1) return false;
  if (active == 0) return true;
  if (check != check_of() || what.parts > most_parts) return false;
  return std::all_of(progress, progress + what.parts,
                     [](const PartProgress& part) { return part.progress.sound(); });
}

Records::Records(const RecordSizes& sizes, RecordsLocation location, MappedRegion sessions,
                 MappedRegion operations)
    : sizes_(sizes),
      location_(std::move(location)),
      sessions_(std::move(sessions)),
      operations_(std::move(operations)) {
  for (uint32_t i = sizes_.sessions; i-- > 0;) {
    if (session(i).used.load(std::memory_order_acquire) == 0) free_sessions_.push_back(i);
  }
  if (!operations_) return;
  for (uint32_t i = sizes_.operations; i-- > 0;) {
    const OperationRecord& operation = *recorded(i).operation;
    if (operation.active.load(std::memory_order_acquire) == 0) free_operations_.push_back(i);
  }
}

std::unique_ptr<Records> Records::in_memory(const RecordSizes& sizes) {
  return std::unique_ptr<Records>(
      new Records(sizes, {}, MappedRegion::in_memory(sessions_bytes(sizes)), MappedRegion()));
}

std::unique_ptr<Records> Records::create(const RecordsLocation& location, const RecordSizes& sizes,
                                         const Records* kept) {
  std::vector<SessionRecord*> back;
  if (kept != nullptr) back = kept->sessions();
  RecordSizes enough = sizes;
  enough.sessions = std::max<uint32_t>(sizes.sessions, static_cast<uint32_t>(back.size()));

  const std::string new_sessions = location.sessions() + ".new";
  const std::string new_operations = location.operations() + ".new";
  try {
    MappedRegion sessions = MappedRegion::create(new_sessions, sessions_bytes(enough));
    MappedRegion operations = MappedRegion::create(new_operations, operations_bytes(enough));
    new (sessions.base()) RecordsHead(head_of(kSessions, location.generation, enough));
    new (operations.base()) RecordsHead(head_of(kOperations, location.generation, enough));
    auto* const records = reinterpret_cast<SessionRecord*>(sessions.base() + kHead);
    for (size_t i = 0; i < back.size(); ++i) {
      records[i].id = back[i]->id;
      records[i].check = back[i]->check;
      std::copy(std::begin(back[i]->outcomes), std::end(back[i]->outcomes), records[i].outcomes);
      records[i].applied = back[i]->applied.load();
      records[i].used = 1;
    }
    // If the process stops between the two renames, the new `sessions` and the old `operations` fit
    // together, because no operation is in progress.
    replace_file(new_sessions, location.sessions(), true);
    replace_file(new_operations, location.operations(), true);
    return std::unique_ptr<Records>(
        new Records(enough, location, std::move(sessions), std::move(operations)));
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(new_sessions, ignored);
    std::filesystem::remove(new_operations, ignored);
    throw;
  }
}

std::unique_ptr<Records> Records::open_existing(const RecordsLocation& location) {
  MappedRegion sessions = open_checked(location.sessions(), kSessions, location.generation);
  MappedRegion operations = open_checked(location.operations(), kOperations, location.generation);
  RecordSizes sizes = reinterpret_cast<const RecordsHead*>(operations.base())->sizes;
  sizes.sessions = reinterpret_cast<const RecordsHead*>(sessions.base())->sizes.sessions;
  return std::unique_ptr<Records>(
      new Records(sizes, location, std::move(sessions), std::move(operations)));
}

void Records::require_sound() const {
  for (uint32_t i = 0; i < sizes_.sessions; ++i) {
    if (!session(i).sound()) throw damaged(location_.sessions(), session_text(i) + kUnsound);
  }
  for (uint32_t i = 0; i < sizes_.operations; ++i) {
    const Recorded one = recorded(i);
    if (!one.operation->sound(one.parts, sizes_.parts)) {
      throw damaged(location_.operations(), operation_text(i) + kUnsound);
    }
  }
}

void Records::drop_unsound() {
  for (uint32_t i = 0; i < sizes_.sessions; ++i) {
    if (session(i).sound()) continue;
    log::error(session_text(i) + kUnsound + ": its client has to start a new session");
    if (session(i).used != 0) {
      release_session(session(i));
    } else {
      session(i).used = 0;  // free, with a correct checksum now
    }
  }
  for (uint32_t i = 0; i < sizes_.operations; ++i) {
    const Recorded one = recorded(i);
    if (one.operation->sound(one.parts, sizes_.parts)) continue;
    log::error(operation_text(i) + kUnsound + ": it may have been executed in part");
    if (one.operation->active != 0) {
      release(one);
    } else {
      one.operation->active = 0;
    }
  }
}

SessionRecord& Records::session(uint32_t index) const {
  return reinterpret_cast<SessionRecord*>(sessions_.base() + kHead)[index];
}

Recorded Records::recorded(uint32_t index) const {
  std::byte* const at = operations_.base() + kHead + index * operation_bytes(sizes_);
  return {reinterpret_cast<OperationRecord*>(at),
          reinterpret_cast<PartProgress*>(at + sizeof(OperationRecord)), at + record_bytes(sizes_)};
}

void Records::mark_failed() {
  {
    const std::lock_guard lock(mutex_);
    failed_ = true;
  }
  operation_freed_.notify_all();
}

void Records::require_disk() const {
  if (!failed_) return;
  throw Error(ErrorKind::kUnavailable,
              "the disk of the store failed before: no request can be executed; restart "
              "the box when the disk is well");
}

void Records::save(const void* at, uint64_t bytes) {
  if (!location_.sync) return;
  try {
    persist(at, bytes);
  } catch (const Error&) {
    mark_failed();
    throw;
  }
}

SessionRecord& Records::open_session(const protocol::Id& id) {
  SessionRecord& opened = take_session();
  opened.id = id;
  opened.check = checksum(0, id);
  opened.applied.store(0, std::memory_order_relaxed);
  std::fill(std::begin(opened.outcomes), std::end(opened.outcomes), RequestOutcome());
  opened.used.store(1, std::memory_order_release);
  try {
    save(&opened, sizeof opened);
  } catch (const Error&) {
    release_session(opened);
    throw;
  }
  return opened;
}

SessionRecord& Records::take_session() {
  const std::lock_guard lock(mutex_);
  if (free_sessions_.empty()) {
    throw Error(ErrorKind::kExhausted, "the box has all of its " + std::to_string(sizes_.sessions) +
                                           " sessions; close clients, or start it with more");
  }
  SessionRecord& taken = session(free_sessions_.back());
  free_sessions_.pop_back();
  return taken;
}

void Records::release_session(SessionRecord& session) {
  const std::lock_guard lock(mutex_);
  session.used.store(0, std::memory_order_release);
  free_sessions_.push_back(static_cast<uint32_t>(&session - &this->session(0)));
}

std::vector<SessionRecord*> Records::sessions() const {
  std::vector<SessionRecord*> used;
  for (uint32_t i = 0; i < sizes_.sessions; ++i) {
    if (session(i).used.load(std::memory_order_acquire) != 0) used.push_back(&session(i));
  }
  return used;
}

void Records::finish(SessionRecord& session, const RequestOutcome& outcome) {
  require_disk();
  RequestOutcome& kept = session.outcomes[outcome.number % protocol::kSequencedInFlight];
  kept = outcome;
  kept.check = session.check_of(kept);
  save(&kept, sizeof kept);
  session.applied.store(outcome.number, std::memory_order_release);
  save(&session.applied, sizeof session.applied);
}

Recorded Records::begin(const SessionRecord& session, const BoxOperation& operation) {
  if (!operations_) return {};
  uint32_t index;
  {
    std::unique_lock lock(mutex_);
    operation_freed_.wait(lock, [this] { return !free_operations_.empty() || failed_; });
    require_disk();
    index = free_operations_.back();
    free_operations_.pop_back();
  }
  const Recorded begun = recorded(index);
  OperationRecord& record = *begun.operation;
  record.what = operation;
  record.session = static_cast<uint64_t>(&session - &this->session(0));
  record.session_id = session.id;
  record.check = record.check_of();
  for (uint32_t i = 0; i < operation.parts; ++i) {
    begun.parts[i].progress.store(0, std::memory_order_relaxed);
  }
  save(&record, record_bytes(sizes_));
  record.active.store(1, std::memory_order_release);
  save(&record.active, sizeof record.active);
  return begun;
}

void Records::release(const Recorded& recorded) {
  if (recorded.operation == nullptr) return;
  recorded.operation->active.store(0, std::memory_order_release);
  const auto* const first = operations_.base() + kHead;
  const auto* const at = reinterpret_cast<const std::byte*>(recorded.operation);
  const auto index = static_cast<uint32_t>((at - first) / operation_bytes(sizes_));
  {
    const std::lock_guard lock(mutex_);
    free_operations_.push_back(index);
  }
  operation_freed_.notify_one();
}

std::vector<Recorded> Records::begun() const {
  std::vector<Recorded> found;
  for (uint32_t i = 0; operations_ && i < sizes_.operations; ++i) {
    const Recorded one = recorded(i);
    if (one.operation->active.load(std::memory_order_acquire) != 0) found.push_back(one);
  }
  return found;
}

SessionRecord* Records::session_of(const OperationRecord& operation) const {
  if (operation.session >= sizes_.sessions) return nullptr;
  SessionRecord& found = session(operation.session);
  const bool same =
      found.used.load(std::memory_order_acquire) != 0 && found.id == operation.session_id;
  return same ? &found : nullptr;
}

}  // namespace hbm::box::server::storage
