#include "tersor/calibrate/runner.hpp"

#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor::calibrate {

Calibration calibrate_inputs(const Model& model, const std::vector<std::string>& layers, const Dataset& data,
                             const MakeObserver& make_observer, const RunnerOptions& options) {
  check(options.samples > 0, ErrorCode::BadOption, "samples={} must be at least 1", options.samples);
  check(options.batch_size > 0, ErrorCode::BadOption, "batch_size={} must be at least 1", options.batch_size);
  const std::int64_t samples = std::min(options.samples, data.size());
  check(samples > 0, ErrorCode::MissingData, "the calibration data holds no samples");

  std::map<std::string, std::unique_ptr<Observer>, std::less<>> observers;
  for (const std::string& layer : layers) observers.emplace(layer, make_observer());
  std::vector<std::string> order;  // in which the layers first ran
  for (std::int64_t begin = 0; begin < samples; begin += options.batch_size) {
    const Dataset batch = data.slice(begin, std::min(options.batch_size, samples - begin));
    model.observe(batch.inputs, [&](const Layer& layer, const at::Tensor& input, const at::Tensor&) {
      const auto it = observers.find(layer.name);
      if (it == observers.end()) return;
      if (std::find(order.begin(), order.end(), layer.name) == order.end()) order.push_back(layer.name);
      it->second->observe(input);
    });
    if (options.progress) options.progress(std::min(begin + options.batch_size, samples), samples);
  }

  Calibration result;
  for (const std::string& layer : order) {
    const Observer& seen = *observers.at(layer);
    check(seen.nans() + seen.infinities() == 0, ErrorCode::NonFiniteActivation,
          "the input of layer '{}' held {} NaN and {} Inf during calibration; check the calibration data and the model",
          escaped(layer), seen.nans(), seen.infinities());
    if (!seen.seen()) continue;  // only empty batches
    if (seen.range() == Range{})
      result.warnings.push_back(
          fmt::format("the input of layer '{}' was all zero during calibration; its scale is a guess", escaped(layer)));
    result.inputs.emplace(layer, activation_of(seen.range()));
  }
  return result;
}

}  // namespace tersor::calibrate
