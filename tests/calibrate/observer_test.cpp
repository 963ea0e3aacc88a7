#include "tersor/calibrate/observer.hpp"

#include <limits>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "support.hpp"

using namespace tersor;
using tersor::calibrate::activation_of;
using tersor::calibrate::MovingAverage;
using tersor::calibrate::params_of;
using tersor::calibrate::Range;

namespace {

QuantScheme affine(int bits) { return {.bits = bits, .symmetric = false, .granularity = Granularity::per_tensor}; }

Range range_of(const at::Tensor& x) {
  calibrate::MinMax observer;
  observer.observe(x);
  return observer.range();
}

float value(const std::map<std::string, at::Tensor>& tensors, const std::string& name) {
  return tensors.at(name).item<float>();
}

}  // namespace

TEST_CASE("observer: one-sided ranges contain 0 (q-onesided)") {
  const auto x = read_tensors("cases/q-onesided/activations.safetensors");
  const auto expected = read_tensors("cases/q-onesided/expected.safetensors");
  // The case speaks of codes from 0; ours are 2^(bits - 1) lower.
  for (const std::string name : {"pos", "neg"}) {
    INFO(name);
    const QuantParams params = params_of(range_of(x.at(name)), affine(8));
    CHECK(params.scale == value(expected, name + ".scale"));
    CHECK(params.zero_point + 128 == expected.at(name + ".zp").item<std::int64_t>());
    CHECK(dequantize(quantize_value(0.0F, params, -128, 127), params) == 0.0F);
    const at::Tensor codes = expected.at(name + ".q");
    for (std::int64_t i = 0; i < codes.numel(); ++i) {
      const float v = x.at(name)[0][i].item<float>();
      const int code = quantize_value(v, params, -128, 127) + 128;
      // 1.5 / (3 / 255) is a tie in exact arithmetic.
      CHECK(std::abs(code - codes[0][i].item<int>()) <= (std::abs(v) == 1.5F ? 1 : 0));
      CHECK(std::abs(dequantize(static_cast<std::int8_t>(code - 128), params) - v) <= 0.5F * params.scale * 1.0001F);
    }
  }
  const QuantParams four = params_of(range_of(x.at("pos4")), affine(4));
  CHECK(four.scale == value(expected, "pos4.scale_u4"));
  CHECK(four.zero_point + 8 == expected.at("pos4.zp_u4").item<std::int64_t>());
}

TEST_CASE("observer: batches of zeros (q-zero-batch)") {
  const auto batches = read_tensors("cases/q-zero-batch/calib.safetensors");
  const auto expected = read_tensors("cases/q-zero-batch/expected.safetensors");
  calibrate::MinMax observer;
  for (const auto& [name, batch] : batches) observer.observe(batch);
  CHECK(observer.range() == Range{-1.0F, 2.0F});
  const ActivationQuant activation = activation_of(observer.range());
  CHECK(activation.mode == ActivationMode::per_tensor);
  CHECK(activation.scale == value(expected, "minmax.scale"));
  CHECK(activation.zero_point + 128 == expected.at("minmax.zp").item<std::int64_t>());
  CHECK(params_of(observer.range(), {.bits = 8}).scale == value(expected, "sym.scale"));

  const Range nothing = range_of(batches.at("batch0"));
  CHECK(nothing == Range{});
  for (const QuantScheme& scheme : {affine(8), affine(4), QuantScheme{.bits = 8}}) {
    const QuantParams params = params_of(nothing, scheme);
    CHECK(params.scale > 0.0F);
    CHECK(std::isfinite(params.scale));
    CHECK(dequantize(quantize_value(0.0F, params, scheme.qmin(), scheme.qmax()), params) == 0.0F);
  }
}

TEST_CASE("observer: values that are not finite are counted and left out (q-nonfinite)") {
  calibrate::MinMax observer;
  for (const auto& [name, batch] : read_tensors("cases/q-nonfinite/calib.safetensors")) observer.observe(batch);
  CHECK(observer.nans() == 1);
  CHECK(observer.infinities() == 2);
  CHECK(observer.range() == Range{-1.0F, 2.0F});  // of the one clean batch
}

TEST_CASE("observer: the moving average follows the batches") {
  MovingAverage observer(0.25);
  CHECK_FALSE(observer.seen());
  observer.observe(at::empty({0, 3}));
  CHECK_FALSE(observer.seen());
  observer.observe(at::tensor({-1.0F, 3.0F}));
  CHECK(observer.range() == Range{-1.0F, 3.0F});
  observer.observe(at::tensor({-5.0F, 7.0F}));
  CHECK(observer.range() == Range{-2.0F, 4.0F});
  observer.observe(at::tensor({2.0F, 8.0F}));
  CHECK(observer.range() == Range{-1.0F, 5.0F});

  for (const double averaging : {0.0, -0.5, 1.5, std::numeric_limits<double>::quiet_NaN()})
    check_error(ErrorCode::BadOption, {"averaging"}, [&] { MovingAverage{averaging}; });
}

TEST_CASE("observer: half precision and strided inputs") {
  const at::Tensor x = at::tensor({1.0F, -2.0F, 100.0F, 4.0F}).reshape({2, 2});
  CHECK(range_of(x.t()[1]) == Range{-2.0F, 4.0F});
  CHECK(range_of(x.to(at::kHalf)) == Range{-2.0F, 100.0F});
  CHECK(range_of(x.to(at::kBFloat16)) == Range{-2.0F, 100.0F});
  CHECK(range_of(at::full({3}, std::numeric_limits<float>::max())) ==
        Range{3.4028234663852886e38F, 3.4028234663852886e38F});
}
