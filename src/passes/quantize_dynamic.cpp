#include "quantize_layers.hpp"
#include "tersor/passes/quantize.hpp"

namespace tersor::quantize {

void Dynamic::validate() const { check_bits("weight_bits", weight_bits, group_size); }

Changed Dynamic::run(Model& model, PassContext& context) const {
  validate();
  const Plan plan{.pass = name,
                  .bits = weight_bits,
                  .group_size = group_size,
                  .activation = ActivationMode::per_token,
                  .targets = targets,
                  .ignore = ignore};
  return quantize_layers(model, plan, choose_layers(model, plan, context), {}, context);
}

}  // namespace tersor::quantize
