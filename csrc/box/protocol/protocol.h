// The frames between a memory box and its clients, on every transport.
// docs/design/wire-protocol.md is this file's twin.
//
// A frame is a Header, `body_bytes` of a fixed struct, and `payload_bytes` of bulk data or text.
// All integers are little-endian, and the structs are sent as they lie in memory. A request's reply
// repeats its opcode and id; a reply whose status is not kOk has no body, and its payload is the
// cause in words. The first frame on a connection is the box's Hello, the second the client's Join.
// Everything after the reply to that may be sealed: seal.h.
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

namespace hbm::smb {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

inline constexpr uint32_t kMagic = 0x31424D53;  // "SMB1"
inline constexpr uint8_t kVersion = 4;
inline constexpr uint32_t kMaxBody = 256;  // bytes; tuning.h has the other limits

// 128 bits that name a segment (chosen at random by the box unless the user picks them), a session
// or the contents of a box. All zero: none.
struct Id {
  uint64_t high = 0;
  uint64_t low = 0;

  explicit operator bool() const noexcept { return (high | low) != 0; }
  friend auto operator<=>(const Id&, const Id&) = default;
};

enum class Opcode : uint8_t {
  kHello = 1,   // box to client, unasked
  kJoin,        // proves the token; registers a client, resumes a session, or adds a lane to it
  kLeave,       // ends the session at once, with its attachments; no body either way
  kPing,        // renews the lease; no body either way. Any other request renews it too
  kAlloc,       // sequenced
  kAttach,      // makes a handle stand for a key, again: after a reconnect
  kFree,        // sequenced: ends the attachment
  kDelete,      // sequenced: takes the key away; the memory goes with the last attachment
  kRead,        // the reply's payload is the data
  kWrite,       // the request's payload is the data
  kAccumulate,  // sequenced
  kFetchAdd,    // sequenced
  kStats,       // the reply's payload is a StatsTotals and its tables
  kExists,      // attaches nothing
};
inline constexpr uint8_t kLastOpcode = static_cast<uint8_t>(Opcode::kExists);

enum class Status : uint16_t {
  kOk,
  kMalformed,     // no client of ours sends it; if the frame itself is wrong the connection ends
  kDenied,        // the token is wrong
  kReadOnly,      // the client or the attachment may not write
  kNotAttached,   // no such handle in this session
  kNoSuchKey,     // attach: nothing has that key
  kExists,        // create: something has that key
  kSizeMismatch,  // attach: the segment has another size
  kRange,         // past the end of the segment, or unaligned for the type
  kExhausted,     // the pool cannot hold it
  kUnsupported,   // an operation that has no meaning here
  kExpired,       // the session is not known (any more): its lease ended
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
  uint64_t id = 0;  // the client's number for a request; not its sequence number
};
static_assert(sizeof(Header) == 24);

using Nonce = std::array<std::byte, 32>;
using Proof = std::array<std::byte, 32>;  // HMAC-SHA-256, see proof.h

struct Hello {
  Nonce nonce;
  uint32_t token_required;  // 0: the box was started without a token, proofs are not looked at
  uint32_t sealed;          // 1: all that follows the join is sealed (seal.h), in both directions
};
static_assert(sizeof(Hello) == 40);

struct Join {
  static constexpr uint32_t kReadOnlyClient = 1;  // it will never write, and cannot
  static constexpr uint32_t kLane = 2;            // a further connection of a live session
  static constexpr uint32_t kSealed = 4;          // as Hello::sealed; the proof covers it

  Nonce nonce;
  Proof proof;
  Id session;  // none: a new client
  uint32_t flags;
  uint32_t pid;  // the client's, for statistics
};
static_assert(sizeof(Join) == 88);

struct Joined {
  Proof proof;       // that the box knows the token too
  Id session;        // as asked for, or new
  Id box;            // names the contents: another one than before means that all segments are gone
  uint64_t applied;  // the session's last sequence number that has been carried out; 0: none
  uint32_t lease_ms;      // without a connection, or without a frame, for this long a session ends
  uint16_t verbs_port;    // 0: the box has no RDMA device
  uint16_t resumed;       // 1: the session's attachments are still there
  char boot_id[40];       // of the box's kernel; ends with a zero
  char socket_path[108];  // of its Unix socket; ends with a zero
  uint32_t reserved;
};
static_assert(sizeof(Joined) == 232 && sizeof(Joined) <= kMaxBody);

// Heads the body of every sequenced request. Numbers start at 1 and rise by 1 over the life of the
// session, across reconnects; a client sends them in order, on one connection. One that the box has
// carried out already is answered as it was the first time, and not carried out again.
struct Sequence {
  uint64_t number;
  uint64_t answered;  // every number up to this one has had its reply
};

enum class AllocMode : uint32_t { kAuto, kCreate, kAttach };

struct Alloc {
  static constexpr uint32_t kReadOnly = 1;   // attach without the right to write
  static constexpr uint32_t kTemporary = 2;  // deleted when its last attachment ends
  static constexpr uint32_t kAnySize = 4;    // attach whatever the size, which is then 0 here

