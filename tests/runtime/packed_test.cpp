#include "tersor/runtime/packed.hpp"

#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "catch.hpp"
#include "tersor/core/error.hpp"

using namespace tersor;

namespace {

using Packed = c10::intrusive_ptr<PackedLinear>;

const ActivationQuant kNone{};
const ActivationQuant kPerToken{ActivationMode::per_token, 1.0F, 0};
const ActivationQuant kPerTensor{ActivationMode::per_tensor, 0.03F, -9};

QuantScheme scheme(int bits, bool symmetric, Granularity granularity, std::int64_t group_size = 0) {
  return {bits, symmetric, granularity, group_size};
}

Packed packed(const at::Tensor& w, const std::optional<at::Tensor>& bias, const ActivationQuant& activation,
              const QuantScheme& s = {}) {
  return c10::make_intrusive<PackedLinear>(LayerQuantization{quantize_weight(w, s), activation}, bias);
}

// The input as the layer sees it: quantized and back, in double.
at::Tensor seen(const at::Tensor& x, const ActivationQuant& a) {
  if (a.mode == ActivationMode::none) return x.to(at::kDouble);
  if (a.mode == ActivationMode::per_tensor)
    return ((x / a.scale).round() + a.zero_point).clamp(-128, 127).sub(a.zero_point).to(at::kDouble) * double(a.scale);
  const at::Tensor scale = (x.abs().amax(-1, true) / 127).clamp_min(std::numeric_limits<float>::min());
  return (x / scale).round().clamp(-127, 127).to(at::kDouble) * scale.to(at::kDouble);
}

// Rounding of float32 sums of k products, for the float path; a few roundings for the integer ones.
void require_close(const at::Tensor& y, const at::Tensor& x, const at::Tensor& w, const at::Tensor& want,
                   double roundings) {
  const at::Tensor size = at::linear(x.to(at::kDouble).abs(), w.to(at::kDouble).abs()) + want.abs();
  REQUIRE(y.sizes() == want.sizes());
  REQUIRE(((y.to(at::kDouble) - want).abs() <= size * (roundings * 0x1p-23)).all().item<bool>());
}

ErrorCode code_of(const std::function<void()>& run, std::string* message = nullptr) {
  try {
    run();
  } catch (const Error& e) {
    if (message != nullptr) *message = e.message();
    return e.code();
  }
  return ErrorCode::Internal;
}

c10::IValue with_field(const c10::IValue& state, std::size_t field, c10::IValue value) {
  std::vector<c10::IValue> fields = state.toTupleRef().elements().vec();
  fields.at(field) = std::move(value);
  return c10::ivalue::Tuple::create(std::move(fields));
}

}  // namespace

TEST_CASE("packed Linear computes what its codes say", "[packed]") {
  for (const auto& s : {scheme(8, true, Granularity::per_channel), scheme(8, true, Granularity::per_tensor),
                        scheme(8, false, Granularity::per_channel), scheme(8, true, Granularity::per_group, 16),
                        scheme(4, true, Granularity::per_channel), scheme(4, true, Granularity::per_group, 32),
                        scheme(4, false, Granularity::per_group, 8), scheme(4, false, Granularity::per_group, 5),
                        scheme(4, false, Granularity::per_tensor)})
    for (const ActivationQuant& a : {kNone, kPerToken, kPerTensor})
      for (const bool with_bias : {true, false})
        for (const std::int64_t k : {1, 37, 64}) {
          const std::int64_t n = 21;
          const at::Tensor w = at::randn({n, k});
          const std::optional<at::Tensor> bias = with_bias ? std::optional(at::randn({n})) : std::nullopt;
          const Packed layer = packed(w, bias, a, s);
          const at::Tensor dense = dequantize(layer->weight());
          for (const std::int64_t m : {0, 1, 5, 70}) {
            const at::Tensor x = at::randn({m, k});
            std::optional<at::Tensor> b;
            if (bias) b = bias->to(at::kDouble);
            const at::Tensor want = at::linear(seen(x, a), dense.to(at::kDouble), b);
            const double roundings = a.mode == ActivationMode::none
                                         ? 2.0 * static_cast<double>(k) + 4
                                         : 2.0 * static_cast<double>(layer->weight().groups()) + 8;
            const at::Tensor y = layer->forward(x, false);
            require_close(y, seen(x, a), dense, want, roundings);
            REQUIRE(at::equal(layer->forward(x, true), y.relu()));
          }
        }
}

