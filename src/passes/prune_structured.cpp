#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/ranges.h>

#include "tersor/analysis/channel_groups.hpp"
#include "tersor/analysis/cost.hpp"
#include "tersor/analysis/importance.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/model/targets.hpp"
#include "tersor/passes/prune.hpp"

namespace tersor::prune {
namespace {

/// Which layer a parameter belongs to: the longest layer name in front of it, else its own path.
std::string layer_of(const std::string& parameter, const std::vector<Layer>& layers) {
  std::string best;
  for (const Layer& layer : layers)
    if (layer.weight == parameter || (parameter.starts_with(layer.name + ".") && layer.name.size() > best.size()))
      best = layer.name;
  return best.empty() ? parameter : best;
}

std::vector<std::string> layers_of(const ChannelFamily& family, const std::vector<Layer>& layers) {
  std::vector<std::string> names;
  for (const ChannelProducer& producer : family.producers) {
    std::string name = layer_of(producer.parameter, layers);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
  }
  return names;
}

/// `a, b, c`; of many the first few and how many more: a trunk may have dozens.
std::string joined(const std::vector<std::string>& names) {
  constexpr std::size_t most = 4;
  if (names.size() <= most + 1) return fmt::format("{}", fmt::join(names, ", "));
  return fmt::format("{} and {} more", fmt::join(names.begin(), names.begin() + most, ", "), names.size() - most);
}

/// What `targets` and `ignore` say about families.
class Choice {
 public:
  Choice(const std::vector<Layer>& layers, const Structured& options, std::vector<std::string>& warnings)
      : all_(options.targets.empty()) {
    const auto any = [](const Layer&) { return true; };
    std::vector<std::string> unused;
    for (const Layer& layer : select_layers(layers, options.targets, {}, any, unused)) targeted_.insert(layer.name);
    for (const Layer& layer : select_layers(layers, {}, options.ignore, any, warnings)) allowed_.insert(layer.name);
    for (const Layer& layer : layers) known_.insert(layer.name);
  }

  bool targets(const std::string& layer) const { return all_ || targeted_.contains(layer); }
  bool ignores(const std::string& layer) const { return known_.contains(layer) && !allowed_.contains(layer); }

 private:
  bool all_;
  std::set<std::string> targeted_, allowed_, known_;
};

/// How many atoms leave from each cell of a family.
std::int64_t per_cell(const ChannelFamily& family, const Structured& options) {
  const std::int64_t width = family.width();
  std::map<std::int32_t, std::int64_t> size;
  for (const std::int32_t cell : family.cells) ++size[cell];
  const auto cells = static_cast<std::int64_t>(size.size());
  std::int64_t smallest = width;
  for (const auto& [cell, n] : size) smallest = std::min(smallest, n);

  const std::int64_t wanted =
      options.amount.is_count() ? std::min(options.amount.count(), width) : options.amount.of(width);
  // Fewer leave until what stays is wide enough; `round_to` and `min_channels` count channels, of which a head has
  // several.
  const auto fits = [&](std::int64_t leave) {
    const std::int64_t channels = (width - leave * cells) * family.rows_per_atom();
    return leave < smallest && channels >= options.min_channels && channels % options.round_to == 0;
  };
  std::int64_t leave = wanted / cells;
  while (leave > 0 && !fits(leave)) --leave;
  return leave;
}

/// Atoms of a family that leave, those of least importance from each cell.
LabelVector choose(const ChannelFamily& family, const Structured& options, const Model& model) {
  const std::vector<double> scores =
      l1_importance(family, [&](std::string_view parameter) { return model.tensor(parameter); });
  check(std::all_of(scores.begin(), scores.end(), [](double score) { return std::isfinite(score); }),
        ErrorCode::NonFiniteWeight, "tensor '{}' holds values that are NaN or infinite; nothing was pruned",
        escaped(family.producers.front().parameter));
  std::map<std::int32_t, std::int64_t> left;
  const std::int64_t leave = per_cell(family, options);
  for (const std::int32_t cell : family.cells) left[cell] = leave;
  LabelVector atoms;
  for (const std::size_t i : ascending(scores))
    if (left[family.cells[i]]-- > 0) atoms.push_back(family.atoms[i]);
  return atoms;
}

/// A removal in the making: which families take part, and why others do not.
struct Plan {
  std::vector<LabelVector> atoms;              ///< of each family, that leave; empty: takes no part
  std::map<std::size_t, std::string> refused;  ///< family: why

