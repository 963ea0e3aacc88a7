#include "tersor/runtime/weight_tensor.hpp"

#include <atomic>
#include <functional>
#include <sstream>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Formatting.h>
#include <ATen/ops/_convolution.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv_transpose2d.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>

#include "catch.hpp"
#include "tersor/core/error.hpp"

using namespace tersor;

namespace {

const ActivationQuant kNone{};
const ActivationQuant kPerToken{ActivationMode::per_token, 1.0F, 0};
const QuantScheme kInt8{};
const QuantScheme kInt4{4, false, Granularity::per_group, 8};

c10::intrusive_ptr<PackedLinear> packed_linear(const at::Tensor& w, const ActivationQuant& activation,
                                               const std::optional<at::Tensor>& bias = std::nullopt) {
  return c10::make_intrusive<PackedLinear>(LayerQuantization{quantize_weight(w, kInt8), activation}, bias);
}

at::Tensor linear_weight(std::int64_t n, std::int64_t k, const ActivationQuant& activation = kPerToken) {
  return make_weight_tensor(packed_linear(at::randn({n, k}), activation), "block.1.weight");
}

at::Tensor conv_weight(at::IntArrayRef shape) {
  return make_weight_tensor(c10::make_intrusive<PackedConv>(quantize_weight(at::randn(shape), kInt8), std::nullopt),
                            "conv.weight");
}

at::Tensor embedding_weight(std::int64_t rows, std::int64_t columns) {
  return make_weight_tensor(c10::make_intrusive<PackedEmbedding>(quantize_weight(at::randn({rows, columns}), kInt4)),
                            "table.weight");
}

// What the user reads when `run` throws an Error of this code; otherwise what happened instead.
std::string error_of(const std::function<void()>& run, ErrorCode code = ErrorCode::UnsupportedLayer) {
  try {
    run();
  } catch (const Error& e) {
    return e.code() == code ? e.message() : "another code: " + std::string(e.what());
  } catch (const std::exception& e) {
    return std::string("another exception: ") + e.what();
  }
  return "no exception";
}

std::string c10_error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  }
  return "no exception";
}

bool says(const std::string& message, const std::vector<std::string>& parts) {
  INFO(message);
  bool all = true;
  for (const std::string& part : parts) {
    CHECK_THAT(message, Catch::Matchers::Contains(part));
    all = all && message.find(part) != std::string::npos;
  }
  return all;
}

}  // namespace

TEST_CASE("a weight of codes looks like the weight that it stands for", "[weight_tensor]") {
  const auto packed = packed_linear(at::randn({3, 5}).to(at::kBFloat16), kPerToken);
  const at::Tensor w = make_weight_tensor(packed, "w");
  REQUIRE(w.sizes() == at::IntArrayRef({3, 5}));
  REQUIRE(w.numel() == 15);
  REQUIRE(w.scalar_type() == at::kBFloat16);
  REQUIRE(w.device().is_cpu());
  REQUIRE(w.is_contiguous());
  REQUIRE(w.is_leaf());
  REQUIRE_FALSE(w.requires_grad());
  REQUIRE_FALSE(w.has_storage());
  REQUIRE(is_weight_tensor(w));
  REQUIRE(is_weight_tensor(w.t()));
  REQUIRE_FALSE(is_weight_tensor(at::zeros({2})));
  REQUIRE_FALSE(is_weight_tensor(at::Tensor()));
  REQUIRE(at::equal(quantization_of(w).weight.codes, packed->weight().codes));
  REQUIRE(quantization_of(w.t()).weight.shape == std::vector<std::int64_t>{3, 5});
  REQUIRE(quantization_of(w).activation == kPerToken);
  REQUIRE(says(error_of([] { quantization_of(at::zeros({2})); }, ErrorCode::BadUsage), {"plain tensor"}));
}

