#include "tersor/analysis/cost.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <string_view>
#include <vector>

namespace tersor {
namespace {

using Shape = std::vector<std::int64_t>;

std::int64_t elements(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

/// `shape(ValueId)` tells how large a tensor is.
template <typename ShapeOf>
std::int64_t terms(const Graph& graph, const GraphNode& node, ShapeOf&& shape) {
  const auto of = [&](std::string_view name) -> Shape {
    const GraphArgument* argument = graph.argument(node, name);
    const ValueId* id = argument ? std::get_if<ValueId>(argument) : nullptr;
    return id && *id >= 0 ? shape(*id) : Shape{0};
  };
  const std::string_view op = node.op;
  if (op == "aten::linear") return of("input").back();
  if (op == "aten::matmul" || op == "aten::mm" || op == "aten::bmm") return of("self").back();
  if (op == "aten::addmm") return of("mat1").back();
  if (op == "aten::baddbmm") return of("batch1").back();
  constexpr std::array convolutions{
      "aten::conv1d",     "aten::conv2d", "aten::conv3d", "aten::_convolution", "aten::_convolution_mode",
      "aten::convolution"};
  if (std::find(convolutions.begin(), convolutions.end(), op) != convolutions.end()) {
    const Shape weight = of("weight");
    return weight.front() == 0 ? 0 : elements(weight) / weight.front();
  }
  return 0;
}

template <typename ShapeOf>
std::int64_t count(const Graph& graph, ShapeOf&& shape) {
  std::int64_t sum = 0;
  for (const GraphNode& node : graph.nodes) {
    if (node.outputs.empty()) continue;
    if (const std::int64_t each = terms(graph, node, shape); each > 0)
      sum += elements(shape(node.outputs.front())) * each;
  }
  return sum;
}

auto example_shape(const Graph& graph) {
  return [&graph](ValueId id) { return graph.values[static_cast<std::size_t>(id)].value.sizes().vec(); };
}

}  // namespace

std::int64_t macs_per_output(const Graph& graph, const GraphNode& node) {
  return terms(graph, node, example_shape(graph));
}

std::int64_t macs(const Graph& graph) { return count(graph, example_shape(graph)); }

std::int64_t macs(const ChannelGroups& groups, const Removal& removed) {
  return count(groups.graph(), [&](ValueId id) { return groups.shape(id, removed); });
}

}  // namespace tersor
