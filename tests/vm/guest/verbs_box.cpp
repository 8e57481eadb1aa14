#include "guest/verbs_box.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "box/protocol/proof.h"
#include "box/server.h"
#include "box/transport/join.h"
#include "box/verbs/common/buffer_pool.h"

namespace hbm::box::verbs {
namespace {

using namespace std::chrono_literals;
using protocol::Opcode;

constexpr const char* kBoxWord = "--box";

protocol::Deadline soon() { return std::chrono::steady_clock::now() + 120s; }

void check(bool good, const char* what) {
  if (!good) throw std::runtime_error(what);
}

void serve(const char* const* words) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  ServerOptions options;
  options.listen = {std::string(kHost) + ":" + words[0]};
  options.store = words[1];
  options.lease = std::chrono::milliseconds(std::stoi(words[2]));
  options.memory = uint64_t{256} << 20;
  options.policy = memory::Policy::kDdr;
  options.token = kToken;
  options.verbs = VerbsChoice::kOn;
  const Server server(options);
  const std::string url = server.url() + "\n";
  check(write(std::stoi(words[3]), url.data(), url.size()) > 0, "the test is gone");
  pause();
}

}  // namespace

bool was_box(int argc, char** argv) {
  if (argc < 2 || std::strcmp(argv[1], kBoxWord) != 0) return false;
  serve(argv + 2);
  return true;
}

BoxProcess::BoxProcess(const BoxOptions& options) {
  std::array<int, 2> ends{};
  check(pipe(ends.data()) == 0, "pipe");
  pid_ = fork();
  if (pid_ == 0) {
    const std::string port = std::to_string(options.port);
    const std::string lease = std::to_string(options.lease.count());
    const std::string out = std::to_string(ends[1]);
    execl("/proc/self/exe", "box", kBoxWord, port.c_str(), options.store.c_str(), lease.c_str(),
          out.c_str(), nullptr);
    _exit(127);
  }
  ::close(ends[1]);
  for (char c = 0; ::read(ends[0], &c, 1) == 1 && c != '\n';) url_ += c;
  ::close(ends[0]);
  check(!url_.empty(), "the box did not start");
}

BoxProcess::~BoxProcess() { kill(); }

void BoxProcess::kill() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

uint16_t BoxProcess::port() const {
  return static_cast<uint16_t>(std::stoi(url_.substr(url_.rfind(':') + 1)));
}

RawClient::RawClient(uint16_t port, uint32_t flags)
    : flags_(flags | protocol::Join::kAuthenticated) {
  const protocol::Address address{kHost, port, {}};
  stream_ = std::make_unique<protocol::FrameStream>(protocol::connect_to(address, soon()));
  protocol::Join join{};
  join.flags = flags_;
  joined_ = transport::join_box(*stream_, address.host_and_port(), join, kToken, soon());
  connector_ = std::make_unique<client::Connector>(kHost, joined_.verbs_port, soon());
  completions_.reset(ibv_create_cq(connector_->domain()->device(), 64, nullptr, nullptr, 0));
  check(completions_ != nullptr, "ibv_create_cq");
  buffers_ = std::make_unique<common::BufferPool>(connector_->domain(), 3, common::kReplyBytes);
}

RawClient::~RawClient() = default;

ibv_qp_init_attr RawClient::attributes() const {
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = completions_.get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {8, 8, 1, 1, 0};
  return attributes;
}

common::ChallengeMessage RawClient::ask() { return connector_->ask(attributes()); }

common::CallMessage RawClient::call(const common::ChallengeMessage& challenge, uint8_t queue_pair,
                                    uint8_t queue_pairs) const {
  common::CallMessage call{};
  call.magic = common::CallMessage::kMagic;
  call.challenge_id = challenge.challenge_id;
  call.session = joined_.session;
  call.flags = static_cast<uint16_t>(flags_);
  call.queue_pair = queue_pair;
  call.queue_pairs = queue_pairs;
  prove(call, kToken, challenge.hello);
  return call;
}

void RawClient::connect(const common::ChallengeMessage& challenge,
                        const common::CallMessage& call) {
  ibv_qp_init_attr given = attributes();
  const protocol::Proof expected = welcome_proof(call, kToken, challenge.hello);
  queue_pairs_.push_back(connector_->connect(call, given, expected));
  if (queue_pairs_.size() > 1) return;
  const protocol::MacKeys keys = mac_keys(call, kToken, challenge.hello).value();
  request_authenticator_.emplace(keys.to_box);
  reply_authenticator_.emplace(keys.to_client);
}

void RawClient::connect(uint8_t queue_pairs) {
  const common::ChallengeMessage challenge = ask();
  for (uint8_t queue_pair = 0; queue_pair < queue_pairs; ++queue_pair)
    connect(challenge, call(challenge, queue_pair, queue_pairs));
}

ibv_wc RawClient::wait() {
  const auto until = soon();
  ibv_wc completion{};
  while (ibv_poll_cq(completions_.get(), 1, &completion) == 0) {
    check(std::chrono::steady_clock::now() < until, "no completion came");
    std::this_thread::yield();
  }
  return completion;
}

void RawClient::send(const void* message, uint32_t bytes) {
  const auto* const first = static_cast<const std::byte*>(message);
  std::vector<std::byte> tagged(first, first + bytes);
  const protocol::Tag tag = request_authenticator_->next_tag(tagged);
  tagged.insert(tagged.end(), tag.begin(), tag.end());
  send_plain(tagged.data(), static_cast<uint32_t>(tagged.size()));
}

