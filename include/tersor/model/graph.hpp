#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace tersor {

using ValueId = std::int32_t;
using NodeId = std::int32_t;

/// One tensor of the network, with what it held when the example ran.
struct GraphValue {
  std::string parameter;  ///< full name (`block.1.weight`) when it is a parameter or buffer, else empty
  at::Tensor value;       ///< a parameter itself, or what the example produced; shapes and dtypes are read from it
};

/// One argument of an operator: a tensor of the network, several (-1 for a missing one), or anything else as the value
/// it had; a missing optional tensor is None.
using GraphArgument = std::variant<ValueId, std::vector<ValueId>, c10::IValue>;

/// One operator call. Arguments stand in schema order, defaults filled in.
struct GraphNode {
  std::string op;        ///< `aten::conv2d`
  std::string overload;  ///< `` or `int`, `Tensor`, …
  std::vector<std::string> argument_names;
  std::vector<GraphArgument> arguments;
  std::vector<ValueId> outputs;  ///< a list of tensors is spread out
  std::string scope;             ///< submodule path where known, for messages
};

/// What a network does, flat: the operators that made a tensor while the example ran, in order. Branches are
/// resolved, loops unrolled, integers evaluated; tensors are named by ValueId. Built by a Model backend, read by
/// passes.
///
/// An operator that works in place gives a new value, which later operators read. Operators that hand on what they were
/// given (dropout in eval mode, picking from a list) do not appear. Where a tensor was changed through another view of
/// its memory, a node `tersor::written_through(self, source)` gives it a new value. A number that is read out of a
/// tensor's values (`aten::item`) is a node without outputs. Two parameters that share their tensor are one value,
/// named by the first.
struct Graph {
  std::vector<GraphValue> values;
  std::vector<GraphNode> nodes;
  std::vector<ValueId> inputs;
  std::vector<ValueId> outputs;  ///< tuples, lists and dictionaries flattened, dictionaries in order of their keys
  /// Branches and loops whose course depends on the values of the example, each by its place: `nodes` shows the course
  /// that this example took, and another input may take another one.
  std::vector<std::string> data_dependent;
  /// Where a branch or a loop depends on sizes of the inputs, another input may take a course that `nodes` does not
  /// show: the values that it reads or that come out of either course, with the place of the branch. Their shapes and
  /// meaning must stay as they are.
  std::map<ValueId, std::string> other_courses;

  /// ValueId of a parameter or buffer; -1 if it takes no part.
  ValueId find(std::string_view parameter) const;
  /// Nodes that read `value`.
  std::vector<NodeId> users(ValueId value) const;
  const GraphArgument* argument(const GraphNode& node, std::string_view name) const;
};

/// Runs an operator of a graph again, each of its tensors through `tensor_of`; what comes out in the order of
/// GraphNode::outputs. Throws what the operator throws.
std::vector<at::Tensor> run_node(const GraphNode& node, const std::function<at::Tensor(ValueId)>& tensor_of);

}  // namespace tersor
