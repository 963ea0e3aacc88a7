#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include "tersor/model/masks.hpp"

namespace tersor::prune {

/// An optimizer of LibTorch under which pruned weights stay zero, whatever momentum, moments or weight decay say:
///
///     tersor::prune::Masked<torch::optim::Adam> optimizer(model.masks(), net->parameters(), 1e-3);
///
/// Masks that are set later (another round of pruning) hold from then on. In everything else it is `Optimizer`, and
/// what it saves is what `Optimizer` saves.
template <typename Optimizer>
class Masked : public Optimizer {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, Optimizer>,
                "Masked<Optimizer> extends a LibTorch optimizer");

 public:
  template <typename... Options>
  Masked(Masks masks, std::vector<at::Tensor> parameters, Options&&... options)
      : Optimizer(std::move(parameters), std::forward<Options>(options)...), masks_(std::move(masks)) {}
  template <typename... Options>
  Masked(Masks masks, const std::vector<torch::optim::OptimizerParamGroup>& groups, Options&&... options)
      : Optimizer(groups, std::forward<Options>(options)...), masks_(std::move(masks)) {}

  using LossClosure = torch::optim::Optimizer::LossClosure;

  /// `closure` sees masked weights only, also where an optimizer evaluates it several times in one step.
  at::Tensor step(LossClosure closure = nullptr) override {
    if (closure)
      closure = [this, inner = std::move(closure)] {
        masks_.apply();
        return inner();
      };
    at::Tensor loss = Optimizer::step(std::move(closure));
    masks_.apply();
    return loss;
  }

 private:
  Masks masks_;
};

}  // namespace tersor::prune
