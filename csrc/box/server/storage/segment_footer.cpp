#include "box/server/storage/segment_footer.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "box/server/storage/checked_number.h"
#include "box/server/storage/files.h"
#include "box/server/storage/tuning.h"

namespace hbm::box::server::storage {
namespace {

constexpr uint64_t kPage = 4096;

struct FooterRecord {
  std::array<char, 8> magic{'H', 'B', 'M', 'L', 'A', 'B', 'E', 'L'};
  SegmentFooter footer;
  uint64_t checksum = 0;  // of the footer
};
static_assert(sizeof(FooterRecord) == 64 && std::is_trivially_copyable_v<FooterRecord>);

FooterRecord record_of(const SegmentFooter& footer) {
  FooterRecord record;
  record.footer = footer;
  record.checksum = checksum(0, record.footer);
  return record;
}

bool all_zero(const std::vector<std::byte>& bytes, size_t count) {
  return std::all_of(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(count),
                     [](std::byte byte) { return byte == std::byte{}; });
}

FooterRecord last_page(int fd, uint64_t bytes, const std::string& path) {
  FooterRecord record{};
  if (bytes >= kPage) read_file_at(fd, &record, sizeof record, bytes - kPage, path);
  return record;
}

}  // namespace

uint64_t bytes_with_footer(uint64_t size) noexcept {
  return (size + kPage - 1) / kPage * kPage + kPage;
}

void write_footer(int fd, const SegmentFooter& footer, const std::string& path) {
  const FooterRecord record = record_of(footer);
  write_file_at(fd, &record, sizeof record, bytes_with_footer(footer.size) - kPage, path);
}

bool has_footer(int fd, const SegmentFooter& footer, const std::string& path) {
  const uint64_t bytes = file_bytes(fd, path);
  if (bytes != bytes_with_footer(footer.size)) return false;
  const FooterRecord found = last_page(fd, bytes, path);
  const FooterRecord wanted = record_of(footer);
  return found.magic == wanted.magic && found.footer == footer && found.checksum == wanted.checksum;
}

bool is_blank(int fd, const std::string& path) {
  uint64_t bytes = file_bytes(fd, path);
  if (last_page(fd, bytes, path).magic == FooterRecord().magic) bytes -= kPage;
  std::vector<std::byte> block(std::min<uint64_t>(bytes, kFileReadBytes));
  for (uint64_t at = 0; at < bytes;) {
    const off_t data = lseek(fd, static_cast<off_t>(at), SEEK_DATA);
    if (data < 0 && errno == ENXIO) return true;  // a hole up to the end of the file
    if (data >= 0) at = static_cast<uint64_t>(data);
    if (at >= bytes) return true;
    const size_t got =
        read_file_at(fd, block.data(), std::min<uint64_t>(bytes - at, kFileReadBytes), at, path);
    if (!all_zero(block, got)) return false;
    if (got == 0) return true;
    at += got;
  }
  return true;
}

}  // namespace hbm::box::server::storage
