#include "tersor/analysis/channel_groups.hpp"

#include <algorithm>
#include <cmath>

#include <ATen/ops/tensor.h>

#include "catch.hpp"
#include "graph_builder.hpp"
#include "tersor/analysis/cost.hpp"

using namespace tersor;

namespace {

using Indices = std::vector<std::int64_t>;

/// The family that the parameter's output dimension produces; exactly one must.
const ChannelFamily& family_of(const ChannelGroups& groups, const std::string& parameter, std::int32_t slot = 0) {
  const ChannelFamily* found = nullptr;
  for (const ChannelFamily& family : groups.families())
    for (const ChannelProducer& producer : family.producers)
      if (producer.parameter == parameter && family.slot == slot) {
        REQUIRE((found == nullptr || found == &family));
        found = &family;
      }
  REQUIRE(found != nullptr);
  return *found;
}

bool shrinks(const ChannelGroups& groups, const std::string& parameter) {
  for (const ChannelFamily& family : groups.families())
    for (const ChannelProducer& producer : family.producers)
      if (producer.parameter == parameter) return true;
  return false;
}

Removal without(const ChannelGroups& groups, const ChannelFamily& family, const Indices& positions) {
  Removal removed = groups.nothing();
  for (const std::int64_t p : positions)
    removed[static_cast<std::size_t>(family.atoms[static_cast<std::size_t>(p)])] = true;
  return removed;
}

std::string why_blocked(const ChannelGroups& groups, const std::string& what) {
  for (const Blocked& blocked : groups.blocked())
    if (blocked.what == what) return blocked.why;
  return "";
}

const c10::IValue* edit_of(const std::vector<ArgumentEdit>& edits, const Graph& graph, const std::string& op,
                           const std::string& argument) {
  for (const ArgumentEdit& edit : edits) {
    const GraphNode& node = graph.nodes[static_cast<std::size_t>(edit.node)];
    if (node.op == op && node.argument_names[edit.index] == argument) return &edit.value;
  }
  return nullptr;
}

}  // namespace

TEST_CASE("channel groups: a hidden width, its bias and its reader leave together; inputs and outputs stay") {
  GraphBuilder b;
  const ValueId h = b.relu(b.linear("a", b.input(numbers({2, 4})), 4, 6));
  const ChannelGroups groups(b.result({b.linear("b", h, 6, 3)}));

  REQUIRE(groups.families().size() == 1);
  const ChannelFamily& family = groups.families().front();
  CHECK(family.width() == 6);
  REQUIRE(family.producers.size() == 1);
  CHECK(family.producers[0].parameter == "a.weight");
  CHECK(family.producers[0].dim == 0);
  CHECK_FALSE(family.statistics);
  CHECK(family.maskable);

  const Removal removed = without(groups, family, {1, 4});
  CHECK(groups.kept("a.weight", 0, removed) == Indices{0, 2, 3, 5});
  CHECK(groups.kept("a.bias", 0, removed) == Indices{0, 2, 3, 5});
  CHECK(groups.kept("b.weight", 1, removed) == Indices{0, 2, 3, 5});
  CHECK(groups.cuts(removed).size() == 3);
  CHECK(groups.shape(h, removed) == Indices{2, 4});
  CHECK(groups.edits(removed).empty());
  CHECK(groups.conflicts(removed).empty());
  CHECK(groups.cuts(groups.nothing()).empty());
  CHECK(why_blocked(groups, "b.weight") == "it makes an output of the model");

  const std::vector<ParameterIndices> readers = groups.consumers(removed);
  REQUIRE(readers.size() == 1);
  CHECK(readers[0].parameter == "b.weight");
  CHECK(readers[0].dim == 1);
  CHECK(readers[0].indices == Indices{1, 4});
}

TEST_CASE("channel groups: flatten repeats each channel's label over its places") {
  GraphBuilder b;
  const ValueId c = b.conv("conv", b.input(numbers({1, 3, 2, 3})), 3, 4, 3);
  const ValueId flat = b.one("aten::flatten", "using_ints", {c, c10::IValue(1), c10::IValue(-1)});
  const ChannelGroups groups(b.result({b.linear("fc", flat, 24, 2)}));
  const Removal removed = without(groups, family_of(groups, "conv.weight"), {0, 2});
  CHECK(groups.kept("fc.weight", 1, removed) == Indices{6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23});
  CHECK(groups.shape(flat, removed) == Indices{1, 12});
}

