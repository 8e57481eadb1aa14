#include "communicator/message.h"

#include "base/error.h"
#include "communicator/group_names.h"

namespace hbm::communicator {
namespace {

bool reduces(OpCode op) {
  return op == OpCode::kAllreduce || op == OpCode::kReduce || op == OpCode::kReduceScatter;
}

}  // namespace

const char* op_name(OpCode op) noexcept {
  switch (op) {  // without a default, so that the compiler names a missing operation
    case OpCode::kBroadcast:
      return "broadcast";
    case OpCode::kAllreduce:
      return "allreduce";
    case OpCode::kReduce:
      return "reduce";
    case OpCode::kAllgather:
      return "allgather";
    case OpCode::kGather:
      return "gather";
    case OpCode::kScatter:
      return "scatter";
    case OpCode::kReduceScatter:
      return "reduce_scatter";
    case OpCode::kAlltoall:
      return "alltoall";
    case OpCode::kBarrier:
      return "barrier";
    case OpCode::kSendRecv:
      return "send/recv";
  }
  return "unknown operation";  // the header is damaged
}

MessageHeader make_header(const Signature& signature, uint64_t count, uint32_t part,
                          uint64_t payload) noexcept {
  MessageHeader header{};
  header.magic = kMagic;
  header.op = static_cast<uint8_t>(signature.op);
  header.dtype = static_cast<uint8_t>(signature.dtype);
  header.reduce_op = static_cast<uint8_t>(signature.reduce_op);
  header.root = signature.root;
  header.part = part;
  header.sequence = signature.sequence.number;
  header.whole = signature.sequence.whole;
  header.count = count;
  header.payload = payload;
  return header;
}

std::string describe(const MessageHeader& header) {
  const auto op = static_cast<OpCode>(header.op);
  std::string text = op_name(op);
  if (op == OpCode::kSendRecv) {
    text += " with tag " + std::to_string(header.root);
  } else {
    text += " #" + std::to_string(header.sequence);
  }
  if (op == OpCode::kBarrier) return text;
  if (reduces(op)) {
    const bool known = header.reduce_op < kReduceOpCount;
    text += std::string(" (") +
            (known ? reduce_op_name(static_cast<ReduceOp>(header.reduce_op)) : "?") + ")";
  }
  text += " of " + std::to_string(header.whole != 0 ? header.whole : header.count) + " " +
          (header.dtype < kDtypeCount ? dtype_name(static_cast<Dtype>(header.dtype)) : "?");
  if (header.root >= 0 && op != OpCode::kSendRecv) {
    text += " with root " + std::to_string(header.root);
  }
  return text;
}

std::string describe(const MessageHeader& header, int rank, const std::string& group) {
  return describe(header) + " on rank " + std::to_string(rank) + " of " + group;
}

void check_header(const MessageHeader& found, const MessageHeader& expected, int peer,
                  const std::string& group) {
  if (found.magic != kMagic) {
    throw Error(ErrorKind::kMismatch,
                "rank " + std::to_string(peer) + " of " + group +
                    " sent a message that is not of this version of torch_hbmcomm; every rank "
                    "must run the same version");
  }
  if (found.group != expected.group) {
    throw Error(ErrorKind::kMismatch, "this rank is in " + describe(expected) + " of " + group +
                                          ", and what came from rank " + std::to_string(peer) +
                                          " is of an earlier group: " + describe(found) + " of " +
                                          name_of_group(found.group) +
                                          ", which no rank received there");
  }
  const bool same = found.op == expected.op && found.dtype == expected.dtype &&
                    found.reduce_op == expected.reduce_op && found.root == expected.root &&
                    found.sequence == expected.sequence && found.count == expected.count &&
                    found.part == expected.part && found.payload == expected.payload &&
                    found.whole == expected.whole;
  if (same) return;
  std::string text = "ranks disagree in " + group + ": this rank is in " + describe(expected) +
                     ", rank " + std::to_string(peer) + " is in " + describe(found);
  if (describe(expected) == describe(found)) {
    text +=
        "; they cut it into different messages (HBMCOMM_STAGING_BYTES, Options.staging_bytes or "
        "HBMCOMM_DEVICE_CHUNK_BYTES differs between the ranks, or the tensor is on an accelerator "
        "on one of them alone)";
  }
  throw Error(ErrorKind::kMismatch, text);
}

}  // namespace hbm::communicator
