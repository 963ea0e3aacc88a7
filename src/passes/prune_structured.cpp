#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/ranges.h>

#include "channel_choice.hpp"
#include "compensation.hpp"
#include "tersor/analysis/channel_groups.hpp"
#include "tersor/analysis/cost.hpp"
#include "tersor/analysis/importance.hpp"
#include "tersor/calibrate/channels.hpp"
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

/// `PATTERN=AMOUNT`; the pattern may hold equals signs.
std::pair<std::string, Amount> layer_amount(const std::string& entry) {
  const std::size_t equals = entry.rfind('=');
  check(equals != std::string::npos && equals > 0, ErrorCode::BadOption,
        "amounts: '{}' is not PATTERN=AMOUNT, such as 're:layer1=0.1'", escaped(entry));
  const Amount amount = OptionText<Amount>::parse({OptionValue::Kind::bare, entry.substr(equals + 1), {}});
  amount.validate("amounts");
  return {entry.substr(0, equals), amount};
}

/// What `targets`, `ignore` and `amounts` say about families.
class Choice {
 public:
  Choice(const std::vector<Layer>& layers, const Structured& options, std::vector<std::string>& warnings)
      : all_(options.targets.empty()), amount_(options.amount) {
    const auto any = [](const Layer&) { return true; };
    std::vector<std::string> unused;
    for (const Layer& layer : select_layers(layers, options.targets, {}, any, unused)) targeted_.insert(layer.name);
    for (const Layer& layer : select_layers(layers, {}, options.ignore, any, warnings)) allowed_.insert(layer.name);
    for (const Layer& layer : layers) known_.insert(layer.name);
    for (const std::string& entry : options.amounts) {
      const auto [pattern, amount] = layer_amount(entry);
      for (const Layer& layer : select_layers(layers, {pattern}, {}, any, unused)) amounts_.emplace(layer.name, amount);
    }
  }

  bool targets(const std::string& layer) const { return all_ || targeted_.contains(layer); }
  bool ignores(const std::string& layer) const { return known_.contains(layer) && !allowed_.contains(layer); }
  /// Of a group: what is said of the first of its layers of which anything is said.
  Amount amount(const std::vector<std::string>& group) const {
    for (const std::string& layer : group)
      if (const auto found = amounts_.find(layer); found != amounts_.end()) return found->second;
    return amount_;
  }

 private:
  bool all_;
  Amount amount_;
  std::set<std::string> targeted_, allowed_, known_;
  std::map<std::string, Amount> amounts_;
};

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

/// Elements of all parameters and buffers that take part, after a removal.
std::int64_t parameters(const ChannelGroups& groups, const Removal& removed) {
  std::int64_t count = 0;
  for (std::size_t id = 0; id < groups.graph().values.size(); ++id)
    if (!groups.graph().values[id].parameter.empty())
      count += elements(groups.shape(static_cast<ValueId>(id), removed));
  return count;
}

/// What is left of the network's cost after a removal, of what `target_macs` or `target_params` speaks of.
double cost_of(const Structured& options, const ChannelGroups& groups, const Removal& removed) {
  return static_cast<double>(options.target_macs ? macs(groups, removed) : parameters(groups, removed));
}

