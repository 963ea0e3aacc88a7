#pragma once

#include <span>

#include "tersor/pipeline/pipeline.hpp"

namespace tersor {

/// Every pass of the library, in the order of the documentation. The list itself is `src/passes/registry.cpp`.
std::span<const PassInfo> registry();

}  // namespace tersor
