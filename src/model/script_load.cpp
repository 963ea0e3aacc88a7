#include <set>

#include <ATen/core/Tensor.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/inline_fork_wait.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/passes/lower_tuples.h>
#include <torch/csrc/jit/serialization/import.h>

#include "script.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/io/torchscript_archive.hpp"

namespace tersor {
namespace {

constexpr std::string_view extra_prefix = "extra/";

/// Names of the archive's extra files: our metadata, and what others put there, which is carried along.
jit::ExtraFilesMap extra_files(const std::filesystem::path& path) {
  jit::ExtraFilesMap files;
  caffe2::serialize::PyTorchStreamReader reader(path.string());
  for (const std::string& record : reader.getAllRecords())
    if (record.starts_with(extra_prefix)) files[record.substr(extra_prefix.size())] = "";
  return files;
}

/// Methods that run when `forward` does.
void called(jit::Function* function, std::set<const jit::Function*>& seen) {
  if (!seen.insert(function).second || !function->isGraphFunction()) return;
  for (jit::Node* node : all_nodes(jit::toGraphFunction(*function).graph()->block())) {
    if (node->kind() != c10::prim::CallMethod) continue;
    if (const auto type = node->input(0)->type()->cast<c10::ClassType>())
      if (jit::Function* method = type->findMethod(node->s(c10::attr::name))) called(method, seen);
  }
}

/// Methods beside forward would be lost: the file is written as one forward.
void check_methods(const jit::Module& module) {
  const auto forward = module.find_method("forward");
  check(forward.has_value(), ErrorCode::UnsupportedModel, "the TorchScript file has no method 'forward'");
  check(module.type()->getForwardHooks().empty() && module.type()->getForwardPreHooks().empty(),
        ErrorCode::UnsupportedModel,
        "the network has forward hooks, which would be lost; remove them before torch.jit.script");
  std::set<const jit::Function*> seen;
  called(&forward->function(), seen);
  for (const jit::Method& method : module.get_methods())
    check(seen.contains(&method.function()) || method.name().starts_with("__"), ErrorCode::UnsupportedModel,
          "the TorchScript file has a method '{}' that forward does not call; it would be lost, so export the model "
          "with forward only",
          escaped(method.name()));
}

void check_calls(jit::Block* block) {
  for (jit::Node* node : all_nodes(block)) {
    const bool call = node->kind() == c10::prim::CallMethod || node->kind() == c10::prim::CallFunction;
    check(!call && node->kind() != c10::prim::fork, ErrorCode::UnsupportedModel,
          "forward calls {} in a way that cannot be followed ({}); submodules must have a known class",
          node->hasAttribute(c10::attr::name) ? escaped(node->s(c10::attr::name)) : "a function",
          node->kind().toQualString());
  }
}

/// torch.jit.freeze turns weights into constants without names.
void check_not_frozen(const Script& script) {
  if (!named_tensors(script.root).empty() || !packed_weights(script.root).empty()) return;
  for (jit::Node* node : all_nodes(script.graph->block())) {
    const bool weight = node->kind() == c10::prim::Constant && node->hasAttribute(c10::attr::value) &&
                        node->kindOf(c10::attr::value) == jit::AttributeKind::t && node->t(c10::attr::value).dim() >= 2;
    check(!weight, ErrorCode::UnsupportedModel,
          "the weights of this TorchScript file are constants without names; save the model before torch.jit.freeze");
  }
}

void remember_training(const jit::Module& module, const std::string& path, std::map<std::string, bool>& flags) {
  if (module.hasattr("training")) flags[path] = module.is_training();
  for (const auto& child : module.named_children())
    remember_training(child.value, path.empty() ? child.name : path + "." + child.name, flags);
}

}  // namespace

std::string first_line(const std::exception& error) {
  // TorchScript puts the message of the operator or of `raise` last, after "RuntimeError: ", "builtins.ValueError: ", …
  constexpr std::string_view mark = "Error: ";
  std::string text = error.what();
  if (const std::size_t last = text.rfind(mark); last != std::string::npos) text = text.substr(last + mark.size());
  text.erase(0, text.find_first_not_of(" \n"));
  return text.substr(0, text.find('\n'));
}

std::shared_ptr<Model::Impl> load_script(const std::filesystem::path& path, const LoadOptions& options) {
  check(options.follow_symlinks || !std::filesystem::is_symlink(path), ErrorCode::NotRegularFile,
        "'{}' is a symbolic link, and following them was not allowed", escaped(path.string()));
  scan_torchscript(path);
  const at::NoGradGuard no_grad;
  jit::ExtraFilesMap extra;
  jit::Module module;
  try {
    extra = extra_files(path);
    module = jit::load(path.string(), at::kCPU, extra, /*load_debug_files=*/false);
  } catch (const std::exception& error) {
    throw fail(ErrorCode::UnsupportedFormat, "not a TorchScript file that LibTorch can load: {}",
               escaped(first_line(error)));
  }
  check_methods(module);

  Script loaded;
  remember_training(module, "", loaded.training);
  module.eval();
  loaded.root = module;
  loaded.origin = module._ivalue()->compilation_unit();
  const jit::Method forward = module.get_method("forward");
  const std::vector<c10::Argument>& arguments = forward.function().getSchema().arguments();
  loaded.arguments.assign(arguments.begin() + 1, arguments.end());
  loaded.graph = forward.graph()->copy();
  jit::Inline(*loaded.graph);
  jit::InlineForkWait(loaded.graph);
  jit::ConstantPropagationImmutableTypes(loaded.graph);
  jit::LowerSimpleTuples(loaded.graph);
  jit::EliminateDeadCode(loaded.graph);
  check_calls(loaded.graph->block());

  auto model = std::make_shared<ScriptModel>(rebuild(loaded, false));
  check_not_frozen(model->script());
  for (const auto& [name, text] : extra) model->metadata[name] = text;
  return model;
}

}  // namespace tersor
