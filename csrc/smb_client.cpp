#include "smb_client.h"

#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <utility>

#include "box/client/core.h"
#include "box/client/requests.h"

namespace hbm::client {
namespace {

void never_issued(const std::vector<OperationPointer>& operations, const std::string& why) {
  for (const OperationPointer& operation : operations) {
    if (operation->issued.load(std::memory_order_acquire)) continue;
    operation->hold.reset();
    operation->failure = {ErrorKind::kInvalid, {}, operation->text() + " was never issued: " + why};
    operation->settle();
  }
}

template <class Row>
std::span<const std::byte> append(std::vector<Row>& table, std::span<const std::byte> rows,
                                  size_t count) {
  const size_t before = table.size();
  table.resize(before + count);
  if (count > 0) std::memcpy(table.data() + before, rows.data(), count * sizeof(Row));
  return rows.subspan(count * sizeof(Row));
}

// Appends the tables of one reply to kStats, and takes its totals.
// Throws Error(kNetwork) when the reply is not as long as it says.
void add_page(Stats& stats, std::span<const std::byte> payload) {
  smb::StatsTotals totals{};
  if (payload.size() >= sizeof totals) std::memcpy(&totals, payload.data(), sizeof totals);
  const size_t told = sizeof totals + totals.clients_here * sizeof(smb::ClientStats) +
                      totals.segments_here * sizeof(smb::SegmentStats);
  if (payload.size() != told) {
    throw Error(ErrorKind::kNetwork, "the box's statistics have " + std::to_string(payload.size()) +
                                         " bytes, and say that they have " + std::to_string(told));
  }
  stats.totals = totals;
  const auto segments = append(stats.clients, payload.subspan(sizeof totals), totals.clients_here);
  append(stats.segments, segments, totals.segments_here);
}

}  // namespace

Segment::Segment(std::shared_ptr<Core> core, std::shared_ptr<Attachment> attachment)
    : core_(std::move(core)), attachment_(std::move(attachment)) {}

smb::Id Segment::key() const noexcept { return attachment_->key; }
uint64_t Segment::size() const noexcept { return attachment_->size; }
bool Segment::created() const noexcept { return attachment_->created; }
bool Segment::read_only() const noexcept { return attachment_->read_only; }
std::shared_ptr<std::byte> Segment::memory() const { return core_->memory(*attachment_); }

Future::Future(std::shared_ptr<Core> core, std::shared_ptr<ClientOperation> operation)
    : core_(std::move(core)), operation_(std::move(operation)) {}

bool Future::done() const noexcept { return operation_->settled(); }

bool Future::wait(std::chrono::nanoseconds most) const {
  const auto now = Clock::now();
  const auto left = Clock::time_point::max() - now;
  return core_->driver.wait(*operation_, most < left ? now + most : Clock::time_point::max());
}

int64_t Future::get() const {
  core_->driver.wait(*operation_, Clock::time_point::max());
  if (operation_->failure) operation_->failure->raise();
  return operation_->value;
}

Batch::Batch(std::shared_ptr<Core> core) : core_(std::move(core)) {}
Batch::~Batch() { never_issued(collected_, "its batch was given up"); }

const std::shared_ptr<Attachment>& Batch::mine(const Segment& segment) const {
  if (segment.core_ != core_) {
    throw Error(ErrorKind::kInvalid,
                "segment " + key_text(segment.key()) + " belongs to another client");
  }
  return segment.attachment_;
}

Future Batch::keep(OperationPointer operation) {
  collected_.push_back(operation);
  return {core_, std::move(operation)};
}

Future Batch::read(const Segment& segment, uint64_t offset, std::byte* local, uint64_t bytes,
                   std::shared_ptr<const void> hold) {
  return keep(transfer_request(smb::Opcode::kRead, touch(mine(segment), offset, bytes, false),
                               local, std::move(hold)));
}

Future Batch::write(const Segment& segment, uint64_t offset, const std::byte* local, uint64_t bytes,
                    std::shared_ptr<const void> hold) {
  return keep(transfer_request(smb::Opcode::kWrite, touch(mine(segment), offset, bytes, true),
                               const_cast<std::byte*>(local), std::move(hold)));
}

Future Batch::accumulate(const Segment& target, const Segment& source, const Accumulation& what) {
  return keep(accumulate_request(mine(target), mine(source), what));
}

Future Batch::fetch_add(const Segment& segment, uint64_t offset, int64_t addend) {
  return keep(fetch_add_request(mine(segment), offset, addend));
}

void Batch::issue() { hand_over(false); }
void Batch::issue_and_wait_next() { hand_over(true); }

void Batch::hand_over(bool waits) {
  const std::vector<OperationPointer> operations = std::exchange(collected_, {});
  try {
    core_->driver.issue(operations, waits);
  } catch (const std::exception& error) {
    never_issued(operations, error.what());
    throw;
  }
}

Client::Client(const ClientOptions& options) : core_(std::make_shared<Core>(options)) {}

Client::~Client() {
  if (core_->driver.in_forked_child()) {
    // Its thread and its locks are the parent's.
    new std::shared_ptr<Core>(std::move(core_));  // NOLINT(bugprone-unhandled-exception-at-new)
    return;
  }
  core_->close(std::chrono::milliseconds(0));
}

smb::TransportKind Client::transport() const { return core_->dialer.transport(); }
std::string Client::why_transport() const { return core_->dialer.why(); }

Batch Client::batch() { return Batch(core_); }

std::shared_ptr<void> Client::register_memory(std::byte* memory, uint64_t bytes) {
  core_->driver.require_parent();
  return core_->driver.registered_memory().add(memory, bytes);
}

void Client::carry_out(const OperationPointer& operation) {
  core_->driver.issue({&operation, 1}, /*waits=*/true);
  Future(core_, operation).get();
}

Segment Client::alloc(const AllocOptions& options) {
  OperationPointer operation =
      alloc_request(options, core_->table.new_handle(), core_->options.read_only);
  carry_out(operation);
  return {core_, operation->attachment};
}

bool Client::exists(smb::Id key) {
  OperationPointer operation = exists_request(key);
  carry_out(operation);
  return operation->value != 0;
}

void Client::read(const Segment& segment, uint64_t offset, std::byte* local, uint64_t bytes) {
  if (read_now(segment, offset, local, bytes)) return;
  Batch one = batch();
  const Future future = one.read(segment, offset, local, bytes);
  one.issue_and_wait_next();
  future.get();
}

void Client::write(const Segment& segment, uint64_t offset, const std::byte* local,
                   uint64_t bytes) {
  if (write_now(segment, offset, local, bytes)) return;
  Batch one = batch();
  const Future future = one.write(segment, offset, local, bytes);
  one.issue_and_wait_next();
  future.get();
}

void Client::accumulate(const Segment& target, const Segment& source, const Accumulation& what) {
  Batch one = batch();
  const Future future = one.accumulate(target, source, what);
  one.issue_and_wait_next();
  future.get();
}

int64_t Client::fetch_add(const Segment& segment, uint64_t offset, int64_t addend) {
  Batch one = batch();
  const Future future = one.fetch_add(segment, offset, addend);
  one.issue_and_wait_next();
  return future.get();
}

bool Client::read_now(const Segment& segment, uint64_t offset, std::byte* local, uint64_t bytes) {
  const Touch read = touch(batch().mine(segment), offset, bytes, false);
  return core_->driver.copy_now(smb::Opcode::kRead, read, local);
}

bool Client::write_now(const Segment& segment, uint64_t offset, const std::byte* local,
                       uint64_t bytes) {
  const Touch write = touch(batch().mine(segment), offset, bytes, true);
  return core_->driver.copy_now(smb::Opcode::kWrite, write, const_cast<std::byte*>(local));
}

void Client::free(const Segment& segment) {
  carry_out(release_request(smb::Opcode::kFree, batch().mine(segment)));
}

void Client::remove(const Segment& segment) {
  carry_out(release_request(smb::Opcode::kDelete, batch().mine(segment)));
}

void Client::ping() { carry_out(std::make_shared<ClientOperation>(smb::Opcode::kPing)); }

Stats Client::stats() {
  Stats stats;
  do {
    auto operation = std::make_shared<ClientOperation>(smb::Opcode::kStats);
    operation->set_body(smb::StatsQuery{static_cast<uint32_t>(stats.clients.size()),
                                        static_cast<uint32_t>(stats.segments.size())});
    carry_out(operation);
    add_page(stats, operation->payload);
  } while (stats.totals.clients_here + stats.totals.segments_here > 0 &&
           (stats.clients.size() < stats.totals.clients ||
            stats.segments.size() < stats.totals.segments));
  return stats;
}

void Client::close(std::chrono::milliseconds patience) { core_->close(patience); }
bool Client::closed() const { return core_->closed(); }

}  // namespace hbm::client
