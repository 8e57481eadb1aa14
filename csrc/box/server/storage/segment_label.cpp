#include "box/server/storage/segment_label.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "box/server/storage/files.h"
#include "box/server/storage/sealed_number.h"
#include "box/server/storage/tuning.h"

namespace hbm::box {
namespace {

constexpr uint64_t kPage = 4096;

struct LabelRecord {
  std::array<char, 8> magic{'H', 'B', 'M', 'L', 'A', 'B', 'E', 'L'};
  SegmentLabel label;
  uint64_t checksum = 0;  // of the label
};
static_assert(sizeof(LabelRecord) == 64 && std::is_trivially_copyable_v<LabelRecord>);

LabelRecord record_of(const SegmentLabel& label) {
  LabelRecord record;
  record.label = label;
  record.checksum = checksum(0, record.label);
  return record;
}

bool all_zero(const std::vector<std::byte>& bytes, size_t count) {
  return std::all_of(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(count),
                     [](std::byte byte) { return byte == std::byte{}; });
}

LabelRecord last_page(int fd, uint64_t bytes, const std::string& path) {
  LabelRecord record{};
  if (bytes >= kPage) read_file_at(fd, &record, sizeof record, bytes - kPage, path);
  return record;
}

}  // namespace

uint64_t labelled_bytes(uint64_t size) noexcept {
  return (size + kPage - 1) / kPage * kPage + kPage;
}

void write_label(int fd, const SegmentLabel& label, const std::string& path) {
  const LabelRecord record = record_of(label);
  write_file_at(fd, &record, sizeof record, labelled_bytes(label.size) - kPage, path);
}

bool has_label(int fd, const SegmentLabel& label, const std::string& path) {
  const uint64_t bytes = file_bytes(fd, path);
  if (bytes != labelled_bytes(label.size)) return false;
  const LabelRecord found = last_page(fd, bytes, path);
  const LabelRecord wanted = record_of(label);
  return found.magic == wanted.magic && found.label == label && found.checksum == wanted.checksum;
}

bool is_blank(int fd, const std::string& path) {
  uint64_t bytes = file_bytes(fd, path);
  if (last_page(fd, bytes, path).magic == LabelRecord().magic) bytes -= kPage;
  std::vector<std::byte> piece(std::min<uint64_t>(bytes, kFileReadBytes));
  for (uint64_t at = 0; at < bytes;) {
    const off_t data = lseek(fd, static_cast<off_t>(at), SEEK_DATA);
    if (data < 0 && errno == ENXIO) return true;  // a hole up to its end
    if (data >= 0) at = static_cast<uint64_t>(data);
    if (at >= bytes) return true;
    const size_t got =
        read_file_at(fd, piece.data(), std::min<uint64_t>(bytes - at, kFileReadBytes), at, path);
    if (!all_zero(piece, got)) return false;
    if (got == 0) return true;
    at += got;
  }
  return true;
}

}  // namespace hbm::box
