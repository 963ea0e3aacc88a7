#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tersor/analysis/channel_groups.hpp"
#include "tersor/core/options.hpp"

namespace tersor {

/// What a channel's score is: the higher, the later it leaves. The score of a filter (one index of a producer's output
/// dimension, all its weights) is
enum class Importance {
  l1,                ///< the sum of |w|; Li et al., arXiv:1608.08710
  l2,                ///< the square root of the sum of w²
  geometric_median,  ///< the sum of its distances to the producer's other filters; He et al., arXiv:1811.00250
  random,            ///< uniform in [0, 1), the same for a seed
  bn_scale,          ///< |gamma| of the BatchNorms behind it; Liu et al., arXiv:1708.06519
  taylor,            ///< (sum of w·dL/dw)², the mean over calibration batches; Molchanov et al., arXiv:1906.10771
  activation         ///< the mean |output| over calibration samples; Hu et al., arXiv:1607.03250
};

/// How the scores of several producers of a channel become one.
enum class Reduction { mean, max, first };

/// How the scores of a group are scaled before they are ranked against other groups.
enum class Normalization { none, mean, max };

/// Scores of the indices of a parameter's dimension.
using FilterScores = std::vector<double>;

/// Where scores come from. `observed`: for `taylor` and `activation`, what the data said of a parameter's dimension;
/// empty where nothing is known.
struct ImportanceSource {
  std::function<at::Tensor(std::string_view parameter)> tensor;
  std::function<FilterScores(std::string_view parameter, std::int64_t dim)> observed = {};
  std::uint64_t seed = 0;
};

/// Scores of the atoms of a family, accumulated in double in a fixed order; empty when this importance says nothing
/// about the family (`bn_scale` without a BatchNorm, a layer that the data never reached).
///
/// The filters that one atom takes of a producer (those of an attention head) add up, for `l2` as a root of squares.
/// `reduction` runs over the producers that have the atom; for `bn_scale` over its BatchNorms.
std::vector<double> importance(Importance importance, Reduction reduction, const ChannelGroups& groups,
                               const ChannelFamily& family, const ImportanceSource& source);

/// Divided by the mean or the greatest of them; as they are when that is zero.
std::vector<double> normalized(std::vector<double> scores, Normalization normalization);

/// Positions from the least to the greatest score; among equals the lowest position first.
std::vector<std::size_t> ascending(const std::vector<double>& scores);

}  // namespace tersor

template <>
struct tersor::EnumNames<tersor::Importance> {
  static constexpr std::array<std::pair<Importance, std::string_view>, 7> names{
      {{Importance::l1, "l1"},
       {Importance::l2, "l2"},
       {Importance::geometric_median, "geometric_median"},
       {Importance::random, "random"},
       {Importance::bn_scale, "bn_scale"},
       {Importance::taylor, "taylor"},
       {Importance::activation, "activation"}}};
};
template <>
struct tersor::EnumNames<tersor::Reduction> {
  static constexpr std::array<std::pair<Reduction, std::string_view>, 3> names{
      {{Reduction::mean, "mean"}, {Reduction::max, "max"}, {Reduction::first, "first"}}};
};
template <>
struct tersor::EnumNames<tersor::Normalization> {
  static constexpr std::array<std::pair<Normalization, std::string_view>, 3> names{
      {{Normalization::none, "none"}, {Normalization::mean, "mean"}, {Normalization::max, "max"}}};
};