TEST_CASE("inputs of other shapes, strides and types", "[packed]") {
  const at::Tensor w = at::randn({6, 10});
  const at::Tensor bias = at::randn({6});
  for (const ActivationQuant& a : {kNone, kPerToken, kPerTensor}) {
    const Packed layer = packed(w, bias, a);
    const at::Tensor x = at::randn({4, 3, 10});
    const at::Tensor y = layer->forward(x, false);
    REQUIRE(y.sizes() == at::IntArrayRef({4, 3, 6}));
    const auto same = [&](const at::Tensor& got, const at::Tensor& want) {
      // The integer path has no other order of sums; a float product may.
      return a.mode == ActivationMode::none ? got.allclose(want, 1e-5, 1e-5) : at::equal(got, want);
    };
    REQUIRE(same(layer->forward(x[1][2], false), y[1][2]));
    REQUIRE(same(layer->forward(x.transpose(0, 1), false), y.transpose(0, 1)));
    REQUIRE(same(layer->forward(x.transpose(1, 2).contiguous().transpose(1, 2), false), y));
    REQUIRE(layer->forward(at::zeros({0, 10}), false).sizes() == at::IntArrayRef({0, 6}));
    REQUIRE(layer->forward(at::zeros({2, 0, 10}), false).sizes() == at::IntArrayRef({2, 0, 6}));
    for (const auto dtype : {at::kHalf, at::kBFloat16, at::kDouble}) {
      const at::Tensor other = layer->forward(x.to(dtype), false);
      REQUIRE(other.scalar_type() == dtype);
      // Inputs are quantized as floats, whatever their type.
      const at::Tensor want = a.mode == ActivationMode::none
                                  ? at::linear(x.to(dtype), dequantize(layer->weight()).to(dtype), bias.to(dtype))
                                  : layer->forward(x.to(dtype).to(at::kFloat), false).to(dtype);
      REQUIRE(at::equal(other, want));
    }
    std::string message;
    REQUIRE(code_of([&] { layer->forward(at::zeros({2, 9}), false); }, &message) == ErrorCode::BadShape);
    REQUIRE(message.find("[2, 9]") != std::string::npos);
    REQUIRE(message.find("10 inputs") != std::string::npos);
    REQUIRE(code_of([&] { layer->forward(at::zeros({}), false); }) == ErrorCode::BadShape);
    REQUIRE(code_of([&] { layer->forward(at::zeros({2, 10}, at::kLong), false); }) == ErrorCode::UnsupportedDtype);
  }
  // A layer whose own weights are half takes float inputs too.
  const Packed half = packed(w.to(at::kHalf), bias.to(at::kHalf), kPerToken);
  REQUIRE(half->forward(at::randn({2, 10}), false).scalar_type() == at::kFloat);
}

TEST_CASE("layers without inputs or outputs", "[packed]") {
  for (const ActivationQuant& a : {kNone, kPerToken, kPerTensor})
    for (const int bits : {8, 4}) {
      const at::Tensor bias = at::randn({5});
      const Packed no_inputs = packed(at::zeros({5, 0}), bias, a, scheme(bits, true, Granularity::per_channel));
      REQUIRE(at::equal(no_inputs->forward(at::zeros({3, 0}), false), bias.expand({3, 5})));
      const Packed no_outputs =
          packed(at::zeros({0, 4}), std::nullopt, a, scheme(bits, true, Granularity::per_channel));
      REQUIRE(no_outputs->forward(at::zeros({3, 4}), false).sizes() == at::IntArrayRef({3, 0}));
    }
}

TEST_CASE("zeros, NaN and infinities in the input", "[packed]") {
  const at::Tensor bias = at::randn({7});
  const Packed layer = packed(at::randn({7, 40}), bias, kPerToken);
  at::Tensor x = at::randn({4, 40});
  x[0].zero_();
  x[1][39] = std::numeric_limits<float>::quiet_NaN();
  x[2][0] = std::numeric_limits<float>::infinity();
  const at::Tensor y = layer->forward(x, false);
  REQUIRE(at::equal(y[0], bias));
  REQUIRE(y[1].isnan().all().item<bool>());
  REQUIRE(y[2].isnan().all().item<bool>());
  REQUIRE(y[3].isfinite().all().item<bool>());
}

