// What a deployment links: the operators, without passes, YAML or JSON.
#include <ATen/ops/full.h>

#include "tersor/runtime/qtensor.hpp"

int main() {
  const at::Tensor weight = at::full({2, 3}, 0.5);
  const tersor::QTensor q = tersor::quantize_weight(weight, {.bits = 8});
  // Every weight is the largest of its row: code 127, and back within one rounding of the scale.
  const bool codes = tersor::unpacked_codes(q).eq(127).all().item<bool>();
  return codes && tersor::dequantize(q).sub(weight).abs().max().item<float>() < 1e-6F ? 0 : 1;
}
