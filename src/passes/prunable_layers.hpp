#pragma once

#include <string>
#include <vector>

#include "tersor/model/model.hpp"
#include "tersor/pipeline/report.hpp"

namespace tersor::prune {

/// The layers whose weights a pass may set to zero; by default every Linear and Conv but the head. A weight that
/// several layers share is taken once. Throws AlreadyQuantized and UnsupportedDtype with the layer's name.
std::vector<Layer> prunable_layers(const Model& model, const std::vector<std::string>& targets,
                                   const std::vector<std::string>& ignore, PassReport& report);

}  // namespace tersor::prune
