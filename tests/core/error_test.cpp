#include "tersor/core/error.hpp"

#include <set>

#include "catch.hpp"

using namespace tersor;

namespace {

struct Row {
  ErrorCode code;
  std::string_view name;
};
constexpr Row rows[] = {
#define TERSOR_X(id, exit) {ErrorCode::id, #id},
    TERSOR_ERROR_CODES(TERSOR_X)
#undef TERSOR_X
};

}  // namespace

TEST_CASE("every error class has its own name and a documented exit status", "[error]") {
  std::set<std::string_view> names;
  for (const Row& row : rows) {
    CHECK(name(row.code) == row.name);
    CHECK(names.insert(row.name).second);
    const int exit = exit_code(row.code);
    CHECK(((exit >= 2 && exit <= 7) || exit == 70));
  }
  CHECK(exit_code(ErrorCode::BadSyntax) == 2);
  CHECK(exit_code(ErrorCode::HoleOrOverlap) == 3);
  CHECK(exit_code(ErrorCode::NeedUnmet) == 4);
  CHECK(exit_code(ErrorCode::DiskFull) == 5);
  CHECK(exit_code(ErrorCode::VerificationFailed) == 6);
  CHECK(exit_code(ErrorCode::OutOfMemory) == 7);
}

TEST_CASE("what() is the class, the places from the outside in, and the message", "[error]") {
  Error e(ErrorCode::BadOption, "amount=2.0 is too much");
  CHECK(std::string(e.what()) == "BadOption: amount=2.0 is too much");
  e.in("layer conv1").in("pass 2 (prune_l1)");
  CHECK(std::string(e.what()) == "BadOption: pass 2 (prune_l1): layer conv1: amount=2.0 is too much");
  CHECK(e.context() == "pass 2 (prune_l1): layer conv1");
  CHECK(e.message() == "amount=2.0 is too much");
  CHECK(e.code() == ErrorCode::BadOption);
}

TEST_CASE("check throws only when it does not hold; fail only makes the error", "[error]") {
  CHECK_NOTHROW(check(true, ErrorCode::IoError, "never {}", 1));
  try {
    check(false, ErrorCode::IoError, "{} of {}", 1, "two");
    FAIL("did not throw");
  } catch (const Error& e) {
    CHECK(e.message() == "1 of two");
    CHECK(e.code() == ErrorCode::IoError);
  }
  CHECK(fail(ErrorCode::BadData, "{{}} {}", "x{}").message() == "{} x{}");
}
