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
#include "tersor/model/optimizer_state.hpp"
#include "tersor/runtime/weight_tensor.hpp"

namespace tersor {
namespace {

/// What Model::load has checked already.
template <typename T>
T entry(const Model& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  return found == file.metadata().end() ? T() : nlohmann::json::parse(found->second).get<T>();
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
  const OrdinaryTensors ordinary;
  const Model file = Model::load(path);
  const auto folded = entry<std::map<std::string, std::string>>(file, "tersor.folded");
  const std::vector<std::string> in_file = file.tensor_names();
  const auto has = [&](const std::string& name) { return std::binary_search(in_file.begin(), in_file.end(), name); };
  std::map<std::string, Layer> layers;
  for (const Layer& layer : file.layers()) layers.emplace(layer.weight, layer);
  const auto quantized = [&](const std::string& name) -> const Layer* {
    const auto layer = layers.find(name);
    return layer != layers.end() && layer->second.quantized ? &layer->second : nullptr;
  };

  const std::vector<Slot> all = slots(module);
  std::vector<std::string> names, missing;
  std::set<const c10::TensorImpl*> found;
  // The BatchNorms that were folded before the file was written, under all their names, and how wide they are now.
  std::map<const torch::nn::Module*, std::int64_t> identities;
  for (const Slot& slot : all) {
    names.push_back(slot.name);
    if (has(slot.name)) found.insert(slot.tensor.unsafeGetTensorImpl());
    if (const auto fold = folded.find(slot.layer()); fold != folded.end())
      identities[slot.owner.get()] = file.tensor(file.layer(fold->second).bias).size(0);
  }
  for (const Slot& slot : all) {
    if (found.contains(slot.tensor.unsafeGetTensorImpl())) continue;
    if (slot.is_parameter && !identities.contains(slot.owner.get())) missing.push_back(slot.name);
  }
  check(missing.empty(), ErrorCode::NoSuchTarget, "load_into: the file has no tensor {} for this module{}",
        listed(missing), missing.empty() ? "" : did_you_mean(missing.front(), in_file));

  std::set<std::string> known(names.begin(), names.end()), added_biases;  // by folding; the module has none yet
  for (const Slot& slot : all) {
    const std::string bias = slot.name.substr(0, slot.name.size() - slot.own_name.size()) + "bias";
    if (slot.own_name == "weight" && !known.contains(bias) && has(bias) && takes_bias(*slot.owner))
      added_biases.insert(bias);
  }
  std::vector<std::string> unknown;
  for (const std::string& name : in_file)
    if (!known.contains(name) && !added_biases.contains(name)) unknown.push_back(name);
  check(unknown.empty(), ErrorCode::NoSuchTarget, "load_into: the module has no parameter or buffer {}{}",
        listed(unknown), unknown.empty() ? "" : did_you_mean(unknown.front(), names));
  for (const Slot& slot : all) {
    check(!is_weight_tensor(slot.tensor), ErrorCode::BadUsage,
          "load_into: '{}' of the module holds codes already; load into a freshly constructed module",
          escaped(slot.name));
    check(!graph_alive(slot.tensor), ErrorCode::BadUsage,
          "load_into: the graph of an earlier forward still holds '{}'; drop its outputs and losses first",
          escaped(slot.name));
    if (!has(slot.name)) continue;
    if (const Layer* layer = quantized(slot.name)) {
      check(takes_codes(*slot.owner, layer->kind), ErrorCode::UnsupportedLayer,
            "load_into: '{}' is quantized in the file, but the module's {} does not take codes", escaped(slot.name),
            escaped(slot.owner->name()));
      const at::ScalarType dtype = slot.tensor.scalar_type();
      check(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, ErrorCode::UnsupportedDtype,
            "load_into: '{}' is quantized in the file and {} in the module; codes are computed with in float, half and "
            "bfloat16",
            escaped(slot.name), c10::toString(dtype));
    }
    const at::Tensor values = file.tensor(slot.name);
    check(values.dim() == slot.tensor.dim(), ErrorCode::BadShape,
          "load_into: '{}' is [{}] in the file and [{}] in the module; only sizes may differ", escaped(slot.name),
          fmt::join(values.sizes(), ", "), fmt::join(slot.tensor.sizes(), ", "));
  }
  const auto masked = entry<std::vector<std::string>>(file, "tersor.masked");
  for (const std::string& name : masked)
    check(known.contains(name), ErrorCode::BadMetadata,
          "load_into: the file says that '{}' is masked, but has no such tensor", escaped(name));

  const auto values_like = [&](const std::string& name, const at::Tensor& like) {
    return file.tensor(name).to(like.device(), like.scalar_type()).clone();
  };
  std::set<const c10::TensorImpl*> filled;
  std::map<const c10::TensorImpl*, std::pair<LayerKind, at::Tensor>> codes;  // by the handle that they replace
  for (const Slot& slot : all) {
    const auto layer = layers.find(slot.name);
    if (layer != layers.end()) set_groups(*slot.owner, layer->second.groups);
    const std::string bias = slot.name.substr(0, slot.name.size() - slot.own_name.size()) + "bias";
    if (slot.own_name == "weight" && added_biases.contains(bias))
      replace_parameter(*slot.owner, "bias",
                        values_like(bias, slot.tensor).set_requires_grad(slot.tensor.requires_grad()));
    if (!has(slot.name)) continue;
    if (const Layer* packed_layer = quantized(slot.name)) {
      // The bias is the module's own.
      const c10::IValue packed = pack_layer(packed_layer->kind, *packed_layer->quantized, std::nullopt);
      codes[slot.tensor.unsafeGetTensorImpl()] = {packed_layer->kind,
                                                  weight_tensor(packed, slot.name).to(slot.tensor.scalar_type())};
    } else if (filled.insert(slot.tensor.unsafeGetTensorImpl()).second) {
      at::Tensor handle = slot.tensor;
      handle.mutable_grad().reset();
      handle.set_data(values_like(slot.name, handle));
    }
  }
  // Every layer that shares the weight gets the codes.
  for (const Slot& slot : all)
    if (const auto held = codes.find(slot.tensor.unsafeGetTensorImpl());
        held != codes.end() && slot.own_name == "weight" && takes_codes(*slot.owner, held->second.first))
      replace_parameter(*slot.owner, "weight", held->second.second);
  for (const Slot& slot : slots(module)) {
    if (const auto norm = identities.find(slot.owner.get()); norm != identities.end())
      become_identity(*slot.owner, norm->second);
    sync_options(*slot.owner);
  }
  std::map<std::string, at::Tensor> now;
  for (const Slot& slot : slots(module)) now[slot.name] = slot.tensor;
  // Codes take no mask.
  std::vector<std::string> plain;
  for (const std::string& name : masked)
    if (!is_weight_tensor(now.at(name))) plain.push_back(name);
  return Masks::of_zeros(plain, [&](const std::string& name) { return now.at(name); });
}

}  // namespace tersor
