#pragma once
// TorchScript files that Python writes when the tests run (tests/python/make_models.py).

#include <cstdio>
#include <string>

#include "catch.hpp"
#include "io/temporary.hpp"

inline std::string output_of(const std::string& command) {
  std::string text;
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) text += static_cast<char>(c);
  REQUIRE(pclose(pipe) == 0);
  return text;
}

/// The file of this name; all are made once.
inline std::filesystem::path made(const std::string& name) {
  static const tersor::TemporaryDirectory directory;
  static const std::string log =
      output_of(fmt::format("'{}' -W ignore '{}/tests/python/make_models.py' '{}'", TERSOR_TEST_PYTHON,
                            TERSOR_SOURCE_DIR, (directory / "").string()));
  return directory / (name + ".pt");
}
