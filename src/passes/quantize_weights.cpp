#include "quantize_layers.hpp"
#include "tersor/passes/quantize.hpp"

namespace tersor::quantize {

void Weights::validate() const { check_bits("bits", bits, group_size); }

Changed Weights::run(Model& model, PassContext& context) const {
  validate();
  const Plan plan{.pass = name,
                  .bits = bits,
                  .symmetric = symmetric,
                  .group_size = group_size,
                  .activation = ActivationMode::none,
                  .targets = targets,
                  .ignore = ignore};
  return quantize_layers(model, plan, choose_layers(model, plan, context), {}, context);
}

}  // namespace tersor::quantize