TEST_CASE("the same bits for any number of threads and any instruction set", "[packed]") {
  const int threads = at::get_num_threads();
  for (const auto& s : {scheme(8, true, Granularity::per_channel), scheme(4, false, Granularity::per_group, 32),
                        scheme(8, false, Granularity::per_group, 24)})
    for (const ActivationQuant& a : {kPerToken, kPerTensor}) {
      const at::Tensor w = at::randn({1000, 1100});
      const at::Tensor bias = at::randn({1000});
      for (const std::int64_t m : {1, 3, 200}) {
        const at::Tensor x = at::randn({m, 1100});
        at::set_num_threads(1);
        const at::Tensor y = packed(w, bias, a, s)->forward(x, true);
        at::set_num_threads(3);
        REQUIRE(at::equal(packed(w, bias, a, s)->forward(x, true), y));
        setenv("TERSOR_FORCE_ISA", "scalar", 1);
        const Packed scalar = packed(w, bias, a, s);
        unsetenv("TERSOR_FORCE_ISA");
        REQUIRE(at::equal(scalar->forward(x, true), y));
      }
    }
  at::set_num_threads(threads);
}

TEST_CASE("weights of -128 and weight-only layers larger than one part", "[packed]") {
  QTensor q = quantize_weight(at::randn({9, 33}), {});
  q.codes.fill_(-128);
  const auto layer = c10::make_intrusive<PackedLinear>(LayerQuantization{q, kPerToken}, std::nullopt);
  const at::Tensor x = at::full({2, 33}, -1.0F);
  require_close(layer->forward(x, false), x, dequantize(q),
                at::linear(x.to(at::kDouble), dequantize(q).to(at::kDouble)), 8);

  const at::Tensor w = at::randn({2050, 2049});  // more than 2^22 elements
  const at::Tensor bias = at::randn({2050});
  for (const auto& s : {scheme(8, true, Granularity::per_tensor), scheme(4, false, Granularity::per_group, 100)}) {
    const Packed big = packed(w, bias, kNone, s);
    const at::Tensor in = at::randn({2, 2049});
    const at::Tensor dense = dequantize(big->weight());
    require_close(big->forward(in, false), in, dense,
                  at::linear(in.to(at::kDouble), dense.to(at::kDouble), bias.to(at::kDouble)), 4100);
  }
}

TEST_CASE("gradients reach the input", "[packed]") {
  const Packed layer = packed(at::randn({5, 8}), at::randn({5}), kPerToken);
  const at::Tensor x = at::randn({3, 8}).requires_grad_(true);
  const at::Tensor y = layer->forward(x, false);
  y.sum().backward();
  REQUIRE(x.grad().allclose(dequantize(layer->weight()).sum(0).expand({3, 8}), 1e-5, 1e-5));
  const c10::NoGradGuard guard;
  const at::Tensor plain = layer->forward(x, false);
  REQUIRE_FALSE(plain.requires_grad());
  REQUIRE(y.allclose(plain, 1e-6, 1e-6));
}

TEST_CASE("gradients leave the integer result as it is", "[packed]") {
  for (const ActivationQuant& a : {kPerToken, kPerTensor}) {
    const Packed layer = packed(at::randn({5, 8}), at::randn({5}), a);
    for (const at::Tensor& x : {at::randn({3, 8}), at::randn({2, 3, 8}), at::randn({8})}) {
      const at::Tensor plain = layer->forward(x, false);
      REQUIRE(at::equal(layer->forward(x.clone().requires_grad_(true), false), plain));
      REQUIRE(at::equal(layer->forward(x.clone().requires_grad_(true), true), plain.relu()));
    }
  }
}

