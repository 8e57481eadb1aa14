// The operations of a c10d process group, one row each, with all their names. The names are not in
// messages: a message header names the executing algorithm by an OpCode (communicator/message.h,
// which does not depend on PyTorch).
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace hbm::process_group {

struct OperationKind {
  c10d::OpType type;
  const char* name;  // the profiler range: "hbm:all_reduce"
  const char* gloo;  // Gloo's profiler range for the same call (allreduce for a reduce_scatter)
  // The name in the flight record, after "gloo:". The reader refuses unknown names, so the record
  // has the names that Gloo's operations would have. Null: the operation is not recorded, because
  // the reader knows none like it.
  const char* recorded;

  // Returns the name for errors: "all_reduce".
  const char* word() const { return name + sizeof("hbm:") - 1; }
};

// The kinds are in static storage, because a Call and its flight record keep their addresses.
namespace operations {

using c10d::OpType;

inline constexpr OperationKind kAllGather = {OpType::ALLGATHER, "hbm:all_gather", "gloo:all_gather",
                                             "all_gather"};
inline constexpr OperationKind kAllGatherIntoTensor = {
    OpType::_ALLGATHER_BASE, "hbm:all_gather_into_tensor", "gloo:all_gather", "_all_gather_base"};
inline constexpr OperationKind kAllReduce = {OpType::ALLREDUCE, "hbm:all_reduce", "gloo:all_reduce",
                                             "all_reduce"};
inline constexpr OperationKind kAllReduceCoalesced = {OpType::ALLREDUCE_COALESCED,
                                                      "hbm:all_reduce_coalesced", "gloo:all_reduce",
                                                      "allreduce_coalesced"};
inline constexpr OperationKind kAllReduceSparse = {
    OpType::_ALLREDUCE_SPARSE, "hbm:all_reduce_sparse", "gloo:sparse_all_reduce", "all_reduce"};
inline constexpr OperationKind kAllToAll = {OpType::ALLTOALL, "hbm:all_to_all", "gloo:all_to_all",
                                            "all_to_all"};
inline constexpr OperationKind kAllToAllSingle = {OpType::ALLTOALL_BASE, "hbm:all_to_all",
                                                  "gloo:all_to_all", "all_to_all"};
inline constexpr OperationKind kBarrier = {OpType::BARRIER, "hbm:barrier", "gloo:barrier",
                                           "barrier"};
inline constexpr OperationKind kBroadcast = {OpType::BROADCAST, "hbm:broadcast", "gloo:broadcast",
                                             "broadcast"};
inline constexpr OperationKind kGather = {OpType::GATHER, "hbm:gather", "gloo:gather", "gather"};
inline constexpr OperationKind kGatherSingle = {OpType::GATHER, "hbm:gather_single", "gloo:gather",
                                                "gather"};
inline constexpr OperationKind kPut = {OpType::UNKNOWN, "hbm:put", "gloo:put", nullptr};
inline constexpr OperationKind kReceive = {OpType::RECV, "hbm:recv", "gloo:recv", "recv"};
inline constexpr OperationKind kReceiveFromAny = {OpType::RECVANYSOURCE, "hbm:recvAnySource",
                                                  "gloo:recvAnySource", "recv"};
inline constexpr OperationKind kReduce = {OpType::REDUCE, "hbm:reduce", "gloo:reduce", "reduce"};
inline constexpr OperationKind kReduceScatter = {OpType::REDUCE_SCATTER, "hbm:reduce_scatter",
                                                 "gloo:all_reduce", "reduce_scatter"};
inline constexpr OperationKind kReduceScatterTensor = {OpType::_REDUCE_SCATTER_BASE,
                                                       "hbm:reduce_scatter_tensor",
                                                       "gloo:all_reduce", "_reduce_scatter_base"};
inline constexpr OperationKind kScatter = {OpType::SCATTER, "hbm:scatter", "gloo:scatter",
                                           "scatter"};
inline constexpr OperationKind kSend = {OpType::SEND, "hbm:send", "gloo:send", "send"};
inline constexpr OperationKind kSignal = {OpType::UNKNOWN, "hbm:signal", "gloo:signal", nullptr};
inline constexpr OperationKind kWaitSignal = {OpType::UNKNOWN, "hbm:wait_signal",
                                              "gloo:wait_signal", nullptr};

}  // namespace operations
}  // namespace hbm::process_group
