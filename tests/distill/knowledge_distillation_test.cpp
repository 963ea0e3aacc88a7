#include "tersor/distill/knowledge_distillation.hpp"

#include <functional>
#include <limits>

#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "support.hpp"

using tersor::ErrorCode;
using tersor::distill::KnowledgeDistillation;

namespace {

double item(const at::Tensor& x) { return x.item<double>(); }

at::Tensor leaf(const at::Tensor& x) { return x.detach().clone().set_requires_grad(true); }

/// Compares d loss / d student with central differences, element by element.
void check_gradient(const std::function<at::Tensor(const at::Tensor&)>& loss, const at::Tensor& at_point) {
  const at::Tensor x = leaf(at_point);
  loss(x).backward();
  const at::Tensor gradient = x.grad().reshape({-1});
  const double h = 1e-6;  // error of the difference: h^2 from the third derivative, 1e-16 / h from rounding
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const at::Tensor up = at_point.detach().clone(), down = at_point.detach().clone();
    up.reshape({-1})[i].add_(h);
    down.reshape({-1})[i].sub_(h);
    const double slope = (item(loss(up)) - item(loss(down))) / (2 * h);
    CHECK(gradient[i].item<double>() == Approx(slope).margin(1e-8).epsilon(1e-6));
  }
}

}  // namespace

TEST_CASE("distillation: value by the formula (d-kd-value)") {
  const auto data = read_tensors("cases/d-kd-value/data.safetensors"),
             expected = read_tensors("cases/d-kd-value/expected.safetensors");
  const at::Tensor student = data.at("student"), teacher = data.at("teacher"), labels = data.at("labels");
  const double kd = item(expected.at("kd")), ce = item(expected.at("ce"));

  CHECK(item(KnowledgeDistillation{.temperature = 4, .alpha = 1}(student, teacher, labels)) == Approx(kd).margin(1e-5));
  CHECK(item(KnowledgeDistillation{.temperature = 4, .alpha = 0}(student, teacher, labels)) == Approx(ce).margin(1e-5));
  CHECK(item(KnowledgeDistillation{.temperature = 4, .alpha = 0.7}(student, teacher, labels)) ==
        Approx(item(expected.at("mix_alpha_hard03"))).margin(1e-5));
  // Without labels: the soft term at full weight.
  CHECK(item(KnowledgeDistillation{.temperature = 4, .alpha = 0.7}(student, teacher)) == Approx(kd).margin(1e-5));
  CHECK(item(KnowledgeDistillation{}(student, student)) == 0.0);
}

TEST_CASE("distillation: garbage in padded rows counts for nothing (d-pad-mask)") {
  const auto data = read_tensors("cases/d-pad-mask/data.safetensors"),
             expected = read_tensors("cases/d-pad-mask/expected.safetensors");
  const at::Tensor teacher = data.at("teacher"), labels = data.at("labels"), mask = data.at("mask").to(at::kBool);
  const double kd = item(expected.at("kd")), ce = item(expected.at("ce"));
  const at::Tensor counts = mask.unsqueeze(-1).expand_as(data.at("student"));

  const auto check_padding = [&](const at::Tensor& student, const at::Tensor& loss, double value) {
    loss.backward();
    CHECK(item(loss) == Approx(value).margin(1e-5));
    CHECK(student.grad().isfinite().all().item<bool>());
    CHECK(student.grad().masked_select(counts.logical_not()).eq(0).all().item<bool>());
    CHECK(student.grad().masked_select(counts).ne(0).all().item<bool>());
  };
  {
    const at::Tensor student = leaf(data.at("student"));
    check_padding(student, KnowledgeDistillation{.temperature = 2, .alpha = 0.25}(student, teacher, labels),
                  0.25 * kd + 0.75 * ce);
  }
  {
    const at::Tensor student = leaf(data.at("student"));
    check_padding(student, KnowledgeDistillation{.temperature = 2}(student, teacher, {}, mask), kd);
  }
  SECTION("nothing but padding") {
    for (const bool by_label : {true, false}) {
      const at::Tensor student = leaf(data.at("student"));
      const at::Tensor none = by_label ? at::full({2, 4}, -100, at::kLong) : labels;
      const at::Tensor masked = by_label ? at::Tensor{} : at::zeros({2, 4}, at::kBool);
      const at::Tensor loss = KnowledgeDistillation{}(student, teacher, none, masked);
      loss.backward();
      CHECK(item(loss) == 0.0);
      CHECK(student.grad().eq(0).all().item<bool>());
    }
  }
}

