#include "box/server/storage/store.h"

#include <fcntl.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <set>
#include <utility>

#include "base/boot_id.h"
#include "base/error.h"
#include "base/log.h"
#include "box/protocol/proof.h"
#include "box/server/storage/files.h"
#include "box/server/storage/recovery.h"
#include "box/server/storage/segment.h"

namespace hbm::box::server::storage {
std::unique_ptr<Store> Store::open(const StoreOptions& options,
                                   std::shared_ptr<memory::Pool> pool) {
  std::unique_ptr<Store> store(new Store(options, std::move(pool)));
  if (store->durable()) {
    try {
      store->load();
    } catch (const std::filesystem::filesystem_error& error) {
      throw Error(ErrorKind::kUnavailable, error.what());
    }
  } else {
    store->generation_ = protocol::random_id();
    store->records_ = Records::in_memory(options.records);
  }
  return store;
}

Store::Store(const StoreOptions& options, std::shared_ptr<memory::Pool> pool)
    : options_(options), pool_(std::move(pool)) {}

Store::~Store() = default;

void Store::load() {
  directory_ = std::make_unique<Directory>(options_.directory, options_.sync);
  generation_ = directory_->generation();
  if (directory_->is_new()) return make();
  const StoreState state = read_state(directory_->state(), generation_);
  if (state.phase != StoreState::Phase::kMaking) return use_left(state);
  if (directory_->last_serial() > 0) {
    throw damaged(directory_->state(),
                  "it says that no box has served the store yet, but the store has segments");
  }
  make();
}

RecordsLocation Store::location() const { return {directory_->path(), generation_, options_.sync}; }

// No client has connected before accept(), so there are no records to carry over.
void Store::make() {
  make_state(directory_->state(), generation_, StoreState());
  directory_->make_segments();
  records_ = Records::create(location(), options_.records, nullptr);
  catalogue_ = std::make_unique<Catalogue>(directory_->catalogue(), generation_, options_.sync,
                                           std::vector<CatalogueEntry>(), std::set<uint64_t>());
  accept();
}

// Marks the store as served by this box, which may change it from now on.
void Store::accept() {
  StoreState state;
  state.phase = StoreState::Phase::kServed;
  state.sync = options_.sync;
  state.boot = boot_id();
  write_state(directory_->state(), generation_, state);
  directory_->remove_leftovers();
}

void Store::use_left(const StoreState& state) {
  const bool closed = state.phase == StoreState::Phase::kClosed;
  const bool lenient = !closed && !state.sync && state.boot != boot_id();
  Files files = directory_->segment_files();  // throws if one is not a regular file
  std::set<std::string> verified;
  if (closed) verified = verify_checksums(directory_->path(), state.checksums);
  const Catalogue::Contents catalogue = Catalogue::read(directory_->catalogue(), generation_);
  std::unique_ptr<Records> left = Records::open_existing(location());
  if (!lenient) left->require_sound();

  next_serial_ = directory_->last_serial() + 1;
  std::vector<CatalogueEntry> live;
  for (const CatalogueEntry& entry : catalogue.live) {
    if (!take_segment(entry, files, lenient)) continue;
    live.push_back(entry);
    live_.emplace(entry.serial, entry.creation);
  }
  std::vector<std::string> removed, kept;
  sort_others(files, catalogue, lenient, removed, kept);
  const FindMemory find = find_memory(files);  // keeps the blocks that it maps
  Recovery recovery(*left, find, lenient);

  accept();
  if (catalogue.torn)
    log::warn(directory_->catalogue() + ": dropped the last record, half written");
  recovery.execute();
  left->drop_unsound();
  for (const std::string& path : removed) directory_->discard(path, false);
  for (const std::string& path : kept) directory_->discard(path, true);
  use_records(std::move(left));
  use_catalogue(catalogue, live);
  log_unverified_segments(closed, lenient, verified);
}

void Store::log_unverified_segments(bool closed, bool lenient,
                                    const std::set<std::string>& verified) const {
  const size_t unknown = std::count_if(live_.begin(), live_.end(), [&](const auto& one) {
    return !verified.contains(directory_->segment_name(one.second.key, one.first));
  });
  if (unknown == 0) return;
  const std::string segments = std::to_string(unknown) + " of its segments";
  const std::string store = "the store " + options_.directory;
  if (closed) {
    log::info(store + ": clients had " + segments + " mapped when the last box ended, so that " +
              "their contents cannot be checked");
  } else if (lenient) {
    log::warn("the machine stopped while a box served " + store + " without --sync: what was not " +
              "on the disk is lost, and the contents of " + segments + " cannot be checked");
  } else {
    log::warn(store + " was not closed in order: its keys, sessions and sums are exact, and the " +
              "contents of " + segments + " cannot be checked");
  }
}

// Maps a segment of the catalogue, and removes its file from `files`. Returns false if a crash of
// the host has lost the segment.
bool Store::take_segment(const CatalogueEntry& entry, Files& files, bool lenient) {
  const auto& [serial, creation] = entry;
  const std::string path = directory_->segment_file(creation.key, serial);
  const auto found = files.find(serial);
  const char* fault = "it is missing";
  if (found != files.end() && found->second == path) {
    Descriptor file = open_file(path, O_RDWR);
    if (has_footer(file.get(), {generation_, creation.key, serial, creation.size}, path)) {
      found_.push_back(segment(creation, pool_->map(std::move(file), creation.size),
                               std::make_shared<StoredSegment>(serial, path)));
      files.erase(found);
      return true;
    }
    fault = "it has another size or footer than the catalogue's segment of its name";
  }
  if (!lenient) throw damaged(path, fault);
  log::error("the segment " + hex(creation.key) + " is lost, the machine having stopped: of its " +
             "file " + path + ", " + fault);
  return false;
}

// Sorts the files without a live segment into `removed` and `kept`. `removed`: files of segments
// that were being created, or were deleted while in use. `kept`: files of segments whose record a
// crash of the host may have lost.
void Store::sort_others(const Files& others, const Catalogue::Contents& catalogue, bool lenient,
                        std::vector<std::string>& removed, std::vector<std::string>& kept) const {
  for (const auto& [serial, path] : others) {
    if (catalogue.deleted.contains(serial)) {
      removed.push_back(path);
    } else if (is_blank(open_file(path, O_RDONLY).get(), path)) {
      (catalogue.torn ? kept : removed).push_back(path);
    } else if (lenient) {
      kept.push_back(path);
    } else {
      throw damaged(directory_->catalogue(),
                    "it has no record of " + path + ", which has been written to");
    }
  }
}

FindMemory Store::find_memory(const Files& others) {
  std::map<uint64_t, std::shared_ptr<memory::PoolBlock>> blocks;
  for (const std::shared_ptr<BoxSegment>& segment : found_) {
    blocks.emplace(segment->stored->serial, segment->block);
  }
  return [this, others, blocks](uint64_t serial) mutable -> Memory {
    auto block = blocks.find(serial);
    if (block == blocks.end()) {
      const auto other = others.find(serial);
      if (other == others.end()) return {};
      Descriptor file = open_file(other->second, O_RDWR);
      const uint64_t bytes = file_bytes(file.get(), other->second);
      block = blocks.emplace(serial, pool_->map(std::move(file), bytes)).first;
    }
    return {block->second->base(), block->second->size()};
  };
}

// Uses records of the requested sizes. If the disk is full, continues with the files of the last
// box, which have no operation in progress.
void Store::use_records(std::unique_ptr<Records> left) {
  RecordSizes wanted = options_.records;
  wanted.sessions = std::max(wanted.sessions, static_cast<uint32_t>(left->sessions().size()));
  records_ = std::move(left);
  if (records_->sizes() == wanted) return;
  try {
    records_ = Records::create(location(), options_.records, records_.get());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kExhausted) throw;
    log::warn(std::string("the box continues with the sizes of the last one: ") + error.what());
  }
}

