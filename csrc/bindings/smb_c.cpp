// The functions of smb.h, implemented on smb_client.h. A process has one client, and finds a
// segment by an address in the segment's local copy.
#include "smb.h"

#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/error.h"
#include "box/client/options.h"
#include "smb_client.h"

namespace {

using hbm::Dtype;
using hbm::Error;
using hbm::ErrorKind;
using hbm::box::client::AllocOptions;
using hbm::box::client::BoxError;
using hbm::box::client::Client;
using hbm::box::client::Segment;

// A segment and its local copy.
struct Copy {
  Segment segment;
  std::unique_ptr<std::byte[]> memory;
  bool deleted = false;  // by smb_delete()
};

struct Location {
  std::shared_ptr<Client> client;
  std::shared_ptr<Copy> copy;
  uint64_t offset = 0;
};

struct Process {
  // Guards the two members below, and Copy::deleted. Not held during a segment's requests.
  std::mutex mutex;
  std::shared_ptr<Client> client;
  std::map<const std::byte*, std::shared_ptr<Copy>> copies;  // by first address
};

Process& process() {
  static auto* const one = new Process;  // never destroyed: other threads may still call
  return *one;
}

thread_local std::string last_error;

int errno_of(const BoxError& error) noexcept {
  switch (error.cause()) {
    case BoxError::Cause::kLost:
      return EIDRM;
    case BoxError::Cause::kDenied:
      return EACCES;
    case BoxError::Cause::kNoSuchKey:
      return ENOENT;
    case BoxError::Cause::kKeyInUse:
      return EEXIST;
    case BoxError::Cause::kClosed:
      return ENOTCONN;
    case BoxError::Cause::kRefused:
      return EINVAL;
    case BoxError::Cause::kUnreachable:
    case BoxError::Cause::kTimeout:
      return EIO;
  }
  return EIO;
}

// Runs `call` for a C caller: an exception becomes errno and the text of smb_error().
template <class Result, class Call>
Result guarded(Result failed, Call call) noexcept {
  const auto fail = [&](int code, const char* words) {
    last_error = words;
    errno = code;
    return failed;
  };
  try {
    last_error.clear();
    return call();
  } catch (const BoxError& error) {
    return fail(errno_of(error), error.what());
  } catch (const Error& error) {
    return fail(error.kind() == ErrorKind::kExhausted ? ENOMEM : EINVAL, error.what());
  } catch (const std::bad_alloc&) {
    return fail(ENOMEM, "this process has no memory left");
  } catch (const std::exception& error) {
    return fail(EIO, error.what());
  }
}

// REQUIRES: the mutex is held.
const std::shared_ptr<Client>& client_of(const Process& one) {
  if (!one.client) throw BoxError(BoxError::Cause::kClosed, "call smb_init() first");
  return one.client;
}

std::shared_ptr<Client> connected() {
  const std::lock_guard lock(process().mutex);
  return client_of(process());
}

Location find(const void* pointer) {
  const auto* const at = static_cast<const std::byte*>(pointer);
  const std::lock_guard lock(process().mutex);
  const auto& client = client_of(process());
  auto after = process().copies.upper_bound(at);
  if (after != process().copies.begin()) {
    const auto& [begin, copy] = *--after;
    const auto offset = static_cast<uint64_t>(at - begin);
    if (offset < copy->segment.size()) return {client, copy, offset};
  }
  throw Error(ErrorKind::kInvalid, "the pointer is not into what shm_alloc() returned");
}

hbm::box::protocol::Id id_of(uint64_t key) { return {.high = 0, .low = key}; }

Segment attach(Client& client, uint64_t key, uint64_t size, int flags) {
  AllocOptions options;
  options.key = id_of(key);
  options.size = size;
  options.read_only = (flags & SHM_RDONLY) != 0;
  options.mode = hbm::box::protocol::AllocMode::kAttach;
  if (flags & IPC_CREAT) {
    options.mode = flags & IPC_EXCL ? hbm::box::protocol::AllocMode::kCreate
                                    : hbm::box::protocol::AllocMode::kAuto;
  }
  return client.alloc(options);
}

// Creates a segment under a random key of 64 bits, because the C interface has no 128-bit keys.
Segment create(Client& client, uint64_t size) {
  std::random_device random;
  for (;;) {
    const uint64_t key = uint64_t{random()} << 32 | random();
    try {
      if (key != 0) return attach(client, key, size, IPC_CREAT | IPC_EXCL);
    } catch (const BoxError& error) {
      if (error.cause() != BoxError::Cause::kKeyInUse) throw;
    }
  }
}

Dtype dtype_of(unsigned int type) {
  switch (type) {
    case SMB_FLOAT:
      return Dtype::kFloat32;
    case SMB_DOUBLE:
      return Dtype::kFloat64;
    case SMB_BFLOAT16:
      return Dtype::kBFloat16;
    case SMB_FLOAT16:
      return Dtype::kFloat16;
    case SMB_INT32:
      return Dtype::kInt32;
    case SMB_INT64:
      return Dtype::kInt64;
  }
  throw Error(ErrorKind::kInvalid, "shm_accum: there is no element type " + std::to_string(type));
}

}  // namespace

