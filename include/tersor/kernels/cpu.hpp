#pragma once

#include <string_view>
#include <vector>

namespace tersor {

/// Instruction sets that the kernels are written for. All give the same bits.
enum class Isa { scalar, avx2 };

std::string_view name(Isa isa);

/// What this CPU can run, slowest first; never empty.
std::vector<Isa> available_isas();

/// The fastest of them, or what the environment variable TERSOR_FORCE_ISA asks for.
/// Throws BadUsage for a word that is no instruction set or one that this CPU lacks.
Isa best_isa();

}  // namespace tersor
