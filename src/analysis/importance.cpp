#include "tersor/analysis/importance.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include <ATen/ops/cdist.h>

namespace tersor {
namespace {

/// One row of double values for every index of `dim`.
at::Tensor filters(const at::Tensor& weight, std::int64_t dim) {
  const at::Tensor rows = weight.detach().cpu().to(at::kDouble).movedim(dim, 0).contiguous();
  return rows.view({rows.size(0), rows.size(0) == 0 ? 0 : rows.numel() / rows.size(0)});
}

/// What each filter adds to an atom: `l2` adds squares, of which the atom takes the root.
FilterScores filter_scores(Importance importance, const ChannelProducer& producer, const ImportanceSource& source) {
  if (importance == Importance::taylor || importance == Importance::activation)
    return source.observed(producer.parameter, producer.dim);
  const at::Tensor rows = filters(source.tensor(producer.parameter), producer.dim);
  const std::int64_t count = rows.size(0), length = rows.size(1);
  FilterScores scores(static_cast<std::size_t>(count), 0.0);
  if (importance == Importance::geometric_median) {
    const at::Tensor sums = at::cdist(rows, rows).sum(1);
    std::copy_n(sums.const_data_ptr<double>(), count, scores.begin());
    return scores;
  }
  const double* w = rows.const_data_ptr<double>();
  for (double& score : scores)
    for (std::int64_t i = 0; i < length; ++i, ++w) score += importance == Importance::l2 ? *w * *w : std::abs(*w);
  return scores;
}

/// Weights of the BatchNorms along whose channels atoms of the family stand.
std::vector<ChannelProducer> scales(const ChannelGroups& groups, const ChannelFamily& family) {
  std::vector<ChannelProducer> found;
  for (const GraphNode& node : groups.graph().nodes) {
    if (node.op != "aten::batch_norm") continue;
    const GraphArgument* weight = groups.graph().argument(node, "weight");
    const ValueId* id = weight ? std::get_if<ValueId>(weight) : nullptr;
    if (!id || *id < 0) continue;
    const std::string& name = groups.graph().values[static_cast<std::size_t>(*id)].parameter;
    if (name.empty()) continue;
    ChannelProducer standing = groups.standing(family, name, 0);
    const bool any = std::any_of(standing.rows.begin(), standing.rows.end(), [](const auto& r) { return !r.empty(); });
    if (any) found.push_back(std::move(standing));
  }
  return found;
}

}  // namespace

std::vector<double> importance(Importance importance, Reduction reduction, const ChannelGroups& groups,
                               const ChannelFamily& family, const ImportanceSource& source) {
  std::vector<double> scores(family.atoms.size(), 0.0);
  if (importance == Importance::random) {
    // The family's first atom keeps two families apart; the sequence of mt19937_64 is the same everywhere.
    std::mt19937_64 generator(source.seed * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(family.atoms.front()));
    for (double& score : scores) score = static_cast<double>(generator() >> 11) * 0x1p-53;
    return scores;
  }
  const std::vector<ChannelProducer> producers =
      importance == Importance::bn_scale ? scales(groups, family) : family.producers;
  std::vector<int> heard(family.atoms.size(), 0);
  bool known = false;
  for (const ChannelProducer& producer : producers) {
    const FilterScores filters = filter_scores(importance, producer, source);
    if (filters.empty()) continue;
    known = true;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      if (producer.rows[i].empty() || (reduction == Reduction::first && heard[i] > 0)) continue;
      double score = 0;
      for (const std::int64_t row : producer.rows[i]) score += filters[static_cast<std::size_t>(row)];
      if (importance == Importance::l2) score = std::sqrt(score);
      scores[i] = reduction == Reduction::max ? std::max(scores[i], score) : scores[i] + score;
      ++heard[i];
    }
  }
  if (!known) return {};
  if (reduction == Reduction::mean)
    for (std::size_t i = 0; i < scores.size(); ++i) scores[i] /= std::max(heard[i], 1);
  return scores;
}

std::vector<double> normalized(std::vector<double> scores, Normalization normalization) {
  if (normalization == Normalization::none || scores.empty()) return scores;
  const double by = normalization == Normalization::max
                        ? *std::max_element(scores.begin(), scores.end())
                        : std::accumulate(scores.begin(), scores.end(), 0.0) / static_cast<double>(scores.size());
  if (by > 0)
    for (double& score : scores) score /= by;
  return scores;
}

std::vector<std::size_t> ascending(const std::vector<double>& scores) {
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] < scores[b]; });
  return order;
}

}  // namespace tersor
