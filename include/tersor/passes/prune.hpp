#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tersor/pipeline/pass.hpp"

namespace tersor::prune {

enum class Scope { layer, global };
enum class Of { nonzero, total };

/// Unstructured magnitude pruning: the smallest |w| become +0.0.
///
/// Exactly `amount` of each targeted weight (or of all together, `scope=global`) is set to zero; among equals the
/// lowest index goes first. A repeated run counts among what is still non-zero; `of=total` counts all elements, so
/// zeros that are already there satisfy it. Han et al., Learning both Weights and Connections, arXiv:1506.02626.
struct L1 {
  Amount amount = 0.5;
  Scope scope = Scope::layer;
  Of of = Of::nonzero;
  std::vector<std::string> targets = {};
  std::vector<std::string> ignore = {};

  static constexpr std::string_view name = "prune_l1";
  static constexpr std::string_view summary = "Sets the weights of least magnitude to zero.";
  static constexpr auto fields() {
    return std::tuple{Field{"amount", &L1::amount,
                            "How much of the weights becomes zero: a fraction, or a whole number for a count."},
                      Field{"scope", &L1::scope, "Rank within each layer, or over all targeted layers together."},
                      Field{"of", &L1::of, "What a fraction is counted of: weights that are not yet zero, or all."},
                      Field{"targets", &L1::targets,
                            "Layers to prune: names, re:patterns or class names. Default: every Linear and Conv."},
                      Field{"ignore", &L1::ignore, "Layers to leave alone; wins over targets."}};
  }
  Need needs() const { return Need::weights; }
  Changed run(Model& model, PassContext& context) const;
};

/// Structured pruning: whole channels leave, and with them everything that was coupled to them.
///
/// Channel groups come from running the network's shape operators on labels (docs/explanation/channel-groups.md). A
/// channel's importance is the sum of |w| over the filters that produce it, averaged over producers. Outputs of the
/// model are never pruned; what cannot be followed stays whole and is reported. `verify` compares the result with the
/// network as it was before this pass, the removed channels' readers set to zero, within rounding; families whose
/// removal changes statistics (LayerNorm) are left out of the comparison and named. Li et al., Pruning Filters for
/// Efficient ConvNets, arXiv:1608.08710.
struct Structured {
  Amount amount = 0.3;
  std::int64_t round_to = 1;
  std::int64_t min_channels = 1;
  std::vector<std::string> targets = {};
  std::vector<std::string> ignore = {};
  bool verify = false;

  static constexpr std::string_view name = "prune_structured";
  static constexpr std::string_view summary = "Removes whole channels and everything coupled to them.";
  static constexpr auto fields() {
    return std::tuple{
        Field{"amount", &Structured::amount,
              "How much of each width leaves: a fraction, or a whole number for a count."},
        Field{"round_to", &Structured::round_to, "What stays is rounded up to a multiple of this.", 1.0, 65536.0,
              "channels"},
        Field{"min_channels", &Structured::min_channels, "At least this many channels stay.", 1.0, {}, "channels"},
        Field{"targets", &Structured::targets,
              "Layers whose outputs may leave: names, re:patterns or class names. Default: all."},
        Field{"ignore", &Structured::ignore, "Layers whose outputs stay; wins over targets."},
        Field{"verify", &Structured::verify,
              "Compare with the unpruned network whose removed channels are cut off from their consumers."}};
  }
  void validate() const { amount.validate(); }
  Need needs() const { return Need::graph; }
  Changed run(Model& model, PassContext& context) const;
};

}  // namespace tersor::prune

template <>
struct tersor::EnumNames<tersor::prune::Scope> {
  static constexpr std::array<std::pair<prune::Scope, std::string_view>, 2> names{
      {{prune::Scope::layer, "layer"}, {prune::Scope::global, "global"}}};
};
template <>
struct tersor::EnumNames<tersor::prune::Of> {
  static constexpr std::array<std::pair<prune::Of, std::string_view>, 2> names{
      {{prune::Of::nonzero, "nonzero"}, {prune::Of::total, "total"}}};
};
