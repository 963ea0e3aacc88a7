#pragma once

#include <cstdint>

#include "tersor/analysis/channel_groups.hpp"

namespace tersor {

/// Terms of the sum behind each output element of a linear, matrix-product or convolution operator; 0 for others.
std::int64_t macs_per_output(const Graph& graph, const GraphNode& node);

/// Multiply-accumulate operations of the linear, matrix-product and convolution operators for the graph's example.
std::int64_t macs(const Graph& graph);
/// The same of what a removal would leave.
std::int64_t macs(const ChannelGroups& groups, const Removal& removed);

}  // namespace tersor
