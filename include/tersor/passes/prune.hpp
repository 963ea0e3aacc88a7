#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tersor/analysis/importance.hpp"
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

enum class Along { channels, row };

/// N:M sparsity: of every `m` consecutive weights of a row at most `n` stay, those of greatest magnitude.
///
/// A row of a Linear holds its in_features. Of a Conv, `along=channels`, its input channels, one row for each output
/// and each place of the kernel, which is how sparse tensor cores read it; `along=row`, all that is read for one
/// output, in the order in which it is stored. Among equals the lowest index becomes zero first. Layers whose rows are
/// no multiple of `m` are left alone unless they are targeted; then a row ends with a shorter group, of which at most
/// `n` stay too. Mishra et al., Accelerating Sparse Deep Neural Networks, arXiv:2104.08378.
struct NM {
  std::int64_t n = 2;
  std::int64_t m = 4;
  Along along = Along::channels;
  std::vector<std::string> targets = {};
  std::vector<std::string> ignore = {};

  static constexpr std::string_view name = "prune_nm";
  static constexpr std::string_view summary = "Leaves at most n of every m consecutive weights.";
  static constexpr auto fields() {
    return std::tuple{
        Field{"n", &NM::n, "How many of a group stay.", 0.0, 65536.0},
        Field{"m", &NM::m, "How many consecutive weights along the inputs make a group.", 1.0, 65536.0},
        Field{"along", &NM::along, "What counts as consecutive in a Conv: input channels, or the order of storage."},
        Field{"targets", &NM::targets,
              "Layers to prune: names, re:patterns or class names. Default: every Linear and Conv."},
        Field{"ignore", &NM::ignore, "Layers to leave alone; wins over targets."}};
  }
  void validate() const;
  Need needs() const { return Need::weights; }
  Changed run(Model& model, PassContext& context) const;
};

/// Block sparsity: whole blocks of a weight become zero, those of least mean magnitude.
///
/// The weight is seen as a matrix of outputs by all that is read for one (a Conv's input channels and kernel, in the
/// order in which they are stored) and cut into blocks of `rows` by `columns`; at the right and lower edge they are
/// smaller. Exactly `amount` of the blocks that hold anything become zero, among equals the first in row order. Gray et
/// al., GPU Kernels for Block-Sparse Weights, 2017.
struct Block {
  Amount amount = 0.5;
  std::int64_t rows = 1;
  std::int64_t columns = 8;
  Scope scope = Scope::layer;
  std::vector<std::string> targets = {};
  std::vector<std::string> ignore = {};

  static constexpr std::string_view name = "prune_block";
  static constexpr std::string_view summary = "Sets whole blocks of weights of least magnitude to zero.";
  static constexpr auto fields() {
    return std::tuple{
        Field{"amount", &Block::amount,
              "How many of the blocks that hold anything become zero: a fraction, or a whole number for a count."},
        Field{"rows", &Block::rows, "Outputs of a block.", 1.0, 65536.0},
        Field{"columns", &Block::columns, "Weights of a block along a row.", 1.0, 65536.0},
        Field{"scope", &Block::scope, "Rank within each layer, or over all targeted layers together."},
        Field{"targets", &Block::targets,
              "Layers to prune: names, re:patterns or class names. Default: every Linear and Conv."},
        Field{"ignore", &Block::ignore, "Layers to leave alone; wins over targets."}};
  }
  Need needs() const { return Need::weights; }
  Changed run(Model& model, PassContext& context) const;
};

enum class Compensate { none, constant, calibrated };