TEST_CASE("distillation: gradients equal finite differences") {
  const at::Tensor student = at::randn({3, 2, 5}, at::kDouble), teacher = at::randn({3, 2, 5}, at::kDouble);
  const at::Tensor labels = at::tensor({0, 4, -100, 2, 1, 3}, at::kLong).reshape({3, 2});
  for (const double alpha : {0.0, 0.3, 1.0}) {
    const KnowledgeDistillation loss{.temperature = 3, .alpha = alpha};
    check_gradient([&](const at::Tensor& x) { return loss(x, teacher, labels); }, student);
  }
  check_gradient([&](const at::Tensor& x) { return KnowledgeDistillation{}(x, teacher); }, student);
}

TEST_CASE("distillation: the teacher receives no gradient") {
  const at::Tensor student = leaf(at::randn({4, 3})), teacher = leaf(at::randn({4, 3}));
  KnowledgeDistillation{}(student, teacher).backward();
  CHECK(student.grad().defined());
  CHECK_FALSE(teacher.grad().defined());
}

TEST_CASE("distillation: classes that the teacher rules out add nothing") {
  const double inf = std::numeric_limits<double>::infinity();
  const at::Tensor student = leaf(at::tensor({1.0, 2.0, 0.5}, at::kDouble).reshape({1, 3}));
  const at::Tensor teacher = at::tensor({0.3, -0.2, -inf}, at::kDouble).reshape({1, 3});
  const at::Tensor loss = KnowledgeDistillation{.temperature = 1}(student, teacher);
  loss.backward();
  // p = (e^0.5, 1) / (e^0.5 + 1), q the softmax of the student.
  const double p = std::exp(0.5) / (std::exp(0.5) + 1), z = std::exp(1.0) + std::exp(2.0) + std::exp(0.5);
  CHECK(item(loss) == Approx(p * std::log(p * z / std::exp(1.0)) + (1 - p) * std::log((1 - p) * z / std::exp(2.0))));
  CHECK(student.grad().isfinite().all().item<bool>());
}

TEST_CASE("distillation: half precision is computed in float32") {
  const at::Tensor student = at::randn({8, 10}).mul(4), teacher = at::randn({8, 10}).mul(4);
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16}) {
    const at::Tensor s = student.to(type), t = teacher.to(type);
    const at::Tensor loss = KnowledgeDistillation{}(s, t);
    CHECK(loss.scalar_type() == at::kFloat);
    CHECK(item(loss) == item(KnowledgeDistillation{}(s.to(at::kFloat), t.to(at::kFloat))));
  }
}

TEST_CASE("distillation: what does not fit is named") {
  const at::Tensor x = at::zeros({2, 3});
  const KnowledgeDistillation loss;
  check_error(ErrorCode::BadUsage, {"[2, 3]", "[2, 4]"}, [&] { loss(x, at::zeros({2, 4})); });
  check_error(ErrorCode::BadUsage, {"Long"}, [&] { loss(x, at::zeros({2, 3}, at::kLong)); });
  check_error(ErrorCode::BadUsage, {"labels", "[2]", "[3]"}, [&] { loss(x, x, at::zeros({3}, at::kLong)); });
  check_error(ErrorCode::BadUsage, {"labels", "Float"}, [&] { loss(x, x, at::zeros({2})); });
  check_error(ErrorCode::BadUsage, {"label 3"}, [&] { loss(x, x, at::tensor({0, 3}, at::kLong)); });
  check_error(ErrorCode::BadUsage, {"label -1"}, [&] { loss(x, x, at::tensor({-1, 0}, at::kLong)); });
  check_error(ErrorCode::BadUsage, {"mask", "Bool"}, [&] { loss(x, x, {}, at::zeros({2})); });
  check_error(ErrorCode::BadOption, {"temperature"}, [&] { KnowledgeDistillation{.temperature = 0}(x, x); });
  check_error(ErrorCode::BadOption, {"alpha"}, [&] { KnowledgeDistillation{.alpha = 1.5}(x, x); });
}
