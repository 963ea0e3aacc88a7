#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tersor/analysis/channel_groups.hpp"

namespace tersor {

/// L1 importance of each atom of a family: the sum of |w| over the filters that make it, averaged over the producers
/// that have it. Accumulated in double in a fixed order. Li et al., arXiv:1608.08710.
std::vector<double> l1_importance(const ChannelFamily& family,
                                  const std::function<at::Tensor(std::string_view)>& tensor);

/// Positions from the least to the greatest score; among equals the lowest position first.
std::vector<std::size_t> ascending(const std::vector<double>& scores);

}  // namespace tersor
