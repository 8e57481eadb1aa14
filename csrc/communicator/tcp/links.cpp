#include "communicator/tcp/links.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <limits>
#include <list>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include "base/close_in_children.h"
#include "base/error.h"
#include "base/fork.h"
#include "communicator/tcp/tuning.h"

namespace hbm::communicator::tcp {
namespace {

constexpr uint8_t kCommunicators = 2;

// Codes of completed requests. Both of a rank's codes follow kFirstOfRanks.
constexpr int kSuccess = 0;
constexpr int kTruncated = 1;
constexpr int kCancelled = 2;
constexpr int kFirstOfRanks = 3;

constexpr int ended_code(int rank) { return kFirstOfRanks + 2 * rank; }
constexpr int withdrawn_code(int rank) { return kFirstOfRanks + 2 * rank + 1; }

// A request.
struct Operation {
  bool is_send = false;
  uint8_t communicator = 0;
  int tag = 0;
  size_t rank = 0;  // the peer's
  std::byte* data = nullptr;
  size_t bytes = 0;
  bool done = false;
  int code = kSuccess;
  std::list<Operation>::iterator at;
};

// A frame to be sent.
struct Outgoing {
  FrameHeader header;
  const std::byte* data = nullptr;
  size_t bytes = 0;                    // of `data`
  size_t sent = 0;                     // of the header and `data`
  Operation* operation = nullptr;      // completes when all is sent; null: none
  std::unique_ptr<std::byte[]> owned;  // the data of a withdrawn send
};

// A message without a receive.
struct Arrived {
  uint8_t communicator = 0;
  int tag = 0;
  size_t bytes = 0;
  uint64_t id = 0;                    // of a kRequest
  bool whole = false;                 // false: a kRequest
  std::unique_ptr<std::byte[]> data;  // if whole
};

// A receive that has sent kClear. `operation` is null if it was cancelled.
struct Expected {
  Operation* operation = nullptr;
  size_t bytes = 0;
};

struct Link {
  Descriptor socket;        // none: this rank, or a link that has ended
  std::string failure;      // why the link has ended, or takes no more data
  bool sends = true;        // false: the kernel refuses to send
  bool wants_room = false;  // epoll reports when the kernel takes more data

  std::deque<Outgoing> outgoing;
  uint64_t next_id = 0;
  std::unordered_map<uint64_t, Operation*> unanswered;  // sends, by id; null: withdrawn

  std::list<Operation*> posted;  // receives, oldest first
  std::list<Arrived> arrived;    // oldest first
  std::unordered_map<uint64_t, Expected> expected;

  // The frame that is being received.
  FrameHeader header;
  size_t header_bytes = 0;            // of it that have arrived
  size_t left = 0;                    // bytes of its payload
  std::byte* target = nullptr;        // of the next byte of the payload; null: discarded
  Operation* into = nullptr;          // the receive whose buffer is the target
  std::unique_ptr<std::byte[]> kept;  // the payload of a message without a receive
};

struct Malformed {
  std::string what;
};

std::string describe(int error) { return std::strerror(error); }

}  // namespace

// All members except poll() need `mutex` held by the caller.
class Links::Engine {
 public:
  Engine(std::vector<Descriptor> sockets, std::string group);
  ~Engine();

  std::mutex mutex;

  int poll() const noexcept { return poll_.get(); }
  CommHandle add_communicator(std::vector<int> ranks);
  Operation& start(bool is_send, void* data, size_t bytes, int peer, int tag, CommHandle comm);
  void send(Operation& operation);
  void receive(Operation& operation);
  Operation* receive_any(void* data, size_t bytes, int tag, CommHandle comm, int& peer);
  void cancel(Operation& operation);
  void withdraw(Operation& operation) noexcept;
  void progress();
  // Returns the operation's code, and forgets the operation.
  int finish(Request& request);
  void check(int code) const;

 private:
  using Communicator = std::vector<int>;