/// What data says of the producers' filters: `taylor` and `activation`.
std::function<FilterScores(std::string_view, std::int64_t)> observe(const Structured& options, const Model& model,
                                                                    const ChannelGroups& groups,
                                                                    const std::vector<Layer>& layers,
                                                                    const PassContext& context) {
  const calibrate::RunnerOptions run{.samples = context.options.samples, .batch_size = context.options.batch_size};
  if (options.importance == Importance::taylor) {
    std::vector<std::pair<std::string, std::int64_t>> dims;
    for (const ChannelFamily& family : groups.families())
      for (const ChannelProducer& producer : family.producers) dims.emplace_back(producer.parameter, producer.dim);
    std::sort(dims.begin(), dims.end());
    dims.erase(std::unique(dims.begin(), dims.end()), dims.end());
    return [scores = calibrate::taylor_scores(model, dims, *context.options.calibration, run)](
               std::string_view parameter, std::int64_t dim) {
      const auto found = scores.find({std::string(parameter), dim});
      return found == scores.end() ? FilterScores() : found->second;
    };
  }
  std::map<std::string, FilterScores> scores;  // by weight; only of weights whose filters are the layer's outputs
  const auto means = calibrate::channel_means(model, *context.options.calibration, run);
  for (const Layer& layer : layers) {
    const auto mean = means.find(layer.name);
    if (mean == means.end() || !mean->second.output_absolute.defined()) continue;
    const at::Tensor values = mean->second.output_absolute.contiguous();
    scores[layer.weight].assign(values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel());
  }
  return [scores = std::move(scores)](std::string_view parameter, std::int64_t) {
    const auto found = scores.find(std::string(parameter));
    return found == scores.end() ? FilterScores() : found->second;
  };
}

/// What all rounds together did to one group of layers.
struct Told {
  std::string family, layers;
  std::int64_t before = 0, after = 0, weights_before = 0, weights_after = 0;
  std::string verified;
};

/// What is known from earlier rounds.
struct History {
  std::map<std::string, std::int64_t> width;  ///< of a family before the first round, by its first producer
  std::vector<Told> told;
  double cost = 0;  ///< before the first round
  std::int64_t macs = 0;
  std::int64_t compensated = 0;  ///< biases and BatchNorm means
};

std::string key_of(const ChannelFamily& family) {
  return fmt::format("{}:{}:{}", family.producers.front().parameter, family.producers.front().dim, family.slot);
}

}  // namespace

void Structured::validate() const {
  amount.validate();
  for (const std::string& entry : amounts) layer_amount(entry);
  check(!target_macs || !target_params, ErrorCode::BadOption, "target_macs and target_params exclude each other");
  check(amounts.empty() || (scope == Scope::layer && !target_macs && !target_params), ErrorCode::BadOption,
        "amounts has no meaning with scope=global or a target: the ranking decides there");
}

Need Structured::needs() const {
  Need need = Need::graph;
  if (importance == Importance::taylor) need = need | Need::data | Need::labels;
  if (importance == Importance::activation || compensate == Compensate::calibrated || reestimate)
    need = need | Need::data;
  return need;
}

