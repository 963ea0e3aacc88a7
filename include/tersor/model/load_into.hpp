#pragma once

#include <filesystem>
#include <memory>

#include "tersor/model/wrap.hpp"

namespace tersor {

/// Fills a freshly constructed module from a file that Model::save wrote: its tensors take the file's shapes, values
/// and codes, the options of known layers follow (channels, features, groups), folded BatchNorms become the identity.
///
/// The file (TorchScript or safetensors) and the module must have the same parameters and buffers by name; a buffer
/// that the file lacks because no forward reads it keeps its value. The module keeps its dtype: values are converted,
/// codes are as in the file. Nothing is changed unless everything fits; a module that holds codes, or a graph of an
/// earlier forward, is refused with BadUsage.
/// Returns the masks of the layers that are float in the file (what is zero there stays zero), for Model::wrap or
/// prune::Masked; they end with their last handle. NoSuchTarget names what is missing on either side, BadShape a tensor with another number
/// of dimensions, UnsupportedLayer a quantized layer whose module does not take codes.
Masks load_into(const std::shared_ptr<torch::nn::Module>& module, const std::filesystem::path& path);

template <detail::ModuleHolder M>
Masks load_into(const M& module, const std::filesystem::path& path) {
  return load_into(std::static_pointer_cast<torch::nn::Module>(module.ptr()), path);
}

}  // namespace tersor
