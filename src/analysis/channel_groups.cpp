#include "tersor/analysis/channel_groups.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>

#include "channel_tracer.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {

ChannelGroups::ChannelGroups(Graph graph) : graph_(std::move(graph)) { ChannelTracer(*this).run(); }

void ChannelGroups::build_families(const std::vector<Place>& producers, const std::vector<Axis>& statistics,
                                   const std::vector<Axis>& unmaskable) {
  // One column per producer, vector and slot: the atoms that stand there, row by row; pinned where none can leave.
  struct Column {
    Place place;
    std::int32_t slot;
    bool factored;
    LabelVector atoms;
  };
  std::vector<Column> columns;
  for (const Place& place : producers) {
    for (const LabelVector& vector :
         axes_[static_cast<std::size_t>(place.value)][static_cast<std::size_t>(place.axis)]) {
      std::vector<LabelVector> rows;
      std::size_t slots = 0;
      for (const Label label : vector) {
        rows.push_back(labels_.atoms(label));
        slots = std::max(slots, rows.back().size());
      }
      for (std::size_t slot = 0; slot < slots; ++slot) {
        Column column{place, static_cast<std::int32_t>(slot), slots > 1, {}};
        for (const LabelVector& row : rows)
          column.atoms.push_back(slot < row.size() && !labels_.fixed(row[slot]) ? row[slot] : Labels::pinned);
        columns.push_back(std::move(column));
      }
    }
  }

  // Atoms of one column are one family, and so are columns that share an atom.
  LabelVector parent(static_cast<std::size_t>(labels_.size()));
  for (std::size_t i = 0; i < parent.size(); ++i) parent[i] = static_cast<Label>(i);
  const auto root = [&](Label label) {
    while (parent[static_cast<std::size_t>(label)] != label) label = parent[static_cast<std::size_t>(label)];
    return label;
  };
  for (const Column& column : columns) {
    Label previous = Labels::pinned;
    for (const Label atom : column.atoms) {
      if (atom == Labels::pinned) continue;
      if (previous != Labels::pinned) parent[static_cast<std::size_t>(root(atom))] = root(previous);
      previous = atom;
    }
  }

  family_of_.assign(parent.size(), -1);
  std::vector<std::int32_t> position(parent.size(), -1);  // of an atom in its family
  std::map<Label, std::int32_t> index;                    // of a root's family
  for (const Column& column : columns) {
    for (std::size_t row = 0; row < column.atoms.size(); ++row) {
      const Label atom = column.atoms[row];
      if (atom == Labels::pinned) continue;
      const auto [found, fresh] = index.emplace(root(atom), static_cast<std::int32_t>(families_.size()));
      if (fresh) families_.emplace_back().slot = column.slot;
      ChannelFamily& family = families_[static_cast<std::size_t>(found->second)];
      std::int32_t& at = position[static_cast<std::size_t>(atom)];
      if (at < 0) {
        at = static_cast<std::int32_t>(family.atoms.size());
        family.atoms.push_back(atom);
        family_of_[static_cast<std::size_t>(atom)] = found->second;
      }
      family.slot = std::min(family.slot, column.slot);
      family.factored |= column.factored;
      const std::string& name = graph_.values[static_cast<std::size_t>(column.place.value)].parameter;
      auto producer = std::find_if(family.producers.begin(), family.producers.end(), [&](const ChannelProducer& p) {
        return p.parameter == name && p.dim == column.place.axis;
      });
      if (producer == family.producers.end())
        producer = family.producers.insert(producer, ChannelProducer{name, column.place.axis, {}});
      if (producer->rows.size() <= static_cast<std::size_t>(at))
        producer->rows.resize(static_cast<std::size_t>(at) + 1);
      std::vector<std::int64_t>& rows = producer->rows[static_cast<std::size_t>(at)];
      if (rows.empty() || rows.back() != static_cast<std::int64_t>(row)) rows.push_back(static_cast<std::int64_t>(row));
    }
  }

  std::vector<std::vector<std::set<std::pair<std::size_t, std::size_t>>>> member;  // [family][atom] {entry, group}
  for (ChannelFamily& family : families_) {
    for (ChannelProducer& producer : family.producers) producer.rows.resize(family.atoms.size());
    member.emplace_back(family.atoms.size());
  }
  const auto each_atom = [&](const Axis& axis, auto&& visit) {
    for (const LabelVector& vector : axis)
      for (std::size_t j = 0; j < vector.size(); ++j)
        for (const Label atom : labels_.atoms(vector[j]))
          if (const std::int32_t f = family_of_[static_cast<std::size_t>(atom)]; f >= 0)
            visit(static_cast<std::size_t>(f), static_cast<std::size_t>(position[static_cast<std::size_t>(atom)]), j);
  };
  for (const Axis& axis : statistics)
    each_atom(axis, [&](std::size_t f, std::size_t, std::size_t) { families_[f].statistics = true; });
  for (const Axis& axis : unmaskable)
    each_atom(axis, [&](std::size_t f, std::size_t, std::size_t) { families_[f].maskable = false; });
  for (std::size_t entry = 0; entry < groups_.size(); ++entry) {
    const std::size_t length = groups_[entry].axis.front().size() / static_cast<std::size_t>(groups_[entry].count);
    each_atom(groups_[entry].axis,
              [&](std::size_t f, std::size_t atom, std::size_t j) { member[f][atom].emplace(entry, j / length); });
  }
  for (std::size_t f = 0; f < families_.size(); ++f) {
    std::map<std::set<std::pair<std::size_t, std::size_t>>, std::int32_t> cell;
    for (const auto& groups : member[f])
      families_[f].cells.push_back(cell.emplace(groups, static_cast<std::int32_t>(cell.size())).first->second);
  }

  std::set<std::string> told;
  for (const Place& place : producers) {
    const GraphValue& value = graph_.values[static_cast<std::size_t>(place.value)];
    const bool shrinks = std::any_of(columns.begin(), columns.end(), [&](const Column& column) {
      return column.place == place &&
             std::any_of(column.atoms.begin(), column.atoms.end(), [](Label atom) { return atom != Labels::pinned; });
    });
    if (shrinks || !told.insert(value.parameter).second) continue;
    std::string why;
    for (const LabelVector& vector : axes_[static_cast<std::size_t>(place.value)][static_cast<std::size_t>(place.axis)])
      for (const Label label : vector)
        if (why.empty()) why = labels_.why_fixed(label);
    blocked_.push_back({value.parameter, why});
  }
}