namespace {

/// One round; `before` is a copy of the model. Returns whether anything left.
bool run_round(const Structured& options, std::int64_t step, Model& model, const Model& before, PassContext& context,
               History& history) {
  const bool last = step == options.steps;
  PassReport unread;  // what every round but the last would say again
  PassReport& report = last ? context.report : unread;
  const std::vector<Layer> layers = model.layers();
  const Choice choice(layers, options, report.warnings);
  const ChannelGroups groups(model.graph());
  const Graph& graph = groups.graph();
  if (!graph.data_dependent.empty()) {
    for (const std::string& branch : graph.data_dependent)
      report.skip(branch,
                  "the branch depends on values, and the way not taken would read removed channels; nothing "
                  "was pruned");
    return false;
  }

  Plan plan;
  plan.atoms.resize(groups.families().size());
  ImportanceSource source{.tensor = [&](std::string_view parameter) { return model.tensor(parameter); },
                          .seed = context.options.seed};
  if (options.importance == Importance::taylor || options.importance == Importance::activation)
    source.observed = observe(options, model, groups, layers, context);

  // Heads before the size of a head: a producer's width shrinks along one of its factors.
  std::vector<std::size_t> order(groups.families().size());
  for (std::size_t f = 0; f < order.size(); ++f) order[f] = f;
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return groups.families()[a].slot < groups.families()[b].slot; });
  std::vector<Candidate> candidates;
  std::set<std::string> factored;
  for (const std::size_t f : order) {
    const ChannelFamily& family = groups.families()[f];
    const std::vector<std::string> names = layers_of(family, layers);
    if (std::none_of(names.begin(), names.end(), [&](const auto& name) { return choice.targets(name); }) ||
        std::any_of(names.begin(), names.end(), [&](const auto& name) { return choice.ignores(name); }))
      continue;
    const auto taken = [&](const ChannelProducer& producer) { return factored.contains(producer.parameter); };
    if (family.factored && std::any_of(family.producers.begin(), family.producers.end(), taken)) continue;
    const std::vector<double> scores = importance(options.importance, options.reduction, groups, family, source);
    if (scores.empty()) {
      plan.refused.emplace(f, options.importance == Importance::bn_scale ? "no BatchNorm stands behind it"
                                                                         : "the calibration data never reached it");
      continue;
    }
    check(std::all_of(scores.begin(), scores.end(), [](double score) { return std::isfinite(score); }),
          ErrorCode::NonFiniteWeight, "tensor '{}' holds values that are NaN or infinite; nothing was pruned",
          escaped(family.producers.front().parameter));
    Candidate candidate = make_candidate(f, family, normalized(scores, options.normalize));
    candidate.amount = choice.amount(names);
    candidate.width = history.width.emplace(key_of(family), family.width()).first->second;
    candidate.gone = candidate.width - family.width();
    const bool ranked = options.scope == Scope::global || options.target_macs || options.target_params;
    const std::int64_t most = ranked ? candidate.fit(static_cast<std::int64_t>(candidate.units.size()), options)
                                     : choose_counts({candidate}, options, options.steps, std::nullopt, {}).front();
    if (most == 0) {
      if (candidate.gone == 0 && (ranked || (candidate.amount != Amount(0) && candidate.amount != Amount(0.0))))
        plan.refused.emplace(
            f, fmt::format("{} wide: nothing may leave with {}round_to={}, min_channels={}", family.width(),
                           ranked ? "" : fmt::format("amount={}, ", candidate.amount.text()), options.round_to,
                           options.min_channels));
      continue;
    }
    if (family.factored)
      for (const ChannelProducer& producer : family.producers) factored.insert(producer.parameter);
    candidates.push_back(std::move(candidate));
  }

  const Removal none = groups.nothing();
  if (step == 1) {
    history.cost = cost_of(options, groups, none);
    history.macs = macs(graph);
  }
  std::optional<double> target = options.target_macs ? options.target_macs : options.target_params;
  if (target && !last) target = 1 - (1 - *target) * static_cast<double>(step) / static_cast<double>(options.steps);
  const auto atoms_of = [&](const std::vector<std::int64_t>& counts) {
    std::vector<LabelVector> atoms(groups.families().size());
    for (std::size_t c = 0; c < candidates.size(); ++c)
      for (std::int64_t k = 0; k < counts[c]; ++k) {
        const LabelVector& unit = candidates[c].units[static_cast<std::size_t>(k)];
        atoms[candidates[c].family].insert(atoms[candidates[c].family].end(), unit.begin(), unit.end());
      }
    return atoms;
  };
  const auto cost = [&](const std::vector<std::int64_t>& counts) {
    return cost_of(options, groups, Plan{atoms_of(counts), {}}.removal(groups)) / history.cost;
  };
  const auto refuse_what_cannot_follow = [&] {
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
  };

  const auto refused = [&](const Candidate& candidate) { return plan.refused.contains(candidate.family); };
  while (true) {
    plan.atoms = atoms_of(choose_counts(candidates, options, step, target, cost));
    refuse_what_cannot_follow();
    const bool any = !plan.families().empty();
    if (any) carry_out(model, before, groups, plan);
    // Where some cannot follow, the others have to meet the target.
    if (!target || std::erase_if(candidates, refused) == 0) break;
    if (any) model.assign(before);
  }
  const Removal removed = plan.removal(groups);
  if (last && target) {
    const double left = cost_of(options, groups, removed) / history.cost;
    if (left > *target)
      report.warnings.push_back(fmt::format("{}={} cannot be reached: {:.3f} is what can be",
                                            options.target_macs ? "target_macs" : "target_params", *target, left));
  }

  if (!plan.families().empty() && options.verify) {
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
  if (!plan.families().empty() && options.compensate != Compensate::none) {
    const Compensation compensation = find_compensation(before, groups, removed, options.compensate, context);
    apply_compensation(model, groups, removed, compensation);
    history.compensated += static_cast<std::int64_t>(compensation.additions.size());
    for (const auto& [name, why] : compensation.left)
      report.warnings.push_back(fmt::format("'{}' is not compensated: {}", escaped(name), why));
  }

  for (std::size_t f = 0; f < groups.families().size(); ++f) {
    const ChannelFamily& family = groups.families()[f];
    const std::string names = joined(layers_of(family, layers));
    if (const auto refused = plan.refused.find(f); refused != plan.refused.end()) report.skip(names, refused->second);
    if (plan.atoms[f].empty()) continue;
    const ChannelProducer& first = family.producers.front();
    const ValueId value = graph.find(first.parameter);
    Told now{.family = key_of(family),
             .layers = names,
             .before = graph.values[static_cast<std::size_t>(value)].value.size(first.dim),
             .after = static_cast<std::int64_t>(groups.kept(value, first.dim, removed).size()),
             .verified = family.statistics  ? "no: statistics over the channels change"
                         : !family.maskable ? "no: not every reader is a weight"
                                            : "yes"};
    for (const ChannelProducer& producer : family.producers) {
      const ValueId weight = graph.find(producer.parameter);
      now.weights_before += graph.values[static_cast<std::size_t>(weight)].value.numel();
      now.weights_after += elements(groups.shape(weight, removed));
    }
    const auto earlier = std::find_if(history.told.begin(), history.told.end(),
                                      [&](const Told& told) { return told.family == now.family; });
    if (earlier == history.told.end()) {
      history.told.push_back(std::move(now));
    } else {
      earlier->after = now.after;
      earlier->weights_after = now.weights_after;
    }
  }
  for (const Blocked& blocked : groups.blocked()) {
    const std::string name = layer_of(blocked.what, layers);
    if (choice.targets(name) && !choice.ignores(name)) report.skip(name, blocked.why);
  }
  return !plan.families().empty();
}

}  // namespace

