#include "tersor/runtime/qtensor.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "tersor/core/error.hpp"
#include "tersor/core/quantize.hpp"

namespace tersor {
namespace {

ScaleType scale_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ScaleType::float32;
    case at::kHalf:
      return ScaleType::float16;
    case at::kBFloat16:
      return ScaleType::bfloat16;
    default:
      throw fail(ErrorCode::UnsupportedDtype,
                 "a weight of type {} cannot be quantized; expected float, half or bfloat16", c10::toString(dtype));
  }
}

std::int64_t rows_of(const std::vector<std::int64_t>& shape) { return shape.empty() ? 1 : shape[0]; }

std::int64_t columns_of(const std::vector<std::int64_t>& shape) {
  std::int64_t columns = 1;
  for (std::size_t d = 1; d < shape.size(); ++d) columns *= shape[d];
  return columns;
}

std::int64_t group_of(const QuantScheme& scheme, std::int64_t columns) {
  return scheme.granularity == Granularity::per_group ? std::min(scheme.group_size, columns) : columns;
}

std::int64_t groups_of(const QuantScheme& scheme, std::int64_t columns) {
  const std::int64_t group = group_of(scheme, columns);
  return group == 0 ? 1 : (columns + group - 1) / group;
}

void check_scheme(const QuantScheme& scheme) {
  check(scheme.bits == 8 || scheme.bits == 4, ErrorCode::BadOption, "bits={} is not supported; expected 8 or 4",
        scheme.bits);
  check(scheme.granularity != Granularity::per_group || scheme.group_size > 0, ErrorCode::BadOption,
        "group_size={} with groups; expected at least 1", scheme.group_size);
}

std::string index_text(std::int64_t flat, const std::vector<std::int64_t>& shape) {
  std::string text;
  for (std::size_t d = shape.size(); d-- > 0;) {
    text = fmt::format("{}{}{}", flat % shape[d], text.empty() ? "" : ", ", text);
    flat /= shape[d];
  }
  return "[" + text + "]";
}

void check_finite(const at::Tensor& weight, const std::vector<std::int64_t>& shape) {
  const float* w = weight.const_data_ptr<float>();
  const std::int64_t count = weight.numel();
  std::int64_t nan = 0;
  std::int64_t infinite = 0;
  std::int64_t first = -1;
  for (std::int64_t i = 0; i < count; ++i) {
    if (std::isfinite(w[i])) continue;
    ++(std::isnan(w[i]) ? nan : infinite);
    if (first < 0) first = i;
  }
  check(first < 0, ErrorCode::NonFiniteWeight,
        "{} NaN and {} infinite of {} weights, the first at {}; expected finite numbers", nan, infinite, count,
        first < 0 ? "" : index_text(first, shape));
}

// Scale and zero point of every group, in float32 and int8, as one span of [rows, groups].
struct GroupParams {
  at::Tensor scale;  // keeps the memory
  at::Tensor zero_point;
  std::int64_t per_row;  // 0: one for all rows
  const float* s;
  const std::int8_t* z;

  explicit GroupParams(const QTensor& q)
      : scale(q.scale.to(at::kFloat).contiguous()),
        per_row(q.scheme.granularity == Granularity::per_tensor ? 0 : q.groups()),
        s(scale.const_data_ptr<float>()),
        z(nullptr) {
    if (q.zero_point.defined()) {
      zero_point = q.zero_point.contiguous();
      z = zero_point.const_data_ptr<std::int8_t>();
    }
  }

  QuantParams at(std::int64_t row, std::int64_t group) const {
    const std::int64_t i = per_row * row + group;
    return {s[i], z == nullptr ? 0 : z[i]};
  }
};

constexpr std::int64_t kGrain = 1 << 15;  // elements that are worth a thread

template <typename Body>
void for_rows(std::int64_t rows, std::int64_t columns, const Body& body) {
  at::parallel_for(0, rows, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, columns)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t row = begin; row < end; ++row) body(row);
                   });
}

}  // namespace

std::int64_t QTensor::rows() const { return rows_of(shape); }
std::int64_t QTensor::columns() const { return columns_of(shape); }
std::int64_t QTensor::groups() const { return groups_of(scheme, columns()); }
std::int64_t QTensor::nbytes() const {
  return static_cast<std::int64_t>(codes.nbytes() + scale.nbytes() + (zero_point.defined() ? zero_point.nbytes() : 0));
}