TEST_CASE("transposed views", "[weight_tensor]") {
  const at::Tensor w = linear_weight(3, 5);
  for (const at::Tensor& t : {w.t(), w.mT(), w.numpy_T(), w.transpose(0, 1), w.transpose(-2, -1), w.transpose(1, 0)}) {
    REQUIRE(t.sizes() == at::IntArrayRef({5, 3}));
    REQUIRE(t.strides() == at::IntArrayRef({1, 5}));
    REQUIRE(t.is_same(w.t()));
    REQUIRE(at::equal(t.dequantize(), w.dequantize().t()));
    REQUIRE(at::equal(t.t().dequantize(), w.dequantize()));
    REQUIRE(t.t().sizes() == w.sizes());
    REQUIRE(t.t().t().sizes() == t.sizes());
  }
  REQUIRE(w.transpose(1, 1).is_same(w));
  REQUIRE(says(error_of([] { conv_weight({2, 3, 4}).transpose(0, 1); }), {"aten::transpose", "conv.weight"}));
  REQUIRE_THROWS_AS(w.transpose(0, 2), c10::Error);
}

TEST_CASE("products are those of the packed layer", "[weight_tensor]") {
  for (const ActivationQuant& activation : {kNone, kPerToken}) {
    const at::Tensor values = at::randn({21, 40});
    const at::Tensor bias = at::randn({21});
    const auto with_bias = packed_linear(values, activation, bias);
    const auto without = packed_linear(values, activation);
    const at::Tensor w = make_weight_tensor(with_bias, "w");  // the packed bias is not used
    for (const at::Tensor& x : {at::randn({5, 40}), at::randn({2, 3, 40}), at::randn({40}), at::randn({0, 40})}) {
      REQUIRE(at::equal(at::linear(x, w), without->forward(x, false)));
      REQUIRE(at::equal(at::linear(x, w, bias), with_bias->forward(x, false)));
      REQUIRE(at::equal(at::matmul(x, w.t()), without->forward(x, false)));
      if (x.dim() != 2) continue;
      REQUIRE(at::equal(at::mm(x, w.t()), without->forward(x, false)));
      REQUIRE(at::equal(at::addmm(bias, x, w.t()), with_bias->forward(x, false)));
      REQUIRE(at::equal(at::addmm(bias.unsqueeze(0), x, w.t()), with_bias->forward(x, false)));
      const at::Tensor y = without->forward(x, false);
      REQUIRE(at::equal(at::addmm(y, x, w.t()), y + y));
      REQUIRE(at::equal(at::addmm(bias[0], x, w.t()), y + bias[0]));
      REQUIRE(at::equal(at::addmm(bias, x, w.t(), 2, 0.5), y * 0.5 + bias * 2));
      const c10::InferenceMode inference;
      REQUIRE(at::equal(at::addmm(bias, x, w.t()), with_bias->forward(x, false)));
    }
    const at::Tensor x = at::randn({2, 40});
    REQUIRE_THROWS(at::addmm(at::zeros({20}), x, w.t()));
    REQUIRE(says(error_of([&] { at::mm(at::zeros({2, 39}), w.t()); }, ErrorCode::BadShape), {"[2, 39]", "40 inputs"}));
    // In the other orientation, as the left factor, and of another layer: the values count.
    const at::Tensor dense = w.dequantize();
    REQUIRE(at::equal(at::matmul(at::ones({2, 21}), w), at::matmul(at::ones({2, 21}), dense)));
    REQUIRE(at::equal(at::matmul(w, x.t()), at::matmul(dense, x.t())));
    REQUIRE(at::equal(at::linear(at::ones({2, 21}), w.t()), at::linear(at::ones({2, 21}), dense.t())));
  }
  const at::Tensor table = embedding_weight(9, 6);  // tied to the last layer
  const at::Tensor x = at::randn({2, 6});
  REQUIRE(at::equal(at::mm(x, table.t()), at::mm(x, table.dequantize().t())));
}

