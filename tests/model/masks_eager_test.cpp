#include "tersor/model/masks.hpp"

#include <limits>

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/embedding.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "catch.hpp"
#include "support.hpp"

using namespace tersor;

namespace {

at::Tensor bools(std::vector<std::int64_t> values) { return torch::tensor(values).to(at::kBool); }

/// +0.0 where `keep` is false, which a comparison cannot tell from -0.0.
bool zero_outside(const at::Tensor& values, const at::Tensor& keep) {
  const at::Tensor dropped = values.detach().masked_select(keep.logical_not());
  return dropped.eq(0).all().item<bool>() && !dropped.signbit().any().item<bool>();
}

at::Tensor parameter(std::vector<double> values) { return torch::tensor(values, at::kFloat).requires_grad_(); }

}  // namespace

TEST_CASE("a mask zeroes the weight and its gradient", "[masks]") {
  at::Tensor w = parameter({1, -2, -3, 4});
  w.mutable_grad() = torch::tensor({5.0F, -6.0F, -7.0F, 8.0F});
  at::Tensor keep = bools({1, 0, 0, 1});
  Masks masks;
  REQUIRE(masks.empty());
  masks.set("w", w, keep);
  CHECK(w.equal(torch::tensor({1.0F, 0.0F, 0.0F, 4.0F})));
  CHECK(zero_outside(w, keep));
  CHECK(w.grad().equal(torch::tensor({5.0F, 0.0F, 0.0F, 8.0F})));
  CHECK(w.requires_grad());
  CHECK(w.is_leaf());

  CHECK_FALSE(masks.empty());
  CHECK(masks.names() == std::vector<std::string>{"w"});
  const at::Tensor kept = keep.clone();
  keep.fill_(true);  // the caller's own
  CHECK(masks.mask("w").equal(kept));

  w.detach().copy_(torch::tensor({9.0F, -0.0F, -1.0F, 7.0F}));
  masks.apply();
  CHECK(w.equal(torch::tensor({9.0F, 0.0F, 0.0F, 7.0F})));
  CHECK(zero_outside(w, kept));
}

TEST_CASE("every gradient of a masked weight is masked", "[masks]") {
  at::Tensor w = parameter({1, 2, 3, 4});
  const at::Tensor keep = bools({1, 0, 0, 1});
  Masks masks;
  masks.set("w", w, keep);
  const at::Tensor x = torch::tensor({10.0F, 20.0F, 30.0F, 40.0F});
  const at::Tensor once = torch::tensor({10.0F, 0.0F, 0.0F, 40.0F});

  (w * x).sum().backward();
  CHECK(w.grad().equal(once));
  (w * x).sum().backward();  // accumulates
  CHECK(w.grad().equal(once * 2));
  (w * w * x).sum().backward();  // used twice in one graph: 2 w x
  CHECK(w.grad().equal(once * 2 + torch::tensor({20.0F, 0.0F, 0.0F, 320.0F})));

  SECTION("what is not finite does not pass the mask") {
    w.mutable_grad().reset();
    const float infinity = std::numeric_limits<float>::infinity();
    (w * torch::tensor({1.0F, infinity, std::numeric_limits<float>::quiet_NaN(), 2.0F})).sum().backward();
    CHECK(w.grad().equal(torch::tensor({1.0F, 0.0F, 0.0F, 2.0F})));
  }
  SECTION("gradients can be differentiated through the mask") {
    // d/dw of sum((2 w x)^2) over kept elements = 8 w x^2
    const auto gradients = torch::autograd::grad({(w * w * x).sum()}, {w}, {}, true, true);
    w.mutable_grad().reset();
    gradients[0].pow(2).sum().backward();
    CHECK(w.grad().equal(torch::tensor({800.0F, 0.0F, 0.0F, 8 * 4 * 1600.0F})));
  }
  SECTION("new memory of the parameter") {
    w.mutable_grad().reset();
    w.set_data(torch::tensor({5.0F, 6.0F, 7.0F, 8.0F}));
    (w * x).sum().backward();
    CHECK(w.grad().equal(once));
    masks.apply();
    CHECK(w.equal(torch::tensor({5.0F, 0.0F, 0.0F, 8.0F})));
  }
  SECTION("to double and back, with a graph of the old dtype alive") {
    const at::Tensor alive = (w * x).sum();
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      w.mutable_grad().reset();
      w.set_data(w.detach().to(dtype) + 1);
      (w * x.to(dtype)).sum().backward();
      CHECK(w.grad().scalar_type() == dtype);
      CHECK(w.grad().equal(once.to(dtype)));
      masks.apply();
      CHECK(zero_outside(w, keep));
      CHECK(w.scalar_type() == dtype);
    }
    CHECK(w.equal(torch::tensor({3.0F, 0.0F, 0.0F, 6.0F})));
  }
  SECTION("Module::to moves the parameter of a module") {
    torch::nn::Linear layer(2, 2);
    masks.set("weight", layer->weight, bools({1, 0, 0, 1}).view({2, 2}));
    layer->to(at::kDouble);
    layer->forward(torch::ones({1, 2}, at::kDouble)).sum().backward();
    CHECK(layer->weight.grad().equal(torch::eye(2, at::kDouble)));
  }
  SECTION("a parameter that is frozen while it is masked") {
    at::Tensor frozen = torch::tensor({1.0F, 2.0F, 3.0F, 4.0F});
    masks.set("frozen", frozen, keep);
    CHECK(frozen.equal(torch::tensor({1.0F, 0.0F, 0.0F, 4.0F})));
    frozen.requires_grad_();
    masks.apply();
    (frozen * x).sum().backward();
    CHECK(frozen.grad().equal(once));
  }
}

