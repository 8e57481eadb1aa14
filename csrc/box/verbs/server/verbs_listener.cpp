#include "box/verbs/server/verbs_listener.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "box/server/request_handler.h"
#include "box/verbs/common/buffer_pool.h"
#include "box/verbs/common/tuning.h"

namespace hbm::box::verbs::server {
namespace {

using std::chrono::milliseconds;

constexpr uint8_t kRetryForEver = 7;

// Listens on the device with the address `host`, or on any device if `host` is empty.
common::CmId listen_on(rdma_event_channel* channel, const std::string& host, uint16_t port) {
  rdma_cm_id* made = nullptr;
  if (rdma_create_id(channel, &made, nullptr, RDMA_PS_TCP) != 0) {
    throw Error(ErrorKind::kUnavailable, common::refused("open the connection manager", errno));
  }
  common::CmId id(made);
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string where = (host.empty() ? "::" : host) + " port " + std::to_string(port);
  if (const int error = getaddrinfo(host.empty() ? "::" : host.c_str(),
                                    std::to_string(port).c_str(), &hints, &found);
      error != 0) {
    throw Error(ErrorKind::kInvalid, "RDMA: no address of " + host + ": " + gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, common::DestroyBy<freeaddrinfo>> address(found);
  if (rdma_bind_addr(made, address->ai_addr) != 0 ||
      rdma_listen(made, common::kListenBacklog) != 0) {
    throw Error(errno == EADDRINUSE ? ErrorKind::kUnavailable : ErrorKind::kInvalid,
                common::refused("listen at " + where, errno) +
                    "; name an address of an RDMA device's network interface");
  }
  return id;
}

ibv_context* device_of(const rdma_cm_id& listener) {
  ibv_context* device = listener.verbs != nullptr ? listener.verbs : common::first_device();
  if (device == nullptr) throw Error(ErrorKind::kUnavailable, "this host has no RDMA device");
  return device;
}

}  // namespace

VerbsListener::VerbsListener(box::server::RequestHandler& handler,
                             const VerbsListenerOptions& options)
    : options_(options),
      channel_(rdma_create_event_channel()),
      log_(common::kMostRefusalWarnings, common::kRefusalWarningPeriod),
      challenges_(options.token, options.seal, options.max_queue_pairs) {
  if (channel_ == nullptr || common::first_device() == nullptr) {
    throw Error(ErrorKind::kUnavailable, "this host has no RDMA device");
  }
  fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
  listener_ = listen_on(channel_.get(), options.host, options.port);
  port_ = ntohs(rdma_get_src_port(listener_.get()));
  const auto domain = common::Domain::open(device_of(*listener_));
  const uint32_t completions = options.max_clients * Peer::completions(common::kExpectedQueuePairs);
  context_.reset(new Peer::Context{SharedQueues(domain, options.messages, completions),
                                   BoxMemory(domain, options.windows),
                                   handler,
                                   {}});
  room_ = context_->queues.room();
  // Capture the context, not the listener: segments may be created while the listener is destroyed.
  handler.on_new_segment([context = context_](box::server::storage::BoxSegment& segment) {
    context->memory.add(segment);
  });
  log::info("clients may come over RDMA: " + domain->name() + ", port " + std::to_string(port_) +
            (context_->memory.windows() ? "" : ", without memory windows"));
  acceptor_ = std::thread(&VerbsListener::accept_clients, this);
  receiver_ = std::thread(&VerbsListener::receive, this);
}

VerbsListener::~VerbsListener() {
  context_->handler.on_new_segment([](box::server::storage::BoxSegment&) {});
  stopping_ = true;
  context_->doomed.signal();
  acceptor_.join();
  receiver_wake_event_.signal();
  receiver_.join();
}

void VerbsListener::drain(uint32_t most_ms) {
  context_->closing = true;
  const auto until = Peer::Clock::now() + milliseconds(most_ms);
  context_->doomed.signal();
  while (!settled_ && Peer::Clock::now() < until)
    std::this_thread::sleep_for(common::kDrainPollPeriod);
}

void VerbsListener::receive() {
  try {
    while (!stopping_) context_->queues.wait(receiver_wake_event_);
  } catch (const Error& error) {
    log::error(std::string(error.what()) + "; no client is served over RDMA any more");
  }
}

void VerbsListener::accept_clients() {
  while (!stopping_) {
    std::array<pollfd, 2> ends{{{channel_->fd, POLLIN, 0}, {context_->doomed.fd(), POLLIN, 0}}};
    const bool soon = !leaving_.empty() || context_->closing;
    const milliseconds most = soon ? common::kLeavingSweepPeriod : common::kSweepPeriod;
    poll(ends.data(), ends.size(), static_cast<int>(most.count()));
    if (ends[1].revents != 0) context_->doomed.clear();
    take_events();
    sweep();
  }
  while (!peers_.empty()) leave(peers_.back());
  const auto until = Peer::Clock::now() + common::kFarewellTimeout;
  while (!leaving_.empty() && Peer::Clock::now() < until) {
    take_events();
    sweep();
    std::this_thread::sleep_for(common::kDrainPollPeriod);
  }
  for (const Leaving& leaving : leaving_) leaving.peer->destroy();
}

void VerbsListener::take_events() {
  rdma_cm_event* event = nullptr;
  while (rdma_get_cm_event(channel_.get(), &event) == 0) {
    rdma_cm_id* const id = event->id;
    const auto type = event->event;
    const auto call = common::decode<common::CallMessage>(event->param.conn.private_data,
                                                          event->param.conn.private_data_len);
    const uint8_t reads = event->param.conn.responder_resources;
    rdma_ack_cm_event(event);
    if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
      answer(common::CmId(id), call, reads);
      continue;
    }
    const auto entry = queue_pairs_.find(id);
    if (entry == queue_pairs_.end()) continue;
    if (type == RDMA_CM_EVENT_ESTABLISHED) {
      entry->second->ready(id->qp);
    } else if (type != RDMA_CM_EVENT_TIMEWAIT_EXIT) {
      leave(entry->second);  // disconnected, or never connected
    }
  }
}

void VerbsListener::answer(common::CmId id, const std::optional<common::CallMessage>& call,
                           uint8_t reads) {
  try {
    if (!call)
      throw box::server::Refusal(protocol::Status::kMalformed,
                                 "not a call by a memory box's client");
    if (context_->closing) {
      throw box::server::Refusal(protocol::Status::kClosing, "the memory box is shutting down");
    }
    if (id->verbs != context_->queues.domain()->device()) {
      throw box::server::Refusal(
          protocol::Status::kUnsupported,
          "the memory box serves clients over " + context_->queues.domain()->name());
    }
    if (call->queue_pairs == 0) return challenge(*id);
    let_in(std::move(id), *call, reads);
  } catch (const box::server::Refusal& no) {
    if (id == nullptr) return;
    const common::RefusalMessage refusal = common::refusal(no.status(), no.what());
    rdma_reject(id.get(), &refusal, sizeof(refusal));
    log_.warn(std::string("refused a client over RDMA: ") + no.what());
  }
}

void VerbsListener::challenge(rdma_cm_id& id) {
  const common::ChallengeMessage challenge = challenges_.issue();
  rdma_reject(&id, &challenge, sizeof(challenge));
}

void VerbsListener::let_in(common::CmId&& id, const common::CallMessage& call, uint8_t reads) {
  IssuedChallenge& challenge = challenges_.met_by(call);
  std::shared_ptr<Peer> peer = challenge.peer.lock();
  if (call.queue_pair == 0) {
    peer = welcome(call, challenge.hello);
    challenge.peer = peer;
  } else if (peer == nullptr || peer->closed()) {
    throw box::server::Refusal(protocol::Status::kExpired, "its other queue pairs are closed");
  }
  accept(std::move(id), call, challenge, peer, reads);
  challenges_.admitted(call);
}

std::shared_ptr<Peer> VerbsListener::welcome(const common::CallMessage& call,
                                             const protocol::Hello& hello) {
  if (peers_.size() + leaving_.size() >= options_.max_clients ||
      room_ < Peer::completions(call.queue_pairs)) {
    throw box::server::Refusal(protocol::Status::kExhausted,
                               "the memory box has " + std::to_string(peers_.size()) +
                                   " clients over RDMA, the most that it has room for");
  }
  protocol::Join join{};
  join.session = call.session;
  join.flags = (call.flags & protocol::Join::kReadOnlyClient) | protocol::Join::kFurtherConnection;
  box::server::Joining joining = context_->handler.join(join, protocol::TransportKind::kVerbs, "");
  if (joining.session == nullptr) throw box::server::Refusal(joining.status, joining.cause);
  auto peer = std::make_shared<Peer>(context_, std::move(joining.session), call.queue_pairs,
                                     mac_keys(call, options_.token, hello));
  room_ -= Peer::completions(call.queue_pairs);
  peers_.push_back(peer);
  return peer;
}

void VerbsListener::accept(common::CmId&& id, const common::CallMessage& call,
                           const IssuedChallenge& challenge, const std::shared_ptr<Peer>& peer,
                           uint8_t reads) {
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = context_->queues.completions();
  attributes.srq = context_->queues.receives();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = call.queue_pair == 0 ? common::kRepliesInFlight + 1 : 1;
  attributes.cap.max_send_sge = 1;
  attributes.cap.max_inline_data = call.queue_pair == 0 ? common::kInlineBytes : 0;
  try {
    common::make_queue_pair(id.get(), *context_->queues.domain(), attributes);
  } catch (const Error& error) {
    leave(peer);
    throw box::server::Refusal(protocol::Status::kExhausted, error.what());
  }
  const common::WelcomeMessage welcome{common::WelcomeMessage::kMagic, 0,
                                       welcome_proof(call, options_.token, challenge.hello)};
  rdma_conn_param with{};
  with.private_data = &welcome;
  with.private_data_len = sizeof(welcome);
  with.responder_resources = static_cast<uint8_t>(std::min(
      {int{reads}, context_->queues.domain()->limits().max_qp_rd_atom, common::kReadsInFlight}));
  with.rnr_retry_count = kRetryForEver;
  rdma_cm_id* const accepted = id.get();
  peer->add(std::move(id), attributes.cap.max_inline_data);
  queue_pairs_[accepted] = peer;
  if (rdma_accept(accepted, &with) != 0) {
    log_.warn(common::refused("accept a client's queue pair", errno));
    leave(peer);
  }
}

void VerbsListener::leave(std::shared_ptr<Peer> peer) {
  if (std::erase(peers_, peer) == 0) return;
  peer->close();
  leaving_.push_back({peer, Peer::Clock::now() + common::kFarewellTimeout});
}

void VerbsListener::sweep() {
  const auto now = Peer::Clock::now();
  const milliseconds silent(2 * int64_t{context_->handler.lease_ms()});
  const auto over = [&](const std::shared_ptr<Peer>& peer) {
    if (peer->doomed()) return peer->settled() || now > peer->seen() + common::kFarewellTimeout;
    return now > peer->seen() + silent ||
           (now > peer->made() + common::kConnectTimeout && !peer->complete());
  };
  std::vector<std::shared_ptr<Peer>> gone;
  std::ranges::copy_if(peers_, std::back_inserter(gone), over);
  for (const auto& peer : gone) leave(peer);

  std::erase_if(leaving_, [&](const Leaving& leaving) {
    if (!leaving.peer->quiet() && now < leaving.until) return false;
    std::erase_if(queue_pairs_, [&](const auto& entry) { return entry.second == leaving.peer; });
    room_ += Peer::completions(leaving.peer->queue_pair_count());
    leaving.peer->destroy();
    return true;
  });
  settled_ = context_->closing &&
             std::ranges::all_of(peers_, [](const auto& peer) { return peer->settled(); });
}

}  // namespace hbm::box::verbs::server
