#include <algorithm>
#include <string_view>
#include <unordered_map>

#include <fmt/format.h>

#include "channel_tracer.hpp"

namespace tersor {
namespace {

using Axis = ChannelTracer::Axis;
using Axes = ChannelTracer::Axes;
using Node = GraphNode;
using Tracer = ChannelTracer;

std::vector<std::int64_t> axes_named(const Node& node, const Tracer& t, std::string_view name, std::int64_t rank) {
  const c10::IValue given = t.literal(node, name);
  std::vector<std::int64_t> all;
  if (given.isInt()) all = {given.toInt()};
  if (given.isIntList()) all = given.toIntVector();
  for (std::int64_t& a : all) a = a < 0 ? a + rank : a;
  if (all.empty())
    for (std::int64_t a = 0; a < rank; ++a) all.push_back(a);
  return all;
}

bool contains(const std::vector<std::int64_t>& all, std::int64_t a) {
  return std::find(all.begin(), all.end(), a) != all.end();
}

// --- operators that only move elements ---

void move(Tracer& t, const Node& node) { t.move_elements(node); }

/// Reads fixed places of some axes: those cannot shrink, the others move along.
void index_select(Tracer& t, const Node& node) {
  const ValueId self = t.tensor(node, "self");
  t.fix(t.axis(self, t.dim(node, t.value(self).dim())), "its channels are picked by index");
  t.move_elements(node);
}

void index(Tracer& t, const Node& node) {
  const ValueId self = t.tensor(node, "self");
  const GraphArgument* argument = t.graph.argument(node, "indices");
  const auto* indices = argument ? std::get_if<std::vector<ValueId>>(argument) : nullptr;
  if (!indices) return t.unknown(node);
  std::int64_t a = 0;
  for (const ValueId id : *indices) {
    // A mask takes as many axes as it has, a list of numbers one.
    const bool mask = id >= 0 && (t.value(id).scalar_type() == at::kBool || t.value(id).scalar_type() == at::kByte);
    for (std::int64_t k = mask ? t.value(id).dim() : 1; k > 0; --k, ++a)
      if (id >= 0) t.fix(t.axis(self, a), "its channels are picked by index");
  }
  t.move_elements(node);
}

/// The pieces are equally long: as many channels must leave from each.
void split_equally(Tracer& t, const Node& node) {
  const ValueId self = t.tensor(node, "self");
  const std::int64_t a = t.dim(node, t.value(self).dim()), pieces = static_cast<std::int64_t>(node.outputs.size());
  const bool equal = std::all_of(node.outputs.begin(), node.outputs.end(), [&](ValueId id) {
    return t.value(id).size(a) == t.value(node.outputs.front()).size(a);
  });
  if (equal) t.equal_counts(node, t.axis(self, a), pieces);
  t.move_elements(node);
}

void cat(Tracer& t, const Node& node) {
  std::vector<ValueId> parts = t.tensors(node);
  const ValueId output = node.outputs.front();
  const std::int64_t rank = t.value(output).dim(), along = t.dim(node, rank);
  std::erase_if(parts, [&](ValueId id) { return t.value(id).dim() != rank; });  // legacy empty tensors
  for (std::int64_t a = 0; a < rank; ++a) {
    Axis& out = t.axis(output, a);
    if (a != along) {
      bool labelled = false, bare = false;
      for (const ValueId part : parts) {
        if (!t.wide(part, a)) continue;
        (t.axis(part, a).empty() ? bare : labelled) = true;
        out = t.unify(out, t.axis(part, a));
      }
      if (labelled && bare) t.fix(out, "it is concatenated with a tensor that cannot shrink");
      continue;
    }
    std::size_t vectors = 0;
    for (const ValueId part : parts) vectors = std::max(vectors, t.axis(part, a).size());
    for (std::size_t i = 0; i < vectors; ++i) {
      LabelVector joined;
      for (const ValueId part : parts) {
        const Axis& own = t.axis(part, a);
        const auto size = static_cast<std::size_t>(t.value(part).size(a));
        if (i < own.size()) {
          joined.insert(joined.end(), own[i].begin(), own[i].end());
        } else {
          joined.insert(joined.end(), size, Labels::pinned);
        }
      }
      out.push_back(std::move(joined));
    }
  }
}

void stack(Tracer& t, const Node& node) {
  const std::vector<ValueId> parts = t.tensors(node);
  const ValueId output = node.outputs.front();
  const std::int64_t rank = t.value(output).dim(), along = t.dim(node, rank);
  for (std::int64_t a = 0; a < rank; ++a) {
    if (a == along) continue;
    bool labelled = false, bare = false;
    for (const ValueId part : parts) {
      const Axis& own = t.axis(part, a < along ? a : a - 1);
      (own.empty() ? bare : labelled) = true;
      t.axis(output, a) = t.unify(t.axis(output, a), own);
    }
    if (labelled && bare) t.fix(t.axis(output, a), "it is stacked with a tensor that cannot shrink");
  }
}

/// Every element the same: it can have any shape.
void filled(Tracer& t, const Node& node) {
  const ValueId output = node.outputs.front();
  for (std::int64_t a = 0; a < t.value(output).dim(); ++a)
    if (t.wide(output, a)) t.axis(output, a) = {t.labels.fresh(t.value(output).size(a))};
}

// --- operators with meaning ---

void elementwise(Tracer& t, const Node& node) { t.elementwise(t.tensors(node), node.outputs.front()); }

/// Element-wise in the first tensor; another one gives only a dtype.
void first(Tracer& t, const Node& node) { t.elementwise({t.tensors(node).front()}, node.outputs.front()); }

constexpr std::string_view contracted = "it is contracted with an axis that cannot shrink";

/// output[..., row, column] = sum over k of x[..., row, k] * w[..., k, column], and a bias along the columns. `w_in`
/// and `w_out` are the axes of w; -1: it has no columns.
void product(Tracer& t, const Node& node, ValueId x, ValueId w, std::int64_t w_in, std::int64_t w_out, ValueId bias) {
  const ValueId output = node.outputs.front();
  const std::int64_t xd = t.value(x).dim(), wd = t.value(w).dim(), rank = t.value(output).dim();
  t.contract(x, xd - 1, w, w_in, contracted);
  if (xd > 1) {
    t.axis(output, rank - (w_out < 0 ? 1 : 2)) = t.axis(x, xd - 2);
    t.produces(x, xd - 2);
  }
  if (w_out >= 0) {
    t.axis(output, rank - 1) = t.axis(w, w_out);
    t.produces(w, w_out);
  }
  const std::int64_t x_batch = std::max<std::int64_t>(xd - 2, 0), w_batch = std::max<std::int64_t>(wd - 2, 0);
  const std::int64_t batch = std::max(x_batch, w_batch);
  for (std::int64_t a = 0; a < batch; ++a) {
    const std::int64_t in_x = a - (batch - x_batch), in_w = a - (batch - w_batch);
    const bool wide_x = in_x >= 0 && t.wide(x, in_x), wide_w = in_w >= 0 && t.wide(w, in_w);
    if (wide_x && wide_w) {
      t.axis(output, a) = t.meet(t.axis(x, in_x), t.axis(w, in_w), "it meets a batch axis that cannot shrink");
    } else if (wide_x || wide_w) {
      t.axis(output, a) = wide_x ? t.axis(x, in_x) : t.axis(w, in_w);
    }
  }
  if (bias < 0) return;
  const std::int64_t bd = t.value(bias).dim();
  for (std::int64_t a = 0; a < rank; ++a) {
    const std::int64_t own = bd - rank + a;
    if (own >= 0 && t.wide(bias, own))
      t.axis(output, a) = t.meet(t.axis(output, a), t.axis(bias, own), "its bias or its channels cannot shrink");
  }
}

void linear(Tracer& t, const Node& node) {
  const ValueId w = t.tensor(node, "weight");
  if (t.value(w).dim() != 2) return t.unknown(node);
  product(t, node, t.tensor(node, "input"), w, 1, 0, t.tensor(node, "bias"));
}

void matmul(Tracer& t, const Node& node) {
  const std::vector<ValueId> two = t.tensors(node);
  const std::int64_t wd = t.value(two[1]).dim();
  product(t, node, two[0], two[1], std::max<std::int64_t>(wd - 2, 0), wd > 1 ? wd - 1 : -1, -1);
}

void addmm(Tracer& t, const Node& node) {
  const std::vector<ValueId> three = t.tensors(node);
  const std::int64_t wd = t.value(three[2]).dim();
  product(t, node, three[1], three[2], wd - 2, wd - 1, three[0]);
}

void convolution(Tracer& t, const Node& node) {
  const ValueId x = t.tensor(node, "input"), w = t.tensor(node, "weight"), bias = t.tensor(node, "bias");
  const ValueId output = node.outputs.front();
  const c10::IValue flag = t.literal(node, "transposed");
  const bool transposed = node.op.starts_with("aten::conv_transpose") || (flag.isBool() && flag.toBool());
  const std::int64_t groups = t.literal(node, "groups").toInt();
  const std::int64_t channel = t.value(x).dim() - (t.value(w).dim() - 2) - 1;  // 1, or 0 without a batch axis
  for (std::int64_t a = channel + 1; a < t.value(x).dim(); ++a) t.fix(t.axis(x, a), "a convolution slides along it");
  for (std::int64_t a = 2; a < t.value(w).dim(); ++a) t.fix(t.axis(w, a), "it is a kernel size");
  if (channel == 1) t.axis(output, 0) = t.axis(x, 0);

  if (groups == 1) {
    t.contract(x, channel, w, transposed ? 0 : 1, contracted);
    t.axis(output, channel) = t.axis(w, transposed ? 1 : 0);
    t.produces(w, transposed ? 1 : 0);
  } else if (transposed) {
    t.fix_all(w, "it is a grouped transposed convolution");
    t.fix(t.axis(x, channel), "it enters a grouped transposed convolution");
  } else {
    const std::int64_t inputs = t.value(x).size(channel) / groups, outputs = t.value(w).size(0) / groups;
    const Axis& in = t.axis(x, channel);
    const Axis& out = t.axis(w, 0);
    if (inputs == 1) {
      // A channel of its own per group: the group leaves with it.
      Axis repeated = in;
      for (LabelVector& vector : repeated) {
        LabelVector spread;
        for (const Label label : vector) spread.insert(spread.end(), static_cast<std::size_t>(outputs), label);
        vector = std::move(spread);
      }
      t.axis(output, channel) = t.meet(repeated, out, "it is a depthwise convolution of channels that cannot leave");
      for (const LabelVector& vector : out)
        for (std::int64_t g = 0; g < groups; ++g)
          for (std::int64_t j = 1; j < outputs; ++j)
            t.labels.unite(vector[static_cast<std::size_t>(g * outputs)],
                           vector[static_cast<std::size_t>(g * outputs + j)]);
    } else {
      // The same offset of every group's input leaves together; outputs keep equal counts.
      for (const LabelVector& vector : in)
        for (std::int64_t i = 0; i < inputs; ++i)
          for (std::int64_t g = 1; g < groups; ++g)
            t.labels.unite(vector[static_cast<std::size_t>(i)], vector[static_cast<std::size_t>(g * inputs + i)]);
      Axis offset = in;
      for (LabelVector& vector : offset) vector.resize(static_cast<std::size_t>(inputs));
      t.contract(x, channel, offset, w, 1, contracted);
      t.equal_counts(node, out, groups);
      t.axis(output, channel) = out;
    }
    t.produces(w, 0);
  }
  if (bias >= 0 && t.wide(bias, 0))
    t.axis(output, channel) =
        t.meet(t.axis(output, channel), t.axis(bias, 0), "its bias or its channels cannot shrink");
}

void batch_norm(Tracer& t, const Node& node) {
  const ValueId x = t.tensor(node, "input"), output = node.outputs.front();
  t.axes(output) = t.axes(x);
  Axis channels = t.axis(x, 1);
  for (const std::string_view name : {"weight", "bias", "running_mean", "running_var"}) {
    const ValueId id = t.tensor(node, name);
    if (id >= 0 && t.wide(id, 0))
      channels = t.meet(channels, t.axis(id, 0), "it normalizes channels that cannot leave");
  }
  t.axis(output, 1) = channels;
  for (std::int64_t a = 2; a < t.value(x).dim(); ++a) t.changes_statistics(t.axis(x, a));
}

/// LayerNorm and RMSNorm.
void layer_norm(Tracer& t, const Node& node) {
  const ValueId x = t.tensor(node, "input"), output = node.outputs.front();
  const auto normalized = static_cast<std::int64_t>(t.literal(node, "normalized_shape").toIntVector().size());
  t.axes(output) = t.axes(x);
  for (std::int64_t j = 0; j < normalized; ++j) {
    const std::int64_t a = t.value(x).dim() - normalized + j;
    if (!t.wide(x, a)) continue;
    Axis& all = t.axis(output, a);
    for (const std::string_view name : {"weight", "bias"}) {
      const ValueId id = t.tensor(node, name);
      if (id >= 0) all = t.meet(all, t.axis(id, j), "it normalizes an axis that cannot shrink");
    }
    t.changes_statistics(all);
  }
}

void group_norm(Tracer& t, const Node& node) {
  const ValueId x = t.tensor(node, "input"), output = node.outputs.front();
  t.axes(output) = t.axes(x);
  Axis& channels = t.axis(output, 1);
  for (const std::string_view name : {"weight", "bias"}) {
    const ValueId id = t.tensor(node, name);
    if (id >= 0 && t.wide(id, 0))
      channels = t.meet(channels, t.axis(id, 0), "it normalizes channels that cannot leave");
  }
  for (std::int64_t a = 1; a < t.value(x).dim(); ++a) t.changes_statistics(t.axis(output, a));
  t.equal_counts(node, channels, t.literal(node, "num_groups").toInt());
}

void prelu(Tracer& t, const Node& node) {
  const ValueId x = t.tensor(node, "self"), w = t.tensor(node, "weight"), output = node.outputs.front();
  t.axes(output) = t.axes(x);
  if (t.value(w).numel() > 1)
    t.axis(output, 1) = t.meet(t.axis(x, 1), t.axis(w, 0), "it scales channels that cannot leave");
}

/// Works within a channel on the last `spatial` axes.
template <std::int64_t spatial>
void window(Tracer& t, const Node& node) {
  const ValueId x = t.tensors(node).front();
  const std::int64_t rank = t.value(x).dim();
  for (std::int64_t a = rank - spatial; a < rank; ++a) t.fix(t.axis(x, a), fmt::format("{} works along it", node.op));
  for (const ValueId output : node.outputs)
    for (std::int64_t a = 0; a < rank - spatial; ++a) t.axis(output, a) = t.axis(x, a);
}

void pad(Tracer& t, const Node& node) {
  const ValueId x = t.tensor(node, "self"), output = node.outputs.front();
  const std::vector<std::int64_t> widths = t.literal(node, "pad").toIntVector();
  const std::int64_t rank = t.value(x).dim();
  for (std::int64_t a = 0; a < rank; ++a) {
    const auto at = static_cast<std::size_t>(2 * (rank - 1 - a));
    if (at + 1 < widths.size() && (widths[at] != 0 || widths[at + 1] != 0)) {
      t.fix(t.axis(x, a), "it is padded");
    } else {
      t.axis(output, a) = t.axis(x, a);
    }
  }
}

/// Drops axes; what is computed over them changes when some of their channels leave.
void reduce(Tracer& t, const Node& node) {
  const ValueId x = t.tensors(node).front(), output = node.outputs.front();
  const std::int64_t rank = t.value(x).dim();
  const std::vector<std::int64_t> over = axes_named(node, t, "dim", rank);
  const bool keeps = t.value(output).dim() == rank;
  std::int64_t b = 0;
  for (std::int64_t a = 0; a < rank; ++a) {
    if (contains(over, a)) {
      t.changes_statistics(t.axis(x, a));
      b += keeps;
    } else {
      t.axis(output, b++) = t.axis(x, a);
    }
  }
}

/// Reductions that also tell positions, which would move: the axis stays whole.
void reduce_with_positions(Tracer& t, const Node& node) {
  if (t.tensors(node).size() > 1) return elementwise(t, node);
  const ValueId x = t.tensors(node).front();
  const std::int64_t rank = t.value(x).dim();
  const bool positions = node.outputs.size() > 1 || node.op.starts_with("aten::arg");
  const std::vector<std::int64_t> over = axes_named(node, t, "dim", rank);
  if (positions)
    for (const std::int64_t a : over) t.fix(t.axis(x, a), fmt::format("{} tells positions along it", node.op));
  for (const ValueId output : node.outputs) {
    Node one = node;
    one.outputs = {output};
    reduce(t, one);
  }
}

void softmax(Tracer& t, const Node& node) {
  const ValueId x = t.tensor(node, "self"), output = node.outputs.front();
  const std::int64_t d = t.dim(node, t.value(x).dim());
  t.axes(output) = t.axes(x);
  t.fix(t.axis(x, d), "a softmax runs over it");
}

void glu(Tracer& t, const Node& node) {
  const ValueId x = t.tensor(node, "self"), output = node.outputs.front();
  const std::int64_t d = t.dim(node, t.value(x).dim());
  t.axes(output) = t.axes(x);
  Axis a = t.axis(x, d), b = a;
  for (LabelVector& vector : a) vector.resize(vector.size() / 2);
  for (LabelVector& vector : b)
    vector.erase(vector.begin(), vector.begin() + static_cast<std::ptrdiff_t>(vector.size() / 2));
  t.axis(output, d) = t.unify(a, b);
}

void embedding(Tracer& t, const Node& node) {
  const ValueId w = t.tensor(node, "weight"), indices = t.tensor(node, "indices"), output = node.outputs.front();
  t.fix(t.axis(w, 0), "it is a vocabulary");
  for (std::int64_t a = 0; a < t.value(indices).dim(); ++a) t.axis(output, a) = t.axis(indices, a);
  t.axis(output, t.value(output).dim() - 1) = t.axis(w, 1);
}

void attention(Tracer& t, const Node& node) {
  const ValueId q = t.tensor(node, "query"), k = t.tensor(node, "key"), v = t.tensor(node, "value");
  const ValueId mask = t.tensor(node, "attn_mask"), output = node.outputs.front();
  const std::int64_t rank = t.value(q).dim();
  t.contract(q, rank - 1, k, rank - 1, contracted);
  t.contract(k, rank - 2, v, rank - 2, contracted);
  t.fix(t.axis(k, rank - 2), "a softmax runs over it");
  for (std::int64_t a = 0; a < rank - 2; ++a) {
    if (t.value(q).size(a) != t.value(k).size(a)) {
      for (const ValueId id : {q, k, v}) t.fix(t.axis(id, a), "its heads are shared inside the operator");
      continue;
    }
    if (!t.wide(q, a)) continue;
    Axis all = t.meet(t.meet(t.axis(q, a), t.axis(k, a), contracted), t.axis(v, a), contracted);
    const std::int64_t own = mask < 0 ? -1 : t.value(mask).dim() - rank + a;
    if (own >= 0 && t.wide(mask, own)) all = t.meet(all, t.axis(mask, own), "its mask cannot shrink");
    t.axis(output, a) = std::move(all);
  }
  t.axis(output, rank - 2) = t.axis(q, rank - 2);
  t.axis(output, rank - 1) = t.axis(v, rank - 1);
}

/// LSTM, GRU: the gates' rows are the hidden units repeated; all layers and directions of one call are equally wide.
void recurrent(Tracer& t, const Node& node) {
  const bool lstm = node.op == "aten::lstm";
  const std::int64_t gates = lstm ? 4 : 3;
  const std::vector<ValueId> all = t.tensors(node);
  const std::size_t states = lstm ? 2 : 1;
  const auto layers = static_cast<std::size_t>(t.literal(node, "num_layers").toInt());
  const std::size_t directions = t.literal(node, "bidirectional").toBool() ? 2 : 1;
  const std::size_t each = t.literal(node, "has_biases").toBool() ? 4 : 2;
  if (all.size() != 1 + states + layers * directions * each || t.value(all[0]).dim() != 3) return t.unknown(node);
  const ValueId x = all[0], output = node.outputs.front();
  const std::int64_t hidden = t.value(all[1]).size(2);
  for (std::size_t s = 1; s <= states; ++s)
    if (t.value(all[s]).size(2) != hidden) return t.unknown(node);  // projections

  const Axis units = hidden > 1 ? Axis{t.labels.fresh(hidden)} : Axis{};
  const auto repeated = [&](std::int64_t times) {
    Axis axis = units;
    for (LabelVector& vector : axis)
      for (std::int64_t i = 1; i < times; ++i) vector.insert(vector.end(), units.front().begin(), units.front().end());
    return axis;
  };
  constexpr std::string_view why = "its hidden units cannot leave";
  for (std::size_t s = 1; s <= states; ++s) {
    t.meet(t.axis(all[s], 2), units, why);
    t.fix(t.axis(all[s], 0), "it numbers layers");
  }
  t.axis(output, 2) = repeated(static_cast<std::int64_t>(directions));
  for (std::size_t layer = 0; layer < layers; ++layer) {
    for (std::size_t d = 0; d < directions; ++d) {
      const std::size_t at = 1 + states + (layer * directions + d) * each;
      for (std::size_t i = 0; i < each; ++i) t.meet(t.axis(all[at + i], 0), repeated(gates), why);
      if (layer == 0) {
        t.contract(x, 2, all[at], 1, contracted);
      } else {
        t.contract(output, 2, all[at], 1, contracted);
      }
      t.contract(output, 2, units, all[at + 1], 1, why);
      t.produces(all[at], 0);
      t.produces(all[at + 1], 0);
    }
  }
  const bool batch_first = t.literal(node, "batch_first").toBool();
  t.axis(output, batch_first ? 0 : 1) = t.axis(x, batch_first ? 0 : 1);
  for (std::size_t s = 1; s <= states; ++s) t.axis(node.outputs[s], 2) = units;
}

struct Row {
  std::string_view op;  ///< without `aten::`
  ChannelRule rule;
};

constexpr bool moves = true;

// The one list of operators. A trailing underscore (in place) falls back to the row without it.
constexpr Row rows[] = {
    // elements move
    {"view", {move, Literal::output_shape, moves}},
    {"reshape", {move, Literal::output_shape, moves}},
    {"_unsafe_view", {move, Literal::output_shape, moves}},
    {"view_as", {move, Literal::none, moves}},
    {"reshape_as", {move, Literal::none, moves}},
    {"expand", {move, Literal::output_shape, moves}},
    {"expand_as", {move, Literal::none, moves}},
    {"broadcast_to", {move, Literal::output_shape, moves}},
    {"unflatten", {move, Literal::unflattened, moves}},
    {"flatten", {move, Literal::none, moves}},
    {"ravel", {move, Literal::none, moves}},
    {"permute", {move, Literal::none, moves}},
    {"transpose", {move, Literal::none, moves}},
    {"swapaxes", {move, Literal::none, moves}},
    {"swapdims", {move, Literal::none, moves}},
    {"movedim", {move, Literal::none, moves}},
    {"moveaxis", {move, Literal::none, moves}},
    {"t", {move, Literal::none, moves}},
    {"numpy_T", {move, Literal::none, moves}},
    {"mT", {move, Literal::none, moves}},
    {"adjoint", {move, Literal::none, moves}},
    {"squeeze", {move, Literal::none, moves}},
    {"unsqueeze", {move, Literal::none, moves}},
    {"repeat", {move, Literal::none, moves}},
    {"tile", {move, Literal::none, moves}},
    {"repeat_interleave", {move, Literal::none, moves}},
    {"slice", {move, Literal::range, moves}},
    {"select", {move, Literal::index, moves}},
    {"narrow", {move, Literal::length, moves}},
    {"index", {index, Literal::none, moves}},
    {"index_select", {index_select, Literal::none, moves}},
    {"flip", {move, Literal::none, moves}},
    {"roll", {move, Literal::none, moves}},
    {"unfold", {move, Literal::none, moves}},
    {"pixel_shuffle", {move, Literal::none, moves}},
    {"pixel_unshuffle", {move, Literal::none, moves}},
    {"channel_shuffle", {move, Literal::none, moves}},
    {"unbind", {move, Literal::none, moves}},
    {"chunk", {split_equally, Literal::none, moves}},
    {"unsafe_chunk", {split_equally, Literal::none, moves}},
    {"tensor_split", {move, Literal::none, moves}},
    {"split", {split_equally, Literal::piece_size, moves}},
    {"unsafe_split", {split_equally, Literal::piece_size, moves}},
    {"split_with_sizes", {move, Literal::piece_sizes, moves}},
    {"unsafe_split_with_sizes", {move, Literal::piece_sizes, moves}},
    {"contiguous", {move, Literal::none, moves}},
    {"clone", {move, Literal::none, moves}},
    {"detach", {move, Literal::none, moves}},
    {"alias", {move, Literal::none, moves}},
    {"cat", {cat}},
    {"concat", {cat}},
    {"concatenate", {cat}},
    {"stack", {stack}},
    {"zeros", {filled, Literal::output_shape}},
    {"ones", {filled, Literal::output_shape}},
    {"full", {filled, Literal::output_shape}},
    {"new_zeros", {filled, Literal::output_shape}},
    {"new_ones", {filled, Literal::output_shape}},
    {"new_full", {filled, Literal::output_shape}},

    // contractions
    {"linear", {linear}},
    {"matmul", {matmul}},
    {"mm", {matmul}},
    {"bmm", {matmul}},
    {"addmm", {addmm}},
    {"baddbmm", {addmm}},
    {"conv1d", {convolution, Literal::depthwise_groups}},
    {"conv2d", {convolution, Literal::depthwise_groups}},
    {"conv3d", {convolution, Literal::depthwise_groups}},
    {"_convolution", {convolution, Literal::depthwise_groups}},
    {"convolution", {convolution, Literal::depthwise_groups}},
    {"conv_transpose1d", {convolution}},
    {"conv_transpose2d", {convolution}},
    {"conv_transpose3d", {convolution}},
    {"scaled_dot_product_attention", {attention, Literal::scale}},
    {"lstm", {recurrent}},
    {"gru", {recurrent}},
    {"embedding", {embedding}},

    // norms, windows, reductions
    {"batch_norm", {batch_norm}},
    {"instance_norm", {batch_norm}},
    {"layer_norm", {layer_norm, Literal::normalized_shape}},
    {"rms_norm", {layer_norm, Literal::normalized_shape}},
    {"group_norm", {group_norm}},
    {"prelu", {prelu}},
    {"glu", {glu}},
    {"max_pool1d", {window<1>}},
    {"max_pool2d", {window<2>}},
    {"max_pool3d", {window<3>}},
    {"max_pool2d_with_indices", {window<2>}},
    {"avg_pool1d", {window<1>}},
    {"avg_pool2d", {window<2>}},
    {"avg_pool3d", {window<3>}},
    {"adaptive_avg_pool1d", {window<1>}},
    {"adaptive_avg_pool2d", {window<2>}},
    {"adaptive_avg_pool3d", {window<3>}},
    {"adaptive_max_pool1d", {window<1>}},
    {"adaptive_max_pool2d", {window<2>}},
    {"upsample_nearest1d", {window<1>}},
    {"upsample_nearest2d", {window<2>}},
    {"upsample_nearest3d", {window<3>}},
    {"upsample_linear1d", {window<1>}},
    {"upsample_bilinear2d", {window<2>}},
    {"upsample_bicubic2d", {window<2>}},
    {"reflection_pad1d", {window<1>}},
    {"reflection_pad2d", {window<2>}},
    {"replication_pad1d", {window<1>}},
    {"replication_pad2d", {window<2>}},
    {"pad", {pad}},
    {"constant_pad_nd", {pad}},
    {"mean", {reduce}},
    {"sum", {reduce}},
    {"amax", {reduce}},
    {"amin", {reduce}},
    {"var", {reduce}},
    {"std", {reduce}},
    {"norm", {reduce}},
    {"linalg_vector_norm", {reduce}},
    {"logsumexp", {reduce}},
    {"max", {reduce_with_positions}},
    {"min", {reduce_with_positions}},
    {"argmax", {reduce_with_positions}},
    {"argmin", {reduce_with_positions}},
    {"softmax", {softmax}},
    {"log_softmax", {softmax}},

    // element by element
    {"to", {first}},
    {"type_as", {first}},
    {"dropout", {first}},
    {"feature_dropout", {first}},
    {"relu", {elementwise}},
    {"relu6", {elementwise}},
    {"gelu", {elementwise}},
    {"silu", {elementwise}},
    {"mish", {elementwise}},
    {"elu", {elementwise}},
    {"celu", {elementwise}},
    {"selu", {elementwise}},
    {"sigmoid", {elementwise}},
    {"log_sigmoid", {elementwise}},
    {"tanh", {elementwise}},
    {"softplus", {elementwise}},
    {"softsign", {elementwise}},
    {"leaky_relu", {elementwise}},
    {"rrelu", {elementwise}},
    {"threshold", {elementwise}},
    {"hardswish", {elementwise}},
    {"hardsigmoid", {elementwise}},
    {"hardtanh", {elementwise}},
    {"hardshrink", {elementwise}},
    {"softshrink", {elementwise}},
    {"tanhshrink", {elementwise}},
    {"abs", {elementwise}},
    {"neg", {elementwise}},
    {"exp", {elementwise}},
    {"expm1", {elementwise}},
    {"log", {elementwise}},
    {"log1p", {elementwise}},
    {"sqrt", {elementwise}},
    {"rsqrt", {elementwise}},
    {"square", {elementwise}},
    {"reciprocal", {elementwise}},
    {"erf", {elementwise}},
    {"sin", {elementwise}},
    {"cos", {elementwise}},
    {"sign", {elementwise}},
    {"floor", {elementwise}},
    {"ceil", {elementwise}},
    {"round", {elementwise}},
    {"pow", {elementwise}},
    {"clamp", {elementwise}},
    {"clamp_min", {elementwise}},
    {"clamp_max", {elementwise}},
    {"clip", {elementwise}},
    {"nan_to_num", {elementwise}},
    {"zeros_like", {elementwise}},
    {"ones_like", {elementwise}},
    {"full_like", {elementwise}},
    {"add", {elementwise}},
    {"sub", {elementwise}},
    {"rsub", {elementwise}},
    {"mul", {elementwise}},
    {"multiply", {elementwise}},
    {"div", {elementwise}},
    {"true_divide", {elementwise}},
    {"floor_divide", {elementwise}},
    {"remainder", {elementwise}},
    {"fmod", {elementwise}},
    {"addcmul", {elementwise}},
    {"addcdiv", {elementwise}},
    {"lerp", {elementwise}},
    {"where", {elementwise}},
    {"maximum", {elementwise}},
    {"minimum", {elementwise}},
    {"masked_fill", {elementwise}},
    {"eq", {elementwise}},
    {"ne", {elementwise}},
    {"lt", {elementwise}},
    {"le", {elementwise}},
    {"gt", {elementwise}},
    {"ge", {elementwise}},
    {"logical_and", {elementwise}},
    {"logical_or", {elementwise}},
    {"logical_not", {elementwise}},
    {"bitwise_and", {elementwise}},
    {"bitwise_or", {elementwise}},
    {"bitwise_not", {elementwise}},
    {"isnan", {elementwise}},
    {"isinf", {elementwise}},
};

}  // namespace

const ChannelRule* find_channel_rule(std::string_view op) {
  static const auto* const table = [] {
    auto* map = new std::unordered_map<std::string_view, const ChannelRule*>();
    for (const Row& row : rows) map->emplace(row.op, &row.rule);
    return map;
  }();
  // A view whose memory was written through another one: what wrote has spoken to the labels already.
  static constexpr ChannelRule written_through{first};
  if (op == "tersor::written_through") return &written_through;
  constexpr std::string_view space = "aten::";
  if (!op.starts_with(space)) return nullptr;
  op.remove_prefix(space.size());
  auto found = table->find(op);
  if (found == table->end() && op.ends_with('_')) found = table->find(op.substr(0, op.size() - 1));
  return found == table->end() ? nullptr : found->second;
}

}  // namespace tersor
