#include "bindings/smb_bench_client.h"

#include <array>
#include <chrono>
#include <cstring>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "kernels/copy.h"

namespace hbm {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

double seconds_since(Clock::time_point start) { return Seconds(Clock::now() - start).count(); }

Clock::time_point at(double seconds) {
  return Clock::time_point(std::chrono::duration_cast<Clock::duration>(Seconds(seconds)));
}

Dtype accumulated(std::string_view name) {
  constexpr std::array kTypes = {Dtype::kFloat32,  Dtype::kFloat64, Dtype::kFloat16,
                                 Dtype::kBFloat16, Dtype::kInt32,   Dtype::kInt64};
  for (const Dtype dtype : kTypes) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw Error(ErrorKind::kInvalid, "boxes accumulate no " + std::string(name));
}

client::AllocOptions temporary(uint64_t bytes) {
  client::AllocOptions options;
  options.size = bytes;
  options.mode = smb::AllocMode::kCreate;
  options.temporary = true;
  return options;
}

}  // namespace

ClientLoop::ClientLoop(const client::ClientOptions& options, std::span<std::byte> local)
    : client_(options), local_(local), segment_(client_.alloc(temporary(local.size()))) {}

double ClientLoop::run(const std::string& name, int calls) {
  const Action action = this->action(name);
  const auto start = Clock::now();
  for (int call = 0; call < calls; ++call) action();
  return seconds_since(start);
}

std::vector<double> ClientLoop::times(const std::string& name, int calls) {
  const Action action = this->action(name);
  std::vector<double> times(static_cast<size_t>(calls));
  for (double& time : times) {
    const auto start = Clock::now();
    action();
    time = seconds_since(start) * 1e9;
  }
  return times;
}

uint64_t ClientLoop::mixed(double begin, double end, uint64_t piece) {
  if (piece == 0 || piece > local_.size()) {
    throw Error(ErrorKind::kInvalid, "pieces of " + std::to_string(piece) + " bytes, of " +
                                         std::to_string(local_.size()));
  }
  std::this_thread::sleep_until(at(begin));
  const auto over = at(end);
  uint64_t moved = 0;
  uint64_t offset = 0;
  for (bool reading = true;; reading = !reading) {
    if (reading) {
      client_.read(segment_, offset, local_.data() + offset, piece);
    } else {
      client_.write(segment_, offset, local_.data() + offset, piece);
      offset = offset + 2 * piece <= local_.size() ? offset + piece : 0;
    }
    if (Clock::now() > over) return moved;
    moved += piece;
  }
}

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
    const std::string_view verb = write_first ? "add " : "accumulate ";
    if (name.starts_with(verb)) return accumulate(name.substr(verb.size()), write_first);
  }
  return copy(name);
}

ClientLoop::Action ClientLoop::copy(const std::string& name) {
  const std::shared_ptr<std::byte> memory = segment_.memory();
  std::byte* const local = local_.data();
  const size_t bytes = local_.size();
  if (name == "memcpy read") return [=] { std::memcpy(local, memory.get(), bytes); };
  if (name == "memcpy write") return [=] { std::memcpy(memory.get(), local, bytes); };
  if (name == "copy_bytes read") return [=] { copy_bytes(local, memory.get(), bytes); };
  if (name == "copy_bytes write") return [=] { copy_bytes(memory.get(), local, bytes); };
  throw Error(ErrorKind::kInvalid, "no action \"" + name + "\"");
}

ClientLoop::Action ClientLoop::accumulate(const std::string& dtype, bool write_first) {
  client::Accumulation what;
  what.dtype = accumulated(dtype);
  what.scale = what.dtype == Dtype::kInt32 || what.dtype == Dtype::kInt64 ? 1 : 0.5;
  what.bytes = local_.size();
  return [this, what, write_first, &from = source()] {
    if (write_first) client_.write(from, 0, local_.data(), local_.size());
    client_.accumulate(segment_, from, what);
  };
}

const client::Segment& ClientLoop::source() {
  if (!source_) source_ = client_.alloc(temporary(local_.size()));
  return *source_;
}

}  // namespace hbm
