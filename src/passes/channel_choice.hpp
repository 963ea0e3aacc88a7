#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tersor/analysis/channel_groups.hpp"
#include "tersor/passes/prune.hpp"

namespace tersor::prune {

/// A family some of whose channels may leave.
struct Candidate {
  std::size_t family = 0;
  /// What can leave together, least important first: one atom from each cell of the family.
  std::vector<LabelVector> units = {};
  std::vector<double> scores = {};  ///< of the units, ascending
  std::int64_t width = 0;           ///< before the first round
  std::int64_t gone = 0;            ///< in earlier rounds
  std::int64_t rows_per_atom = 1;
  Amount amount = 0.0;

  std::int64_t cells() const { return units.empty() ? 1 : static_cast<std::int64_t>(units.front().size()); }
  /// The most units, at most `wanted`, whose removal the options allow.
  std::int64_t fit(std::int64_t wanted, const Structured& options) const;
};

/// The units of a family, by the scores of its atoms.
Candidate make_candidate(std::size_t index, const ChannelFamily& family, const std::vector<double>& scores);

/// How many units of each candidate leave in round `step` (1, 2, …) of `options.steps`. With a `target` the fewest
/// after which `cost` says at most that; without it `options.amount` decides. `cost` tells what is left, 0 to 1, when
/// so many units of each leave.
std::vector<std::int64_t> choose_counts(const std::vector<Candidate>& candidates, const Structured& options,
                                        std::int64_t step, const std::optional<double>& target,
                                        const std::function<double(const std::vector<std::int64_t>&)>& cost);

}  // namespace tersor::prune
