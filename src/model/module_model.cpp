#include "module_model.hpp"

#include <algorithm>
#include <set>

#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include "capture.hpp"
#include "packed_layer.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/runtime/weight_tensor.hpp"

namespace tersor {
namespace {

using Slots = std::map<std::string, Slot>;

Slots named_slots(const std::shared_ptr<torch::nn::Module>& module) {
  Slots named;
  for (Slot& slot : slots(module)) named.emplace(slot.name, std::move(slot));
  return named;
}

const Slot& find(const Slots& all, const std::string& name) {
  const auto found = all.find(name);
  check(found != all.end(), ErrorCode::NoSuchTarget, "the module has no parameter or buffer '{}'", escaped(name));
  return found->second;
}

/// The tensor that the capture holds under one of its names; undefined when it holds none.
at::Tensor held_tensor(const Script& script, const std::string& name) {
  const auto held = find_attribute(script.root, name);
  return held && held->isTensor() ? held->toTensor() : at::Tensor();
}

void check_no_graph(const std::string& name, const at::Tensor& tensor) {
  check(!graph_alive(tensor), ErrorCode::BadUsage,
        "the graph of an earlier forward still holds '{}'; drop its outputs and losses before the network is changed",
        escaped(name));
}

void empty(at::Tensor handle) {
  handle.mutable_grad().reset();
  handle.set_data(handle.detach().new_empty({0}));
}

at::Tensor cut(const at::Tensor& tensor, std::int64_t dim, const at::Tensor& indices) {
  return tensor.detach().index_select(dim, indices.to(tensor.device()));
}

}  // namespace

/// One edit: refused when somebody else has changed the module meanwhile. What it leaves, also by an exception, is
/// what the next one expects.
class ModuleModel::Edit {
 public:
  explicit Edit(ModuleModel& model) : model_(model) { model.check_unchanged(); }
  ~Edit() { model_.remember_module(); }
  Edit(const Edit&) = delete;
  Edit& operator=(const Edit&) = delete;