TEST_CASE("a bias from elsewhere counts as a packed one", "[packed]") {
  for (const auto& s : {scheme(8, true, Granularity::per_channel), scheme(4, false, Granularity::per_group, 8),
                        scheme(8, false, Granularity::per_group, 7)})
    for (const ActivationQuant& a : {kNone, kPerToken, kPerTensor}) {
      const at::Tensor w = at::randn({37, 24});
      const at::Tensor bias = at::randn({37});
      const Packed with = packed(w, bias, a, s);
      const Packed without = packed(w, std::nullopt, a, s);
      for (const at::Tensor& x : {at::randn({1, 24}), at::randn({3, 24}), at::randn({2, 70, 24}), at::randn({24})}) {
        REQUIRE(at::equal(without->forward(x, bias), with->forward(x, false)));
        REQUIRE(at::equal(without->forward(x, at::Tensor()), without->forward(x, false)));
        // Strided, and of another type that holds the same values.
        const at::Tensor strided = bias.unsqueeze(1).repeat({1, 2}).select(1, 0);
        REQUIRE(at::equal(without->forward(x, strided), with->forward(x, false)));
        const at::Tensor half = bias.to(at::kHalf);
        REQUIRE(at::equal(without->forward(x, half), packed(w, half, a, s)->forward(x, false)));
      }

      // The gradients are those of the dequantized layer.
      const at::Tensor x = at::randn({4, 24});
      const at::Tensor weights = at::randn({4, 37});
      const auto gradients = [&](const auto& run) {
        const at::Tensor input = x.clone().requires_grad_(true);
        const at::Tensor b = bias.clone().requires_grad_(true);
        run(input, b).mul(weights).sum().backward();
        return std::pair(input.grad(), b.grad());
      };
      const at::Tensor dense = dequantize(with->weight());
      const auto got = gradients([&](const at::Tensor& i, const at::Tensor& b) { return without->forward(i, b); });
      const auto want = gradients([&](const at::Tensor& i, const at::Tensor& b) { return at::linear(i, dense, b); });
      REQUIRE(at::equal(got.first, want.first));
      REQUIRE(at::equal(got.second, want.second));

      // The bias alone may be trained.
      const at::Tensor b = bias.clone().requires_grad_(true);
      const at::Tensor y = without->forward(x, b);
      REQUIRE(at::equal(y, with->forward(x, false)));
      y.sum().backward();
      REQUIRE(at::equal(b.grad(), at::full({37}, 4.0F)));

      REQUIRE(code_of([&] { without->forward(x, at::zeros({36})); }) == ErrorCode::BadShape);
      REQUIRE(code_of([&] { without->forward(x, at::zeros({37}, at::kLong)); }) == ErrorCode::BadShape);
      REQUIRE(code_of([&] { with->forward(x, bias); }) == ErrorCode::BadUsage);
    }
}

TEST_CASE("packed embeddings dequantize the rows asked for", "[packed]") {
  for (const auto& s : {scheme(8, true, Granularity::per_channel), scheme(8, false, Granularity::per_group, 4),
                        scheme(4, true, Granularity::per_channel), scheme(4, false, Granularity::per_group, 4),
                        scheme(4, false, Granularity::per_tensor)})
    for (const auto dtype : {at::kFloat, at::kHalf}) {
      const PackedEmbedding table(quantize_weight(at::randn({11, 7}).to(dtype), s));
      const at::Tensor dense = dequantize(table.weight());
      const at::Tensor ids = at::randint(0, 11, {3, 5}, at::kLong);
      const at::Tensor want = dense.index_select(0, ids.flatten()).reshape({3, 5, 7});
      REQUIRE(at::equal(table.forward(ids), want));
      REQUIRE(table.forward(ids).scalar_type() == dtype);
      REQUIRE(at::equal(table.forward(ids.to(at::kInt)), want));
      REQUIRE(at::equal(table.forward(ids.t()), want.transpose(0, 1)));
      REQUIRE(at::equal(table.forward(ids.select(1, 2)), want.select(1, 2)));
      REQUIRE(at::equal(table.forward(ids[1][2]), want[1][2]));
      REQUIRE(table.forward(at::zeros({0, 2}, at::kLong)).sizes() == at::IntArrayRef({0, 2, 7}));
      const auto again = PackedEmbedding::from_state(table.state());
      REQUIRE(at::equal(again->forward(ids), want));
      for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{11}, std::numeric_limits<std::int64_t>::max()}) {
        std::string message;
        REQUIRE(code_of([&] { table.forward(at::full({2}, bad, at::kLong)); }, &message) == ErrorCode::BadData);
        REQUIRE(message.find(std::to_string(bad)) != std::string::npos);
        REQUIRE(message.find("[0, 11)") != std::string::npos);
      }
      REQUIRE(code_of([&] { table.forward(at::zeros({2})); }) == ErrorCode::UnsupportedDtype);
    }
  REQUIRE(code_of([] { PackedEmbedding(quantize_weight(at::zeros({2, 2, 2}), {})); }) == ErrorCode::BadData);
  const c10::IValue state = PackedEmbedding(quantize_weight(at::randn({5, 2}), {})).state();
  REQUIRE(code_of([&] { PackedEmbedding::from_state(with_field(state, 4, at::zeros({5}))); }) == ErrorCode::BadData);
}