TEST_CASE("channel groups: a literal view follows the predicted shape, -1 stays") {
  GraphBuilder b;
  const ValueId c = b.conv("conv", b.input(numbers({2, 3, 2, 2})), 3, 4);
  const ValueId flat = b.one("aten::view", "", {c, c10::IValue(std::vector<std::int64_t>{-1, 16})});
  const ChannelGroups groups(b.result({b.linear("fc", flat, 16, 2)}));
  const Removal removed = without(groups, family_of(groups, "conv.weight"), {3});
  const std::vector<ArgumentEdit> edits = groups.edits(removed);
  REQUIRE(edits.size() == 1);
  CHECK(edits[0].value.toIntVector() == Indices{-1, 12});
  CHECK(groups.conflicts(removed).empty());
}

TEST_CASE("channel groups: a residual trunk is one family, whoever adds to it") {
  GraphBuilder b;
  const ValueId stem = b.relu(b.batch_norm("bn", b.conv("stem", b.input(numbers({1, 3, 4, 4})), 3, 8, 3), 8));
  const ValueId c1 = b.relu(b.conv("c1", stem, 8, 5, 3));
  const ValueId trunk = b.add(stem, b.conv("c2", c1, 5, 8, 3));
  const ValueId mean = b.one("aten::mean", "dim", {trunk, c10::IValue(Indices{2, 3})});
  const ChannelGroups groups(b.result({b.linear("fc", mean, 8, 3)}));

  REQUIRE(groups.families().size() == 2);
  const ChannelFamily& family = family_of(groups, "stem.weight");
  CHECK(&family == &family_of(groups, "c2.weight"));
  CHECK(family.width() == 8);
  CHECK_FALSE(family.statistics);  // the mean runs over space, not over channels
  CHECK(family_of(groups, "c1.weight").width() == 5);

  const Removal removed = without(groups, family, {2, 5});
  const Indices stay{0, 1, 3, 4, 6, 7};
  CHECK(groups.kept("stem.weight", 0, removed) == stay);
  CHECK(groups.kept("c2.weight", 0, removed) == stay);
  CHECK(groups.kept("c1.weight", 1, removed) == stay);
  CHECK(groups.kept("c1.weight", 0, removed).size() == 5);
  CHECK(groups.kept("fc.weight", 1, removed) == stay);
  for (const char* name : {"bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"})
    CHECK(groups.kept(name, 0, removed) == stay);
}

TEST_CASE("channel groups: broadcasting parameters and buffers follow; a tensor without labels fixes") {
  GraphBuilder b;
  const ValueId c = b.conv("a", b.input(numbers({1, 3, 2, 2})), 3, 6);
  const ValueId scaled = b.one("aten::mul", "Tensor", {c, b.parameter("gamma", {6, 1, 1})});
  const ValueId shifted = b.add(scaled, b.parameter("shift", {1, 6, 1, 1}));
  const ValueId p = b.one("aten::prelu", "", {shifted, b.parameter("prelu.weight", {6})});
  const ValueId d = b.conv("b", p, 6, 4);
  const ValueId fixed = b.add(d, b.constant(numbers({1, 4, 1, 1})));
  const ChannelGroups groups(b.result({b.conv("c", fixed, 4, 2)}));
  const Removal removed = without(groups, family_of(groups, "a.weight"), {1, 4});
  CHECK(groups.kept("gamma", 0, removed) == Indices{0, 2, 3, 5});
  CHECK(groups.kept("shift", 1, removed) == Indices{0, 2, 3, 5});
  CHECK(groups.kept("prelu.weight", 0, removed) == Indices{0, 2, 3, 5});
  CHECK_FALSE(shrinks(groups, "b.weight"));
  CHECK(why_blocked(groups, "b.weight") == "it meets a tensor that cannot shrink");
}

TEST_CASE("channel groups: LayerNorm follows, its literal too, and says that statistics change") {
  GraphBuilder b;
  const ValueId h = b.linear("a", b.input(numbers({2, 4})), 4, 8);
  const ValueId n = b.one("aten::layer_norm", "",
                          {h, c10::IValue(Indices{8}), b.parameter("ln.weight", {8}), b.parameter("ln.bias", {8})});
  const ChannelGroups groups(b.result({b.linear("b", n, 8, 3)}));
  const ChannelFamily& family = family_of(groups, "a.weight");
  CHECK(family.statistics);
  const Removal removed = without(groups, family, {0, 2, 5, 7});
  CHECK(groups.kept("ln.weight", 0, removed) == Indices{1, 3, 4, 6});
  CHECK(groups.kept("ln.bias", 0, removed) == Indices{1, 3, 4, 6});
  const std::vector<ArgumentEdit> edits = groups.edits(removed);
  const c10::IValue* shape = edit_of(edits, groups.graph(), "aten::layer_norm", "normalized_shape");
  REQUIRE(shape != nullptr);
  CHECK(shape->toIntVector() == Indices{4});
}

