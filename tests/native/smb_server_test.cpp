// A complete box: its start, options that it refuses, and socket files that killed boxes left.
#include "box/server.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>

#include "base/descriptor.h"
#include "base/error.h"
#include "box/protocol/address.h"
#include "box/protocol/protocol.h"
#include "box/protocol/socket.h"
#include "smb_store_fixture.h"

namespace hbm::box {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

class ServerTest : public testing::Test {
 protected:
  ServerTest() {
    fs::create_directory(scratch_ / "sockets");
    setenv("HBMCOMM_SOCKET_DIR", sockets().c_str(), 1);
    options_.memory = 64u << 20;
    options_.policy = memory::Policy::kDdr;
  }

  std::string sockets() const { return scratch_ / "sockets"; }
  bool no_sockets() const { return fs::is_empty(sockets()); }

  // Returns the error of a Server of these options; fails the test if there is none.
  std::string failure(const ServerOptions& options, ErrorKind kind) {
    try {
      Server server(options);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      return error.what();
    }
    ADD_FAILURE() << "it started";
    return "";
  }

  Scratch scratch_{"/tmp"};
  ServerOptions options_;
};

// Expects that the box greets a new connection with a Hello.
void expect_hello(const std::string& url) {
  const auto until = Clock::now() + 60s;
  const Descriptor socket = protocol::connect_to(protocol::parse_url(url).front(), until);
  ASSERT_TRUE(protocol::wait_for(socket.get(), POLLIN, until));
  protocol::Header header;
  ASSERT_EQ(read(socket.get(), &header, sizeof header), static_cast<ssize_t>(sizeof header));
  EXPECT_EQ(header.magic, protocol::kMagic);
  EXPECT_EQ(header.opcode, protocol::Opcode::kHello);
}

TEST_F(ServerTest, StopsWithoutWaitingForALease) {
  options_.lease = 24h;
  Server(options_).close();
}

TEST_F(ServerTest, IsReachedAndLeavesNothing) {
  Server server(options_);
  ASSERT_EQ(server.urls().size(), 2u);
  EXPECT_EQ(server.url().rfind("smb://127.0.0.1:", 0), 0u) << server.url();
  EXPECT_EQ(server.urls()[1].rfind("smb+unix://" + sockets(), 0), 0u) << server.urls()[1];
  for (const std::string& url : server.urls()) expect_hello(url);
  EXPECT_EQ(server.stats().box.totals.capacity_bytes, options_.memory);

  server.close();
  EXPECT_TRUE(server.closed());
  EXPECT_THROW(server.stats(), Error);
  EXPECT_TRUE(no_sockets());
  server.close();
}

TEST_F(ServerTest, TwoBoxesRunInOneProcess) {
  Server first(options_);
  Server second(options_);
  EXPECT_NE(first.url(), second.url());
  first.close();
  for (const std::string& url : second.urls()) expect_hello(url);
}

TEST_F(ServerTest, ListensAtTheGivenAddresses) {
  options_.listen = {};
  options_.socket_path = scratch_ / "here.socket";
  Server local(options_);
  EXPECT_EQ(local.url(), "smb+unix://" + options_.socket_path);
  EXPECT_EQ(local.urls().size(), 1u);
  options_.listen = {"127.0.0.1:0", ":0"};
  options_.socket_path.clear();
  options_.unix_socket = false;
  Server remote(options_);
  ASSERT_EQ(remote.urls().size(), 2u);
  EXPECT_EQ(remote.urls()[1].find("smb://:"), std::string::npos) << remote.urls()[1];
  EXPECT_TRUE(no_sockets());
}

TEST_F(ServerTest, OccupiedAddressesAreErrors) {
  options_.socket_path = scratch_ / "mine.socket";
  Server server(options_);
  ServerOptions other = options_;
  other.listen = {server.url().substr(6)};
  other.socket_path.clear();
  const std::string port = failure(other, ErrorKind::kUnavailable);
  EXPECT_NE(port.find("its listener: "), std::string::npos) << port;
  EXPECT_NE(port.find(other.listen.front()), std::string::npos) << port;
  EXPECT_TRUE(no_sockets());
  const std::string path = failure(options_, ErrorKind::kUnavailable);
  EXPECT_NE(path.find(options_.socket_path), std::string::npos) << path;
  for (const std::string& url : server.urls()) expect_hello(url);
}

TEST_F(ServerTest, RemovesSocketsThatKilledBoxesLeft) {
  const Server living(options_);
  const fs::path alive = fs::directory_iterator(sockets())->path();
  const auto leave = [this](const std::string& name) {
    const fs::path path = sockets() + "/" + name;
    protocol::Address address;
    address.path = path;
    const Descriptor gone = protocol::listen_at(address);
    return path;
  };
  const fs::path old = leave("hbmcomm-box-1-0.socket");
  const fs::path young = leave("hbmcomm-box-1-1.socket");
  const fs::path foreign = leave("other.socket");
  for (const fs::path& path : {alive, old, foreign}) {
    fs::last_write_time(path, fs::file_time_type::clock::now() - 2min);
  }
  const Server next(options_);
  EXPECT_FALSE(fs::exists(old));
  for (const fs::path& path : {alive, young, foreign}) EXPECT_TRUE(fs::exists(path)) << path;
}

// An attacker who could predict the name of the socket could keep the box from starting.
TEST_F(ServerTest, StartsDespiteOccupiedPredictableNames) {
  for (int i = 0; i < 100; ++i) {
    std::ofstream(sockets() + "/hbmcomm-box-" + std::to_string(getpid()) + "-" + std::to_string(i) +
                  ".socket");
  }
  const Server first(options_), second(options_);
  EXPECT_NE(first.urls().back(), second.urls().back());
}

TEST_F(ServerTest, StoreHasOneServerAndIsReopened) {
  options_.store = scratch_.store();
  {
    Server server(options_);
    const std::string cause = failure(options_, ErrorKind::kUnavailable);
    EXPECT_NE(cause.find("its store: "), std::string::npos) << cause;
  }
  EXPECT_TRUE(no_sockets());
  Server again(options_);
}

TEST_F(ServerTest, InvalidOptionsAreRefused) {
  const std::function<void(ServerOptions&)> changes[] = {
      [](auto& o) { o.memory = 0; },
      [](auto& o) { o.listen = {"nowhere"}; },
      [](auto& o) { o.listen = {}, o.unix_socket = false; },
      [](auto& o) { o.socket_path = "relative"; },
      [](auto& o) { o.socket_path = "/" + std::string(200, 'a'); },
      [](auto& o) { o.lease = 1ms; },
      [](auto& o) { o.most_clients = 0; },
      [](auto& o) { o.receivers = 1000; },
      [](auto& o) { o.smallest_block = 5000; },
      [](auto& o) { o.largest_block = 0; },
      [](auto& o) { o.store.clear(), o.sync = true; },
  };
  options_.store = scratch_.store();
  for (const auto& change : changes) {
    ServerOptions options = options_;
    change(options);
    EXPECT_FALSE(failure(options, ErrorKind::kInvalid).empty());
  }
  options_.policy = memory::Policy::kBind;
  failure(options_, ErrorKind::kUnsupported);
  EXPECT_FALSE(fs::exists(options_.store));
  EXPECT_TRUE(no_sockets());
  EXPECT_THROW(parse_verbs("maybe"), Error);
}

TEST_F(ServerTest, MissingRequiredVerbsPreventTheStart) {
  setenv("HBMCOMM_VERBS_LIB", "/nowhere/libhbm_verbs.so", 1);
  options_.verbs = VerbsChoice::kOn;
  const std::string cause = failure(options_, ErrorKind::kUnavailable);
  EXPECT_NE(cause.find("its verbs listener: "), std::string::npos) << cause;
  options_.verbs = VerbsChoice::kAuto;
  Server server(options_);
  unsetenv("HBMCOMM_VERBS_LIB");
}

TEST_F(ServerTest, AForkedChildDoesNotStopTheBox) {
  auto server = std::make_unique<Server>(options_);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    server.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(no_sockets());
  for (const std::string& url : server->urls()) expect_hello(url);
}

}  // namespace
}  // namespace hbm::box
