// Makes a client's operations from checked arguments.
//
// Errors: Error(kInvalid) for an invalid argument, BoxError kDenied for an operation that a
// read-only attachment forbids.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "box/client/operation.h"
#include "box/client/options.h"

namespace hbm::box::client {

using AttachmentPointer = std::shared_ptr<Attachment>;

// Returns the Touch of an operation on `bytes` bytes of the segment from `offset` on. `changes`:
// true if the operation changes these bytes.
Touch touch(AttachmentPointer attachment, uint64_t offset, uint64_t bytes, bool changes);

std::shared_ptr<ClientOperation> alloc_request(const AllocOptions& options, uint32_t handle,
                                               bool read_only_client);
std::shared_ptr<ClientOperation> exists_request(protocol::Id key);
std::shared_ptr<ClientOperation> transfer_request(protocol::Opcode opcode, Touch touch,
                                                  std::byte* local,
                                                  std::shared_ptr<const void> hold);
std::shared_ptr<ClientOperation> accumulate_request(AttachmentPointer target,
                                                    AttachmentPointer source,
                                                    const Accumulation& what);
std::shared_ptr<ClientOperation> fetch_add_request(AttachmentPointer attachment, uint64_t offset,
                                                   int64_t addend);
std::shared_ptr<ClientOperation> release_request(protocol::Opcode opcode,
                                                 AttachmentPointer attachment);

}  // namespace hbm::box::client
