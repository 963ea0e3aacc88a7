#include <algorithm>
#include <set>

#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <fmt/ranges.h>

#include "script.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& input : inputs) copies.push_back(input.clone());
  return copies;
}

std::shared_ptr<Model::Impl> ScriptModel::clone() const {
  auto copy = std::make_shared<ScriptModel>(*this);
  copy->become_copy();
  return copy;
}

void ScriptModel::become_copy() {
  script_ = rebuild(script_, true);
  wishes_.clear();
  origins_.clear();
  graph_changed();
  known_graph.reset();
}

std::vector<std::string> ScriptModel::tensor_names() const {
  std::set<std::string> names;
  for (const NamedTensor& tensor : named_tensors(script_.root)) names.insert(tensor.name);
  for (const PackedWeight& packed : packed_weights(script_.root)) {
    names.insert(packed.weight);
    if (!packed.bias.empty()) names.insert(packed.bias);
  }
  return {names.begin(), names.end()};
}

std::optional<at::Tensor> ScriptModel::find_tensor(const std::string& name) const {
  const auto held = find_attribute(script_.root, name);
  if (held && held->isTensor() && held->toTensor().defined()) return held->toTensor().detach();
  // The weight or the bias of a layer whose codes stand beside them.
  const std::size_t dot = name.rfind('.');
  const std::string prefix = dot == std::string::npos ? "" : name.substr(0, dot + 1);
  const auto owner = dot == std::string::npos ? std::optional<c10::IValue>(script_.root._ivalue())
                                              : find_attribute(script_.root, name.substr(0, dot));
  if (!owner || !owner->isModule()) return std::nullopt;
  const jit::ModulePtr module = owner->toObject();
  for (std::size_t i = 0; i < module->type()->numAttributes(); ++i) {
    const auto packed = as_packed(prefix + module->type()->getAttributeName(i), module->getSlot(i));
    if (packed && packed->weight == name) return dequantize(packed->quantization.weight);
    if (packed && packed->bias == name) return *packed->bias_values;
  }
  return std::nullopt;
}

at::Tensor ScriptModel::attribute(const std::string& name) const {
  const auto held = find_attribute(script_.root, name);
  check(held && held->isTensor() && held->toTensor().defined(), ErrorCode::UnsupportedLayer,
        "'{}' has become codes and cannot be changed any more; put this pass before quantization", escaped(name));
  return held->toTensor();
}

std::int64_t ScriptModel::nbytes() const {
  std::int64_t bytes = 0;
  std::set<const c10::TensorImpl*> counted;
  for (const NamedTensor& tensor : named_tensors(script_.root))
    if (counted.insert(tensor.tensor.unsafeGetTensorImpl()).second)
      bytes += static_cast<std::int64_t>(tensor.tensor.nbytes());
  for (const PackedWeight& packed : packed_weights(script_.root)) {
    bytes += packed.quantization.weight.nbytes();
    if (packed.bias_values) bytes += static_cast<std::int64_t>(packed.bias_values->nbytes());
  }
  return bytes;
}

std::vector<at::Tensor> ScriptModel::forward(const std::vector<at::Tensor>& inputs) const {
  if (!runner_) runner_ = assemble(script_);
  try {
    std::vector<at::Tensor> outputs;
    flatten(runner_->get_method("forward")(bind_inputs(script_.arguments, copies(inputs))), outputs);
    return outputs;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw fail(ErrorCode::UnsupportedModel, "the network does not run on these inputs: {}", escaped(first_line(error)));
  }
}

void ScriptModel::observe(const std::vector<at::Tensor>& inputs, const Observer& see) const {
  const std::vector<LayerUse>& uses = this->uses();
  std::unordered_map<const jit::Node*, std::pair<const Layer*, const LayerCall*>> finished_by;
  for (const LayerUse& use : uses)
    for (const LayerCall& call : use.calls) finished_by[call.output->node()] = {&use.layer, &call};

  interpret(script_, copies(inputs), [&](const jit::Node* node, const ValueLookup& value) {
    const auto call = finished_by.find(node);
    if (call == finished_by.end()) return;
    const auto& [layer, what] = call->second;
    see(*layer, value(what->input()).toTensor(), value(what->output).toTensor());
  });
}

std::map<std::string, at::Tensor> ScriptModel::gradients(const std::vector<at::Tensor>& inputs,
                                                         const at::Tensor& labels,
                                                         const std::vector<std::string>& parameters) {
  for (const std::string& name : parameters) attribute(name).requires_grad_(true);
  const std::vector<at::Tensor> outputs = ScriptModel::forward(inputs);
  check(!outputs.empty() && outputs[0].is_floating_point() && outputs[0].dim() == labels.dim() + 1 &&
            outputs[0].size(0) == labels.size(0) && labels.scalar_type() == at::kLong,
        ErrorCode::UnsupportedModel,
        "gradients need a first output of [N, classes, …] and int64 labels of [N, …]; the labels are {} {}",
        c10::toString(labels.scalar_type()), fmt::format("[{}]", fmt::join(labels.sizes(), ", ")));
  try {
    at::cross_entropy_loss(outputs[0].to(at::kFloat), labels).backward();
  } catch (const std::exception& error) {
    throw fail(ErrorCode::UnsupportedModel, "no gradient can be computed: {}", escaped(first_line(error)));
  }
  std::map<std::string, at::Tensor> gradients;
  for (const std::string& name : parameters) {
    const at::Tensor gradient = attribute(name).grad();
    check(gradient.defined(), ErrorCode::UnsupportedModel, "no gradient reaches '{}'", escaped(name));
    gradients.emplace(name, gradient);
  }
  return gradients;
}

Graph ScriptModel::build_graph() const { return record(script_, example, origins_); }

void ScriptModel::graph_changed() {
  runner_.reset();
  uses_.reset();
}

}  // namespace tersor
