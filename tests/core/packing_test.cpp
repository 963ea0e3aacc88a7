#include "tersor/core/packing.hpp"

#include <random>
#include <vector>

#include "catch.hpp"
#include "tersor/core/checked.hpp"

using namespace tersor;

namespace {

std::vector<std::uint32_t> packed(const std::vector<std::int8_t>& codes, int bits) {
  std::vector<std::uint32_t> words(static_cast<std::size_t>(packed_words(std::ssize(codes), bits)));
  pack_codes(codes, bits, words);
  return words;
}

// The definition, bit by bit.
std::vector<std::uint32_t> packed_slowly(const std::vector<std::int8_t>& codes, int bits) {
  std::vector<std::uint32_t> words((codes.size() * static_cast<std::size_t>(bits) + 31) / 32, 0);
  for (std::size_t c = 0; c < codes.size(); ++c) {
    const auto stored = static_cast<unsigned>(codes[c] + (1 << (bits - 1)));
    for (int b = 0; b < bits; ++b) {
      const std::size_t place = c * static_cast<std::size_t>(bits) + static_cast<std::size_t>(b);
      words[place / 32] |= ((stored >> b) & 1U) << (place % 32);
    }
  }
  return words;
}

}  // namespace

TEST_CASE("four-bit codes are packed as compressed-tensors does") {
  const std::vector<std::int8_t> codes{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  CHECK(packed(codes, 4) == std::vector<std::uint32_t>{0x76543210, 0xfedcba98});
}

TEST_CASE("packing equals the bit-by-bit definition and unpacks to the same codes") {
  std::mt19937 random(7);
  for (int bits = 1; bits <= 8; ++bits) {
    for (int n : {0, 1, 2, 5, 7, 8, 31, 32, 33, 64, 100}) {
      std::vector<std::int8_t> codes(static_cast<std::size_t>(n));
      for (std::int8_t& code : codes)
        code = static_cast<std::int8_t>(static_cast<int>(random() % (1U << bits)) - (1 << (bits - 1)));
      INFO(bits << " bits, " << n << " codes");
      const std::vector<std::uint32_t> words = packed(codes, bits);
      REQUIRE(words == packed_slowly(codes, bits));
      std::vector<std::int8_t> back(codes.size());
      unpack_codes(words, bits, back);
      CHECK(back == codes);
    }
  }
}

TEST_CASE("bits behind the last code are written as 0 and ignored when read") {
  const std::vector<std::int8_t> codes{1, -1, 3};
  std::vector<std::uint32_t> words = packed(codes, 3);
  CHECK(words[0] >> 9 == 0);
  words[0] |= 0xFFFFFE00;
  std::vector<std::int8_t> back(3);
  unpack_codes(words, 3, back);
  CHECK(back == codes);
}

TEST_CASE("checked arithmetic gives nothing instead of a wrapped value") {
  using U = std::uint64_t;
  CHECK(checked_mul<U>(1ULL << 32, 1ULL << 31) == 1ULL << 63);
  CHECK_FALSE(checked_mul<U>(1ULL << 32, 1ULL << 32).has_value());
  CHECK_FALSE(checked_add<U>(~0ULL, 1).has_value());
  CHECK_FALSE(checked_add<std::int64_t>(INT64_MAX, 1).has_value());
  const std::vector<std::int64_t> zero_first{0, INT64_MAX, INT64_MAX}, zero_last{INT64_MAX, INT64_MAX, 0};
  CHECK(checked_product(std::span<const std::int64_t>(zero_first)) == 0);
  CHECK_FALSE(checked_product(std::span<const std::int64_t>(zero_last)).has_value());
  CHECK(checked_product(std::span<const std::int64_t>()) == 1);
}
