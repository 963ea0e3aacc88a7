#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "tersor/core/error.hpp"

namespace tersor {

/// |x| as an unsigned integer that orders as |x| does; +0.0 and -0.0 are 0. Not for NaN.
template <std::floating_point T>
constexpr auto magnitude_key(T x) {
  using Key = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  static_assert(sizeof(T) == sizeof(Key));
  return static_cast<Key>(std::bit_cast<Key>(x) & ~(Key{1} << (8 * sizeof(Key) - 1)));
}

/// Says of each candidate, asked in the order of its index, whether it is one of the k smallest; of equal ones the
/// first come first.
template <std::unsigned_integral Key>
class Smallest {
 public:
  Smallest(Key threshold, std::int64_t ties) : threshold_(threshold), ties_(ties) {}

  bool take(Key key) { return key < threshold_ || (key == threshold_ && ties_ > 0 && ties_-- > 0); }

 private:
  Key threshold_;
  std::int64_t ties_;  ///< candidates equal to the threshold that still belong to the k
};

/// Finds the k smallest keys exactly, in time O(n) and constant memory.
///
/// `visit(f)` calls `f(key)` for every candidate; it is called once for every 16 bits of the key and has to show the
/// same candidates each time. They may come from any number of places, in any order. Throws Internal when there are
/// fewer than k.
template <std::unsigned_integral Key, typename Visit>
Smallest<Key> find_smallest(std::int64_t k, const Visit& visit) {
  if (k <= 0) return {0, 0};
  Key prefix = 0, fixed = 0;  // the bits of the k-th smallest key that are known, and which bits these are
  for (int shift = 8 * static_cast<int>(sizeof(Key)) - 16; shift >= 0; shift -= 16) {
    std::vector<std::int64_t> histogram(std::size_t{1} << 16, 0);
    visit([&](Key key) { histogram[(key >> shift) & 0xFFFF] += (key & fixed) == prefix; });
    std::size_t digit = 0;
    while (digit < histogram.size() && k > histogram[digit]) k -= histogram[digit++];
    check(digit < histogram.size(), ErrorCode::Internal, "find_smallest: {} candidates too few", k);
    prefix |= static_cast<Key>(digit) << shift;
    fixed |= Key{0xFFFF} << shift;
  }
  return {prefix, k};
}

}  // namespace tersor
