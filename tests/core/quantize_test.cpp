#include "tersor/core/quantize.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "catch.hpp"

using namespace tersor;

namespace {

const QuantScheme kInt8{8, true, Granularity::per_channel, 0};
const QuantScheme kInt8Affine{8, false, Granularity::per_channel, 0};
const QuantScheme kInt4{4, true, Granularity::per_channel, 0};
const QuantScheme kInt4Affine{4, false, Granularity::per_channel, 0};
constexpr float kMinNormal = std::numeric_limits<float>::min();

std::vector<int> codes_of(const std::vector<float>& x, QuantParams params, const QuantScheme& scheme) {
  std::vector<std::int8_t> codes(x.size());
  quantize_values(x, params, scheme, codes.data());
  return {codes.begin(), codes.end()};
}

}  // namespace

TEST_CASE("small floats round half to even", "[quantize]") {
  const std::vector<std::pair<float, float>> cases = {{0.5F, 0},         {1.5F, 2},   {2.5F, 2},        {-0.5F, 0},
                                                      {-1.5F, -2},       {-2.5F, -2}, {0.49999997F, 0}, {126.5F, 126},
                                                      {-1023.5F, -1024}, {3, 3}};
  for (const auto& [x, want] : cases) REQUIRE(round_half_even_small(x) == want);
}

TEST_CASE("scales are rounded to the type that stores them", "[quantize]") {
  REQUIRE(round_to(ScaleType::float32, 0.1F) == 0.1F);
  REQUIRE(round_to(ScaleType::bfloat16, 1.0F + 0x1p-8F) == 1.0F);                // a tie, to even
  REQUIRE(round_to(ScaleType::bfloat16, 1.0F + 3 * 0x1p-8F) == 1.0F + 0x1p-6F);  // a tie, to even
  REQUIRE(round_to(ScaleType::bfloat16, 1.0F + 0x1.02p-8F) == 1.0F + 0x1p-7F);
  REQUIRE(round_to(ScaleType::float16, 1.0F + 0x1p-11F) == 1.0F);
  REQUIRE(round_to(ScaleType::float16, 0.1F) == 0.0999755859375F);
  REQUIRE(round_to(ScaleType::float16, 65519.0F) == 65504.0F);
  REQUIRE(std::isinf(round_to(ScaleType::float16, 65520.0F)));
  REQUIRE(std::isinf(round_to(ScaleType::bfloat16, std::numeric_limits<float>::max())));
}

TEST_CASE("one-sided ranges contain zero", "[quantize]") {
  // Case q-onesided, in signed codes: unsigned ones minus 128 (8 bits) or 8 (4 bits).
  QuantParams p = choose_affine(1, 3, kInt8Affine);
  REQUIRE(p == QuantParams{3.0F / 255, -128});
  const auto pos = codes_of({1, 1.5F, 2, 3}, p, kInt8Affine);
  REQUIRE(pos[0] == 85 - 128);
  REQUIRE((pos[1] == 127 - 128 || pos[1] == 128 - 128));  // 127.5 in exact numbers
  REQUIRE(pos[2] == 170 - 128);
  REQUIRE(pos[3] == 255 - 128);

  p = choose_affine(-3, -1, kInt8Affine);
  REQUIRE(p == QuantParams{3.0F / 255, 127});
  const auto neg = codes_of({-3, -2, -1.5F, -1}, p, kInt8Affine);
  REQUIRE(neg[0] == 0 - 128);
  REQUIRE(neg[1] == 85 - 128);
  REQUIRE((neg[2] == 127 - 128 || neg[2] == 128 - 128));
  REQUIRE(neg[3] == 170 - 128);

  REQUIRE(choose_affine(1, 4, kInt4Affine) == QuantParams{4.0F / 15, -8});
}

TEST_CASE("zero decodes to zero whatever the range", "[quantize]") {
  std::mt19937 random(3);
  std::normal_distribution<float> draw(0, 10);
  for (const QuantScheme& scheme : {kInt8, kInt8Affine, kInt4, kInt4Affine})
    for (const ScaleType type : {ScaleType::float32, ScaleType::float16, ScaleType::bfloat16})
      for (int i = 0; i < 200; ++i) {
        const std::vector<float> x{draw(random), 0.0F, -0.0F, draw(random)};
        const QuantParams p = choose_params(x, scheme, type);
        REQUIRE(p.scale > 0);
        REQUIRE(round_to(type, p.scale) == p.scale);
        REQUIRE(p.zero_point >= scheme.qmin());
        REQUIRE(p.zero_point <= scheme.qmax());
        for (const int at : {1, 2})
          REQUIRE(dequantize(quantize_value(x[static_cast<std::size_t>(at)], p, scheme.qmin(), scheme.qmax()), p) ==
                  0.0F);
        const MinMax range = min_max(x);
        for (const float v : x) {
          const float back = dequantize(quantize_value(v, p, scheme.qmin(), scheme.qmax()), p);
          // Half a step, and what the ends of the range lose when the scale is rounded down to its type.
          const float rounding = type == ScaleType::float32   ? 0x1p-22F
                                 : type == ScaleType::float16 ? 0x1p-10F
                                                              : 0x1p-7F;
          REQUIRE(std::fabs(v - back) <= 0.5F * p.scale * (1 + 0x1p-20F) + rounding * (range.max - range.min));
        }
      }
}

