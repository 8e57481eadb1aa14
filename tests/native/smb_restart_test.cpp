// A box with a store that restarts: its clients reconnect and continue.
#include <gtest/gtest.h>

#include "smb_service_fixture.h"
#include "smb_store_fixture.h"

namespace hbm::box::server {
namespace {

using protocol::AllocMode;
using protocol::Opcode;
using protocol::Status;

constexpr uint64_t kSize = 1 << 16;
constexpr protocol::Id kKey{5, 6};

class Restart : public testing::Test {
 protected:
  Restart() {
    options_.store = scratch_.store();
    start();
  }

  void start() {
    box_.reset();
    box_ = std::make_unique<Box>(options_);
  }

  // Restarts the box. Returns a caller that has joined the session of `caller` again.
  std::unique_ptr<Caller> restart(std::unique_ptr<Caller>& caller) {
    const protocol::Id id = caller->joining.id;
    caller.reset();
    start();
    return std::make_unique<Caller>(*box_, 0, id);
  }

  Scratch scratch_;
  BoxOptions options_;
  std::unique_ptr<Box> box_;
};

TEST_F(Restart, SessionsKeysAndDataSurvive) {
  const protocol::Id generation = box_->service->generation();
  auto before = std::make_unique<Caller>(*box_);
  before->alloc(kSize, kKey);
  before->memory<int>(1)[5] = 55;
  const auto after = restart(before);
  EXPECT_EQ(box_->service->generation(), generation);
  ASSERT_EQ(after->joining.status, Status::kOk) << after->joining.cause;
  EXPECT_FALSE(after->joining.resumed);
  EXPECT_EQ(after->joining.applied, 1u);
  EXPECT_EQ(after->access(1, 0, 1).status, Status::kNotAttached);
  EXPECT_EQ(after->attach(1, kKey, kSize).status, Status::kOk);
  EXPECT_EQ(after->memory<int>(1)[5], 55);
  EXPECT_EQ(after->fetch_add(1, 0, 1).status, Status::kOk);
  EXPECT_EQ(after->joining.session->request_cache.applied(), 2u);
}

TEST_F(Restart, RepeatedRequestsAreAnsweredFromTheStore) {
  auto before = std::make_unique<Caller>(*box_);
  const protocol::Alloc alloc = before->alloc_request(kSize, {}, AllocMode::kCreate);
  const auto made = as<protocol::Allocated>(before->call(Opcode::kAlloc, bytes_of(alloc)));
  protocol::FetchAdd add = before->fetch_add_request(1, 0, 7);
  protocol::FetchAdd wrong = before->fetch_add_request(1, 4, 7);
  protocol::Accumulate sum = before->accumulate_request(1, 1, 8, 1, Dtype::kInt64);
  add.sequence.answered = wrong.sequence.answered = sum.sequence.answered = 0;
  before->fetch_add(add);
  before->fetch_add(wrong);
  before->accumulate(sum);

  const auto after = restart(before);
  EXPECT_EQ(after->joining.applied, 4u);
  const Reply again = after->call(Opcode::kAlloc, bytes_of(alloc));
  EXPECT_EQ(as<protocol::Allocated>(again).key, made.key);
  EXPECT_EQ(as<protocol::Allocated>(again).created, 1u);
  EXPECT_NE(again.granted, nullptr);
  EXPECT_EQ(as<protocol::Fetched>(after->fetch_add(add)).before, 0);
  EXPECT_EQ(after->fetch_add(wrong).status, Status::kRange);
  EXPECT_EQ(after->accumulate(sum).status, Status::kOk);
  EXPECT_EQ(after->memory<int64_t>(1)[0], 14);
  EXPECT_EQ(box_->service->statistics().segments.front().attachments, 1u);
  const protocol::FetchAdd next{{5, 4}, 0, 1, 1, 0};
  EXPECT_EQ(as<protocol::Fetched>(after->fetch_add(next)).before, 14);
}

// The box was killed during a creation: the store has the segment, but the session has not counted
// the request.
TEST_F(Restart, AnInterruptedCreationIsFound) {
  auto before = std::make_unique<Caller>(*box_);
  const protocol::Alloc alloc = before->alloc_request(kSize, kKey, AllocMode::kCreate);
  box_->store->create({.key = kKey,
                       .size = kSize,
                       .temporary = false,
                       .creator = {before->joining.id, alloc.sequence.number}});
  const auto after = restart(before);
  EXPECT_EQ(after->joining.applied, 0u);
  const Reply made = after->call(Opcode::kAlloc, bytes_of(alloc));
  EXPECT_EQ(made.status, Status::kOk) << made.cause;
  EXPECT_EQ(as<protocol::Allocated>(made).created, 1u);
  EXPECT_EQ(Caller(*box_).alloc(kSize, kKey, AllocMode::kCreate).status, Status::kExists);
}

TEST_F(Restart, InterruptedDeletionIsCompleted) {
  auto before = std::make_unique<Caller>(*box_);
  box_->store->remove(*before->alloc(kSize, kKey).granted);
  const protocol::Release deletion{before->next(), 1, 0};
  const auto after = restart(before);
  EXPECT_EQ(after->attach(1, kKey, kSize).status, Status::kNoSuchKey);
  EXPECT_EQ(after->call(Opcode::kDelete, bytes_of(deletion)).status, Status::kOk);
  const protocol::Release late{{3, 2}, 1, 0};
  EXPECT_EQ(after->call(Opcode::kFree, bytes_of(late)).status, Status::kNotAttached);
}

TEST_F(Restart, ClientsReconnectDespiteALowerLimit) {
  std::vector<std::unique_ptr<Caller>> before;
  for (int i = 0; i < 4; ++i) before.push_back(std::make_unique<Caller>(*box_));
  std::vector<protocol::Id> ids;
  for (const auto& caller : before) ids.push_back(caller->joining.id);
  before.clear();
  options_.service.most_clients = 2;
  start();
  for (const protocol::Id& id : ids)
    EXPECT_EQ(Caller(*box_, 0, id).call(Opcode::kPing).status, Status::kOk);
  EXPECT_EQ(Caller(*box_).joining.status, Status::kExhausted);
}

TEST_F(Restart, FirstReconnectedClientKeepsOtherSessions) {
  options_.service.lease = 10s;
  start();
  auto first = std::make_unique<Caller>(*box_);
  auto second = std::make_unique<Caller>(*box_);
  first->alloc(kSize, kKey, AllocMode::kAuto, protocol::Alloc::kTemporary);
  second->attach(1, kKey, kSize);
  const protocol::Id late = second->joining.id;
  second.reset();
  first = restart(first);
  EXPECT_EQ(first->attach(1, kKey, kSize).status, Status::kOk);
  EXPECT_EQ(first->free(1).status, Status::kOk);
  second = std::make_unique<Caller>(*box_, 0, late);
  EXPECT_EQ(second->attach(1, kKey, kSize).status, Status::kOk);
  EXPECT_EQ(second->free(1).status, Status::kOk);
  EXPECT_TRUE(eventually([&] { return box_->service->statistics().totals.segments == 0; }));
}

TEST_F(Restart, EndedAndExpiredSessionsAreForgotten) {
  options_.service.lease = 2s;
  start();
  auto leaver = std::make_unique<Caller>(*box_);
  auto away = std::make_unique<Caller>(*box_);
  away->alloc(kSize, kKey, AllocMode::kAuto, protocol::Alloc::kTemporary);
  leaver->call(Opcode::kLeave);
  const protocol::Id left = leaver->joining.id, absent = away->joining.id;
  leaver.reset();
  away.reset();
  start();
  EXPECT_EQ(Caller(*box_, 0, left).joining.status, Status::kExpired);
  EXPECT_EQ(Caller(*box_, protocol::Join::kFurtherConnection, absent).joining.status,
            Status::kExpired);
  EXPECT_EQ(box_->service->statistics().totals.segments, 1u);
  EXPECT_TRUE(eventually([&] { return box_->service->statistics().totals.segments == 0; }));
  EXPECT_EQ(Caller(*box_, 0, absent).joining.status, Status::kExpired);
}

}  // namespace
}  // namespace hbm::box::server
