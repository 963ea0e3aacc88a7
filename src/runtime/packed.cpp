#include "tersor/runtime/packed.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include "tersor/core/error.hpp"
#include "tersor/kernels/linear.hpp"

namespace tersor {
namespace {

constexpr std::int64_t kStateVersion = 1;

template <typename T>
std::span<const T> span_of(const at::Tensor& t) {
  return {t.const_data_ptr<T>(), static_cast<std::size_t>(t.numel())};
}

bool is_scale_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

void check_tensor(std::string_view what, const at::Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes) {
  check(t.defined() && t.layout() == at::kStrided && t.device().is_cpu(), ErrorCode::BadData,
        "{} of a quantized layer is not a dense CPU tensor", what);
  check(t.scalar_type() == dtype, ErrorCode::BadData, "{} of a quantized layer has type {}, expected {}", what,
        c10::toString(t.scalar_type()), c10::toString(dtype));
  check(t.sizes() == sizes, ErrorCode::BadData, "{} of a quantized layer has shape [{}], expected [{}]", what,
        fmt::join(t.sizes(), ", "), fmt::join(sizes, ", "));
}

/// Everything that code behind it relies on, for weights from files.
void check_weight(const QTensor& q) {
  check((q.scheme.bits == 8 || q.scheme.bits == 4) &&
            (q.scheme.granularity != Granularity::per_group || q.scheme.group_size > 0),
        ErrorCode::BadData, "a quantized layer has bits {} and group size {}; expected 8 or 4 bits and a positive size",
        q.scheme.bits, q.scheme.group_size);
  check(!q.shape.empty(), ErrorCode::BadData, "a quantized layer has a weight without dimensions");
  std::int64_t columns = 1;
  bool valid = q.shape[0] >= 0;
  for (std::size_t d = 1; d < q.shape.size(); ++d)
    valid = valid && q.shape[d] >= 0 && !__builtin_mul_overflow(columns, q.shape[d], &columns);
  check(valid && columns < std::numeric_limits<std::int64_t>::max(), ErrorCode::BadData,
        "a quantized layer has the impossible weight shape [{}]", fmt::join(q.shape, ", "));
  if (q.scheme.bits == 8) {
    check_tensor("codes", q.codes, at::kChar, q.shape);
  } else {
    check_tensor("codes", q.codes, at::kByte, {q.shape[0], columns / 2 + columns % 2});
  }
  check(is_scale_dtype(q.dtype), ErrorCode::BadData,
        "scale of a quantized layer has type {}; expected float, half or bfloat16", c10::toString(q.dtype));
  const bool per_tensor = q.scheme.granularity == Granularity::per_tensor;
  const std::vector<std::int64_t> params{per_tensor ? 1 : q.rows(), q.groups()};
  check_tensor("scale", q.scale, q.dtype, params);
  const at::Tensor scale = q.scale.to(at::kFloat).contiguous();
  for (const float s : span_of<float>(scale))
    check(std::isfinite(s) && s > 0, ErrorCode::BadData,
          "a quantized layer has the scale {}; expected a positive number", s);
  check(q.zero_point.defined() != q.scheme.symmetric, ErrorCode::BadData,
        "a quantized layer must have zero points when it is affine, and only then");
  if (q.scheme.symmetric) return;
  check_tensor("zero_point", q.zero_point, at::kChar, params);
  const at::Tensor zero_point = q.zero_point.contiguous();
  for (const std::int8_t z : span_of<std::int8_t>(zero_point))
    check(z >= q.scheme.qmin() && z <= q.scheme.qmax(), ErrorCode::BadData,
          "a quantized layer has the zero point {}; expected one in [{}, {}]", z, q.scheme.qmin(), q.scheme.qmax());
}

void check_bias(const std::optional<at::Tensor>& bias, std::int64_t rows) {
  if (!bias) return;
  check(bias->defined() && bias->is_floating_point(), ErrorCode::BadData,
        "bias of a quantized layer is not a floating-point tensor");
  check_tensor("bias", *bias, bias->scalar_type(), {rows});
}

QTensor rows_of(const QTensor& q, std::int64_t begin, std::int64_t end) {
  QTensor part = q;
  part.shape[0] = end - begin;
  part.codes = q.codes.narrow(0, begin, end - begin);
  if (q.scheme.granularity == Granularity::per_tensor) return part;
  part.scale = q.scale.narrow(0, begin, end - begin);
  if (q.zero_point.defined()) part.zero_point = q.zero_point.narrow(0, begin, end - begin);
  return part;
}

void warn_about_device(const at::Tensor& x) {
  if (x.device().is_cpu()) return;
  TORCH_WARN_ONCE("tersor: quantized layers have kernels for the CPU only; on ", x.device().str(),
                  " they compute through dequantized weights");
}

/// Reads the fields of a pickled state, none of which is trusted.
class StateReader {
 public:
  StateReader(std::string_view type, const c10::IValue& state, std::size_t fields) : type_(type) {
    check(state.isTuple(), ErrorCode::BadData, "the state of a {} is {}, expected a tuple", type_, state.tagKind());
    elements_ = state.toTupleRef().elements().vec();
    check(!elements_.empty() && elements_[0].isInt(), ErrorCode::BadData, "the state of a {} has no version", type_);
    check(integer() == kStateVersion, ErrorCode::BadData,
          "the state of a {} has version {}; this library reads version {}; use a newer one", type_,
          elements_[0].toInt(), kStateVersion);
    check(elements_.size() == fields, ErrorCode::BadData, "the state of a {} has {} fields, expected {}", type_,
          elements_.size(), fields);
  }

