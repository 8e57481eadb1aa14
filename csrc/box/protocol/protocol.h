// The frames between a memory box and its clients, on every transport. docs/design/wire-protocol.md
// describes the same format.
//
// A frame is a Header, a fixed struct of `body_bytes`, and `payload_bytes` of bulk data or text.
// All integers are little-endian; structs are sent with their layout in memory. A reply repeats the
// opcode and id of its request. A reply whose status is not kOk has no body, and its payload is the
// cause as text.
//
// The first frame of a connection is the Hello of the box, the second the Join of the client.
// Everything after the reply to the Join may be authenticated (authenticator.h).
//
// Threads: any.
#pragma once

#include <array>
#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include "box/protocol/tuning.h"

namespace hbm::box::protocol {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

inline constexpr uint32_t kMagic = 0x31424D53;  // "SMB1"
inline constexpr uint8_t kVersion = 4;
inline constexpr uint32_t kMaxBody = 256;  // bytes; the other limits are in tuning.h

// 128 bits that name a segment (random, unless the user chooses the key), a session, or a store
// generation. All zero: none.
struct Id {
  uint64_t high = 0;
  uint64_t low = 0;

  explicit operator bool() const noexcept { return (high | low) != 0; }
  friend auto operator<=>(const Id&, const Id&) = default;
};

enum class Opcode : uint8_t {
  kHello = 1,   // box to client, unsolicited
  kJoin,        // proves the token; begins or resumes a session, or adds a connection to it
  kLeave,       // ends the session now, with its attachments; request and reply have no body
  kPing,        // renews the lease, as any request does; request and reply have no body
  kAlloc,       // sequenced: creates a segment, or attaches to one
  kAttach,      // restores the attachment of a handle after a reconnect
  kFree,        // sequenced: ends the attachment
  kDelete,      // sequenced: removes the key; the memory stays until the last attachment ends
  kRead,        // the reply's payload is the data
  kWrite,       // the request's payload is the data
  kAccumulate,  // sequenced
  kFetchAdd,    // sequenced
  kStats,       // the reply's payload is a StatsTotals and its tables
  kExists,      // the reply says whether a segment has the key
};
inline constexpr uint8_t kLastOpcode = static_cast<uint8_t>(Opcode::kExists);

enum class Status : uint16_t {
  kOk,
  kMalformed,     // a bug or an attack; a malformed frame ends the connection
  kDenied,        // the token is wrong, or the user may not use the Unix socket
  kReadOnly,      // the client or the attachment may not write
  kNotAttached,   // no such handle in this session
  kNoSuchKey,     // no segment has the key
  kExists,        // create: a segment has the key
  kSizeMismatch,  // attach: the segment has another size
  kRange,         // past the end of the segment, or unaligned for the type
  kExhausted,     // the pool's memory, or another limit of the box, is used up
  kUnsupported,   // the box does not support these types, ranges or options
  kExpired,       // the session has ended, or is unknown to this box
  kClosing,       // the box is shutting down
  kInternal,      // the box failed; its log says more
};

struct Header {
  uint32_t magic = kMagic;
  uint8_t version = kVersion;
  Opcode opcode{};
  Status status{};  // kOk in requests
  uint32_t body_bytes = 0;
  uint32_t payload_bytes = 0;
  uint64_t id = 0;  // chosen by the client for each request; not the sequence number
};
static_assert(sizeof(Header) == 24);

using Nonce = std::array<std::byte, 32>;
using Proof = std::array<std::byte, 32>;  // HMAC-SHA-256, see proof.h

struct Hello {
  Nonce nonce;
  uint32_t token_required;  // 0: the box has no token and ignores proofs
  uint32_t authenticated;   // 1: both directions are authenticated after the join
};
static_assert(sizeof(Hello) == 40);

struct Join {
  static constexpr uint32_t kReadOnlyClient = 1;     // the session may not write
  static constexpr uint32_t kFurtherConnection = 2;  // another connection of a live session
  static constexpr uint32_t kAuthenticated = 4;      // as Hello::authenticated; the proof covers it

  Nonce nonce;
  Proof proof;
  Id session;  // none: begin a new session
  uint32_t flags;
  uint32_t pid;  // of the client, for statistics
};
static_assert(sizeof(Join) == 88);

struct Joined {
  Proof proof;            // proves that the box knows the token
  Id session;             // the requested or the new one
  Id generation;          // changes when the box has lost all segments
  uint64_t applied;       // last sequence number that the session has executed; 0: none
  uint32_t lease_ms;      // a session ends after this long without a frame
  uint16_t verbs_port;    // 0: the box serves no clients over RDMA
  uint16_t resumed;       // 1: the attachments of the session are intact
  char boot_id[40];       // of the box's kernel; null-terminated
  char socket_path[108];  // of its Unix socket; null-terminated
  uint32_t reserved;
};
static_assert(sizeof(Joined) == 232 && sizeof(Joined) <= kMaxBody);

// Begins the body of every sequenced request. Numbers start at 1 and rise by 1 over the life of the
// session, across reconnects. A client sends them in order, on one connection. If the box has
// already executed the request with this number, it replays the first reply and does not execute
// the request again.
struct Sequence {
  uint64_t number;
  uint64_t answered;  // the client has the replies to all numbers up to this one
};

enum class AllocMode : uint32_t { kAuto, kCreate, kAttach };

struct Alloc {
  static constexpr uint32_t kReadOnly = 1;   // attach for reading only
  static constexpr uint32_t kTemporary = 2;  // deleted when its last attachment ends
  static constexpr uint32_t kAnySize = 4;    // attach to any size; `size` is 0 then