TEST_CASE("channel groups: concatenation with itself doubles the places of each channel") {
  GraphBuilder b;
  const ValueId a = b.conv("a", b.input(numbers({1, 3, 2, 2})), 3, 8);
  const ValueId twice = b.one("aten::cat", "", {std::vector<ValueId>{a, a}, c10::IValue(1)});
  const ValueId n = b.batch_norm("bn", twice, 16);
  const ChannelGroups groups(b.result({b.conv("b", n, 16, 4)}));
  const Removal removed = without(groups, family_of(groups, "a.weight"), {3, 6});
  CHECK(groups.kept("bn.weight", 0, removed) == Indices{0, 1, 2, 4, 5, 7, 8, 9, 10, 12, 13, 15});
  CHECK(groups.kept("b.weight", 1, removed) == Indices{0, 1, 2, 4, 5, 7, 8, 9, 10, 12, 13, 15});
}

TEST_CASE("channel groups: halves that multiply each other leave in pairs") {
  GraphBuilder b;
  const ValueId a = b.conv("a", b.input(numbers({1, 3, 2, 2})), 3, 8);
  const std::vector<ValueId> halves = b.call("aten::chunk", "", {a, c10::IValue(2), c10::IValue(1)});
  const ValueId gated = b.one("aten::mul", "Tensor", {halves[0], b.one("aten::sigmoid", "", {halves[1]})});
  const ChannelGroups groups(b.result({b.conv("b", gated, 4, 3)}));
  const ChannelFamily& family = family_of(groups, "a.weight");
  CHECK(family.width() == 4);
  CHECK(family.rows_per_atom() == 2);
  const Removal removed = without(groups, family, {1, 2});
  CHECK(groups.kept("a.weight", 0, removed) == Indices{0, 3, 4, 7});
  CHECK(groups.kept("b.weight", 1, removed) == Indices{0, 3});
  CHECK(groups.conflicts(removed).empty());
}

TEST_CASE("channel groups: uncoupled pieces of a chunk must stay equally wide") {
  GraphBuilder b;
  const ValueId a = b.conv("a", b.input(numbers({1, 3, 2, 2})), 3, 8);
  const std::vector<ValueId> halves = b.call("aten::chunk", "", {a, c10::IValue(2), c10::IValue(1)});
  const ChannelGroups groups(b.result({b.conv("b", halves[0], 4, 3), b.conv("c", halves[1], 4, 3)}));
  const ChannelFamily& family = family_of(groups, "a.weight");
  CHECK(family.cells == std::vector<std::int32_t>{0, 0, 0, 0, 1, 1, 1, 1});
  CHECK(groups.conflicts(without(groups, family, {0, 5})).empty());
  const std::vector<ChannelGroups::Conflict> conflicts = groups.conflicts(without(groups, family, {0, 1}));
  REQUIRE(conflicts.size() == 2);  // the counts, and the elements that chunk would move
  CHECK(conflicts[0].families == std::vector<std::size_t>{0});
}

TEST_CASE("channel groups: depthwise convolutions shrink with their input and their group count") {
  GraphBuilder b;
  const ValueId c1 = b.relu(b.conv("c1", b.input(numbers({1, 3, 4, 4})), 3, 8, 3));
  const ValueId dw = b.conv("dw", c1, 8, 16, 3, 8);
  const ChannelGroups groups(b.result({b.conv("pw", dw, 16, 4)}));
  const ChannelFamily& family = family_of(groups, "c1.weight");
  CHECK(&family == &family_of(groups, "dw.weight"));
  const Removal removed = without(groups, family, {0, 1, 4, 6});
  CHECK(groups.kept("dw.weight", 0, removed) == Indices{4, 5, 6, 7, 10, 11, 14, 15});
  CHECK(groups.kept("dw.weight", 1, removed) == Indices{0});
  CHECK(groups.kept("pw.weight", 1, removed) == Indices{4, 5, 6, 7, 10, 11, 14, 15});
  const std::vector<ArgumentEdit> edits = groups.edits(removed);
  const c10::IValue* count = edit_of(edits, groups.graph(), "aten::conv2d", "groups");
  REQUIRE(count != nullptr);
  CHECK(count->toInt() == 4);
}

