#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include <ATen/ops/empty_like.h>
#include <fmt/ranges.h>

#include "impl.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/io/compressed_tensors.hpp"
#include "tersor/io/safetensors.hpp"

namespace tersor {
namespace {

constexpr std::string_view kConfig = "quantization_config";

std::string_view without_suffix(std::string_view name, std::string_view suffix) {
  return name.ends_with(suffix) ? name.substr(0, name.size() - suffix.size()) : std::string_view();
}

std::string_view last_part(std::string_view name) { return name.substr(name.rfind('.') + 1); }

/// Whether a layer of this name holds one vector for each token or position. Only names tell: a Linear has the same
/// shape.
bool named_like_embedding(std::string_view layer) {
  const std::string_view own = last_part(layer);
  if (own == "embed_out") return false;  // GPT-NeoX calls its head so
  const std::string_view parent =
      own.size() == layer.size() ? "" : last_part(layer.substr(0, layer.size() - own.size() - 1));
  return own.starts_with("embed") || own.ends_with("embedding") || own.ends_with("embeddings") || own == "wte" ||
         own == "wpe" || own == "shared" || own.starts_with("token_type") || parent == "embeddings";
}

bool is_float(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
}

/// A tensor to be compared byte by byte: NaN equals itself, -0.0 differs from +0.0.
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

bool same_codes(const LayerQuantization& a, const LayerQuantization& b) {
  const bool zero_points = a.weight.zero_point.defined() == b.weight.zero_point.defined() &&
                           (!a.weight.zero_point.defined() || same_bytes(a.weight.zero_point, b.weight.zero_point));
  return zero_points && a.weight.scheme == b.weight.scheme && a.weight.shape == b.weight.shape &&
         same_bytes(a.weight.codes, b.weight.codes) && same_bytes(a.weight.scale, b.weight.scale) &&
         a.activation == b.activation;
}

/// Named weights without the code that uses them. Layers are inferred: `X.weight` with 2 dimensions is a Linear, or an
/// Embedding by its name; 3, 4 and 5 dimensions are convolutions; 1 dimension is a BatchNorm when `X.running_mean`
/// exists, else a LayerNorm. Two things cannot be seen in weights: that a Linear is stored transposed (GPT-2's Conv1D),
/// and that a convolution is a transposed or grouped one.
class Checkpoint final : public Model::Impl {
 public:
  Checkpoint(std::map<std::string, at::Tensor> tensors, std::map<std::string, std::string> file_metadata)
      : tensors_(std::move(tensors)) {
    metadata = std::move(file_metadata);
    if (has_compressed_layers(tensors_)) {
      const auto config = metadata.find(std::string(kConfig));
      check(config != metadata.end(), ErrorCode::UnsupportedFormat,
            "the layers are quantized already, but the metadata of this file has no quantization_config that says how");
      quantized_ = decompress_layers(tensors_, config->second);
    }
    metadata.erase(std::string(kConfig));
    fold_masks();
  }

  Backend backend() const override { return Backend::checkpoint; }

  std::shared_ptr<Impl> clone() const override {
    auto copy = std::make_shared<Checkpoint>(*this);
    for (auto& [name, tensor] : copy->tensors_) tensor = tensor.clone();
    for (auto& [name, layer] : copy->quantized_) {
      layer.weight.codes = layer.weight.codes.clone();
      layer.weight.scale = layer.weight.scale.clone();
      if (layer.weight.zero_point.defined()) layer.weight.zero_point = layer.weight.zero_point.clone();
    }
    return copy;
  }

  void assign(Impl&& other) override { *this = std::move(dynamic_cast<Checkpoint&>(other)); }

  std::vector<Layer> layers() const override {
    std::vector<Layer> out;
    std::set<std::vector<std::int64_t>> embeddings;
    for (const std::string& name : tensor_names()) {
      const std::string_view layer = without_suffix(name, ".weight");
      if (layer.empty() && (name != "weight" || tensors_.contains("weight.weight"))) continue;
      out.push_back(describe(layer.empty() ? name : std::string(layer)));
      if (out.back().kind == LayerKind::embedding) embeddings.insert(out.back().shape);
    }
    for (Layer& layer : out) {
      const std::string_view own = last_part(layer.name);
      layer.is_head = layer.kind == LayerKind::linear &&
                      (own == "lm_head" || own == "embed_out" || embeddings.contains(layer.shape));
    }
    return out;
  }

  std::vector<std::string> tensor_names() const override {
    std::vector<std::string> out;
    for (const auto& [name, tensor] : tensors_) out.push_back(name);
    for (const auto& [layer, quantization] : quantized_) out.push_back(layer + ".weight");
    std::sort(out.begin(), out.end());
    return out;
  }

  std::optional<at::Tensor> find_tensor(const std::string& name) const override {
    if (const LayerQuantization* layer = quantization_of(name)) return dequantize(layer->weight);
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? std::nullopt : std::optional(found->second);
  }

