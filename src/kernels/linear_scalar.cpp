#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "linear_paths.hpp"
#include "tersor/core/quantize.hpp"
#include "tersor/kernels/linear.hpp"

// The oracle of the other paths: every float operation here is done there in the same order.
namespace tersor::paths {
namespace {

constexpr std::int32_t kInfinityBits = 0x7F800000;

std::int32_t magnitude_bits(float x) { return std::bit_cast<std::int32_t>(x) & 0x7FFFFFFF; }

void finish_row(std::int64_t k, std::int64_t stride, std::int8_t* codes) {
  std::memset(codes + k, 0, static_cast<std::size_t>(stride - k));
  for (std::int64_t j = 0; j < stride; ++j) codes[stride + j] = static_cast<std::int8_t>(std::abs(codes[j]));
}

void per_token(const float* x, std::int64_t k, std::int64_t stride, std::int8_t* codes, float* scale) {
  // As integers, magnitudes order like the numbers, infinity above them and NaN above infinity.
  std::int32_t largest = 0;
  for (std::int64_t j = 0; j < k; ++j) largest = std::max(largest, magnitude_bits(x[j]));
  if (largest >= kInfinityBits) {
    *scale = std::numeric_limits<float>::quiet_NaN();
    std::memset(codes, 0, static_cast<std::size_t>(2 * stride));
    return;
  }
  const float s = std::max(std::bit_cast<float>(largest) / 127.0F, std::numeric_limits<float>::min());
  for (std::int64_t j = 0; j < k; ++j) {
    const float q = round_half_even_small(x[j] / s);
    codes[j] = static_cast<std::int8_t>(std::clamp(static_cast<std::int32_t>(q), -127, 127));
  }
  *scale = s;
  finish_row(k, stride, codes);
}

void per_tensor(const float* x, std::int64_t k, std::int64_t stride, float scale, std::int32_t zero_point,
                std::int8_t* codes, float* row_scale) {
  std::int32_t largest = 0;
  for (std::int64_t j = 0; j < k; ++j) largest = std::max(largest, magnitude_bits(x[j]));
  if (largest > kInfinityBits) {
    *row_scale = std::numeric_limits<float>::quiet_NaN();
    std::memset(codes, 0, static_cast<std::size_t>(2 * stride));
    return;
  }
  for (std::int64_t j = 0; j < k; ++j) codes[j] = quantize_value(x[j], {scale, zero_point}, -128, 127);
  *row_scale = scale;
  finish_row(k, stride, codes);
}

template <typename Sum>
void int8(const Int8Call& c) {
  for (std::int64_t b = c.begin; b < c.end; ++b) {
    const std::int8_t* w = c.w + b * c.w_block;
    const std::int64_t first = b * kBlock;
    const std::int64_t valid = std::min(kBlock, c.n - first);
    for (std::int64_t m = 0; m < c.rows; ++m) {
      const std::int8_t* x = c.x + m * 2 * c.stride;
      Sum acc[kBlock] = {};
      for (std::int64_t j = 0; j < c.k; ++j) {
        const std::int8_t* step = w + (j / 4) * 4 * kBlock + j % 4;
        for (std::int64_t i = 0; i < kBlock; ++i) acc[i] += static_cast<Sum>(x[j]) * step[4 * i];
      }
      for (std::int64_t i = 0; i < valid; ++i) {
        const std::int64_t o = first + i;
        if (c.sums != nullptr) {
          c.sums[m * c.n + o] = static_cast<std::int32_t>(acc[i]);
          continue;
        }
        const Sum centered = acc[i] - static_cast<Sum>(c.zero_point) * static_cast<Sum>(c.sum[o]);
        const float y = static_cast<float>(centered) * (c.x_scale[m] * c.scale[o]) + c.bias[o];
        c.y[m * c.n + o] = c.relu && 0.0F > y ? 0.0F : y;
      }
    }
  }
}

void int4(const Int4Call& c) {
  for (std::int64_t b = c.begin; b < c.end; ++b) {
    const std::uint8_t* w = c.w + b * c.w_block;
    const std::int64_t first = b * kBlock;
    const std::int64_t valid = std::min(kBlock, c.n - first);
    for (std::int64_t m = 0; m < c.rows; ++m) {
      const std::int8_t* x = c.x + m * 2 * c.stride;
      float total[kBlock] = {};
      for (std::int64_t g = 0; g < c.groups; ++g) {
        const std::int64_t at = (b * c.groups + g) * kBlock;
        std::int32_t acc[kBlock] = {};
        for (std::int64_t j = g * c.group_size; j < std::min(c.k, (g + 1) * c.group_size); ++j) {
          const std::uint8_t* step = w + (j / 8) * 4 * kBlock + j % 4;
          const int shift = j % 8 < 4 ? 0 : 4;
          for (std::int64_t i = 0; i < kBlock; ++i) acc[i] += x[j] * ((step[4 * i] >> shift) & 15);
        }
        for (std::int64_t i = 0; i < kBlock; ++i) {
          const std::int32_t sum = acc[i] - c.offset[at + i] * c.x_sum[m * c.groups + g] - c.zero_point * c.sum[at + i];
          total[i] += static_cast<float>(sum) * c.scale[at + i];
        }
      }
      for (std::int64_t i = 0; i < valid; ++i) {
        const float y = total[i] * c.x_scale[m] + c.bias[first + i];
        c.y[m * c.n + first + i] = c.relu && 0.0F > y ? 0.0F : y;
      }
    }
  }
}

}  // namespace

const Table scalar{per_token, per_tensor, int8<std::int32_t>, int4};

void int8_any_k(const Int8Call& call) { int8<std::int64_t>(call); }

}  // namespace tersor::paths