bool ChannelGroups::leaves(Label label, const Removal& removed) const {
  if (!labels_.composite(label)) return removed[static_cast<std::size_t>(labels_.find(label))];
  const LabelVector atoms = labels_.atoms(label);
  return std::any_of(atoms.begin(), atoms.end(), [&](Label atom) { return removed[static_cast<std::size_t>(atom)]; });
}

std::vector<std::int64_t> ChannelGroups::kept(ValueId value, std::int64_t axis, const Removal& removed) const {
  const Axis& vectors = axes_[static_cast<std::size_t>(value)][static_cast<std::size_t>(axis)];
  const std::int64_t size = graph_.values[static_cast<std::size_t>(value)].value.size(axis);
  std::vector<std::int64_t> indices;
  for (std::int64_t j = 0; j < size; ++j) {
    const bool out = std::any_of(vectors.begin(), vectors.end(), [&](const LabelVector& vector) {
      return leaves(vector[static_cast<std::size_t>(j)], removed);
    });
    if (!out) indices.push_back(j);
  }
  return indices;
}

std::vector<std::int64_t> ChannelGroups::kept(std::string_view parameter, std::int64_t dim,
                                              const Removal& removed) const {
  const ValueId value = graph_.find(parameter);
  check(value >= 0, ErrorCode::NoSuchTarget, "the network does not use a tensor '{}'", escaped(parameter));
  return kept(value, dim, removed);
}

std::vector<std::int64_t> ChannelGroups::shape(ValueId value, const Removal& removed) const {
  std::vector<std::int64_t> sizes = graph_.values[static_cast<std::size_t>(value)].value.sizes().vec();
  for (std::size_t a = 0; a < sizes.size(); ++a)
    if (!axes_[static_cast<std::size_t>(value)][a].empty())
      sizes[a] = static_cast<std::int64_t>(kept(value, static_cast<std::int64_t>(a), removed).size());
  return sizes;
}