  std::int64_t nbytes() const override {
    std::int64_t sum = 0;
    for (const auto& [name, tensor] : tensors_) sum += static_cast<std::int64_t>(tensor.nbytes());
    for (const auto& [name, layer] : quantized_) sum += layer.weight.nbytes();
    return sum;
  }

  std::vector<std::string> keep(const std::string& tensor, std::int64_t, const at::Tensor&) override {
    throw fail(
        ErrorCode::NeedUnmet,
        "'{}' cannot lose channels: this checkpoint holds only weights, and which other tensors depend on them is "
        "not known; load a TorchScript file",
        escaped(tensor));
  }

  void rewrite(const std::string& name, const at::Tensor& values) override {
    check(quantization_of(name) == nullptr, ErrorCode::AlreadyQuantized, "'{}' is quantized already", escaped(name));
    check(!sub_bytes_.contains(name), ErrorCode::UnsupportedDtype, "'{}' is {}, which is only carried along",
          escaped(name), sub_bytes_.contains(name) ? sub_bytes_.at(name).dtype : "");
    tensors_.at(name) = values.clone();
  }

  void dequantize_layers() override {
    for (const auto& [layer, quantization] : quantized_) tensors_[layer + ".weight"] = dequantize(quantization.weight);
    quantized_.clear();
  }

  void quantize_layer(const Layer& layer, const LayerQuantization& quantization) override {
    check(layer.float_only.empty(), ErrorCode::UnsupportedLayer, "layer '{}' cannot be quantized: {}",
          escaped(layer.name), layer.float_only);
    compress_layer(layer.name, quantization);  // refuses what the file could not hold
    tensors_.erase(layer.weight);
    quantized_[layer.name] = quantization;
  }

  void save(const std::filesystem::path& path, const SaveOptions& options,
            const std::map<std::string, std::string>& own_metadata) const override {
    std::map<std::string, std::string> written = own_metadata;
    std::vector<SafetensorsItem> items;
    for (const auto& [name, tensor] : tensors_) {
      const auto sub_byte = sub_bytes_.find(name);
      if (sub_byte == sub_bytes_.end()) {
        items.push_back({name, tensor});
      } else {
        items.push_back({name, tensor, sub_byte->second.dtype, sub_byte->second.shape});
      }
    }
    for (const auto& [layer, quantization] : quantized_) {
      for (auto& [name, tensor] : compress_layer(layer, quantization)) {
        check(!tensors_.contains(name), ErrorCode::BadName,
              "the file has a tensor '{}' already, which the quantized layer '{}' needs", escaped(name),
              escaped(layer));
        items.push_back({name, tensor});
      }
    }
    if (!quantized_.empty()) {
      std::vector<std::string> ignore;
      for (const Layer& layer : layers())
        if (layer.kind == LayerKind::linear && !layer.quantized) ignore.push_back(layer.name);
      written[std::string(kConfig)] = quantization_config(quantized_, ignore);
    }
    const auto verify = [&](const std::filesystem::path& file) {
      check_written(file, items);
      if (options.examine) options.examine(file);
    };
    write_safetensors(path, items, written, {options.overwrite, options.source, verify});
  }

  /// A tensor whose elements are no whole bytes: its raw bytes are carried along.
  void add_sub_byte(const SafetensorsEntry& entry) { sub_bytes_[entry.name] = {entry.dtype, entry.shape}; }

 private:
  struct SubByte {
    std::string dtype;
    std::vector<std::int64_t> shape;
  };

  const LayerQuantization* quantization_of(const std::string& weight) const {
    const auto it = quantized_.find(std::string(without_suffix(weight, ".weight")));
    return it == quantized_.end() ? nullptr : &it->second;
  }

  Layer describe(const std::string& name) const {
    Layer out;
    out.name = name;
    // A bare layer is called by its weight.
    const std::string prefix = name == "weight" && !tensors_.contains("weight.weight") ? "" : name + ".";
    if (prefix.empty()) out.float_only = "a layer without a name has no place in the format of quantized checkpoints";
    out.weight = prefix + "weight";
    if (tensors_.contains(prefix + "bias")) out.bias = prefix + "bias";
    if (const auto it = quantized_.find(name); it != quantized_.end()) {
      out.quantized = it->second;
      out.shape = it->second.weight.shape;
      out.dtype = it->second.weight.dtype;
    } else {
      out.shape = tensors_.at(out.weight).sizes().vec();
      out.dtype = tensors_.at(out.weight).scalar_type();
    }
    if (!is_float(out.dtype)) return out;
    switch (out.shape.size()) {
      case 1:
        out.kind = tensors_.contains(prefix + "running_mean") ? LayerKind::batch_norm : LayerKind::layer_norm;
        break;
      case 2:
        out.kind = named_like_embedding(name) ? LayerKind::embedding : LayerKind::linear;
        break;
      case 3:
        out.kind = LayerKind::conv1d;
        break;
      case 4:
        out.kind = LayerKind::conv2d;
        break;
      case 5:
        out.kind = LayerKind::conv3d;
        break;
      default:
        break;
    }
    return out;
  }