TEST_CASE("sparse gradients of an embedding are masked", "[masks]") {
  at::Tensor table = torch::arange(1, 9, at::kFloat).view({4, 2}).requires_grad_();
  const at::Tensor keep = bools({1, 1, 0, 1, 1, 0, 0, 0}).view({4, 2});
  Masks masks;
  const auto look_up = [&] {
    torch::nn::functional::embedding(torch::tensor({1, 2, 1}), table,
                                     torch::nn::functional::EmbeddingFuncOptions().sparse(true))
        .sum()
        .backward();
  };
  const at::Tensor dense = torch::tensor({0.0F, 0.0F, 2.0F, 2.0F, 1.0F, 1.0F, 0.0F, 0.0F}).view({4, 2});
  look_up();
  REQUIRE(table.grad().is_sparse());
  REQUIRE(table.grad().to_dense().equal(dense));
  masks.set("table", table, keep);
  CHECK(table.grad().to_dense().equal(dense * keep));
  look_up();
  CHECK(table.grad().is_sparse());
  CHECK(table.grad().to_dense().equal(dense * keep * 2));
}

TEST_CASE("a parameter was cut: its mask follows", "[masks]") {
  at::Tensor w = torch::arange(1, 13, at::kFloat).view({3, 4}).requires_grad_();
  const at::Tensor keep = bools({1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0}).view({3, 4});
  Masks masks;
  masks.set("w", w, keep);
  const at::Tensor rows = torch::tensor({0, 2}), columns = torch::tensor({1, 2, 3});
  w.set_data(w.detach().index_select(0, rows).index_select(1, columns));

  check_error(ErrorCode::BadUsage, {"'w'", "[3, 4]", "[2, 3]", "Masks::keep"}, [&] { masks.apply(); });
  masks.keep("w", 0, rows);
  masks.keep("w", 1, columns);
  masks.keep("another", 0, rows);  // not masked
  const at::Tensor expected = keep.index_select(0, rows).index_select(1, columns);
  CHECK(masks.mask("w").equal(expected));
  w.sum().backward();
  CHECK(w.grad().equal(expected.to(at::kFloat)));
  w.detach().fill_(3);
  masks.apply();
  CHECK(w.equal(expected * 3.0F));
}

TEST_CASE("a later mask replaces an earlier one", "[masks]") {
  at::Tensor w = parameter({1, 2, 3}), other = parameter({1, 2, 3});
  Masks masks;
  masks.set("w", w, bools({0, 1, 1}));

  SECTION("of the same name and tensor") {
    masks.set("w", w, bools({1, 1, 0}));
    w.sum().backward();
    CHECK(w.grad().equal(torch::tensor({1.0F, 1.0F, 0.0F})));
  }
  SECTION("of the same name: the program has put a new tensor in the place of the old one") {
    masks.set("w", other, bools({1, 1, 0}));
    (w + other).sum().backward();
    CHECK(w.grad().equal(torch::ones(3)));
    CHECK(other.grad().equal(torch::tensor({1.0F, 1.0F, 0.0F})));
    w.detach().fill_(5);
    masks.apply();
    CHECK(w.equal(torch::full(3, 5.0F)));
  }
  SECTION("of a tensor that has two names") {
    masks.set("tied", w, bools({1, 0, 1}));
    CHECK(masks.names() == std::vector<std::string>{"tied"});
    w.sum().backward();
    CHECK(w.grad().equal(torch::tensor({1.0F, 0.0F, 1.0F})));
    w.set_data(w.detach().slice(0, 1));
    w.mutable_grad().reset();
    for (const char* name : {"w", "tied"}) masks.keep(name, 0, torch::tensor({1, 2}));
    CHECK(masks.mask("tied").equal(bools({0, 1})));
  }
  SECTION("forget") {
    masks.set("other", other, bools({1, 1, 0}));
    masks.forget("w");
    masks.forget("nothing");
    CHECK(masks.names() == std::vector<std::string>{"other"});
    (w + other).sum().backward();
    CHECK(w.grad().equal(torch::ones(3)));
    CHECK(other.grad().equal(torch::tensor({1.0F, 1.0F, 0.0F})));
  }
}

