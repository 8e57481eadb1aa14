#include "box/client/requests.h"

#include <string>
#include <utility>

#include "kernels/accumulate.h"

namespace hbm::box::client {
namespace {

std::string range_text(uint64_t offset, uint64_t bytes) {
  return std::to_string(bytes) + " bytes at " + std::to_string(offset);
}

[[noreturn]] void invalid(const std::string& message) { throw Error(ErrorKind::kInvalid, message); }

void require_aligned(const char* what, uint64_t value, uint64_t element) {
  if (value % element == 0) return;
  invalid(std::string(what) + " " + std::to_string(value) + " is no multiple of " +
          std::to_string(element) + " bytes, the size of an element");
}

const char* verb_of(Combine combine) {
  return combine == Combine::kAssign ? "assign"
                                     : protocol::opcode_name(protocol::Opcode::kAccumulate);
}

kernels::Formula formula_of(const Accumulation& what) {
  const kernels::Formula formula{.target = what.dtype,
                                 .source = what.source_dtype.value_or(what.dtype),
                                 .combine = what.combine,
                                 .scale = what.scale};
  if (const char* cause = kernels::accumulate_unsupported(formula.target, formula.source)) {
    invalid(std::string("no ") + verb_of(what.combine) + " of " + dtype_name(formula.source) +
            " into " + dtype_name(formula.target) + ": " + cause);
  }
  return formula;
}

void require_apart(const Touch& to, const Touch& from, const kernels::Formula& formula) {
  if (to.attachment->key != from.attachment->key) return;
  if (to.begin == from.begin && formula.target == formula.source) return;
  if (to.begin >= from.end || from.begin >= to.end) return;
  invalid(std::string(verb_of(formula.combine)) + " of " +
          range_text(from.begin, from.end - from.begin) + " of segment " +
          key_text(from.attachment->key) + " into " + range_text(to.begin, to.end - to.begin) +
          " of itself: the ranges may be apart, or the same with the same type, and these overlap");
}

}  // namespace

Touch touch(std::shared_ptr<Attachment> attachment, uint64_t offset, uint64_t bytes, bool changes) {
  if (offset > attachment->size || bytes > attachment->size - offset) {
    invalid(range_text(offset, bytes) + " reach past the end of segment " +
            key_text(attachment->key) + ", which has " + std::to_string(attachment->size) +
            " bytes");
  }
  if (changes && attachment->read_only) {
    throw BoxError(BoxError::Cause::kDenied,
                   "segment " + key_text(attachment->key) + " was attached for reading alone");
  }
  return {std::move(attachment), offset, offset + bytes, changes};
}

std::shared_ptr<ClientOperation> alloc_request(const AllocOptions& options, uint32_t handle,
                                               bool read_only_client) {
  const bool attaches = options.mode == protocol::AllocMode::kAttach;
  if (options.size == 0 && !attaches) invalid("a segment has a size: 0 bytes were asked for");
  if (attaches && !options.key) invalid("to attach to a segment takes its key");
  if (read_only_client && !attaches) {
    throw BoxError(BoxError::Cause::kDenied,
                   "a read-only client attaches to segments and makes none: mode must be attach");
  }
  const bool read_only = options.read_only || read_only_client;
  auto operation = std::make_shared<ClientOperation>(protocol::Opcode::kAlloc);
  operation->set_body(
      protocol::Alloc{.sequence = {},
                      .key = options.key,
                      .size = options.size,
                      .handle = handle,
                      .mode = options.mode,
                      .flags = (read_only ? protocol::Alloc::kReadOnly : 0) |
                               (options.temporary ? protocol::Alloc::kTemporary : 0) |
                               (options.size == 0 ? protocol::Alloc::kAnySize : 0),
                      .reserved = 0});
  operation->subject = options.size == 0 ? "" : std::to_string(options.size) + " bytes";
  if (options.key) operation->subject += " under the key " + key_text(options.key);
  return operation;
}

std::shared_ptr<ClientOperation> exists_request(protocol::Id key) {
  if (!key) invalid("exists takes a key");
  auto operation = std::make_shared<ClientOperation>(protocol::Opcode::kExists);
  operation->set_body(protocol::KeyQuery{key});
  operation->subject = "the key " + key_text(key);
  return operation;
}

std::shared_ptr<ClientOperation> transfer_request(protocol::Opcode opcode, Touch touch,
                                                  std::byte* local,
                                                  std::shared_ptr<const void> hold) {
  auto operation = std::make_shared<ClientOperation>(opcode);
  operation->request.offset = touch.begin;
  operation->request.bytes = touch.end - touch.begin;
  operation->request.local = local;
  operation->touches[0] = std::move(touch);
  operation->hold = std::move(hold);
  return operation;
}

std::shared_ptr<ClientOperation> accumulate_request(AttachmentPointer target,
                                                    AttachmentPointer source,
                                                    const Accumulation& what) {
  const kernels::Formula formula = formula_of(what);
  require_aligned("offset", what.target_offset, element_size(formula.target));
  require_aligned("size", what.bytes, element_size(formula.target));
  require_aligned("source_offset", what.source_offset, element_size(formula.source));
  Touch to = touch(std::move(target), what.target_offset, what.bytes, true);
  Touch from =
      touch(std::move(source), what.source_offset, formula.source_bytes(what.bytes), false);
  require_apart(to, from, formula);
  auto operation = std::make_shared<ClientOperation>(protocol::Opcode::kAccumulate);
  operation->verb = verb_of(what.combine);
  operation->set_body(protocol::Accumulate{.sequence = {},
                                           .target_offset = what.target_offset,
                                           .source_offset = what.source_offset,
                                           .bytes = what.bytes,
                                           .scale = what.scale,
                                           .target = to.attachment->handle,
                                           .source = from.attachment->handle,
                                           .dtype = static_cast<uint8_t>(formula.target),
                                           .source_dtype = static_cast<uint8_t>(formula.source),
                                           .combine = static_cast<uint8_t>(formula.combine),
                                           .reserved = {}});
  operation->touches = {std::move(to), std::move(from)};
  return operation;
}

std::shared_ptr<ClientOperation> fetch_add_request(AttachmentPointer attachment, uint64_t offset,
                                                   int64_t addend) {
  require_aligned("offset", offset, sizeof addend);
  auto operation = std::make_shared<ClientOperation>(protocol::Opcode::kFetchAdd);
  operation->touches[0] = touch(std::move(attachment), offset, sizeof addend, true);
  operation->set_body(protocol::FetchAdd{.sequence = {},
                                         .offset = offset,
                                         .addend = addend,
                                         .handle = operation->touches[0].attachment->handle,
                                         .reserved = 0});
  return operation;
}

std::shared_ptr<ClientOperation> release_request(protocol::Opcode opcode,
                                                 AttachmentPointer attachment) {
  auto operation = std::make_shared<ClientOperation>(opcode);
  operation->set_body(
      protocol::Release{.sequence = {}, .handle = attachment->handle, .reserved = 0});
  // Deleting the key conflicts with no operation, so a kDelete touches no bytes.
  const bool frees = opcode == protocol::Opcode::kFree;
  const uint64_t bytes = frees ? attachment->size : 0;
  operation->touches[0] = {std::move(attachment), 0, bytes, frees};
  return operation;
}

}  // namespace hbm::box::client
