#include "tersor/io/dataset.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include "temporary.hpp"
#include "tersor/io/safetensors.hpp"

using namespace tersor;

TEST_CASE("a dataset is written, read back and sliced") {
  const TemporaryDirectory dir;
  Dataset data{{at::arange(10, at::kFloat).view({5, 2}), at::arange(5)}, at::arange(5)};
  write_dataset(dir / "d", data);
  const Dataset back = read_dataset(dir / "d");
  REQUIRE(back.inputs.size() == 2);
  CHECK(back.size() == 5);
  CHECK(back.inputs[0].equal(data.inputs[0]));
  CHECK(back.inputs[1].equal(data.inputs[1]));
  CHECK(back.labels->equal(*data.labels));
  const Dataset tail = back.slice(3, 100);
  CHECK(tail.size() == 2);
  CHECK(tail.labels->equal(at::arange(3, 5)));
  CHECK(back.slice(5, 1).size() == 0);
}

TEST_CASE("a dataset that is not one says why") {
  const TemporaryDirectory dir;
  const at::Tensor three = at::zeros({3, 2}), four = at::zeros({4, 2});
  const auto message = [&](const std::map<std::string, at::Tensor>& tensors) {
    write_safetensors(dir / "d", tensors, {}, {.overwrite = true});
    const Error error = error_of([&] { read_dataset(dir / "d"); });
    CHECK(error.code() == ErrorCode::BadData);
    return error.message();
  };
  CHECK(message({{"x", three}}).find("no tensor 'input0'") != std::string::npos);
  CHECK(message({{"input0", three}, {"input2", three}}).find("no 'input1'") != std::string::npos);
  CHECK(message({{"input0", three}, {"input1", four}}).find("4 samples") != std::string::npos);
  CHECK(message({{"input0", three}, {"label", four}}).find("'label'") != std::string::npos);
  CHECK(message({{"input0", at::zeros({0, 2})}}).find("no samples") != std::string::npos);
  CHECK(message({{"input0", at::zeros({})}}).find("dimension 0") != std::string::npos);
}