  Sequence sequence;
  Id key;           // none: the box chooses one
  uint64_t size;    // bytes
  uint32_t handle;  // the client's number for the attachment, not in use
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

// Replies to kAlloc and kAttach. On a Unix socket the segment's descriptor comes with the frame; on
// verbs the payload is a remote key (uint32_t) for each queue pair.
struct Allocated {
  Id key;
  uint64_t size;
  uint32_t created;  // 1: by this request, and full of zeros
  uint32_t reserved;
  uint64_t address;  // verbs: of the segment's first byte
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
  uint32_t bytes;  // <= kMaxPayload; of kWrite: payload_bytes
  uint32_t handle;
};
static_assert(sizeof(Transfer) == 16);

struct Accumulate {  // target[i] += scale * source[i], or target[i] = scale * source[i]
  Sequence sequence;
  uint64_t target_offset;  // bytes; a multiple of the target's element, as `bytes` is
  uint64_t source_offset;  // a multiple of the source's element
  uint64_t bytes;          // of the target; the source has as many elements
  double scale;
  uint32_t target;  // handles
  uint32_t source;
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
  uint32_t first_client;  // where the tables go on
  uint32_t first_segment;
};
static_assert(sizeof(StatsQuery) == 8);

// Counts since the start of the box. Reads and writes on shm and verbs do not pass the server, so
// they are counted by the client alone.
struct Counts {
  uint64_t reads;
  uint64_t read_bytes;
  uint64_t writes;
  uint64_t written_bytes;
  uint64_t accumulates;  // assigning ones too; bytes of the target
  uint64_t accumulated_bytes;
  uint64_t fetch_adds;
};

struct StatsTotals {
  Counts counts;
  uint64_t capacity_bytes;
  uint64_t used_bytes;
  uint64_t largest_free_bytes;  // what one segment could still have
  uint64_t clients;             // sessions
  uint64_t segments;
  uint64_t uptime_ms;
  uint32_t clients_here;   // rows of ClientStats that follow, then
  uint32_t segments_here;  // rows of SegmentStats
};

// A client sees its own session and the keys that it has attached itself. Of the others it sees a
// fingerprint each, the same for as long as the box runs: an Id would let it join the session as a
// lane, or attach to the key.
struct ClientStats {
  Id session;
  Counts counts;
  uint32_t pid;
  uint32_t attachments;
  uint32_t transport;  // TransportKind
  uint32_t connected;  // connections now
  uint64_t idle_ms;    // since its last frame
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

// The struct that `bytes` begin with. REQUIRES: they are as many.
template <Body T>
T read_as(std::span<const std::byte> bytes) noexcept {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

// The bytes of a request's body, and whether a payload may follow; negative: no request at all.
int request_body_bytes(Opcode opcode) noexcept;

// The bytes of a reply's body, where its status is kOk.
uint32_t reply_body_bytes(Opcode opcode) noexcept;

// Null, or what is wrong with a request's header: sizes, magic, version, opcode. Whoever receives
// frames asks before it believes any of the sizes.
const char* malformed_request(const Header& header) noexcept;
const char* malformed_reply(const Header& header) noexcept;

// The first `most` bytes of a text in UTF-8, without the beginning of a character that they cut.
std::string_view whole_characters(std::string_view text, size_t most) noexcept;

// The part of a cause's words that travels: kMaxCause bytes at most.
inline std::span<const char> sent_cause(std::string_view cause) noexcept {
  return std::span(whole_characters(cause, kMaxCause));
}

bool sequenced(Opcode opcode) noexcept;
const char* opcode_name(Opcode opcode) noexcept;
const char* status_name(Status status) noexcept;

}  // namespace hbm::smb
