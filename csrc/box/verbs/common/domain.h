// An RDMA device: its protection domain, its limits, and memory registered in it.
//
// Threads: every function may be called from any thread.
#pragma once

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hbm::verbs {

// Deletes by one of libibverbs' or librdmacm's functions.
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

// Destroys the id with its queue pair, if it has one; the device touches no memory for it after
// that.
void destroy_id(rdma_cm_id* id) noexcept;
using CmId = std::unique_ptr<rdma_cm_id, DestroyBy<destroy_id>>;

class Domain;

// Memory that the device may reach, as long as this lives; the memory must live longer.
class MemoryRegion {
 public:
  // Throws Error(kExhausted) or Error(kUnavailable) with what the kernel refused and why.
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
  // `device` stays librdmacm's, which never closes it.
  // Throws Error(kUnavailable) with what the kernel refused.
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

// Gives `id` a queue pair. `attributes` become what the device gave: inline data may be none.
// Throws Error(kUnavailable) with what the kernel refused.
void make_queue_pair(rdma_cm_id* id, const Domain& domain, ibv_qp_init_attr& attributes);

// Sets how soon an other end without a receive buffer is asked again: after 0.64 ms, not after the
// default of 655. REQUIRES: connected.
void wait_briefly_for_receivers(ibv_qp* queue_pair) noexcept;

// "RDMA: cannot create a queue pair on rxe0: Cannot allocate memory"; `error`: an errno.
std::string refused(const std::string& what, int error);

// The kernel ties an open device to the process that opened it.
// Throws Error(kUnavailable) in a child forked from a process that has asked before.
void require_own_devices();

// librdmacm's own contexts of all devices, the first of which a box takes by default; null: none.
ibv_context* first_device();

}  // namespace hbm::verbs
