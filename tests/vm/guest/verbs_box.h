// A memory box in a process of its own, and clients that perform the steps of the transport one by
// one.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "box/protocol/authenticator.h"
#include "box/protocol/frame_stream.h"
#include "box/protocol/protocol.h"
#include "box/transport/transport.h"
#include "box/verbs/client/connector.h"
#include "box/verbs/common/buffer_pool.h"

namespace hbm::box::verbs {

inline constexpr const char* kHost = "10.9.0.1";  // set by verbs_link.sh
inline constexpr const char* kToken = "no secret";

struct BoxOptions {
  uint16_t port = 0;  // TCP port; 0: a free one
  std::string store;
  std::chrono::milliseconds lease{30'000};
};

// Runs this program again, as a box.
class BoxProcess {
 public:
  explicit BoxProcess(const BoxOptions& options = {});
  ~BoxProcess();
  BoxProcess(const BoxProcess&) = delete;
  BoxProcess& operator=(const BoxProcess&) = delete;

  const std::string& url() const { return url_; }
  uint16_t port() const;
  pid_t pid() const { return pid_; }
  void kill();

 private:
  pid_t pid_ = -1;
  std::string url_;
};

// If this process was started as a box, serves until the box ends, and then returns true. main()
// calls it first.
bool was_box(int argc, char** argv);

// A client that has joined. The test decides which queue pairs it connects, and how.
class RawClient {
 public:
  explicit RawClient(uint16_t port, uint32_t flags = 0);
  ~RawClient();

  common::ChallengeMessage ask();
  common::CallMessage call(const common::ChallengeMessage& challenge, uint8_t queue_pair,
                           uint8_t queue_pairs) const;  // contains the proof
  void connect(const common::ChallengeMessage& challenge,
               const common::CallMessage& call);  // connects the next queue pair
  void connect(uint8_t queue_pairs);              // connects all queue pairs

  // The reply to a request on queue pair 0.
  struct Reply {
    protocol::Header header;
    std::vector<std::byte> body;
    std::vector<std::byte> payload;
  };
  Reply request(protocol::Opcode opcode, const void* body, uint32_t body_bytes);
  void send(const void* message, uint32_t bytes);  // appends the message's tag
  void send_plain(const void* message, uint32_t bytes);

  // A segment, and its RDMA key for each queue pair.
  struct Attached {
    protocol::Id key;
    uint64_t address = 0;
    std::vector<uint32_t> rkeys;
  };
  Attached alloc(uint64_t size, uint32_t handle, const protocol::Id& key = {}, uint32_t flags = 0);
  void free(uint32_t handle);

  // One-sided accesses of 8 bytes. Return the status of the completion.
  ibv_wc_status read(size_t queue_pair, uint64_t address, uint32_t rkey);
  ibv_wc_status write(size_t queue_pair, uint64_t address, uint32_t rkey, uint64_t value);
  uint64_t value() const;  // of the last read

  bool closed();  // true once the box has closed the connection

  const std::shared_ptr<common::Domain>& domain() const { return connector_->domain(); }
  // Creates a window on queue pair 0, binds it to a region made with IBV_ACCESS_MW_BIND, and
  // destroys it.
  void bind(const common::MemoryRegion& region, void* memory, uint64_t bytes);

 private:
  ibv_qp_init_attr attributes() const;
  ibv_wc wait();
  ibv_wc_status access(ibv_wr_opcode opcode, size_t queue_pair, uint64_t address, uint32_t rkey);

  std::unique_ptr<protocol::FrameStream> stream_;
  protocol::Joined joined_{};
  uint32_t flags_;
  std::unique_ptr<client::Connector> connector_;
  common::CompletionQueue completions_;
  std::unique_ptr<common::BufferPool> buffers_;  // 0: to send, 1: to receive, 2: to read and write
  std::vector<common::CmId> queue_pairs_;
  std::optional<protocol::Authenticator> request_authenticator_;
  std::optional<protocol::Authenticator> reply_authenticator_;
  uint64_t last_number_ = 0;
};

}  // namespace hbm::box::verbs
