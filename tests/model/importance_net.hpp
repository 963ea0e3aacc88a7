#pragma once
// A small CNN and what PyTorch says of it (tests/python/make_importance.py).

#include <cstdlib>
#include <map>
#include <string>

#include "catch.hpp"
#include "io/temporary.hpp"
#include "tersor/io/dataset.hpp"
#include "tersor/io/safetensors.hpp"
#include "tersor/model/model.hpp"

struct ImportanceNet {
  ImportanceNet() {
    static const tersor::TemporaryDirectory directory;
    static const int made =
        std::system((TERSOR_TEST_PYTHON " -W ignore '" TERSOR_SOURCE_DIR "/tests/python/make_importance.py' '" +
                     (directory / "").string() + "'")
                        .c_str());
    REQUIRE(made == 0);
    const auto file = tersor::SafetensorsFile::open(directory / "expected.safetensors");
    for (const tersor::SafetensorsEntry& entry : file.entries()) expected.emplace(entry.name, file.read(entry));
    data = {{expected.at("input0")}, expected.at("label")};
    scripted = (directory / "net.pt").string();
    traced = (directory / "traced.pt").string();
  }

  tersor::Model load(const std::string& path) const {
    tersor::Model model = tersor::Model::load(path);
    model.set_example({data.inputs[0].slice(0, 0, 2)});
    return model;
  }

  std::map<std::string, at::Tensor> expected;
  tersor::Dataset data;
  std::string scripted, traced;
};

/// Relative to the largest of what was wanted: sums of float products in another order.
inline double relative_difference(const at::Tensor& got, const at::Tensor& wanted) {
  REQUIRE(got.sizes() == wanted.sizes());
  const at::Tensor a = got.to(at::kDouble), b = wanted.to(at::kDouble);
  return a.sub(b).abs().max().item().toDouble() / b.abs().max().item().toDouble();
}