std::vector<ParameterIndices> ChannelGroups::cuts(const Removal& removed) const {
  std::vector<ParameterIndices> all;
  for (std::size_t id = 0; id < graph_.values.size(); ++id) {
    const GraphValue& value = graph_.values[id];
    if (value.parameter.empty()) continue;
    for (std::int64_t a = 0; a < value.value.dim(); ++a) {
      std::vector<std::int64_t> indices = kept(static_cast<ValueId>(id), a, removed);
      if (static_cast<std::int64_t>(indices.size()) < value.value.size(a))
        all.push_back({value.parameter, a, std::move(indices)});
    }
  }
  return all;
}

ChannelProducer ChannelGroups::standing(const ChannelFamily& family, std::string_view parameter,
                                        std::int64_t dim) const {
  ChannelProducer found{std::string(parameter), dim, {}};
  found.rows.resize(family.atoms.size());
  std::map<Label, std::size_t> position;
  for (std::size_t i = 0; i < family.atoms.size(); ++i) position.emplace(family.atoms[i], i);
  const ValueId value = graph_.find(parameter);
  if (value < 0) return found;
  for (const LabelVector& vector : axes_[static_cast<std::size_t>(value)][static_cast<std::size_t>(dim)])
    for (std::size_t j = 0; j < vector.size(); ++j)
      for (const Label atom : labels_.atoms(vector[j]))
        if (const auto at = position.find(atom); at != position.end())
          found.rows[at->second].push_back(static_cast<std::int64_t>(j));
  return found;
}

std::vector<ParameterIndices> ChannelGroups::consumers(const Removal& removed) const {
  std::vector<ParameterIndices> all;
  std::set<std::pair<ValueId, std::int64_t>> told;
  for (const Place& place : consumers_) {
    if (!told.emplace(place.value, place.axis).second) continue;
    const GraphValue& value = graph_.values[static_cast<std::size_t>(place.value)];
    const std::vector<std::int64_t> stay = kept(place.value, place.axis, removed);
    std::vector<std::int64_t> leave;
    for (std::int64_t j = 0; j < value.value.size(place.axis); ++j)
      if (!std::binary_search(stay.begin(), stay.end(), j)) leave.push_back(j);
    if (!leave.empty()) all.push_back({value.parameter, place.axis, std::move(leave)});
  }
  return all;
}

