// PyTorch's symmetric memory (c10d::symmetric_memory) for CPU tensors of a group whose ranks share
// memory: torch.distributed._symmetric_memory.empty(device="cpu") and rendezvous().
//
// A tensor of symmetric memory is a block of this process' segment, under the policy
// HBMCOMM_MEMORY. Behind its data the block has the signal pad, which starts as zeros and is for
// the program alone. A rendezvous is a window of the group (process_group/window.h) over the block.
// put_signal() and wait_signal() are the window's signals on a channel. barrier() sends a signal on
// the channel to every other rank, and takes one of each. PyTorch's interface has no asynchronous
// calls for the CPU, so each function returns when its operation has ended.
//
// Order: put_signal() adds to a count in the target's segment in release order, after all that the
// calling thread wrote before. wait_signal() reads the count in acquire order. So a rank that has
// taken a signal sees all that the signalling thread wrote before it, in the memory of every rank.
// A rank leaves a barrier after it has taken a signal of every rank. So all accesses before the
// barrier, on every rank, happen before all accesses after it. Signals are counted, so a put_signal
// never waits for the wait_signal before it, and none is lost.
//
// Ownership: other ranks may access a block when its tensor is gone. Each rank uses a block until
// its own tensor is freed and its program has dropped the SymmetricMemory object. It then releases
// the window, in release order. The owner reads that in acquire order, and returns the block to the
// segment once all ranks have released its windows (reclaim()). So accesses of another rank happen
// before the block's next use. If a rank ends without a release, or a rendezvous fails on some
// ranks, the block stays allocated until the process ends. Tensors of get_buffer() hold nothing:
// PyTorch makes them of a plain address, so they end with the SymmetricMemory object.
//
// Errors: as for a window. After a barrier that failed on this rank, ranks may have left signals on
// its channel. A later barrier could take these, and end too early. So this rank then refuses the
// channel with Error(kAborted).
//
// Threads: any thread may call every member. Threads that synchronise at the same time use
// different channels. PyTorch's bindings may call with Python's lock, which is released during
// waits.
#pragma once

namespace hbm::process_group {

// Makes hbm the allocator of symmetric memory for the CPU, unless another library has registered
// one; torch.distributed._symmetric_memory.set_backend("hbm") then chooses hbm. Called once.
void register_symmetric_memory();

}  // namespace hbm::process_group