void RawClient::send_plain(const void* message, uint32_t bytes) {
  std::memcpy(buffers_->at(0), message, bytes);
  ibv_sge entry = buffers_->entry(0, bytes);
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.sg_list = &entry;
  wr.num_sge = 1;
  ibv_send_wr* bad = nullptr;
  check(ibv_post_send(queue_pairs_[0]->qp, &wr, &bad) == 0, "ibv_post_send");
}

RawClient::Reply RawClient::request(Opcode opcode, const void* body, uint32_t body_bytes) {
  ibv_sge entry = buffers_->entry(1, common::kReplyBytes);
  ibv_recv_wr receive{};
  receive.sg_list = &entry;
  receive.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  check(ibv_post_recv(queue_pairs_[0]->qp, &receive, &bad) == 0, "ibv_post_recv");

  protocol::Header header;
  header.opcode = opcode;
  header.body_bytes = body_bytes;
  header.id = 1;
  std::vector<std::byte> frame(sizeof(header) + body_bytes);
  std::memcpy(frame.data(), &header, sizeof(header));
  if (body_bytes > 0) std::memcpy(frame.data() + sizeof(header), body, body_bytes);
  send(frame.data(), static_cast<uint32_t>(frame.size()));
  uint32_t received = 0;
  for (int left = 2; left > 0; --left) {
    const ibv_wc completion = wait();
    check(completion.status == IBV_WC_SUCCESS, "it was closed");
    if (completion.opcode == IBV_WC_RECV) received = completion.byte_len;
  }
  reply_authenticator_->verify({buffers_->at(1), received});

  Reply reply;
  const std::byte* at = buffers_->at(1);
  std::memcpy(&reply.header, at, sizeof(header));
  at += sizeof(header);
  reply.body.assign(at, at + reply.header.body_bytes);
  at += reply.header.body_bytes;
  reply.payload.assign(at, at + reply.header.payload_bytes);
  return reply;
}

RawClient::Attached RawClient::alloc(uint64_t size, uint32_t handle, const protocol::Id& key,
                                     uint32_t flags) {
  protocol::Alloc alloc{};
  alloc.sequence.number = ++last_number_;
  alloc.key = key;
  alloc.size = size;
  alloc.handle = handle;
  alloc.flags = flags;
  const Reply reply = request(Opcode::kAlloc, &alloc, sizeof(alloc));
  check(reply.header.status == protocol::Status::kOk, "alloc");
  protocol::Allocated allocated{};
  std::memcpy(&allocated, reply.body.data(), sizeof(allocated));
  Attached attached{allocated.key, allocated.address,
                    std::vector<uint32_t>(reply.payload.size() / sizeof(uint32_t))};
  std::memcpy(attached.rkeys.data(), reply.payload.data(), reply.payload.size());
  return attached;
}

void RawClient::free(uint32_t handle) {
  protocol::Release release{};
  release.sequence.number = ++last_number_;
  release.handle = handle;
  check(request(Opcode::kFree, &release, sizeof(release)).header.status == protocol::Status::kOk,
        "free");
}

ibv_wc_status RawClient::access(ibv_wr_opcode opcode, size_t queue_pair, uint64_t address,
                                uint32_t rkey) {
  ibv_sge entry = buffers_->entry(2, sizeof(uint64_t));
  ibv_send_wr wr{};
  wr.opcode = opcode;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.sg_list = &entry;
  wr.num_sge = 1;
  wr.wr.rdma.remote_addr = address;
  wr.wr.rdma.rkey = rkey;
  ibv_send_wr* bad = nullptr;
  check(ibv_post_send(queue_pairs_[queue_pair]->qp, &wr, &bad) == 0, "ibv_post_send");
  return wait().status;
}

ibv_wc_status RawClient::read(size_t queue_pair, uint64_t address, uint32_t rkey) {
  return access(IBV_WR_RDMA_READ, queue_pair, address, rkey);
}

ibv_wc_status RawClient::write(size_t queue_pair, uint64_t address, uint32_t rkey, uint64_t value) {
  std::memcpy(buffers_->at(2), &value, sizeof(value));
  return access(IBV_WR_RDMA_WRITE, queue_pair, address, rkey);
}

uint64_t RawClient::value() const {
  uint64_t value = 0;
  std::memcpy(&value, buffers_->at(2), sizeof(value));
  return value;
}

void RawClient::bind(const common::MemoryRegion& region, void* memory, uint64_t bytes) {
  const std::unique_ptr<ibv_mw, common::DestroyBy<ibv_dealloc_mw>> window(
      ibv_alloc_mw(domain()->get(), IBV_MW_TYPE_2));
  check(window != nullptr, "ibv_alloc_mw");
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_BIND_MW;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.bind_mw.mw = window.get();
  wr.bind_mw.rkey = ibv_inc_rkey(window->rkey);
  wr.bind_mw.bind_info = {region.get(), reinterpret_cast<uintptr_t>(memory), bytes,
                          IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE};
  ibv_send_wr* bad = nullptr;
  check(ibv_post_send(queue_pairs_[0]->qp, &wr, &bad) == 0, "ibv_post_send");
  check(wait().status == IBV_WC_SUCCESS, "bind");
}

bool RawClient::closed() {
  const auto until = soon();
  while (!connector_->closed()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

}  // namespace hbm::box::verbs
