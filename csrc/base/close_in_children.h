// Sockets that a forked child closes. If the child kept its copies open, the other ends would not
// notice the end of this process.
//
// Threads: every function may be called from any thread.
#pragma once

namespace hbm {

// Makes every child forked from now on close `descriptor`. No effect if
// kDescriptorsClosedInChildren descriptors are to be closed already.
void close_in_children(int descriptor);

// Ends the effect of close_in_children(). REQUIRES: called before `descriptor` is closed.
void keep_in_children(int descriptor) noexcept;

}  // namespace hbm
