// Known cases with a right answer, through the program.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "catch.hpp"
#include "cli/run.hpp"
#include "tersor/io/dataset.hpp"
#include "tersor/io/safetensors.hpp"

namespace tersor {
namespace {

using Json = nlohmann::json;

std::string case_file(const std::string& id, const std::string& file) { return test_file("cases/" + id + "/" + file); }

/// Compresses `in` to out.* of the folder and gives the output's path.
std::string compressed(const Folder& folder, const std::string& in, const std::string& passes,
                       std::vector<std::string> more = {}, const std::string& out = "out") {
  const std::string path = folder / out;
  std::vector<std::string> arguments{"compress", in, "-o", path, "--passes", passes};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const Ran ran = run(folder.path(), arguments);
  INFO(ran.err);
  REQUIRE(ran.status == 0);
  return path;
}

std::map<std::string, at::Tensor> outputs_of(const Folder& folder, const std::string& model, const std::string& input,
                                             const std::map<std::string, std::string>& environment = {}) {
  const Ran ran =
      run(folder.path(),
          {"eval", model, "--data", input, "--outputs", folder / "outputs", "--overwrite", "--batch-size", "1000"},
          environment);
  INFO(ran.err);
  REQUIRE(ran.status == 0);
  return tensors_of(folder / "outputs");
}

std::int64_t zeros_of(const at::Tensor& t) { return t.eq(0).sum().item<std::int64_t>(); }

/// One int8 code per element of a safetensors weight in compressed-tensors' form: plain int8, or a little-endian bit
/// stream of `bits` each in int32 words, stored as code + 2^(bits - 1).
at::Tensor stored_codes(const std::map<std::string, at::Tensor>& tensors, const std::string& layer, int bits) {
  const auto packed = tensors.find(layer + ".weight_packed");
  if (packed == tensors.end()) return tensors.at(layer + ".weight");
  const at::Tensor shape = tensors.at(layer + ".weight_shape");
  const std::int64_t rows = shape[0].item<std::int64_t>(), columns = shape[1].item<std::int64_t>();
  REQUIRE(packed->second.sizes() == at::IntArrayRef({rows, (columns * bits + 31) / 32}));
  at::Tensor codes = packed->second.new_empty({rows, columns}, at::kChar);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) {
      const auto word = static_cast<std::uint32_t>(packed->second[r][c * bits / 32].item<std::int32_t>());
      const std::uint32_t stored = (word >> (c * bits % 32)) & ((1U << bits) - 1);
      codes[r][c].fill_(static_cast<int>(stored) - (1 << (bits - 1)));
    }
  return codes;
}

}  // namespace

TEST_CASE("structured pruning leaves the channels, shapes and outputs that the case names") {
  struct Case {
    std::string id, passes;
  };
  const Case item = GENERATE(
      Case{"sp-flatten-pool", "prune_structured(amount=0.5)"}, Case{"sp-two-heads", "prune_structured(amount=0.5)"},
      Case{"sp-residual-once", "prune_structured(amount=0.25)"}, Case{"sp-bn-beta", "prune_structured(amount=0.5)"},
      Case{"sp-layernorm", "prune_structured(amount=0.5)"});
  INFO(item.id);
  const Folder folder;
  const std::string expected_file = case_file(item.id, "expected.safetensors");
  const std::string out =
      compressed(folder, case_file(item.id, "model.pt"), item.passes, {"--example", expected_file}, "out.pt");
  const auto expected = tensors_of(expected_file);
  const auto outputs = outputs_of(folder, out, expected_file);

  for (const auto& [name, value] : outputs) {
    INFO(name);
    const std::string number = name.substr(std::string("output").size());
    CHECK(distance(value, expected.at("expected0." + number)) <= 1e-4);
  }
  CHECK(outputs.size() == static_cast<std::size_t>(std::count_if(expected.begin(), expected.end(), [](const auto& e) {
          return e.first.starts_with("expected0.");
        })));

  const Ran inspected = run(folder.path(), {"inspect", out, "--json"});
  REQUIRE(inspected.status == 0);
  std::map<std::string, Json> shapes;
  const Json listing = Json::parse(inspected.out);
  for (const Json& layer : listing.at("layers"))
    shapes[layer.at("name").get<std::string>() + ".weight"] = layer.at("shape");
  std::size_t compared = 0;
  for (const auto& [name, value] : expected) {
    if (!name.starts_with("pruned.") || !name.ends_with(".weight")) continue;
    const auto shape = shapes.find(name.substr(7));
    INFO(name);
    REQUIRE(shape != shapes.end());
    CHECK(shape->second == Json(value.sizes().vec()));
    ++compared;
  }
  CHECK(compared > 0);
  CHECK_FALSE(listing.at("kept").empty());
}

