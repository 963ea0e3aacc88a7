#pragma once

#include <cstdint>

// What one source per instruction set implements. Plain pointers only: inline functions of other headers would be
// compiled for that instruction set and could be the copy that the linker keeps for everybody.
namespace tersor::paths {

struct Int8Call {
  const std::int8_t* x;  // QuantizedRows::codes
  std::int64_t rows, k, stride;
  const float* x_scale;
  std::int32_t zero_point;
  const std::int8_t* w;  // Int8Weights::codes
  std::int64_t w_block;  // bytes of one block
  const float* scale;
  const float* bias;
  const std::int32_t* sum;
  bool widen, relu;
  std::int64_t n, begin, end;  // outputs; blocks
  float* y;                    // exactly one of the two
  std::int32_t* sums;
};

struct Int4Call {
  const std::int8_t* x;
  std::int64_t rows, k, stride;
  const float* x_scale;
  std::int32_t zero_point;
  const std::int32_t* x_sum;  // [rows, groups]
  const std::uint8_t* w;
  std::int64_t w_block;
  std::int64_t group_size, groups;
  const float* scale;
  const std::int8_t* offset;
  const std::int32_t* sum;
  const float* bias;
  bool relu;
  std::int64_t n, begin, end;
  float* y;
};

struct Table {
  // One row: writes 2 * stride bytes and the scale.
  void (*per_token)(const float* x, std::int64_t k, std::int64_t stride, std::int8_t* codes, float* scale);
  void (*per_tensor)(const float* x, std::int64_t k, std::int64_t stride, float scale, std::int32_t zero_point,
                     std::int8_t* codes, float* row_scale);
  void (*int8)(const Int8Call&);
  void (*int4)(const Int4Call&);
};

extern const Table scalar;
extern const Table avx2;

// Sums in 64 bits, for k so large that 32 would not do.
void int8_any_k(const Int8Call&);

}  // namespace tersor::paths