  std::int64_t integer() { return next("an integer", &c10::IValue::isInt).toInt(); }
  double number() { return next("a number", &c10::IValue::isDouble).toDouble(); }
  at::Tensor tensor() { return next("a tensor", &c10::IValue::isTensor).toTensor(); }
  std::optional<at::Tensor> optional_tensor() {
    if (at_ < elements_.size() && elements_[at_].isNone()) {
      ++at_;
      return std::nullopt;
    }
    return tensor();
  }
  std::vector<std::int64_t> integers() {
    std::vector<std::int64_t> out;
    for (const c10::IValue& item : next("a list", &c10::IValue::isList).toListRef()) {
      check(item.isInt(), ErrorCode::BadData, "field {} of the state of a {} holds something else than integers",
            at_ - 1, type_);
      out.push_back(item.toInt());
    }
    return out;
  }

 private:
  const c10::IValue& next(std::string_view expected, bool (c10::IValue::*is)() const) {
    const c10::IValue& v = elements_.at(at_);
    check((v.*is)(), ErrorCode::BadData, "field {} of the state of a {} is {}, expected {}", at_, type_, v.tagKind(),
          expected);
    ++at_;
    return v;
  }

  std::string_view type_;
  std::vector<c10::IValue> elements_;
  std::size_t at_ = 0;
};

void append_weight(std::vector<c10::IValue>& state, const QTensor& q, const std::optional<at::Tensor>& bias) {
  state.emplace_back(q.codes);
  state.emplace_back(q.scale);
  state.push_back(q.zero_point.defined() ? c10::IValue(q.zero_point) : c10::IValue());
  state.push_back(bias ? c10::IValue(*bias) : c10::IValue());
  state.emplace_back(q.shape);
  state.emplace_back(std::vector<std::int64_t>{q.scheme.bits, q.scheme.symmetric ? 1 : 0,
                                               static_cast<std::int64_t>(q.scheme.granularity), q.scheme.group_size});
}

QTensor read_weight(StateReader& in, std::optional<at::Tensor>& bias) {
  QTensor q;
  q.codes = in.tensor();
  q.scale = in.tensor();
  q.dtype = q.scale.defined() ? q.scale.scalar_type() : at::kFloat;
  q.zero_point = in.optional_tensor().value_or(at::Tensor());
  bias = in.optional_tensor();
  q.shape = in.integers();
  const std::vector<std::int64_t> scheme = in.integers();
  check(scheme.size() == 4 && (scheme[0] == 8 || scheme[0] == 4) && (scheme[1] == 0 || scheme[1] == 1) &&
            scheme[2] >= 0 && scheme[2] <= static_cast<std::int64_t>(Granularity::per_group),
        ErrorCode::BadData, "a quantized layer has the unknown scheme [{}]", fmt::join(scheme, ", "));
  q.scheme = {static_cast<int>(scheme[0]), scheme[1] == 1, static_cast<Granularity>(scheme[2]), scheme[3]};
  return q;
}

}  // namespace

struct PackedLinear::Impl {
  LayerQuantization quantization;
  std::optional<at::Tensor> bias;
  std::int64_t n = 0;
  std::int64_t k = 0;
  Isa isa = Isa::scalar;

