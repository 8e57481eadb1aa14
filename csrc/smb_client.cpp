#include "smb_client.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "box/client/dialer.h"
#include "box/client/progress_engine.h"
#include "box/client/reconnector.h"
#include "box/client/request_table.h"
#include "box/client/requests.h"
#include "box/client/tuning.h"

namespace hbm::box::client {
namespace {

// Limits a time to kLongestTimeout, so that adding it to the current time does not overflow.
std::chrono::milliseconds bounded(const char* name, std::chrono::milliseconds time) {
  if (time.count() >= 0) return std::min<std::chrono::milliseconds>(time, kLongestTimeout);
  throw Error(ErrorKind::kInvalid,
              std::string(name) + " is not negative: " + std::to_string(time.count()) + " ms");
}

ClientOptions bounded(ClientOptions options) {
  options.connect_timeout = bounded("connect_timeout", options.connect_timeout);
  options.reconnect_timeout = bounded("reconnect_timeout", options.reconnect_timeout);
  options.timeout = bounded("timeout", options.timeout);
  return options;
}

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

// Appends the tables of one kStats reply to `stats`, and sets the totals. Throws Error(kNetwork) if
// the length of the reply does not match its totals.
void add_page(Stats& stats, std::span<const std::byte> payload) {
  protocol::StatsTotals totals{};
  if (payload.size() >= sizeof totals) std::memcpy(&totals, payload.data(), sizeof totals);
  const size_t stated = sizeof totals + totals.clients_here * sizeof(protocol::ClientStats) +
                        totals.segments_here * sizeof(protocol::SegmentStats);
  if (payload.size() != stated) {
    throw Error(ErrorKind::kNetwork, "the box's statistics have " + std::to_string(payload.size()) +
                                         " bytes, and say that they have " +
                                         std::to_string(stated));
  }
  stats.totals = totals;
  const auto segments = append(stats.clients, payload.subspan(sizeof totals), totals.clients_here);
  append(stats.segments, segments, totals.segments_here);
}

}  // namespace

// The parts of a client. Each part knows only the parts before it. The table owns the lock on the
// client's state. The engine owns the hold: only the thread that has the hold uses the transport.
// The reconnector owns the client's own thread, which reconnects.
//
// Lock order: `closer`, the hold on the engine, the lock of the table.
struct Core {
  explicit Core(const ClientOptions& given)  // connects
      : options(bounded(given)),
        dialer(options),
        table(options.timeout, dialer.box()),
        engine(options.while_waiting, table),
        reconnector(options, dialer, table, engine) {}

