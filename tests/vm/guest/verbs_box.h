// A memory box in a process of its own, and clients that do by hand what the transport does.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "box/protocol/frame_stream.h"
#include "box/protocol/protocol.h"
#include "box/protocol/seal.h"
#include "box/transport/transport.h"
#include "box/verbs/client/connector.h"
#include "box/verbs/common/buffer_pool.h"

namespace hbm::verbs {

inline constexpr const char* kHost = "10.9.0.1";  // of verbs_link.sh
inline constexpr const char* kToken = "no secret";

struct BoxOptions {
  uint16_t port = 0;  // of TCP
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

// main() calls it first: whether this process is such a box, which has ended then.
bool was_box(int argc, char** argv);

// A client that has joined, and connects queue pairs as the test says.
class RawClient {
 public:
  explicit RawClient(uint16_t port, uint32_t flags = 0);
  ~RawClient();

  ChallengeMessage ask();
  CallMessage call(const ChallengeMessage& challenge, uint8_t lane,
                   uint8_t lanes) const;                                     // with its proof
  void connect(const ChallengeMessage& challenge, const CallMessage& call);  // the next lane
  void connect(uint8_t lanes);                                               // all

  // A request by lane 0, and its reply.
  struct Reply {
    smb::Header header;
    std::vector<std::byte> body;
    std::vector<std::byte> payload;
  };
  Reply request(smb::Opcode opcode, const void* body, uint32_t body_bytes);
  void send(const void* message, uint32_t bytes);  // with its tag
  void send_plain(const void* message, uint32_t bytes);

  // A segment, and its key for each lane.
  struct Attached {
    smb::Id key;
    uint64_t address = 0;
    std::vector<uint32_t> rkeys;
  };
  Attached alloc(uint64_t size, uint32_t handle, const smb::Id& key = {}, uint32_t flags = 0);
  void free(uint32_t handle);

  // One-sided, 8 bytes. How it was completed.
  ibv_wc_status read(size_t lane, uint64_t address, uint32_t rkey);
  ibv_wc_status write(size_t lane, uint64_t address, uint32_t rkey, uint64_t value);
  uint64_t value() const;  // of the last read

  bool closed();  // by the box

  const std::shared_ptr<Domain>& domain() const { return connector_->domain(); }
  // Makes a window on lane 0, binds it to a region made with IBV_ACCESS_MW_BIND, and ends it.
  void bind(const MemoryRegion& region, void* memory, uint64_t bytes);

 private:
  ibv_qp_init_attr attributes() const;
  ibv_wc wait();
  ibv_wc_status access(ibv_wr_opcode opcode, size_t lane, uint64_t address, uint32_t rkey);

  std::unique_ptr<smb::FrameStream> stream_;
  smb::Joined joined_{};
  uint32_t flags_;
  std::unique_ptr<Connector> connector_;
  CompletionQueue completions_;
  std::unique_ptr<BufferPool> buffers_;  // 0: to send, 1: to receive, 2: to read and write
  std::vector<CmId> lanes_;
  std::optional<smb::Seal> of_requests_;
  std::optional<smb::Seal> of_replies_;
  uint64_t last_number_ = 0;
};

}  // namespace hbm::verbs