  // At most one is set; none for weight-only.
  std::optional<Int8Weights> int8;
  std::optional<Int4Weights> int4;
  std::optional<GroupedWeights> grouped;
  std::vector<at::Tensor> grouped_memory;

  void pack();
  void product(const QuantizedRows& x, bool relu, float* y, BlockRange blocks) const;
  void quantize_rows(const float* x, std::int64_t rows, QuantizedRows& out) const;
  // `extra_bias` is added to what the kernels give; it may be undefined.
  at::Tensor integer(const at::Tensor& x, const at::Tensor& extra_bias, bool relu) const;
  at::Tensor dense(const at::Tensor& x, const at::Tensor& extra_bias, bool relu) const;
  at::Tensor forward(const at::Tensor& x, const at::Tensor& extra_bias, bool relu) const;
};

void PackedLinear::Impl::pack() {
  const QTensor& q = quantization.weight;
  if (quantization.activation.mode == ActivationMode::none) return;
  isa = best_isa();
  const std::int64_t groups = q.groups();
  const bool per_tensor = q.scheme.granularity == Granularity::per_tensor;
  const at::Tensor codes = unpacked_codes(q);
  const at::Tensor scale = q.scale.to(at::kFloat).expand({n, groups}).contiguous();
  const at::Tensor zero_point = q.zero_point.defined() ? q.zero_point.expand({n, groups}).contiguous() : at::Tensor();
  const at::Tensor b = bias ? bias->detach().to(at::kFloat).contiguous() : at::Tensor();
  const auto zeros = zero_point.defined() ? span_of<std::int8_t>(zero_point) : std::span<const std::int8_t>();
  const auto biases = b.defined() ? span_of<float>(b) : std::span<const float>();
  const std::int64_t group_size =
      std::max<std::int64_t>(1, q.scheme.granularity == Granularity::per_group ? q.scheme.group_size : k);
  if (q.scheme.bits == 8 && q.scheme.symmetric && (per_tensor || groups == 1)) {
    int8.emplace(span_of<std::int8_t>(codes), n, k, span_of<float>(scale), biases);
  } else if (q.scheme.bits == 4 && k > 0 && Int4Weights::supports(k, group_size)) {
    int4.emplace(span_of<std::int8_t>(codes), n, k, group_size, span_of<float>(scale), zeros, biases);
  } else {
    grouped = GroupedWeights{n, k, group_size, span_of<std::int8_t>(codes), span_of<float>(scale), zeros, biases};
    grouped_memory = {codes, scale, zero_point, b};
  }
}

void PackedLinear::Impl::quantize_rows(const float* x, std::int64_t rows, QuantizedRows& out) const {
  const ActivationQuant& a = quantization.activation;
  if (a.mode == ActivationMode::per_token) {
    quantize_per_token(isa, x, rows, k, out);
  } else {
    quantize_per_tensor(isa, x, rows, k, a.scale, a.zero_point, out);
  }
  if (int4) sum_groups(out, int4->group_size);
}

void PackedLinear::Impl::product(const QuantizedRows& x, bool relu, float* y, BlockRange blocks) const {
  if (int8) return linear(isa, x, *int8, relu, y, blocks);
  if (int4) return linear(isa, x, *int4, relu, y, blocks);
  linear(x, *grouped, relu, y, {blocks.begin * kBlock, std::min(n, blocks.end * kBlock)});
}

at::Tensor PackedLinear::Impl::integer(const at::Tensor& x_in, const at::Tensor& extra_bias, bool relu) const {
  const at::Tensor x = x_in.contiguous();
  at::Tensor converted;
  const float* extra = nullptr;
  if (extra_bias.defined()) {
    const bool as_it_is = extra_bias.scalar_type() == at::kFloat && extra_bias.is_contiguous();
    if (!as_it_is) converted = extra_bias.detach().to(at::kFloat).contiguous();
    extra = (as_it_is ? extra_bias : converted).const_data_ptr<float>();
  }
  c10::DimVector sizes(x.sizes());
  sizes.back() = n;
  const at::Tensor y = at::empty(sizes, x.options().requires_grad(false));
  std::int64_t rows = 1;
  for (std::int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  const float* from = x.const_data_ptr<float>();
  float* to = y.data_ptr<float>();

  // Codes of a chunk of rows stay in the second-level cache while all weights pass by.
  constexpr std::int64_t cache_bytes = 1 << 18;
  const std::int64_t chunk = std::clamp<std::int64_t>(cache_bytes / (2 * std::max<std::int64_t>(k, 1)) / 4 * 4, 4, 64);
  constexpr std::int64_t thread_products = 1 << 20;  // what is worth waking a thread for
  const std::int64_t blocks = (n + kBlock - 1) / kBlock;
  const auto outputs = [&](const QuantizedRows& codes, float* out, BlockRange range) {
    product(codes, relu, out, range);
    if (extra == nullptr) return;
    const std::int64_t end = std::min(n, range.end * kBlock);
    for (std::int64_t m = 0; m < codes.rows; ++m)
      for (std::int64_t i = range.begin * kBlock; i < end; ++i) out[m * n + i] += extra[i];
  };
  thread_local QuantizedRows scratch;
  if (rows > chunk) {
    at::parallel_for(0, rows, std::max(chunk, thread_products / std::max<std::int64_t>(1, n * k)),
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t row = begin; row < end; row += chunk) {
                         quantize_rows(from + row * k, std::min(chunk, end - row), scratch);
                         outputs(scratch, to + row * n, {0, blocks});
                       }
                     });
  } else {
    quantize_rows(from, rows, scratch);
    const QuantizedRows& codes = scratch;  // of this thread, read by all
    at::parallel_for(0, blocks,
                     std::max<std::int64_t>(1, thread_products / std::max<std::int64_t>(1, rows * k * kBlock)),
                     [&](std::int64_t begin, std::int64_t end) {
                       outputs(codes, to, {begin, end});
                     });
  }
  return y;
}