 private:
  ModuleModel& model_;
  const OrdinaryTensors ordinary_;
};

ModuleModel::ModuleModel(Script capture, EagerNetwork eager)
    : ScriptModel(std::move(capture)), eager_(std::make_shared<const EagerNetwork>(std::move(eager))) {
  script_.training = training_flags(eager_->module);
  for (const Slot& slot : slots(eager_->module))
    check(held_tensor(script_, slot.name).is_same(slot.tensor), ErrorCode::UnsupportedModel,
          "Model::wrap: '{}' shares its memory with another parameter without being the same tensor",
          escaped(slot.name));
}

void ModuleModel::remember_module() {
  if (!eager_) return;
  known_ = named_slots(eager_->module);
  known_shapes_.clear();
  for (const auto& [name, slot] : known_) known_shapes_[name] = slot.tensor.sizes().vec();
}

void ModuleModel::check_unchanged() const {
  if (!eager_) return;
  const auto changed = [](const std::string& what) {
    throw fail(ErrorCode::BadUsage, "the module was changed after Model::wrap: {}; wrap it again", what);
  };
  Slots now = named_slots(eager_->module);
  for (const auto& [name, slot] : now) {
    const auto then = known_.find(name);
    if (then == known_.end()) changed(fmt::format("'{}' is new", escaped(name)));
    if (slot.owner != then->second.owner) changed(fmt::format("'{}' is another layer now", escaped(slot.layer())));
    if (!slot.tensor.is_same(then->second.tensor)) changed(fmt::format("'{}' is another tensor now", escaped(name)));
    const std::vector<std::int64_t>& shape = known_shapes_.at(name);
    if (slot.tensor.sizes() != at::IntArrayRef(shape))
      changed(fmt::format("'{}' is [{}] now and was [{}]", escaped(name), fmt::join(slot.tensor.sizes(), ", "),
                          fmt::join(shape, ", ")));
  }
  for (const auto& [name, slot] : known_)
    if (!now.contains(name)) changed(fmt::format("'{}' is gone", escaped(name)));
}

std::shared_ptr<Model::Impl> ModuleModel::clone() const {
  check_unchanged();
  const OrdinaryTensors ordinary;
  const auto copy = std::make_shared<ModuleModel>(*this);
  copy->become_copy();
  if (!eager_) return copy;
  copy->eager_.reset();
  copy->known_.clear();
  copy->known_shapes_.clear();
  copy->plain_.clear();
  copy->masks_ = Masks();
  copy->optimizers_.clear();
  std::set<const c10::TensorImpl*> seen;
  for (const Slot& slot : slots(eager_->module)) {
    if (is_weight_tensor(slot.tensor)) {
      copy->codes_[slot.name] = slot.tensor;
      continue;
    }
    const bool fresh = seen.insert(slot.tensor.unsafeGetTensorImpl()).second;
    if (fresh && !held_tensor(script_, slot.name).defined()) copy->rest_[slot.name] = slot.tensor.detach().clone();
    if (slot.tensor.grad().defined()) copy->grads_[slot.name] = slot.tensor.grad();
  }
  for (const std::string& name : masks_.names()) copy->mask_values_[name] = masks_.mask(name);
  for (torch::optim::Optimizer* optimizer : optimizers_) copy->states_.emplace_back(*optimizer);
  return copy;
}

/// What a clone may have become that a module cannot follow.
void ModuleModel::check_assignable(const ModuleModel& theirs) const {
  for (const auto& [norm, producer] : theirs.folded)
    check(folded.contains(norm), ErrorCode::BadUsage,
          "assign: '{}' was folded in a clone, which the module does not follow; fold it in the wrapped model itself",
          escaped(norm));
  const Slots all = named_slots(eager_->module);
  for (const PackedWeight& packed : packed_weights(theirs.script_.root)) {
    const Slot& slot = find(all, packed.weight);
    check(slot.own_name == "weight" && takes_codes(*slot.owner, packed_kind(packed.packed)),
          ErrorCode::UnsupportedLayer, "assign: '{}' was quantized in a clone, but the module's {} does not take codes",
          escaped(packed.weight), escaped(slot.owner->name()));
    if (!is_weight_tensor(slot.tensor) && !theirs.codes_.contains(packed.weight))
      check_no_graph(slot.name, slot.tensor);
  }
  if (theirs.cuts_.empty()) return;
  for (const auto& [name, slot] : all) {
    const at::Tensor value = held_tensor(theirs.script_, name);
    if (value.defined() && value.sizes() != slot.tensor.sizes()) check_no_graph(name, slot.tensor);
  }
}

void ModuleModel::assign(Impl&& other) {
  ModuleModel& theirs = dynamic_cast<ModuleModel&>(other);
  if (!eager_) {
    *this = std::move(theirs);
    return;
  }
  const Edit edit(*this);
  check_assignable(theirs);
  assign_tensors(theirs);

  static_cast<ScriptModel&>(*this) = static_cast<ScriptModel&&>(theirs);
  graph_changed();
  for (const PackedWeight& packed : packed_weights(script_.root)) {
    const auto held = theirs.codes_.find(packed.weight);
    const bool same = held != theirs.codes_.end() &&
                      quantization_of(held->second).weight.codes.is_same(packed.quantization.weight.codes);
    install_codes(packed.weight, same ? held->second : weight_tensor(packed.packed, packed.weight));
  }
  hold_module_tensors();

  const Slots all = named_slots(eager_->module);
  for (const auto& [name, slot] : all) {
    if (!slot.is_parameter || is_weight_tensor(slot.tensor)) continue;
    const at::Tensor gradient = theirs.grads_[name];
    const bool fits = gradient.defined() && gradient.sizes() == slot.tensor.sizes();
    slot.tensor.mutable_grad() = fits ? gradient : at::Tensor();
  }
  for (const OptimizerSnapshot& state : theirs.states_) state.restore();
  for (const Cut& made : theirs.cuts_)
    for (torch::optim::Optimizer* optimizer : optimizers_)
      keep_in_state(*optimizer, find(all, made.tensor).tensor, made.dim, made.indices);
  masks_.release();
  for (const auto& [name, keep] : theirs.mask_values_) masks_.set(name, find(all, name).tensor, keep);
  sync_options();
}

/// The module's tensors but the codes take the values of `theirs`.
void ModuleModel::assign_tensors(ModuleModel& theirs) {
  const std::vector<Slot> all = slots(eager_->module);
  std::map<const c10::TensorImpl*, at::Tensor> rest;
  for (const Slot& slot : all)
    if (const auto value = theirs.rest_.find(slot.name); value != theirs.rest_.end())
      rest[slot.tensor.unsafeGetTensorImpl()] = value->second.clone();
  for (const Slot& slot : all) {
    if (find_attribute(theirs.script_.root, packed_name(slot.name))) continue;
    const auto unread = rest.find(slot.tensor.unsafeGetTensorImpl());
    const std::optional<at::Tensor> value =
        unread != rest.end() ? std::optional(unread->second) : theirs.find_tensor(slot.name);
    if (!value) {
      // Another name of a weight that is codes, or a bias that folding added.
      if (slot.own_name == "bias" && takes_bias(*slot.owner))
        replace_parameter(*slot.owner, slot.own_name, at::Tensor());
    } else if (!is_weight_tensor(slot.tensor)) {
      at::Tensor handle = slot.tensor;
      handle.set_data(*value);
    } else if (!held_tensor(script_, slot.name).defined()) {  // else forward does not read it, and it stays as it is
      restore_plain(slot, *value);
    }
  }
}

std::vector<Layer> ModuleModel::layers() const {
  std::vector<Layer> layers = ScriptModel::layers();
  if (!eager_) return layers;
  const Slots all = named_slots(eager_->module);
  std::map<const c10::TensorImpl*, std::string> also_read_by;
  for (const auto& [name, slot] : all)
    if (const at::Tensor weight = unregistered_weight(*slot.owner); weight.defined())
      also_read_by[weight.unsafeGetTensorImpl()] = slot.layer();
  for (Layer& layer : layers) {
    if (layer.quantized) continue;
    const Slot& slot = find(all, layer.weight);
    if (slot.own_name != "weight" || !takes_codes(*slot.owner, layer.kind))
      layer.float_only = fmt::format("its weight belongs to a {}, whose forward is not known to take codes",
                                     escaped(slot.owner->name()));
    else if (const auto other = also_read_by.find(slot.tensor.unsafeGetTensorImpl()); other != also_read_by.end())
      layer.float_only = fmt::format("'{}' reads its weight too, without having registered it", escaped(other->second));
  }
  return layers;
}

std::vector<at::Tensor> ModuleModel::forward(const std::vector<at::Tensor>& inputs) const {
  if (!eager_) return ScriptModel::forward(inputs);
  const EvalMode eval(eager_->module);
  try {
    return eager_->forward(copies(inputs));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw fail(ErrorCode::UnsupportedModel, "the module does not run on these inputs: {}", escaped(first_line(error)));
  }
}

void ModuleModel::observe(const std::vector<at::Tensor>& inputs, const Observer& see) const {
  const std::optional<EvalMode> eval = eval_mode();
  ScriptModel::observe(inputs, see);
}

void ModuleModel::refresh() {
  const std::optional<EvalMode> eval = eval_mode();
  ScriptModel::refresh();
  if (!eager_) return;
  const OrdinaryTensors ordinary;
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

/// The identity that stands where a BatchNorm was folded is as wide as what comes in: cut with the layer's bias.
bool ModuleModel::is_identity_behind(const std::string& slot, const std::string& tensor) const {
  return std::any_of(folded.begin(), folded.end(), [&](const auto& fold) {
    return tensor == fold.second + ".bias" && slot.starts_with(fold.first + ".");
  });
}

std::vector<std::string> ModuleModel::keep(const std::string& name, std::int64_t dim, const at::Tensor& indices) {
  if (!eager_) return keep_in_clone(name, dim, indices);
  const Edit edit(*this);
  const at::Tensor tensor = attribute(name);
  check_no_graph(name, tensor);
  for (torch::optim::Optimizer* optimizer : optimizers_) keep_in_state(*optimizer, tensor, dim, indices);
  std::vector<std::string> names = ScriptModel::keep(name, dim, indices);
  keep_in_grad(tensor, dim, indices);
  for (const std::string& alias : names) masks_.keep(alias, dim, indices);
  for (Slot& slot : slots(eager_->module)) {
    if (slot.tensor.dim() != 1 || !is_identity_behind(slot.name, name)) continue;
    for (torch::optim::Optimizer* optimizer : optimizers_) keep_in_state(*optimizer, slot.tensor, 0, indices);
    slot.tensor.set_data(cut(slot.tensor, 0, indices));
    keep_in_grad(slot.tensor, 0, indices);
  }
  return names;
}

/// What belongs to the module is cut too, and what an optimizer remembers will be.
std::vector<std::string> ModuleModel::keep_in_clone(const std::string& name, std::int64_t dim,
                                                    const at::Tensor& indices) {
  std::vector<std::string> names = ScriptModel::keep(name, dim, indices);
  cuts_.push_back({name, dim, indices});
  for (const std::string& alias : names)
    for (auto* held : {&mask_values_, &grads_})
      if (const auto found = held->find(alias); found != held->end()) found->second = cut(found->second, dim, indices);
  for (auto& [slot, values] : rest_) {
    if (values.dim() != 1 || !is_identity_behind(slot, name)) continue;
    values = cut(values, 0, indices);
    cuts_.push_back({slot, 0, indices});
    if (const auto found = grads_.find(slot); found != grads_.end()) found->second = cut(found->second, 0, indices);
  }
  return names;
}

void ModuleModel::rewrite(const std::string& name, const at::Tensor& values) {
  const Edit edit(*this);
  ScriptModel::rewrite(name, values);
}

void ModuleModel::set_argument(NodeId node, std::size_t index, const c10::IValue& value) {
  check_unchanged();
  ScriptModel::set_argument(node, index, value);
}

void ModuleModel::mask(const std::string& name, const at::Tensor& keep) {
  const Edit edit(*this);
  if (eager_)
    masks_.set(name, attribute(name), keep);
  else
    mask_values_[name] = keep.clone();
}

void ModuleModel::release_masks() {
  masks_.release();
  mask_values_.clear();
}

void ModuleModel::follow(torch::optim::Optimizer& optimizer) {
  check_followed(optimizer);
  if (std::find(optimizers_.begin(), optimizers_.end(), &optimizer) == optimizers_.end())
    optimizers_.push_back(&optimizer);
}

void ModuleModel::fold_into(const Layer& batch_norm, const Layer& producer, const at::Tensor& weight,
                            const at::Tensor& bias) {
  if (!eager_) return ScriptModel::fold_into(batch_norm, producer, weight, bias);
  const Edit edit(*this);
  const Slots all = named_slots(eager_->module);
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
  const Edit edit(*this);
  const std::string weight = layer.weight;
  if (eager_) check_no_graph(weight, attribute(weight));
  ScriptModel::quantize_layer(layer, quantization);
  if (eager_)
    install_codes(weight, weight_tensor(attribute_at(script_.root, packed_name(weight)), weight));
  else
    mask_values_.erase(weight);
}

void ModuleModel::dequantize_layers() {
  const Edit edit(*this);
  ScriptModel::dequantize_layers();
  if (!eager_) {
    for (auto entry = rest_.begin(); entry != rest_.end();) {
      at::Tensor bias = held_tensor(script_, entry->first);
      if (bias.defined()) bias.set_data(entry->second.clone());
      entry = bias.defined() ? rest_.erase(entry) : std::next(entry);
    }
    for (const std::string& name : masked) mask_values_.try_emplace(name, attribute(name).ne(0));
    return;
  }
  std::map<const c10::TensorImpl*, at::Tensor> values;
  const std::vector<Slot> all = slots(eager_->module);
  for (const Slot& slot : all)
    if (const at::Tensor held = held_tensor(script_, slot.name); is_weight_tensor(slot.tensor) && held.defined())
      values[slot.tensor.unsafeGetTensorImpl()] = held.detach().to(slot.tensor.scalar_type());
  for (const Slot& slot : all) {
    if (!is_weight_tensor(slot.tensor)) continue;
    const at::Tensor handle = plain_.at(slot.name);
    restore_plain(slot, values.at(slot.tensor.unsafeGetTensorImpl()));
    // As after a reload: what is zero stays zero.
    if (std::binary_search(masked.begin(), masked.end(), slot.name)) masks_.set(slot.name, handle, handle.ne(0));
  }
  hold_module_tensors();
}

void ModuleModel::save(const std::filesystem::path& path, const SaveOptions& options,
                       const std::map<std::string, std::string>& metadata) const {
  check_unchanged();
  const OrdinaryTensors ordinary;
  ModuleModel current(*this);
  current.script_ = rebuild(script_, false);
  current.script_.training = eager_ ? training_flags(eager_->module) : script_.training;
  const std::optional<EvalMode> eval = eval_mode();
  current.update_biases();
  current.ScriptModel::save(path, options, metadata);
}

/// The capture stands for the module in eval mode, and some modules change their weights as they enter it.
std::optional<EvalMode> ModuleModel::eval_mode() const {
  return eager_ ? std::optional<EvalMode>(std::in_place, eager_->module) : std::nullopt;
}

/// Every handle of the module that holds the weight gets the codes, where its layer takes them.
void ModuleModel::install_codes(const std::string& weight, const at::Tensor& codes) {
  const Slots all = named_slots(eager_->module);
  const at::Tensor before = find(all, weight).tensor;
  if (before.is_same(codes)) return;
  const LayerKind kind = packed_kind(attribute_at(script_.root, packed_name(weight)));
  bool plain_left = false;
  for (const auto& [name, slot] : all) {
    if (!slot.tensor.is_same(before)) continue;
    if (slot.own_name == "weight" && takes_codes(*slot.owner, kind)) {
      if (!is_weight_tensor(before)) plain_[name] = before;
      replace_parameter(*slot.owner, "weight", codes);
    } else {
      plain_left = true;
    }
  }
  masks_.forget(weight);
  if (plain_left || is_weight_tensor(before)) return;
  // The handle lives on in optimizers; its memory does not.
  empty(before);
  for (torch::optim::Optimizer* optimizer : optimizers_) resized_in_state(*optimizer, before);
}

void ModuleModel::adopt_codes(const std::vector<Slot>& quantized) {
  std::map<std::string, at::Tensor> codes;
  for (const Slot& slot : quantized) codes[slot.name] = slot.tensor;
  const Slots all = named_slots(eager_->module);
  for (const auto& [name, tensor] : codes) plain_[name] = find(all, name).tensor;
  for (const Layer& layer : layers()) {
    const auto found = codes.find(layer.weight);
    if (found == codes.end() || !layer.float_only.empty()) continue;
    ScriptModel::quantize_layer(layer, quantization_of(found->second));
    empty(plain_.at(layer.weight));
  }
  known_layers.reset();
}

void ModuleModel::restore_plain(const Slot& slot, const at::Tensor& values) {
  at::Tensor handle = plain_.at(slot.name);
  handle.set_data(values);
  replace_parameter(*slot.owner, slot.own_name, handle);
  plain_.erase(slot.name);
  for (torch::optim::Optimizer* optimizer : optimizers_) resized_in_state(*optimizer, handle);
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
  const Slots all = named_slots(eager_->module);
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
  const Slots all = named_slots(eager_->module);
  for (const Layer& layer : ScriptModel::layers())
    if (const Slot& slot = find(all, layer.weight); slot.own_name == "weight") set_groups(*slot.owner, layer.groups);
  for (const auto& [name, slot] : all) tersor::sync_options(*slot.owner);
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
      if (!values.defined()) values = slot.tensor.dequantize().set_requires_grad(true);
      quantized_.push_back(slot);
      replace_parameter(*slot.owner, slot.own_name, values);
    }
  }
  ~WithoutCodes() {
    for (const Slot& slot : quantized_) replace_parameter(*slot.owner, slot.own_name, slot.tensor);
  }
  WithoutCodes(const WithoutCodes&) = delete;
  WithoutCodes& operator=(const WithoutCodes&) = delete;