TEST_CASE("packed convolutions compute with dequantized weights", "[packed]") {
  for (const int bits : {8, 4}) {
    const at::Tensor w = at::randn({6, 2, 3, 3});
    const at::Tensor bias = at::randn({6});
    const PackedConv conv(quantize_weight(w, scheme(bits, false, Granularity::per_group, 7)), bias);
    const at::Tensor x = at::randn({2, 4, 9, 8});
    const at::Tensor dense = dequantize(conv.weight());
    REQUIRE(
        at::equal(conv.forward(x, {2, 1}, {1, 0}, {1, 2}, 2), at::conv2d(x, dense, bias, {2, 1}, {1, 0}, {1, 2}, 2)));
    REQUIRE(conv.forward(x.to(at::kDouble), {1}, {0}, {1}, 2).scalar_type() == at::kDouble);
    const PackedConv flat(quantize_weight(w.flatten(2), scheme(bits, true, Granularity::per_channel)), std::nullopt);
    const at::Tensor line = at::randn({2, 2, 20});
    REQUIRE(at::equal(flat.forward(line, {1}, {4}, {1}, 1),
                      at::conv1d(line, dequantize(flat.weight()), {}, {1}, {4}, {1}, 1)));
    const auto again = PackedConv::from_state(conv.state());
    REQUIRE(at::equal(again->weight().codes, conv.weight().codes));
    REQUIRE(at::equal(again->forward(x, {1}, {0}, {1}, 2), conv.forward(x, {1}, {0}, {1}, 2)));
  }
  REQUIRE(code_of([] { PackedConv(quantize_weight(at::zeros({2, 2}), {}), std::nullopt); }) == ErrorCode::BadData);
}

TEST_CASE("state and back", "[packed]") {
  for (const auto& s : {scheme(8, true, Granularity::per_channel), scheme(4, false, Granularity::per_group, 8),
                        scheme(4, true, Granularity::per_tensor)})
    for (const ActivationQuant& a : {kNone, kPerToken, kPerTensor})
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        const Packed layer = packed(at::randn({5, 19}).to(dtype), at::randn({5}), a, s);
        const Packed again = PackedLinear::from_state(layer->state());
        REQUIRE(at::equal(again->weight().codes, layer->weight().codes));
        REQUIRE(at::equal(again->weight().scale, layer->weight().scale));
        REQUIRE(again->weight().zero_point.defined() == layer->weight().zero_point.defined());
        REQUIRE(again->weight().scheme == s);
        REQUIRE(again->weight().shape == layer->weight().shape);
        REQUIRE(again->weight().dtype == dtype);
        REQUIRE(again->activation() == a);
        const at::Tensor x = at::randn({3, 19});
        REQUIRE(at::equal(again->forward(x, false), layer->forward(x, false)));
      }
}

