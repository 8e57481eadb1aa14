#include "communicator/shm/area.h"

#include <algorithm>
#include <new>

namespace hbm::shm {
namespace {

constexpr size_t kPage = 4096;

constexpr size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

AreaLayout::AreaLayout(size_t members, size_t chunk)
    : chunk_bytes(chunk),
      data(round_up(sizeof(Slot) + members * sizeof(StreamLocation), kCacheLine)),
      data_bytes(std::max(2 * chunk, members * kCacheLine)),
      slot(round_up(sizeof(Control), kPage)),
      slot_stride(round_up(data + data_bytes, kPage)),
      mail(slot + 2 * slot_stride),
      mail_stride(sizeof(Mailbox)),
      total(mail + members * mail_stride) {}

void format_area(std::byte* area, const AreaLayout& layout) noexcept {
  auto* control = new (area) Control{};
  control->magic = kAreaMagic;
  control->chunk_bytes = layout.chunk_bytes;
  for (size_t box = layout.mail; box < layout.total; box += layout.mail_stride) {
    for (Cell& cell : reinterpret_cast<Mailbox*>(area + box)->cells) {
      new (&cell.state) std::atomic<uint32_t>(Cell::kFree);
    }
  }
}

}  // namespace hbm::shm