int smb_init() {
  return guarded(-1, [] {
    const std::lock_guard lock(process().mutex);
    if (!process().client) {
      process().client = std::make_shared<Client>(hbm::box::client::options_from_environment());
    }
    return 0;
  });
}

void smb_terminate() {
  guarded(0, [] {
    std::shared_ptr<Client> client;
    {
      const std::lock_guard lock(process().mutex);
      client = std::exchange(process().client, nullptr);
      process().copies.clear();
    }
    if (client) client->close();
    return 0;
  });
}

void* shm_alloc(uint64_t* key, uint64_t size, int shmflg) {
  return guarded(static_cast<void*>(nullptr), [=]() -> void* {
    const auto client = connected();
    const bool unnamed = key == nullptr || *key == 0;
    const Segment segment = unnamed ? create(*client, size) : attach(*client, *key, size, shmflg);
    auto copy =
        std::make_shared<Copy>(Copy{segment, std::make_unique<std::byte[]>(segment.size())});
    std::byte* const memory = copy->memory.get();
    const std::lock_guard lock(process().mutex);
    process().copies.emplace(memory, std::move(copy));
    if (key != nullptr) *key = segment.key().low;
    return memory;
  });
}

int smb_exists(uint64_t key) {
  return guarded(-1, [=] { return connected()->exists(id_of(key)) ? 1 : 0; });
}

void shm_free(void* ptr) {
  if (ptr == nullptr) return;
  guarded(0, [=] {
    const auto client = connected();
    std::shared_ptr<Copy> copy;
    bool deletes = false;
    {
      const std::lock_guard lock(process().mutex);
      const auto found = process().copies.find(static_cast<std::byte*>(ptr));
      if (found == process().copies.end()) {
        throw Error(ErrorKind::kInvalid, "shm_free: not a pointer that shm_alloc() returned");
      }
      copy = std::move(found->second);
      process().copies.erase(found);
      deletes = copy->segment.created() && !copy->deleted;
    }
    try {
      if (deletes) client->remove(copy->segment);
    } catch (...) {  // for example if another process deleted the key first
      client->free(copy->segment);
      throw;
    }
    client->free(copy->segment);
    return 0;
  });
}

int smb_delete(void* ptr) {
  return guarded(-1, [=] {
    const Location location = find(ptr);
    location.client->remove(location.copy->segment);
    const std::lock_guard lock(process().mutex);
    location.copy->deleted = true;
    return 0;
  });
}

unsigned long shm_get_key(void* ptr) {
  return guarded(0UL, [=] { return find(ptr).copy->segment.key().low; });
}

int shm_rsync(void* ptr, size_t size) {
  return guarded(-1, [=] {
    const Location location = find(ptr);
    location.client->read(location.copy->segment, location.offset, static_cast<std::byte*>(ptr),
                          size);
    return 0;
  });
}

int shm_wsync(void* ptr, size_t size) {
  return guarded(-1, [=] {
    const Location location = find(ptr);
    location.client->write(location.copy->segment, location.offset, static_cast<std::byte*>(ptr),
                           size);
    return 0;
  });
}

int shm_accum(void* dst, void* src, size_t size, unsigned int type) {
  return guarded(-1, [=] {
    const Location target = find(dst);
    const Location source = find(src);
    target.client->accumulate(target.copy->segment, source.copy->segment,
                              {.dtype = dtype_of(type),
                               .bytes = size,
                               .target_offset = target.offset,
                               .source_offset = source.offset});
    return 0;
  });
}

const char* smb_error() { return last_error.c_str(); }
