#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "tersor/runtime/packed.hpp"
#include "tersor/runtime/qtensor.hpp"

/// A weight whose values are codes, as a tensor that an unmodified torch::nn module can hold: put one in the place of
/// `LinearImpl::weight` (and of the module's registry entry) and the module's own `forward` runs our operators.
///
/// It has the shape and dtype of the weight that it stands for, device CPU and no storage, and it is immutable: any
/// number of threads may call with it. Its dispatch keys are PrivateUse3 and AutogradPrivateUse3.
///
/// - Products (`linear`; `addmm`, `mm`, `matmul` with `t()`, `mT()`, `numpy_T()` or `transpose`) of a PackedLinear are
///   those of `tersor::linear`, bit by bit. `convolution` (conv1d, conv2d), `embedding` and products with any other
///   weight are computed with dequantized values.
/// - The gradient reaches the input and the bias, which is an ordinary tensor given by the module. The weight itself
///   never gets one: an optimizer leaves it as it is.
/// - `detach`, `alias` and `to(float, half or bfloat16)` give a weight with the same codes and scales; `set_data` takes
///   one, so that a module moves between these types. `clone()`, `dequantize()`, `to(double)` and
///   `plain.copy_(weight)` give plain values: a cloned module is a float one. Printing shows values.
/// - Any other operator, `set_data` with a plain tensor (`module.to(double)`), writing and other devices throw
///   UnsupportedLayer with the names of the operator and of the weight. Access to storage (torch::save, data_ptr,
///   is_alias_of) throws c10::Error with such a text. A trace can hold it as an attribute, not as a constant.
namespace tersor {

/// `name` is for messages: `block.1.weight`. A bias that is packed inside is not used; a layer without one saves
/// packing it anew.
at::Tensor make_weight_tensor(c10::intrusive_ptr<PackedLinear> packed, const std::string& name);
at::Tensor make_weight_tensor(c10::intrusive_ptr<PackedConv> packed, const std::string& name);
at::Tensor make_weight_tensor(c10::intrusive_ptr<PackedEmbedding> packed, const std::string& name);

/// Also for what `t()`, `detach()` and `to(dtype)` made of one.
bool is_weight_tensor(const at::Tensor& tensor);

/// The codes, in the orientation of the original weight. Throws BadUsage for a plain tensor.
const LayerQuantization& quantization_of(const at::Tensor& weight);

}  // namespace tersor