at::Tensor PackedLinear::Impl::dense(const at::Tensor& x, const at::Tensor& extra_bias, bool relu) const {
  warn_about_device(x);
  const at::Tensor all = extra_bias.defined() ? extra_bias : bias.value_or(at::Tensor());
  // Never more than a part of the weight as floats at a time.
  constexpr std::int64_t part_elements = 1 << 22;
  const std::int64_t part = std::max<std::int64_t>(1, part_elements / std::max<std::int64_t>(1, k));
  const auto like_x = x.options().requires_grad(false);
  std::vector<at::Tensor> outputs;
  for (std::int64_t begin = 0; begin == 0 || begin < n; begin += part) {
    const std::int64_t end = std::min(n, begin + part);
    const at::Tensor weight = dequantize(rows_of(quantization.weight, begin, end)).to(like_x);
    std::optional<at::Tensor> b;
    if (all.defined()) b = all.narrow(0, begin, end - begin).to(like_x);
    outputs.push_back(at::linear(x, weight, b));
  }
  const at::Tensor y = outputs.size() == 1 ? outputs[0] : at::cat(outputs, -1);
  return relu ? y.relu() : y;
}

PackedLinear::PackedLinear(LayerQuantization quantization, std::optional<at::Tensor> bias)
    : impl_(std::make_unique<Impl>()) {
  const QTensor& q = quantization.weight;
  check(q.shape.size() == 2, ErrorCode::BadData,
        "a quantized Linear has a weight of shape [{}]; expected two dimensions", fmt::join(q.shape, ", "));
  check_weight(q);
  check_bias(bias, q.rows());
  const ActivationQuant& a = quantization.activation;
  check(
      a.mode != ActivationMode::per_tensor || (std::isfinite(a.scale) && a.scale >= std::numeric_limits<float>::min() &&
                                               a.zero_point >= -128 && a.zero_point <= 127),
      ErrorCode::BadData,
      "a quantized Linear has the activation scale {} and zero point {}; expected a positive number and a code",
      a.scale, a.zero_point);
  impl_->n = q.rows();
  impl_->k = q.columns();
  impl_->quantization = std::move(quantization);
  impl_->bias = std::move(bias);
  impl_->pack();
}

