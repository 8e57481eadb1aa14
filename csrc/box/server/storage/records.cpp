#include "box/server/storage/records.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <new>

#include "base/error.h"
#include "box/server/storage/files.h"

namespace hbm::box {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHead = kPage;  // bytes of a file before its first record

// Heads each of the two files.
struct RecordsHead {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t record_bytes;
  RecordSizes sizes;
};
constexpr std::array<char, 8> kSessions = {'H', 'B', 'M', 'S', 'E', 'S', 'S', 'N'};
constexpr std::array<char, 8> kOperations = {'H', 'B', 'M', 'O', 'P', 'E', 'R', 'N'};
constexpr uint32_t kVersion = 2;

uint64_t to_pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// An operation: its record and its lanes, from page to page, then the undo buffers.
uint64_t record_bytes(const RecordSizes& sizes) {
  return to_pages(sizeof(OperationRecord) + sizes.lanes * sizeof(LaneProgress));
}
uint64_t operation_bytes(const RecordSizes& sizes) {
  return record_bytes(sizes) + uint64_t{sizes.lanes} * sizes.chunk;
}
uint64_t operations_bytes(const RecordSizes& sizes) {
  return kHead + sizes.operations * operation_bytes(sizes);
}
uint64_t sessions_bytes(const RecordSizes& sizes) {
  return to_pages(kHead + sizes.sessions * sizeof(SessionRecord));
}

RecordsHead head_of(const std::array<char, 8>& magic, const RecordSizes& sizes) {
  const bool sessions = magic == kSessions;
  const size_t bytes = sessions ? sizeof(SessionRecord) : sizeof(OperationRecord);
  return {magic, kVersion, static_cast<uint32_t>(bytes), sizes};
}

MappedRegion open_checked(const std::string& path, const std::array<char, 8>& magic) {
  MappedRegion region = MappedRegion::open(path);
  const auto damaged = [&](const std::string& found) {
    return Error(ErrorKind::kUnavailable,
                 path + " cannot be used: " + found +
                     "; without it, restart with an empty directory, or restore a copy");
  };
  if (region.size() < kHead) throw damaged("it has " + std::to_string(region.size()) + " bytes");
  const RecordsHead& head = *reinterpret_cast<const RecordsHead*>(region.base());
  const RecordsHead wanted = head_of(magic, head.sizes);
  if (head.magic != wanted.magic) throw damaged("it is damaged, or another file");
  if (head.version != wanted.version || head.record_bytes != wanted.record_bytes) {
    throw damaged("its version is " + std::to_string(head.version) + ", this program's is " +
                  std::to_string(kVersion));
  }
  const RecordSizes& sizes = head.sizes;
  const bool sane = sizes.chunk > 0 && sizes.chunk % kPage == 0 && sizes.lanes > 0;
  const uint64_t bytes = magic == kSessions ? sessions_bytes(sizes) : operations_bytes(sizes);
  if (!sane || region.size() != bytes) throw damaged("it is damaged: its sizes do not fit");
  return region;
}

}  // namespace

Records::Records(const RecordSizes& sizes, bool sync, MappedRegion sessions,
                 MappedRegion operations)
    : sizes_(sizes),
      sync_(sync),
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
      new Records(sizes, false, MappedRegion::in_memory(sessions_bytes(sizes)), MappedRegion()));
}

std::unique_ptr<Records> Records::create(const std::string& directory, bool sync,
                                         const RecordSizes& sizes, const Records* kept) {
  std::vector<SessionRecord*> back;
  if (kept != nullptr) back = kept->sessions();
  RecordSizes enough = sizes;
  enough.sessions = std::max<uint32_t>(sizes.sessions, static_cast<uint32_t>(back.size()));

  const std::string sessions = directory + "/sessions";
  const std::string operations = directory + "/operations";
  MappedRegion new_sessions = MappedRegion::create(sessions + ".new", sessions_bytes(enough));
  MappedRegion new_operations = MappedRegion::create(operations + ".new", operations_bytes(enough));
  new (new_sessions.base()) RecordsHead(head_of(kSessions, enough));
  new (new_operations.base()) RecordsHead(head_of(kOperations, enough));
  auto* const records = reinterpret_cast<SessionRecord*>(new_sessions.base() + kHead);
  for (size_t i = 0; i < back.size(); ++i) {
    records[i].id = back[i]->id;
    std::copy(std::begin(back[i]->outcomes), std::end(back[i]->outcomes), records[i].outcomes);
    records[i].applied.store(back[i]->applied.load(std::memory_order_acquire),
                             std::memory_order_release);
    records[i].used.store(1, std::memory_order_release);
  }
  replace_file(sessions + ".new", sessions, sync);
  replace_file(operations + ".new", operations, sync);
  return std::unique_ptr<Records>(
      new Records(enough, sync, std::move(new_sessions), std::move(new_operations)));
}

std::unique_ptr<Records> Records::left_in(const std::string& directory, bool sync) {
  const std::string sessions = directory + "/sessions";
  const std::string operations = directory + "/operations";
  // They were made in this order; without the second no operation has begun.
  if (!std::filesystem::exists(sessions) || !std::filesystem::exists(operations)) return nullptr;
  MappedRegion old_sessions = open_checked(sessions, kSessions);
  MappedRegion old_operations = open_checked(operations, kOperations);
  RecordSizes sizes = reinterpret_cast<const RecordsHead*>(old_operations.base())->sizes;
  sizes.sessions = reinterpret_cast<const RecordsHead*>(old_sessions.base())->sizes.sessions;
  return std::unique_ptr<Records>(
      new Records(sizes, sync, std::move(old_sessions), std::move(old_operations)));
}

SessionRecord& Records::session(uint32_t index) const {
  return reinterpret_cast<SessionRecord*>(sessions_.base() + kHead)[index];
}

Recorded Records::recorded(uint32_t index) const {
  std::byte* const at = operations_.base() + kHead + index * operation_bytes(sizes_);
  return {reinterpret_cast<OperationRecord*>(at),
          reinterpret_cast<LaneProgress*>(at + sizeof(OperationRecord)), at + record_bytes(sizes_)};
}

void Records::give_up() {
  {
    const std::lock_guard lock(mutex_);
    failed_ = true;
  }
  operation_freed_.notify_all();
}

void Records::require_disk() const {
  if (!failed_) return;
  throw Error(ErrorKind::kUnavailable,
              "the disk of the store failed before: nothing can be carried out any more; restart "
              "the box when the disk is well");
}

void Records::save(const void* at, uint64_t bytes) {
  if (!sync_) return;
  try {
    persist(at, bytes);
  } catch (const Error&) {
    give_up();
    throw;
  }
}

SessionRecord& Records::open_session(const smb::Id& id) {
  SessionRecord& opened = take_session();
  opened.id = id;
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
  RequestOutcome& kept = session.outcomes[outcome.number % smb::kWindow];
  kept = outcome;
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
  record.session = static_cast<uint32_t>(&session - &this->session(0));
  record.session_id = session.id;
  for (uint32_t i = 0; i < operation.lanes; ++i) {
    begun.lanes[i].progress.store(0, std::memory_order_relaxed);
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

}  // namespace hbm::box