  const ClientOptions options;
  Dialer dialer;  // once connected, only the reconnector calls its non-const members
  RequestTable table;
  ProgressEngine engine;
  Reconnector reconnector;
  std::mutex closer;  // one close() at a time
};

Segment::Segment(std::shared_ptr<Core> core, std::shared_ptr<Attachment> attachment)
    : core_(std::move(core)), attachment_(std::move(attachment)) {}

protocol::Id Segment::key() const noexcept { return attachment_->key; }
uint64_t Segment::size() const noexcept { return attachment_->size; }
bool Segment::created() const noexcept { return attachment_->created; }
bool Segment::read_only() const noexcept { return attachment_->read_only; }

std::shared_ptr<std::byte> Segment::memory() const {
  core_->engine.require_parent();
  const auto lock = core_->table.lock();
  const std::string asked = "view of segment " + key_text(key());
  if (core_->table.closing()) {
    throw BoxError(BoxError::Cause::kClosed, asked + ": the client was closed");
  }
  if (attachment_->state == AttachmentState::kFreed) {
    throw Error(ErrorKind::kInvalid, asked + ": it was freed");
  }
  if (attachment_->state == AttachmentState::kLost) {
    throw BoxError(BoxError::Cause::kLost, asked + ": " + attachment_->why);
  }
  const std::shared_ptr<transport::Grant>& grant = attachment_->grant;
  if (grant->memory == nullptr) {
    throw Error(ErrorKind::kUnsupported,
                asked + ": only the transport shm has the segment's memory in this process, and " +
                    "this is " + transport_name(core_->dialer.transport()) + "; read() copies it");
  }
  return {grant, grant->memory};
}

const std::shared_ptr<Attachment>& Segment::attachment_in(const std::shared_ptr<Core>& core) const {
  if (core_ != core) {
    throw Error(ErrorKind::kInvalid, "segment " + key_text(key()) + " belongs to another client");
  }
  return attachment_;
}

Future::Future(std::shared_ptr<Core> core, std::shared_ptr<ClientOperation> operation)
    : core_(std::move(core)), operation_(std::move(operation)) {}

bool Future::done() const noexcept { return operation_->settled(); }

bool Future::wait(std::chrono::nanoseconds most) const {
  const auto now = Clock::now();
  const auto left = Clock::time_point::max() - now;
  return core_->engine.wait(*operation_, most < left ? now + most : Clock::time_point::max());
}

int64_t Future::get() const {
  core_->engine.wait(*operation_, Clock::time_point::max());
  if (operation_->failure) operation_->failure->raise();
  return operation_->value;
}

Batch::Batch(std::shared_ptr<Core> core) : core_(std::move(core)) {}
Batch::~Batch() { never_issued(collected_, "its batch was destroyed"); }

Future Batch::keep(OperationPointer operation) {
  collected_.push_back(operation);
  return {core_, std::move(operation)};
}

Future Batch::read(const Segment& segment, uint64_t offset, std::byte* local, uint64_t bytes,
                   std::shared_ptr<const void> hold) {
  return keep(transfer_request(protocol::Opcode::kRead,
                               touch(segment.attachment_in(core_), offset, bytes, false), local,
                               std::move(hold)));
}

Future Batch::write(const Segment& segment, uint64_t offset, const std::byte* local, uint64_t bytes,
                    std::shared_ptr<const void> hold) {
  return keep(transfer_request(protocol::Opcode::kWrite,
                               touch(segment.attachment_in(core_), offset, bytes, true),
                               const_cast<std::byte*>(local), std::move(hold)));
}

Future Batch::accumulate(const Segment& target, const Segment& source, const Accumulation& what) {
  return keep(accumulate_request(target.attachment_in(core_), source.attachment_in(core_), what));
}

Future Batch::fetch_add(const Segment& segment, uint64_t offset, int64_t addend) {
  return keep(fetch_add_request(segment.attachment_in(core_), offset, addend));
}

void Batch::issue() { hand_over(false); }
void Batch::issue_and_wait_next() { hand_over(true); }

void Batch::hand_over(bool waits) {
  const std::vector<OperationPointer> operations = std::exchange(collected_, {});
  try {
    core_->engine.issue(operations, waits);
  } catch (const std::exception& error) {
    never_issued(operations, error.what());
    throw;
  }
}

Client::Client(const ClientOptions& options) : core_(std::make_shared<Core>(options)) {}

Client::~Client() {
  if (core_->engine.in_forked_child()) {
    // Leaks the core, because its thread and its locks belong to the parent process.
    new std::shared_ptr<Core>(std::move(core_));  // NOLINT(bugprone-unhandled-exception-at-new)
    return;
  }
  close(std::chrono::milliseconds(0));
}

protocol::TransportKind Client::transport() const { return core_->dialer.transport(); }
std::string Client::why_transport() const { return core_->dialer.why(); }

Batch Client::batch() { return Batch(core_); }

std::shared_ptr<void> Client::register_memory(std::byte* memory, uint64_t bytes) {
  core_->engine.require_parent();
  return core_->engine.registered_memory().add(memory, bytes);
}

int64_t Client::execute(const OperationPointer& operation) {
  core_->engine.issue({&operation, 1}, /*waits=*/true);
  return Future(core_, operation).get();
}

Segment Client::alloc(const AllocOptions& options) {
  const OperationPointer operation =
      alloc_request(options, core_->table.new_handle(), core_->options.read_only);
  execute(operation);
  return {core_, operation->attachment};
}

bool Client::exists(protocol::Id key) { return execute(exists_request(key)) != 0; }

void Client::read(const Segment& segment, uint64_t offset, std::byte* local, uint64_t bytes,
                  const std::shared_ptr<const void>& hold) {
  transfer(protocol::Opcode::kRead, touch(segment.attachment_in(core_), offset, bytes, false),
           local, hold);
}

void Client::write(const Segment& segment, uint64_t offset, const std::byte* local, uint64_t bytes,
                   const std::shared_ptr<const void>& hold) {
  transfer(protocol::Opcode::kWrite, touch(segment.attachment_in(core_), offset, bytes, true),
           const_cast<std::byte*>(local), hold);
}

void Client::transfer(protocol::Opcode opcode, Touch touch, std::byte* local,
                      const std::shared_ptr<const void>& hold) {
  if (core_->engine.copy_now(opcode, touch, local)) return;
  execute(transfer_request(opcode, std::move(touch), local, hold));
}

void Client::accumulate(const Segment& target, const Segment& source, const Accumulation& what) {
  execute(accumulate_request(target.attachment_in(core_), source.attachment_in(core_), what));
}

int64_t Client::fetch_add(const Segment& segment, uint64_t offset, int64_t addend) {
  return execute(fetch_add_request(segment.attachment_in(core_), offset, addend));
}

void Client::free(const Segment& segment) {
  execute(release_request(protocol::Opcode::kFree, segment.attachment_in(core_)));
}

void Client::remove(const Segment& segment) {
  execute(release_request(protocol::Opcode::kDelete, segment.attachment_in(core_)));
}

void Client::ping() { execute(std::make_shared<ClientOperation>(protocol::Opcode::kPing)); }

Stats Client::stats() {
  Stats stats;
  do {
    auto operation = std::make_shared<ClientOperation>(protocol::Opcode::kStats);
    operation->set_body(protocol::StatsQuery{static_cast<uint32_t>(stats.clients.size()),
                                             static_cast<uint32_t>(stats.segments.size())});
    execute(operation);
    add_page(stats, operation->payload);
  } while (stats.totals.clients_here + stats.totals.segments_here > 0 &&
           (stats.clients.size() < stats.totals.clients ||
            stats.segments.size() < stats.totals.segments));
  return stats;
}

void Client::close(std::chrono::milliseconds patience) {
  core_->engine.require_parent();
  const auto until = Clock::now() + bounded("patience", patience);
  const std::scoped_lock one(core_->closer);
  std::exception_ptr interrupt;
  {
    auto lock = core_->table.lock();
    if (core_->table.closing()) return;
    interrupt = core_->table.close(lock, until, core_->options.while_waiting);
    core_->table.stop();
    core_->engine.wake();  // the progress thread, which may be the reconnector
  }
  core_->reconnector.stop();

  bool up = false;
  {
    const auto lock = core_->table.lock();
    up = core_->table.status().close();
    core_->engine.wake();
  }
  const ProgressEngine::Hold held = core_->engine.hold();
  std::unique_ptr<transport::Transport> last = core_->engine.take_transport();
  if (up) leave(std::move(last), core_->dialer.box());
  last.reset();
  {
    const auto lock = core_->table.lock();
    core_->engine.fail_all(BoxError::Cause::kClosed, "the client was closed");
  }
  if (interrupt) std::rethrow_exception(interrupt);
}

bool Client::closed() const {
  const auto lock = core_->table.lock();
  return core_->table.closing();
}

}  // namespace hbm::box::client