PackedLinear::~PackedLinear() = default;

at::Tensor PackedLinear::Impl::forward(const at::Tensor& x, const at::Tensor& extra_bias, bool relu) const {
  check(x.dim() >= 1 && x.size(-1) == k, ErrorCode::BadShape,
        "an input of shape [{}] meets a Linear layer with {} inputs and {} outputs; its last dimension must be {}",
        fmt::join(x.sizes(), ", "), k, n, k);
  check(x.is_floating_point(), ErrorCode::UnsupportedDtype,
        "an input of type {} meets a Linear layer; expected floating point", c10::toString(x.scalar_type()));
  if (quantization.activation.mode == ActivationMode::none || !x.device().is_cpu()) return dense(x, extra_bias, relu);
  const bool differentiable =
      c10::GradMode::is_enabled() && (x.requires_grad() || (extra_bias.defined() && extra_bias.requires_grad()));
  // Inputs of other types are quantized as floats.
  if (!differentiable) return integer(x.to(at::kFloat), extra_bias, relu).to(x.scalar_type());
  // The integer result in the memory of the dequantized layer's, which has the gradient and does not need its values.
  const at::Tensor y = dense(x, extra_bias, false);
  y.detach().copy_(integer(x.detach().to(at::kFloat), extra_bias, false));
  return relu ? y.relu() : y;
}

at::Tensor PackedLinear::forward(const at::Tensor& x, bool relu) const { return impl_->forward(x, {}, relu); }

at::Tensor PackedLinear::forward(const at::Tensor& x, const at::Tensor& bias) const {
  check(!impl_->bias, ErrorCode::BadUsage, "a Linear layer that was packed with a bias is given another one");
  if (bias.defined())
    check(bias.dim() == 1 && bias.size(0) == impl_->n && bias.is_floating_point(), ErrorCode::BadShape,
          "a bias of shape [{}] and type {} meets a Linear layer with {} outputs", fmt::join(bias.sizes(), ", "),
          c10::toString(bias.scalar_type()), impl_->n);
  return impl_->forward(x, bias, false);
}

const QTensor& PackedLinear::weight() const { return impl_->quantization.weight; }
const std::optional<at::Tensor>& PackedLinear::bias() const { return impl_->bias; }
const ActivationQuant& PackedLinear::activation() const { return impl_->quantization.activation; }

c10::IValue PackedLinear::state() const {
  std::vector<c10::IValue> fields{kStateVersion};
  append_weight(fields, weight(), bias());
  fields.emplace_back(static_cast<std::int64_t>(activation().mode));
  fields.emplace_back(static_cast<double>(activation().scale));
  fields.emplace_back(static_cast<std::int64_t>(activation().zero_point));
  return c10::ivalue::Tuple::create(std::move(fields));
}

c10::intrusive_ptr<PackedLinear> PackedLinear::from_state(const c10::IValue& state) {
  StateReader in("PackedLinear", state, 10);
  LayerQuantization quantization;
  std::optional<at::Tensor> bias;
  quantization.weight = read_weight(in, bias);
  const std::int64_t mode = in.integer();
  check(mode >= 0 && mode <= static_cast<std::int64_t>(ActivationMode::per_tensor), ErrorCode::BadData,
        "a quantized Linear has the unknown activation mode {}", mode);
  const double scale = in.number();
  const std::int64_t zero_point = in.integer();
  check(zero_point >= -128 && zero_point <= 127, ErrorCode::BadData,
        "a quantized Linear has the activation zero point {}; expected a code", zero_point);
  quantization.activation = {static_cast<ActivationMode>(mode), static_cast<float>(scale),
                             static_cast<int>(zero_point)};
  return c10::make_intrusive<PackedLinear>(std::move(quantization), std::move(bias));
}