  Link& link_of(const Operation& operation) { return links_[operation.rank]; }
  static void complete(Operation& operation, int code) {
    operation.done = true;
    operation.code = code;
  }

  void queue(size_t rank, FrameKind kind, uint64_t id, const Operation* about = nullptr);
  void queue(size_t rank, Outgoing frame);
  void write(size_t rank);
  void want_room(size_t rank, bool wanted);
  void stop_sending(Link& link, size_t rank, const std::string& why);
  void end(size_t rank, const std::string& why);

  void read(size_t rank);
  void take(size_t rank, const std::byte* data, size_t bytes);
  void begin_frame(size_t rank);
  void end_payload(size_t rank);
  void deliver(size_t rank, std::list<Arrived>::iterator message, Operation& operation);
  void expect(size_t rank, uint64_t id, size_t bytes, Operation& operation);
  void receive_into(Link& link, Operation* operation, size_t bytes);
  Operation* take_posted(Link& link, uint8_t communicator, int tag);

  const ForkGuard fork_;
  const std::string group_;
  const Descriptor poll_;
  std::vector<Link> links_;  // by group rank
  std::vector<Communicator> communicators_;
  std::list<Operation> running_;
  std::list<Operation> spare_;
  size_t next_any_ = 0;  // the rank at which receive_any() begins
  std::array<std::byte, kReadBytes> buffer_;
};

Links::Engine::Engine(std::vector<Descriptor> sockets, std::string group)
    : group_(std::move(group)), poll_(epoll_create1(EPOLL_CLOEXEC)), links_(sockets.size()) {
  for (size_t rank = 0; rank < sockets.size(); ++rank) {
    if (!sockets[rank]) continue;
    links_[rank].socket = std::move(sockets[rank]);
    close_in_children(links_[rank].socket.get());
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = rank;
    if (!poll_ || epoll_ctl(poll_.get(), EPOLL_CTL_ADD, links_[rank].socket.get(), &event) != 0) {
      const std::string why = describe(errno);
      for (Link& link : links_) {
        if (link.socket) keep_in_children(link.socket.get());
      }
      throw Error(ErrorKind::kUnavailable,
                  group_ + " cannot watch its TCP connections: " + why +
                      " (`ulimit -n` limits the descriptors of a process)");
    }
  }
}

// If the kernel still had unread data, it would reset the connection, and drop unsent data.
Links::Engine::~Engine() {
  for (Link& link : links_) {
    if (!link.socket) continue;
    if (fork_.in_child()) {
      link.socket.release();  // the fork has closed it
      continue;
    }
    for (int reads = 0; reads < kReadsPerTurn; ++reads) {
      if (recv(link.socket.get(), buffer_.data(), buffer_.size(), MSG_DONTWAIT) <= 0) break;
    }
    keep_in_children(link.socket.get());
  }
}

CommHandle Links::Engine::add_communicator(std::vector<int> ranks) {
  communicators_.push_back(std::move(ranks));
  return {communicators_.size()};
}

Operation& Links::Engine::start(bool is_send, void* data, size_t bytes, int peer, int tag,
                                CommHandle comm) {
  if (spare_.empty()) spare_.emplace_back();
  running_.splice(running_.end(), spare_, spare_.begin());
  Operation& made = running_.back();
  const int rank = communicators_[comm.value - 1][static_cast<size_t>(peer)];
  made = {is_send,
          static_cast<uint8_t>(comm.value),
          tag,
          static_cast<size_t>(rank),
          static_cast<std::byte*>(data),
          bytes,
          false,
          kSuccess,
          std::prev(running_.end())};
  return made;
}

int Links::Engine::finish(Request& request) {
  auto& operation = *reinterpret_cast<Operation*>(request.value);
  request = {};
  const int code = operation.code;
  spare_.splice(spare_.begin(), running_, operation.at);
  return code;
}

void Links::Engine::check(int code) const {
  if (code == kSuccess) return;
  if (code == kTruncated) {
    throw Error(ErrorKind::kNetwork, "a message was longer than the buffer of its receiver");
  }
  if (code == kCancelled) throw Error(ErrorKind::kNetwork, "the message was cancelled");
  const auto rank = static_cast<size_t>((code - kFirstOfRanks) / 2);
  const std::string name = "rank " + std::to_string(rank) + " of " + group_;
  if (code == withdrawn_code(static_cast<int>(rank))) {
    throw Error(ErrorKind::kNetwork,
                name + " has withdrawn a message, because its own operation failed");
  }
  throw Error(ErrorKind::kNetwork,
              "the TCP connection to " + name + " has ended: " + links_[rank].failure);
}

// -- Sending

void Links::Engine::send(Operation& operation) {
  Link& link = link_of(operation);
  if (!link.socket || !link.sends)
    return complete(operation, ended_code(static_cast<int>(operation.rank)));
  Outgoing frame;
  frame.header = {kFrameMagic, FrameKind::kEager, operation.communicator, 0, operation.tag,
                  0,           operation.bytes,   link.next_id++};
  if (operation.bytes <= kEagerBytes) {
    frame.data = operation.data;
    frame.bytes = operation.bytes;
    frame.operation = &operation;
  } else {
    frame.header.kind = FrameKind::kRequest;
    link.unanswered.emplace(frame.header.id, &operation);
  }
  queue(operation.rank, std::move(frame));
}

// Queues a frame without data.
void Links::Engine::queue(size_t rank, FrameKind kind, uint64_t id, const Operation* about) {
  Outgoing frame;
  frame.header.magic = kFrameMagic;
  frame.header.kind = kind;
  frame.header.communicator = about != nullptr ? about->communicator : 1;
  frame.header.id = id;
  queue(rank, std::move(frame));
}

void Links::Engine::queue(size_t rank, Outgoing frame) {
  Link& link = links_[rank];
  if (!link.socket || !link.sends) return;
  link.outgoing.push_back(std::move(frame));
  if (link.outgoing.size() == 1) write(rank);
}

void Links::Engine::write(size_t rank) {
  Link& link = links_[rank];
  while (!link.outgoing.empty()) {
    std::array<iovec, 2 * kMessagesPerWrite> parts;
    size_t count = 0;
    size_t frames = 0;
    for (Outgoing& frame : link.outgoing) {
      if (++frames > kMessagesPerWrite) break;
      size_t skip = frame.sent;
      if (skip < sizeof(FrameHeader)) {
        parts[count++] = {reinterpret_cast<std::byte*>(&frame.header) + skip,
                          sizeof(FrameHeader) - skip};
        skip = sizeof(FrameHeader);
      }
      skip -= sizeof(FrameHeader);
      if (skip < frame.bytes) {
        parts[count++] = {const_cast<std::byte*>(frame.data) + skip, frame.bytes - skip};
      }
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t taken = sendmsg(link.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (taken < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return want_room(rank, true);
      return stop_sending(link, rank, describe(errno));
    }
    auto left = static_cast<size_t>(taken);
    while (!link.outgoing.empty()) {
      Outgoing& frame = link.outgoing.front();
      const size_t part = std::min(left, sizeof(FrameHeader) + frame.bytes - frame.sent);
      frame.sent += part;
      left -= part;
      if (frame.sent < sizeof(FrameHeader) + frame.bytes) break;
      if (frame.operation != nullptr) complete(*frame.operation, kSuccess);
      link.outgoing.pop_front();
    }
  }
  want_room(rank, false);
}

void Links::Engine::want_room(size_t rank, bool wanted) {
  Link& link = links_[rank];
  if (link.wants_room == wanted || !link.socket) return;
  epoll_event event{};
  event.events = wanted ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.u64 = rank;
  // Cannot fail: the socket is in the set, and the kernel allocates nothing.
  epoll_ctl(poll_.get(), EPOLL_CTL_MOD, link.socket.get(), &event);
  link.wants_room = wanted;
}

// Fails the sends. Messages of the peer may still be in the kernel, and are read.
void Links::Engine::stop_sending(Link& link, size_t rank, const std::string& why) {
  link.sends = false;
  if (link.failure.empty()) link.failure = why;
  const int code = ended_code(static_cast<int>(rank));
  for (const Outgoing& frame : link.outgoing) {
    if (frame.operation != nullptr) complete(*frame.operation, code);
  }
  for (const auto& [id, operation] : link.unanswered) {
    if (operation != nullptr) complete(*operation, code);
  }
  link.outgoing.clear();
  link.unanswered.clear();
  want_room(rank, false);
}

// Closes the link. All messages that have arrived whole stay.
void Links::Engine::end(size_t rank, const std::string& why) {
  Link& link = links_[rank];
  if (!link.socket) return;
  stop_sending(link, rank, why);
  const int code = ended_code(static_cast<int>(rank));
  for (Operation* operation : link.posted) complete(*operation, code);
  for (const auto& [id, expected] : link.expected) {
    if (expected.operation != nullptr) complete(*expected.operation, code);
  }
  if (link.into != nullptr) complete(*link.into, code);
  link.into = nullptr;
  link.posted.clear();
  link.expected.clear();
  std::erase_if(link.arrived, [](const Arrived& message) { return !message.whole; });
  link.kept.reset();
  keep_in_children(link.socket.get());
  epoll_ctl(poll_.get(), EPOLL_CTL_DEL, link.socket.get(), nullptr);
  link.socket = Descriptor();
}

// -- Receiving

void Links::Engine::receive(Operation& operation) {
  Link& link = link_of(operation);
  const auto found = std::ranges::find_if(link.arrived, [&](const Arrived& message) {
    return message.communicator == operation.communicator && message.tag == operation.tag;
  });
  if (found != link.arrived.end()) return deliver(operation.rank, found, operation);
  if (!link.socket) return complete(operation, ended_code(static_cast<int>(operation.rank)));
  link.posted.push_back(&operation);
}

Operation* Links::Engine::receive_any(void* data, size_t bytes, int tag, CommHandle comm,
                                      int& peer) {
  const Communicator& ranks = communicators_[comm.value - 1];
  for (size_t i = 0; i < ranks.size(); ++i) {
    const size_t candidate = (next_any_ + i) % ranks.size();
    Link& link = links_[static_cast<size_t>(ranks[candidate])];
    const auto found = std::ranges::find_if(link.arrived, [&](const Arrived& message) {
      return message.communicator == comm.value && message.tag == tag;
    });
    if (found == link.arrived.end()) continue;
    next_any_ = candidate + 1;
    peer = static_cast<int>(candidate);
    Operation& made = start(false, data, bytes, peer, tag, comm);
    deliver(made.rank, found, made);
    return &made;
  }
  return nullptr;
}

void Links::Engine::deliver(size_t rank, std::list<Arrived>::iterator message,
                            Operation& operation) {
  Link& link = links_[rank];
  if (!message->whole) {
    expect(rank, message->id, message->bytes, operation);
  } else if (message->bytes > operation.bytes) {
    complete(operation, kTruncated);
  } else {
    if (message->bytes > 0) std::memcpy(operation.data, message->data.get(), message->bytes);
    complete(operation, kSuccess);
  }
  link.arrived.erase(message);
}

// Answers a kRequest that a receive has matched.
void Links::Engine::expect(size_t rank, uint64_t id, size_t bytes, Operation& operation) {
  if (bytes > operation.bytes) {
    complete(operation, kTruncated);
    return queue(rank, FrameKind::kDiscard, id, &operation);
  }
  links_[rank].expected[id] = {&operation, bytes};
  queue(rank, FrameKind::kClear, id, &operation);
}

Operation* Links::Engine::take_posted(Link& link, uint8_t communicator, int tag) {
  const auto found = std::ranges::find_if(link.posted, [&](const Operation* operation) {
    return operation->communicator == communicator && operation->tag == tag;
  });
  if (found == link.posted.end()) return nullptr;
  Operation* const operation = *found;
  link.posted.erase(found);
  return operation;
}

void Links::Engine::read(size_t rank) {
  Link& link = links_[rank];
  for (int reads = 0; reads < kReadsPerTurn && link.socket; ++reads) {
    std::array<iovec, 2> parts;
    size_t count = 0;
    const size_t direct = link.target != nullptr ? link.left : 0;
    if (direct > 0) parts[count++] = {link.target, direct};
    parts[count++] = {buffer_.data(), buffer_.size()};
    const ssize_t got = readv(link.socket.get(), parts.data(), static_cast<int>(count));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got < 0) return end(rank, describe(errno));
    if (got == 0) return end(rank, "the rank has closed it, or has ended");
    const auto bytes = static_cast<size_t>(got);
    const size_t placed = std::min(bytes, direct);
    try {
      if (placed > 0) {
        link.target += placed;
        link.left -= placed;
        if (link.left == 0) end_payload(rank);
      }
      take(rank, buffer_.data(), bytes - placed);
    } catch (const Malformed& malformed) {
      return end(rank, "it brought data that is not hbm's: " + malformed.what);
    } catch (const std::bad_alloc&) {
      return end(rank, "this rank has no memory for a message that it does not receive yet");
    }
    if (bytes < direct + buffer_.size()) return;  // the kernel has no more
  }
}

void Links::Engine::take(size_t rank, const std::byte* data, size_t bytes) {
  Link& link = links_[rank];
  while (bytes > 0 && link.socket) {
    if (link.left > 0) {
      const size_t part = std::min(bytes, link.left);
      if (link.target != nullptr) {
        std::memcpy(link.target, data, part);
        link.target += part;
      }
      link.left -= part;
      data += part;
      bytes -= part;
      if (link.left == 0) end_payload(rank);
      continue;
    }
    const size_t part = std::min(bytes, sizeof(FrameHeader) - link.header_bytes);
    std::memcpy(reinterpret_cast<std::byte*>(&link.header) + link.header_bytes, data, part);
    link.header_bytes += part;
    data += part;
    bytes -= part;
    if (link.header_bytes < sizeof(FrameHeader)) return;
    link.header_bytes = 0;
    begin_frame(rank);
  }
}

// Begins a payload of `bytes` bytes for a receive; null: discards it.
void Links::Engine::receive_into(Link& link, Operation* operation, size_t bytes) {
  link.into = operation;
  link.target = operation != nullptr ? operation->data : nullptr;
  link.left = bytes;
}

void Links::Engine::begin_frame(size_t rank) {
  Link& link = links_[rank];
  const FrameHeader& header = link.header;
  if (header.magic != kFrameMagic) throw Malformed{"another magic number"};
  if (header.communicator < 1 || header.communicator > kCommunicators || header.tag < 0) {
    throw Malformed{"no such communicator or tag"};
  }
  if (header.bytes > kLongestMessageBytes) {
    throw Malformed{"a message of " + std::to_string(header.bytes) + " bytes"};
  }
  switch (header.kind) {
    case FrameKind::kEager: {
      if (header.bytes > kEagerBytes) throw Malformed{"a long message without a request"};
      Operation* const operation = take_posted(link, header.communicator, header.tag);
      if (operation == nullptr) {
        link.kept = std::make_unique_for_overwrite<std::byte[]>(header.bytes);
        link.into = nullptr;
        link.target = link.kept.get();
        link.left = header.bytes;
      } else if (header.bytes > operation->bytes) {
        complete(*operation, kTruncated);
        receive_into(link, nullptr, header.bytes);
      } else {
        receive_into(link, operation, header.bytes);
      }
      if (header.bytes == 0) end_payload(rank);
      return;
    }
    case FrameKind::kRequest: {
      Operation* const operation = take_posted(link, header.communicator, header.tag);
      if (operation != nullptr) return expect(rank, header.id, header.bytes, *operation);
      link.arrived.push_back(
          {header.communicator, header.tag, header.bytes, header.id, false, nullptr});
      return;
    }
    case FrameKind::kClear: {
      const auto found = link.unanswered.find(header.id);
      if (found == link.unanswered.end()) throw Malformed{"an answer to no message"};
      Operation* const operation = found->second;
      link.unanswered.erase(found);
      if (operation == nullptr) return queue(rank, FrameKind::kWithdrawn, header.id);
      Outgoing frame;
      frame.header = {
          kFrameMagic,      FrameKind::kData, operation->communicator, 0, operation->tag, 0,
          operation->bytes, header.id};
      frame.data = operation->data;
      frame.bytes = operation->bytes;
      frame.operation = operation;
      return queue(rank, std::move(frame));
    }
    case FrameKind::kDiscard: {
      const auto found = link.unanswered.find(header.id);
      if (found == link.unanswered.end()) throw Malformed{"an answer to no message"};
      if (found->second != nullptr) complete(*found->second, kSuccess);
      link.unanswered.erase(found);
      return;
    }
    case FrameKind::kData: {
      const auto found = link.expected.find(header.id);
      if (found == link.expected.end() || found->second.bytes != header.bytes) {
        throw Malformed{"data that no receive has asked for"};
      }
      receive_into(link, found->second.operation, header.bytes);
      link.expected.erase(found);
      if (header.bytes == 0) end_payload(rank);
      return;
    }
    case FrameKind::kWithdrawn: {
      const auto found = link.expected.find(header.id);
      if (found == link.expected.end()) throw Malformed{"an answer to no receive"};
      if (found->second.operation != nullptr) {
        complete(*found->second.operation, withdrawn_code(static_cast<int>(rank)));
      }
      link.expected.erase(found);
      return;
    }
  }
  throw Malformed{"no such kind of frame"};
}

// A receive may have been posted while the message arrived: then the message is its.
void Links::Engine::end_payload(size_t rank) {
  Link& link = links_[rank];
  link.target = nullptr;
  if (link.into != nullptr) {
    complete(*std::exchange(link.into, nullptr), kSuccess);
  } else if (link.kept) {
    const FrameHeader& header = link.header;
    link.arrived.push_back({header.communicator, header.tag, header.bytes, header.id, true,
                            std::exchange(link.kept, nullptr)});
    Operation* const operation = take_posted(link, header.communicator, header.tag);
    if (operation != nullptr) deliver(rank, std::prev(link.arrived.end()), *operation);
  }
}

// -- Requests

// If a part of the message has arrived, the links discard the other part.
void Links::Engine::cancel(Operation& operation) {
  if (operation.done || operation.is_send) return;
  Link& link = link_of(operation);
  std::erase(link.posted, &operation);
  for (auto& [id, expected] : link.expected) {
    if (expected.operation == &operation) expected.operation = nullptr;
  }
  if (link.into == &operation) {
    link.into = nullptr;
    link.target = nullptr;
  }
  complete(operation, kCancelled);
}

void Links::Engine::withdraw(Operation& operation) noexcept {
  if (operation.done || !operation.is_send) return;
  Link& link = link_of(operation);
  for (auto& [id, send] : link.unanswered) {
    if (send == &operation) send = nullptr;
  }
  const auto frame = std::ranges::find(link.outgoing, &operation, &Outgoing::operation);
  if (frame != link.outgoing.end()) {
    try {
      frame->owned = std::make_unique_for_overwrite<std::byte[]>(frame->bytes);
      if (frame->bytes > 0) std::memcpy(frame->owned.get(), frame->data, frame->bytes);
      frame->data = frame->owned.get();
      frame->operation = nullptr;
    } catch (const std::bad_alloc&) {
      end(operation.rank, "this rank has no memory for the rest of a withdrawn message");
    }
  }
  complete(operation, kCancelled);
}

void Links::Engine::progress() {
  std::array<epoll_event, kEventsPerTurn> events;
  const int count = epoll_wait(poll_.get(), events.data(), kEventsPerTurn, 0);
  for (int i = 0; i < count; ++i) {
    const auto rank = static_cast<size_t>(events[static_cast<size_t>(i)].data.u64);
    const uint32_t found = events[static_cast<size_t>(i)].events;
    if ((found & EPOLLOUT) != 0 && links_[rank].socket) write(rank);
    if ((found & ~static_cast<uint32_t>(EPOLLOUT)) != 0 && links_[rank].socket) read(rank);
  }
}

// -- Links

namespace {

Operation& operation_of(Request request) { return *reinterpret_cast<Operation*>(request.value); }

}  // namespace

Links::Links(std::vector<Descriptor> sockets, std::string group)
    : engine_(std::make_unique<Engine>(std::move(sockets), std::move(group))) {}

Links::~Links() = default;

CommHandle Links::communicator(std::vector<int> ranks) {
  const std::lock_guard lock(engine_->mutex);
  return engine_->add_communicator(std::move(ranks));
}

int Links::poll() const noexcept { return engine_->poll(); }

int Links::highest_tag(CommHandle /*comm*/) const { return std::numeric_limits<int>::max(); }

Request Links::isend(const void* data, size_t bytes, int peer, int tag, CommHandle comm) const {
  const std::lock_guard lock(engine_->mutex);
  Operation& made = engine_->start(true, const_cast<void*>(data), bytes, peer, tag, comm);
  engine_->send(made);
  return {reinterpret_cast<std::uintptr_t>(&made)};
}

Request Links::irecv(void* data, size_t bytes, int peer, int tag, CommHandle comm) const {
  const std::lock_guard lock(engine_->mutex);
  Operation& made = engine_->start(false, data, bytes, peer, tag, comm);
  engine_->receive(made);
  return {reinterpret_cast<std::uintptr_t>(&made)};
}

Request Links::irecv_any(void* data, size_t bytes, int tag, CommHandle comm, int& peer) const {
  const std::lock_guard lock(engine_->mutex);
  engine_->progress();
  return {reinterpret_cast<std::uintptr_t>(engine_->receive_any(data, bytes, tag, comm, peer))};
}

void Links::cancel(Request request) const noexcept {
  const std::lock_guard lock(engine_->mutex);
  engine_->cancel(operation_of(request));
}

void Links::withdraw(Request request) const noexcept {
  const std::lock_guard lock(engine_->mutex);
  engine_->withdraw(operation_of(request));
}

bool Links::test(Request& request, const char* /*call*/) const {
  if (!request) return true;
  const std::lock_guard lock(engine_->mutex);
  if (!operation_of(request).done) engine_->progress();
  if (!operation_of(request).done) return false;
  engine_->check(engine_->finish(request));
  return true;
}

bool Links::test_ended(Request& request) const noexcept {
  if (!request) return true;
  const std::lock_guard lock(engine_->mutex);
  if (!operation_of(request).done) engine_->progress();
  if (!operation_of(request).done) return false;
  engine_->finish(request);
  return true;
}

size_t Links::test_some(std::span<Request> requests, std::span<Completion> completions) const {
  const std::lock_guard lock(engine_->mutex);
  const auto collect = [&] {
    size_t count = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      if (!requests[i] || !operation_of(requests[i]).done) continue;
      completions[count++] = {static_cast<int>(i), engine_->finish(requests[i])};
    }
    return count;
  };
  const size_t count = collect();
  if (count > 0) return count;
  engine_->progress();
  return collect();
}

void Links::check(int code, const char* /*call*/) const {
  const std::lock_guard lock(engine_->mutex);
  engine_->check(code);
}

bool Links::truncated(int code) const { return code == kTruncated; }

}  // namespace hbm::communicator::tcp
