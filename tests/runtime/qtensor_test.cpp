#include "tersor/runtime/qtensor.hpp"

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "catch.hpp"
#include "tersor/core/error.hpp"

using namespace tersor;

namespace {

at::Tensor matrix(const std::vector<float>& values, std::vector<std::int64_t> shape) {
  return at::tensor(values).reshape(shape);
}
at::Tensor bytes(const std::vector<int>& values, std::vector<std::int64_t> shape) {
  return at::tensor(values).to(at::kChar).reshape(shape);
}
QuantScheme scheme(int bits, bool symmetric, Granularity granularity, std::int64_t group_size = 0) {
  return {bits, symmetric, granularity, group_size};
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

}  // namespace

TEST_CASE("an all-zero row and sparse weights", "[qtensor]") {
  // Case q-zero-row.
  const at::Tensor w = matrix({-1.1587803363800049F,
                               0.3673294186592102F,
                               0.7109753489494324F,
                               -0.23732890188694F,
                               -1.0129038095474243F,
                               0.5579704642295837F,
                               0,
                               0,
                               0,
                               0,
                               0,
                               0,
                               -0.6058281660079956F,
                               0.012516729533672333F,
                               0.6818475723266602F,
                               0.45084381103515625F,
                               0.7275527715682983F,
                               1.04906165599823F,
                               0,
                               0,
                               3,
                               0,
                               0,
                               0},
                              {4, 6});
  const QTensor q = quantize_weight(w, scheme(8, true, Granularity::per_channel));
  REQUIRE(at::equal(
      q.codes,
      bytes({-127, 40, 78, -26, -111, 61, 0, 0, 0, 0, 0, 0, -73, 2, 83, 55, 88, 127, 0, 0, 127, 0, 0, 0}, {4, 6})));
  REQUIRE(q.scale.sizes() == at::IntArrayRef({4, 1}));
  const float* s = q.scale.const_data_ptr<float>();
  REQUIRE(s[0] == 0.009124254807829857F);
  REQUIRE(s[1] == std::numeric_limits<float>::min());
  REQUIRE(s[2] == 0.008260328322649002F);
  REQUIRE(s[3] == 0.023622047156095505F);
  REQUIRE_FALSE(q.zero_point.defined());
  REQUIRE(q.nbytes() == 24 + 16);
  for (const int bits : {8, 4})
    for (const bool symmetric : {true, false})
      for (const auto granularity : {Granularity::per_tensor, Granularity::per_channel, Granularity::per_group}) {
        const at::Tensor back = dequantize(quantize_weight(w, scheme(bits, symmetric, granularity, 4)));
        REQUIRE(at::equal(back.masked_select(w.eq(0)), at::zeros({11})));
        REQUIRE(back.isfinite().all().item<bool>());
      }
}

TEST_CASE("a last group that is shorter", "[qtensor]") {
  // Case q-group-tail.
  const at::Tensor w = matrix(
      {0.8435485363006592F,   -1.3155641555786133F,  0.03457943722605705F, 0.4955565333366394F,   0.7141850590705872F,
       1.541130542755127F,    0.7824856638908386F,   -0.8609018921852112F, 26.890352249145508F,   -23.085254669189453F,
       -1.522112488746643F,   0.9577242136001587F,   -2.407555103302002F,  -0.03295771777629852F, 0.6677130460739136F,
       -0.20074409246444702F, -0.34600552916526794F, -0.6686910390853882F, -9.346214294433594F,   20.601224899291992F,
       0.4169328510761261F,   0.014157197438180447F, -0.6197786331176758F, -0.18761533498764038F, 0.22917184233665466F,
       0.6005910634994507F,   1.218363642692566F,    -0.2180696576833725F, 15.635374069213867F,   -11.108417510986328F},
      {3, 10});
  const QTensor q = quantize_weight(w, scheme(4, true, Granularity::per_group, 4));
  REQUIRE(q.groups() == 3);
  REQUIRE(at::equal(unpacked_codes(q), bytes({4,  -7, 0,  3,  3, 7, 4, -4, 7,  -6, -4, 3, -7, 0, 7,
                                              -2, -4, -7, -3, 7, 5, 0, -7, -2, 1,  3,  7, -1, 7, -5},
                                             {3, 10})));
  REQUIRE(at::equal(q.scale, matrix({0.18793773651123047F, 0.22016151249408722F, 3.8414788246154785F,
                                     0.3439364433288574F, 0.0955272912979126F, 2.9430320262908936F,
                                     0.08853980153799057F, 0.17405195534229279F, 2.2336249351501465F},
                                    {3, 3})));
  REQUIRE(dequantize(q).sizes() == w.sizes());
  REQUIRE(dequantize(q)[0][8].item<float>() == 26.890352249145508F);
  for (const std::int64_t size : {10, 128}) {  // one group per row, as per channel
    const QTensor whole = quantize_weight(w, scheme(4, true, Granularity::per_group, size));
    const QTensor channel = quantize_weight(w, scheme(4, true, Granularity::per_channel));
    REQUIRE(whole.groups() == 1);
    REQUIRE(at::equal(whole.scale, channel.scale));
    REQUIRE(at::equal(whole.codes, channel.codes));
  }
}

TEST_CASE("affine int4 groups", "[qtensor]") {
  // Case q-int4-asym; its unsigned codes minus 8.
  const at::Tensor w = matrix({1, 2, 3, 4, -4, -3, -2, -1, -1, 0, .5F, 2, 0, 0, 0, 0, 3, 3, 3, 3, -8, 7, 0, 1}, {3, 8});
  const QTensor q = quantize_weight(w, scheme(4, false, Granularity::per_group, 4));
  const at::Tensor want =
      bytes({4, 7, 11, 15, 0, 4, 8, 11, 0, 5, 7, 15, 0, 0, 0, 0, 15, 15, 15, 15, 0, 15, 8, 9}, {3, 8}).to(at::kInt) - 8;
  const at::Tensor off = unpacked_codes(q).to(at::kInt).sub(want).abs();
  const at::Tensor steps = w / q.scale.repeat_interleave(4, 1);
  const at::Tensor tie = (steps - steps.floor() - 0.5).abs() < 1e-5;  // 2 / (4 / 15) = 7.5 may fall on either side
  REQUIRE(off.max().item<int>() <= 1);
  REQUIRE(off.masked_select(tie.logical_not()).sum().item<int>() == 0);
  REQUIRE(at::equal(q.zero_point.to(at::kInt) + 8, bytes({0, 15, 5, 0, 0, 8}, {3, 2}).to(at::kInt)));
  const float* s = q.scale.const_data_ptr<float>();
  REQUIRE(s[0] == 4.0F / 15);
  REQUIRE(s[1] == 4.0F / 15);
  REQUIRE(s[2] == 0.2F);
  REQUIRE(s[4] == 0.2F);
  REQUIRE(s[5] == 1.0F);
  const at::Tensor back = dequantize(q);
  REQUIRE(((w - back).abs() <= q.scale.repeat_interleave(4, 1) / 2 * (1 + 1e-6)).all().item<bool>());
  for (int j = 0; j < 4; ++j) {
    const float three = back[2][j].item<float>();
    REQUIRE(three >= std::nextafter(3.0F, 0.0F));
    REQUIRE(three <= std::nextafter(3.0F, 9.0F));
    REQUIRE(back[1][4 + j].item<float>() == 0.0F);
  }
  REQUIRE(q.nbytes() == 12 + 24 + 6);
}

TEST_CASE("codes survive packing, odd columns too", "[qtensor]") {
  const at::Tensor codes = bytes({-8, 7, -1, 0, 1, -7, 5, 7, -8, 3, -3, -4, 2, -1}, {2, 7});
  QTensor q;
  q.scheme = scheme(4, true, Granularity::per_channel);
  q.shape = {2, 7};
  q.codes = packed_codes(codes, q.scheme);
  REQUIRE(q.codes.scalar_type() == at::kByte);
  REQUIRE(q.codes.sizes() == at::IntArrayRef({2, 4}));
  REQUIRE(q.codes[0][0].item<int>() == (0 | 15 << 4));  // column 0 in the low nibble
  REQUIRE(q.codes[0][3].item<int>() == (13 | 8 << 4));  // the missing column is code 0
  REQUIRE(at::equal(unpacked_codes(q), codes));
  const at::Tensor conv = at::randint(-8, 8, {5, 3, 3, 3}).to(at::kChar);
  q.shape = {5, 3, 3, 3};
  q.codes = packed_codes(conv, q.scheme);
  REQUIRE(q.codes.sizes() == at::IntArrayRef({5, 14}));
  REQUIRE(at::equal(unpacked_codes(q), conv));
}

TEST_CASE("error is at most half a step, in every type and shape", "[qtensor]") {
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16})
    for (const auto& shape :
         std::vector<std::vector<std::int64_t>>{{7, 45}, {3, 5, 3, 3}, {6, 1}, {1, 33}, {9}, {4, 0}, {0, 4}})
      for (const int bits : {8, 4})
        for (const bool symmetric : {true, false})
          for (const auto granularity : {Granularity::per_tensor, Granularity::per_channel, Granularity::per_group}) {
            const at::Tensor w = at::randn(shape).to(dtype);
            const QTensor q = quantize_weight(w, scheme(bits, symmetric, granularity, 8));
            REQUIRE(q.dtype == dtype);
            REQUIRE(q.scale.scalar_type() == dtype);
            REQUIRE(q.scale.sizes() == (granularity == Granularity::per_tensor
                                            ? at::IntArrayRef({1, 1})
                                            : at::IntArrayRef({q.rows(), q.groups()})));
            REQUIRE(q.zero_point.defined() == !symmetric);
            const at::Tensor back = dequantize(q);
            REQUIRE(back.scalar_type() == dtype);
            REQUIRE(back.sizes() == w.sizes());
            if (w.numel() == 0) continue;
            const at::Tensor codes = unpacked_codes(q);
            REQUIRE(codes.min().item<int>() >= q.scheme.qmin());
            REQUIRE(codes.max().item<int>() <= q.scheme.qmax());
            const double type_step = dtype == at::kFloat ? 0x1p-22 : dtype == at::kHalf ? 0x1p-10 : 0x1p-7;
            const at::Tensor step = (granularity == Granularity::per_tensor ? q.scale.expand({q.rows(), 1}) : q.scale)
                                        .to(at::kDouble)
                                        .repeat_interleave(granularity == Granularity::per_group ? 8 : q.columns(), 1)
                                        .narrow(1, 0, q.columns())
                                        .reshape(shape);
            const at::Tensor error = (w.to(at::kDouble) - back.to(at::kDouble)).abs();
            // Half a step, and what the ends of the range lose when the scale is rounded to its type.
            const double lost = w.abs().max().item<double>() * 2 * type_step;
            REQUIRE((error <= step * (0.5 + 0x1p-20) + lost).all().item<bool>());
          }
}

