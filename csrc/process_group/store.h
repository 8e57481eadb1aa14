// A c10d store behind bootstrap/key_value.h.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bootstrap/key_value.h"

namespace hbm {

// On a connection of its own where the store has such, so that a long wait here blocks nobody else.
// Errors of the store become Error(kNetwork).
std::shared_ptr<KeyValue> make_key_value(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace hbm
