#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tersor/pipeline/pass.hpp"

namespace tersor::fold {

/// Multiplies a BatchNorm into the Conv or Linear whose output it alone reads, which removes it:
///
///     weight' = weight * gamma / sqrt(var + eps),  bias' = (bias - mean) * gamma / sqrt(var + eps) + beta
///
/// computed in double precision and rounded once. A BatchNorm that reads anything else stays, and the report says why.
/// Jacob et al., Quantization and Training of Neural Networks, arXiv:1712.05877, section 3.2.
struct BatchNorm {
  std::vector<std::string> targets = {};
  std::vector<std::string> ignore = {};

  static constexpr std::string_view name = "fold_batch_norm";
  static constexpr std::string_view summary = "Multiplies each BatchNorm into the Conv or Linear before it.";
  static constexpr auto fields() {
    return std::tuple{Field{"targets", &BatchNorm::targets,
                            "BatchNorm layers to fold: names, re:patterns or class names. Default: all."},
                      Field{"ignore", &BatchNorm::ignore, "BatchNorm layers to leave alone; wins over targets."}};
  }
  Need needs() const { return Need::graph; }
  Changed run(Model& model, PassContext& context) const;
};

}  // namespace tersor::fold