// Continues the old catalogue if it is not torn and has as many records as `live`. Otherwise writes
// a new one. If the disk is full, continues the old one.
void Store::use_catalogue(const Catalogue::Contents& left,
                          const std::vector<CatalogueEntry>& live) {
  if (left.torn || left.records != live.size()) {
    try {
      catalogue_ = std::make_unique<Catalogue>(directory_->catalogue(), generation_, options_.sync,
                                               live, std::set<uint64_t>());
      return;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kExhausted) throw;
      log::warn(std::string("the box continues with the catalogue of the last one: ") +
                error.what());
    }
  }
  catalogue_ = std::make_unique<Catalogue>(directory_->catalogue(), options_.sync, left);
}

// Returns a segment with the memory `block`. `stored`: its file in the store; null without a store.
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

// Throws if the pool cannot hold the segment, before a file of an arbitrary size is created.
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
    // Map before disk space is reserved: map() enforces the pool's limit also if other threads
    // allocate at the same time. The check in require_room() does not.
    const auto block = pool_->map(std::move(file), creation.size);
    directory_->reserve_segment(block->fd(), path,
                                {generation_, creation.key, serial, creation.size});
    const std::lock_guard lock(mutex_);
    catalogue_->created({serial, creation});
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
  catalogue_->deleted(segment.stored->serial);
  live_.erase(segment.stored->serial);
  segment.stored->remove_at_end();
  if (catalogue_->records() > std::max(live_.size() * 2 + options_.dead_records, compact_at_))
    compact();
}

// A failure costs only disk space: the old catalogue continues.
void Store::compact() noexcept {
  try {
    std::vector<CatalogueEntry> live;
    for (const auto& [serial, creation] : live_) live.push_back({serial, creation});
    if (options_.sync) directory_->sync_segments();
    std::set<uint64_t> deleted;  // also segments that are being created: their records follow
    for (const auto& [serial, path] : directory_->segment_files()) {
      if (!live_.contains(serial)) deleted.insert(serial);
    }
    catalogue_ = std::make_unique<Catalogue>(directory_->catalogue(), generation_, options_.sync,
                                             live, deleted);
    compact_at_ = 0;
  } catch (const std::exception& error) {
    log::error(std::string("cannot shorten the catalogue of the store, which keeps growing: ") +
               error.what());
    compact_at_ = catalogue_->records() + options_.dead_records;
  }
}

std::vector<std::shared_ptr<BoxSegment>> Store::take_found() { return std::exchange(found_, {}); }

// Returns the files that `checksums` will list, by their names relative to the directory. Omits
// segments that another process may have mapped for writing.
std::vector<std::string> Store::files_at_rest() const {
  std::vector<std::string> files = {"journal", "sessions", "operations"};
  for (const auto& [serial, creation] : live_) {
    const std::string name = directory_->segment_name(creation.key, serial);
    if (!may_be_written(directory_->path() + "/" + name)) files.push_back(name);
  }
  return files;
}

void Store::close() noexcept {
  if (!durable() || records_->failed()) return;
  try {
    found_.clear();
    const std::lock_guard lock(mutex_);
    StoreState state;
    state.checksums = write_checksums(directory_->path(), files_at_rest());
    state.phase = StoreState::Phase::kClosed;
    write_state(directory_->state(), generation_, state);
  } catch (const std::exception& error) {
    log::warn("the store " + options_.directory + " is whole, but ends without checksums, as " +
              "after a kill: " + error.what());
  }
}

}  // namespace hbm::box::server::storage
