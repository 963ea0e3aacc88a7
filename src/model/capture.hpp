#pragma once

#include <optional>
#include <vector>

#include "eager.hpp"
#include "script.hpp"

namespace tersor {

/// The module's forward as TorchScript that holds the same tensors: traced twice with different sizes, integers that
/// follow the sizes computed from them, compared with the module on new values. Training flags are not filled.
Script capture(const EagerNetwork& network, const std::vector<at::Tensor>& example, const WrapOptions& options);

/// The first output that is not the same up to rounding; nothing when all are.
std::optional<std::size_t> first_difference(const std::vector<at::Tensor>& wanted, const std::vector<at::Tensor>& got);

}  // namespace tersor
