#include "tersor/kernels/linear.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "catch.hpp"
#include "tersor/core/error.hpp"

using namespace tersor;

namespace {

using Codes = std::vector<std::int8_t>;
using Floats = std::vector<float>;

std::mt19937 random_bits(7);

Codes random_codes(std::int64_t count, int low, int high) {
  std::uniform_int_distribution<int> draw(low, high);
  Codes codes(static_cast<std::size_t>(count));
  for (auto& c : codes) c = static_cast<std::int8_t>(draw(random_bits));
  return codes;
}

Floats random_floats(std::int64_t count, float size) {
  std::normal_distribution<float> draw(0, size);
  Floats x(static_cast<std::size_t>(count));
  for (auto& v : x) v = draw(random_bits);
  return x;
}

// Rows whose codes are given: a scale of 1 and zero point 0 make every code its own float.
QuantizedRows rows_of(Isa isa, const Codes& codes, std::int64_t rows, std::int64_t k) {
  const Floats x(codes.begin(), codes.end());
  QuantizedRows out;
  quantize_per_tensor(isa, x.data(), rows, k, 1.0F, 0, out);
  return out;
}

std::vector<std::int64_t> naive_sums(const Codes& x, const Codes& w, std::int64_t m, std::int64_t n, std::int64_t k) {
  std::vector<std::int64_t> y(static_cast<std::size_t>(m * n));
  for (std::int64_t r = 0; r < m; ++r)
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t j = 0; j < k; ++j)
        y[static_cast<std::size_t>(r * n + i)] +=
            std::int64_t{x[static_cast<std::size_t>(r * k + j)]} * w[static_cast<std::size_t>(i * k + j)];
  return y;
}

void require_sums(const Codes& x, const Codes& w, std::int64_t m, std::int64_t n, std::int64_t k) {
  const auto want = naive_sums(x, w, m, n, k);
  const Int8Weights packed(w, n, k, Floats(static_cast<std::size_t>(n), 1.0F), {});
  for (const Isa isa : available_isas()) {
    INFO(name(isa) << " m " << m << " n " << n << " k " << k);
    std::vector<std::int32_t> got(static_cast<std::size_t>(m * n) + 1, 12345);
    linear_sums(isa, rows_of(isa, x, m, k), packed, got.data());
    REQUIRE(got.back() == 12345);
    got.pop_back();
    REQUIRE(std::vector<std::int64_t>(got.begin(), got.end()) == want);
  }
}

std::vector<std::uint32_t> bits(const Floats& x) {
  std::vector<std::uint32_t> b;
  for (const float v : x) b.push_back(std::bit_cast<std::uint32_t>(v));
  return b;
}

const float kNan = std::numeric_limits<float>::quiet_NaN();
const float kInf = std::numeric_limits<float>::infinity();

}  // namespace

TEST_CASE("int8 sums are exact where 16 bits would saturate", "[kernels]") {
  // Case q-saturate: unsigned activations, shifted by 128; the shift comes back through the sums of the weights.
  const std::vector<int> a = {250, 240, 255, 255, 0, 10, 200, 200, 255, 255, 255, 255, 255, 255, 255, 255};
  const int b[8][3] = {{120, -120, 127}, {127, -127, -128}, {127, -128, 127}, {126, -128, -128},
                       {5, 5, 5},        {-7, 7, 0},        {100, -100, 64},  {100, -100, 63}};
  Codes w;
  for (int i = 0; i < 3; ++i)
    for (const auto& row : b) w.push_back(static_cast<std::int8_t>(row[i]));
  const Floats x(a.begin(), a.end());
  const Int8Weights packed(w, 3, 8, Floats(3, 1.0F), {});
  for (const Isa isa : available_isas()) {
    QuantizedRows rows;
    quantize_per_tensor(isa, x.data(), 2, 8, 1.0F, -128, rows);
    Floats y(6);
    linear(isa, rows, packed, false, y.data(), {0, packed.blocks()});
    REQUIRE(y == Floats{164925, -165690, 26175, 177990, -176205, 33150});
  }
}

TEST_CASE("int8 sums equal a naive loop for every shape", "[kernels]") {
  for (std::int64_t m = 0; m <= 17; ++m)
    for (const std::int64_t n : {1, 5, 8, 15, 16, 17, 31, 33, 50})
      for (const std::int64_t k : {1, 3, 4, 7, 8, 31, 32, 33, 65})
        for (const int lowest : {-127, -128})
          require_sums(random_codes(m * k, -128, 127), random_codes(n * k, lowest, 127), m, n, k);
}

