#include "tersor/core/amount.hpp"

#include <limits>

#include "catch.hpp"

using namespace tersor;

TEST_CASE("halves go to the even neighbour", "[amount]") {
  CHECK(round_half_even(0.5) == 0.0);
  CHECK(round_half_even(1.5) == 2.0);
  CHECK(round_half_even(2.5) == 2.0);
  CHECK(round_half_even(-0.5) == 0.0);
  CHECK(round_half_even(-1.5) == -2.0);
  CHECK(round_half_even(2.4999999999999996) == 2.0);
  CHECK(round_half_even(0.49999999999999994) == 0.0);
  CHECK(round_half_even(4503599627370497.0) == 4503599627370497.0);
  CHECK(round_half_even(9007199254740994.0) == 9007199254740994.0);
  for (int k = -1000; k <= 1000; ++k) CHECK(round_half_even(k / 8.0) == std::nearbyint(k / 8.0));
}

TEST_CASE("a fraction of n is rounded half to even, a count is a count", "[amount]") {
  CHECK(Amount(0.5).of(5) == 2);
  CHECK(Amount(0.5).of(7) == 4);
  CHECK(Amount(0.3).of(10) == 3);
  CHECK(Amount(0.0).of(10) == 0);
  CHECK(Amount(1.0).of(10) == 10);
  CHECK(Amount(1).of(10) == 1);
  CHECK(Amount(0).of(0) == 0);
  CHECK(Amount(0.5).of(0) == 0);
  CHECK(Amount(10).of(10) == 10);
}

TEST_CASE("amounts that cannot be are refused with the option's name", "[amount]") {
  const auto message = [](const Amount& a, std::int64_t n) {
    try {
      a.of(n);
    } catch (const Error& e) {
      CHECK(e.code() == ErrorCode::BadOption);
      return e.message();
    }
    return std::string();
  };
  CHECK(message(11, 10) == "amount=11 asks for more than the 10 elements there are");
  CHECK(message(-1, 10) == "amount=-1 is negative; expected a count of at least 0");
  CHECK(message(1.5, 10).starts_with("amount=1.5 is outside [0, 1]"));
  CHECK(message(-0.1, 10).starts_with("amount=-0.1 is outside [0, 1]"));
  CHECK(message(std::numeric_limits<double>::quiet_NaN(), 10).starts_with("amount=nan is outside [0, 1]"));
  try {
    Amount(2.0).validate("sparsity");
    FAIL("did not throw");
  } catch (const Error& e) {
    CHECK(e.message().starts_with("sparsity=2.0 is outside [0, 1]"));
  }
}

TEST_CASE("an amount prints as it is read: the point makes the fraction", "[amount]") {
  CHECK(Amount(1).text() == "1");
  CHECK(Amount(1.0).text() == "1.0");
  CHECK(Amount(0.3).text() == "0.3");
  CHECK(Amount(0.0).text() == "0.0");
  CHECK(Amount(1e-7).text() == "1e-07");
  CHECK(Amount(1) != Amount(1.0));
}
