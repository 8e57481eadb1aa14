#include "communicator/shm/control_region.h"

#include <algorithm>
#include <new>

#include "communicator/shm/tuning.h"

namespace hbm::communicator::shm {
namespace {

constexpr size_t kPage = 4096;

constexpr size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

MessageHeader PhaseHeader::message() const noexcept {
  return {.magic = magic,
          .op = op,
          .dtype = dtype,
          .reduce_op = reduce_op,
          .reserved = 0,
          .root = root,
          .part = part,
          .sequence = sequence,
          .count = count,
          .payload = 0,
          .transfer = 0,
          .whole = whole,
          .group = 0};
}

RegionLayout::RegionLayout(size_t local_size, size_t chunk)
    : chunk_bytes(chunk),
      data(round_up(sizeof(Slot) + local_size * sizeof(TransferLocation), kCacheLine)),
      data_bytes(
          std::max(std::clamp(kSlotTransferBytes, 2 * chunk, 4 * chunk), local_size * kCacheLine)),
      slot(round_up(sizeof(Control), kPage)),
      slot_stride(round_up(data + data_bytes, kPage)),
      mail(slot + 2 * slot_stride),
      mail_stride(sizeof(Mailbox)),
      total(mail + local_size * mail_stride) {}

void format_region(std::byte* region, const RegionLayout& layout) noexcept {
  auto* control = new (region) Control{};
  control->magic = kRegionMagic;
  control->chunk_bytes = layout.chunk_bytes;
  for (size_t slot : {layout.slot, layout.slot + layout.slot_stride}) {
    new (&reinterpret_cast<Slot*>(region + slot)->phase) std::atomic<uint64_t>(0);
  }
  for (size_t box = layout.mail; box < layout.total; box += layout.mail_stride) {
    for (Cell& cell : reinterpret_cast<Mailbox*>(region + box)->cells) {
      new (&cell.state) std::atomic<uint32_t>(Cell::kFree);
    }
  }
}

}  // namespace hbm::communicator::shm
