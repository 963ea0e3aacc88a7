#include "tersor/model/load_into.hpp"

#include <algorithm>
#include <set>

#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "eager.hpp"
#include "packed_layer.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

/// The BatchNorm layers that were folded before the file was written, and into which layer.
std::map<std::string, std::string> folded_layers(const Model& file) {
  const auto entry = file.metadata().find("tersor.folded");
  if (entry == file.metadata().end()) return {};
  return nlohmann::json::parse(entry->second).get<std::map<std::string, std::string>>();
}

std::vector<std::string> masked_tensors(const Model& file) {
  const auto entry = file.metadata().find("tersor.masked");
  if (entry == file.metadata().end()) return {};
  return nlohmann::json::parse(entry->second).get<std::vector<std::string>>();
}

std::string layer_of(const Slot& slot) {
  const std::size_t own = slot.own_name.size();
  return slot.name.size() > own ? slot.name.substr(0, slot.name.size() - own - 1) : "";
}

std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t most = 5;
  std::vector<std::string> shown;
  for (std::size_t i = 0; i < std::min(most, names.size()); ++i)
    shown.push_back(fmt::format("'{}'", escaped(names[i])));
  return fmt::format("{}{}", fmt::join(shown, ", "),
                     names.size() > most ? fmt::format(" and {} more", names.size() - most) : "");
}

}  // namespace

Masks load_into(const std::shared_ptr<torch::nn::Module>& module, const std::filesystem::path& path) {
  check(module != nullptr, ErrorCode::BadUsage, "load_into: the module is null");
  const Model file = Model::load(path);
  const std::map<std::string, std::string> folded = folded_layers(file);
  const std::vector<std::string> in_file = file.tensor_names();
  std::map<std::string, Layer> layers;
  std::set<std::string> added_biases;  // by folding; the module has none yet
  for (const Layer& layer : file.layers()) layers.emplace(layer.weight, layer);

  const std::vector<Slot> all = slots(module);
  std::vector<std::string> names, missing;
  std::set<std::string> known;
  std::set<const c10::TensorImpl*> found;
  for (const Slot& slot : all) {
    names.push_back(slot.name);
    if (std::binary_search(in_file.begin(), in_file.end(), slot.name)) found.insert(slot.tensor.unsafeGetTensorImpl());
  }
  for (const Slot& slot : all) {
    known.insert(slot.name);
    if (found.contains(slot.tensor.unsafeGetTensorImpl())) continue;
    if (slot.is_parameter && !folded.contains(layer_of(slot))) missing.push_back(slot.name);
  }
  check(missing.empty(), ErrorCode::NoSuchTarget, "load_into: the file has no tensor {} for this module{}",
        listed(missing), missing.empty() ? "" : did_you_mean(missing.front(), in_file));

  std::vector<std::string> unknown;
  for (const std::string& name : in_file) {
    if (known.contains(name)) continue;
    const auto beside = std::find_if(all.begin(), all.end(), [&](const Slot& slot) {
      return slot.own_name == "weight" && layer_of(slot) + ".bias" == name && takes_bias(*slot.owner);
    });
    if (beside != all.end())
      added_biases.insert(name);
    else
      unknown.push_back(name);
  }
  check(unknown.empty(), ErrorCode::NoSuchTarget, "load_into: the module has no parameter or buffer {}{}",
        listed(unknown), unknown.empty() ? "" : did_you_mean(unknown.front(), names));
  for (const Slot& slot : all) {
    if (!std::binary_search(in_file.begin(), in_file.end(), slot.name)) continue;
    const auto layer = layers.find(slot.name);
    if (layer != layers.end() && layer->second.quantized)
      check(takes_codes(*slot.owner, layer->second.kind), ErrorCode::UnsupportedLayer,
            "load_into: '{}' is quantized in the file, but the module's {} does not take codes", escaped(slot.name),
            escaped(slot.owner->name()));
    const at::Tensor values = file.tensor(slot.name);
    check(values.dim() == slot.tensor.dim(), ErrorCode::BadShape,
          "load_into: '{}' is [{}] in the file and [{}] in the module; only sizes may differ", escaped(slot.name),
          fmt::join(values.sizes(), ", "), fmt::join(slot.tensor.sizes(), ", "));
  }

  const at::NoGradGuard no_grad;
  std::set<const c10::TensorImpl*> filled;
  std::map<const c10::TensorImpl*, std::pair<LayerKind, at::Tensor>> codes;  // by the handle that they replace
  for (const Slot& slot : all) {
    const auto layer = layers.find(slot.name);
    if (layer != layers.end()) set_groups(*slot.owner, layer->second.groups);
    if (added_biases.contains(layer_of(slot) + ".bias") && slot.own_name == "weight")
      replace_parameter(*slot.owner, "bias",
                        file.tensor(layer_of(slot) + ".bias").clone().set_requires_grad(slot.tensor.requires_grad()));
    if (!std::binary_search(in_file.begin(), in_file.end(), slot.name)) continue;
    if (layer != layers.end() && layer->second.quantized) {
      std::optional<at::Tensor> bias;
      if (!layer->second.bias.empty()) bias = file.tensor(layer->second.bias);
      const c10::IValue packed = pack_layer(layer->second.kind, *layer->second.quantized, bias);
      codes[slot.tensor.unsafeGetTensorImpl()] = {layer->second.kind, weight_tensor(packed, slot.name)};
    } else if (filled.insert(slot.tensor.unsafeGetTensorImpl()).second) {
      at::Tensor handle = slot.tensor;
      handle.mutable_grad().reset();
      handle.set_data(file.tensor(slot.name).to(handle.device()).clone());
    }
  }
  // Every layer that shares the weight gets the codes.
  for (const Slot& slot : all)
    if (const auto held = codes.find(slot.tensor.unsafeGetTensorImpl());
        held != codes.end() && slot.own_name == "weight" && takes_codes(*slot.owner, held->second.first))
      replace_parameter(*slot.owner, "weight", held->second.second);
  for (const Slot& slot : slots(module)) {
    if (const auto norm = folded.find(layer_of(slot)); norm != folded.end() && slot.own_name == "running_var")
      become_identity(*slot.owner, file.layer(norm->second).shape.front());
    sync_options(*slot.owner);
  }
  const std::vector<Slot> now = slots(module);
  const auto parameter = [&](const std::string& name) {
    for (const Slot& slot : now)
      if (slot.name == name) return slot.tensor;
    throw fail(ErrorCode::BadMetadata, "load_into: the file says that '{}' is masked, but has no such tensor",
               escaped(name));
  };
  return Masks::of_zeros(masked_tensors(file), parameter);
}

}  // namespace tersor
