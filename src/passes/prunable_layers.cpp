#include "prunable_layers.hpp"

#include <map>

#include "default_skips.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/model/targets.hpp"

namespace tersor::prune {

std::vector<Layer> prunable_layers(const Model& model, const std::vector<std::string>& targets,
                                   const std::vector<std::string>& ignore, PassReport& report) {
  const std::vector<Layer> selected = select_layers(
      model, targets, ignore,
      [&](const Layer& layer) {
        const std::string_view why = default_skip(layer);
        if (!why.empty()) report.skip(layer.name, std::string(why));
        return why.empty();
      },
      report.warnings);

  std::vector<Layer> layers;
  std::map<const void*, at::Tensor> seen;  // holds them, so that no address is used twice
  for (const Layer& layer : selected) {
    check(!layer.quantized, ErrorCode::AlreadyQuantized, "layer '{}' is quantized already; prune before quantizing",
          escaped(layer.name));
    check(at::isFloatingType(layer.dtype), ErrorCode::UnsupportedDtype,
          "the weight of layer '{}' is {}; expected a floating-point type", escaped(layer.name),
          c10::toString(layer.dtype));
    const at::Tensor weight = model.tensor(layer.weight);
    // All names of a tensor change together; only in a checkpoint they are tensors of their own.
    if (model.backend() != Backend::checkpoint && weight.numel() > 0 &&
        !seen.emplace(weight.const_data_ptr(), weight).second) {
      report.skip(layer.name, "shares its weight with a layer before it");
      continue;
    }
    layers.push_back(layer);
  }
  return layers;
}

}  // namespace tersor::prune
