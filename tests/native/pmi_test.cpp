// The PMI responder. The tests ask it over its socket, as MPICH does.
#include "communicator/mpi/pmi.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fake_store.h"

namespace hbm::communicator::mpi {
namespace {

using std::chrono::milliseconds;

// A responder and MPI's end of its socket.
class Client {
 public:
  explicit Client(std::shared_ptr<bootstrap::KeyValue> store, int rank = 0,
                  std::vector<int> node_of = {0}, milliseconds patience = milliseconds(60'000))
      : responder_(std::make_unique<PmiResponder>(
            std::move(store),
            PmiResponder::Job{"job", rank, static_cast<int>(node_of.size()), node_of,
                              std::chrono::steady_clock::now() + patience})),
        socket_(std::atoi(std::getenv("PMI_FD"))) {}

  void say(const std::string& text) const {
    ASSERT_EQ(send(socket_, text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
  }

  // Returns the responder's next line, without the newline.
  std::string hear() const {
    std::string line;
    for (char c = 0; read(socket_, &c, 1) == 1 && c != '\n';) line += c;
    return line;
  }

  std::string ask(const std::string& line) const {
    say(line + "\n");
    return hear();
  }

  bool silent_for(milliseconds time) const {
    pollfd one{socket_, POLLIN, 0};
    return poll(&one, 1, static_cast<int>(time.count())) == 0;
  }

  void release_store() { responder_->release_store(); }
  void end() { responder_.reset(); }

 private:
  std::unique_ptr<PmiResponder> responder_;
  const int socket_;
};

TEST(ProcessMapping, OneBlockForEachRunOfRanks) {
  EXPECT_EQ(process_mapping({0}), "(vector,(0,1,1))");
  EXPECT_EQ(process_mapping({0, 0, 0}), "(vector,(0,1,3))");
  EXPECT_EQ(process_mapping({0, 0, 1, 1}), "(vector,(0,1,2),(1,1,2))");
  EXPECT_EQ(process_mapping({0, 1, 0, 1}), "(vector,(0,1,1),(1,1,1),(0,1,1),(1,1,1))");
}

TEST(PmiResponder, SetsTheEnvironmentAndClearsIt) {
  Client client(std::make_shared<FakeStore>(), 1, {0, 0, 0});
  EXPECT_STREQ(std::getenv("PMI_RANK"), "1");
  EXPECT_STREQ(std::getenv("PMI_SIZE"), "3");
  client.end();
  for (const char* name : {"PMI_FD", "PMI_RANK", "PMI_SIZE"}) {
    EXPECT_EQ(std::getenv(name), nullptr) << name;
  }
}

TEST(PmiResponder, AnswersMpichsRequests) {
  const Client client(std::make_shared<FakeStore>(), 0, {0, 1});
  EXPECT_EQ(client.ask("cmd=init pmi_version=1 pmi_subversion=1"),
            "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0");
  EXPECT_EQ(client.ask("cmd=get_maxes"),
            "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=4096 rc=0");
  EXPECT_EQ(client.ask("cmd=get_appnum"), "cmd=appnum appnum=0 rc=0");
  EXPECT_EQ(client.ask("cmd=get_my_kvsname"), "cmd=my_kvsname kvsname=job rc=0");
  EXPECT_EQ(client.ask("cmd=get_universe_size"), "cmd=universe_size size=2 rc=0");
  EXPECT_EQ(client.ask("cmd=get kvsname=job key=PMI_process_mapping"),
            "cmd=get_result rc=0 msg=success value=(vector,(0,1,1),(1,1,1))");
  EXPECT_EQ(client.ask("cmd=finalize"), "cmd=finalize_ack rc=0");
}

TEST(PmiResponder, ValuesExtendToTheLinesEnd) {
  const auto store = std::make_shared<FakeStore>();
  const Client first(store, 0, {0, 0});
  const Client second(store, 1, {0, 0});
  EXPECT_EQ(first.ask("cmd=put kvsname=job key=card-0 value=a key=b value=c d"),
            "cmd=put_result rc=0 msg=success");
  EXPECT_EQ(second.ask("cmd=get kvsname=job key=card-0"),
            "cmd=get_result rc=0 msg=success value=a key=b value=c d");
  EXPECT_EQ(second.ask("cmd=get kvsname=job key=card-1"),
            "cmd=get_result rc=-1 msg=key_not_found value=unknown");
}

TEST(PmiResponder, LinesMayArriveSplitOrJoined) {
  const Client client(std::make_shared<FakeStore>());
  client.say("cmd=get_ap");
  EXPECT_TRUE(client.silent_for(milliseconds(20)));
  client.say("pnum\ncmd=get_my_kvsname\ncmd=get_");
  EXPECT_EQ(client.hear(), "cmd=appnum appnum=0 rc=0");
  EXPECT_EQ(client.hear(), "cmd=my_kvsname kvsname=job rc=0");
  EXPECT_EQ(client.ask("appnum"), "cmd=appnum appnum=0 rc=0");
}

TEST(PmiResponder, ABarrierWaitsForEveryRank) {
  const auto store = std::make_shared<FakeStore>();
  const Client first(store, 0, {0, 0, 0});
  const Client second(store, 1, {0, 0, 0});
  const Client third(store, 2, {0, 0, 0});
  for (int round = 0; round < 3; ++round) {
    first.say("cmd=barrier_in\n");
    second.say("cmd=barrier_in\n");
    EXPECT_TRUE(first.silent_for(milliseconds(20)));
    EXPECT_TRUE(second.silent_for(milliseconds(0)));
    third.say("cmd=barrier_in\n");
    for (const Client* client : {&first, &second, &third}) {
      EXPECT_EQ(client->hear(), "cmd=barrier_out rc=0");
    }
  }
}

TEST(PmiResponder, AnswersMpiFinalizeWithoutTheStore) {
  const auto store = std::make_shared<FakeStore>();
  Client client(store, 0, {0, 1}, milliseconds(0));
  client.release_store();
  EXPECT_EQ(store.use_count(), 1);
  EXPECT_EQ(std::getenv("PMI_FD"), nullptr);
  EXPECT_EQ(client.ask("cmd=barrier_in"), "cmd=barrier_out rc=0");
  EXPECT_EQ(client.ask("cmd=get kvsname=job key=a"),
            "cmd=get_result rc=-1 msg=key_not_found value=unknown");
  EXPECT_EQ(client.ask("cmd=finalize"), "cmd=finalize_ack rc=0");
}

TEST(PmiResponder, ItsEndDoesNotWaitForABarrier) {
  Client client(std::make_shared<FakeStore>(), 0, {0, 0}, std::chrono::hours(1));
  client.say("cmd=barrier_in\n");
  EXPECT_TRUE(client.silent_for(milliseconds(20)));
  client.end();
}

TEST(PmiResponder, StopsAtTheDeadline) {
  Client client(std::make_shared<FakeStore>(), 0, {0, 0}, milliseconds(20));
  client.say("cmd=barrier_in\n");
  EXPECT_TRUE(client.silent_for(milliseconds(100)));
  client.say("cmd=get_appnum\n");
  EXPECT_TRUE(client.silent_for(milliseconds(20)));
  client.end();
}

TEST(PmiResponder, StopsAtAnUnknownCommand) {
  Client client(std::make_shared<FakeStore>());
  client.say("cmd=spawn\n");
  EXPECT_TRUE(client.silent_for(milliseconds(20)));
  client.end();
}

}  // namespace
}  // namespace hbm::communicator::mpi