TEST_CASE("channel groups: grouped convolutions keep equal counts and read the same offsets") {
  GraphBuilder b;
  const ValueId a = b.relu(b.conv("a", b.input(numbers({1, 3, 2, 2})), 3, 4));
  const ValueId g = b.relu(b.conv("g", a, 4, 8, 1, 2));
  const ChannelGroups groups(b.result({b.conv("b", g, 8, 3)}));
  const ChannelFamily& inner = family_of(groups, "g.weight");
  CHECK(inner.cells == std::vector<std::int32_t>{0, 0, 0, 0, 1, 1, 1, 1});
  const ChannelFamily& outer = family_of(groups, "a.weight");
  CHECK(outer.width() == 2);
  const Removal removed = without(groups, outer, {1});
  CHECK(groups.kept("a.weight", 0, removed) == Indices{0, 2});
  CHECK(groups.kept("g.weight", 1, removed) == Indices{0});
  CHECK(groups.kept("g.weight", 0, removed).size() == 8);
  CHECK(groups.edits(removed).empty());
  CHECK(groups.conflicts(without(groups, inner, {0, 1, 2, 4})).size() == 1);
  CHECK(groups.conflicts(without(groups, inner, {0, 4})).empty());
}

TEST_CASE("channel groups: pixel shuffle takes filters in blocks") {
  GraphBuilder b;
  const ValueId c = b.conv("c", b.input(numbers({1, 3, 2, 2})), 3, 16);
  const ValueId p = b.one("aten::pixel_shuffle", "", {c, c10::IValue(2)});
  const ChannelGroups groups(b.result({b.conv("d", p, 4, 2)}));
  const ChannelFamily& family = family_of(groups, "c.weight");
  CHECK(family.width() == 4);
  const Removal removed = without(groups, family, {0, 2});
  CHECK(groups.kept("c.weight", 0, removed) == Indices{4, 5, 6, 7, 12, 13, 14, 15});
  CHECK(groups.kept("d.weight", 1, removed) == Indices{1, 3});
  CHECK(groups.conflicts(removed).empty());
}

TEST_CASE("channel groups: fused attention factors into heads and head size") {
  GraphBuilder b;
  const std::int64_t heads = 4, size = 2, tokens = 3;
  const ValueId x = b.input(numbers({1, tokens, 8}));
  const ValueId qkv = b.reshape(b.linear("qkv", x, 8, 24), {1, tokens, 3, heads, size});
  const ValueId parts = b.one("aten::permute", "", {qkv, c10::IValue(Indices{2, 0, 3, 1, 4})});
  std::vector<ValueId> part;
  for (std::int64_t i = 0; i < 3; ++i)
    part.push_back(b.one("aten::select", "int", {parts, c10::IValue(0), c10::IValue(i)}));
  const ValueId k = b.one("aten::transpose", "int", {part[1], c10::IValue(-2), c10::IValue(-1)});
  const ValueId scores =
      b.one("aten::div", "Scalar", {b.one("aten::matmul", "", {part[0], k}), c10::IValue(std::sqrt(2.0))});
  const ValueId weights = b.one("aten::softmax", "int", {scores, c10::IValue(-1)});
  const ValueId mixed =
      b.one("aten::transpose", "int", {b.one("aten::matmul", "", {weights, part[2]}), c10::IValue(1), c10::IValue(2)});
  const ValueId joined = b.reshape(mixed, {1, tokens, 8});
  const ChannelGroups groups(b.result({b.add(x, b.linear("proj", joined, 8, 8))}));

  const ChannelFamily& family = family_of(groups, "qkv.weight", 1);
  CHECK(family.width() == heads);
  CHECK(family.factored);
  CHECK(family.rows_per_atom() == 6);
  CHECK_FALSE(shrinks(groups, "proj.weight"));
  const Removal removed = without(groups, family, {1, 2});
  CHECK(groups.kept("qkv.weight", 0, removed) == Indices{0, 1, 6, 7, 8, 9, 14, 15, 16, 17, 22, 23});
  CHECK(groups.kept("proj.weight", 1, removed) == Indices{0, 1, 6, 7});
  CHECK(groups.conflicts(removed).empty());
  std::vector<Indices> shapes;
  for (const ArgumentEdit& edit : groups.edits(removed)) shapes.push_back(edit.value.toIntVector());
  CHECK(shapes == std::vector<Indices>{{1, tokens, 3, 2, size}, {1, tokens, 4}});

  const ChannelFamily& inside = family_of(groups, "qkv.weight", 2);
  CHECK(inside.width() == size);
  CHECK_FALSE(inside.maskable);  // queries and keys are contracted with each other
}