std::vector<ArgumentEdit> ChannelGroups::edits(const Removal& removed) const {
  std::vector<ArgumentEdit> all;
  for (std::size_t id = 0; id < graph_.nodes.size(); ++id) {
    const GraphNode& node = graph_.nodes[id];
    const ChannelRule* rule = find_channel_rule(node.op);
    if (!rule || rule->literal == Literal::none || node.outputs.empty()) continue;

    const auto position = [&](std::string_view name) {
      return static_cast<std::size_t>(std::find(node.argument_names.begin(), node.argument_names.end(), name) -
                                      node.argument_names.begin());
    };
    const auto literal = [&](std::string_view name) -> const c10::IValue* {
      const std::size_t i = position(name);
      return i < node.arguments.size() ? std::get_if<c10::IValue>(&node.arguments[i]) : nullptr;
    };
    const auto set = [&](std::string_view name, c10::IValue now) {
      const c10::IValue* before = literal(name);
      if (before && *before != now) all.push_back({static_cast<NodeId>(id), position(name), std::move(now)});
    };
    const auto first_input = [&]() -> ValueId {
      for (const GraphArgument& argument : node.arguments)
        if (const ValueId* one = std::get_if<ValueId>(&argument)) return *one;
      return -1;
    };
    const ValueId output = node.outputs.front(), input = first_input();
    const std::vector<std::int64_t> after = shape(output, removed);
    const auto axis_of = [&](ValueId of) {
      const std::int64_t d = literal("dim")->toInt(), rank = graph_.values[static_cast<std::size_t>(of)].value.dim();
      return d < 0 ? d + rank : d;
    };
    /// Sizes follow the prediction, except those that say "what is left" (-1).
    const auto follow = [&](std::string_view name, std::int64_t from) {
      const c10::IValue* before = literal(name);
      if (!before || !before->isIntList()) return;
      std::vector<std::int64_t> sizes = before->toIntVector();
      for (std::size_t i = 0; i < sizes.size(); ++i)
        if (sizes[i] != -1) sizes[i] = after.at(static_cast<std::size_t>(from) + i);
      set(name, sizes);
    };

    switch (rule->literal) {
      case Literal::none:
        break;
      case Literal::output_shape:
        follow("size", 0);
        follow("shape", 0);
        break;
      case Literal::unflattened:
        follow("sizes", axis_of(input));
        break;
      case Literal::piece_size:
      case Literal::piece_sizes: {
        const auto a = static_cast<std::size_t>(axis_of(input));
        std::vector<std::int64_t> sizes;
        for (const ValueId piece : node.outputs) sizes.push_back(shape(piece, removed)[a]);
        for (const std::string_view name : {"split_size", "split_sizes"}) {
          const c10::IValue* before = literal(name);
          if (!before) continue;
          if (before->isInt() &&
              graph_.values[static_cast<std::size_t>(output)].value.size(static_cast<std::int64_t>(a)) != sizes.front())
            set(name, sizes.front());
          if (before->isIntList()) set(name, sizes);
        }
        break;
      }
      case Literal::normalized_shape: {
        const std::size_t count = literal("normalized_shape")->toIntVector().size();
        set("normalized_shape",
            std::vector<std::int64_t>(after.end() - static_cast<std::ptrdiff_t>(count), after.end()));
        break;
      }
      case Literal::depthwise_groups: {
        const auto operand = [&](std::string_view name) { return std::get<ValueId>(node.arguments[position(name)]); };
        const ValueId x = operand("input");
        const at::Tensor& value = graph_.values[static_cast<std::size_t>(x)].value;
        const std::int64_t channel =
            value.dim() + 1 - graph_.values[static_cast<std::size_t>(operand("weight"))].value.dim();
        const std::int64_t groups = literal("groups")->toInt();
        if (groups > 1 && value.size(channel) == groups)
          set("groups", shape(x, removed)[static_cast<std::size_t>(channel)]);
        break;
      }
      case Literal::range:
      case Literal::index:
      case Literal::length: {
        const std::int64_t a = axis_of(input), size = graph_.values[static_cast<std::size_t>(input)].value.size(a);
        const std::vector<std::int64_t> stay = kept(input, a, removed);
        if (static_cast<std::int64_t>(stay.size()) == size) break;
        /// Where a place of the old axis (negative: from the end) stands in the new one.
        const auto moved = [&](std::int64_t place) {
          place = std::clamp<std::int64_t>(place < 0 ? place + size : place, 0, size);
          return static_cast<std::int64_t>(std::lower_bound(stay.begin(), stay.end(), place) - stay.begin());
        };
        const c10::IValue* start = literal(rule->literal == Literal::index ? "index" : "start");
        const c10::IValue *end = literal("end"), *length = literal("length");
        if (rule->literal == Literal::index) {
          if (start && start->isInt()) set("index", moved(start->toInt()));
          break;
        }
        if (start && start->isInt() && start->toInt() != 0) set("start", moved(start->toInt()));
        if (end && end->isInt() && end->toInt() < size) set("end", moved(end->toInt()));
        if (length && length->isInt() && start && start->isInt()) set("length", after[static_cast<std::size_t>(a)]);
        break;
      }
      case Literal::scale: {
        // Without a literal the operator divides by the square root of what it sees.
        const at::Tensor& q = graph_.values[static_cast<std::size_t>(input)].value;
        if (shape(input, removed).back() != q.size(-1) && literal("scale") && literal("scale")->isNone())
          set("scale", 1.0 / std::sqrt(static_cast<double>(q.size(-1))));
        break;
      }
    }
  }
  return all;
}

at::Tensor ChannelGroups::restricted(ValueId value, const at::Tensor& tensor, const Removal& removed) const {
  at::Tensor out = tensor;
  for (std::int64_t a = 0; a < tensor.dim(); ++a) {
    const std::vector<std::int64_t> stay = kept(value, a, removed);
    if (static_cast<std::int64_t>(stay.size()) < tensor.size(a)) out = out.index_select(a, at::tensor(stay));
  }
  return out;
}

