#pragma once

#include <concepts>
#include <optional>
#include <span>

namespace tersor {

/// The one place where sizes that come from files are added and multiplied: nothing when the result does not fit.
template <std::integral T>
constexpr std::optional<T> checked_add(T a, T b) {
  T out{};
  if (__builtin_add_overflow(a, b, &out)) return std::nullopt;
  return out;
}

template <std::integral T>
constexpr std::optional<T> checked_mul(T a, T b) {
  T out{};
  if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}

/// Product of all factors in their order; nothing as soon as a partial product does not fit. 1 without factors.
template <std::integral T>
constexpr std::optional<T> checked_product(std::span<const T> factors) {
  std::optional<T> out = T{1};
  for (const T factor : factors) {
    out = checked_mul(*out, factor);
    if (!out) return std::nullopt;
  }
  return out;
}

}  // namespace tersor