TEST_CASE("int8 sums of extreme codes", "[kernels]") {
  const std::int64_t k = 1030;
  for (const int x : {-128, -127, 127})
    for (const int w : {-128, -127, 127}) {
      require_sums(Codes(static_cast<std::size_t>(6 * k), static_cast<std::int8_t>(x)),
                   Codes(static_cast<std::size_t>(20 * k), static_cast<std::int8_t>(w)), 6, 20, k);
    }
  // Signs that differ within and between the pairs that one instruction adds.
  Codes x;
  Codes w;
  for (std::int64_t j = 0; j < 5 * k; ++j) x.push_back(j % 3 == 0 ? -128 : 127);
  for (std::int64_t j = 0; j < 18 * k; ++j) w.push_back(j % 2 == 0 ? -127 : 127);
  require_sums(x, w, 5, 18, k);
}

TEST_CASE("the longest sums", "[kernels]") {
  const std::int64_t k = 131071;
  const Codes minus(static_cast<std::size_t>(k), -128);
  require_sums(minus, minus, 1, 1, k);  // 2^31 - 2^14
  const Codes longer(static_cast<std::size_t>(k + 1), -128);
  const Int8Weights packed(longer, 1, k + 1, Floats{1.0F}, {});
  for (const Isa isa : available_isas()) {
    const QuantizedRows rows = rows_of(isa, longer, 1, k + 1);
    std::int32_t sum = 0;
    REQUIRE_THROWS_AS(linear_sums(isa, rows, packed, &sum), Error);
    float y = 0;
    linear(isa, rows, packed, false, &y, {0, 1});
    REQUIRE(y == 0x1p31F);
    // With a zero point, fewer inputs already overflow 32 bits: (127 + 128) * -128 * 131072 = -255 * 2^24.
    const Floats high(static_cast<std::size_t>(k + 1), 1e9F);
    QuantizedRows shifted;
    quantize_per_tensor(isa, high.data(), 1, k + 1, 1.0F, -128, shifted);
    linear(isa, shifted, packed, false, &y, {0, 1});
    REQUIRE(y == -255.0F * 0x1p24F);
  }
}

TEST_CASE("packed int8 weights keep every code", "[kernels]") {
  const std::int64_t n = 21;
  const std::int64_t k = 13;
  const Codes codes = random_codes(n * k, -128, 127);
  const Int8Weights packed(codes, n, k, Floats(static_cast<std::size_t>(n), 1.0F), {});
  REQUIRE(packed.codes.size() == Int8Weights::packed_size(n, k));
  REQUIRE(Int8Weights::packed_size(n, k) == 32 * 16);
  std::vector<bool> used(packed.codes.size());
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t j = 0; j < k; ++j) {
      const std::size_t at = Int8Weights::packed_index(k, i, j);
      REQUIRE(packed.codes[at] == codes[static_cast<std::size_t>(i * k + j)]);
      REQUIRE_FALSE(used[at]);
      used[at] = true;
    }
  for (std::size_t at = 0; at < used.size(); ++at)
    if (!used[at]) REQUIRE(packed.codes[at] == 0);
}

TEST_CASE("activations become codes by the rule, on every instruction set", "[kernels]") {
  for (const std::int64_t k : {1, 7, 8, 31, 32, 33, 77, 100}) {
    Floats x = random_floats(3 * k, 2.0F);
    for (std::int64_t j = 0; j < k; ++j) {  // ties: absmax 127 makes the scale 1
      x[static_cast<std::size_t>(j)] = static_cast<float>(j % 8) - 3.5F;
      x[static_cast<std::size_t>(2 * k + j)] *= 1e-41F;  // subnormal
    }
    x[0] = -127.0F;
    QuantizedRows first;
    for (const Isa isa : available_isas()) {
      INFO(name(isa) << " k " << k);
      QuantizedRows rows;
      quantize_per_token(isa, x.data(), 3, k, rows);
      for (std::int64_t m = 0; m < 3; ++m) {
        float absmax = 0;
        for (std::int64_t j = 0; j < k; ++j)
          absmax = std::max(absmax, std::fabs(x[static_cast<std::size_t>(m * k + j)]));
        const float scale = std::max(absmax / 127.0F, std::numeric_limits<float>::min());
        REQUIRE(rows.scale[static_cast<std::size_t>(m)] == scale);
        for (std::int64_t j = 0; j < rows.stride; ++j) {
          const float want = j < k ? std::nearbyint(x[static_cast<std::size_t>(m * k + j)] / scale) : 0.0F;
          REQUIRE(rows.row(m)[j] == std::clamp(want, -127.0F, 127.0F));
          REQUIRE(static_cast<std::uint8_t>(rows.row(m)[rows.stride + j]) == std::abs(rows.row(m)[j]));
        }
      }
      QuantizedRows fixed;
      quantize_per_tensor(isa, x.data(), 3, k, 0.037F, 11, fixed);
      for (std::int64_t j = 0; j < fixed.stride; ++j) {
        const float want = j < k ? std::nearbyint(x[static_cast<std::size_t>(k + j)] / 0.037F) + 11.0F : 0.0F;
        REQUIRE(fixed.row(1)[j] == std::clamp(want, -128.0F, 127.0F));
      }
    }
  }
}

