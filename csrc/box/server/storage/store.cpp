#include "box/server/storage/store.h"

#include <fcntl.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "box/protocol/proof.h"
#include "box/server/storage/files.h"
#include "box/server/storage/recovery.h"
#include "box/server/storage/segment.h"

namespace hbm::box {
namespace {

uint64_t bytes_of(const std::string& path) {
  return file_bytes(open_file(path, O_RDONLY).get(), path);
}

}  // namespace

std::unique_ptr<Store> Store::open(const StoreOptions& options,
                                   std::shared_ptr<memory::Pool> pool) {
  std::unique_ptr<Store> store(new Store(options, std::move(pool)));
  if (store->durable()) {
    store->load();
  } else {
    store->contents_ = smb::random_id();
    store->records_ = Records::in_memory(options.records);
  }
  return store;
}

Store::Store(const StoreOptions& options, std::shared_ptr<memory::Pool> pool)
    : options_(options), pool_(std::move(pool)) {}

Store::~Store() = default;

void Store::load() {
  directory_ = std::make_unique<Directory>(options_.directory, options_.sync);
  contents_ = directory_->contents();
  Journal::Contents journal = Journal::read(directory_->journal());
  std::map<uint64_t, std::string> files = directory_->segment_files();

  next_serial_ = directory_->last_serial() + 1;
  std::vector<JournalEntry> live;
  for (const JournalEntry& entry : journal.live) {
    const auto [serial, creation] = entry;
    const auto file = files.find(serial);
    if (file == files.end() || bytes_of(file->second) < creation.size) {
      log::error("the segment " + hex(creation.key) + " is lost: its file in " +
                 options_.directory + "/segments is missing or too short");
      journal.damaged = true;
      continue;
    }
    found_.push_back(segment(creation, pool_->map(open_file(file->second, O_RDWR), creation.size),
                             std::make_shared<StoredSegment>(serial, file->second)));
    files.erase(file);
    live.push_back(entry);
    live_.emplace(serial, creation);
  }

  const std::unique_ptr<Records> left = Records::left_in(options_.directory, options_.sync);
  if (left != nullptr) recover_operations(*left, files);
  records_ = Records::create(options_.directory, options_.sync, options_.records, left.get());
  for (const auto& [serial, path] : files) directory_->discard(path, journal.damaged);
  journal_ = std::make_unique<Journal>(directory_->journal(), options_.sync, live);
}

// `others` are files of segments that were deleted while they were in use.
void Store::recover_operations(Records& left, const std::map<uint64_t, std::string>& others) {
  std::map<uint64_t, std::shared_ptr<memory::PoolBlock>> blocks;
  for (const std::shared_ptr<BoxSegment>& segment : found_) {
    blocks.emplace(segment->stored->serial, segment->block);
  }
  recover(left, [&](uint64_t serial) -> Memory {
    auto block = blocks.find(serial);
    if (block == blocks.end()) {
      const auto other = others.find(serial);
      if (other == others.end()) return {};
      Descriptor file = open_file(other->second, O_RDWR);
      const uint64_t bytes = file_bytes(file.get(), other->second);
      block = blocks.emplace(serial, pool_->map(std::move(file), bytes)).first;
    }
    return {block->second->base(), block->second->size()};
  });
}

// Makes a segment of a block in memory, or in the store.
std::shared_ptr<BoxSegment> Store::segment(const Creation& creation,
                                           std::shared_ptr<memory::PoolBlock> block,
                                           std::shared_ptr<StoredSegment> stored) {
  auto segment = std::make_shared<BoxSegment>();
  segment->key = creation.key;
  segment->size = creation.size;
  segment->temporary = creation.temporary;
  segment->creator = creation.creator;
  segment->block = std::move(block);
  segment->stored = std::move(stored);
  return segment;
}

// Called before a file is made, for which any number of bytes may be too many.
void Store::require_room(uint64_t bytes) const {
  const memory::PoolStats pool = pool_->stats();
  if (bytes <= pool.largest_free) return;
  throw Error(ErrorKind::kExhausted,
              "cannot allocate " + std::to_string(bytes) + " bytes: the pool holds " +
                  std::to_string(pool.capacity) + ", of which " + std::to_string(pool.used) +
                  " are in use, and could give one segment " + std::to_string(pool.largest_free));
}

std::shared_ptr<BoxSegment> Store::create(const Creation& creation) {
  require_descriptor();
  if (!durable()) return segment(creation, pool_->allocate(creation.size), nullptr);
  require_room(creation.size);
  const uint64_t serial = next_serial_.fetch_add(1, std::memory_order_relaxed);
  const std::string path = directory_->segment_file(creation.key, serial);
  const auto stored = std::make_shared<StoredSegment>(serial, path);
  try {
    Descriptor file = directory_->make_segment(path, creation.size);
    // The pool's limit comes before the disk's, also when others allocate meanwhile.
    const auto block = pool_->map(std::move(file), creation.size);
    directory_->reserve_segment(block->fd(), path, creation.size);
    const std::lock_guard lock(mutex_);
    journal_->created({serial, creation});
    live_.emplace(serial, creation);
    return segment(creation, block, stored);
  } catch (...) {
    stored->remove_at_end();
    throw;
  }
}

void Store::remove(const BoxSegment& segment) {
  if (!durable()) return;
  const std::lock_guard lock(mutex_);
  journal_->deleted(segment.stored->serial);
  live_.erase(segment.stored->serial);
  segment.stored->remove_at_end();
  if (journal_->records() > std::max(live_.size() * 2 + options_.dead_records, compact_at_))
    compact();
}

// A failure costs nothing but room on the disk: the old journal goes on.
void Store::compact() noexcept {
  try {
    std::vector<JournalEntry> live;
    for (const auto& [serial, creation] : live_) live.push_back({serial, creation});
    journal_ = std::make_unique<Journal>(directory_->journal(), options_.sync, live);
    compact_at_ = 0;
  } catch (const std::exception& error) {
    log::error(std::string("cannot shorten the journal of the store, which goes on growing: ") +
               error.what());
    compact_at_ = journal_->records() + options_.dead_records;
  }
}

std::vector<std::shared_ptr<BoxSegment>> Store::take_found() { return std::exchange(found_, {}); }

}  // namespace hbm::box