PackedConv::PackedConv(QTensor weight, std::optional<at::Tensor> bias)
    : weight_(std::move(weight)), bias_(std::move(bias)) {
  check(weight_.shape.size() == 3 || weight_.shape.size() == 4, ErrorCode::BadData,
        "a quantized convolution has a weight of shape [{}]; expected three or four dimensions",
        fmt::join(weight_.shape, ", "));
  check_weight(weight_);
  check_bias(bias_, weight_.rows());
  dense_ = dequantize(weight_);
}

at::Tensor PackedConv::forward(const at::Tensor& x, at::IntArrayRef stride, at::IntArrayRef padding,
                               at::IntArrayRef dilation, std::int64_t groups) const {
  warn_about_device(x);
  const auto like_x = x.options().requires_grad(false);
  const at::Tensor weight = dense_.to(like_x);
  std::optional<at::Tensor> bias;
  if (bias_) bias = bias_->to(like_x);
  return weight.dim() == 3 ? at::conv1d(x, weight, bias, stride, padding, dilation, groups)
                           : at::conv2d(x, weight, bias, stride, padding, dilation, groups);
}

c10::IValue PackedConv::state() const {
  std::vector<c10::IValue> fields{kStateVersion};
  append_weight(fields, weight_, bias_);
  return c10::ivalue::Tuple::create(std::move(fields));
}

c10::intrusive_ptr<PackedConv> PackedConv::from_state(const c10::IValue& state) {
  StateReader in("PackedConv", state, 7);
  std::optional<at::Tensor> bias;
  QTensor weight = read_weight(in, bias);
  return c10::make_intrusive<PackedConv>(std::move(weight), std::move(bias));
}

PackedEmbedding::PackedEmbedding(QTensor weight) : weight_(std::move(weight)) {
  check(weight_.shape.size() == 2, ErrorCode::BadData,
        "a quantized Embedding has a weight of shape [{}]; expected two dimensions", fmt::join(weight_.shape, ", "));
  check_weight(weight_);
}

at::Tensor PackedEmbedding::forward(const at::Tensor& ids) const {
  check(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, ErrorCode::UnsupportedDtype,
        "ids of type {} meet an Embedding; expected int64 or int32", c10::toString(ids.scalar_type()));
  warn_about_device(ids);
  const at::Tensor flat = ids.to(at::kCPU, at::kLong).reshape(-1).contiguous();
  const std::int64_t vocabulary = weight_.rows();
  for (const std::int64_t id : span_of<std::int64_t>(flat))
    check(id >= 0 && id < vocabulary, ErrorCode::BadData,
          "id {} meets an Embedding with {} rows; expected one in [0, {})", id, vocabulary, vocabulary);
  QTensor rows = weight_;
  rows.shape[0] = flat.numel();
  rows.codes = weight_.codes.index_select(0, flat);
  if (weight_.scheme.granularity != Granularity::per_tensor) {
    rows.scale = weight_.scale.index_select(0, flat);
    if (weight_.zero_point.defined()) rows.zero_point = weight_.zero_point.index_select(0, flat);
  }
  c10::DimVector sizes(ids.sizes());
  sizes.push_back(weight_.columns());
  return dequantize(rows).reshape(sizes).to(ids.device());
}

c10::IValue PackedEmbedding::state() const {
  std::vector<c10::IValue> fields{kStateVersion};
  append_weight(fields, weight_, std::nullopt);
  return c10::ivalue::Tuple::create(std::move(fields));
}

c10::intrusive_ptr<PackedEmbedding> PackedEmbedding::from_state(const c10::IValue& state) {
  StateReader in("PackedEmbedding", state, 7);
  std::optional<at::Tensor> bias;
  QTensor weight = read_weight(in, bias);
  check(!bias, ErrorCode::BadData, "the state of a PackedEmbedding has a bias");
  return c10::make_intrusive<PackedEmbedding>(std::move(weight));
}

}  // namespace tersor