TEST_CASE("weights that are not contiguous", "[qtensor]") {
  const at::Tensor w = at::randn({12, 20});
  const QTensor straight = quantize_weight(w.t().contiguous(), scheme(4, true, Granularity::per_group, 4));
  const QTensor turned = quantize_weight(w.t(), scheme(4, true, Granularity::per_group, 4));
  REQUIRE(at::equal(straight.codes, turned.codes));
  REQUIRE(at::equal(straight.scale, turned.scale));
}

TEST_CASE("weights that cannot be quantized", "[qtensor]") {
  at::Tensor w = at::randn({3, 4});
  std::string message;
  w[1][2] = std::numeric_limits<float>::quiet_NaN();
  w[2][3] = -std::numeric_limits<float>::infinity();
  REQUIRE(code_of([&] { quantize_weight(w, {}); }, &message) == ErrorCode::NonFiniteWeight);
  REQUIRE(message.find("1 NaN and 1 infinite of 12") != std::string::npos);
  REQUIRE(message.find("[1, 2]") != std::string::npos);
  REQUIRE(code_of([&] { quantize_weight(at::zeros({2, 2}, at::kInt), {}); }, &message) == ErrorCode::UnsupportedDtype);
  REQUIRE(message.find("Int") != std::string::npos);
  REQUIRE(code_of([&] { quantize_weight(at::zeros({2, 2}, at::kDouble), {}); }) == ErrorCode::UnsupportedDtype);
  REQUIRE(code_of([&] { quantize_weight(at::zeros({}), {}); }) == ErrorCode::BadShape);
  REQUIRE(code_of([&] {
            quantize_weight(at::zeros({2, 2}), scheme(5, true, Granularity::per_channel));
          }) == ErrorCode::BadOption);
  REQUIRE(code_of([&] {
            quantize_weight(at::zeros({2, 2}), scheme(4, true, Granularity::per_group, 0));
          }) == ErrorCode::BadOption);
}

TEST_CASE("the same codes for any number of threads", "[qtensor]") {
  const at::Tensor w = at::randn({700, 301});
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const QTensor one = quantize_weight(w, scheme(4, false, Granularity::per_group, 32));
  const at::Tensor back_one = dequantize(one);
  at::set_num_threads(3);
  const QTensor three = quantize_weight(w, scheme(4, false, Granularity::per_group, 32));
  REQUIRE(at::equal(one.codes, three.codes));
  REQUIRE(at::equal(one.scale, three.scale));
  REQUIRE(at::equal(one.zero_point, three.zero_point));
  REQUIRE(at::equal(back_one, dequantize(three)));
  at::set_num_threads(before);
}