Changed Structured::run(Model& model, PassContext& context) const {
  validate();
  History history;
  bool changed = false;
  std::vector<std::string> reestimated;
  const Model before = model.clone();
  try {
    for (std::int64_t step = 1; step <= steps; ++step)
      changed |= run_round(*this, step, model, step == 1 ? before : model.clone(), context, history);
    if (changed && reestimate)
      reestimated = calibrate::reestimate_batch_norms(
          model, *context.options.calibration,
          {.samples = context.options.samples, .batch_size = context.options.batch_size});
  } catch (...) {
    model.assign(before);
    throw;
  }
  if (!changed) return Changed::nothing;

  std::vector<ReportRow> rows;
  for (const Told& told : history.told) {
    ReportRow& row = rows.emplace_back(ReportRow{told.layers, "pruned", {}});
    row.details.emplace_back("before", fmt::format("{}", told.before));
    row.details.emplace_back("after", fmt::format("{}", told.after));
    row.details.emplace_back("weights_before", fmt::format("{}", told.weights_before));
    row.details.emplace_back("weights_after", fmt::format("{}", told.weights_after));
    if (verify) row.details.emplace_back("verified", told.verified);
  }
  // What left comes first, then what did not.
  context.report.rows.insert(context.report.rows.begin(), rows.begin(), rows.end());
  ReportRow& total = context.report.row("(model)", "counted");
  total.details.emplace_back("macs_before", fmt::format("{}", history.macs));
  total.details.emplace_back("macs_after", fmt::format("{}", macs(model.graph())));
  if (compensate != Compensate::none) total.details.emplace_back("compensated", fmt::format("{}", history.compensated));
  if (reestimate) total.details.emplace_back("reestimated", fmt::format("{}", reestimated.size()));
  return Changed::structure;
}

}  // namespace tersor::prune
