#include "communicator/failure/mailbox.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "communicator/failure/tuning.h"

namespace hbm::communicator::failure {
namespace {

constexpr int kType = SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
constexpr const char* kPrefix = "hbmcomm-mail-";

struct MailboxAddress {
  explicit MailboxAddress(const std::string& name) {
    const std::string text = '\0' + (kPrefix + name);
    unix_name.sun_family = AF_UNIX;
    const size_t bytes = std::min(text.size(), sizeof(unix_name.sun_path));
    std::memcpy(unix_name.sun_path, text.data(), bytes);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + bytes);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&unix_name); }

  sockaddr_un unix_name{};
  socklen_t length = 0;
};

}  // namespace

ClaimMailbox::ClaimMailbox(const std::string& name) : socket_(socket(AF_UNIX, kType, 0)) {
  const MailboxAddress address(name);
  if (socket_ && bind(socket_.get(), address.get(), address.length) != 0) socket_ = Descriptor();
}

std::optional<std::string> ClaimMailbox::receive() {
  if (!socket_) return std::nullopt;
  std::array<char, kLongestLetterBytes> letter{};
  const ssize_t bytes = recv(socket_.get(), letter.data(), letter.size(), 0);
  if (bytes < 0) return std::nullopt;
  return std::string(letter.data(), static_cast<size_t>(bytes));
}

void ClaimMailbox::send(const std::string& name, const std::string& letter) noexcept {
  const Descriptor from(socket(AF_UNIX, kType, 0));
  if (!from) return;
  const MailboxAddress address(name);
  sendto(from.get(), letter.data(), std::min(letter.size(), kLongestLetterBytes), MSG_NOSIGNAL,
         address.get(), address.length);
}

}  // namespace hbm::communicator::failure
