#include "eager.hpp"

namespace tersor {
namespace {

void collect_slots(const std::shared_ptr<torch::nn::Module>& module, const std::string& prefix,
                   std::vector<Slot>& found) {
  const auto add = [&](const auto& items, bool is_parameter) {
    for (const auto& item : items)
      if (item.value().defined())
        found.push_back({prefix + item.key(), module, item.key(), item.value(), is_parameter});
  };
  add(module->named_parameters(/*recurse=*/false), true);
  add(module->named_buffers(/*recurse=*/false), false);
  for (const auto& child : module->named_children())
    if (child.value()) collect_slots(child.value(), prefix + child.key() + ".", found);
}

void collect_flags(const std::shared_ptr<torch::nn::Module>& module, std::map<std::string, bool>& flags,
                   const std::string& path) {
  flags[path] = module->is_training();
  for (const auto& child : module->named_children())
    if (child.value()) collect_flags(child.value(), flags, path.empty() ? child.key() : path + "." + child.key());
}

}  // namespace

std::vector<Slot> slots(const std::shared_ptr<torch::nn::Module>& module) {
  std::vector<Slot> found;
  collect_slots(module, "", found);
  return found;
}

std::map<std::string, bool> training_flags(const std::shared_ptr<torch::nn::Module>& module) {
  std::map<std::string, bool> flags;
  collect_flags(module, flags, "");
  return flags;
}

EvalMode::EvalMode(std::shared_ptr<torch::nn::Module> module) {
  std::vector<std::shared_ptr<torch::nn::Module>> all{module};
  for (std::size_t i = 0; i < all.size(); ++i) {
    flags_.emplace_back(all[i], all[i]->is_training());
    for (const std::shared_ptr<torch::nn::Module>& child : all[i]->children())
      if (child) all.push_back(child);
  }
  module->eval();
}

EvalMode::~EvalMode() {
  // `train` reaches all submodules, so parents come first.
  for (const auto& [module, training] : flags_) module->train(training);
}

}  // namespace tersor
