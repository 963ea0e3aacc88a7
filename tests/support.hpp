#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "catch.hpp"
#include "tersor/core/error.hpp"
#include "tersor/io/safetensors.hpp"

/// The tensors of `tests/data/<path>`.
inline std::map<std::string, at::Tensor> read_tensors(const std::string& path) {
  const auto file = tersor::SafetensorsFile::open(std::string(TERSOR_TEST_DATA "/") + path);
  std::map<std::string, at::Tensor> tensors;
  for (const tersor::SafetensorsEntry& entry : file.entries()) tensors.emplace(entry.name, file.read(entry));
  return tensors;
}

/// `f` must throw an error of this class, whose text holds every one of `words`.
template <typename F>
void check_error(tersor::ErrorCode code, const std::vector<std::string>& words, F f) {
  try {
    f();
  } catch (const tersor::Error& error) {
    const std::string text = error.what();
    INFO(text);
    CHECK(tersor::name(error.code()) == tersor::name(code));
    for (const std::string& word : words) {
      INFO("should contain " << word);
      CHECK(text.find(word) != std::string::npos);
    }
    return;
  }
  FAIL("no error; expected " << tersor::name(code));
}