  Removal removal(const ChannelGroups& groups, const std::set<std::size_t>* only = nullptr) const {
    Removal removed = groups.nothing();
    for (std::size_t f = 0; f < atoms.size(); ++f)
      if (!only || only->contains(f))
        for (const Label atom : atoms[f]) removed[static_cast<std::size_t>(atom)] = true;
    return removed;
  }
  std::set<std::size_t> families() const {
    std::set<std::size_t> taking_part;
    for (std::size_t f = 0; f < atoms.size(); ++f)
      if (!atoms[f].empty()) taking_part.insert(f);
    return taking_part;
  }
  void refuse(std::size_t family, std::string why) {
    atoms[family].clear();
    refused.emplace(family, std::move(why));
  }
};

std::string place(const GraphNode& node) {
  return node.scope.empty() ? escaped(node.op) : fmt::format("{} in '{}'", escaped(node.op), escaped(node.scope));
}

/// Takes out families whose removal some operator would not follow.
void settle(const ChannelGroups& groups, Plan& plan) {
  while (!plan.families().empty()) {
    const std::vector<ChannelGroups::Conflict> conflicts = groups.conflicts(plan.removal(groups));
    if (conflicts.empty()) return;
    for (const ChannelGroups::Conflict& conflict : conflicts)
      for (const std::size_t family : conflict.families)
        plan.refuse(family, fmt::format("{}: {}", place(groups.graph().nodes[static_cast<std::size_t>(conflict.node)]),
                                        conflict.why));
  }
}

/// Operators whose appearance may depend on a tensor's layout say nothing about the network.
std::vector<const GraphNode*> course(const Graph& graph) {
  std::vector<const GraphNode*> nodes;
  for (const GraphNode& node : graph.nodes)
    if (node.op != "aten::contiguous" && node.op != "tersor::written_through") nodes.push_back(&node);
  return nodes;
}

/// Whether an argument is a factor, a term or the like: a number that says nothing about shapes. The code may compute
/// it from a width (1/sqrt of a head's size).
bool is_number(const GraphNode& node, std::size_t argument) {
  const auto op = c10::Dispatcher::singleton().findSchema({node.op, node.overload});
  if (!op || argument >= op->schema().arguments().size()) return false;
  const c10::TypeKind kind = op->schema().arguments()[argument].type()->kind();
  return kind == c10::TypeKind::NumberType || kind == c10::TypeKind::FloatType;
}

/// The first place where the shrunken network does something else than predicted; nothing if none.
std::optional<std::string> deviation(const ChannelGroups& groups, const Removal& removed, const Graph& after) {
  const std::vector<const GraphNode*> wanted = course(groups.graph()), got = course(after);
  for (std::size_t i = 0; i < std::min(wanted.size(), got.size()); ++i) {
    const GraphNode &a = *wanted[i], &b = *got[i];
    if (a.op != b.op || a.outputs.size() != b.outputs.size()) break;
    for (std::size_t k = 0; k < a.outputs.size(); ++k) {
      const std::vector<std::int64_t> shape = groups.shape(a.outputs[k], removed);
      const at::IntArrayRef is = after.values[static_cast<std::size_t>(b.outputs[k])].value.sizes();
      if (is != at::IntArrayRef(shape))
        return fmt::format("{} gives [{}] where [{}] was expected", place(a), fmt::join(is.begin(), is.end(), ", "),
                           fmt::join(shape, ", "));
    }
    for (std::size_t k = 0; k < std::min(a.arguments.size(), b.arguments.size()); ++k) {
      const auto *before = std::get_if<c10::IValue>(&a.arguments[k]), *now = std::get_if<c10::IValue>(&b.arguments[k]);
      if (before && now && is_number(a, k) && *before != *now)
        return fmt::format("{} computes '{}' from a width, which would change what it means", place(a),
                           a.argument_names[k]);
    }
  }
  if (wanted.size() != got.size()) return "the network takes another course than before";
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (wanted[i]->op != got[i]->op) return fmt::format("{} does not run any more", place(*wanted[i]));
  return std::nullopt;
}

/// Shrinks the model and runs it; says what went wrong, and leaves the model then as it is.
std::optional<std::string> apply(Model& model, const ChannelGroups& groups, const Removal& removed) {
  try {
    for (const ArgumentEdit& edit : groups.edits(removed)) model.set_argument(edit.node, edit.index, edit.value);
    for (const ParameterIndices& cut : groups.cuts(removed)) model.keep(cut.parameter, cut.dim, cut.indices);
    model.refresh();
    return deviation(groups, removed, model.graph());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::UnsupportedGraph && error.code() != ErrorCode::UnsupportedModel) throw;
    return error.message();
  }
}

/// Applies the plan. When the network does not follow, family by family, and those that break it are taken out.
void carry_out(Model& model, const Model& before, const ChannelGroups& groups, Plan& plan) {
  if (!apply(model, groups, plan.removal(groups))) return;
  std::set<std::size_t> good;
  bool whole = false;  // the model is what `good` says
  for (const std::size_t family : plan.families()) {
    std::set<std::size_t> attempt = good;
    attempt.insert(family);
    model.assign(before);
    const std::optional<std::string> wrong = apply(model, groups, plan.removal(groups, &attempt));
    whole = !wrong;
    if (wrong)
      plan.refuse(family, *wrong);
    else
      good = std::move(attempt);
  }
  if (whole) return;
  model.assign(before);
  const std::optional<std::string> wrong = good.empty() ? std::nullopt : apply(model, groups, plan.removal(groups));
  check(!wrong, ErrorCode::Internal, "a removal that ran once does not run again: {}", wrong.value_or(""));
}

/// Compares the shrunken network with the one before it whose readers of the removed channels are zero.
///
/// Both compute the same sums, one with zeros among the terms. Rounding of a sum of K terms is a random walk of about
/// eps * sqrt(K) of its size; the operators' contributions add, and 8 covers the walk's tail.
void compare(const Model& shrunken, const Model& before, const ChannelGroups& groups, const Removal& removed) {
  Model masked = before.clone();
  for (const ParameterIndices& reader : groups.consumers(removed)) {
    at::Tensor values = masked.tensor(reader.parameter).clone();
    for (const std::int64_t index : reader.indices) values.select(reader.dim, index).zero_();
    masked.rewrite(reader.parameter, values);
  }
  double walk = 0;
  for (const GraphNode& node : groups.graph().nodes)
    walk += std::sqrt(static_cast<double>(macs_per_output(groups.graph(), node)));

  const std::vector<at::Tensor> wanted = masked.forward(before.example()), got = shrunken.forward(before.example());
  check(wanted.size() == got.size(), ErrorCode::VerificationFailed, "the network has {} outputs instead of {}",
        got.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    check(wanted[i].sizes() == got[i].sizes(), ErrorCode::VerificationFailed, "output {} changed its shape", i);
    if (wanted[i].numel() == 0) continue;
    const at::Tensor a = wanted[i].to(at::kDouble), b = got[i].to(at::kDouble);
    const double eps = wanted[i].scalar_type() == at::kDouble     ? 0x1p-53
                       : wanted[i].scalar_type() == at::kHalf     ? 0x1p-11
                       : wanted[i].scalar_type() == at::kBFloat16 ? 0x1p-8
                                                                  : 0x1p-24;
    const double size = a.abs().max().item().toDouble(), difference = a.sub(b).abs().max().item().toDouble();
    const double allowed = 8 * eps * walk * size;
    check(difference <= allowed, ErrorCode::VerificationFailed,
          "output {} differs by {:.3g} from the network whose removed channels are cut off; rounding explains {:.3g}",
          i, difference, allowed);
  }
}

std::int64_t elements(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

}  // namespace

Changed Structured::run(Model& model, PassContext& context) const {
  amount.validate();
  PassReport& report = context.report;
  const std::vector<Layer> layers = model.layers();
  const Choice choice(layers, *this, report.warnings);
  const ChannelGroups groups(model.graph());
  const Graph& graph = groups.graph();
  if (!graph.data_dependent.empty()) {
    for (const std::string& branch : graph.data_dependent)
      report.skip(branch,
                  "the branch depends on values, and the way not taken would read removed channels; nothing "
                  "was pruned");
    return Changed::nothing;
  }

  Plan plan;
  plan.atoms.resize(groups.families().size());
  const auto aimed_at = [&](const std::vector<std::string>& names) {
    return std::any_of(names.begin(), names.end(), [&](const auto& name) { return choice.targets(name); }) &&
           std::none_of(names.begin(), names.end(), [&](const auto& name) { return choice.ignores(name); });
  };
  // Heads before the size of a head: a producer's width shrinks along one of its factors.
  std::vector<std::size_t> order(groups.families().size());
  for (std::size_t f = 0; f < order.size(); ++f) order[f] = f;
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return groups.families()[a].slot < groups.families()[b].slot; });
  std::set<std::string> factored;
  for (const std::size_t f : order) {
    const ChannelFamily& family = groups.families()[f];
    if (!aimed_at(layers_of(family, layers))) continue;
    const auto taken = [&](const ChannelProducer& producer) { return factored.contains(producer.parameter); };
    if (family.factored && std::any_of(family.producers.begin(), family.producers.end(), taken)) continue;
    plan.atoms[f] = choose(family, *this, model);
    if (plan.atoms[f].empty()) {
      if (amount != Amount(0) && amount != Amount(0.0))
        plan.refused.emplace(f, fmt::format("{} wide: nothing may leave with amount={}, round_to={}, min_channels={}",
                                            family.width(), amount.text(), round_to, min_channels));
    } else if (family.factored) {
      for (const ChannelProducer& producer : family.producers) factored.insert(producer.parameter);
    }
  }
  for (const std::size_t f : plan.families()) {
    const std::set<std::size_t> alone{f};
    const Removal removed = plan.removal(groups, &alone);
    for (const auto& [value, branch] : graph.other_courses)
      if (groups.shape(value, removed) != graph.values[static_cast<std::size_t>(value)].value.sizes().vec()) {
        plan.refuse(f, fmt::format("another input may take another course at {}, which needs all channels", branch));
        break;
      }
  }
  settle(groups, plan);

  const bool any = !plan.families().empty();
  if (any) {
    const Model before = model.clone();
    try {
      carry_out(model, before, groups, plan);
      if (verify) {
        std::set<std::size_t> comparable;
        for (const std::size_t f : plan.families())
          if (!groups.families()[f].statistics && groups.families()[f].maskable) comparable.insert(f);
        const Removal part = plan.removal(groups, &comparable);
        if (comparable == plan.families()) {
          compare(model, before, groups, part);
        } else if (!comparable.empty()) {
          Model partly = before.clone();
          const std::optional<std::string> wrong = apply(partly, groups, part);
          check(!wrong, ErrorCode::VerificationFailed, "without the families that change statistics: {}",
                wrong.value_or(""));
          compare(partly, before, groups, part);
        }
      }
    } catch (...) {
      model.assign(before);
      throw;
    }
  }

  const Removal removed = plan.removal(groups);
  for (std::size_t f = 0; f < groups.families().size(); ++f) {
    const ChannelFamily& family = groups.families()[f];
    const std::string names = joined(layers_of(family, layers));
    if (const auto refused = plan.refused.find(f); refused != plan.refused.end()) report.skip(names, refused->second);
    if (plan.atoms[f].empty()) continue;
    std::int64_t parameters_before = 0, parameters_after = 0;
    for (const ChannelProducer& producer : family.producers) {
      const ValueId value = graph.find(producer.parameter);
      parameters_before += graph.values[static_cast<std::size_t>(value)].value.numel();
      parameters_after += elements(groups.shape(value, removed));
    }
    const ChannelProducer& first = family.producers.front();
    const ValueId value = graph.find(first.parameter);
    ReportRow& row = report.row(names, "pruned");
    row.details.emplace_back("before",
                             fmt::format("{}", graph.values[static_cast<std::size_t>(value)].value.size(first.dim)));
    row.details.emplace_back("after", fmt::format("{}", groups.kept(value, first.dim, removed).size()));
    row.details.emplace_back("weights_before", fmt::format("{}", parameters_before));
    row.details.emplace_back("weights_after", fmt::format("{}", parameters_after));
    if (verify) {
      row.details.emplace_back("verified", family.statistics  ? "no: statistics over the channels change"
                                           : !family.maskable ? "no: not every reader is a weight"
                                                              : "yes");
    }
  }
  for (const Blocked& blocked : groups.blocked()) {
    const std::string name = layer_of(blocked.what, layers);
    if (choice.targets(name) && !choice.ignores(name)) report.skip(name, blocked.why);
  }
  if (plan.families().empty()) return Changed::nothing;
  ReportRow& total = report.row("(model)", "counted");
  total.details.emplace_back("macs_before", fmt::format("{}", macs(graph)));
  total.details.emplace_back("macs_after", fmt::format("{}", macs(model.graph())));
  return Changed::structure;
}

}  // namespace tersor::prune
