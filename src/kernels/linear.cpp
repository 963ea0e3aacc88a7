#include "tersor/kernels/linear.hpp"

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <limits>

#include "linear_paths.hpp"
#include "tersor/core/error.hpp"

namespace tersor {
namespace {

const paths::Table& table([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx2) return paths::avx2;
#endif
  return paths::scalar;
}

constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

void prepare(std::int64_t rows, std::int64_t k, int zero_point, QuantizedRows& out) {
  out.rows = rows;
  out.k = k;
  out.stride = round_up(k, 8);
  out.zero_point = zero_point;
  const auto bytes = static_cast<std::size_t>(rows * 2 * out.stride);
  if (out.codes.size() < bytes) out.codes.resize(bytes);
  if (out.scale.size() < static_cast<std::size_t>(rows)) out.scale.resize(static_cast<std::size_t>(rows));
}

// Whether every sum of k products (x - zero_point) * w, and its parts, fits into int32.
bool fits_int32(std::int64_t k, int zero_point) {
  return k <= std::numeric_limits<std::int32_t>::max() / (128 * (128 + std::abs(zero_point)));
}

paths::Int8Call call_of(const QuantizedRows& x, const Int8Weights& w) {
  assert(x.k == w.k);
  paths::Int8Call c{};
  c.x = x.codes.data();
  c.rows = x.rows;
  c.k = x.k;
  c.stride = x.stride;
  c.x_scale = x.scale.data();
  c.zero_point = x.zero_point;
  c.w = w.codes.data();
  c.w_block = round_up(w.k, 4) * kBlock;
  c.scale = w.scale.data();
  c.bias = w.bias.data();
  c.sum = w.sum.data();
  c.widen = w.has_minus_128;
  c.n = w.n;
  return c;
}

}  // namespace

void quantize_per_token(Isa isa, const float* x, std::int64_t rows, std::int64_t k, QuantizedRows& out) {
  prepare(rows, k, 0, out);
  const auto row = table(isa).per_token;
  for (std::int64_t m = 0; m < rows; ++m)
    row(x + m * k, k, out.stride, out.codes.data() + m * 2 * out.stride, &out.scale[static_cast<std::size_t>(m)]);
}

void quantize_per_tensor(Isa isa, const float* x, std::int64_t rows, std::int64_t k, float scale, int zero_point,
                         QuantizedRows& out) {
  assert(zero_point >= -128 && zero_point <= 127);
  prepare(rows, k, zero_point, out);
  const auto row = table(isa).per_tensor;
  for (std::int64_t m = 0; m < rows; ++m)
    row(x + m * k, k, out.stride, scale, zero_point, out.codes.data() + m * 2 * out.stride,
        &out.scale[static_cast<std::size_t>(m)]);
}

void sum_groups(QuantizedRows& x, std::int64_t group_size) {
  const std::int64_t groups = (x.k + group_size - 1) / group_size;
  const auto count = static_cast<std::size_t>(x.rows * groups);
  if (x.group_sum.size() < count) x.group_sum.resize(count);
  for (std::int64_t m = 0; m < x.rows; ++m) {
    const std::int8_t* row = x.row(m);
    for (std::int64_t g = 0; g < groups; ++g) {
      std::int32_t sum = 0;
      for (std::int64_t j = g * group_size; j < std::min(x.k, (g + 1) * group_size); ++j) sum += row[j];
      x.group_sum[static_cast<std::size_t>(m * groups + g)] = sum;
    }
  }
}

Int8Weights::Int8Weights(std::span<const std::int8_t> codes_in, std::int64_t n_in, std::int64_t k_in,
                         std::span<const float> scale_in, std::span<const float> bias_in)
    : n(n_in), k(k_in) {
  assert(static_cast<std::int64_t>(codes_in.size()) == n * k && static_cast<std::int64_t>(scale_in.size()) == n);
  assert(bias_in.empty() || static_cast<std::int64_t>(bias_in.size()) == n);
  const auto padded = static_cast<std::size_t>(blocks() * kBlock);
  codes.resize(packed_size(n, k));
  scale.resize(padded);
  bias.resize(padded);
  sum.resize(padded);
  std::copy(scale_in.begin(), scale_in.end(), scale.begin());
  std::copy(bias_in.begin(), bias_in.end(), bias.begin());
  for (std::int64_t i = 0; i < n; ++i) {
    std::int32_t total = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int8_t code = codes_in[static_cast<std::size_t>(i * k + j)];
      codes[packed_index(k, i, j)] = code;
      total += code;
      has_minus_128 = has_minus_128 || code == -128;
    }
    sum[static_cast<std::size_t>(i)] = total;
  }
}

std::size_t Int8Weights::packed_size(std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(round_up(n, kBlock) * round_up(k, 4));
}

std::size_t Int8Weights::packed_index(std::int64_t k, std::int64_t i, std::int64_t j) {
  return static_cast<std::size_t>(i / kBlock * round_up(k, 4) * kBlock + j / 4 * 4 * kBlock + i % kBlock * 4 + j % 4);
}