TEST_CASE("a fraction that would empty a layer leaves a channel or is refused") {
  const Folder folder;
  const std::string model = case_file("sp-empty-layer", "model.pt");
  const std::string example = case_file("sp-empty-layer", "expected.safetensors");
  for (const std::string amount : {"0.95", "1.0"}) {
    INFO(amount);
    const std::string out = compressed(folder, model, "prune_structured(amount=" + amount + ")", {"--example", example},
                                       "out-" + amount + ".pt");
    const auto outputs = outputs_of(folder, out, example);
    CHECK(outputs.at("output0").sizes() == at::IntArrayRef({2, 3}));
    CHECK(outputs.at("output0").isfinite().all().item<bool>());
  }
  for (const std::string amount : {"-0.1", "1.5"}) {
    const Ran ran = run(folder.path(), {"compress", model, "-o", folder / "refused.pt", "--example", example,
                                        "--passes", "prune_structured(amount=" + amount + ")"});
    CHECK(ran.status == 2);
    CHECK_THAT(ran.err, Catch::Matchers::Contains("amount=" + amount));
    CHECK_FALSE(std::filesystem::exists(folder / "refused.pt"));
  }
}

TEST_CASE("ties: exactly half becomes zero, the least first, and always the same ones") {
  const Folder folder;
  const std::string in = case_file("us-ties-sign", "weights.safetensors");
  const auto before = tensors_of(in);
  const std::string first = compressed(folder, in, "prune_l1(amount=0.5)", {}, "first.safetensors");
  const std::string second = compressed(folder, in, "prune_l1(amount=0.5)", {}, "second.safetensors");
  CHECK(bytes_of(first) == bytes_of(second));
  const auto after = tensors_of(first);
  const at::Tensor w = after.at("fc.weight"), old = before.at("fc.weight");
  CHECK(zeros_of(w) == 6);
  CHECK(w[2][2].item<float>() == 0.0F);  // the 0.5
  CHECK(w[1][2].item<float>() == -5.0F);
  CHECK(w[2][3].item<float>() == -4.0F);
  CHECK((w.eq(old).logical_or(w.eq(0))).all().item<bool>());
  CHECK(same(after.at("fc.bias"), before.at("fc.bias")));
}

TEST_CASE("amount: counts, fractions and what cannot be") {
  const Folder folder;
  const std::string in = case_file("us-amount", "weights.safetensors");
  const auto expected = tensors_of(case_file("us-amount", "expected.safetensors"));
  const std::map<std::string, std::string> good{{"1", "count1"}, {"1.0", "frac1"}, {"0.5", "frac05"}, {"0", "count0"}};
  for (const auto& [amount, name] : good) {
    INFO(amount);
    const std::string out = compressed(folder, in, "prune_l1(amount=" + amount + ")", {}, name);
    CHECK(same(tensors_of(out).at("fc.weight"), expected.at(name)));
  }
  for (const std::string amount : {"6", "1.2", "-0.1", "-1", "nan", "NaN", "inf", "lots", "[1, 2]"}) {
    INFO(amount);
    const Ran ran =
        run(folder.path(), {"compress", in, "-o", folder / "refused", "--passes", "prune_l1(amount=" + amount + ")"});
    CHECK(ran.status == 2);
    CHECK_THAT(ran.err, Catch::Matchers::Contains("BadOption"));
    CHECK_THAT(ran.err, Catch::Matchers::Contains("amount"));
    CHECK_FALSE(std::filesystem::exists(folder / "refused"));
  }
}

