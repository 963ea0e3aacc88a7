#pragma once

#include <optional>
#include <string>

#include <ATen/core/ivalue.h>

#include "tersor/model/model.hpp"

namespace tersor {

/// A quantized layer as a custom class of TorchScript: PackedLinear, PackedConv or PackedEmbedding, by the layer's
/// kind.
c10::IValue pack_layer(LayerKind kind, const LayerQuantization& quantization, const std::optional<at::Tensor>& bias);
LayerKind packed_kind(const c10::IValue& packed);
/// The same codes as the weight of a module; `name` is for messages.
at::Tensor weight_tensor(const c10::IValue& packed, const std::string& name);

/// The attribute that holds the codes of `weight`, beside it.
std::string packed_name(const std::string& weight);

}  // namespace tersor
