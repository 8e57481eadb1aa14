#include "box/verbs/common/domain.h"

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/fork.h"

namespace hbm::box::verbs::common {

std::string refused(const std::string& what, int error) {
  return "RDMA: cannot " + what + ": " + std::strerror(error);
}

void destroy_id(rdma_cm_id* id) noexcept {
  if (id->qp != nullptr) rdma_destroy_qp(id);
  rdma_destroy_id(id);
}

void require_own_devices() {
  static const ForkGuard opened;
  if (!opened.in_child()) return;
  throw Error(
      ErrorKind::kUnavailable,
      "this process was forked from one that had used RDMA, so it cannot use RDMA; start it by "
      "spawn instead of fork");
}

ibv_context* first_device() {
  int count = 0;
  ibv_context** devices = rdma_get_devices(&count);
  if (devices == nullptr) return nullptr;
  ibv_context* first = count > 0 ? devices[0] : nullptr;
  rdma_free_devices(devices);
  return first;
}

MemoryRegion::MemoryRegion(std::shared_ptr<Domain> domain, void* memory, size_t bytes, int access)
    : domain_(std::move(domain)), region_(ibv_reg_mr(domain_->get(), memory, bytes, access)) {
  if (region_ != nullptr) return;
  const int error = errno;
  const std::string what =
      refused("register " + std::to_string(bytes) + " B on " + domain_->name(), error);
  if (error == ENOMEM || error == EAGAIN) {
    throw Error(ErrorKind::kExhausted,
                what + "; registered memory is locked: raise the limit (ulimit -l)");
  }
  if (error == EFAULT || error == EOPNOTSUPP) {
    throw Error(ErrorKind::kUnavailable,
                what +
                    "; the kernel lets a device write into anonymous memory, memfds and files "
                    "on tmpfs, and not into files on a disk");
  }
  throw Error(ErrorKind::kUnavailable, what);
}

MemoryRegion::~MemoryRegion() { ibv_dereg_mr(region_); }

std::shared_ptr<Domain> Domain::open(ibv_context* device) {
  return std::shared_ptr<Domain>(new Domain(device));
}

Domain::Domain(ibv_context* device) : device_(device) {
  if (const int error = ibv_query_device(device_, &limits_); error != 0) {
    throw Error(ErrorKind::kUnavailable, refused("query " + name(), error));
  }
  domain_ = ibv_alloc_pd(device_);
  if (domain_ == nullptr) {
    throw Error(ErrorKind::kUnavailable, refused("open a protection domain on " + name(), errno));
  }
}

void make_queue_pair(rdma_cm_id* id, const Domain& domain, ibv_qp_init_attr& attributes) {
  const ibv_qp_init_attr wanted = attributes;
  if (rdma_create_qp(id, domain.get(), &attributes) == 0) return;
  attributes = wanted;
  attributes.cap.max_inline_data = 0;  // some devices have no inline data
  if (rdma_create_qp(id, domain.get(), &attributes) == 0) return;
  throw Error(ErrorKind::kUnavailable, refused("create a queue pair on " + domain.name(), errno));
}

void wait_briefly_for_receivers(ibv_qp* queue_pair) noexcept {
  ibv_qp_attr attributes{};
  attributes.min_rnr_timer = 12;  // 0.64 ms in the encoding of the standard
  ibv_modify_qp(queue_pair, &attributes, IBV_QP_MIN_RNR_TIMER);
}

Domain::~Domain() { ibv_dealloc_pd(domain_); }

}  // namespace hbm::box::verbs::common
