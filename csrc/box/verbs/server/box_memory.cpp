#include "box/verbs/server/box_memory.h"

#include <cerrno>
#include <utility>

#include "base/error.h"

namespace hbm::box::verbs::server {

BoxMemory::BoxMemory(std::shared_ptr<common::Domain> domain, bool windows)
    : domain_(std::move(domain)),
      windows_(windows && domain_->limits().max_mw > 0 &&
               (domain_->limits().device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) != 0) {}

void BoxMemory::add(box::server::storage::BoxSegment& segment) const {
  auto registered = std::make_shared<Registered>();
  std::byte* const base = segment.block->base();
  if (windows_) {
    registered->writable.emplace(domain_, base, segment.size,
                                 IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
  } else {
    registered->writable.emplace(
        domain_, base, segment.size,
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
    registered->readable.emplace(domain_, base, segment.size, IBV_ACCESS_REMOTE_READ);
  }
  segment.registration = std::move(registered);
}

const BoxMemory::Registered& BoxMemory::of(const box::server::storage::BoxSegment& segment) {
  return *static_cast<const Registered*>(segment.registration.get());
}

uint32_t BoxMemory::shared_key(const box::server::storage::BoxSegment& segment, bool may_write) {
  const Registered& registered = of(segment);
  return (may_write ? registered.writable : registered.readable)->get()->rkey;
}

MemoryWindow::MemoryWindow(const common::Domain& domain,
                           std::shared_ptr<box::server::storage::BoxSegment> segment,
                           bool may_write)
    : segment_(std::move(segment)),
      may_write_(may_write),
      window_(ibv_alloc_mw(domain.get(), IBV_MW_TYPE_2)) {
  if (window_ == nullptr) {
    throw Error(ErrorKind::kExhausted,
                common::refused("make a memory window on " + domain.name(), errno));
  }
}

MemoryWindow::MemoryWindow(MemoryWindow&& other) noexcept
    : segment_(std::move(other.segment_)),
      may_write_(other.may_write_),
      window_(std::exchange(other.window_, nullptr)),
      key_(other.key_) {}

MemoryWindow::~MemoryWindow() {
  if (window_ != nullptr) ibv_dealloc_mw(window_);
}

void MemoryWindow::bind(ibv_qp* queue_pair, uint64_t wr_id) {
  key_ = ibv_inc_rkey(window_->rkey);
  ibv_send_wr wr{};
  wr.wr_id = wr_id;
  wr.opcode = IBV_WR_BIND_MW;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.bind_mw.mw = window_;
  wr.bind_mw.rkey = key_;
  wr.bind_mw.bind_info.mr = BoxMemory::of(*segment_).writable->get();
  wr.bind_mw.bind_info.addr = reinterpret_cast<uintptr_t>(segment_->block->base());
  wr.bind_mw.bind_info.length = segment_->size;
  wr.bind_mw.bind_info.mw_access_flags =
      IBV_ACCESS_REMOTE_READ | (may_write_ ? IBV_ACCESS_REMOTE_WRITE : 0);
  ibv_send_wr* bad = nullptr;
  if (const int error = ibv_post_send(queue_pair, &wr, &bad); error != 0) {
    throw Error(ErrorKind::kUnavailable, common::refused("bind a memory window", error));
  }
}

}  // namespace hbm::box::verbs::server