TEST_CASE("rows that have no range, or no numbers", "[kernels]") {
  const std::int64_t k = 37;
  const Codes w = random_codes(3 * k, -127, 127);
  const Floats bias = {1.5F, -2.0F, 0.0F};
  const Int8Weights packed(w, 3, k, Floats{0.5F, 0.25F, 1.0F}, bias);
  for (const Isa isa : available_isas()) {
    for (const std::int64_t at : {0L, 20L, 36L}) {
      Floats x(static_cast<std::size_t>(5 * k), 1.0F);
      std::fill_n(x.begin(), k, 0.0F);
      x[static_cast<std::size_t>(k + at)] = kNan;
      x[static_cast<std::size_t>(2 * k + at)] = -kInf;
      x[static_cast<std::size_t>(4 * k + at)] = -kNan;
      QuantizedRows rows;
      Floats y(15);
      quantize_per_token(isa, x.data(), 5, k, rows);
      for (const bool relu : {false, true}) {
        linear(isa, rows, packed, relu, y.data(), {0, 1});
        REQUIRE(y[0] == 1.5F);
        REQUIRE(y[1] == (relu ? 0.0F : -2.0F));
        REQUIRE(y[2] == 0.0F);
        for (const std::size_t i : {3U, 4U, 5U, 6U, 7U, 8U, 12U, 13U, 14U}) REQUIRE(std::isnan(y[i]));
        for (const std::size_t i : {9U, 10U, 11U}) REQUIRE(std::isfinite(y[i]));
      }
      // Static: an infinity is outside the calibrated range like any large number, NaN stays NaN.
      quantize_per_tensor(isa, x.data(), 5, k, 0.1F, 3, rows);
      REQUIRE(std::isnan(rows.scale[1]));
      REQUIRE(rows.row(2)[at] == -128);
      REQUIRE(rows.scale[2] == 0.1F);
    }
  }
}

TEST_CASE("int8 outputs are the same bits on every instruction set", "[kernels]") {
  for (const std::int64_t m : {1, 2, 3, 4, 5, 9})
    for (const std::int64_t n : {1, 16, 40, 77})
      for (const std::int64_t k : {5, 64, 301})
        for (const bool relu : {false, true}) {
          const Codes w = random_codes(n * k, m == 5 ? -128 : -127, 127);
          Floats scale = random_floats(n, 0.01F);
          for (auto& s : scale) s = std::fabs(s) + 1e-4F;
          const Floats bias = random_floats(n, 1.0F);
          const Floats x = random_floats(m * k, 1.0F);
          const Int8Weights packed(w, n, k, scale, bias);
          for (const bool fixed : {false, true}) {
            Floats first;
            for (const Isa isa : available_isas()) {
              QuantizedRows rows;
              if (fixed) {
                quantize_per_tensor(isa, x.data(), m, k, 0.03F, -17, rows);
              } else {
                quantize_per_token(isa, x.data(), m, k, rows);
              }
              Floats y(static_cast<std::size_t>(m * n), -1.0F);
              linear(isa, rows, packed, relu, y.data(), {0, packed.blocks()});
              for (std::int64_t r = 0; r < m; ++r)
                for (std::int64_t i = 0; i < n; ++i) {
                  std::int32_t sum = 0;
                  for (std::int64_t j = 0; j < k; ++j)
                    sum += (rows.row(r)[j] - rows.zero_point) * w[static_cast<std::size_t>(i * k + j)];
                  float want = static_cast<float>(sum) *
                               (rows.scale[static_cast<std::size_t>(r)] * scale[static_cast<std::size_t>(i)]);
                  want = want + bias[static_cast<std::size_t>(i)];
                  REQUIRE(y[static_cast<std::size_t>(r * n + i)] == (relu ? std::max(want, 0.0F) : want));
                }
              if (first.empty()) first = y;
              REQUIRE(bits(y) == bits(first));
              // In two parts, as two threads would.
              Floats parts(y.size());
              linear(isa, rows, packed, relu, parts.data(), {0, packed.blocks() / 2});
              linear(isa, rows, packed, relu, parts.data(), {packed.blocks() / 2, packed.blocks()});
              REQUIRE(bits(parts) == bits(y));
            }
          }
        }
}