TEST_CASE("channel groups: slices and selections count what stays before them") {
  GraphBuilder b;
  const ValueId a = b.linear("a", b.input(numbers({2, 3})), 3, 8);
  const ValueId left = b.one("aten::slice", "Tensor", {a, c10::IValue(1), c10::IValue(0), c10::IValue(5)});
  const ValueId right =
      b.one("aten::slice", "Tensor", {a, c10::IValue(1), c10::IValue(-3), c10::IValue(std::int64_t{1} << 62)});
  const ValueId single = b.one("aten::select", "int", {a, c10::IValue(1), c10::IValue(4)});
  const ChannelGroups groups(b.result({b.linear("l", left, 5, 2), b.linear("r", right, 3, 2), single}));
  const ChannelFamily& family = family_of(groups, "a.weight");
  CHECK(family.width() == 7);  // 4 is used alone, so it stays
  const Removal removed = without(groups, family, {1, 6});
  CHECK(groups.kept("a.weight", 0, removed) == Indices{0, 2, 3, 4, 5, 6});
  const std::vector<ArgumentEdit> edits = groups.edits(removed);
  REQUIRE(edits.size() == 3);
  CHECK(edits[0].value.toInt() == 4);
  CHECK(edits[1].value.toInt() == 4);
  CHECK(edits[2].value.toInt() == 3);
  CHECK(groups.conflicts(removed).empty());
}

TEST_CASE("channel groups: an operator that would move other elements is a conflict") {
  GraphBuilder b;
  const ValueId a = b.linear("a", b.input(numbers({2, 3})), 3, 6);
  const ValueId rolled = b.one("aten::roll", "", {a, c10::IValue(Indices{2}), c10::IValue(Indices{1})});
  const ChannelGroups groups(b.result({b.linear("l", rolled, 6, 2)}));
  const ChannelFamily& family = family_of(groups, "a.weight");
  CHECK(groups.conflicts(without(groups, family, {1})).empty());  // [4 5 0 2 3] either way
  CHECK(groups.conflicts(without(groups, family, {5})).size() == 1);
}

TEST_CASE("channel groups: an unknown operator fixes what reaches it and is named once") {
  GraphBuilder b;
  const ValueId a = b.linear("a", b.input(numbers({2, 3})), 3, 6);
  const ValueId sorted = b.call("aten::sort", "", {a, c10::IValue(1), c10::IValue(false)}).front();
  const ValueId again = b.call("aten::sort", "", {sorted, c10::IValue(1), c10::IValue(false)}).front();
  const ValueId h = b.relu(b.linear("b", again, 6, 5));
  const ChannelGroups groups(b.result({b.linear("c", h, 5, 2)}));
  CHECK_FALSE(shrinks(groups, "a.weight"));
  CHECK(shrinks(groups, "b.weight"));
  CHECK(why_blocked(groups, "a.weight") == "it reaches the unknown operator aten::sort");
  CHECK(why_blocked(groups, "aten::sort") == "unknown operator aten::sort");
  CHECK(std::count_if(groups.blocked().begin(), groups.blocked().end(),
                      [](const Blocked& blocked) { return blocked.what == "aten::sort"; }) == 1);
}

