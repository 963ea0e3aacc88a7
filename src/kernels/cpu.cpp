#include "tersor/kernels/cpu.hpp"

#include <cstdlib>
#include <string>

#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {

std::string_view name(Isa isa) { return isa == Isa::avx2 ? "avx2" : "scalar"; }

std::vector<Isa> available_isas() {
  std::vector<Isa> isas{Isa::scalar};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isas.push_back(Isa::avx2);
#endif
  return isas;
}

Isa best_isa() {
  const std::vector<Isa> isas = available_isas();
  const char* forced = std::getenv("TERSOR_FORCE_ISA");
  if (forced == nullptr || *forced == '\0') return isas.back();
  std::string words;
  for (const Isa isa : isas) {
    if (name(isa) == forced) return isa;
    words += (words.empty() ? "" : ", ") + std::string(name(isa));
  }
  throw fail(ErrorCode::BadUsage, "TERSOR_FORCE_ISA='{}' is not available on this CPU; available: {}", escaped(forced),
             words);
}

}  // namespace tersor
