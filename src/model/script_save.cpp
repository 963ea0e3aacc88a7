#include <cstring>
#include <exception>
#include <limits>
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

  std::string parameters = "x: Tensor";
  for (const auto& [name, values] : out.tensors) parameters += fmt::format(", {}: Tensor", name.substr(1));
  if (op == "tersor::conv") parameters += ", stride: List[int], padding: List[int], dilation: List[int], groups: int";
  out.source = fmt::format("def run({}) -> Tensor:\n{}", parameters, body);
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
  std::vector<at::Tensor> inputs, outputs;
  for (const at::Tensor& input : example) inputs.push_back(input.clone());
  flatten(module.get_method("forward")(bind_inputs(script.arguments, inputs)), outputs);
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

}  // namespace

void lower_to_aten(Script& script) {
  std::set<std::string> lowered_attributes;
  for (jit::Node* node : all_nodes(script.graph->block())) {
    const std::string op = node->kind().toQualString();
    if (op != "tersor::linear" && op != "tersor::linear_relu" && op != "tersor::conv") continue;
    const std::string path = *attribute_path(node->input(1));
    const PackedWeight packed = *as_packed(path, attribute_at(script.root, path));
    const auto [owner, attribute] = owner_of(script.root, path);
    const std::string stem = attribute.substr(0, attribute.size() - std::string_view("_packed").size());
    const Lowered stock = lowered(packed, op);

    const jit::WithInsertPoint here(node);
    std::vector<jit::Value*> inputs{node->input(0)};
    for (const auto& [suffix, values] : stock.tensors) {
      if (!owner.hasattr(stem + suffix)) {
        owner.type()->addAttribute(stem + suffix, c10::TensorType::get(), /*is_parameter=*/false, /*is_buffer=*/true);
        owner._ivalue()->setAttr(stem + suffix, values);
      }
      inputs.push_back(script.graph->insertGetAttr(node->input(1)->node()->input(), stem + suffix));
    }
    for (std::size_t i = 2; i < node->inputs().size(); ++i) inputs.push_back(node->input(i));

    jit::CompilationUnit unit;
    unit.define(std::nullopt, stock.source, jit::nativeResolver(), nullptr);
    const std::shared_ptr<jit::Graph> body = jit::toGraphFunction(unit.get_function("run")).graph();
    const std::vector<jit::Value*> outputs = jit::insertGraph(*script.graph, *body, inputs);
    node->output()->replaceAllUsesWith(outputs.front());
    node->destroy();
    lowered_attributes.insert(path);
  }
  jit::ConstantPropagationImmutableTypes(script.graph);
  jit::EliminateDeadCode(script.graph);
  for (const std::string& path : lowered_attributes) {
    const auto [owner, name] = owner_of(script.root, path);
    if (!owner.hasattr(name)) continue;
    owner._ivalue()->unsafeRemoveAttr(name);
    owner.type()->unsafeRemoveAttribute(name);
  }
}

void ScriptModel::save(const std::filesystem::path& path, const SaveOptions& options,
                       const std::map<std::string, std::string>& metadata) const {
  Script out = rebuild(script_, false);
  if (options.lowering == Lowering::aten) lower_to_aten(out);
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
  write.verify = [&](const std::filesystem::path& written) { verify(written, out, outputs, example); };
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