TEST_CASE("released masks keep the zeros and nothing else", "[masks]") {
  at::Tensor w = parameter({1, 2, 3});
  Masks masks;
  const Masks copy = masks;  // of the same masks
  masks.set("w", w, bools({1, 0, 1}));
  CHECK(copy.names() == std::vector<std::string>{"w"});
  masks.release();
  CHECK(copy.empty());
  CHECK(w.equal(torch::tensor({1.0F, 0.0F, 3.0F})));
  w.sum().backward();
  CHECK(w.grad().equal(torch::ones(3)));
  w.detach().fill_(2);
  copy.apply();
  CHECK(w.equal(torch::full(3, 2.0F)));
  masks.set("w", w, bools({0, 1, 1}));  // masks may begin again
  CHECK(w.equal(torch::tensor({0.0F, 2.0F, 2.0F})));
}

TEST_CASE("masks end with their last handle and hold nothing after it", "[masks]") {
  at::Tensor w = parameter({1, 2, 3});
  REQUIRE(w.use_count() == 1);
  {
    Masks copy;
    {
      Masks masks;
      masks.set("w", w, bools({1, 0, 1}));
      copy = masks;
    }
    w.sum().backward();
    CHECK(w.grad().equal(torch::tensor({1.0F, 0.0F, 1.0F})));
    CHECK(w.use_count() == 2);
  }
  CHECK(w.use_count() == 1);
  w.sum().backward();
  CHECK(w.grad().equal(torch::tensor({2.0F, 1.0F, 2.0F})));

  // The other way: a parameter that ends before its masks.
  c10::weak_intrusive_ptr<c10::TensorImpl> alive(w.getIntrusivePtr());
  {
    Masks masks;
    masks.set("w", w, bools({1, 0, 1}));
    w = at::Tensor();
    CHECK_FALSE(alive.expired());
  }
  CHECK(alive.expired());
}

TEST_CASE("a deep copy of the network has masks of its own", "[masks]") {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  const at::Tensor keep = torch::rand({3, 4}).gt(0.5);
  Masks masks;
  masks.set("0.weight", net->named_parameters()["0.weight"], keep);

  const auto copy = net->clone();
  const auto parameters = copy->named_parameters();
  Masks theirs = masks.rebound([&](const std::string& name) { return parameters[name]; });
  const auto gradient_of = [&](const at::Tensor& weight) {
    at::Tensor handle = weight;
    handle.mutable_grad().reset();
    weight.sum().backward();
    return weight.grad();
  };
  CHECK(gradient_of(parameters["0.weight"]).equal(keep.to(at::kFloat)));
  masks.release();
  CHECK(gradient_of(parameters["0.weight"]).equal(keep.to(at::kFloat)));
  CHECK(gradient_of(net->named_parameters()["0.weight"]).equal(torch::ones({3, 4})));
  copy->to(at::kDouble);
  parameters["0.weight"].detach().fill_(7);
  theirs.apply();
  CHECK(parameters["0.weight"].equal(keep.to(at::kDouble) * 7));

  check_error(ErrorCode::BadUsage, {"'0.weight'"},
              [&] { theirs.rebound([](const std::string&) { return at::Tensor(); }); });
}

TEST_CASE("after a reload the zeros are the masks", "[masks]") {
  at::Tensor w = parameter({0.0, 1.0, -0.0, 2.0}), whole = parameter({1, 2, 3, 4});
  const Masks masks = Masks::of_zeros({"w", "whole"}, [&](const std::string& name) { return name == "w" ? w : whole; });
  CHECK(masks.mask("w").equal(bools({0, 1, 0, 1})));
  CHECK(masks.mask("whole").all().item<bool>());
  CHECK(zero_outside(w, masks.mask("w")));
  (w + whole).sum().backward();
  CHECK(w.grad().equal(torch::tensor({0.0F, 1.0F, 0.0F, 1.0F})));
  CHECK(whole.grad().equal(torch::ones(4)));
  check_error(ErrorCode::NoSuchTarget, {"'x\\x0a'"},
              [&] { Masks::of_zeros({"x\n"}, [](const std::string&) { return at::Tensor(); }); });
}

TEST_CASE("what is no mask is refused and changes nothing", "[masks]") {
  at::Tensor w = parameter({1, 2, 3});
  Masks masks;
  check_error(ErrorCode::BadUsage, {"'w'", "[3]", "bool"}, [&] { masks.set("w", w, torch::ones(3)); });
  check_error(ErrorCode::BadUsage, {"'w'", "[3]"}, [&] { masks.set("w", w, bools({1, 0})); });
  check_error(ErrorCode::BadUsage, {"'w'", "[3]"}, [&] { masks.set("w", w, {}); });
  check_error(ErrorCode::BadUsage, {"'w'", "leaf"}, [&] { masks.set("w", w * 2, bools({1, 0, 1})); });
  check_error(ErrorCode::NoSuchTarget, {"'w'"}, [&] { masks.mask("w"); });
  CHECK(masks.empty());
  CHECK(w.equal(torch::tensor({1.0F, 2.0F, 3.0F})));
}