  const std::vector<Slot>& quantized() const { return quantized_; }

 private:
  std::vector<Slot> quantized_;
};

void check_masks(const Masks& masks, const Slots& all) {
  for (const std::string& name : masks.names()) {
    const auto slot = all.find(name);
    check(slot != all.end(), ErrorCode::NoSuchTarget,
          "WrapOptions::masks: the module has no parameter '{}', which is masked", escaped(name));
    check(!is_weight_tensor(slot->second.tensor), ErrorCode::BadUsage,
          "WrapOptions::masks: '{}' holds codes and takes no mask; call dequantize(model) first", escaped(name));
    const at::Tensor mask = masks.mask(name);
    check(mask.sizes() == slot->second.tensor.sizes(), ErrorCode::BadShape,
          "WrapOptions::masks: the mask of '{}' is [{}], but the parameter is [{}]", escaped(name),
          fmt::join(mask.sizes(), ", "), fmt::join(slot->second.tensor.sizes(), ", "));
  }
}

}  // namespace

Model Model::wrap_network(EagerNetwork network, std::vector<at::Tensor> example, const WrapOptions& options) {
  const OrdinaryTensors ordinary;
  const std::shared_ptr<torch::nn::Module> module = network.module;
  const Slots all = named_slots(module);
  for (const auto& [name, slot] : all)
    check(!slot.tensor.is_inference(), ErrorCode::UnsupportedModel,
          "Model::wrap: '{}' was made within torch::InferenceMode and can never be changed; construct the module "
          "outside of it",
          escaped(name));
  check_masks(options.masks, all);
  std::shared_ptr<ModuleModel> impl;
  {
    const WithoutCodes plain(module);
    Script script = capture(network, example, options);
    impl = std::make_shared<ModuleModel>(std::move(script), std::move(network));
    impl->adopt_codes(plain.quantized());
  }
  impl->remember_module();
  for (const std::string& name : options.masks.names()) {
    impl->mask(name, options.masks.mask(name));
    impl->masked.push_back(name);
  }
  impl->example = std::move(example);
  return Model(impl);
}

}  // namespace tersor