TEST_CASE("groups without a range", "[quantize]") {
  const std::vector<float> zeros(5, 0.0F);
  for (const QuantScheme& scheme : {kInt8, kInt8Affine, kInt4, kInt4Affine}) {
    const QuantParams p = choose_params(zeros, scheme);
    REQUIRE(p.scale == kMinNormal);
    REQUIRE(choose_params(zeros, scheme, ScaleType::float16).scale == 0x1p-14F);
    REQUIRE(choose_params(zeros, scheme, ScaleType::bfloat16).scale == kMinNormal);
    REQUIRE(dequantize(quantize_value(0.0F, p, scheme.qmin(), scheme.qmax()), p) == 0.0F);
    REQUIRE(choose_params(std::span<const float>(), scheme).scale == kMinNormal);
  }
  // Case q-int4-asym: a constant group of 3.0.
  const std::vector<float> threes(4, 3.0F);
  for (const QuantScheme& scheme : {kInt8, kInt8Affine, kInt4, kInt4Affine}) {
    const QuantParams p = choose_params(threes, scheme);
    const float back = dequantize(quantize_value(3.0F, p, scheme.qmin(), scheme.qmax()), p);
    REQUIRE(back >= std::nextafter(3.0F, 0.0F));
    REQUIRE(back <= std::nextafter(3.0F, 9.0F));
  }
}

TEST_CASE("tiny and huge weights", "[quantize]") {
  const QuantParams tiny = choose_symmetric(1e-42F, kInt8);
  REQUIRE(tiny.scale == kMinNormal);
  REQUIRE(codes_of({1e-42F, -1e-42F, 0.75F * kMinNormal}, tiny, kInt8) == std::vector<int>{0, 0, 1});
  // float16 cannot hold 1e-4 / 127: the scale is raised, and the error stays below half of it.
  REQUIRE(choose_symmetric(1e-4F, kInt8, ScaleType::float16).scale == 0x1p-14F);

  const float huge = std::numeric_limits<float>::max();
  const QuantParams wide = choose_affine(-huge, huge, kInt8Affine);
  REQUIRE(std::isfinite(wide.scale));
  REQUIRE(codes_of({-huge, 0, huge}, wide, kInt8Affine) == std::vector<int>{-128, wide.zero_point, 127});
  try {
    choose_symmetric(1e6F, kInt4, ScaleType::float16);
    FAIL("accepted");
  } catch (const Error& e) {
    REQUIRE(e.code() == ErrorCode::UnsupportedDtype);
    REQUIRE(e.message().find("bfloat16") != std::string::npos);
  }
}

TEST_CASE("codes are clamped and ties go to even", "[quantize]") {
  REQUIRE(codes_of({0.5F, 1.5F, 2.5F, -0.5F, -2.5F, 1e30F, -1e30F, INFINITY, -INFINITY}, {1.0F, 0}, kInt8) ==
          std::vector<int>{0, 2, 2, 0, -2, 127, -127, 127, -127});
  REQUIRE(codes_of({1e30F, -1e30F, 3.0F}, {1.0F, -5}, kInt8Affine) == std::vector<int>{127, -128, -2});
  REQUIRE(codes_of({9, -9}, {1.0F, 0}, kInt4) == std::vector<int>{7, -7});
  REQUIRE(codes_of({9, -9}, {1.0F, 0}, kInt4Affine) == std::vector<int>{7, -8});
}

TEST_CASE("more bits, less error", "[quantize]") {
  std::mt19937 random(5);
  std::normal_distribution<float> draw(0, 1);
  std::vector<float> x(1000);
  for (float& v : x) v = draw(random);
  for (const bool symmetric : {true, false}) {
    double last = 1e30;
    for (const int bits : {2, 3, 4, 5, 6, 7, 8}) {
      const QuantScheme scheme{bits, symmetric, Granularity::per_channel, 0};
      const QuantParams p = choose_params(x, scheme);
      double error = 0;
      for (const float v : x)
        error += std::pow(v - dequantize(quantize_value(v, p, scheme.qmin(), scheme.qmax()), p), 2);
      REQUIRE(error < last / 2);
      last = error;
    }
  }
}
