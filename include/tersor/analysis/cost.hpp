#pragma once

#include <cstdint>

#include "tersor/model/graph.hpp"

namespace tersor {

/// Multiply-accumulate operations of the linear, matrix-product and convolution operators for the graph's example.
std::int64_t macs(const Graph& graph);

}  // namespace tersor
