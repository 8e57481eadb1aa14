// Tests listening with HBMCOMM_PORTS and HBMCOMM_INTERFACES, over IPv4 and IPv6. A process reads
// the variables once, so most tests run in a process of their own, and in a network of their own.
#include "base/tcp.h"

#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "expect_error.h"
#include "forked_ranks.h"
#include "gtest/gtest.h"

namespace hbm {
namespace {

// Enters a new network, whose only interface is the loopback interface. Returns false if this
// process may not.
bool enter_network() {
  if (unshare(CLONE_NEWNET) != 0) return false;
  const Descriptor any(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP;
  return ioctl(any.get(), SIOCSIFFLAGS, &request) == 0;
}

void in_own_network(const std::function<void()>& body) {
  if (run_forked([] { ASSERT_TRUE(enter_network()); }) != 0) {
    GTEST_SKIP() << "network namespaces are not permitted here";
  }
  EXPECT_EQ(run_forked([&] {
              ASSERT_TRUE(enter_network());
              body();
            }),
            0);
}

bool has_ipv6() {
  const Descriptor any(socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 loopback{};
  loopback.sin6_family = AF_INET6;
  loopback.sin6_addr = in6addr_loopback;
  return any && bind(any.get(), reinterpret_cast<sockaddr*>(&loopback), sizeof loopback) == 0;
}

// Returns errno's value for the end of an attempt to connect.
int connect_error(const std::string& address, uint16_t port) {
  const Descriptor made = start_to_connect(address, port);
  if (!made) return errno;
  pollfd ready{made.get(), POLLOUT, 0};
  EXPECT_EQ(poll(&ready, 1, 60'000), 1);
  return connection_error(made.get());
}

TEST(Choice, IsARangeOfPortsAndAListOfInterfaces) {
  EXPECT_EQ(parse_ports("41000-41100").first, 41000);
  EXPECT_EQ(parse_ports("41000-41100").last, 41100);
  EXPECT_EQ(parse_ports("5-5").last, 5);
  EXPECT_EQ(parse_ports(nullptr).first, 0);
  EXPECT_EQ(parse_ports("").first, 0);
  EXPECT_EQ(parse_interfaces("eth0,ib1"), (std::vector<std::string>{"eth0", "ib1"}));
  EXPECT_TRUE(parse_interfaces("").empty());
}

TEST(Choice, RefusesOtherTexts) {
  for (const char* text : {"41000", "-", "0-5", "6-5", "1-65536", "a-b", "1-2-3", "1-2 ", "+1-2"}) {
    expect_error(ErrorKind::kInvalid, {"HBMCOMM_PORTS", text, "41000-41100"},
                 [&] { parse_ports(text); });
  }
  for (const char* text : {",", "eth0,", "eth0,,eth1"}) {
    expect_error(ErrorKind::kInvalid, {"HBMCOMM_INTERFACES", text, "eth0,eth1"},
                 [&] { parse_interfaces(text); });
  }
}

TEST(Choice, NamesAnInterfaceThatIsMissing) {
  in_own_network([] {
    setenv("HBMCOMM_INTERFACES", "lo,eth7", 1);
    expect_error(ErrorKind::kInvalid,
                 {"HBMCOMM_INTERFACES=lo,eth7", "names eth7", "it has lo (127.0.0.1)"},
                 [] { chosen_interfaces(); });
  });
}

TEST(Listening, TakesTheFreePortsOfTheRange) {
  in_own_network([] {
    setenv("HBMCOMM_PORTS", "5000-5001", 1);
    uint16_t port = 0;
    Descriptor first = listen_on_all_addresses(port);
    EXPECT_EQ(port, 5000);
    const Descriptor second = listen_on_all_addresses(port);
    EXPECT_EQ(port, 5001);
    ASSERT_FALSE(listen_on_all_addresses(port));
    EXPECT_EQ(errno, EADDRINUSE);
    EXPECT_NE(listening_error(errno).find("HBMCOMM_PORTS=5000-5001"), std::string::npos);
    EXPECT_EQ(connect_error("127.0.0.1", 5000), 0);
    first = Descriptor();
    EXPECT_EQ(connect_error("127.0.0.1", 5000), ECONNREFUSED);
    EXPECT_TRUE(listen_on_all_addresses(port));
    EXPECT_EQ(port, 5000) << "a port is free again when its socket is closed";
  });
}

TEST(Listening, ServesIpv4AndIpv6) {
  in_own_network([] {
    uint16_t port = 0;
    const Descriptor listener = listen_on_all_addresses(port);
    ASSERT_TRUE(listener);
    EXPECT_EQ(connect_error("127.0.0.1", port), 0);
    if (has_ipv6()) {
      EXPECT_EQ(connect_error("::1", port), 0);
    }
  });
}

TEST(Listening, TakesAPortWhoseConnectionsLinger) {
  in_own_network([] {
    uint16_t port = 0;
    Descriptor listener = listen_on_all_addresses(port);
    const Descriptor caller = start_to_connect("127.0.0.1", port);
    pollfd ready{listener.get(), POLLIN, 0};
    ASSERT_EQ(poll(&ready, 1, 60'000), 1);
    Descriptor accepted(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    ASSERT_TRUE(accepted);
    accepted = Descriptor();  // before the caller's end, so the connection lingers here
    listener = Descriptor();
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_port = htons(port);
    EXPECT_TRUE(listen_tcp_at(reinterpret_cast<sockaddr*>(&name), sizeof name, true))
        << std::strerror(errno);
  });
}

TEST(MachineAddresses, HaveTheLoopbackAddressOfIpv4) {
  in_own_network([] { EXPECT_EQ(machine_addresses(), std::vector<std::string>{"127.0.0.1"}); });
}

TEST(WithPort, PutsIpv6InBrackets) {
  EXPECT_EQ(with_port("10.0.0.1", 80), "10.0.0.1:80");
  EXPECT_EQ(with_port("fd00::1", 80), "[fd00::1]:80");
}

}  // namespace
}  // namespace hbm