/// Structured pruning: whole channels leave, and with them everything that was coupled to them.
///
/// Channel groups come from running the network's shape operators on labels (docs/explanation/channel-groups.md). Each
/// group's channels are ranked by `importance` (analysis/importance.hpp); those of least importance leave. Outputs of
/// the model are never pruned; what cannot be followed stays whole and is reported.
///
/// How much: `amount` of each width, `amounts` for some layers; with `scope=global` `amount` of all channels together,
/// the least important of any layer. `target_macs` or `target_params` instead: the smallest amount that leaves at most
/// this fraction of the multiply-accumulates or parameters. In `steps` rounds with scores computed anew in between.
///
/// `compensate` adds what the removed channels contributed on average to the biases (or BatchNorm means) of the layers
/// that read them: `calibrated`, the mean over calibration data; `constant`, what follows from the biases and
/// BatchNorms behind them, each channel taken as normally distributed. `reestimate` computes BatchNorm statistics anew
/// from calibration data.
///
/// `verify` compares the result, before compensation, with the network as it was before this pass, the removed
/// channels' readers set to zero, within rounding; families whose removal changes statistics (LayerNorm) are left out
/// of the comparison and named.
struct Structured {
  Amount amount = 0.3;
  std::vector<std::string> amounts = {};
  std::optional<double> target_macs = std::nullopt;
  std::optional<double> target_params = std::nullopt;
  Scope scope = Scope::layer;
  Importance importance = Importance::l1;
  Reduction reduction = Reduction::mean;
  Normalization normalize = Normalization::mean;
  std::int64_t steps = 1;
  double max_amount = 1.0;
  std::int64_t round_to = 1;
  std::int64_t min_channels = 1;
  std::vector<std::string> targets = {};
  std::vector<std::string> ignore = {};
  Compensate compensate = Compensate::none;
  bool reestimate = false;
  bool verify = false;

  static constexpr std::string_view name = "prune_structured";
  static constexpr std::string_view summary = "Removes whole channels and everything coupled to them.";
  static constexpr auto fields() {
    return std::tuple{
        Field{"amount", &Structured::amount,
              "How much of each width (scope=global: of all channels) leaves: a fraction, or a whole number for a "
              "count."},
        Field{
            "amounts", &Structured::amounts,
            "Other amounts for some layers: PATTERN=AMOUNT, the pattern as in targets; the first that matches counts. "
            "Only with scope=layer."},
        Field{"target_macs", &Structured::target_macs,
              "Instead of amount: at most this fraction of the multiply-accumulates stays.", 0.0, 1.0},
        Field{"target_params", &Structured::target_params,
              "Instead of amount: at most this fraction of the parameters stays.", 0.0, 1.0},
        Field{"scope", &Structured::scope, "Rank within each layer, or the channels of all layers together."},
        Field{"importance", &Structured::importance, "What makes a channel important."},
        Field{"reduction", &Structured::reduction, "How the scores of several producers of a channel become one."},
        Field{"normalize", &Structured::normalize,
              "By what the scores of a group are divided before scope=global compares them with others."},
        Field{"steps", &Structured::steps, "In so many rounds, with scores computed anew in between.", 1.0, 1000.0},
        Field{"max_amount", &Structured::max_amount, "At most this fraction of any width leaves.", 0.0, 1.0},
        Field{"round_to", &Structured::round_to, "What stays is rounded up to a multiple of this.", 1.0, 65536.0,
              "channels"},
        Field{"min_channels", &Structured::min_channels, "At least this many channels stay.", 1.0, {}, "channels"},
        Field{"targets", &Structured::targets,
              "Layers whose outputs may leave: names, re:patterns or class names. Default: all."},
        Field{"ignore", &Structured::ignore, "Layers whose outputs stay; wins over targets."},
        Field{"compensate", &Structured::compensate,
              "Put the mean contribution of what leaves into the biases of its readers: estimated from biases and "
              "BatchNorms, or measured on calibration data."},
        Field{"reestimate", &Structured::reestimate, "Compute BatchNorm statistics anew from calibration data."},
        Field{"verify", &Structured::verify,
              "Compare with the unpruned network whose removed channels are cut off from their consumers."}};
  }
  void validate() const;
  Need needs() const;
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
template <>
struct tersor::EnumNames<tersor::prune::Along> {
  static constexpr std::array<std::pair<prune::Along, std::string_view>, 2> names{
      {{prune::Along::channels, "channels"}, {prune::Along::row, "row"}}};
};
template <>
struct tersor::EnumNames<tersor::prune::Compensate> {
  static constexpr std::array<std::pair<prune::Compensate, std::string_view>, 3> names{
      {{prune::Compensate::none, "none"},
       {prune::Compensate::constant, "constant"},
       {prune::Compensate::calibrated, "calibrated"}}};
};
