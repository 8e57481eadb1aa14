// Message headers: their layout on the wire, their description, and the error that names all
// differences between two headers.
#include "communicator/message.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>

#include "communicator/group_names.h"
#include "expect_error.h"

namespace hbm::communicator {
namespace {

const Signature kAllreduce{OpCode::kAllreduce, Dtype::kFloat32, ReduceOp::kSum, -1, 7};
const Signature kSend{OpCode::kSendRecv, Dtype::kInt64, ReduceOp::kSum, 3, 0};

TEST(Message, LayoutOnTheWire) {
  EXPECT_EQ(kHeaderBytes, 64u);
  EXPECT_EQ(offsetof(MessageHeader, magic), 0u);
  EXPECT_EQ(offsetof(MessageHeader, op), 4u);
  EXPECT_EQ(offsetof(MessageHeader, dtype), 5u);
  EXPECT_EQ(offsetof(MessageHeader, reduce_op), 6u);
  EXPECT_EQ(offsetof(MessageHeader, root), 8u);
  EXPECT_EQ(offsetof(MessageHeader, part), 12u);
  EXPECT_EQ(offsetof(MessageHeader, sequence), 16u);
  EXPECT_EQ(offsetof(MessageHeader, count), 24u);
  EXPECT_EQ(offsetof(MessageHeader, payload), 32u);
  EXPECT_EQ(offsetof(MessageHeader, transfer), 40u);
  EXPECT_EQ(offsetof(MessageHeader, whole), 48u);
  EXPECT_EQ(offsetof(MessageHeader, group), 56u);
}

TEST(Message, HeaderOfASignature) {
  const MessageHeader header = make_header(kAllreduce, 1000, 2, 4000);
  EXPECT_EQ(header.magic, kMagic);
  EXPECT_EQ(header.op, static_cast<uint8_t>(OpCode::kAllreduce));
  EXPECT_EQ(header.dtype, static_cast<uint8_t>(Dtype::kFloat32));
  EXPECT_EQ(header.reduce_op, static_cast<uint8_t>(ReduceOp::kSum));
  EXPECT_EQ(header.reserved, 0);
  EXPECT_EQ(header.root, -1);
  EXPECT_EQ(header.part, 2u);
  EXPECT_EQ(header.sequence, 7u);
  EXPECT_EQ(header.count, 1000u);
  EXPECT_EQ(header.payload, 4000u);
  EXPECT_EQ(header.transfer, 0u);
  EXPECT_EQ(header.whole, 0u);
  EXPECT_EQ(header.group, 0u);
}

TEST(Message, HeaderOfAChunkDescribesTheWholeMessage) {
  Signature chunk = kAllreduce;
  chunk.sequence = {7, 5000};
  const MessageHeader header = make_header(chunk, 1000, 0, 4000);
  EXPECT_EQ(header.sequence, 7u);
  EXPECT_EQ(header.count, 1000u);
  EXPECT_EQ(header.whole, 5000u);
  EXPECT_EQ(describe(header), "allreduce #7 (SUM) of 5000 float32");
}

TEST(Message, TextDescribesTheOperation) {
  const auto words = [](const Signature& signature, uint64_t count) {
    return describe(make_header(signature, count, 0, 0));
  };
  EXPECT_EQ(words(kAllreduce, 1000), "allreduce #7 (SUM) of 1000 float32");
  EXPECT_EQ(words({OpCode::kReduce, Dtype::kInt8, ReduceOp::kMax, 2, 1}, 5),
            "reduce #1 (MAX) of 5 int8 with root 2");
  EXPECT_EQ(words({OpCode::kBroadcast, Dtype::kBool, ReduceOp::kSum, 0, 9}, 1),
            "broadcast #9 of 1 bool with root 0");
  EXPECT_EQ(words({OpCode::kBarrier, Dtype::kUInt8, ReduceOp::kSum, -1, 4}, 0), "barrier #4");
  EXPECT_EQ(words(kSend, 8), "send/recv with tag 3 of 8 int64");
}

TEST(Message, TextToleratesAnyBytes) {
  MessageHeader header = make_header(kAllreduce, 1000, 0, 0);
  header.dtype = 0xff;
  header.reduce_op = 0xff;
  EXPECT_EQ(describe(header), "allreduce #7 (?) of 1000 ?");
  header.op = 0xff;
  EXPECT_EQ(describe(header), "unknown operation #7 of 1000 ?");
}

TEST(Message, EqualHeadersPass) {
  MessageHeader found = make_header(kSend, 8, 0, 64);
  found.transfer = 12345;  // the sender's number for the message: not compared
  EXPECT_NO_THROW(check_header(found, make_header(kSend, 8, 0, 64), 1, "group g"));
}

TEST(Message, DifferencesNameBothRanksOperations) {
  const MessageHeader expected = make_header(kAllreduce, 1000, 0, 4000);
  struct Case {
    const char* words;
    std::function<void(MessageHeader&)> change;
  };
  for (const Case& each : {
           Case{"reduce #7 (SUM)", [](auto& h) { h.op = static_cast<uint8_t>(OpCode::kReduce); }},
           Case{"float64", [](auto& h) { h.dtype = static_cast<uint8_t>(Dtype::kFloat64); }},
           Case{"MAX", [](auto& h) { h.reduce_op = static_cast<uint8_t>(ReduceOp::kMax); }},
           Case{"with root 1", [](auto& h) { h.root = 1; }},
           Case{"allreduce #8", [](auto& h) { h.sequence = 8; }},
           Case{"of 999 float32", [](auto& h) { h.count = 999; }},
           Case{"staging_bytes", [](auto& h) { h.part = 1; }},
           Case{"staging_bytes", [](auto& h) { h.payload = 2000; }},
           Case{"of 5000 float32", [](auto& h) { h.whole = 5000; }},
           Case{"HBMCOMM_DEVICE_CHUNK_BYTES", [](auto& h) { h.whole = 1000; }},
           Case{"same version", [](auto& h) { h.magic = 0; }},
       }) {
    MessageHeader found = expected;
    each.change(found);
    expect_error(ErrorKind::kMismatch, {each.words, "group g", "rank 3"},
                 [&] { check_header(found, expected, 3, "group g"); });
  }
}

TEST(Message, OfAnEarlierGroupNamesBoth) {
  name_group(71, "group early");
  name_group(72, "group late");
  const MessageHeader expected = [] {
    MessageHeader header = make_header(kAllreduce, 1000, 0, 4000);
    header.group = 72;
    return header;
  }();
  MessageHeader found = expected;
  EXPECT_NO_THROW(check_header(found, expected, 3, "group late"));
  found.group = 71;
  expect_error(ErrorKind::kMismatch, {"allreduce #7", "group late", "rank 3", "group early"},
               [&] { check_header(found, expected, 3, "group late"); });
  found.group = 70;
  expect_error(ErrorKind::kMismatch, {"group late", "a group of number 70"},
               [&] { check_header(found, expected, 3, "group late"); });
}

TEST(GroupNames, RememberTheLastGroups) {
  for (uint64_t number = 1; number <= 2000; ++number) {
    name_group(number, "group " + std::to_string(number));
  }
  EXPECT_EQ(name_of_group(2000), "group 2000");
  EXPECT_EQ(name_of_group(1500), "group 1500");
  EXPECT_EQ(name_of_group(1), "a group of number 1");
}

}  // namespace
}  // namespace hbm::communicator
