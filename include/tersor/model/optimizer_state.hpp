#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

namespace torch::optim {
class Optimizer;
}

/// What is to follow when a parameter of a network in training is cut in place: the optimizer's memory of it, its
/// gradient, and a look for graphs that would not follow.
namespace tersor {

/// UnsupportedModel unless this is SGD, Adam, AdamW, RMSprop, Adagrad or LBFGS of torch::optim, or derived from one.
void check_followed(const torch::optim::Optimizer& optimizer);

/// Cuts what `optimizer` remembers of `parameter` (momentum, moments, sums) to these indices of dimension `dim`;
/// nothing if it does not train it. LBFGS remembers all parameters in one: it starts anew.
///
/// Handles of the remembered tensors taken before hold the old values. To be called once for each optimizer and cut.
void keep_in_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, std::int64_t dim,
                   const at::Tensor& indices);

/// The parameter has another number of elements, or none, because it became codes or came back from them: LBFGS, which
/// counts all elements, starts anew. What others remember waits for it.
void resized_in_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter);

/// Cuts the accumulated gradient, if there is one, out of place.
void keep_in_grad(const at::Tensor& parameter, std::int64_t dim, const at::Tensor& indices);

/// Whether a graph of an earlier forward is alive that hands gradients to `parameter`. It remembers the parameter's old
/// shape, and so would every later graph as long as it lives: backward then refuses the gradients of the new shape.
bool graph_alive(const at::Tensor& parameter);

/// What an optimizer remembers, to be put back when a cut is undone before the next step. Holds handles, no copies: a
/// step in between changes what is put back. The optimizer must outlive it.
class OptimizerSnapshot {
 public:
  explicit OptimizerSnapshot(torch::optim::Optimizer& optimizer);
  void restore() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace tersor
