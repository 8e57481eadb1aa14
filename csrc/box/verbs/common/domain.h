// An RDMA device: its protection domain, its limits, and memory registered in it.
//
// Threads: any.
#pragma once

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hbm::box::verbs::common {

// A deleter that calls a function of libibverbs or librdmacm.
template <auto destroy>
struct DestroyBy {
  template <class T>
  void operator()(T* resource) const noexcept {
    destroy(resource);
  }
};
using CompletionQueue = std::unique_ptr<ibv_cq, DestroyBy<ibv_destroy_cq>>;
using CompletionChannel = std::unique_ptr<ibv_comp_channel, DestroyBy<ibv_destroy_comp_channel>>;
using SharedReceives = std::unique_ptr<ibv_srq, DestroyBy<ibv_destroy_srq>>;
using EventChannel = std::unique_ptr<rdma_event_channel, DestroyBy<rdma_destroy_event_channel>>;

// Destroys the id and its queue pair, if there is one. Afterwards the device no longer accesses the
// memory of the queue pair's work requests.
void destroy_id(rdma_cm_id* id) noexcept;
using CmId = std::unique_ptr<rdma_cm_id, DestroyBy<destroy_id>>;

class Domain;

// Memory registered with the device while this object exists. The memory must outlive the object.
class MemoryRegion {
 public:
  // Throws Error(kExhausted) or Error(kUnavailable) with the refused operation and the reason.
  MemoryRegion(std::shared_ptr<Domain> domain, void* memory, size_t bytes, int access);
  ~MemoryRegion();
  MemoryRegion(const MemoryRegion&) = delete;
  MemoryRegion& operator=(const MemoryRegion&) = delete;

  ibv_mr* get() const noexcept { return region_; }
  uint32_t lkey() const noexcept { return region_->lkey; }

 private:
  const std::shared_ptr<Domain> domain_;
  ibv_mr* region_;
};

class Domain {
 public:
  // `device` is owned by librdmacm, which never closes it. Throws Error(kUnavailable) with the
  // refused operation.
  static std::shared_ptr<Domain> open(ibv_context* device);
  ~Domain();
  Domain(const Domain&) = delete;
  Domain& operator=(const Domain&) = delete;

  ibv_context* device() const noexcept { return device_; }
  ibv_pd* get() const noexcept { return domain_; }
  const ibv_device_attr& limits() const noexcept { return limits_; }
  std::string name() const { return ibv_get_device_name(device_->device); }

 private:
  explicit Domain(ibv_context* device);

  ibv_context* const device_;
  ibv_device_attr limits_{};
  ibv_pd* domain_ = nullptr;
};

// Creates the queue pair of `id`. Sets `attributes` to the granted values; the granted inline data
// may be 0 bytes. Throws Error(kUnavailable) with the refused operation.
void make_queue_pair(rdma_cm_id* id, const Domain& domain, ibv_qp_init_attr& attributes);

// If this end has no receive buffer, the peer retries after 0.64 ms from now on, instead of the
// default 655 ms. REQUIRES: the queue pair is connected.
void wait_briefly_for_receivers(ibv_qp* queue_pair) noexcept;

// Returns an error text such as "RDMA: cannot create a queue pair on rxe0: Cannot allocate memory".
// `error`: an errno.
std::string refused(const std::string& what, int error);

// Throws Error(kUnavailable) in a child forked from a process that called this function before,
// because an open device belongs to the process that opened it.
void require_own_devices();

// Returns librdmacm's context of the first device, the default of a box; null: there is no device.
ibv_context* first_device();

}  // namespace hbm::box::verbs::common
