#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tersor/calibrate/observer.hpp"
#include "tersor/io/dataset.hpp"
#include "tersor/model/model.hpp"

namespace tersor::calibrate {

struct RunnerOptions {
  std::int64_t samples = 512;  ///< the first so many, at most
  std::int64_t batch_size = 32;
  std::function<void(std::int64_t done, std::int64_t of)> progress = {};  ///< samples
};

/// What the inputs of layers look like.
struct Calibration {
  std::map<std::string, ActivationQuant> inputs;  ///< of the layers that ran
  std::vector<std::string> warnings;              ///< layers that saw nothing but zeros
};

/// Runs the model over the data and watches the inputs of these layers, each with an observer of its own.
///
/// Throws MissingData without a sample and NonFiniteActivation, after the last batch, naming the first layer (in the
/// order they run) whose input held NaN or infinite values and how many.
Calibration calibrate_inputs(const Model& model, const std::vector<std::string>& layers, const Dataset& data,
                             const MakeObserver& make_observer, const RunnerOptions& options = {});

}  // namespace tersor::calibrate
