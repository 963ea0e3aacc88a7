#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <set>

#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/passes/constant_pooling.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/import.h>

#include "script.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/io/file.hpp"

namespace tersor {
namespace {

/// TorchScript source of a quantized layer in stock operators, with the tensors it reads in order.
///
/// `codes`, `scale`, `zero_point` are a QTensor's; the weight becomes float32 as dequantize() does it, the input goes
/// through the same rounding as in our kernels: round(x / scale), half to even, a division.
struct Lowered {
  std::string source;
  std::vector<std::pair<std::string, at::Tensor>> tensors;  // attribute suffix, values
};

std::string list_text(const std::vector<std::int64_t>& list) { return fmt::format("[{}]", fmt::join(list, ", ")); }

constexpr int float32 = static_cast<int>(at::kFloat);  // how TorchScript source spells a dtype

std::string source_of(const std::vector<std::pair<std::string, at::Tensor>>& tensors, std::string_view more,
                      const std::string& body) {
  std::string parameters = "x: Tensor";
  for (const auto& [name, values] : tensors) parameters += fmt::format(", {}: Tensor", name.substr(1));
  return fmt::format("def run({}{}) -> Tensor:\n{}", parameters, more, body);
}

Lowered lowered(const PackedWeight& packed, const std::string& op) {
  const QTensor& weight = packed.quantization.weight;
  const ActivationQuant& activation = packed.quantization.activation;
  const std::int64_t rows = weight.rows();
  const std::int64_t columns = weight.columns();
  Lowered out;
  out.tensors = {{"_codes", weight.codes}, {"_scale", weight.scale}};
  if (weight.zero_point.defined()) out.tensors.emplace_back("_zero_point", weight.zero_point);

  std::string body;
  const auto line = [&](const std::string& text) { body += "    " + text + "\n"; };
  if (weight.scheme.bits == 4) {
    line("q = torch.stack([torch.bitwise_and(codes, 15), torch.bitwise_right_shift(codes, 4)], -1)");
    line(fmt::format("q = torch.sub(torch.to(torch.slice(torch.flatten(q, 1), 1, 0, {}), {}), 8)", columns, float32));
  } else {
    line(fmt::format("q = torch.to(torch.reshape(codes, [{}, {}]), {})", rows, columns, float32));
  }
  const auto spread = [&](const std::string& name) {
    if (weight.scheme.granularity != Granularity::per_group) return fmt::format("torch.to({}, {})", name, float32);
    return fmt::format("torch.slice(torch.repeat_interleave(torch.to({}, {}), {}, 1), 1, 0, {})", name, float32,
                       weight.scheme.group_size, columns);
  };
  if (weight.zero_point.defined()) line(fmt::format("q = torch.sub(q, {})", spread("zero_point")));
  line(fmt::format("w = torch.reshape(torch.mul(q, {}), {})", spread("scale"), list_text(weight.shape)));
  line(fmt::format("w = torch.to(torch.to(w, {}), {})", static_cast<int>(weight.dtype), float32));
  if (op == "tersor::embedding") {
    line(fmt::format("return torch.embedding(torch.to(w, {}), x)", static_cast<int>(weight.dtype)));
    out.source = source_of(out.tensors, "", body);
    return out;
  }
  line(fmt::format("f = torch.to(x, {})", float32));
  if (activation.mode == ActivationMode::per_token) {
    line(fmt::format("s = torch.clamp(torch.div(torch.amax(torch.abs(f), [-1], True), 127.), {:.9g})",
                     std::numeric_limits<float>::min()));
    line("f = torch.mul(torch.clamp(torch.round(torch.div(f, s)), -127., 127.), s)");
  } else if (activation.mode == ActivationMode::per_tensor) {
    // The scale as a tensor: a number would be divided by as a multiplication with its inverse.
    out.tensors.emplace_back(
        "_input_scale", at::Tensor(packed.quantization.weight.scale.new_empty({}, at::kFloat)).fill_(activation.scale));
    line(fmt::format("f = torch.clamp(torch.add(torch.round(torch.div(f, input_scale)), {}.), -128., 127.)",
                     activation.zero_point));
    line(fmt::format("f = torch.mul(torch.sub(f, {}.), input_scale)", activation.zero_point));
  }
  std::string bias = "None";
  if (packed.bias_values) {
    out.tensors.emplace_back("_bias", *packed.bias_values);
    bias = fmt::format("torch.to(bias, {})", float32);
  }
  if (op == "tersor::conv")
    line(fmt::format("y = torch.conv{}d(f, w, {}, stride, padding, dilation, groups)", weight.shape.size() - 2, bias));
  else
    line(fmt::format("y = torch.linear(f, w, {})", bias));
  if (op == "tersor::linear_relu") line("y = torch.relu(y)");
  line("return torch.type_as(y, x)");

  const bool conv = op == "tersor::conv";
  out.source = source_of(out.tensors,
                         conv ? ", stride: List[int], padding: List[int], dilation: List[int], groups: int" : "", body);
  return out;
}

void strip_source_ranges(jit::Block* block) {
  for (jit::Node* node : all_nodes(block)) node->setSourceRange(jit::SourceRange());
}

void restore_training(const jit::Module& root, const std::map<std::string, bool>& flags) {
  for (const auto& [path, flag] : flags) {
    if (path.empty())
      jit::Module(root._ivalue()).setattr("training", flag);
    else
      attribute_at(root, path).toModule().setattr("training", flag);
  }
}

std::vector<at::Tensor> run_once(const jit::Module& module, const Script& script,
                                 const std::vector<at::Tensor>& example) {
  std::vector<at::Tensor> outputs;
  const std::vector<NamedTensor> before = named_tensors(module);
  std::vector<std::uint32_t> versions;
  for (const NamedTensor& tensor : before) versions.push_back(tensor.tensor._version());
  flatten(module.get_method("forward")(bind_inputs(script.arguments, copies(example))), outputs);
  const std::vector<NamedTensor> after = named_tensors(module);
  for (std::size_t i = 0; i < before.size(); ++i)
    check(i < after.size() && after[i].tensor.is_same(before[i].tensor) && before[i].tensor._version() == versions[i],
          ErrorCode::UnsupportedModel,
          "forward changes the network's own attribute '{}'; tersor needs a network that "
          "computes the same in every call",
          escaped(before[i].name));
  return outputs;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (a.numel() == 0) return true;
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

/// The file, read back, holds the same tensors and computes the same bits.
void verify(const std::filesystem::path& path, const Script& written, const std::vector<at::Tensor>& outputs,
            const std::vector<at::Tensor>& example) {
  jit::Module read;
  try {
    read = jit::load(path.string(), at::kCPU, /*load_debug_files=*/false);
  } catch (const std::exception& error) {
    throw fail(ErrorCode::VerificationFailed, "the written file cannot be loaded again: {}",
               escaped(first_line(error)));
  }
  read.eval();
  const std::vector<NamedTensor> before = named_tensors(written.root), after = named_tensors(read);
  check(before.size() == after.size(), ErrorCode::VerificationFailed, "the written file has {} tensors instead of {}",
        after.size(), before.size());
  for (std::size_t i = 0; i < before.size(); ++i)
    check(before[i].name == after[i].name && same_bits(before[i].tensor, after[i].tensor),
          ErrorCode::VerificationFailed, "tensor '{}' came back different from the written file",
          escaped(before[i].name));
  if (example.empty()) return;
  const std::vector<at::Tensor> now = run_once(read, written, example);
  check(now.size() == outputs.size(), ErrorCode::VerificationFailed, "the written file gives {} outputs instead of {}",
        now.size(), outputs.size());
  for (std::size_t i = 0; i < now.size(); ++i)
    check(same_bits(now[i], outputs[i]), ErrorCode::VerificationFailed,
          "output {} of the written file differs from that of the model in memory", i);
}

/// Adds the tensors of a lowered layer to the submodule and gives their names, which no attribute had.
std::vector<std::string> add_tensors(const jit::Module& owner, const std::string& stem, const Lowered& stock) {
  std::vector<std::string> names;
  for (const auto& [suffix, values] : stock.tensors) {
    std::string name = stem + suffix;
    while (owner.hasattr(name) || owner.type()->hasConstant(name)) name += "_";
    owner.type()->addAttribute(name, c10::TensorType::get(), /*is_parameter=*/false, /*is_buffer=*/true);
    owner._ivalue()->setAttr(name, values);
    names.push_back(std::move(name));
  }
  return names;
}

/// A quantized layer while it stands in the graph twice.
struct LoweredLayer {
  PackedWeight packed;
  jit::Node* ours;
  jit::Value* stock;  ///< computed before `ours`, and read in its place
};

std::vector<LoweredLayer> add_stock(Script& script) {
  std::vector<LoweredLayer> layers;
  std::map<std::pair<const c10::ivalue::Object*, std::string>, std::vector<std::string>> added;  // by packed attribute
  for (jit::Node* node : all_nodes(script.graph->block())) {
    const std::string op = node->kind().toQualString();
    if (!op.starts_with("tersor::")) continue;
    const std::string path = *attribute_path(node->input(1));
    PackedWeight packed = *as_packed(path, attribute_at(script.root, path));
    const auto [owner, attribute] = owner_of(script.root, path);
    const std::string stem = owner_of(script.root, packed.weight).second;
    const Lowered stock = lowered(packed, op);

    const jit::WithInsertPoint here(node);
    std::vector<jit::Value*> inputs{node->input(0)};
    auto [names, first_use] = added.try_emplace({owner._ivalue().get(), attribute});
    if (first_use) names->second = add_tensors(owner, stem, stock);
    for (const std::string& name : names->second)
      inputs.push_back(script.graph->insertGetAttr(node->input(1)->node()->input(), name));
    for (std::size_t i = 2; i < node->inputs().size(); ++i) inputs.push_back(node->input(i));

    jit::CompilationUnit unit;
    unit.define(std::nullopt, stock.source, jit::nativeResolver(), nullptr);
    const std::shared_ptr<jit::Graph> body = jit::toGraphFunction(unit.get_function("run")).graph();
    jit::Value* output = jit::insertGraph(*script.graph, *body, inputs).front();
    node->output()->replaceAllUsesWith(output);
    layers.push_back({std::move(packed), node, output});
  }
  return layers;
}

/// How far two float computations of one layer may be apart: with the same codes and scales both sum K products whose
/// sizes add up to at most max|x| * |w|_1. Rounding is a random walk of about eps * sqrt(K) of that, 8 covers its tail.
double rounding(const PackedWeight& packed, const at::Tensor& x, const at::Tensor& y) {
  const double eps = y.scalar_type() == at::kHalf ? 0x1p-11 : y.scalar_type() == at::kBFloat16 ? 0x1p-8 : 0x1p-24;
  if (!x.is_floating_point()) return eps * y.abs().max().item().toDouble();  // an Embedding picks its rows
  const QTensor& weight = packed.quantization.weight;
  const at::Tensor sums = dequantize(weight).to(at::kDouble).reshape({weight.rows(), -1}).abs().sum(1);
  double size = x.to(at::kDouble).abs().max().item().toDouble() * sums.max().item().toDouble();
  if (packed.bias_values && packed.bias_values->numel() > 0)
    size += packed.bias_values->to(at::kDouble).abs().max().item().toDouble();
  return 8 * eps * std::sqrt(static_cast<double>(weight.columns())) * size;
}

/// On the inputs that the example gives each layer, stock operators and ours must agree.
void check_lowered(const Script& script, const std::vector<LoweredLayer>& layers,
                   const std::vector<at::Tensor>& example) {
  std::map<const jit::Node*, const LoweredLayer*> by_node;
  for (const LoweredLayer& layer : layers) by_node[layer.ours] = &layer;
  interpret(script, copies(example), [&](const jit::Node* node, const ValueLookup& value) {
    const auto layer = by_node.find(node);
    if (layer == by_node.end()) return;
    const PackedWeight& packed = layer->second->packed;
    const at::Tensor x = value(node->input(0)).toTensor(), ours = value(node->output()).toTensor();
    const at::Tensor stock = value(layer->second->stock).toTensor();
    check(ours.sizes() == stock.sizes() && ours.scalar_type() == stock.scalar_type(), ErrorCode::VerificationFailed,
          "the layer with the weight '{}' gives {} [{}] in stock operators instead of {} [{}]", escaped(packed.weight),
          c10::toString(stock.scalar_type()), fmt::join(stock.sizes(), ", "), c10::toString(ours.scalar_type()),
          fmt::join(ours.sizes(), ", "));
    if (ours.numel() == 0 || !x.isfinite().all().item<bool>()) return;
    const double difference = ours.to(at::kDouble).sub(stock.to(at::kDouble)).abs().max().item().toDouble();
    const double allowed = rounding(packed, x, ours);
    check(difference <= allowed, ErrorCode::VerificationFailed,
          "the layer with the weight '{}' differs by {:.3g} in stock operators; rounding explains {:.3g}",
          escaped(packed.weight), difference, allowed);
  });
}

}  // namespace

void lower_to_aten(Script& script, const std::vector<at::Tensor>& example) {
  const std::vector<LoweredLayer> layers = add_stock(script);
  if (!example.empty() && !layers.empty()) check_lowered(script, layers, example);
  std::set<std::string> packed;
  for (const LoweredLayer& layer : layers) {
    packed.insert(*attribute_path(layer.ours->input(1)));
    layer.ours->destroy();
  }
  jit::ConstantPropagationImmutableTypes(script.graph);
  jit::EliminateDeadCode(script.graph);
  for (const std::string& path : packed) {
    const auto [owner, name] = owner_of(script.root, path);
    if (!owner.hasattr(name)) continue;
    owner._ivalue()->unsafeRemoveAttr(name);
    owner.type()->unsafeRemoveAttribute(name);
  }
}

void ScriptModel::save(const std::filesystem::path& path, const SaveOptions& options,
                       const std::map<std::string, std::string>& metadata) const {
  Script out = rebuild(script_, false);
  if (options.lowering == Lowering::aten) lower_to_aten(out, example);
  jit::EliminateDeadCode(out.graph);
  // Equal constants become one, as they do when the file is read again: writing what was read changes no byte.
  jit::ConstantPooling(out.graph);
  strip_source_ranges(out.graph->block());
  const std::vector<at::Tensor> outputs =
      example.empty() ? std::vector<at::Tensor>{} : run_once(assemble(out), out, example);
  const jit::Module module = assemble(out);
  restore_training(module, out.training);

  AtomicWriteOptions write;
  write.overwrite = options.overwrite;
  write.source = options.source;
  write.verify = [&](const std::filesystem::path& written) {
    verify(written, out, outputs, example);
    if (options.examine) options.examine(written);
  };
  const jit::ExtraFilesMap extra(metadata.begin(), metadata.end());
  write_file_atomically(path, write, [&](OutputFile& file) {
    // The archive writer's destructor ends the process when its sink throws, so a failed write waits until it is gone.
    std::exception_ptr failed;
    jit::ExportModule(
        module,
        [&](const void* bytes, std::size_t size) {
          try {
            if (!failed) file.write(std::span(static_cast<const std::byte*>(bytes), size));
          } catch (...) {
            failed = std::current_exception();
          }
          return size;
        },
        extra);
    if (failed) std::rethrow_exception(failed);
  });
}

}  // namespace tersor
