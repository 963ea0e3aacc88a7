#include "packed_layer.hpp"

#include <torch/custom_class.h>

#include "tersor/core/error.hpp"
#include "tersor/runtime/packed.hpp"
#include "tersor/runtime/weight_tensor.hpp"

namespace tersor {

c10::IValue pack_layer(LayerKind kind, const LayerQuantization& quantization, const std::optional<at::Tensor>& bias) {
  switch (kind) {
    case LayerKind::linear:
      return c10::make_intrusive<PackedLinear>(quantization, bias);
    case LayerKind::conv1d:
    case LayerKind::conv2d:
      return c10::make_intrusive<PackedConv>(quantization.weight, bias);
    case LayerKind::embedding:
      return c10::make_intrusive<PackedEmbedding>(quantization.weight);
    default:
      throw fail(ErrorCode::Internal, "a {} has no packed form", class_name(kind));
  }
}

namespace {

/// `linear`, `conv` or `embedding` as the class that it is.
template <typename Use>
auto as_class(const c10::IValue& packed, Use use) {
  const std::string name = packed.type()->expect<c10::ClassType>()->name()->name();
  if (name == "PackedLinear") return use(packed.toCustomClass<PackedLinear>());
  if (name == "PackedEmbedding") return use(packed.toCustomClass<PackedEmbedding>());
  return use(packed.toCustomClass<PackedConv>());
}

LayerKind kind_of(const PackedLinear&) { return LayerKind::linear; }
LayerKind kind_of(const PackedEmbedding&) { return LayerKind::embedding; }
LayerKind kind_of(const PackedConv& conv) {
  return conv.weight().shape.size() == 3 ? LayerKind::conv1d : LayerKind::conv2d;
}

}  // namespace

LayerKind packed_kind(const c10::IValue& packed) {
  return as_class(packed, [](const auto& layer) { return kind_of(*layer); });
}

at::Tensor weight_tensor(const c10::IValue& packed, const std::string& name) {
  return as_class(packed, [&](const auto& layer) { return make_weight_tensor(layer, name); });
}

std::string packed_name(const std::string& weight) { return weight + "_packed"; }

}  // namespace tersor