QTensor quantize_weight(const at::Tensor& weight, const QuantScheme& scheme) {
  check_scheme(scheme);
  const ScaleType type = scale_type(weight.scalar_type());
  check(weight.dim() >= 1, ErrorCode::BadShape, "a weight without dimensions cannot be quantized");
  QTensor q;
  q.scheme = scheme;
  q.shape = weight.sizes().vec();
  q.dtype = weight.scalar_type();
  const at::Tensor w = weight.detach().to(at::kCPU, at::kFloat).contiguous();
  check_finite(w, q.shape);

  const std::int64_t rows = q.rows();
  const std::int64_t columns = q.columns();
  const std::int64_t groups = q.groups();
  const std::int64_t group = group_of(scheme, columns);
  const bool per_tensor = scheme.granularity == Granularity::per_tensor;
  const at::Tensor scale = at::empty({per_tensor ? 1 : rows, groups}, at::kFloat);
  const at::Tensor zero_point = at::empty(scale.sizes(), at::kChar);
  const at::Tensor codes = at::empty(q.shape, at::kChar);
  const float* x = w.const_data_ptr<float>();
  float* s = scale.data_ptr<float>();
  std::int8_t* z = zero_point.data_ptr<std::int8_t>();
  std::int8_t* c = codes.data_ptr<std::int8_t>();

  const auto span = [](const float* from, std::int64_t count) {
    return std::span<const float>(from, static_cast<std::size_t>(count));
  };
  QuantParams whole;
  if (per_tensor) {
    whole = choose_params(span(x, rows * columns), scheme, type);
    *s = whole.scale;
    *z = static_cast<std::int8_t>(whole.zero_point);
  }
  for_rows(rows, columns, [&](std::int64_t row) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t from = row * columns + g * group;
      const auto part = span(x + from, std::min(group, columns - g * group));
      QuantParams params = whole;
      if (!per_tensor) {
        params = choose_params(part, scheme, type);
        s[row * groups + g] = params.scale;
        z[row * groups + g] = static_cast<std::int8_t>(params.zero_point);
      }
      quantize_values(part, params, scheme, c + from);
    }
  });
  q.codes = packed_codes(codes, scheme);
  q.scale = scale.to(q.dtype);  // exact: scales are values of the dtype already
  if (!scheme.symmetric) q.zero_point = zero_point;
  return q;
}

at::Tensor dequantize(const QTensor& q) {
  const at::Tensor codes = unpacked_codes(q);
  const at::Tensor out = at::empty(q.shape, at::kFloat);
  const std::int64_t columns = q.columns();
  const std::int64_t groups = q.groups();
  const std::int64_t group = group_of(q.scheme, columns);
  const std::int8_t* c = codes.const_data_ptr<std::int8_t>();
  float* x = out.data_ptr<float>();
  const GroupParams params(q);
  for_rows(q.rows(), columns, [&](std::int64_t row) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t from = row * columns + g * group;
      const auto count = static_cast<std::size_t>(std::min(group, columns - g * group));
      dequantize(std::span<const std::int8_t>(c + from, count), params.at(row, g), x + from);
    }
  });
  return out.to(q.dtype);
}

at::Tensor unpacked_codes(const QTensor& q) {
  if (q.scheme.bits == 8) return q.codes.contiguous();
  const at::Tensor packed = q.codes.contiguous();
  const at::Tensor codes = at::empty(q.shape, at::kChar);
  const std::int64_t columns = q.columns();
  const std::int64_t bytes = (columns + 1) / 2;
  const std::uint8_t* from = packed.const_data_ptr<std::uint8_t>();
  std::int8_t* to = codes.data_ptr<std::int8_t>();
  for_rows(q.rows(), columns, [&](std::int64_t row) {
    for (std::int64_t j = 0; j < columns; ++j) {
      const int byte = from[row * bytes + j / 2];
      to[row * columns + j] = static_cast<std::int8_t>((j % 2 == 0 ? byte & 15 : byte >> 4) - 8);
    }
  });
  return codes;
}

at::Tensor packed_codes(const at::Tensor& codes, const QuantScheme& scheme) {
  check_scheme(scheme);
  const at::Tensor plain = codes.contiguous();
  if (scheme.bits == 8) return plain;
  const std::vector<std::int64_t> shape = codes.sizes().vec();
  const std::int64_t rows = rows_of(shape);
  const std::int64_t columns = columns_of(shape);
  const std::int64_t bytes = (columns + 1) / 2;
  const at::Tensor packed = at::empty({rows, bytes}, at::kByte);
  const std::int8_t* from = plain.const_data_ptr<std::int8_t>();
  std::uint8_t* to = packed.data_ptr<std::uint8_t>();
  for_rows(rows, columns, [&](std::int64_t row) {
    const std::int8_t* code = from + row * columns;
    for (std::int64_t b = 0; b < bytes; ++b) {
      const int low = code[2 * b] + 8;
      const int high = (2 * b + 1 < columns ? code[2 * b + 1] : 0) + 8;
      to[row * bytes + b] = static_cast<std::uint8_t>((low & 15) | ((high & 15) << 4));
    }
  });
  return packed;
}

}  // namespace tersor
