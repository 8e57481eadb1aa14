#include "base/dtype.h"

#include <array>

namespace hbm {
namespace {

struct DtypeRow {
  size_t size;
  const char* name;
};

constexpr std::array<DtypeRow, kDtypeCount + 2> kDtypes = {{
    {1, "bool"},
    {1, "uint8"},
    {1, "int8"},
    {2, "uint16"},
    {2, "int16"},
    {4, "uint32"},
    {4, "int32"},
    {8, "uint64"},
    {8, "int64"},
    {2, "float16"},
    {2, "bfloat16"},
    {4, "float32"},
    {8, "float64"},
    {4, "complex32"},
    {8, "complex64"},
    {16, "complex128"},
    {1, "float8_e5m2"},
    {1, "float8_e4m3fn"},
    {1, "float8_e5m2fnuz"},
    {1, "float8_e4m3fnuz"},
    {1, "float8_e8m0fnu"},
    {1, "float4_e2m1fn_x2"},
    {1, "quantized 8-bit"},
    {4, "quantized 32-bit"},
    {16, "uint128"},
    {16, "int128"},
}};

constexpr std::array<const char*, kReduceOpCount> kOps = {
    "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};

}  // namespace

size_t element_size(Dtype dtype) noexcept { return kDtypes[static_cast<size_t>(dtype)].size; }

const char* dtype_name(Dtype dtype) noexcept { return kDtypes[static_cast<size_t>(dtype)].name; }

const char* reduce_op_name(ReduceOp op) noexcept { return kOps[static_cast<size_t>(op)]; }

}  // namespace hbm
