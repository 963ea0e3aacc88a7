#include "module_model.hpp"

#include <algorithm>
#include <set>

#include <ATen/core/Tensor.h>

#include "capture.hpp"
#include "packed_layer.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/runtime/weight_tensor.hpp"

namespace tersor {
namespace {

const Slot& find(const std::vector<Slot>& all, std::string_view name) {
  for (const Slot& slot : all)
    if (slot.name == name) return slot;
  throw fail(ErrorCode::NoSuchTarget, "the module has no parameter or buffer '{}' any more", escaped(name));
}

std::string weight_beside(const Slot& slot) {
  return slot.name.substr(0, slot.name.size() - slot.own_name.size()) + "weight";
}

void check_no_graph(const std::string& name, const at::Tensor& tensor) {
  check(!graph_alive(tensor), ErrorCode::BadUsage,
        "the graph of an earlier forward still holds '{}'; drop its outputs and losses before the network is changed",
        escaped(name));
}

}  // namespace

ModuleModel::ModuleModel(Script capture, EagerNetwork eager)
    : ScriptModel(std::move(capture)), eager_(std::make_shared<const EagerNetwork>(std::move(eager))) {
  script_.training = training_flags(eager_->module);
  std::map<std::string, at::Tensor> held;
  for (const NamedTensor& tensor : named_tensors(script_.root)) held.emplace(tensor.name, tensor.tensor);
  for (const Slot& slot : slots(eager_->module))
    if (const auto found = held.find(slot.name); found != held.end())
      check(found->second.is_same(slot.tensor), ErrorCode::UnsupportedModel,
            "Model::wrap: '{}' shares its memory with another parameter without being the same tensor",
            escaped(slot.name));
}

std::shared_ptr<Model::Impl> ModuleModel::clone() const {
  const auto copy = std::make_shared<ModuleModel>(*this);
  copy->become_copy();
  if (!eager_) return copy;
  copy->eager_.reset();
  copy->plain_.clear();
  copy->masks_ = Masks();
  copy->optimizers_.clear();
  std::set<const c10::TensorImpl*> captured;
  for (const NamedTensor& tensor : named_tensors(script_.root)) captured.insert(tensor.tensor.unsafeGetTensorImpl());
  for (const Slot& slot : slots(eager_->module)) {
    if (is_weight_tensor(slot.tensor)) continue;
    if (!captured.contains(slot.tensor.unsafeGetTensorImpl())) copy->rest_[slot.name] = slot.tensor.detach().clone();
    if (slot.tensor.grad().defined()) copy->grads_[slot.name] = slot.tensor.grad();
  }
  for (const std::string& name : masks_.names()) copy->mask_values_[name] = masks_.mask(name);
  for (torch::optim::Optimizer* optimizer : optimizers_) copy->states_.emplace_back(*optimizer);
  return copy;
}

void ModuleModel::assign(Impl&& other) {
  ModuleModel& theirs = dynamic_cast<ModuleModel&>(other);
  if (!eager_) {
    *this = std::move(theirs);
    return;
  }
  std::map<std::string, at::Tensor> values;
  for (const auto& [name, tensor] : theirs.rest_) values[name] = tensor.clone();
  for (const NamedTensor& tensor : named_tensors(theirs.script_.root)) values[tensor.name] = tensor.tensor.detach();
  std::map<std::string, c10::IValue> codes;
  for (const PackedWeight& packed : packed_weights(theirs.script_.root)) codes[packed.weight] = packed.packed;

  for (Slot& slot : slots(eager_->module)) {
    const auto value = values.find(slot.name);
    if (value == values.end()) {
      const bool added = slot.own_name == "bias" && takes_bias(*slot.owner) && !codes.contains(weight_beside(slot));
      if (added) replace_parameter(*slot.owner, slot.own_name, at::Tensor());
    } else if (is_weight_tensor(slot.tensor)) {
      restore_plain(slot, value->second);
    } else {
      slot.tensor.set_data(value->second);
      if (slot.tensor.grad().defined() && slot.tensor.grad().sizes() != slot.tensor.sizes())
        slot.tensor.mutable_grad() = theirs.grads_[slot.name];
    }
  }
  static_cast<ScriptModel&>(*this) = static_cast<ScriptModel&&>(theirs);
  graph_changed();
  for (const auto& [weight, packed] : codes) install_codes(weight, packed);
  hold_module_tensors();
  for (const OptimizerSnapshot& state : theirs.states_) state.restore();
  masks_.release();
  const std::vector<Slot> all = slots(eager_->module);
  for (const auto& [name, keep] : theirs.mask_values_) masks_.set(name, find(all, name).tensor, keep);
  sync_options();
}

std::vector<Layer> ModuleModel::layers() const {
  std::vector<Layer> layers = ScriptModel::layers();
  if (!eager_) return layers;
  const std::vector<Slot> all = slots(eager_->module);
  for (Layer& layer : layers) {
    if (layer.quantized) continue;
    const Slot& slot = find(all, layer.weight);
    if (slot.own_name != "weight" || !takes_codes(*slot.owner, layer.kind))
      layer.float_only = fmt::format("its weight belongs to a {}, whose forward is not known to take codes",
                                     escaped(slot.owner->name()));
  }
  return layers;
}

std::vector<at::Tensor> ModuleModel::forward(const std::vector<at::Tensor>& inputs) const {
  if (!eager_) return ScriptModel::forward(inputs);
  const EvalMode eval(eager_->module);
  // Copies: a module that works in place must not change the caller's samples.
  std::vector<at::Tensor> copies;
  for (const at::Tensor& input : inputs) copies.push_back(input.clone());
  try {
    return eager_->forward(copies);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw fail(ErrorCode::UnsupportedModel, "the module does not run on these inputs: {}", escaped(first_line(error)));
  }
}

void ModuleModel::refresh() {
  ScriptModel::refresh();
  if (!eager_) return;
  sync_options();
  update_biases();
  std::vector<at::Tensor> outputs;
  try {
    outputs = forward(example);
  } catch (const Error& error) {
    throw fail(ErrorCode::UnsupportedGraph, "the module's own code does not follow: {}", error.message());
  }
  const auto different = first_difference(outputs, ScriptModel::forward(example));
  check(!different, ErrorCode::UnsupportedGraph,
        "the module's own code does not follow: its output {} is not what it should be", different.value_or(0));
}

std::vector<std::string> ModuleModel::keep(const std::string& name, std::int64_t dim, const at::Tensor& indices) {
  if (!eager_) return ScriptModel::keep(name, dim, indices);
  const at::Tensor tensor = attribute(name);
  check_no_graph(name, tensor);
  std::vector<Slot> cut;
  for (const Slot& slot : slots(eager_->module))
    for (const auto& [norm, producer] : folded)
      // The identity that stands where a BatchNorm was folded is as wide as what comes in.
      if (dim == 0 && slot.name.starts_with(norm + ".") && slot.tensor.dim() == 1 && name == producer + ".weight")
        cut.push_back(slot);
  for (torch::optim::Optimizer* optimizer : optimizers_) keep_in_state(*optimizer, tensor, dim, indices);
  std::vector<std::string> names = ScriptModel::keep(name, dim, indices);
  keep_in_grad(tensor, dim, indices);
  for (const std::string& alias : names) masks_.keep(alias, dim, indices);
  for (Slot& slot : cut) {
    for (torch::optim::Optimizer* optimizer : optimizers_) keep_in_state(*optimizer, slot.tensor, dim, indices);
    slot.tensor.set_data(slot.tensor.detach().index_select(0, indices));
    keep_in_grad(slot.tensor, dim, indices);
  }
  return names;
}

void ModuleModel::mask(const std::string& name, const at::Tensor& keep) {
  if (eager_) masks_.set(name, attribute(name), keep);
}

void ModuleModel::release_masks() { masks_.release(); }

void ModuleModel::follow(torch::optim::Optimizer& optimizer) {
  check_followed(optimizer);
  if (std::find(optimizers_.begin(), optimizers_.end(), &optimizer) == optimizers_.end())
    optimizers_.push_back(&optimizer);
}

void ModuleModel::fold_into(const Layer& batch_norm, const Layer& producer, const at::Tensor& weight,
                            const at::Tensor& bias) {
  if (!eager_) return ScriptModel::fold_into(batch_norm, producer, weight, bias);
  const std::vector<Slot> all = slots(eager_->module);
  const Slot& norm = find(all, batch_norm.weight);
  const Slot& target = find(all, producer.weight);
  check(is_batch_norm(*norm.owner), ErrorCode::UnsupportedLayer,
        "layer '{}' is a {}; only a torch::nn::BatchNorm1d/2d/3d can become the identity", escaped(batch_norm.name),
        escaped(norm.owner->name()));
  check(!producer.bias.empty() || takes_bias(*target.owner), ErrorCode::UnsupportedLayer,
        "layer '{}' is a {} and cannot get a bias", escaped(producer.name), escaped(target.owner->name()));
  ScriptModel::fold_into(batch_norm, producer, weight, bias);
  if (producer.bias.empty()) {
    at::Tensor added = attribute(producer.name + ".bias");
    added.set_requires_grad(target.tensor.requires_grad());
    replace_parameter(*target.owner, "bias", added);
  }
  become_identity(*norm.owner);
}

void ModuleModel::quantize_layer(const Layer& layer, const LayerQuantization& quantization) {
  check(layer.float_only.empty(), ErrorCode::UnsupportedLayer, "layer '{}' cannot be quantized: {}",
        escaped(layer.name), layer.float_only);
  if (eager_) check_no_graph(layer.weight, attribute(layer.weight));
  ScriptModel::quantize_layer(layer, quantization);
  if (eager_) install_codes(layer.weight, attribute_at(script_.root, packed_name(layer.weight)));
}

void ModuleModel::dequantize_layers() {
  ScriptModel::dequantize_layers();
  if (!eager_) return;
  for (const Slot& slot : slots(eager_->module))
    if (is_weight_tensor(slot.tensor)) restore_plain(slot, dequantize(quantization_of(slot.tensor).weight));
  hold_module_tensors();
}

void ModuleModel::save(const std::filesystem::path& path, const SaveOptions& options,
                       const std::map<std::string, std::string>& metadata) const {
  ModuleModel current(*this);
  current.script_ = rebuild(script_, false);
  current.update_biases();
  current.script_.training = eager_ ? training_flags(eager_->module) : script_.training;
  current.ScriptModel::save(path, options, metadata);
}

/// Every handle of the module that holds the weight gets the codes, where its layer takes them.
void ModuleModel::install_codes(const std::string& weight, const c10::IValue& packed) {
  const std::vector<Slot> all = slots(eager_->module);
  const at::Tensor before = find(all, weight).tensor;
  const at::Tensor codes = weight_tensor(packed, weight);
  bool plain_left = false;
  for (const Slot& slot : all) {
    if (!slot.tensor.is_same(before)) continue;
    if (slot.own_name == "weight" && takes_codes(*slot.owner, packed_kind(packed))) {
      if (!is_weight_tensor(before)) plain_[slot.name] = before;
      replace_parameter(*slot.owner, "weight", codes);
    } else {
      plain_left = true;
    }
  }
  masks_.forget(weight);
  if (plain_left || is_weight_tensor(before)) return;
  // The handle lives on in optimizers; its memory does not.
  at::Tensor emptied = before;
  emptied.mutable_grad().reset();
  emptied.set_data(before.detach().new_empty({0}));
}

void ModuleModel::restore_plain(const Slot& slot, const at::Tensor& values) {
  at::Tensor handle = plain_.at(slot.name);
  handle.set_data(values);
  replace_parameter(*slot.owner, slot.own_name, handle);
  plain_.erase(slot.name);
}

/// The capture reads the module's own tensors.
void ModuleModel::hold_module_tensors() {
  for (const Slot& slot : slots(eager_->module)) {
    if (is_weight_tensor(slot.tensor)) continue;
    const auto [owner, name] = owner_of(script_.root, slot.name);
    if (owner.hasattr(name)) owner._ivalue()->setAttr(name, slot.tensor);
  }
}

/// A quantized layer of the capture holds a copy of the bias; the module's own may have been trained since.
void ModuleModel::update_biases() {
  if (!eager_) return;
  const std::vector<Slot> all = slots(eager_->module);
  for (const PackedWeight& packed : packed_weights(script_.root)) {
    if (packed.bias.empty()) continue;
    const at::Tensor now = find(all, packed.bias).tensor.detach();
    if (now.equal(*packed.bias_values)) continue;
    const auto [owner, name] = owner_of(script_.root, packed_name(packed.weight));
    owner._ivalue()->setAttr(name, pack_layer(packed_kind(packed.packed), packed.quantization, now.clone()));
    graph_changed();
  }
}

void ModuleModel::sync_options() const {
  const std::vector<Slot> all = slots(eager_->module);
  for (const Layer& layer : ScriptModel::layers())
    if (const Slot& slot = find(all, layer.weight); slot.own_name == "weight") set_groups(*slot.owner, layer.groups);
  for (const Slot& slot : all) tersor::sync_options(*slot.owner);
}

namespace {

/// A trace sees no codes: while a module is captured, its quantized weights are plain tensors.
class WithoutCodes {
 public:
  explicit WithoutCodes(const std::shared_ptr<torch::nn::Module>& module) {
    std::map<const c10::TensorImpl*, at::Tensor> plain;
    for (const Slot& slot : slots(module)) {
      if (!is_weight_tensor(slot.tensor)) continue;
      at::Tensor& values = plain[slot.tensor.unsafeGetTensorImpl()];
      if (!values.defined()) values = slot.tensor.dequantize();
      quantized_.push_back(slot);
      replace_parameter(*slot.owner, slot.own_name, values);
    }
  }
  ~WithoutCodes() {
    for (const Slot& slot : quantized_) replace_parameter(*slot.owner, slot.own_name, slot.tensor);
  }
  WithoutCodes(const WithoutCodes&) = delete;
  WithoutCodes& operator=(const WithoutCodes&) = delete;

  /// The model takes over: its layers get their codes.
  void hand_to(Model::Impl& model) {
    for (const Layer& layer : model.layers())
      for (const Slot& slot : quantized_)
        if (slot.name == layer.weight) model.quantize_layer(layer, quantization_of(slot.tensor));
    quantized_.clear();
  }

 private:
  std::vector<Slot> quantized_;
};

}  // namespace

Model Model::wrap_network(EagerNetwork network, std::vector<at::Tensor> example, const WrapOptions& options) {
  const at::NoGradGuard no_grad;
  WithoutCodes plain(network.module);
  Script script = capture(network, example, options);
  const auto impl = std::make_shared<ModuleModel>(std::move(script), std::move(network));
  plain.hand_to(*impl);
  for (const std::string& name : options.masks.names()) {
    impl->mask(name, options.masks.mask(name));
    impl->masked.push_back(name);
  }
  impl->example = std::move(example);
  return Model(impl);
}

}  // namespace tersor