TEST_CASE("pruning what is already pruned counts among the rest, or the total on request") {
  const Folder folder;
  const auto expected = tensors_of(case_file("us-iterative", "expected.safetensors"));
  const std::string once =
      compressed(folder, case_file("us-iterative", "weights.safetensors"), "prune_l1(amount=0.5)", {}, "once");
  CHECK(same(tensors_of(once).at("fc.weight"), expected.at("after_round1")));
  const std::string twice = compressed(folder, once, "prune_l1(amount=0.5)", {}, "twice");
  CHECK(same(tensors_of(twice).at("fc.weight"), expected.at("after_round2")));
  const std::string total = compressed(folder, once, "prune_l1(amount=0.5, of=total)", {}, "total");
  CHECK(same(tensors_of(total).at("fc.weight"), expected.at("after_round1")));
  const std::string more = compressed(folder, once, "prune_l1(amount=0.75, of=total)", {}, "more");
  CHECK(same(tensors_of(more).at("fc.weight"), expected.at("after_round2")));
}

TEST_CASE("weight and mask pairs are folded, or refused by name") {
  const Folder folder;
  const std::string out = folder / "out.safetensors";
  const Ran ran = run(folder.path(), {"compress", case_file("us-mask-file", "pruned_with_masks.safetensors"), "-o", out,
                                      "--passes", "quantize_weights(targets=re:.*)"});
  if (ran.status != 0) {
    CHECK(ran.status < 70);
    CHECK_THAT(ran.err, Catch::Matchers::Contains("fc.weight_mask"));
    CHECK_FALSE(std::filesystem::exists(out));
    return;
  }
  const auto tensors = tensors_of(out);
  CHECK_FALSE(tensors.contains("fc.weight_orig"));
  CHECK_FALSE(tensors.contains("fc.weight_mask"));
  const at::Tensor expected = tensors_of(case_file("us-mask-file", "expected.safetensors")).at("fc.weight");
  const at::Tensor codes = stored_codes(tensors, "fc", 8);
  CHECK(zeros_of(codes) >= zeros_of(expected));
  CHECK(codes.masked_select(expected.eq(0)).eq(0).all().item<bool>());
}

TEST_CASE("a row of zeros quantizes to zeros with a usable scale") {
  const Folder folder;
  const std::string in = case_file("q-zero-row", "weights.safetensors");
  const auto expected = tensors_of(case_file("q-zero-row", "expected.safetensors"));
  const at::Tensor zero = tensors_of(in).at("fc.weight").eq(0);

  const auto symmetric = tensors_of(compressed(folder, in, "quantize_weights(targets=fc)", {}, "int8"));
  CHECK(stored_codes(symmetric, "fc", 8).eq(expected.at("q")).all().item<bool>());
  const at::Tensor scale = symmetric.at("fc.weight_scale").reshape({-1});
  CHECK(scale.gt(0).logical_and(scale.isfinite()).all().item<bool>());
  for (const int row : {0, 2, 3})
    CHECK(scale[row].item<float>() == Approx(expected.at("scale_nonzero_rows")[row].item<float>()).epsilon(1e-6));

  for (const std::string bits : {"8", "4"}) {
    INFO(bits);
    const std::string out =
        compressed(folder, in, "quantize_weights(bits=" + bits + ", symmetric=false, targets=fc)", {}, "affine" + bits);
    const Ran inspected = run(folder.path(), {"inspect", out, "--json"});
    REQUIRE(inspected.status == 0);
    const Json layers = Json::parse(inspected.out).at("layers");
    const auto fc =
        std::find_if(layers.begin(), layers.end(), [](const Json& layer) { return layer.at("name") == "fc"; });
    REQUIRE(fc != layers.end());
    CHECK(fc->at("zeros").get<std::int64_t>() >= zero.sum().item<std::int64_t>());
  }
}

