#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tersor/analysis/labels.hpp"
#include "tersor/model/graph.hpp"

namespace tersor {

/// Which atoms leave, by label.
using Removal = std::vector<bool>;

/// One parameter dimension that makes the channels of a family.
struct ChannelProducer {
  std::string parameter;
  std::int64_t dim = 0;
  std::vector<std::vector<std::int64_t>> rows;  ///< of each atom of the family: its indices of `dim`, ascending
};

/// A width that can shrink: atoms that occupy the same place of a producer's output.
struct ChannelFamily {
  std::vector<ChannelProducer> producers;  ///< in the order in which the network runs them
  LabelVector atoms;                       ///< in the order of the first producer's indices
  /// Atoms of one cell are interchangeable; as many must leave from each cell as from every other (group counts).
  std::vector<std::int32_t> cells;
  std::int32_t slot = 0;  ///< 0: the whole or the first factor of its producers' dimension (heads); 1: the second …
  bool factored = false;  ///< its producers' dimension has several factors; only one of them should shrink at a time
  /// Statistics over the channels (LayerNorm, GroupNorm, a reduction) change when some leave.
  bool statistics = false;
  /// Every consumer of the channels is a parameter: zeros in the consumers act like the removal.
  bool maskable = true;

  std::int64_t width() const { return static_cast<std::int64_t>(atoms.size()); }
  /// Indices of the first producer that one atom takes.
  std::int64_t rows_per_atom() const { return static_cast<std::int64_t>(producers.front().rows.front().size()); }
};

/// Indices of a parameter's or buffer's dimension.
struct ParameterIndices {
  std::string parameter;
  std::int64_t dim = 0;
  std::vector<std::int64_t> indices;  ///< ascending
};

/// A literal of an operator that must change.
struct ArgumentEdit {
  NodeId node = 0;
  std::size_t index = 0;
  c10::IValue value;
};

/// Something that cannot shrink, and why.
struct Blocked {
  std::string what;  ///< a parameter, or an operator and its place
  std::string why;
};

/// Which channels of a network must leave together.
///
/// Every index of every parameter dimension gets a label; activations carry vectors of labels along their axes. Shape
/// operators are run on the labels themselves, the few operators with meaning have a rule (channel_rules.cpp), and an
/// operator that is not known fixes what reaches it. What the network returns is fixed.
class ChannelGroups {
 public:
  /// Keeps the graph (tensors are shared, not copied).
  explicit ChannelGroups(Graph graph);

  const Graph& graph() const { return graph_; }
  const std::vector<ChannelFamily>& families() const { return families_; }
  /// Producers none of whose channels can leave, and operators that nobody knows.
  const std::vector<Blocked>& blocked() const { return blocked_; }

  Removal nothing() const { return Removal(static_cast<std::size_t>(labels_.size()), false); }

  /// Indices of one axis of a value that stay.
  std::vector<std::int64_t> kept(ValueId value, std::int64_t axis, const Removal& removed) const;
  std::vector<std::int64_t> kept(std::string_view parameter, std::int64_t dim, const Removal& removed) const;
  /// Shape of a value after the removal.
  std::vector<std::int64_t> shape(ValueId value, const Removal& removed) const;

  /// Every parameter dimension that loses indices, with what it keeps.
  std::vector<ParameterIndices> cuts(const Removal& removed) const;
  /// Where the atoms of a family stand along a parameter's dimension; `rows` are empty where they do not.
  ChannelProducer standing(const ChannelFamily& family, std::string_view parameter, std::int64_t dim) const;
  /// Literals that must change, from the predicted shapes.
  std::vector<ArgumentEdit> edits(const Removal& removed) const;
  /// Indices of the parameter dimensions that read the removed channels: with zeros there, the unchanged network
  /// computes what the shrunken one does, unless `statistics` changed or a family is not `maskable`.
  std::vector<ParameterIndices> consumers(const Removal& removed) const;

  /// An operator that would not do the same on what stays: its shapes or elements would differ.
  struct Conflict {
    NodeId node = 0;
    std::string why;
    std::vector<std::size_t> families;  ///< whose atoms it touches, of those that lose some
  };
  /// Runs every shape operator that the removal touches on element numbers, before and after, and compares; checks that
  /// groups keep equal counts.
  std::vector<Conflict> conflicts(const Removal& removed) const;

 private:
  friend class ChannelTracer;

  using Axis = std::vector<LabelVector>;  ///< index j leaves when label v[j] of any of these vectors leaves
  using Axes = std::vector<Axis>;
  struct Groups {
    NodeId node;
    Axis axis;
    std::int64_t count;
  };
  struct Place {
    ValueId value;
    std::int64_t axis;
    friend bool operator==(const Place&, const Place&) = default;
  };

  void build_families(const std::vector<Place>& producers, const std::vector<Axis>& statistics,
                      const std::vector<Axis>& unmaskable);
  bool leaves(Label label, const Removal& removed) const;
  std::vector<std::size_t> families_at(NodeId node, const Removal& removed) const;
  at::Tensor restricted(ValueId value, const at::Tensor& tensor, const Removal& removed) const;

  Graph graph_;
  Labels labels_;
  std::vector<Axes> axes_;  ///< by value
  std::vector<Groups> groups_;
  std::vector<Place> consumers_;
  std::vector<ChannelFamily> families_;
  std::vector<std::int32_t> family_of_;  ///< by label; -1: none
  std::vector<Blocked> blocked_;
};

}  // namespace tersor
