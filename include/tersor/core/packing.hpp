#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tersor {

/// 32-bit words that hold `count` values of `bits` bits each.
constexpr std::int64_t packed_words(std::int64_t count, int bits) { return (count * bits + 31) / 32; }

/// Packs `codes` (each in [-2^(bits-1), 2^(bits-1) - 1], bits 1 to 8) into one little-endian bit stream: code c is
/// stored as code + 2^(bits-1) at bits [c*bits, (c+1)*bits), word w holds bits [32w, 32w + 32), bits behind the last
/// code are 0.
///
/// This is the layout of compressed-tensors' `pack-quantized`. `words` has packed_words(codes.size(), bits) elements.
inline void pack_codes(std::span<const std::int8_t> codes, int bits, std::span<std::uint32_t> words) {
  assert(bits >= 1 && bits <= 8);
  assert(std::ssize(words) == packed_words(std::ssize(codes), bits));
  const int offset = 1 << (bits - 1);
  std::uint64_t pending = 0;
  int filled = 0;
  std::size_t w = 0;
  for (const std::int8_t code : codes) {
    assert(code >= -offset && code < offset);
    pending |= static_cast<std::uint64_t>(code + offset) << filled;
    filled += bits;
    if (filled >= 32) {
      words[w++] = static_cast<std::uint32_t>(pending);
      pending >>= 32;
      filled -= 32;
    }
  }
  if (filled > 0) words[w] = static_cast<std::uint32_t>(pending);
}

/// The inverse of pack_codes; bits behind the last code are ignored.
inline void unpack_codes(std::span<const std::uint32_t> words, int bits, std::span<std::int8_t> codes) {
  assert(bits >= 1 && bits <= 8);
  assert(std::ssize(words) == packed_words(std::ssize(codes), bits));
  const int offset = 1 << (bits - 1);
  const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
  std::uint64_t pending = 0;
  int filled = 0;
  std::size_t w = 0;
  for (std::int8_t& code : codes) {
    if (filled < bits) {
      pending |= static_cast<std::uint64_t>(words[w++]) << filled;
      filled += 32;
    }
    code = static_cast<std::int8_t>(static_cast<int>(pending & mask) - offset);
    pending >>= bits;
    filled -= bits;
  }
}

}  // namespace tersor