Int4Weights::Int4Weights(std::span<const std::int8_t> codes_in, std::int64_t n_in, std::int64_t k_in,
                         std::int64_t group_size_in, std::span<const float> scale_in,
                         std::span<const std::int8_t> zero_point, std::span<const float> bias_in)
    : n(n_in), k(k_in), group_size(group_size_in), groups((k_in + group_size_in - 1) / group_size_in) {
  assert(supports(k, group_size));
  assert(static_cast<std::int64_t>(codes_in.size()) == n * k &&
         static_cast<std::int64_t>(scale_in.size()) == n * groups);
  assert(zero_point.empty() || zero_point.size() == scale_in.size());
  codes.assign(packed_size(n, k), 0x88);
  const auto params = static_cast<std::size_t>(blocks() * groups * kBlock);
  scale.resize(params);
  offset.resize(params);
  sum.resize(params);
  bias.resize(static_cast<std::size_t>(blocks() * kBlock));
  std::copy(bias_in.begin(), bias_in.end(), bias.begin());
  const std::int64_t block_bytes = round_up(k, 8) / 2 * kBlock;
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const auto from = static_cast<std::size_t>(i * groups + g);
      const auto to = static_cast<std::size_t>((i / kBlock * groups + g) * kBlock + i % kBlock);
      const int zero = zero_point.empty() ? 0 : zero_point[from];
      std::int32_t total = 0;
      for (std::int64_t j = g * group_size; j < std::min(k, (g + 1) * group_size); ++j) {
        const std::int8_t code = codes_in[static_cast<std::size_t>(i * k + j)];
        const auto nibble = static_cast<unsigned>(code + 8);
        const int shift = j % 8 < 4 ? 0 : 4;
        std::uint8_t& byte =
            codes[static_cast<std::size_t>(i / kBlock * block_bytes + j / 8 * 4 * kBlock + i % kBlock * 4 + j % 4)];
        byte = static_cast<std::uint8_t>((byte & (0xF0U >> shift)) | (nibble << shift));
        total += code - zero;
      }
      scale[to] = scale_in[from];
      offset[to] = static_cast<std::int8_t>(8 + zero);
      sum[to] = total;
    }
  }
}

std::size_t Int4Weights::packed_size(std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(round_up(n, kBlock) * round_up(k, 8) / 2);
}

void linear(Isa isa, const QuantizedRows& x, const Int8Weights& w, bool relu, float* y, BlockRange range) {
  paths::Int8Call c = call_of(x, w);
  c.relu = relu;
  c.begin = range.begin;
  c.end = range.end;
  c.y = y;
  fits_int32(x.k, x.zero_point) ? table(isa).int8(c) : paths::int8_any_k(c);
}

void linear_sums(Isa isa, const QuantizedRows& x, const Int8Weights& w, std::int32_t* y) {
  check(fits_int32(x.k, 0), ErrorCode::BadUsage,
        "int32 sums over {} inputs could overflow; at most 131071 are possible", x.k);
  paths::Int8Call c = call_of(x, w);
  c.begin = 0;
  c.end = w.blocks();
  c.sums = y;
  table(isa).int8(c);
}

void linear(Isa isa, const QuantizedRows& x, const Int4Weights& w, bool relu, float* y, BlockRange range) {
  assert(x.k == w.k);
  paths::Int4Call c{};
  c.x = x.codes.data();
  c.rows = x.rows;
  c.k = x.k;
  c.stride = x.stride;
  c.x_scale = x.scale.data();
  c.zero_point = x.zero_point;
  c.x_sum = x.group_sum.data();
  c.w = w.codes.data();
  c.w_block = round_up(w.k, 8) / 2 * kBlock;
  c.group_size = w.group_size;
  c.groups = w.groups;
  c.scale = w.scale.data();
  c.offset = w.offset.data();
  c.sum = w.sum.data();
  c.bias = w.bias.data();
  c.relu = relu;
  c.n = w.n;
  c.begin = range.begin;
  c.end = range.end;
  c.y = y;
  table(isa).int4(c);
}

void linear(const QuantizedRows& x, const GroupedWeights& w, bool relu, float* y, BlockRange outputs) {
  const std::int64_t groups = (w.k + w.group_size - 1) / w.group_size;
  for (std::int64_t m = 0; m < x.rows; ++m) {
    const std::int8_t* row = x.row(m);
    for (std::int64_t i = outputs.begin; i < outputs.end; ++i) {
      float total = 0.0F;
      for (std::int64_t g = 0; g < groups; ++g) {
        const auto param = static_cast<std::size_t>(i * groups + g);
        const int zero = w.zero_point.empty() ? 0 : w.zero_point[param];
        const std::int8_t* codes = w.codes.data() + i * w.k;
        std::int64_t sum = 0;
        for (std::int64_t j = g * w.group_size; j < std::min(w.k, (g + 1) * w.group_size); ++j)
          sum += (row[j] - x.zero_point) * (codes[j] - zero);
        total += static_cast<float>(sum) * w.scale[param];
      }
      const float value =
          total * x.scale[static_cast<std::size_t>(m)] + (w.bias.empty() ? 0.0F : w.bias[static_cast<std::size_t>(i)]);
      y[m * w.n + i] = relu && 0.0F > value ? 0.0F : value;
    }
  }
}

}  // namespace tersor
