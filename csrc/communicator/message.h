// The header in front of every message, except the chunks of a large send. By it the receiver
// checks that both ranks are in the same operation; if they are not, the error names both
// operations. docs/design/messages.md describes these declarations: change both together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/dtype.h"

namespace hbm::communicator {

enum class OpCode : uint8_t {
  kBroadcast,
  kAllreduce,
  kReduce,
  kAllgather,
  kGather,
  kScatter,
  kReduceScatter,
  kAlltoall,
  kBarrier,
  kSendRecv,
};

const char* op_name(OpCode op) noexcept;

// The number of a collective in its group, the same on every rank. A large collective may be made
// as chunks: consecutive collectives under one number.
struct OperationNumber {
  OperationNumber(uint64_t number = 0, uint64_t whole = 0) : number(number), whole(whole) {}

  uint64_t number;
  uint64_t whole;  // elements of the whole collective, for a chunk; else 0
};

// The properties of an operation on which all its ranks must agree.
struct Signature {
  OpCode op{};
  Dtype dtype{};
  ReduceOp reduce_op{};  // kSum if the operation does not reduce
  int32_t root = -1;     // group rank; -1 without a root; send and recv: the tag
  OperationNumber sequence = {};

  // For a mean of integers over several nodes: the type of the sums that nodes send one another, if
  // it is wider than the type of the tensors. No message header carries this type: all ranks derive
  // it from `dtype` and the layout of the nodes.
  std::optional<Dtype> partial = std::nullopt;

  // Returns the type of the elements that a reduction reads.
  Dtype operands() const { return partial.value_or(dtype); }
};

struct MessageHeader {
  uint32_t magic;
  uint8_t op;
  uint8_t dtype;
  uint8_t reduce_op;
  uint8_t reserved;
  int32_t root;
  uint32_t part;  // the index of the round, block or phase in the operation, from 0
  uint64_t sequence;
  // Elements of the whole transfer from this sender to this receiver. Between the leaders of nodes:
  // elements of the whole operation. In a slot: the elements that errors report for the sender.
  uint64_t count;
  uint64_t payload;   // bytes that follow in this message; in an envelope: of the whole message
  uint64_t transfer;  // send over MPI: the sender's number of the message; else 0
  uint64_t whole;     // elements of the whole collective, for a chunk; else 0
  uint64_t group;     // over MPI: the number of the group; else 0
};

inline constexpr uint32_t kMagic = 0x334d4248;  // "HBM3": another layout gets another number
inline constexpr size_t kHeaderBytes = 64;
static_assert(sizeof(MessageHeader) == kHeaderBytes);

MessageHeader make_header(const Signature& signature, uint64_t count, uint32_t part,
                          uint64_t payload) noexcept;

// Throws Error(kMismatch) if a field of `found`, from group rank `peer`, differs from `expected`.
// Ignores the fields `transfer` and `reserved`. MPI may deliver an unread message of an earlier
// group of the same ranks; the error then names both groups. `group`: the name of this group in
// errors.
void check_header(const MessageHeader& found, const MessageHeader& expected, int peer,
                  const std::string& group);

// Returns a text such as "allreduce #7 (SUM) of 1000 float32".
std::string describe(const MessageHeader& header);

// Returns describe(header) and " on rank 0 of group \"0\"". `group`: the name in errors.
std::string describe(const MessageHeader& header, int rank, const std::string& group);

}  // namespace hbm::communicator
