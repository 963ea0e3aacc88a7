#include "tersor/model/optimizer_state.hpp"

#include <map>
#include <typeinfo>

#include <c10/util/Type.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "tersor/core/error.hpp"

namespace tersor {
namespace {

using namespace torch::optim;

/// The tensors of a parameter's state, all of the parameter's shape or undefined. False if the type is not known.
template <typename Visit>
bool visit_tensors(OptimizerParamState& state, Visit visit) {
  if (auto* sgd = dynamic_cast<SGDParamState*>(&state)) {
    visit(sgd->momentum_buffer());
  } else if (auto* adam = dynamic_cast<AdamParamState*>(&state)) {
    visit(adam->exp_avg());
    visit(adam->exp_avg_sq());
    visit(adam->max_exp_avg_sq());
  } else if (auto* adamw = dynamic_cast<AdamWParamState*>(&state)) {
    visit(adamw->exp_avg());
    visit(adamw->exp_avg_sq());
    visit(adamw->max_exp_avg_sq());
  } else if (auto* rmsprop = dynamic_cast<RMSpropParamState*>(&state)) {
    visit(rmsprop->square_avg());
    visit(rmsprop->momentum_buffer());
    visit(rmsprop->grad_avg());
  } else if (auto* adagrad = dynamic_cast<AdagradParamState*>(&state)) {
    visit(adagrad->sum());
  } else {
    return false;
  }
  return true;
}

bool trains(const Optimizer& optimizer, const at::Tensor& parameter) {
  for (const OptimizerParamGroup& group : optimizer.param_groups())
    for (const at::Tensor& each : group.params())
      if (each.is_same(parameter)) return true;
  return false;
}

/// As newly made. LBFGS caches the number of all elements too, which only a new object forgets.
void start_anew(LBFGS& optimizer) {
  std::vector<OptimizerParamGroup> groups = std::move(optimizer.param_groups());
  LBFGS fresh(groups, dynamic_cast<const LBFGSOptions&>(optimizer.defaults()));
  fresh.param_groups() = std::move(groups);  // a new optimizer takes a learning rate of 1 for "not set"
  optimizer = std::move(fresh);
}

}  // namespace

void check_followed(const Optimizer& optimizer) {
  const bool known = dynamic_cast<const SGD*>(&optimizer) || dynamic_cast<const Adam*>(&optimizer) ||
                     dynamic_cast<const AdamW*>(&optimizer) || dynamic_cast<const RMSprop*>(&optimizer) ||
                     dynamic_cast<const Adagrad*>(&optimizer) || dynamic_cast<const LBFGS*>(&optimizer);
  check(
      known, ErrorCode::UnsupportedModel,
      "what an optimizer of type {} remembers is not known; SGD, Adam, AdamW, RMSprop, Adagrad and LBFGS are followed. "
      "Make this one anew after channels were removed",
      c10::demangle(typeid(optimizer).name()));
}

void keep_in_state(Optimizer& optimizer, const at::Tensor& parameter, std::int64_t dim, const at::Tensor& indices) {
  if (!trains(optimizer, parameter)) return;
  check_followed(optimizer);
  if (auto* lbfgs = dynamic_cast<LBFGS*>(&optimizer)) return start_anew(*lbfgs);
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return;
  const bool known = visit_tensors(*found->second, [&](at::Tensor& tensor) {
    if (tensor.defined()) tensor = tensor.index_select(dim, indices.to(tensor.device()));
  });
  check(known, ErrorCode::UnsupportedModel, "an optimizer of type {} remembers a {}, which cannot be cut",
        c10::demangle(typeid(optimizer).name()), c10::demangle(typeid(*found->second).name()));
}

void resized_in_state(Optimizer& optimizer, const at::Tensor& parameter) {
  if (auto* lbfgs = dynamic_cast<LBFGS*>(&optimizer); lbfgs != nullptr && trains(optimizer, parameter))
    start_anew(*lbfgs);
}

void keep_in_grad(const at::Tensor& parameter, std::int64_t dim, const at::Tensor& indices) {
  at::Tensor& gradient = parameter.mutable_grad();
  if (gradient.defined()) gradient = gradient.detach().index_select(dim, indices.to(gradient.device()));
}

bool graph_alive(const at::Tensor& parameter) {
  return torch::autograd::impl::try_get_grad_accumulator(parameter) != nullptr;
}

struct OptimizerSnapshot::State {
  Optimizer& optimizer;
  std::map<void*, std::unique_ptr<OptimizerParamState>> remembered;
};

OptimizerSnapshot::OptimizerSnapshot(Optimizer& optimizer) {
  check_followed(optimizer);
  auto state = std::make_shared<State>(State{optimizer, {}});
  for (const auto& [parameter, remembered] : optimizer.state())
    state->remembered.emplace(parameter, remembered->clone());
  state_ = std::move(state);
}

void OptimizerSnapshot::restore() const {
  Optimizer& optimizer = state_->optimizer;
  if (auto* lbfgs = dynamic_cast<LBFGS*>(&optimizer)) start_anew(*lbfgs);
  optimizer.state().clear();
  for (const auto& [parameter, remembered] : state_->remembered) optimizer.state()[parameter] = remembered->clone();
}

}  // namespace tersor
