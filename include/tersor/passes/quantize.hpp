#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tersor/pipeline/pass.hpp"

/// The three ways to quantize. Weights are rounded to nearest, symmetric unless said otherwise, with one scale per
/// output channel or per `group_size` consecutive inputs of one.
///
/// Left in float unless `targets` names them: heads, embeddings, norms, layers that would grow, and, where inputs are
/// quantized too, Linear layers that would not get faster (docs/explanation/what-is-skipped.md). The report says which.
namespace tersor::quantize {

enum class ObserverKind { min_max, moving_average };

/// INT8 or INT4 weights; the input of a Linear is quantized at run time, one symmetric scale per token (row). A Conv
/// keeps its float arithmetic.
struct Dynamic {
  std::int64_t weight_bits = 8;
  std::int64_t group_size = 0;
  std::vector<std::string> targets = {};
  std::vector<std::string> ignore = {};

  static constexpr std::string_view name = "quantize_dynamic";
  static constexpr std::string_view summary =
      "Quantizes weights, and the inputs of Linear layers token by token as they come.";
  static constexpr auto fields() {
    return std::tuple{
        Field{"weight_bits", &Dynamic::weight_bits, "Bits of a weight: 8 or 4.", 4.0, 8.0, "bits"},
        Field{"group_size",
              &Dynamic::group_size,
              "Inputs that share a scale; 0: one scale per output channel.",
              0.0,
              {},
              "weights"},
        Field{"targets", &Dynamic::targets,
              "Layers to quantize: names, re:patterns or class names. Default: every Linear and Conv it pays for."},
        Field{"ignore", &Dynamic::ignore, "Layers to leave alone; wins over targets."}};
  }
  void validate() const;
  Need needs() const { return Need::weights; }
  Changed run(Model& model, PassContext& context) const;
};

/// INT8 or INT4 weights; the input of a Linear is quantized with one scale and zero point from calibration. A Conv
/// keeps its float arithmetic.
struct Static {
  std::int64_t weight_bits = 8;
  std::int64_t group_size = 0;
  ObserverKind observer = ObserverKind::min_max;
  double averaging = 0.01;
  std::vector<std::string> targets = {};
  std::vector<std::string> ignore = {};

  static constexpr std::string_view name = "quantize_static";
  static constexpr std::string_view summary =
      "Quantizes weights, and the inputs of Linear layers with calibrated ranges.";
  static constexpr auto fields() {
    return std::tuple{
        Field{"weight_bits", &Static::weight_bits, "Bits of a weight: 8 or 4.", 4.0, 8.0, "bits"},
        Field{"group_size",
              &Static::group_size,
              "Inputs that share a scale; 0: one scale per output channel.",
              0.0,
              {},
              "weights"},
        Field{"observer", &Static::observer,
              "Range of an input: the extremes of all calibration data, or a moving average of each batch's."},
        Field{"averaging", &Static::averaging, "Share of each new batch in the moving average.", 1e-6, 1.0},
        Field{"targets", &Static::targets,
              "Layers to quantize: names, re:patterns or class names. Default: every Linear and Conv it pays for."},
        Field{"ignore", &Static::ignore, "Layers to leave alone; wins over targets."}};
  }
  void validate() const;
  Need needs() const { return Need::forward | Need::data; }
  Changed run(Model& model, PassContext& context) const;
};

/// INT8 or INT4 weights of Linear and Conv; inputs and arithmetic stay float.
struct Weights {
  std::int64_t bits = 8;
  bool symmetric = true;
  std::int64_t group_size = 0;
  std::vector<std::string> targets = {};
  std::vector<std::string> ignore = {};

  static constexpr std::string_view name = "quantize_weights";
  static constexpr std::string_view summary = "Stores weights as small integers; inputs and arithmetic stay float.";
  static constexpr auto fields() {
    return std::tuple{
        Field{"bits", &Weights::bits, "Bits of a weight: 8 or 4.", 4.0, 8.0, "bits"},
        Field{"symmetric", &Weights::symmetric, "Codes around 0; false: each scale has a zero point too."},
        Field{"group_size",
              &Weights::group_size,
              "Inputs that share a scale; 0: one scale per output channel.",
              0.0,
              {},
              "weights"},
        Field{"targets", &Weights::targets,
              "Layers to quantize: names, re:patterns or class names. Default: every Linear and Conv that shrinks."},
        Field{"ignore", &Weights::ignore, "Layers to leave alone; wins over targets."}};
  }
  void validate() const;
  Need needs() const { return Need::weights; }
  Changed run(Model& model, PassContext& context) const;
};

}  // namespace tersor::quantize

template <>
struct tersor::EnumNames<tersor::quantize::ObserverKind> {
  static constexpr std::array<std::pair<quantize::ObserverKind, std::string_view>, 2> names{
      {{quantize::ObserverKind::min_max, "min_max"}, {quantize::ObserverKind::moving_average, "moving_average"}}};
};