  Sequence sequence;
  Id key;           // none: the box chooses one
  uint64_t size;    // bytes
  uint32_t handle;  // chosen by the client for the attachment; must be unused
  AllocMode mode;
  uint32_t flags;
  uint32_t reserved;
};
static_assert(sizeof(Alloc) == 56);

struct Attach {
  Id key;
  uint64_t size;
  uint32_t handle;
  uint32_t flags;  // of Alloc
};
static_assert(sizeof(Attach) == 32);

// The reply to kAlloc and kAttach. On a Unix socket the segment's descriptor is passed with the
// frame; on verbs the payload is one remote key (uint32_t) for each queue pair.
struct Allocated {
  Id key;
  uint64_t size;
  uint32_t created;  // 1: created by this request, zero-filled
  uint32_t reserved;
  uint64_t address;  // verbs: of the first byte of the segment
};
static_assert(sizeof(Allocated) == 40);

struct Release {  // kFree, kDelete
  Sequence sequence;
  uint32_t handle;
  uint32_t reserved;
};
static_assert(sizeof(Release) == 24);

struct Transfer {  // kRead, kWrite
  uint64_t offset;
  uint32_t bytes;  // <= kMaxPayload; of a kWrite: equals payload_bytes
  uint32_t handle;
};
static_assert(sizeof(Transfer) == 16);

struct Accumulate {  // target[i] += scale * source[i], or target[i] = scale * source[i]
  Sequence sequence;
  uint64_t target_offset;  // bytes; a multiple of the target's element size
  uint64_t source_offset;  // bytes; a multiple of the source's element size
  uint64_t bytes;          // of the target, in whole elements; the source has as many elements
  double scale;
  uint32_t target;       // handle of the attachment
  uint32_t source;       // handle of the attachment
  uint8_t dtype;         // hbm::Dtype, of the target
  uint8_t source_dtype;  // hbm::Dtype
  uint8_t combine;       // hbm::Combine
  uint8_t reserved[5];
};
static_assert(sizeof(Accumulate) == 64);
static_assert(offsetof(Accumulate, dtype) == 56 && offsetof(Accumulate, combine) == 58);

struct FetchAdd {
  Sequence sequence;
  uint64_t offset;  // a multiple of 8
  int64_t addend;
  uint32_t handle;
  uint32_t reserved;
};
static_assert(sizeof(FetchAdd) == 40);

struct Fetched {
  int64_t before;
};
static_assert(sizeof(Fetched) == 8);

struct KeyQuery {  // kExists
  Id key;
};
static_assert(sizeof(KeyQuery) == 16);

struct KeyFound {
  uint64_t found;  // 1: a segment has the key
};
static_assert(sizeof(KeyFound) == 8);

struct StatsQuery {
  uint32_t first_client;   // the first row of the clients' table to return; rows count from 0
  uint32_t first_segment;  // the first row of the segments' table to return; rows count from 0
};
static_assert(sizeof(StatsQuery) == 8);

// Counts of operations since the start of the box: of all operations, of one session's operations,
// or of the operations on one segment. Reads and writes over shm and verbs bypass the server, and
// are not counted.
struct Counts {
  uint64_t reads;
  uint64_t read_bytes;
  uint64_t writes;
  uint64_t written_bytes;
  uint64_t accumulates;        // also assignments
  uint64_t accumulated_bytes;  // of the targets
  uint64_t fetch_adds;
};

struct StatsTotals {
  Counts counts;
  uint64_t capacity_bytes;
  uint64_t used_bytes;
  uint64_t largest_free_bytes;  // the largest segment that could be allocated
  uint64_t clients;             // sessions
  uint64_t segments;
  uint64_t uptime_ms;
  uint32_t clients_here;   // rows of ClientStats that follow
  uint32_t segments_here;  // rows of SegmentStats after them
};

// A client sees the id of its own session, and the keys of its own attachments. Other ids and keys
// are replaced by fingerprints, which are constant while the box runs. With the id of another
// session, the client could join that session; with a key, it could attach to the segment.
struct ClientStats {
  Id session;
  Counts counts;
  uint32_t pid;
  uint32_t attachments;
  uint32_t transport;  // TransportKind
  uint32_t connected;  // current connections
  uint64_t idle_ms;    // since the last frame
};

struct SegmentStats {
  Id key;
  Counts counts;
  uint64_t size;
  uint32_t attachments;
  uint32_t temporary;
};

enum class TransportKind : uint32_t { kShm, kTcp, kVerbs };

template <class T>
concept Body = std::is_trivially_copyable_v<T> && sizeof(T) <= kMaxBody;

// Returns the struct at the beginning of `bytes`. REQUIRES: bytes.size() >= sizeof(T).
template <Body T>
T read_as(std::span<const std::byte> bytes) noexcept {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

// Returns the bytes of a request's body; negative: the opcode is no request.
int request_body_bytes(Opcode opcode) noexcept;

// Returns the bytes of the body of a successful reply.
uint32_t reply_body_bytes(Opcode opcode) noexcept;

// Return null, or the fault in a header: magic, version, opcode, status or sizes. Receivers call
// them before they use any size.
const char* malformed_request(const Header& header) noexcept;
const char* malformed_reply(const Header& header) noexcept;

// Returns the first `most` bytes of a UTF-8 text, without a character that the limit cuts.
std::string_view whole_characters(std::string_view text, size_t most) noexcept;

// Returns the part of a cause that is sent: at most kMaxCause bytes.
inline std::span<const char> sent_cause(std::string_view cause) noexcept {
  return std::span(whole_characters(cause, kMaxCause));
}

bool sequenced(Opcode opcode) noexcept;
const char* opcode_name(Opcode opcode) noexcept;
const char* status_name(Status status) noexcept;

}  // namespace hbm::box::protocol
