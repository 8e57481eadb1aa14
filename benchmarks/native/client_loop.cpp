#include "client_loop.h"

#include <array>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "kernels/copy.h"

namespace hbm::bench {
namespace {

Dtype accumulated(std::string_view name) {
  constexpr std::array kTypes = {Dtype::kFloat32,  Dtype::kFloat64, Dtype::kFloat16,
                                 Dtype::kBFloat16, Dtype::kInt32,   Dtype::kInt64};
  for (const Dtype dtype : kTypes) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw Error(ErrorKind::kInvalid, "boxes cannot accumulate " + std::string(name));
}

// Returns the bytes of the element 1, and the bytes of 1 + scale * 1: 1.5, or 2 for integers.
std::pair<std::string_view, std::string_view> one_and_sum(Dtype dtype) {
  using namespace std::string_view_literals;
  switch (dtype) {
    case Dtype::kFloat32:
      return {"\0\0\x80\x3f"sv, "\0\0\xc0\x3f"sv};
    case Dtype::kFloat64:
      return {"\0\0\0\0\0\0\xf0\x3f"sv, "\0\0\0\0\0\0\xf8\x3f"sv};
    case Dtype::kFloat16:
      return {"\0\x3c"sv, "\0\x3e"sv};
    case Dtype::kBFloat16:
      return {"\x80\x3f"sv, "\xc0\x3f"sv};
    case Dtype::kInt32:
      return {"\1\0\0\0"sv, "\2\0\0\0"sv};
    default:
      return {"\1\0\0\0\0\0\0\0"sv, "\2\0\0\0\0\0\0\0"sv};
  }
}

box::client::AllocOptions temporary(uint64_t bytes) {
  box::client::AllocOptions options;
  options.size = bytes;
  options.mode = box::protocol::AllocMode::kCreate;
  options.temporary = true;
  return options;
}

}  // namespace

ClientLoop::ClientLoop(const box::client::ClientOptions& options, std::span<std::byte> local)
    : client_(options), local_(local), segment_(client_.alloc(temporary(local.size()))) {}

ClientLoop::Action ClientLoop::action(const std::string& name) {
  if (name == "read") {
    return [this] { client_.read(segment_, 0, local_.data(), local_.size()); };
  }
  if (name == "write") {
    return [this] { client_.write(segment_, 0, local_.data(), local_.size()); };
  }
  if (name == "fetch_add") {
    return [this] { client_.fetch_add(segment_, 0, 1); };
  }
  for (const bool write_first : {false, true}) {
    const std::string_view verb = write_first ? "add:" : "accumulate:";
    if (name.starts_with(verb)) return accumulate(name.substr(verb.size()), write_first);
  }
  return copy(name);
}

ClientLoop::Action ClientLoop::copy(const std::string& name) {
  const std::shared_ptr<std::byte> memory = segment_.memory();
  std::byte* const local = local_.data();
  const size_t bytes = local_.size();
  if (name == "memcpy:read") return [=] { std::memcpy(local, memory.get(), bytes); };
  if (name == "memcpy:write") return [=] { std::memcpy(memory.get(), local, bytes); };
  if (name == "copy_bytes:read") return [=] { kernels::copy_bytes(local, memory.get(), bytes); };
  if (name == "copy_bytes:write") return [=] { kernels::copy_bytes(memory.get(), local, bytes); };
  throw Error(ErrorKind::kInvalid, "no action \"" + name + "\"");
}

ClientLoop::Action ClientLoop::accumulate(const std::string& dtype, bool write_first) {
  box::client::Accumulation what;
  what.dtype = accumulated(dtype);
  what.scale = what.dtype == Dtype::kInt32 || what.dtype == Dtype::kInt64 ? 1 : 0.5;
  what.bytes = local_.size();
  return [this, what, write_first, &from = source()] {
    if (write_first) client_.write(from, 0, local_.data(), local_.size());
    client_.accumulate(segment_, from, what);
  };
}

void ClientLoop::check() {
  constexpr std::string_view kHead = "the head", kTail = "the tail";
  std::byte* const tail = local_.data() + local_.size() - kTail.size();
  std::memcpy(local_.data(), kHead.data(), kHead.size());
  std::memcpy(tail, kTail.data(), kTail.size());
  action("write")();
  std::memset(local_.data(), 0, kHead.size());
  std::memset(tail, 0, kTail.size());
  action("read")();
  if (std::memcmp(local_.data(), kHead.data(), kHead.size()) != 0 ||
      std::memcmp(tail, kTail.data(), kTail.size()) != 0) {
    throw Error(ErrorKind::kMismatch, "the bytes read differ from the bytes written");
  }
}

void ClientLoop::check_sum(const std::string& dtype) {
  const auto [one, total] = one_and_sum(accumulated(dtype));
  for (size_t at = 0; at < local_.size(); at += one.size()) {
    std::memcpy(local_.data() + at, one.data(), one.size());
  }
  action("write")();
  action("add:" + dtype)();
  action("read")();
  for (const size_t at : {size_t{0}, local_.size() - total.size()}) {
    if (std::memcmp(local_.data() + at, total.data(), total.size()) != 0) {
      throw Error(ErrorKind::kMismatch, "the sum of " + dtype + " is wrong");
    }
  }
}

const box::client::Segment& ClientLoop::source() {
  if (!source_) source_ = client_.alloc(temporary(local_.size()));
  return *source_;
}

}  // namespace hbm::bench