TEST_CASE("int4 outputs are the same bits on every instruction set", "[kernels]") {
  struct Shape {
    std::int64_t k, group_size;
  };
  for (const std::int64_t m : {1, 2, 3, 4, 7})
    for (const std::int64_t n : {1, 16, 37})
      for (const auto [k, group_size] :
           {Shape{64, 32}, {96, 32}, {100, 32}, {71, 8}, {300, 128}, {45, 45}, {45, 64}, {7, 7}, {1030, 1030}})
        for (const bool affine : {false, true})
          for (const bool extreme : {false, true}) {
            const std::int64_t groups = (k + group_size - 1) / group_size;
            const Codes w = extreme ? Codes(static_cast<std::size_t>(n * k), 7) : random_codes(n * k, -8, 7);
            const Codes zero = affine ? random_codes(n * groups, -8, 7) : Codes();
            Floats scale = random_floats(n * groups, 0.1F);
            for (auto& s : scale) s = std::fabs(s) + 1e-3F;
            const Floats bias = random_floats(n, 1.0F);
            Floats x = extreme ? Floats(static_cast<std::size_t>(m * k), -1e6F) : random_floats(m * k, 1.0F);
            const Int4Weights packed(w, n, k, group_size, scale, zero, bias);
            Floats first;
            for (const Isa isa : available_isas()) {
              INFO(name(isa) << " m " << m << " n " << n << " k " << k << " group " << group_size << " affine "
                             << affine);
              for (const int zero_point : {0, 100}) {
                QuantizedRows rows;
                if (zero_point == 0 && !extreme) {
                  quantize_per_token(isa, x.data(), m, k, rows);
                } else {
                  quantize_per_tensor(isa, x.data(), m, k, 0.02F, zero_point, rows);
                }
                sum_groups(rows, group_size);
                Floats y(static_cast<std::size_t>(m * n), -1.0F);
                linear(isa, rows, packed, zero_point != 0, y.data(), {0, packed.blocks()});
                const GroupedWeights plain{n, k, group_size, w, scale, zero, bias};
                Floats want(y.size());
                linear(rows, plain, zero_point != 0, want.data(), {0, n});
                REQUIRE(bits(y) == bits(want));
                for (std::int64_t i = 0; i < m * n; ++i) {  // and the plain formula in double
                  double exact = 0;
                  const std::int64_t r = i / n;
                  const std::int64_t o = i % n;
                  double size = 0;
                  for (std::int64_t j = 0; j < k; ++j) {
                    const auto p = static_cast<std::size_t>(o * groups + j / group_size);
                    const double term = double(rows.row(r)[j] - zero_point) *
                                        (w[static_cast<std::size_t>(o * k + j)] - (affine ? zero[p] : 0)) * scale[p];
                    exact += term;
                    size += std::fabs(term);
                  }
                  const double s = rows.scale[static_cast<std::size_t>(r)];
                  exact = exact * s + bias[static_cast<std::size_t>(o)];
                  if (zero_point != 0) exact = std::max(exact, 0.0);
                  // One rounding of each of the groups' products and sums, then two more.
                  const double slack =
                      (size * s * static_cast<double>(2 * groups + 2) + std::fabs(exact)) * 0x1p-24 + 1e-30;
                  REQUIRE(std::fabs(y[static_cast<std::size_t>(i)] - exact) <= slack);
                }
              }
            }
          }
}

TEST_CASE("groups of any size, int8 codes", "[kernels]") {
  // 2 inputs per group, the last one alone; zero points 1 and -128.
  const Codes w = {3, -2, 127, -128, 5};
  const Codes zero = {1, -128, 0};
  const Floats scale = {0.5F, 2.0F, 1.0F};
  QuantizedRows x = rows_of(Isa::scalar, {1, 2, -3, 4, 6}, 1, 5);
  float y = 0;
  linear(x, {1, 5, 2, w, scale, zero, {}}, false, &y, {0, 1});
  REQUIRE(y == (2 * 1 + -3 * 2) * 0.5F + (255 * -3 + 0 * 4) * 2.0F + 5 * 6);
}

TEST_CASE("TERSOR_FORCE_ISA", "[kernels]") {
  for (const Isa isa : available_isas()) {
    setenv("TERSOR_FORCE_ISA", std::string(name(isa)).c_str(), 1);
    REQUIRE(best_isa() == isa);
  }
  setenv("TERSOR_FORCE_ISA", "avx9", 1);
  try {
    best_isa();
    FAIL("accepted");
  } catch (const Error& e) {
    REQUIRE(e.code() == ErrorCode::BadUsage);
    REQUIRE(e.message().find("avx9") != std::string::npos);
    REQUIRE(e.message().find("scalar") != std::string::npos);
  }
  setenv("TERSOR_FORCE_ISA", "", 1);
  REQUIRE(best_isa() == available_isas().back());
  unsetenv("TERSOR_FORCE_ISA");
  REQUIRE(best_isa() == available_isas().back());
}
