// A pass on a checkpoint made of tensors.
#include <ATen/ops/arange.h>

#include "tersor/model/model.hpp"
#include "tersor/passes/prune.hpp"
#include "tersor/pipeline/pipeline.hpp"

int main() {
  const at::Tensor weight = at::arange(1, 9, at::kFloat).view({2, 4});
  tersor::Model model = tersor::Model::from_tensors({{"fc.weight", weight}});
  tersor::Pipeline{tersor::prune::L1{.amount = 0.5}}.run(model);
  const at::Tensor expected = at::arange(1, 9, at::kFloat).view({2, 4});
  expected[0].zero_();
  return model.tensor("fc.weight").equal(expected) ? 0 : 1;
}