TEST_CASE("convolutions compute with dequantized values", "[weight_tensor]") {
  const std::vector<std::int64_t> none{0, 0};
  const std::vector<std::int64_t> one{1, 1};
  const at::Tensor bias = at::randn({6});
  const at::Tensor w = conv_weight({6, 2, 3, 3});
  const at::Tensor dense = w.dequantize();
  const at::Tensor x = at::randn({2, 4, 9, 8});
  REQUIRE(at::equal(at::conv2d(x, w, bias, {2, 1}, {1, 0}, {1, 2}, 2),
                    at::conv2d(x, dense, bias, {2, 1}, {1, 0}, {1, 2}, 2)));
  REQUIRE(at::equal(at::conv2d(x[0], w, bias, one, none, one, 2), at::conv2d(x[0], dense, bias, one, none, one, 2)));
  const at::Tensor line_w = conv_weight({6, 4, 3});
  const at::Tensor line_dense = line_w.dequantize();
  const at::Tensor line = at::randn({2, 4, 20});
  REQUIRE(at::equal(at::conv1d(line, line_w, bias, 2, 4), at::conv1d(line, line_dense, bias, 2, 4)));
  for (const char* padding : {"same", "valid"}) {
    REQUIRE(at::equal(at::conv2d(x, w, {}, 1, padding, 1, 2), at::conv2d(x, dense, {}, 1, padding, 1, 2)));
    REQUIRE(at::equal(at::conv1d(line, line_w, bias, 1, padding), at::conv1d(line, line_dense, bias, 1, padding)));
  }
  REQUIRE(at::equal(at::_convolution(x, w, bias, {1, 1}, {0, 0}, {1, 1}, false, {0, 0}, 2, false, false, true, true),
                    at::conv2d(x, dense, bias, one, none, one, 2)));
  const at::Tensor up = at::randn({1, 6, 4, 4});
  REQUIRE(at::equal(at::conv_transpose2d(up, w), at::conv_transpose2d(up, dense)));
  REQUIRE(at::equal(at::conv2d(x.to(at::kDouble), w, {}, one, none, one, 2),
                    at::conv2d(x.to(at::kDouble), dense.to(at::kDouble), {}, one, none, one, 2)));

  const at::Tensor a = x.clone().requires_grad_(true);
  const at::Tensor b = x.clone().requires_grad_(true);
  const at::Tensor bias_a = bias.clone().requires_grad_(true);
  const at::Tensor bias_b = bias.clone().requires_grad_(true);
  at::conv2d(a, w, bias_a, one, none, one, 2).square().sum().backward();
  at::conv2d(b, dense, bias_b, one, none, one, 2).square().sum().backward();
  REQUIRE(at::equal(a.grad(), b.grad()));
  REQUIRE(at::equal(bias_a.grad(), bias_b.grad()));
  REQUIRE_FALSE(w.grad().defined());
}

TEST_CASE("embeddings look up rows", "[weight_tensor]") {
  const at::Tensor w = embedding_weight(11, 7);
  const at::Tensor ids = at::randint(0, 11, {3, 5}, at::kLong);
  const at::Tensor want = at::embedding(w.dequantize(), ids);
  REQUIRE(at::equal(at::embedding(w, ids), want));
  REQUIRE(at::equal(at::embedding(w, ids, 3, true, true), want));
  REQUIRE(at::equal(at::embedding(w.to(at::kHalf), ids), want.to(at::kHalf)));
  REQUIRE_FALSE(at::embedding(w, ids).requires_grad());
  REQUIRE(says(error_of([&] { at::embedding(w, ids + 11); }, ErrorCode::BadData), {"11 rows"}));
  const at::Tensor linear = linear_weight(11, 7);
  REQUIRE(at::equal(at::embedding(linear, ids), at::embedding(linear.dequantize(), ids)));
}