TEST_CASE("a group size that does not divide the row becomes per channel in safetensors, and the report says so") {
  const Folder folder;
  const std::string in = case_file("q-group-tail", "weights.safetensors");
  const at::Tensor w = tensors_of(in).at("fc.weight");
  for (const std::string group : {"4", "128", "10"}) {
    INFO(group);
    const std::string out = compressed(folder, in, "quantize_weights(bits=4, group_size=" + group + ", targets=fc)",
                                       {"--report", folder / ("report" + group)}, "out" + group);
    const auto tensors = tensors_of(out);
    const at::Tensor scale = tensors.at("fc.weight_scale");
    CHECK(scale.sizes() == at::IntArrayRef({3, 1}));
    for (std::int64_t row = 0; row < 3; ++row)
      CHECK(scale[row][0].item<float>() == Approx(w[row].abs().max().item<float>() / 7).epsilon(1e-6));
    const at::Tensor codes = stored_codes(tensors, "fc", 4);
    CHECK(distance(codes.to(at::kFloat).mul(scale), w) <= scale.max().item<double>() / 2 * (1 + 1e-5));
    if (group == "4") CHECK_THAT(bytes_of(folder / "report4"), Catch::Matchers::Contains("channel"));
  }
}

TEST_CASE("affine int4 groups: zero points at the limits, constant groups, packing") {
  const Folder folder;
  const std::string in = case_file("q-int4-asym", "weights.safetensors");
  const auto expected = tensors_of(case_file("q-int4-asym", "expected.safetensors"));
  const auto before = tensors_of(in);
  const auto tensors =
      tensors_of(compressed(folder, in, "quantize_weights(bits=4, symmetric=false, group_size=4, targets=fc)"));
  CHECK(same(tensors.at("codes_odd"), before.at("codes_odd")));
  const at::Tensor scale = tensors.at("fc.weight_scale");
  REQUIRE(scale.sizes() == at::IntArrayRef({3, 2}));
  const at::Tensor codes = stored_codes(tensors, "fc", 4);
  const at::Tensor packed_zero = tensors.at("fc.weight_zero_point");  // [ceil(3 * 4 / 32), 2]
  REQUIRE(packed_zero.sizes() == at::IntArrayRef({1, 2}));
  for (std::int64_t r = 0; r < 3; ++r)
    for (std::int64_t g = 0; g < 2; ++g) {
      INFO(r << ' ' << g);
      const bool all_zero = r == 1 && g == 1;
      const double s = scale[r][g].item<double>();
      const std::int64_t z = (static_cast<std::uint32_t>(packed_zero[0][g].item<std::int32_t>()) >> (4 * r)) & 15U;
      CHECK(s > 0);
      if (!all_zero) {
        CHECK(s == Approx(expected.at("scale")[r][g].item<double>()).epsilon(1e-5));
        CHECK(z == expected.at("zp")[r][g].item<std::int64_t>());
      }
      for (std::int64_t c = 4 * g; c < 4 * g + 4; ++c) {
        const double value = (codes[r][c].item<double>() + 8 - static_cast<double>(z)) * s;
        CHECK(std::abs(value - before.at("fc.weight")[r][c].item<double>()) <= s / 2 * (1 + 1e-5));
        if (all_zero) CHECK(value == 0.0);
        if (r == 2 && g == 0) CHECK(value == Approx(3.0).epsilon(2e-7));
      }
    }
}

TEST_CASE("weights that are not finite are refused by name and place") {
  const Folder folder;
  at::Tensor w = tensors_of(case_file("q-zero-row", "weights.safetensors")).at("fc.weight").clone();
  w[2][1].fill_(std::numeric_limits<float>::quiet_NaN());
  write_safetensors(folder / "in.safetensors", {{"fc.weight", w}});
  for (const std::string pass : {"quantize_weights(targets=fc)", "prune_l1(amount=0.5)"}) {
    INFO(pass);
    const Ran ran = run(folder.path(), {"compress", "in.safetensors", "-o", "out", "--passes", pass});
    CHECK(ran.status == 3);
    CHECK_THAT(ran.err, Catch::Matchers::Contains("NonFiniteWeight"));
    CHECK_THAT(ran.err, Catch::Matchers::Contains("fc"));
    CHECK(folder.names() == std::vector<std::string>{"in.safetensors"});
  }
}

}  // namespace tersor
