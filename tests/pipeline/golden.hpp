#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "catch.hpp"

/// Compares with a committed file; TERSOR_APPROVE=1 writes the file instead.
inline void check_golden(const std::filesystem::path& file, const std::string& text) {
  const char* approve = std::getenv("TERSOR_APPROVE");
  if (approve != nullptr && std::string(approve) == "1") {
    std::ofstream(file, std::ios::binary) << text;
    return;
  }
  std::ifstream in(file, std::ios::binary);
  INFO(file.string() << " is missing or old; TERSOR_APPROVE=1 writes the text below into it");
  REQUIRE(in);
  std::stringstream stored;
  stored << in.rdbuf();
  CHECK(text == stored.str());
}
