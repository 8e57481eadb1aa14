// The header in front of every message: enough for the receiver to see that both ranks are in the
// same operation, and to say exactly how they differ when they are not. docs/design/messages.md is
// this header's twin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/dtype.h"

namespace hbm {

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

// The number of a collective in its group, the same on every rank. A large one may be made as
// chunks: collectives that follow one another under one number.
struct OperationNumber {
  OperationNumber(uint64_t number = 0, uint64_t whole = 0) : number(number), whole(whole) {}

  uint64_t number;
  uint64_t whole;  // of a chunk: elements of the collective that it is a part of; else 0
};

// The part of an operation that all its ranks must agree on.
struct Signature {
  OpCode op{};
  Dtype dtype{};
  ReduceOp reduce_op{};  // kSum where nothing is reduced
  int32_t root = -1;     // group rank, -1 for rootless operations; send and recv: the tag
  OperationNumber sequence = {};

  // The type of partial results between the stages of a mean of integers, where it is wider than
  // that of the tensors. Not in headers: `dtype` and the layout decide it.
  std::optional<Dtype> partial = std::nullopt;

  // The type of what is reduced.
  Dtype operands() const { return partial.value_or(dtype); }
};

struct MessageHeader {
  uint32_t magic;
  uint8_t op;
  uint8_t dtype;
  uint8_t reduce_op;
  uint8_t reserved;
  int32_t root;
  uint32_t part;  // which message of the stream this is
  uint64_t sequence;
  uint64_t count;     // elements of the whole stream from this sender to this receiver
  uint64_t payload;   // bytes that follow in this message
  uint64_t transfer;  // send and recv: names the sender's transfer
  uint64_t whole;     // of a chunk: elements of the collective that errors tell of; else 0
  uint64_t group;     // over MPI: the number of the group; else 0
};

inline constexpr uint32_t kMagic = 0x334d4248;  // "HBM3": another layout gets another number
inline constexpr size_t kHeaderBytes = 64;
static_assert(sizeof(MessageHeader) == kHeaderBytes);

MessageHeader make_header(const Signature& signature, uint64_t count, uint32_t part,
                          uint64_t payload) noexcept;

// Throws Error(kMismatch) unless `found`, from group rank `peer`, is what `expected` says. MPI may
// give what a group left unread to a later one of the same ranks: the error names both.
void check_header(const MessageHeader& found, const MessageHeader& expected, int peer,
                  const std::string& group);

// "allreduce #7 (SUM) of 1000 float32".
std::string describe(const MessageHeader& header);

// The same, with " on rank 0 of group \"0\"". `group`: as errors name it.
std::string describe(const MessageHeader& header, int rank, const std::string& group);

}  // namespace hbm
