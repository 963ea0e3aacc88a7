// The header-only part alone: no LibTorch is included.
#include "tersor/core/amount.hpp"

int main() { return tersor::Amount(0.3).of(10) == 3 ? 0 : 1; }
