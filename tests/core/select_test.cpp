#include "tersor/core/select.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "catch.hpp"

namespace {

using tersor::find_smallest;
using tersor::magnitude_key;

template <typename T>
using KeyOf = decltype(magnitude_key(T{}));

/// Indices that the selection takes, over several spans as one sequence.
template <typename T>
std::vector<std::size_t> selected(const std::vector<std::vector<T>>& spans, std::int64_t k) {
  auto smallest = find_smallest<KeyOf<T>>(k, [&](auto see) {
    for (const auto& span : spans)
      for (T x : span) see(magnitude_key(x));
  });
  std::vector<std::size_t> out;
  std::size_t index = 0;
  for (const auto& span : spans)
    for (T x : span) {
      if (smallest.take(magnitude_key(x))) out.push_back(index);
      ++index;
    }
  return out;
}

/// The definition: sort by (|x|, index), take the first k.
template <typename T>
std::vector<std::size_t> sorted_definition(const std::vector<T>& all, std::int64_t k) {
  std::vector<std::size_t> order(all.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return std::abs(all[a]) < std::abs(all[b]); });
  order.resize(static_cast<std::size_t>(k));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace

TEST_CASE("select: keys order as magnitudes do") {
  const std::vector<float> ascending{0.0F,
                                     std::numeric_limits<float>::denorm_min(),
                                     std::numeric_limits<float>::min(),
                                     1e-3F,
                                     1.0F,
                                     std::nextafter(1.0F, 2.0F),
                                     std::numeric_limits<float>::max(),
                                     std::numeric_limits<float>::infinity()};
  for (std::size_t i = 1; i < ascending.size(); ++i) {
    CHECK(magnitude_key(ascending[i - 1]) < magnitude_key(ascending[i]));
    CHECK(magnitude_key(-ascending[i]) == magnitude_key(ascending[i]));
    CHECK(magnitude_key(-double{ascending[i - 1]}) < magnitude_key(double{ascending[i]}));
  }
  CHECK(magnitude_key(-0.0F) == 0);
  CHECK(magnitude_key(-0.0) == 0);
}

TEST_CASE("select: of equal magnitudes the lowest index goes first") {
  const std::vector<std::vector<float>> w{{1, -1, 1, -1, 1, 1, -5, -1, -1, 1, .5F, -4}};
  CHECK(selected(w, 6) == std::vector<std::size_t>{0, 1, 2, 3, 4, 10});
  CHECK(selected(w, 1) == std::vector<std::size_t>{10});
  CHECK(selected(w, 0).empty());
  CHECK(selected(w, 12).size() == 12);
}

TEST_CASE("select: several spans rank as one sequence") {
  const std::vector<std::vector<double>> spans{{3, -1}, {}, {1, 0.5}, {-1}};
  CHECK(selected(spans, 3) == std::vector<std::size_t>{1, 2, 3});
}

TEST_CASE("select: equals sorting by magnitude and index") {
  std::mt19937 random(7);
  std::uniform_int_distribution<int> few(-4, 4);  // many ties
  std::normal_distribution<double> many;
  for (const bool ties : {true, false}) {
    std::vector<float> f(1000);
    std::vector<double> d(1000);
    for (std::size_t i = 0; i < f.size(); ++i) {
      const double x = ties ? 0.25 * few(random) : many(random);
      f[i] = static_cast<float>(x);
      d[i] = x;
    }
    for (const std::int64_t k : {0, 1, 2, 37, 500, 999, 1000}) {
      CHECK(selected<float>({f}, k) == sorted_definition(f, k));
      CHECK(selected<double>({d}, k) == sorted_definition(d, k));
    }
  }
}

TEST_CASE("select: asking for more than there is is an error") {
  CHECK_THROWS_AS(selected<float>({{1, 2}}, 3), tersor::Error);
}