TEST_CASE("channel groups: linear to view to transposed convolution; the channel factor shrinks, space does not") {
  GraphBuilder b;
  const ValueId fc = b.reshape(b.linear("fc", b.input(numbers({1, 5})), 5, 16), {-1, 4, 2, 2});
  const ValueId t1 = b.one("aten::conv_transpose2d", "input",
                           {fc, b.parameter("t1.weight", {4, 6, 3, 3}), b.parameter("t1.bias", {6})});
  const ValueId t2 =
      b.one("aten::conv_transpose2d", "input", {b.relu(t1), b.parameter("t2.weight", {6, 2, 3, 3}), ValueId{-1}});
  const ChannelGroups groups(b.result({t2}));
  const ChannelFamily& inner = family_of(groups, "t1.weight");
  CHECK(inner.producers[0].dim == 1);
  Removal removed = without(groups, inner, {0, 1, 3});
  CHECK(groups.kept("t1.weight", 1, removed) == Indices{2, 4, 5});
  CHECK(groups.kept("t1.bias", 0, removed) == Indices{2, 4, 5});
  CHECK(groups.kept("t2.weight", 0, removed) == Indices{2, 4, 5});
  const ChannelFamily& outer = family_of(groups, "fc.weight");
  CHECK(outer.width() == 4);
  removed = without(groups, outer, {1});
  CHECK(groups.kept("fc.weight", 0, removed) == Indices{0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15});
  CHECK(groups.kept("t1.weight", 0, removed) == Indices{0, 2, 3});
  CHECK(groups.families().size() == 2);
}

TEST_CASE("channel groups: the gates of an LSTM share their hidden units, its zero states follow") {
  GraphBuilder b;
  const std::int64_t in = 3, hidden = 6;
  const ValueId x = b.input(numbers({2, 4, in}));
  const auto zeros = [&] { return b.one("aten::zeros", "", {c10::IValue(Indices{1, 2, hidden})}); };
  const ValueId h0 = zeros(), c0 = zeros();
  const std::vector<ValueId> weights{
      b.parameter("lstm.weight_ih_l0", {4 * hidden, in}), b.parameter("lstm.weight_hh_l0", {4 * hidden, hidden}),
      b.parameter("lstm.bias_ih_l0", {4 * hidden}), b.parameter("lstm.bias_hh_l0", {4 * hidden})};
  const ValueId y = b.one("aten::lstm", "input",
                          {x, std::vector<ValueId>{h0, c0}, weights, c10::IValue(true), c10::IValue(1),
                           c10::IValue(0.0), c10::IValue(false), c10::IValue(false), c10::IValue(true)});
  const ChannelGroups groups(b.result({b.linear("fc", y, hidden, 2)}));
  const ChannelFamily& family = family_of(groups, "lstm.weight_hh_l0");
  CHECK(family.width() == hidden);
  CHECK(family.rows_per_atom() == 4);
  const Removal removed = without(groups, family, {0, 3, 5});
  const Indices stay{1, 2, 4, 7, 8, 10, 13, 14, 16, 19, 20, 22};
  for (const char* name : {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.bias_ih_l0", "lstm.bias_hh_l0"})
    CHECK(groups.kept(name, 0, removed) == stay);
  CHECK(groups.kept("lstm.weight_hh_l0", 1, removed) == Indices{1, 2, 4});
  CHECK(groups.kept("fc.weight", 1, removed) == Indices{1, 2, 4});
  const std::vector<ArgumentEdit> edits = groups.edits(removed);
  REQUIRE(edits.size() == 2);
  CHECK(edits[0].value.toIntVector() == Indices{1, 2, 3});
}

TEST_CASE("channel groups: a weight under two names shrinks as one") {
  GraphBuilder b;
  const ValueId x = b.input(numbers({2, 4}));
  const at::Tensor shared = numbers({6, 4});
  const ValueId a = b.one("aten::linear", "", {x, b.parameter("a.weight", shared), ValueId{-1}});
  const ValueId c = b.one("aten::linear", "", {x, b.parameter("c.weight", shared), ValueId{-1}});
  const ChannelGroups groups(b.result({b.linear("l", a, 6, 2), b.linear("r", c, 6, 2)}));
  REQUIRE(groups.families().size() == 1);
  const Removal removed = without(groups, groups.families()[0], {2});
  CHECK(groups.kept("a.weight", 0, removed) == groups.kept("c.weight", 0, removed));
  CHECK(groups.kept("r.weight", 1, removed) == Indices{0, 1, 3, 4, 5});
}

TEST_CASE("cost: multiply-accumulates of convolutions and linear layers") {
  GraphBuilder b;
  const ValueId c = b.conv("c", b.input(numbers({1, 3, 4, 4})), 3, 8, 3);
  const ValueId d = b.conv("d", c, 8, 8, 3, 8);
  const ValueId mean = b.one("aten::mean", "dim", {d, c10::IValue(Indices{2, 3})});
  CHECK(macs(b.result({b.linear("fc", mean, 8, 5)})) == 16 * 8 * 27 + 16 * 8 * 9 + 40);
}
