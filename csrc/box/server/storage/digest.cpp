#include "box/server/storage/digest.h"

#include <fcntl.h>
#include <openssl/evp.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "box/server/storage/files.h"
#include "box/server/storage/tuning.h"

namespace hbm::box::server::storage {
namespace {

constexpr size_t kDigits = 2 * sizeof(Digest);

class Hash {
 public:
  Hash() : context_(EVP_MD_CTX_new(), &EVP_MD_CTX_free) {
    require(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }
  void add(const void* bytes, size_t size) {
    require(EVP_DigestUpdate(context_.get(), bytes, size) == 1);
  }
  Digest result() {
    Digest digest;
    require(EVP_DigestFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(digest.data()),
                               nullptr) == 1);
    return digest;
  }

 private:
  static void require(bool done) {
    if (!done) throw Error(ErrorKind::kUnavailable, "OpenSSL cannot compute SHA-256");
  }

  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

Digest digest_of_file(int fd, const std::string& path) {
  Hash hash;
  std::vector<std::byte> block(kFileReadBytes);
  for (size_t got = kFileReadBytes; got == kFileReadBytes;) {
    got = read_file(fd, block.data(), kFileReadBytes, path);
    hash.add(block.data(), got);
  }
  return hash.result();
}

std::string hex(const Digest& digest) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : digest) {
    text += kHex[std::to_integer<unsigned>(byte) >> 4];
    text += kHex[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}

// Calls `action` for every index below `count`, on several threads. Rethrows one of their
// exceptions.
void for_each_index(size_t count, const std::function<void(size_t)>& action) {
  std::atomic<size_t> next{0};
  std::mutex mutex;  // guards failure
  std::exception_ptr failure;
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      try {
        action(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (failure == nullptr) failure = std::current_exception();
        next.store(count, std::memory_order_relaxed);
      }
    }
  };
  const unsigned most = std::clamp(std::thread::hardware_concurrency(), 1u, kMostChecksumThreads);
  std::vector<std::jthread> helpers;
  for (size_t i = 1; i < std::min<size_t>(most, count); ++i) helpers.emplace_back(work);
  work();
  helpers.clear();
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace

Digest digest_of(std::span<const std::byte> bytes) {
  Hash hash;
  hash.add(bytes.data(), bytes.size());
  return hash.result();
}

Digest write_checksums(const std::string& directory, const std::vector<std::string>& files) {
  std::vector<std::string> lines(files.size());
  for_each_index(files.size(), [&](size_t i) {
    const std::string path = directory + "/" + files[i];
    const Descriptor file = open_file(path, O_RDONLY);
    sync_file(file.get(), path);
    lines[i] = hex(digest_of_file(file.get(), path)) + "  " + files[i] + "\n";
  });
  std::string text;
  for (const std::string& line : lines) text += line;
  const std::string path = directory + "/checksums";
  {
    const Descriptor fresh = open_file(path + ".new", O_WRONLY | O_CREAT | O_TRUNC);
    write_file(fresh.get(), text.data(), text.size(), path);
  }
  replace_file(path + ".new", path, true);
  sync_directory(directory + "/segments");
  return digest_of(std::as_bytes(std::span(text)));
}

std::set<std::string> verify_checksums(const std::string& directory, const Digest& expected) {
  const std::string path = directory + "/checksums";
  if (!std::filesystem::exists(path)) throw damaged(path, "it is missing");
  const std::vector<std::byte> bytes = whole_file(path);
  if (digest_of(bytes) != expected) throw damaged(path, "its own checksum is wrong");

  std::vector<std::string> digests, files;
  std::string_view rest(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    digests.emplace_back(line.substr(0, kDigits));
    files.emplace_back(line.substr(std::min(line.size(), kDigits + 2)));
  }
  for_each_index(files.size(), [&](size_t i) {
    const std::string one = directory + "/" + files[i];
    if (!std::filesystem::exists(one)) throw damaged(one, "it is missing");
    const Descriptor file = open_file(one, O_RDONLY);
    if (hex(digest_of_file(file.get(), one)) != digests[i]) {
      throw damaged(one, "it is not as the last box left it: its checksum is wrong");
    }
  });
  return {files.begin(), files.end()};
}

}  // namespace hbm::box::server::storage
