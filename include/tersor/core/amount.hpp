#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "tersor/core/error.hpp"

namespace tersor {

/// Rounds to the nearest integer, ties to the even one, whatever the floating-point environment says.
inline double round_half_even(double x) {
  const double down = std::floor(x);
  const double part = x - down;
  if (part < 0.5) return down;
  if (part > 0.5) return down + 1.0;
  return std::fmod(down, 2.0) == 0.0 ? down : down + 1.0;
}

/// How much to remove: a fraction of what is there (`0.3`, `1.0`) or a count (`3`).
///
/// The text decides which: an integer is a count, a number with a point or an exponent a fraction.
/// `1` is one element, `1.0` is all of them, and each prints back as it was written.
class Amount {
 public:
  constexpr Amount(double fraction) : fraction_(fraction), is_count_(false) {}  // NOLINT(google-explicit-constructor)
  constexpr Amount(std::int64_t count) : count_(count), is_count_(true) {}      // NOLINT(google-explicit-constructor)
  constexpr Amount(int count) : Amount(std::int64_t{count}) {}                  // NOLINT(google-explicit-constructor)

  constexpr bool is_count() const { return is_count_; }
  constexpr double fraction() const { return fraction_; }
  constexpr std::int64_t count() const { return count_; }

  /// How many of `n` elements this amount is: a count as it stands, a fraction rounded half to even.
  /// Throws BadOption for a negative or too large count and for a fraction outside [0, 1] (NaN too).
  std::int64_t of(std::int64_t n) const {
    validate();
    if (is_count_) {
      check(count_ <= n, ErrorCode::BadOption, "amount={} asks for more than the {} elements there are", count_, n);
      return count_;
    }
    return static_cast<std::int64_t>(round_half_even(fraction_ * static_cast<double>(n)));
  }

  /// Throws BadOption when no number of elements could satisfy this amount; the message calls it `option`.
  void validate(std::string_view option = "amount") const {
    if (is_count_) {
      check(count_ >= 0, ErrorCode::BadOption, "{}={} is negative; expected a count of at least 0", option, count_);
    } else {
      check(fraction_ >= 0.0 && fraction_ <= 1.0, ErrorCode::BadOption,
            "{}={} is outside [0, 1]; expected a fraction such as 0.3, or a whole number for a count", option, text());
    }
  }

  std::string text() const {
    if (is_count_) return std::to_string(count_);
    std::string s = fmt::format("{}", fraction_);
    if (s.find_first_of(".en") == std::string::npos) s += ".0";
    return s;
  }

  friend constexpr bool operator==(const Amount&, const Amount&) = default;

 private:
  double fraction_ = 0.0;
  std::int64_t count_ = 0;
  bool is_count_ = false;
};

}  // namespace tersor
