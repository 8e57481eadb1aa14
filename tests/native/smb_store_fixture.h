// The common part of the tests of a box's store.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "box/server/storage/store.h"
#include "kernels/accumulate.h"
#include "scratch.h"

namespace hbm::box {

inline std::unique_ptr<server::storage::Store> open_store(
    const std::string& directory, const server::storage::RecordSizes& records = {},
    bool sync = false) {
  memory::PoolOptions pool;
  pool.capacity = uint64_t{1} << 30;
  return server::storage::Store::open({.directory = directory, .sync = sync, .records = records},
                                      memory::Pool::create(pool));
}

inline server::storage::Creation creation(uint64_t key, uint64_t size) {
  return {.key = {1, key}, .size = size, .temporary = false, .creator = {{7, 7}, key}};
}

inline kernels::Formula sum_of(Dtype dtype, double scale = 1) {
  return {.target = dtype, .source = dtype, .scale = scale};
}

template <class T>
T* contents(const server::storage::BoxSegment& segment) {
  return reinterpret_cast<T*>(segment.block->base());
}

}  // namespace hbm::box
