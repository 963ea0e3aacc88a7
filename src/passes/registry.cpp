#include "tersor/passes/registry.hpp"

#include <array>

#include "tersor/passes/fold.hpp"
#include "tersor/passes/prune.hpp"
#include "tersor/passes/quantize.hpp"

namespace tersor {

std::span<const PassInfo> registry() {
  // clang-format off
  static const std::array passes{
      pass_info<prune::L1>(),
      pass_info<prune::NM>(),
      pass_info<prune::Block>(),
      pass_info<prune::Structured>(),
      pass_info<fold::BatchNorm>(),
      pass_info<quantize::Dynamic>(),
      pass_info<quantize::Static>(),
      pass_info<quantize::Weights>(),
  };
  // clang-format on
  return passes;
}

}  // namespace tersor