std::vector<std::size_t> ChannelGroups::families_at(NodeId node, const Removal& removed) const {
  std::set<std::size_t> found;
  const auto add = [&](ValueId value) {
    for (const Axis& axis : axes_[static_cast<std::size_t>(value)])
      for (const LabelVector& vector : axis)
        for (const Label label : vector)
          for (const Label atom : labels_.atoms(label))
            if (removed[static_cast<std::size_t>(atom)])
              found.insert(static_cast<std::size_t>(family_of_[static_cast<std::size_t>(atom)]));
  };
  const GraphNode& at = graph_.nodes[static_cast<std::size_t>(node)];
  for (const GraphArgument& argument : at.arguments) {
    if (const auto* one = std::get_if<ValueId>(&argument); one && *one >= 0) add(*one);
    if (const auto* several = std::get_if<std::vector<ValueId>>(&argument))
      for (const ValueId value : *several)
        if (value >= 0) add(value);
  }
  for (const ValueId value : at.outputs) add(value);
  return {found.begin(), found.end()};
}

std::vector<ChannelGroups::Conflict> ChannelGroups::conflicts(const Removal& removed) const {
  std::vector<Conflict> found;
  const auto conflict = [&](NodeId node, std::string why) {
    found.push_back({node, std::move(why), families_at(node, removed)});
  };
  std::map<NodeId, std::vector<ArgumentEdit>> edits_of;
  for (ArgumentEdit& edit : edits(removed)) edits_of[edit.node].push_back(std::move(edit));

  for (const Groups& groups : groups_) {
    const std::size_t length = groups.axis.front().size() / static_cast<std::size_t>(groups.count);
    std::vector<std::int64_t> stay(static_cast<std::size_t>(groups.count), 0);
    for (std::size_t j = 0; j < groups.axis.front().size(); ++j)
      stay[j / length] += std::none_of(groups.axis.begin(), groups.axis.end(),
                                       [&](const LabelVector& vector) { return leaves(vector[j], removed); });
    if (std::any_of(stay.begin(), stay.end(), [&](std::int64_t n) { return n != stay.front(); }))
      conflict(groups.node, "its groups would differ in width");
  }

  for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
    const GraphNode& node = graph_.nodes[i];
    const auto id = static_cast<NodeId>(i);
    bool empty = false, touched = false;
    const auto look = [&](ValueId value) {
      const std::vector<std::int64_t> after = shape(value, removed);
      const at::IntArrayRef before = graph_.values[static_cast<std::size_t>(value)].value.sizes();
      for (std::size_t a = 0; a < after.size(); ++a) {
        empty |= after[a] == 0 && before[a] != 0;
        touched |= after[a] != before[a];
      }
    };
    for (const ValueId value : node.outputs) look(value);
    std::optional<ValueId> input;
    for (const GraphArgument& argument : node.arguments)
      if (const auto* one = std::get_if<ValueId>(&argument); one && *one >= 0 && !input) input = *one;
    if (input) look(*input);
    if (empty) conflict(id, "no channel would be left");
    const ChannelRule* rule = find_channel_rule(node.op);
    if (empty || !touched || !rule || !rule->moves) continue;

    const at::Tensor& value = graph_.values[static_cast<std::size_t>(*input)].value;
    const at::Tensor numbers = at::arange(value.numel()).view(value.sizes());
    const auto whole = [&](ValueId v) {
      return v == *input ? numbers : graph_.values[static_cast<std::size_t>(v)].value;
    };
    std::vector<c10::IValue> before = argument_values(node, whole);
    std::vector<c10::IValue> after = argument_values(node, [&](ValueId v) { return restricted(v, whole(v), removed); });
    for (const ArgumentEdit& edit : edits_of[id]) after[edit.index] = edit.value;
    bool same = true;
    try {
      const std::vector<at::Tensor> wanted = call_operator(node, std::move(before));
      const std::vector<at::Tensor> got = call_operator(node, std::move(after));
      same = wanted.size() == got.size();
      for (std::size_t k = 0; same && k < got.size(); ++k)
        same = got[k].equal(restricted(node.outputs[k], wanted[k], removed));
    } catch (const std::exception&) {
      same = false;
    }
    if (!same) conflict(id, "it would move other elements than before");
  }
  return found;
}

}  // namespace tersor
