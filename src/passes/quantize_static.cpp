#include "quantize_layers.hpp"
#include "tersor/calibrate/runner.hpp"
#include "tersor/core/error.hpp"
#include "tersor/passes/quantize.hpp"

namespace tersor::quantize {

void Static::validate() const {
  check_bits("weight_bits", weight_bits, group_size);
  calibrate::MovingAverage{averaging};
}

Changed Static::run(Model& model, PassContext& context) const {
  validate();
  check(context.options.calibration.has_value(), ErrorCode::MissingData, "quantize_static needs calibration data");
  const Plan plan{.pass = name,
                  .bits = weight_bits,
                  .group_size = group_size,
                  .activation = ActivationMode::per_tensor,
                  .targets = targets,
                  .ignore = ignore};
  const std::vector<Layer> layers = choose_layers(model, plan, context);

  std::vector<std::string> observed;
  for (const Layer& layer : layers)
    if (layer.kind == LayerKind::linear) observed.push_back(layer.name);
  calibrate::Calibration calibration;
  if (!observed.empty()) {
    const auto make_observer = [this]() -> std::unique_ptr<calibrate::Observer> {
      if (observer == ObserverKind::moving_average) return std::make_unique<calibrate::MovingAverage>(averaging);
      return std::make_unique<calibrate::MinMax>();
    };
    bool begun = false;
    const auto progress = [&](std::int64_t done, std::int64_t of) {
      if (!begun) context.progress.begin("calibration", of);
      begun = true;
      context.progress.step(done);
    };
    calibration = calibrate::calibrate_inputs(
        model, observed, *context.options.calibration, make_observer,
        {.samples = context.options.samples, .batch_size = context.options.batch_size, .progress = progress});
    context.progress.end();
    for (std::string& warning : calibration.warnings) context.report.warnings.push_back(std::move(warning));
  }
  return quantize_layers(model, plan, layers, calibration.inputs, context);
}

}  // namespace tersor::quantize