  /// `weight_orig` and `weight_mask`, as torch.nn.utils.prune stores a pruned weight, become `weight`. One without the
  /// other means that the weight the network computes with is not in this file (spectral normalization does that too).
  void fold_masks() {
    std::vector<std::string> parameters;
    for (const auto& [name, tensor] : tensors_) {
      for (const char* suffix : {"_orig", "_mask"}) {
        const std::string_view base = without_suffix(name, suffix);
        if (base.empty()) continue;
        const bool pair =
            tensors_.contains(std::string(base) + "_orig") && tensors_.contains(std::string(base) + "_mask");
        const std::string_view own = last_part(base);
        check(pair || (own != "weight" && own != "bias"), ErrorCode::UnsupportedModel,
              "'{}' has no counterpart '{}{}': the weight that the network uses is not in this file; save it without "
              "parametrization (torch.nn.utils.prune.remove)",
              escaped(name), escaped(base), std::string_view(suffix) == "_orig" ? "_mask" : "_orig");
        if (pair && std::string_view(suffix) == "_orig") parameters.emplace_back(base);
      }
    }
    for (const std::string& parameter : parameters) {
      const at::Tensor values = tensors_.at(parameter + "_orig"), mask = tensors_.at(parameter + "_mask");
      check(values.sizes() == mask.sizes() && is_float(values.scalar_type()), ErrorCode::BadData,
            "'{0}_mask' is [{1}] and '{0}_orig' is {3} [{2}]; expected one shape and a floating-point type",
            escaped(parameter), fmt::join(mask.sizes(), ", "), fmt::join(values.sizes(), ", "),
            c10::toString(values.scalar_type()));
      check(!tensors_.contains(parameter), ErrorCode::BadData, "there are both '{0}' and '{0}_orig'",
            escaped(parameter));
      const at::Tensor product = values.mul(mask.to(values.scalar_type()));
      tensors_[parameter] = product.masked_fill(mask.eq(0).logical_or(product.eq(0)), 0.0);
      tensors_.erase(parameter + "_orig");
      tensors_.erase(parameter + "_mask");
      masked.push_back(parameter);
    }
    std::sort(masked.begin(), masked.end());
  }

  /// Reads the file back and compares it with what is in memory, to the last bit.
  void check_written(const std::filesystem::path& path, const std::vector<SafetensorsItem>& items) const {
    try {
      const SafetensorsFile file = SafetensorsFile::open(path);
      check(file.entries().size() == items.size(), ErrorCode::VerificationFailed, "{} tensors were written and {} read",
            items.size(), file.entries().size());
      std::map<std::string, at::Tensor> read;
      for (const SafetensorsItem& item : items) {
        const at::Tensor back = file.read(item.name);
        check(same_bytes(back, item.tensor), ErrorCode::VerificationFailed, "tensor '{}' differs after writing",
              escaped(item.name));
        if (!tensors_.contains(item.name)) read[item.name] = back;
      }
      if (quantized_.empty()) return;
      const auto layers = decompress_layers(read, file.metadata().at(std::string(kConfig)));
      for (const auto& [name, layer] : quantized_) {
        check(layers.contains(name) && same_codes(layers.at(name), layer), ErrorCode::VerificationFailed,
              "the codes of layer '{}' differ after writing", escaped(name));
      }
    } catch (const Error& error) {
      if (error.code() == ErrorCode::VerificationFailed) throw;
      throw fail(ErrorCode::VerificationFailed, "the file cannot be read back: {}", error.what());
    }
  }

  std::map<std::string, at::Tensor> tensors_;
  std::map<std::string, SubByte> sub_bytes_;
  std::map<std::string, LayerQuantization> quantized_;  // by layer; their weights are not in tensors_
};

}  // namespace

std::shared_ptr<Model::Impl> make_checkpoint(std::map<std::string, at::Tensor> tensors,
                                             std::map<std::string, std::string> metadata) {
  for (auto& [name, tensor] : tensors) {
    check(tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu(), ErrorCode::UnsupportedDtype,
          "tensor '{}' is undefined, sparse or not in main memory; give a dense CPU tensor", escaped(name));
    tensor = tensor.detach();
  }
  return std::make_shared<Checkpoint>(std::move(tensors), std::move(metadata));
}

std::shared_ptr<Model::Impl> load_checkpoint(const std::filesystem::path& path, const LoadOptions& options) {
  check(options.follow_symlinks || !std::filesystem::is_symlink(path), ErrorCode::NotRegularFile,
        "'{}' is a symbolic link, and following them was not allowed", escaped(path.string()));
  const SafetensorsFile file = SafetensorsFile::open(path);
  std::map<std::string, at::Tensor> tensors;
  for (const SafetensorsEntry& entry : file.entries()) tensors[entry.name] = file.read(entry);
  try {
    auto out = std::make_shared<Checkpoint>(std::move(tensors), file.metadata());
    for (const SafetensorsEntry& entry : file.entries())
      if (!safetensors_scalar_type(entry.dtype)) out->add_sub_byte(entry);
    return out;
  } catch (Error& error) {
    throw error.in(escaped(path.string()));
  }
}

}  // namespace tersor