TEST_CASE("hostile states are refused", "[packed]") {
  const c10::IValue good =
      packed(at::randn({5, 19}), at::randn({5}), kPerToken, scheme(4, false, Granularity::per_group, 8))->state();
  REQUIRE(PackedLinear::from_state(good) != nullptr);
  const auto ints = [](std::vector<std::int64_t> v) { return c10::IValue(std::move(v)); };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::pair<std::size_t, c10::IValue>> bad = {
      {0, 2},
      {0, "1"},
      {0, c10::IValue()},
      {1, c10::IValue()},
      {1, 3},
      {1, at::Tensor()},
      {1, at::zeros({5, 19}, at::kByte)},
      {1, at::zeros({5, 10}, at::kChar)},
      {1, at::zeros({50}, at::kByte)},
      {1, at::zeros({5, 9}, at::kByte)},
      {2, c10::IValue()},
      {2, at::Tensor()},
      {2, at::ones({5, 2})},
      {2, at::ones({5, 3}, at::kDouble)},
      {2, at::zeros({5, 3})},
      {2, at::full({5, 3}, -1.0F)},
      {2, at::full({5, 3}, nan)},
      {2, at::full({5, 3}, std::numeric_limits<float>::infinity())},
      {3, c10::IValue()},
      {3, at::full({5, 3}, 8, at::kChar)},
      {3, at::full({5, 3}, -9, at::kChar)},
      {3, at::zeros({5, 3}, at::kInt)},
      {3, at::zeros({1, 1}, at::kChar)},
      {4, at::zeros({4})},
      {4, at::zeros({5}, at::kLong)},
      {4, "bias"},
      {4, at::Tensor()},
      {4, at::zeros({1, 5})},
      {5, ints({5})},
      {5, ints({})},
      {5, ints({5, 21})},
      {5, ints({-5, 19})},
      {5, ints({5, -19})},
      {5, ints({5, 1, 19})},
      {5, ints({std::int64_t{1} << 62, std::int64_t{1} << 62})},
      {5, ints({5, std::numeric_limits<std::int64_t>::max()})},
      {5, std::vector<double>{5, 19}},
      {5, 5},
      {6, ints({4, 0, 2})},
      {6, ints({5, 0, 2, 8})},
      {6, ints({8, 0, 2, 8})},
      {6, ints({4, 1, 2, 8})},
      {6, ints({4, 2, 2, 8})},
      {6, ints({4, 0, 3, 8})},
      {6, ints({4, 0, -1, 8})},
      {6, ints({4, 0, 2, 0})},
      {6, ints({4, 0, 2, -8})},
      {6, ints({4, 0, 2, 4})},
      {6, ints({(std::int64_t{1} << 32) + 4, 0, 2, 8})},
      {7, 3},
      {7, -1},
      {7, 1.0},
      {8, 1},
      {8, c10::IValue()},
      {9, 128},
      {9, std::int64_t{1} << 40},
      {9, 0.5}};
  for (const auto& [field, value] : bad) {
    INFO("field " << field << ", " << value.tagKind());
    REQUIRE(code_of([&, f = field, v = value] { PackedLinear::from_state(with_field(good, f, v)); }) ==
            ErrorCode::BadData);
  }
  for (const double scale : {0.0, -1.0, 1e-60, 1e60, double(nan)}) {
    const c10::IValue fixed = with_field(good, 7, 2);
    REQUIRE(code_of([&] { PackedLinear::from_state(with_field(fixed, 8, scale)); }) == ErrorCode::BadData);
  }
  REQUIRE(code_of([&] { PackedLinear::from_state(c10::IValue(7)); }) == ErrorCode::BadData);
  REQUIRE(code_of([&] { PackedLinear::from_state(c10::ivalue::Tuple::create(std::vector<c10::IValue>{})); }) ==
          ErrorCode::BadData);
  std::vector<c10::IValue> fields = good.toTupleRef().elements().vec();
  for (std::size_t left = 1; left < fields.size(); ++left) {
    const auto cut = c10::ivalue::Tuple::create(
        std::vector<c10::IValue>(fields.begin(), fields.begin() + static_cast<std::ptrdiff_t>(left)));
    REQUIRE(code_of([&] { PackedLinear::from_state(cut); }) == ErrorCode::BadData);
    REQUIRE(code_of([&] { PackedConv::from_state(cut); }) == ErrorCode::BadData);
    REQUIRE(code_of([&] { PackedEmbedding::from_state(cut); }) == ErrorCode::BadData);
  }
  fields.emplace_back(0);
  REQUIRE(code_of([&] { PackedLinear::from_state(c10::ivalue::Tuple::create(fields)); }) == ErrorCode::BadData);
}

TEST_CASE("the operators are registered", "[packed]") {
  const Packed layer = packed(at::randn({4, 6}), at::randn({4}), kPerToken);
  const at::Tensor x = at::randn({2, 6});
  const auto call = [&](const char* name) {
    torch::jit::Stack stack{x, layer};
    c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
    return stack.at(0).toTensor();
  };
  REQUIRE(at::equal(call("tersor::linear"), layer->forward(x, false)));
  REQUIRE(at::equal(call("tersor::linear_relu"), layer->forward(x, true)));
  const auto conv = c10::make_intrusive<PackedConv>(quantize_weight(at::randn({3, 2, 3}), {}), std::nullopt);
  const at::Tensor line = at::randn({1, 2, 9});
  const std::vector<std::int64_t> one{1};
  torch::jit::Stack stack{line, conv, c10::IValue(one), c10::IValue(one), c10::IValue(one), 1};
  c10::Dispatcher::singleton().findSchemaOrThrow("tersor::conv", "").callBoxed(stack);
  REQUIRE(at::equal(stack.at(0).toTensor(), conv->forward(line, one, one, one, 1)));
  const auto table = c10::make_intrusive<PackedEmbedding>(quantize_weight(at::randn({5, 2}), {}));
  const at::Tensor ids = at::full({3}, 4, at::kLong);
  torch::jit::Stack arguments{ids, table};
  c10::Dispatcher::singleton().findSchemaOrThrow("tersor::embedding", "").callBoxed(arguments);
  REQUIRE(at::equal(arguments.at(0).toTensor(), table->forward(ids)));
}
