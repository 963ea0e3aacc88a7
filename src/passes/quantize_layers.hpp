#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tersor/pipeline/pass.hpp"

namespace tersor::quantize {

/// What the three passes have in common.
struct Plan {
  std::string_view pass;
  std::int64_t bits = 8;
  bool symmetric = true;
  std::int64_t group_size = 0;                       ///< 0: per output channel
  ActivationMode activation = ActivationMode::none;  ///< of Linear layers
  const std::vector<std::string>& targets;
  const std::vector<std::string>& ignore;
};

/// Throws BadOption for bits other than 4 and 8 and for a negative group size; `option` is the name of the former.
void check_bits(std::string_view option, std::int64_t bits, std::int64_t group_size);

/// The layers to quantize; what is left alone by default becomes a row of the report.
std::vector<Layer> choose_layers(const Model& model, const Plan& plan, PassContext& context);

/// Quantizes them. `inputs` holds the calibrated inputs of Linear layers when the plan asks for per_tensor; a Linear
/// that is missing there stays as it is.
Changed quantize_layers(Model& model, const Plan& plan, const std::vector<Layer>& layers,
                        const std::map<std::string, ActivationQuant>& inputs, PassContext& context);

}  // namespace tersor::quantize
