#include "tersor/model/model.hpp"

#include <algorithm>
#include <charconv>
#include <functional>
#include <limits>

#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "impl.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/io/torchscript_archive.hpp"
#include "tersor/version.hpp"

namespace tersor {
namespace {

using Json = nlohmann::json;

Json parse_metadata(const std::map<std::string, std::string>& metadata, const std::string& key) {
  const auto entry = metadata.find(key);
  if (entry == metadata.end()) return nullptr;
  Json json = Json::parse(entry->second, nullptr, false);
  check(!json.is_discarded(), ErrorCode::BadMetadata, "metadata '{}' is not JSON", escaped(key));
  return json;
}

std::string shape_text(at::IntArrayRef shape) {
  return fmt::format("[{}]", fmt::join(shape.begin(), shape.end(), ", "));
}

/// `conv.weight:0` must name a dimension of a tensor; the list one index in the first original for each of today's.
/// What has left the file (a folded BatchNorm, a weight in stock operators) may still be spoken of.
void check_kept(const Model::Impl& impl, const std::string& key, const std::vector<std::int64_t>& indices) {
  const std::size_t colon = key.rfind(':');
  std::int64_t dim = -1;
  const char* end = key.data() + key.size();
  const bool number = colon != std::string::npos && colon + 1 < key.size() &&
                      std::from_chars(key.data() + colon + 1, end, dim).ptr == end;
  const bool ascending = std::adjacent_find(indices.begin(), indices.end(), std::greater_equal<>()) == indices.end();
  check(number && dim >= 0 && !indices.empty() && ascending && indices.front() >= 0, ErrorCode::BadMetadata,
        "'{}' in metadata 'tersor.kept' is not TENSOR:DIMENSION with ascending indices", escaped(key));
  const std::optional<at::Tensor> tensor = impl.find_tensor(key.substr(0, colon));
  if (!tensor) return;
  check(dim < tensor->dim() && static_cast<std::int64_t>(indices.size()) == tensor->size(dim), ErrorCode::BadMetadata,
        "'{}' in metadata 'tersor.kept' has {} indices, but the tensor is {}", escaped(key), indices.size(),
        shape_text(tensor->sizes()));
}

/// Takes `tersor.kept` and `tersor.masked` of a file we wrote earlier back into the model.
void restore(Model::Impl& impl) {
  try {
    if (const Json kept = parse_metadata(impl.metadata, "tersor.kept"); !kept.is_null())
      impl.kept = kept.get<std::map<std::string, std::vector<std::int64_t>>>();
    if (const Json masked = parse_metadata(impl.metadata, "tersor.masked"); !masked.is_null())
      impl.masked = masked.get<std::vector<std::string>>();
    if (const Json folded = parse_metadata(impl.metadata, "tersor.folded"); !folded.is_null())
      impl.folded = folded.get<std::map<std::string, std::string>>();
  } catch (const Json::exception&) {
    throw fail(ErrorCode::BadMetadata,
               "metadata 'tersor.kept', 'tersor.masked' or 'tersor.folded' is not of the form that tersor writes");
  }
  for (const auto& [key, indices] : impl.kept) check_kept(impl, key, indices);
}

double sparsity(const at::Tensor& weight) {
  if (weight.numel() == 0) return 0.0;
  return static_cast<double>(weight.eq(0).sum().item<std::int64_t>()) / static_cast<double>(weight.numel());
}

std::string_view word(Granularity granularity) {
  switch (granularity) {
    case Granularity::per_tensor:
      return "per_tensor";
    case Granularity::per_channel:
      return "per_channel";
    case Granularity::per_group:
      return "per_group";
  }
  throw fail(ErrorCode::Internal, "granularity without a name");
}

std::string_view word(ActivationMode mode) {
  switch (mode) {
    case ActivationMode::none:
      return "none";
    case ActivationMode::per_token:
      return "per_token";
    case ActivationMode::per_tensor:
      return "per_tensor";
  }
  throw fail(ErrorCode::Internal, "activation mode without a name");
}

Json describe(const Layer& layer, const at::Tensor& weight) {
  Json json{{"kind", class_name(layer.kind)}, {"shape", layer.shape}, {"sparsity", sparsity(weight)}};
  if (layer.quantized) {
    const QuantScheme& scheme = layer.quantized->weight.scheme;
    json["bits"] = scheme.bits;
    json["symmetric"] = scheme.symmetric;
    json["granularity"] = word(scheme.granularity);
    if (scheme.granularity == Granularity::per_group) json["group_size"] = scheme.group_size;
    json["activation"] = word(layer.quantized->activation.mode);
  } else {
    json["dtype"] = c10::toString(layer.dtype);
  }
  return json;
}

/// +0.0 instead of subnormals and -0.0: they cost nothing in accuracy and several times the speed.
at::Tensor flushed(const at::Tensor& values) {
  if (!values.is_floating_point()) return values;
  const double smallest = values.scalar_type() == at::kDouble ? std::numeric_limits<double>::min()
                          : values.scalar_type() == at::kHalf
                              ? static_cast<double>(std::numeric_limits<at::Half>::min())
                              : static_cast<double>(std::numeric_limits<float>::min());
  return values.masked_fill(values.abs().lt(smallest), 0.0);
}

}  // namespace

std::string_view class_name(LayerKind kind) {
  switch (kind) {
    case LayerKind::linear:
      return "Linear";
    case LayerKind::conv1d:
      return "Conv1d";
    case LayerKind::conv2d:
      return "Conv2d";
    case LayerKind::conv3d:
      return "Conv3d";
    case LayerKind::conv_transpose:
      return "ConvTranspose";
    case LayerKind::batch_norm:
      return "BatchNorm";
    case LayerKind::layer_norm:
      return "LayerNorm";
    case LayerKind::group_norm:
      return "GroupNorm";
    case LayerKind::embedding:
      return "Embedding";
    case LayerKind::recurrent:
      return "Recurrent";
    case LayerKind::other:
      return "Other";
  }
  throw fail(ErrorCode::Internal, "layer kind without a name");
}

Model::Model(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::Model(const Model&) = default;
Model& Model::operator=(const Model&) = default;
Model::~Model() = default;

Model Model::load(const std::filesystem::path& path, const LoadOptions& options) {
  const bool checkpoint = sniff(path) == FileKind::safetensors;
  const std::shared_ptr<Impl> impl = checkpoint ? load_checkpoint(path, options) : load_script(path, options);
  try {
    restore(*impl);
  } catch (Error& error) {
    throw error.in(escaped(path.string()));
  }
  return Model(impl);
}

Model Model::from_tensors(std::map<std::string, at::Tensor> tensors, std::map<std::string, std::string> metadata) {
  const std::shared_ptr<Impl> impl = make_checkpoint(std::move(tensors), std::move(metadata));
  restore(*impl);
  return Model(impl);
}

Backend Model::backend() const { return impl_->backend(); }

Model Model::clone() const {
  const at::NoGradGuard no_grad;
  return Model(impl_->clone());
}

void Model::assign(const Model& other) {
  if (impl_ == other.impl_) return;
  check(backend() == other.backend(), ErrorCode::BadUsage, "assign: the two models come from different kinds of file");
  const at::NoGradGuard no_grad;
  impl_->assign(std::move(*other.impl_->clone()));
}

namespace {

const std::vector<Layer>& layers_of(const Model::Impl& impl) {
  if (!impl.known_layers) {
    impl.known_layers = impl.layers();
    impl.layer_places.clear();
    for (std::size_t i = 0; i < impl.known_layers->size(); ++i)
      impl.layer_places.emplace((*impl.known_layers)[i].name, i);
  }
  return *impl.known_layers;
}

}  // namespace

std::vector<Layer> Model::layers() const { return layers_of(*impl_); }

const Layer& Model::layer(std::string_view name) const {
  const std::vector<Layer>& layers = layers_of(*impl_);
  if (const auto place = impl_->layer_places.find(name); place != impl_->layer_places.end())
    return layers[place->second];
  std::vector<std::string> names;
  for (const Layer& layer : layers) names.push_back(layer.name);
  throw fail(ErrorCode::NoSuchTarget, "the model has no layer '{}'{}", escaped(name), did_you_mean(name, names));
}

std::vector<std::string> Model::tensor_names() const { return impl_->tensor_names(); }

bool Model::has_tensor(std::string_view name) const { return impl_->find_tensor(std::string(name)).has_value(); }

at::Tensor Model::tensor(std::string_view name) const {
  const at::NoGradGuard no_grad;
  if (const auto found = impl_->find_tensor(std::string(name))) return *found;
  throw fail(ErrorCode::NoSuchTarget, "the model has no tensor '{}'{}", escaped(name),
             did_you_mean(name, impl_->tensor_names()));
}

std::int64_t Model::nbytes() const { return impl_->nbytes(); }

bool Model::runnable() const { return impl_->runnable(); }

void Model::set_example(std::vector<at::Tensor> inputs) {
  impl_->example = std::move(inputs);
  impl_->known_graph.reset();
}

const std::vector<at::Tensor>& Model::example() const { return impl_->example; }

namespace {

void check_runnable(const Model& model) {
  check(model.runnable(), ErrorCode::NeedUnmet,
        "this checkpoint holds only weights and cannot run; give a TorchScript file for what needs the network itself");
}

void check_example(const Model& model) {
  check_runnable(model);
  check(!model.example().empty(), ErrorCode::MissingData,
        "no example input was set; give one (--example FILE or --input-shape 1,3,32,32)");
}

}  // namespace

std::vector<at::Tensor> Model::forward(const std::vector<at::Tensor>& inputs) const {
  check_runnable(*this);
  const at::NoGradGuard no_grad;
  return impl_->forward(inputs);
}

void Model::observe(const std::vector<at::Tensor>& inputs,
                    const std::function<void(const Layer&, const at::Tensor&, const at::Tensor&)>& see) const {
  check_runnable(*this);
  const at::NoGradGuard no_grad;
  impl_->observe(inputs, see);
}

std::map<std::string, at::Tensor> Model::gradients(const std::vector<at::Tensor>& inputs, const at::Tensor& labels,
                                                   const std::vector<std::string>& parameters) const {
  check_runnable(*this);
  const Model copy = clone();
  const at::AutoGradMode with_gradients(true);
  return copy.impl_->gradients(inputs, labels, parameters);
}

const Graph& Model::graph() const {
  check_example(*this);
  if (!impl_->known_graph) {
    const at::NoGradGuard no_grad;
    impl_->known_graph = impl_->build_graph();
  }
  return *impl_->known_graph;
}

void Model::keep(std::string_view name, std::int64_t dim, const std::vector<std::int64_t>& indices) {
  const at::Tensor before = tensor(name);
  check(dim >= 0 && dim < before.dim(), ErrorCode::BadUsage, "keep: '{}' {} has no dimension {}", escaped(name),
        shape_text(before.sizes()), dim);
  const bool ascending = std::adjacent_find(indices.begin(), indices.end(), std::greater_equal<>()) == indices.end();
  check(!indices.empty() && ascending && indices.front() >= 0 && indices.back() < before.size(dim), ErrorCode::BadUsage,
        "keep: indices for dimension {} of '{}' must ascend within [0, {})", dim, escaped(name), before.size(dim));
  if (static_cast<std::int64_t>(indices.size()) == before.size(dim)) return;

  const at::NoGradGuard no_grad;
  at::Tensor chosen = before.new_empty({static_cast<std::int64_t>(indices.size())},
                                       at::TensorOptions().dtype(at::kLong).device(at::kCPU));
  std::copy(indices.begin(), indices.end(), chosen.mutable_data_ptr<std::int64_t>());
  for (const std::string& alias : impl_->keep(std::string(name), dim, chosen)) {
    const std::string key = fmt::format("{}:{}", alias, dim);
    std::vector<std::int64_t>& kept = impl_->kept[key];
    check(kept.empty() || static_cast<std::int64_t>(kept.size()) == before.size(dim), ErrorCode::BadMetadata,
          "'{}' in metadata 'tersor.kept' has {} indices, but the tensor was {}", escaped(key), kept.size(),
          shape_text(before.sizes()));
    std::vector<std::int64_t> composed;
    composed.reserve(indices.size());
    for (const std::int64_t i : indices) composed.push_back(kept.empty() ? i : kept[static_cast<std::size_t>(i)]);
    kept = std::move(composed);
  }
  impl_->known_layers.reset();
}

void Model::set_argument(NodeId node, std::size_t index, const c10::IValue& value) {
  const Graph& graph = this->graph();
  check(node >= 0 && static_cast<std::size_t>(node) < graph.nodes.size() &&
            index < graph.nodes[static_cast<std::size_t>(node)].arguments.size(),
        ErrorCode::BadUsage, "set_argument: the graph has no argument {} of node {}", index, node);
  impl_->set_argument(node, index, value);
  impl_->known_layers.reset();
}

void Model::rewrite(std::string_view name, const at::Tensor& values) {
  const at::Tensor before = tensor(name);
  check(values.sizes() == before.sizes(), ErrorCode::BadUsage, "rewrite: '{}' is {}, the new values are {}",
        escaped(name), shape_text(before.sizes()), shape_text(values.sizes()));
  const at::NoGradGuard no_grad;
  impl_->rewrite(std::string(name), flushed(values.detach().to(before.scalar_type())));
}

void Model::mask(std::string_view name, const at::Tensor& keep) {
  const at::Tensor before = tensor(name);
  check(keep.sizes() == before.sizes() && keep.scalar_type() == at::kBool, ErrorCode::BadUsage,
        "mask: '{}' is {}; expected a bool mask of that shape, got {} {}", escaped(name), shape_text(before.sizes()),
        c10::toString(keep.scalar_type()), shape_text(keep.sizes()));
  rewrite(name, before.masked_fill(keep.logical_not(), 0.0));
  impl_->mask(std::string(name), keep);
  const auto place = std::lower_bound(impl_->masked.begin(), impl_->masked.end(), name);
  if (place == impl_->masked.end() || *place != name) impl_->masked.insert(place, std::string(name));
}

void Model::quantize_layer(std::string_view name, const LayerQuantization& quantization) {
  const Layer& layer = this->layer(name);
  check(!layer.quantized, ErrorCode::AlreadyQuantized, "layer '{}' is quantized already", escaped(name));
  check(quantization.weight.shape == layer.shape, ErrorCode::BadUsage,
        "quantize: the weight of '{}' is {}, the codes are for {}", escaped(name), shape_text(layer.shape),
        shape_text(quantization.weight.shape));
  const at::NoGradGuard no_grad;
  if (backend() == Backend::checkpoint) {  // of whose layers each stands alone, and there may be thousands
    const std::size_t place = impl_->layer_places.at(layer.name);
    impl_->quantize_layer(layer, quantization);
    Layer& known = (*impl_->known_layers)[place];
    known.quantized = quantization;
    known.dtype = quantization.weight.dtype;
    return;
  }
  impl_->quantize_layer(layer, quantization);
  impl_->known_layers.reset();
  impl_->known_graph.reset();
}

void Model::fold_into(std::string_view batch_norm, std::string_view producer, const at::Tensor& weight,
                      const at::Tensor& bias) {
  check_runnable(*this);
  const Layer norm = layer(batch_norm);
  const Layer target = layer(producer);
  check(norm.kind == LayerKind::batch_norm, ErrorCode::BadUsage, "fold: layer '{}' is a {}, not a BatchNorm",
        escaped(batch_norm), class_name(norm.kind));
  check(weight.sizes() == at::IntArrayRef(target.shape) && bias.dim() == 1, ErrorCode::BadUsage,
        "fold: the weight of '{}' is {}, the new one {}", escaped(producer), shape_text(target.shape),
        shape_text(weight.sizes()));
  const at::NoGradGuard no_grad;
  impl_->fold_into(norm, target, flushed(weight.detach().to(target.dtype)), flushed(bias.detach().to(target.dtype)));
  impl_->folded[norm.name] = target.name;
  impl_->known_layers.reset();
  impl_->known_graph.reset();
}

void dequantize(Model& model) {
  const at::NoGradGuard no_grad;
  model.impl_->dequantize_layers();
  model.impl_->known_layers.reset();
  model.impl_->known_graph.reset();
}

Masks Model::masks() const { return impl_->masks(); }

void Model::permanent() {
  impl_->release_masks();
  impl_->masked.clear();
}

void Model::follow(torch::optim::Optimizer& optimizer) {
  check(backend() == Backend::module, ErrorCode::BadUsage, "follow: only a wrapped module is trained by an optimizer");
  impl_->follow(optimizer);
}

void Model::refresh() {
  check_example(*this);
  impl_->known_graph.reset();
  const at::NoGradGuard no_grad;
  impl_->refresh();
}

std::map<std::string, std::string>& Model::metadata() { return impl_->metadata; }
const std::map<std::string, std::string>& Model::metadata() const { return impl_->metadata; }
const std::map<std::string, std::vector<std::int64_t>>& Model::kept() const { return impl_->kept; }

void Model::save(const std::filesystem::path& path, const SaveOptions& options) const {
  std::map<std::string, std::string> metadata = impl_->metadata;
  metadata["tersor.version"] = version;
  Json layers = Json::object();
  for (const Layer& layer : this->layers()) layers[layer.name] = describe(layer, tensor(layer.weight));
  metadata["tersor.layers"] = layers.dump();
  if (!impl_->kept.empty()) metadata["tersor.kept"] = Json(impl_->kept).dump();
  if (!impl_->masked.empty()) metadata["tersor.masked"] = Json(impl_->masked).dump();
  if (!impl_->folded.empty()) metadata["tersor.folded"] = Json(impl_->folded).dump();
  const at::NoGradGuard no_grad;
  impl_->save(path, options, metadata);
}

}  // namespace tersor