TEST_CASE("copies keep the codes or hold plain values", "[weight_tensor]") {
  for (const at::Tensor& w : {linear_weight(4, 6), conv_weight({4, 2, 3}), embedding_weight(4, 6)}) {
    const at::Tensor values = w.dequantize();
    REQUIRE_FALSE(is_weight_tensor(values));
    for (const at::Tensor& same : {w.detach(), w.alias(), w.data(), w.to(at::kFloat), w.to(at::kCPU), w.contiguous(),
                                   w.to(at::kFloat, false, true)}) {
      REQUIRE(is_weight_tensor(same));
      REQUIRE(same.sizes() == w.sizes());
      REQUIRE(quantization_of(same).weight.codes.is_same(quantization_of(w).weight.codes));
    }
    for (const auto dtype : {at::kHalf, at::kBFloat16}) {
      const at::Tensor other = w.to(dtype);
      REQUIRE(is_weight_tensor(other));
      REQUIRE(other.scalar_type() == dtype);
      REQUIRE(at::equal(other.dequantize(), values.to(dtype)));
      REQUIRE(at::equal(other.to(at::kFloat).dequantize(), values));
    }
    REQUIRE(at::equal(w.clone(), values));
    REQUIRE(at::equal(w.clone(at::MemoryFormat::Preserve), values));
    REQUIRE(at::equal(w.to(at::kDouble), values.to(at::kDouble)));
    REQUIRE(at::equal(w.to(at::kLong), values.to(at::kLong)));
    at::Tensor plain = at::zeros(w.sizes(), at::kDouble);
    plain.copy_(w);
    REQUIRE(at::equal(plain, values.to(at::kDouble)));
    // What was handed out is the caller's to change.
    w.clone().zero_();
    w.dequantize().zero_();
    w.to(at::kDouble).zero_();
    REQUIRE(at::equal(w.dequantize(), values));

    std::ostringstream printed;
    std::ostringstream expected;
    printed << w;
    expected << values;
    REQUIRE(printed.str() == expected.str());
  }
  const at::Tensor t = linear_weight(4, 6).t();
  REQUIRE(t.contiguous().is_contiguous());
  REQUIRE(at::equal(t.contiguous(), t.dequantize()));
  REQUIRE(t.detach().sizes() == t.sizes());
  REQUIRE(at::equal(t.to(at::kHalf).dequantize(), t.dequantize().to(at::kHalf)));
}

TEST_CASE("set_data exchanges the codes of two weights", "[weight_tensor]") {
  const at::Tensor a = linear_weight(4, 6);
  const at::Tensor b = linear_weight(5, 6).to(at::kHalf);
  const at::Tensor handle = a;
  a.set_data(b);
  REQUIRE(handle.sizes() == at::IntArrayRef({5, 6}));
  REQUIRE(handle.scalar_type() == at::kHalf);
  REQUIRE(at::equal(handle.dequantize(), b.dequantize()));
  REQUIRE(at::equal(handle.t().dequantize(), b.dequantize().t()));
  const at::Tensor x = at::randn({2, 6});
  REQUIRE(at::equal(at::mm(x, handle.t()), at::mm(x, b.t())));
  const at::Tensor plain = at::zeros({5, 6}, at::kHalf);
  REQUIRE(says(error_of([&] { a.set_data(plain); }), {"set_data", "'block.1.weight'", "tersor::dequantize(model)"}));
  REQUIRE(says(error_of([&] { plain.set_data(a); }), {"set_data", "'block.1.weight'", "tersor::dequantize(model)"}));
}

