#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tersor/analysis/channel_groups.hpp"

namespace tersor {

/// What a literal of an operator says about shapes, so that it can follow a removal.
enum class Literal {
  none,
  output_shape,      ///< `size` or `shape`: the output's
  unflattened,       ///< `sizes`: the output's, from `dim` on
  piece_size,        ///< `split_size`: of the first piece along `dim`
  piece_sizes,       ///< `split_sizes`: of every piece along `dim`
  normalized_shape,  ///< the input's last axes
  depthwise_groups,  ///< `groups`, where each group has one input channel
  range,             ///< `start`, `end` along `dim`
  index,             ///< `index` along `dim`
  length,            ///< `start`, `length` along `dim`
  scale,             ///< `scale`, by default 1/sqrt of the last axis
};

class ChannelTracer;

/// One row of the table of operators.
struct ChannelRule {
  void (*trace)(ChannelTracer&, const GraphNode&);
  Literal literal = Literal::none;
  bool moves = false;  ///< only moves elements: can be run on labels or element numbers
};

/// The row of an operator (`aten::view`); null for one that nobody knows.
const ChannelRule* find_channel_rule(std::string_view op);

/// Runs an operator. `arguments` in schema order; a list of tensors that come back is spread out.
std::vector<at::Tensor> call_operator(const GraphNode& node, std::vector<c10::IValue> arguments);

/// Arguments of a node as values, each tensor through `tensor_of`; id -1 is None.
template <typename TensorOf>
std::vector<c10::IValue> argument_values(const GraphNode& node, TensorOf&& tensor_of) {
  std::vector<c10::IValue> values;
  for (const GraphArgument& argument : node.arguments) {
    if (const auto* one = std::get_if<ValueId>(&argument)) {
      values.emplace_back(*one < 0 ? c10::IValue() : c10::IValue(tensor_of(*one)));
    } else if (const auto* several = std::get_if<std::vector<ValueId>>(&argument)) {
      std::vector<at::Tensor> tensors;  // an undefined tensor stands for None
      for (const ValueId id : *several) tensors.push_back(id < 0 ? at::Tensor() : tensor_of(id));
      values.emplace_back(std::move(tensors));
    } else {
      values.push_back(std::get<c10::IValue>(argument));
    }
  }
  return values;
}

/// Carries labels through a graph, node by node.
class ChannelTracer {
 public:
  using Axis = ChannelGroups::Axis;
  using Axes = ChannelGroups::Axes;

  explicit ChannelTracer(ChannelGroups& groups);
  void run();

  // --- for rules ---
  const at::Tensor& value(ValueId id) const { return graph.values[static_cast<std::size_t>(id)].value; }
  Axes& axes(ValueId id) { return groups_.axes_[static_cast<std::size_t>(id)]; }
  Axis& axis(ValueId id, std::int64_t a) { return axes(id)[static_cast<std::size_t>(a)]; }
  bool wide(ValueId id, std::int64_t a) const { return value(id).size(a) > 1; }

  ValueId tensor(const GraphNode& node, std::string_view name) const;       ///< -1: None
  std::vector<ValueId> tensors(const GraphNode& node) const;                ///< all of them, in order
  c10::IValue literal(const GraphNode& node, std::string_view name) const;  ///< None if there is no such argument
  std::int64_t dim(const GraphNode& node, std::int64_t rank, std::string_view name = "dim") const;

  void fix(const Axis& axis, std::string why);
  void fix_all(ValueId id, const std::string& why);
  Axis unify(const Axis& a, const Axis& b);  ///< both leave together; without labels on one side: the other's
  Axis meet(const Axis& a, const Axis& b,
            std::string_view why);  ///< like unify, but no labels on one side fix the other

  /// Spreads a vector along axis `a` of `shape`.
  at::Tensor plane(at::IntArrayRef shape, std::int64_t a, const LabelVector& vector) const;
  /// Integer tensors back to vectors along axes: factors products, couples what has no vector.
  Axes normal(const std::vector<at::Tensor>& planes);
  /// Runs the operator on the labels of its first tensor.
  void move_elements(const GraphNode& node);
  void elementwise(const std::vector<ValueId>& operands, ValueId output);
  /// A sum over axis `x_axis` of x and `y_axis` of y; `x_labels` where x stands in part only.
  void contract(ValueId x, std::int64_t x_axis, ValueId y, std::int64_t y_axis, std::string_view why);
  void contract(ValueId x, std::int64_t x_axis, const Axis& x_labels, ValueId y, std::int64_t y_axis,
                std::string_view why);
  void produces(ValueId value, std::int64_t a);
  void changes_statistics(const Axis& axis) { statistics_.push_back(axis); }
  void equal_counts(const GraphNode& node, const Axis& axis, std::int64_t count);
  void unknown(const GraphNode& node);

  Labels& labels;
  const Graph& graph;

 private:
  /// Parameter dimensions whose labels stand along axis `a` of a value made from that parameter by moving elements.
  std::vector<ChannelGroups::Place> places(ValueId value, std::int64_t a);

  ChannelGroups& groups_;
  std::vector<ValueId> origin_;  ///< parameter that a value was made from by moving elements; -1: none
  std::vector<ChannelGroups::Place> producers_;
  std::vector<Axis> statistics_, unmaskable_;
  std::map<std::string, std::size_t, std::less<>> unknown_;
};

}  // namespace tersor
