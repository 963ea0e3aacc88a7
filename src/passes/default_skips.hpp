#pragma once

#include <string_view>

#include "tersor/model/model.hpp"

namespace tersor {

/// Why passes that lower the precision of weights leave a layer alone unless it is targeted; empty when they do not.
inline std::string_view default_skip(const Layer& layer) {
  if (layer.is_head) return "head: the model's output is sensitive to it";
  switch (layer.kind) {
    case LayerKind::embedding:
      return "embedding";
    case LayerKind::batch_norm:
    case LayerKind::layer_norm:
    case LayerKind::group_norm:
      return "norm";
    case LayerKind::recurrent:
    case LayerKind::other:
      return "neither Linear nor Conv";
    default:
      break;
  }
  if (layer.quantized) return "already quantized";
  if (!at::isFloatingType(layer.dtype)) return "its weight is not floating point";
  return {};
}

}  // namespace tersor
