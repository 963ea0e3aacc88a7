#include <algorithm>
#include <set>

#include <ATen/core/Tensor.h>

#include "script.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {

std::shared_ptr<Model::Impl> ScriptModel::clone() const {
  auto copy = std::make_shared<ScriptModel>(*this);
  copy->script_ = rebuild(script_, true);
  copy->wishes_.clear();
  copy->origins_.clear();
  copy->runner_.reset();
  copy->known_graph.reset();
  return copy;
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

at::Tensor ScriptModel::tensor(const std::string& name) const {
  for (const NamedTensor& tensor : named_tensors(script_.root))
    if (tensor.name == name) return tensor.tensor.detach();
  for (const PackedWeight& packed : packed_weights(script_.root)) {
    if (packed.weight == name) return dequantize(packed.quantization.weight);
    if (packed.bias == name) return *packed.bias_values;
  }
  throw fail(ErrorCode::NoSuchTarget, "the model has no tensor '{}'", escaped(name));
}

at::Tensor ScriptModel::attribute(const std::string& name) const {
  for (const NamedTensor& tensor : named_tensors(script_.root))
    if (tensor.name == name) return tensor.tensor;
  throw fail(ErrorCode::UnsupportedLayer,
             "'{}' has become codes and cannot be changed any more; put this pass before quantization", escaped(name));
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
    flatten(runner_->get_method("forward")(bind_inputs(script_.arguments, inputs)), outputs);
    return outputs;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw fail(ErrorCode::UnsupportedModel, "the network does not run on these inputs: {}", escaped(first_line(error)));
  }
}

void ScriptModel::observe(const std::vector<at::Tensor>& inputs, const Observer& see) const {
  const std::vector<LayerUse> uses = this->uses();
  std::unordered_map<const jit::Node*, std::pair<const Layer*, const LayerCall*>> finished_by;
  for (const LayerUse& use : uses)
    for (const LayerCall& call : use.calls) finished_by[call.output->node()] = {&use.layer, &call};

  // Copies: an operator that works in place must not change the caller's samples.
  std::vector<at::Tensor> copies;
  for (const at::Tensor& input : inputs) copies.push_back(input.clone());
  interpret(script_, copies, [&](const jit::Node* node, const ValueLookup& value) {
    const auto call = finished_by.find(node);
    if (call == finished_by.end()) return;
    const auto& [layer, what] = call->second;
    see(*layer, value(what->input()).toTensor(), value(what->output).toTensor());
  });
}

Graph ScriptModel::build_graph() const { return record(script_, example, origins_); }

void ScriptModel::graph_changed() { runner_.reset(); }

}  // namespace tersor
