#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tersor/runtime/qtensor.hpp"

namespace tersor {

/// Quantized layers under the names and in the packing of compressed-tensors, the format that vLLM and transformers
/// load.
///
/// Weight-only layers are `pack-quantized`: `X.weight_packed` int32 [rows, words], `X.weight_scale` [rows, groups],
/// `X.weight_shape`, and when affine `X.weight_zero_point`, packed along the rows. Layers with quantized inputs are
/// `int-quantized`: `X.weight` int8, `X.weight_scale`, and for calibrated inputs `X.input_scale` and
/// `X.input_zero_point`. The weight of a convolution is packed over its flattened columns; `weight_shape` keeps all its
/// dimensions.

/// The tensors that replace `layer + ".weight"`. UnsupportedLayer when the columns are no multiple of the group size:
/// this format has no shorter last group.
std::map<std::string, at::Tensor> compress_layer(const std::string& layer, const LayerQuantization& quantization);

/// The `quantization_config` of config.json as compact JSON. Layers are listed by name, in one group for each way of
/// quantizing; `ignore` names the Linear layers that stay as they are.
std::string quantization_config(const std::map<std::string, LayerQuantization>& layers,
                                const std::vector<std::string>& ignore);

/// Takes every compressed layer out of `tensors` and gives it back by name; what belongs to no such layer stays.
/// `config` is a `quantization_config`. BadConfig, BadData (a tensor that is missing or of the wrong shape),
/// UnsupportedFormat for what compressed-tensors can hold and tersor cannot: floats, bits other than 4 and 8.
std::map<std::string, LayerQuantization> decompress_layers(std::map<std::string, at::Tensor>& tensors,
                                                           std::string_view config);

/// Whether these tensors hold a layer that `decompress_layers` would take.
bool has_compressed_layers(const std::map<std::string, at::Tensor>& tensors);

}  // namespace tersor