TEST_CASE("other operators name themselves, the weight and the way out", "[weight_tensor]") {
  const at::Tensor w = linear_weight(3, 4);
  const std::vector<std::pair<std::string, std::function<void()>>> refused = {
      {"aten::abs", [&] { w.abs(); }},
      {"aten::add", [&] { w + 1; }},
      {"aten::add",
       [&] {
         at::ones({3, 4}) + w;
       }},
      {"aten::add_", [&] { w.detach().add_(1); }},
      {"aten::mul", [&] { w* w; }},
      {"aten::div", [&] { w / 2; }},
      {"aten::sub", [&] { w - 2; }},
      {"aten::sum", [&] { w.sum(); }},
      {"aten::norm", [&] { w.norm(); }},
      {"aten::zero_", [&] { w.detach().zero_(); }},
      {"aten::uniform_", [&] { w.detach().uniform_(0, 1); }},
      {"aten::view", [&] { w.view({-1}); }},
      {"aten::permute",
       [&] {
         w.permute({1, 0});
       }},
      {"aten::select", [&] { w[0]; }},
      {"aten::slice", [&] { w.slice(0, 0, 1); }},
      {"aten::narrow", [&] { w.narrow(0, 0, 1); }},
      {"aten::cat",
       [&] {
         at::cat({at::ones({3, 4}), w});
       }},
      {"aten::equal",
       [&] {
         at::equal(w, at::zeros({3, 4}));
       }},
  };
  for (const bool requires_grad : {false, true})
    for (const auto& [name, run] : refused) {
      w.requires_grad_(requires_grad);
      INFO(name);
      REQUIRE(says(error_of(run), {name + " is not possible", "'block.1.weight'", "8-bit codes of shape [3, 4]",
                                   "tersor::dequantize(model)", "weight.dequantize()"}));
      const c10::InferenceMode inference;
      REQUIRE(says(error_of(run), {name + " is not possible"}));
    }
  REQUIRE(says(error_of([&] { w.detach().copy_(at::zeros({3, 4})); }), {"'block.1.weight'", "cannot be written to"}));
  REQUIRE(says(error_of([&] { w.to(at::kMeta); }), {"'block.1.weight'", "device meta", "tersor::dequantize(model)"}));
  REQUIRE(says(c10_error_of([&] { w.data_ptr(); }), {"'block.1.weight'", "Model::save", "tersor::dequantize(model)"}));
  REQUIRE(says(c10_error_of([&] { w.t().storage(); }), {"'block.1.weight'", "tersor::dequantize(model)"}));
  const at::Tensor hostile = make_weight_tensor(packed_linear(at::randn({2, 2}), kNone), "a\x1b[1m");
  REQUIRE(says(error_of([&] { hostile.abs(); }), {"'a\\x1b[1m'"}));
}

TEST_CASE("eight threads share a weight", "[weight_tensor]") {
  const int pool = at::get_num_threads();
  at::set_num_threads(2);
  const at::Tensor w = linear_weight(300, 256);
  const at::Tensor bias = at::randn({300});
  const at::Tensor x = at::randn({3, 256});
  const at::Tensor want = at::addmm(bias, x, w.t());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      const c10::InferenceMode inference(t % 2 == 0);
      for (int i = 0; i < 500; ++i) {
        if (!at::equal(at::addmm(bias, x, w.t()), want)) ++wrong;
        if (!at::equal(at::linear(x, w, bias), want)) ++wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  at::set_num_threads(pool);
  REQUIRE(wrong == 0);
}

TEST_CASE("a dropped weight frees its codes", "[weight_tensor]") {
  auto packed = packed_linear(at::randn({4, 6}), kPerToken);
  const c10::weak_intrusive_ptr<PackedLinear> watch(packed);
  at::Tensor w = make_weight_tensor(std::move(packed), "w");
  at::Tensor t = w.t();
  at::Tensor other = w.to(at::kHalf);
  REQUIRE(watch.use_count() == 1);
  w.reset();
  other.reset();
  REQUIRE(watch.use_count() == 1);
  REQUIRE(t.t().sizes() == at::IntArrayRef({4, 6}));
  t.reset();
  REQUIRE(watch.use_count() == 0);
}

TEST_CASE("observers see calls with a weight of codes", "[weight_tensor]") {
  const at::Tensor w = linear_weight(4, 6);
  const at::Tensor bias = at::randn({4});
  const at::Tensor x = at::randn({2, 6});

  static std::vector<std::string> names;  // a callback is a plain function
  names.clear();
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& fn) -> std::unique_ptr<at::ObserverContext> {
        names.emplace_back(fn.name());
        return nullptr;
      })
          .needsInputs(true)
          .needsOutputs(true));
  const at::Tensor seen = at::addmm(bias, x, w.t());
  at::removeCallback(handle);
  REQUIRE(at::equal(seen, at::linear(x, w, bias)));
  REQUIRE(std::count(names.begin(), names.end(), "aten::addmm") == 1);
  REQUIRE(std::count(names.begin(), names.end(), "aten::t") == 1);
}
