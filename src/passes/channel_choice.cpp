#include "channel_choice.hpp"

#include <algorithm>
#include <map>

#include "tersor/analysis/importance.hpp"

namespace tersor::prune {
namespace {

/// The part of an amount that has left after `step` of `steps` rounds; exact at the end.
Amount part_of(const Amount& amount, std::int64_t step, std::int64_t steps) {
  if (step == steps) return amount;
  const double part = static_cast<double>(step) / static_cast<double>(steps);
  if (amount.is_count()) return Amount(static_cast<std::int64_t>(round_half_even(part * double(amount.count()))));
  return Amount(part * amount.fraction());
}

/// How many of `width` have left then. A count that asks for more than there are takes all that may leave.
std::int64_t count_of(const Amount& amount, std::int64_t width) {
  return amount.is_count() ? std::min(amount.count(), width) : amount.of(width);
}

std::vector<std::int64_t> by_layer(const std::vector<Candidate>& candidates, const Structured& options,
                                   const std::function<Amount(const Candidate&)>& amount) {
  std::vector<std::int64_t> counts;
  for (const Candidate& candidate : candidates) {
    const std::int64_t wanted = count_of(amount(candidate), candidate.width) - candidate.gone;
    counts.push_back(candidate.fit(std::max<std::int64_t>(wanted, 0) / candidate.cells(), options));
  }
  return counts;
}

std::vector<std::int64_t> over_all(const std::vector<Candidate>& candidates, const Structured& options,
                                   const Amount& amount) {
  struct Unit {
    double score;
    std::size_t candidate;
  };
  std::vector<Unit> units;
  std::int64_t width = 0, gone = 0;
  for (std::size_t c = 0; c < candidates.size(); ++c) {
    width += candidates[c].width;
    gone += candidates[c].gone;
    const std::int64_t most = candidates[c].fit(static_cast<std::int64_t>(candidates[c].units.size()), options);
    for (std::int64_t k = 0; k < most; ++k) units.push_back({candidates[c].scores[static_cast<std::size_t>(k)], c});
  }
  std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.score < b.score; });
  std::vector<std::int64_t> counts(candidates.size(), 0);
  std::int64_t left = count_of(amount, width) - gone;
  for (const Unit& unit : units) {
    if (left < candidates[unit.candidate].cells()) break;
    left -= candidates[unit.candidate].cells();
    ++counts[unit.candidate];
  }
  for (std::size_t c = 0; c < candidates.size(); ++c) counts[c] = candidates[c].fit(counts[c], options);
  return counts;
}

}  // namespace

std::int64_t Candidate::fit(std::int64_t wanted, const Structured& options) const {
  const std::int64_t now = width - gone, most = Amount(options.max_amount).of(width) - gone;
  // `round_to` and `min_channels` count channels, of which an attention head has several.
  const auto fits = [&](std::int64_t leave) {
    const std::int64_t channels = (now - leave * cells()) * rows_per_atom;
    return leave * cells() <= most && channels >= options.min_channels && channels % options.round_to == 0;
  };
  // The last unit stays: nothing can be zero wide.
  std::int64_t leave = std::min(wanted, static_cast<std::int64_t>(units.size()) - 1);
  while (leave > 0 && !fits(leave)) --leave;
  return std::max<std::int64_t>(leave, 0);
}

Candidate make_candidate(std::size_t index, const ChannelFamily& family, const std::vector<double>& scores) {
  std::map<std::int32_t, std::vector<std::size_t>> cells;  // positions, least important first
  for (const std::size_t i : ascending(scores)) cells[family.cells[i]].push_back(i);
  std::size_t smallest = family.atoms.size();
  for (const auto& [cell, positions] : cells) smallest = std::min(smallest, positions.size());
  Candidate candidate{.family = index, .width = family.width(), .rows_per_atom = family.rows_per_atom()};
  for (std::size_t k = 0; k < smallest; ++k) {
    LabelVector atoms;
    double sum = 0;
    for (const auto& [cell, positions] : cells) {
      atoms.push_back(family.atoms[positions[k]]);
      sum += scores[positions[k]];
    }
    candidate.scores.push_back(sum / static_cast<double>(atoms.size()));
    candidate.units.push_back(std::move(atoms));
  }
  return candidate;
}

std::vector<std::int64_t> choose_counts(const std::vector<Candidate>& candidates, const Structured& options,
                                        std::int64_t step, const std::optional<double>& target,
                                        const std::function<double(const std::vector<std::int64_t>&)>& cost) {
  const auto counts = [&](const std::optional<Amount>& amount) {
    if (options.scope == Scope::global)
      return over_all(candidates, options, amount.value_or(part_of(options.amount, step, options.steps)));
    return by_layer(candidates, options, [&](const Candidate& candidate) {
      return amount.value_or(part_of(candidate.amount, step, options.steps));
    });
  };
  if (!target) return counts(std::nullopt);
  // Removals are nested, so that the cost falls with the amount.
  double low = 0, high = 1;
  if (cost(counts(Amount(low))) <= *target) return counts(Amount(low));
  constexpr int halvings = 24;  // finer than one channel of a million
  for (int i = 0; i < halvings; ++i) {
    const double middle = (low + high) / 2;
    (cost(counts(Amount(middle))) <= *target ? high : low) = middle;
  }
  return counts(Amount(high));
}

}  // namespace tersor::prune
