#include "tersor/analysis/importance.hpp"

#include <cmath>

#include <ATen/ops/tensor.h>

#include "catch.hpp"
#include "graph_builder.hpp"

using namespace tersor;

namespace {

/// Two producers of three channels: `a` [3, 2], and `b` [1, 6] along its dimension 1, two of its indices a channel.
struct Family {
  std::vector<double> scores(Importance by, Reduction reduction) const {
    return importance(by, reduction, groups, family, source);
  }
  ChannelGroups groups{GraphBuilder().result({})};
  ChannelFamily family{.producers = {{"a", 0, {{0}, {1}, {2}}}, {"b", 1, {{0, 3}, {1, 4}, {2, 5}}}},
                       .atoms = {1, 2, 3},
                       .cells = {0, 0, 0}};
  at::Tensor a = at::tensor({1.0f, -2.0f, 3.0f, 0.5f, -0.5f, 0.0f}).view({3, 2});
  at::Tensor b = at::tensor({1.0f, 2.0f, 3.0f, 4.0f, 5.0f, -6.0f}).view({1, 6});
  ImportanceSource source{.tensor = [this](std::string_view name) { return name == "a" ? a : b; }};
};

}  // namespace

TEST_CASE("importance: scores of filters by hand, and how producers become one") {
  const Family f;
  CHECK(f.scores(Importance::l1, Reduction::mean) ==
        std::vector<double>{(3.0 + 5.0) / 2, (3.5 + 7.0) / 2, (0.5 + 9.0) / 2});
  CHECK(f.scores(Importance::l1, Reduction::max) == std::vector<double>{5, 7, 9});
  CHECK(f.scores(Importance::l1, Reduction::first) == std::vector<double>{3, 3.5, 0.5});
  const std::vector<double> l2 = f.scores(Importance::l2, Reduction::mean);
  const std::vector<double> by_hand{(std::sqrt(5.0) + std::sqrt(17.0)) / 2, (std::sqrt(9.25) + std::sqrt(29.0)) / 2,
                                    (0.5 + std::sqrt(45.0)) / 2};
  for (std::size_t i = 0; i < 3; ++i) CHECK(l2[i] == Approx(by_hand[i]).epsilon(1e-12));
  // Distances between rows of a: (1,-2)-(3,0.5), (1,-2)-(-0.5,0), (3,0.5)-(-0.5,0).
  const double d01 = std::sqrt(4 + 6.25), d02 = std::sqrt(2.25 + 4), d12 = std::sqrt(12.25 + 0.25);
  const std::vector<double> median = f.scores(Importance::geometric_median, Reduction::first);
  CHECK(median[0] == Approx(d01 + d02).epsilon(1e-12));
  CHECK(median[1] == Approx(d01 + d12).epsilon(1e-12));
  CHECK(median[2] == Approx(d02 + d12).epsilon(1e-12));
  CHECK(f.scores(Importance::bn_scale, Reduction::mean).empty());
}

TEST_CASE("importance: normalization and ranking, ties to the lowest index") {
  CHECK(normalized({1, 2, 3}, Normalization::mean) == std::vector<double>{0.5, 1, 1.5});
  CHECK(normalized({1, 2, 4}, Normalization::max) == std::vector<double>{0.25, 0.5, 1});
  CHECK(normalized({1, 2, 4}, Normalization::none) == std::vector<double>{1, 2, 4});
  CHECK(normalized({0, 0}, Normalization::mean) == std::vector<double>{0, 0});
  CHECK(ascending({2.0, 1.0, 2.0, 1.0}) == std::vector<std::size_t>{1, 3, 0, 2});
}
