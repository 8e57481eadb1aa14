#include "box/protocol/address.h"

#include <gtest/gtest.h>

#include "expect_error.h"

namespace hbm::box::protocol {
namespace {

TEST(Address, ReadsHostAndPort) {
  const auto boxes = parse_url("smb://node-7.cluster:7000");
  ASSERT_EQ(boxes.size(), 1U);
  EXPECT_EQ(boxes[0], (Address{"node-7.cluster", 7000, ""}));
  EXPECT_FALSE(boxes[0].is_unix());
  EXPECT_EQ(boxes[0].url(), "smb://node-7.cluster:7000");
}

TEST(Address, ReadsIpv6InBrackets) {
  const auto boxes = parse_url("smb://[fe80::1%eth0]:65535");
  EXPECT_EQ(boxes.at(0), (Address{"fe80::1%eth0", 65535, ""}));
  EXPECT_EQ(boxes.at(0).url(), "smb://[fe80::1%eth0]:65535");
}

TEST(Address, ReadsSeveralInOrder) {
  const auto boxes = parse_url("smb://a:1,[::1]:2,10.0.0.1:3");
  ASSERT_EQ(boxes.size(), 3U);
  EXPECT_EQ(boxes[0].host_and_port(), "a:1");
  EXPECT_EQ(boxes[1].host_and_port(), "[::1]:2");
  EXPECT_EQ(boxes[2].host_and_port(), "10.0.0.1:3");
}

TEST(Address, ReadsAPath) {
  const auto boxes = parse_url("smb+unix:///run/user/0/box");
  ASSERT_EQ(boxes.size(), 1U);
  EXPECT_TRUE(boxes[0].is_unix());
  EXPECT_EQ(boxes[0].path, "/run/user/0/box");
  EXPECT_EQ(boxes[0].url(), "smb+unix:///run/user/0/box");
}

TEST(Address, ReadsListenAddresses) {
  EXPECT_EQ(parse_host_and_port("127.0.0.1:0"), (Address{"127.0.0.1", 0, ""}));
  EXPECT_EQ(parse_host_and_port(":7000"), (Address{"", 7000, ""}));
  EXPECT_EQ(parse_host_and_port("[::]:0"), (Address{"::", 0, ""}));
}

TEST(Address, ErrorsNameTheFault) {
  const auto refused = [](std::string_view text, const std::string& cause) {
    expect_error(ErrorKind::kInvalid, {"is no address of a box", cause},
                 [text] { parse_url(text); });
  };
  refused("http://a:1", "starts neither");
  refused("", "starts neither");
  refused("smb://", "a port is missing");
  refused("smb://a", "a port is missing");
  refused("smb+unix://relative", "absolute path");
  refused("smb+unix://", "absolute path");
  refused("smb+unix:///" + std::string(200, 'x'), "201 bytes");
  expect_error(ErrorKind::kInvalid, {"a port is missing"}, [] { parse_url("smb://[::1]"); });
  expect_error(ErrorKind::kInvalid, {"brackets"}, [] { parse_url("smb://::1:70"); });
  expect_error(ErrorKind::kInvalid, {"brackets"}, [] { parse_url("smb://[]:70"); });
  for (const char* port : {"", "70000", "-1", "7x", " 7", "+7", "0x10"}) {
    expect_error(ErrorKind::kInvalid, {"its port is", port},
                 [port] { parse_url(std::string("smb://a:") + port); });
  }
  refused("smb://:7", "a host is missing");
  refused("smb://a:0", "port 0");
  refused("smb://a:1,", "a port is missing");
  refused("smb://user@a:1", "is no host");
  refused("smb://a/b:1", "is no host");
}

}  // namespace
}  // namespace hbm::box::protocol
