// What the program promises whatever the network: outputs whole or absent, errors that say what to do, the same bytes.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <signal.h>

#include <ATen/ops/arange.h>
#include <nlohmann/json.hpp>

#include "catch.hpp"
#include "cli/run.hpp"
#include "model/made.hpp"
#include "tersor/io/dataset.hpp"
#include "tersor/io/safetensors.hpp"

namespace tersor {
namespace {

namespace fs = std::filesystem;
using Catch::Matchers::Contains;
using Json = nlohmann::json;

const std::string mlp = test_file("fashion/mlp_fp32.ts.pt");
const std::string cnn = test_file("fashion/cnn_fp32.ts.pt");
const std::string mlp_weights = test_file("fashion/mlp_fp32.safetensors");

/// Images of a fixed pattern, [n, 1, 28, 28] in [-1, 1], and the label 3 for each.
void write_images(const std::string& path, std::int64_t n) {
  Dataset images;
  images.inputs = {at::arange(n * 784, at::kFloat).mul(0.37).sin().reshape({n, 1, 28, 28})};
  images.labels = at::arange(n, at::kLong).mul(0).add(3);
  write_dataset(path, images);
}

void expect_failure(const Ran& ran, int status, const std::string& word) {
  INFO(ran.out << ran.err);
  CHECK(ran.status == status);
  CHECK_THAT(ran.err, Catch::Matchers::StartsWith("tersor: error: "));
  CHECK_THAT(ran.err, Contains(word));
  CHECK_THAT(ran.err, !Contains("frame #"));  // a C++ stack helps nobody
}

Ran succeed(const Ran& ran) {
  INFO(ran.out << ran.err);
  REQUIRE(ran.status == 0);
  return ran;
}

}  // namespace

TEST_CASE("help and version") {
  const Folder folder;
  CHECK_THAT(succeed(run(folder.path(), {"--version"})).out, Contains("tersor 0.") && Contains("LibTorch 2."));
  const std::string help = succeed(run(folder.path(), {"--help"})).out;
  for (const std::string command : {"compress", "inspect", "eval", "bench", "passes"}) {
    CHECK_THAT(help, Contains(command));
    CHECK_THAT(succeed(run(folder.path(), {command, "--help"})).out, Contains(command));
  }
  CHECK_THAT(help, !Contains("bench-memory"));
}

TEST_CASE("every option of --help stands in docs/reference/cli.md, and no other") {
  const Folder folder;
  const std::string page = bytes_of(fs::path(TERSOR_SOURCE_DIR) / "docs/reference/cli.md");
  const std::regex option("--[a-z][a-z-]+");
  const auto options_in = [&](const std::string& text) {
    return std::set<std::string>(std::sregex_token_iterator(text.begin(), text.end(), option),
                                 std::sregex_token_iterator());
  };
  for (const std::string command : {"compress", "inspect", "eval", "bench", "passes"}) {
    INFO(command);
    const std::size_t begin = page.find("## tersor " + command);
    REQUIRE(begin != std::string::npos);
    const std::string section = page.substr(begin, page.find("\n## ", begin) - begin);
    std::set<std::string> helped = options_in(run(folder.path(), {command, "--help"}).out);
    helped.erase("--help");
    CHECK(options_in(section) == helped);
  }
}

TEST_CASE("wrong usage is exit 2 and says what is wrong") {
  const Folder folder;
  expect_failure(run(folder.path(), {}), 2, "subcommand");
  expect_failure(run(folder.path(), {"squash"}), 2, "squash");
  expect_failure(run(folder.path(), {"compress", mlp}), 2, "--output");
  expect_failure(run(folder.path(), {"compress", mlp, "-o", "out"}), 2, "--passes");
  expect_failure(run(folder.path(), {"compress", mlp, "-o", "out", "--passes", "quantize_dynamic", "--recipe", "r"}), 2,
                 "--recipe");
  expect_failure(
      run(folder.path(), {"compress", mlp, "-o", "out", "--passes", "quantize_dynamic", "--lowering", "onnx"}), 2,
      "onnx");
  expect_failure(run(folder.path(), {"compress", mlp, "-o", "out", "--passes", "quantize_dynamic", "--samples", "0"}),
                 2, "samples");
  expect_failure(run(folder.path(), {"compress", mlp, "-o", "out", "--passes", "quantize_dynamik"}), 2,
                 "quantize_dynamic");
  expect_failure(run(folder.path(), {"compress", mlp, "-o", "out", "--passes", "prune_l1(amont=0.5)"}), 2, "'amount'");
  expect_failure(run(folder.path(), {"compress", mlp, "-o", "out", "--passes", "prune_l1(amount=0.5"}), 2, "BadSyntax");
  expect_failure(run(folder.path(), {"compress", mlp, "-o", "out", "--passes", "prune_l1(targets=linaer)"}), 2,
                 "NoSuchTarget");
  for (const std::string shape : {"", "1,,2", "0,3", "-1,3", "a", "1,3:f33", "99999999999,99999999999", "1;"})
    expect_failure(run(folder.path(), {"bench", mlp, "--input-shape=" + shape}), 2, "--input-shape");
  expect_failure(run(folder.path(), {"bench", mlp}), 2, "--input-shape");
  expect_failure(run(folder.path(), {"passes", "prune_l2"}), 2, "'prune_l1'");
  CHECK(folder.names().empty());
}

TEST_CASE("passes are listed with their options") {
  const Folder folder;
  const std::string list = succeed(run(folder.path(), {"passes"})).out;
  for (const std::string pass :
       {"prune_l1", "prune_structured", "fold_batch_norm", "quantize_dynamic", "quantize_static", "quantize_weights"})
    CHECK_THAT(list, Contains(pass));
  const std::string one = succeed(run(folder.path(), {"passes", "prune_structured"})).out;
  for (const std::string option : {"amount", "round_to", "min_channels", "targets", "ignore", "verify"})
    CHECK_THAT(one, Contains("\n" + option + " "));
}

TEST_CASE("an existing output is not touched, and the input is never the output") {
  const Folder folder;
  fs::copy_file(mlp_weights, folder / "in");
  fs::create_symlink("in", folder / "link");
  fs::create_hard_link(folder / "in", folder / "hard");
  std::ofstream(folder / "old") << "precious";
  const std::string before = bytes_of(folder / "in");
  const auto compress = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments{"compress", "in", "--passes", "quantize_weights"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(folder.path(), arguments);
  };
  const std::vector<std::string> names = folder.names();
  expect_failure(compress({"-o", "old"}), 5, "OutputExists");
  expect_failure(compress({"-o", "new", "--report", "old"}), 5, "OutputExists");
  for (const std::string same : {"in", "link", "hard", "./in"}) {
    INFO(same);
    expect_failure(compress({"-o", same}), 5, "OutputIsInput");
    expect_failure(compress({"-o", same, "--overwrite"}), 5, "OutputIsInput");
    expect_failure(compress({"-o", "new", "--report", same, "--overwrite"}), 5, "OutputIsInput");
  }
  expect_failure(compress({"-o", "new", "--report", "new"}), 2, "same file");
  expect_failure(compress({"-o", "new", "--report", "./new"}), 2, "same file");
  expect_failure(compress({"-o", "nowhere/new"}), 5, "does not exist");
  expect_failure(compress({"-o", "new", "--report", "nowhere/report"}), 5, "does not exist");
  CHECK(folder.names() == names);
  CHECK(bytes_of(folder / "old") == "precious");
  CHECK(bytes_of(folder / "in") == before);

  succeed(compress({"-o", "old", "--overwrite"}));
  CHECK(bytes_of(folder / "old") != "precious");
  CHECK(bytes_of(folder / "in") == before);
  CHECK(folder.names() == names);
}

TEST_CASE("a dry run does the work and writes nothing") {
  const Folder folder;
  const Ran ran = succeed(run(folder.path(), {"compress", mlp_weights, "-o", "out", "--report", "report", "--passes",
                                              "prune_l1(amount=0.5), quantize_weights", "--dry-run"}));
  CHECK_THAT(ran.out, Contains("dry run") && Contains("prune_l1"));
  CHECK(folder.names().empty());
}

TEST_CASE("quiet prints nothing, and the report file says what was done") {
  const Folder folder;
  write_images(folder / "images", 8);
  const Ran ran =
      succeed(run(folder.path(), {"compress", mlp, "-o", "out.pt", "--passes", "prune_l1(amount=0.6), quantize_dynamic",
                                  "--eval", "images", "--report", "report.json", "--quiet"}));
  CHECK(ran.out.empty());
  CHECK(ran.err.empty());
  const Json report = Json::parse(bytes_of(folder / "report.json"));
  CHECK(report.at("recipe") == "prune_l1(amount=0.6), quantize_dynamic");
  CHECK(report.at("input").at("bytes") == fs::file_size(mlp));
  CHECK(report.at("output").at("bytes") == fs::file_size(folder / "out.pt"));
  CHECK(report.at("evaluation").at("samples") == 8);
  CHECK(report.at("evaluation").at("sqnr_db").get<double>() > 5);
}

TEST_CASE("a recipe file is the same as the text") {
  const Folder folder;
  std::ofstream(folder / "recipe.yaml") << "passes:\n  - prune_l1:\n      amount: 0.5\n  - quantize_weights\n";
  succeed(run(folder.path(), {"compress", mlp_weights, "-o", "a", "--recipe", "recipe.yaml"}));
  succeed(
      run(folder.path(), {"compress", mlp_weights, "-o", "b", "--passes", "prune_l1(amount=0.5), quantize_weights"}));
  CHECK(bytes_of(folder / "a") == bytes_of(folder / "b"));
  std::ofstream(folder / "bad.yaml") << "passes:\n  - prune_l1:\n      amuont: 0.5\n";
  expect_failure(run(folder.path(), {"compress", mlp_weights, "-o", "c", "--recipe", "bad.yaml"}), 2, "bad.yaml");
}

TEST_CASE("what a pass needs is asked for before anything is done") {
  const Folder folder;
  expect_failure(run(folder.path(), {"compress", mlp, "-o", "out", "--passes", "quantize_static"}), 2, "calibration");
  expect_failure(run(folder.path(), {"compress", mlp, "-o", "out", "--passes", "prune_structured"}), 2,
                 "--input-shape");
  expect_failure(run(folder.path(), {"compress", mlp_weights, "-o", "out", "--passes", "prune_structured"}), 4,
                 "weights");
  expect_failure(
      run(folder.path(), {"compress", mlp_weights, "-o", "out", "--passes", "prune_l1", "--input-shape", "1,2"}), 4,
      "UnsupportedModel");
  expect_failure(run(folder.path(), {"bench", mlp_weights, "--input-shape", "1,2"}), 4, "UnsupportedModel");
  write_images(folder / "images", 2);
  expect_failure(run(folder.path(), {"eval", mlp_weights, "--data", "images"}), 4, "UnsupportedModel");
  expect_failure(
      run(folder.path(), {"compress", mlp, "-o", "out", "--passes", "prune_structured", "--input-shape", "1,5"}), 2,
      "--input-shape 1,5");
  CHECK(folder.names() == std::vector<std::string>{"images"});
}

TEST_CASE("the same bytes whatever the threads") {
  const Folder folder;
  for (const std::string& input : {mlp_weights, mlp, cnn})
    for (const std::string passes :
         {"prune_l1(amount=0.6, scope=global)", "quantize_weights", "quantize_weights(bits=4, group_size=32)",
          "prune_l1(amount=0.6), quantize_dynamic"}) {
      INFO(input << " " << passes);
      for (const std::string threads : {"1", "2"})
        succeed(run(folder.path(), {"compress", input, "-o", "out" + threads, "--overwrite", "--passes", passes,
                                    "--threads", threads}));
      succeed(run(folder.path(), {"compress", input, "-o", "scalar", "--overwrite", "--passes", passes},
                  {{"TERSOR_FORCE_ISA", "scalar"}, {"LC_ALL", "de_DE.UTF-8"}}));
      CHECK(bytes_of(folder / "out1") == bytes_of(folder / "out2"));
      CHECK(bytes_of(folder / "out1") == bytes_of(folder / "scalar"));
    }
}

TEST_CASE("quantized networks give the same bits on every instruction set") {
  const Folder folder;
  write_images(folder / "images", 16);
  for (const std::string& input : {mlp, cnn})
    for (const std::string passes :
         {"quantize_dynamic", "quantize_dynamic(weight_bits=4, group_size=32)", "quantize_static"}) {
      INFO(input << " " << passes);
      succeed(run(folder.path(),
                  {"compress", input, "-o", "q.pt", "--overwrite", "--passes", passes, "--calibration", "images"}));
      succeed(run(folder.path(), {"eval", "q.pt", "--data", "images", "--outputs", "fast", "--overwrite"}));
      succeed(run(folder.path(), {"eval", "q.pt", "--data", "images", "--outputs", "scalar", "--overwrite"},
                  {{"TERSOR_FORCE_ISA", "scalar"}}));
      CHECK(bytes_of(folder / "fast") == bytes_of(folder / "scalar"));
    }
}

TEST_CASE("eval: accuracy from labels, and a network agrees with itself") {
  const Folder folder;
  write_images(folder / "images", 10);
  const Json same = Json::parse(succeed(run(folder.path(), {"eval", mlp, "--data", "images", "--against", mlp,
                                                            "--batch-size", "3", "--json", "--outputs", "out"}))
                                    .out);
  CHECK(same.at("samples") == 10);
  CHECK(same.at("agreement") == 1.0);
  CHECK(same.at("sqnr_db").is_null());  // infinite
  CHECK(same.at("max_difference") == 0.0);
  CHECK(same.at("cosine").get<double>() == Approx(1.0));
  const at::Tensor output = tensors_of(folder / "out").at("output0");
  CHECK(output.sizes() == at::IntArrayRef({10, 10}));
  const double right = static_cast<double>(output.argmax(-1).eq(3).sum().item<std::int64_t>()) / 10;
  CHECK(same.at("accuracy").get<double>() == Approx(right));
  CHECK(same.at("accuracy_original").get<double>() == Approx(right));

  succeed(run(folder.path(),
              {"compress", mlp, "-o", "q.pt", "--passes", "quantize_weights(bits=4, group_size=32, targets=re:.*)"}));
  const Json other = Json::parse(
      succeed(run(folder.path(), {"eval", "q.pt", "--data", "images", "--against", mlp, "--json", "--outputs", "q"}))
          .out);
  const at::Tensor changed = tensors_of(folder / "q").at("output0");
  const double noise = changed.sub(output).to(at::kDouble).square().sum().item<double>();
  const double signal = output.to(at::kDouble).square().sum().item<double>();
  CHECK(other.at("sqnr_db").get<double>() == Approx(10 * std::log10(signal / noise)).epsilon(1e-6));
  CHECK(other.at("max_difference").get<double>() == Approx(distance(changed, output)));
}

TEST_CASE("labels that do not fit are refused") {
  const Folder folder;
  Dataset images;
  images.inputs = {at::arange(2 * 784, at::kFloat).reshape({2, 1, 28, 28})};
  images.labels = at::arange(4, at::kLong).reshape({2, 2});
  write_dataset(folder / "images", images);
  expect_failure(run(folder.path(), {"eval", mlp, "--data", "images"}), 3, "labels");
}

TEST_CASE("inspect shows layers, bits, zeros and how the file was made") {
  const Folder folder;
  succeed(run(folder.path(), {"compress", mlp, "-o", "q.pt", "--passes",
                              "prune_l1(amount=0.6), quantize_dynamic(weight_bits=4, group_size=32)", "--hash"}));
  const Json j = Json::parse(succeed(run(folder.path(), {"inspect", "q.pt", "--json"})).out);
  CHECK(j.at("format") == "TorchScript");
  CHECK(j.at("file_bytes") == fs::file_size(folder / "q.pt"));
  const Json first = j.at("layers").at(0);
  CHECK(first.at("kind") == "Linear");
  CHECK(first.at("bits") == 4);
  CHECK(first.at("shape") == Json({256, 784}));
  CHECK(first.at("zeros").get<std::int64_t>() >= 256 * 784 * 6 / 10);
  CHECK(j.at("metadata").at("tersor.recipe") == "prune_l1(amount=0.6), quantize_dynamic(weight_bits=4, group_size=32)");
  CHECK_THAT(j.at("metadata").at("tersor.source").get<std::string>(), Catch::Matchers::StartsWith("sha256:"));
  const std::string text = succeed(run(folder.path(), {"inspect", "q.pt"})).out;
  CHECK_THAT(text, Contains("int4 per group of 32") && Contains("prune_l1(amount=0.6)") && Contains("256x784"));

  // A stranger's file.
  const std::string foreign = succeed(run(folder.path(), {"inspect", test_file("good/all_dtypes.safetensors")})).out;
  for (const std::string word : {"bf16", "f32", "i64", "bool", "scalar", "0x4", "note"})
    CHECK_THAT(foreign, Contains(word));
}

TEST_CASE("bench measures files side by side") {
  const Folder folder;
  succeed(run(folder.path(), {"compress", mlp, "-o", "q.pt", "--passes", "quantize_dynamic"}));
  const Json j = Json::parse(succeed(run(folder.path(), {"bench", mlp, "q.pt", "--input-shape", "1,1,28,28", "--batch",
                                                         "1,4", "--rounds", "5", "--seconds", "0.002", "--json"}))
                                 .out);
  CHECK(j.at("threads") == 1);
  CHECK(j.at("files").size() == 2);
  CHECK(j.at("files").at(0).at("bytes") == fs::file_size(mlp));
  for (const Json& file : j.at("files")) CHECK(file.at("peak_memory_bytes").get<std::int64_t>() > 10'000'000);
  REQUIRE(j.at("batches").size() == 2);
  for (const Json& batch : j.at("batches")) {
    CHECK(batch.at("results").at(0).at("ratio") == 1.0);
    for (const Json& result : batch.at("results")) {
      CHECK(result.at("min_us").get<double>() > 0);
      CHECK(result.at("min_us") <= result.at("p50_us"));
      CHECK(result.at("p50_us") <= result.at("p99_us"));
    }
  }
  const std::string text = succeed(run(folder.path(), {"bench", "q.pt", "--input-shape", "1,1,28,28", "--batch", "1",
                                                       "--rounds", "2", "--seconds", "0.001"}))
                               .out;
  CHECK_THAT(text, Contains("p50") && Contains("p99") && Contains("items/s") && Contains("q.pt"));
  const Json load =
      Json::parse(succeed(run(folder.path(), {"bench", "q.pt", "--input-shape", "1,1,28,28", "--batch", "1", "--rounds",
                                              "2", "--seconds", "0.001", "--clients", "8", "--json"}))
                      .out);
  CHECK(load.at("clients") == 8);
  // Every client makes at least three calls a turn.
  CHECK(load.at("batches").at(0).at("results").at(0).at("calls").get<int>() >= 2 * 8 * 3);
}

TEST_CASE("a run that is stopped leaves no half output") {
  const Folder folder;
  write_safetensors(folder / "in",
                    {{"fc.weight", at::arange(8'000'000, at::kFloat).mul(0.37).sin().reshape({4000, 2000})}});
  const std::vector<std::string> arguments{"compress", "in", "-o", "out", "--passes", "quantize_weights(targets=fc)"};
  const auto begin = std::chrono::steady_clock::now();
  succeed(run(folder.path(), arguments));
  const auto whole = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
  const std::string expected = bytes_of(folder / "out");
  fs::remove(folder / "out");

  constexpr int moments = 12;
  for (int i = 0; i < moments; ++i) {
    for (const int signal : {SIGTERM, SIGINT, SIGKILL}) {
      INFO(i << " " << signal);
      const int process = start(folder.path(), arguments);
      std::this_thread::sleep_for(whole * (i + 1) / (moments + 1));
      kill(process, signal);
      const int status = wait_for(process);
      CHECK((status == 0 || status == (signal == SIGKILL ? -SIGKILL : 128 + signal) || status == -signal));
      if (fs::exists(folder / "out")) CHECK(bytes_of(folder / "out") == expected);
      fs::remove(folder / "out");
      if (signal != SIGKILL) CHECK(folder.names() == std::vector<std::string>{"in"});
    }
    succeed(run(folder.path(), arguments));  // takes what a killed run left away
    CHECK(folder.names() == std::vector<std::string>{"in", "out"});
    fs::remove(folder / "out");
  }
}

TEST_CASE("a full disk leaves nothing") {
  const Folder folder;
  const Ran ran = run_program("/bin/sh", folder.path(),
                              {"-c", "trap '' XFSZ; ulimit -f 100; exec " TERSOR_PROGRAM " compress " + mlp +
                                         " -o out --passes quantize_weights --report report"});
  expect_failure(ran, 5, "DiskFull");
  CHECK(folder.names().empty());
}

TEST_CASE("what is pruned or lowered to stock operators runs in Python with the same outputs") {
  const Folder folder;
  write_images(folder / "images", 6);
  std::ofstream(folder / "load.py") << R"(import json, struct, sys, torch
def read(path):
    raw = open(path, 'rb').read()
    size = struct.unpack('<Q', raw[:8])[0]
    entries = json.loads(raw[8:8 + size])
    types = {'F32': torch.float32, 'I64': torch.int64}
    return {name: torch.frombuffer(bytearray(raw[8 + size + e['data_offsets'][0]:8 + size + e['data_offsets'][1]]), dtype=types[e['dtype']]).reshape(e['shape'])
            for name, e in entries.items() if name != '__metadata__'}
if len(sys.argv) > 4:
    torch.ops.load_library(sys.argv[4])
with torch.no_grad():
    output = torch.jit.load(sys.argv[1])(read(sys.argv[2])['input0'])
print((output - read(sys.argv[3])['output0']).abs().max().item())
)";
  struct Variant {
    std::string passes, lowering;
    double tolerance;
  };
  // Only our operators need our library, and they give the same bits. The CNN adds up at most 3,136 products per
  // output: float rounding differs with the order of the sums.
  for (const std::string& input : {mlp, cnn})
    for (const Variant& variant :
         {Variant{"prune_structured(amount=0.3)", "tersor", 1e-4},
          Variant{"prune_structured(amount=0.3), fold_batch_norm", "tersor", 1e-4},
          Variant{"quantize_dynamic", "aten", 1e-4}, Variant{"quantize_static", "aten", 1e-4},
          Variant{"quantize_weights(bits=4, group_size=32)", "aten", 1e-4}, Variant{"quantize_dynamic", "tersor", 0},
          Variant{"quantize_static", "tersor", 0}, Variant{"quantize_weights(bits=4, group_size=32)", "tersor", 0}}) {
      INFO(input << " " << variant.passes << " " << variant.lowering);
      succeed(run(folder.path(), {"compress", input, "-o", "out.pt", "--overwrite", "--passes", variant.passes,
                                  "--calibration", "images", "--lowering", variant.lowering}));
      succeed(run(folder.path(), {"eval", "out.pt", "--data", "images", "--outputs", "outputs", "--overwrite"}));
      std::vector<std::string> arguments{"load.py", "out.pt", "images", "outputs"};
      if (variant.tolerance == 0) arguments.push_back(TERSOR_OPS_LIBRARY);
      const Ran ran = run_program(TERSOR_TEST_PYTHON, folder.path(), arguments);
      INFO(ran.err);
      REQUIRE(ran.status == 0);
      CHECK(std::stod(ran.out) <= variant.tolerance);
    }
}

TEST_CASE("labels must be class numbers") {
  const Folder folder;
  Dataset images;
  images.inputs = {at::arange(2 * 784, at::kFloat).reshape({2, 1, 28, 28})};
  for (const auto& [label, word] : {std::pair(at::arange(2, at::kFloat), "float"), std::pair(at::arange(9, 11), "10"),
                                    std::pair(at::arange(-1, 1), "-1")}) {
    images.labels = label;
    write_dataset(folder / "bad.safetensors", images);
    const Ran ran = run(folder.path(), {"eval", cnn, "--data", "bad.safetensors"});
    expect_failure(ran, 3, "BadData");
    CHECK_THAT(Catch::Detail::stringify(ran.err), Contains(word, Catch::CaseSensitive::No));
    fs::remove(folder / "bad.safetensors");
  }
}

TEST_CASE("outputs that are NaN do not look like success") {
  const Folder folder;
  Dataset images;
  images.inputs = {at::arange(2 * 784, at::kFloat).reshape({2, 784})};
  images.inputs[0][1].fill_(std::numeric_limits<float>::quiet_NaN());
  write_dataset(folder / "nan.safetensors", images);
  const std::vector<std::string> words{"eval", mlp, "--against", mlp, "--data", "nan.safetensors"};
  CHECK_THAT(succeed(run(folder.path(), words)).out, Contains("10 output values are NaN or infinite  (original 10)"));
  std::vector<std::string> json = words;
  json.emplace_back("--json");
  const Json result = Json::parse(succeed(run(folder.path(), json)).out);
  CHECK(result["non_finite"] == 10);
  CHECK_FALSE(result.contains("sqnr_db"));
}

TEST_CASE("data that the network cannot take is the user's mistake") {
  const Folder folder;
  Dataset wrong;
  wrong.inputs = {at::arange(2 * 9, at::kFloat).reshape({2, 9})};
  write_dataset(folder / "wrong.safetensors", wrong);
  const auto compress = [&](std::vector<std::string> more) {
    std::vector<std::string> words{"compress", mlp, "-o", "out.pt", "--passes", "quantize_dynamic"};
    words.insert(words.end(), more.begin(), more.end());
    return run(folder.path(), words);
  };
  expect_failure(compress({"--input-shape", "2,9"}), 2, "--input-shape 2,9");
  for (const std::string option : {"--example", "--calibration", "--eval"})
    expect_failure(compress({option, "wrong.safetensors"}), 3, "wrong.safetensors");
  expect_failure(run(folder.path(), {"eval", mlp, "--data", "wrong.safetensors"}), 3, "wrong.safetensors");
  expect_failure(compress({"--seed", "-1"}), 2, "--seed");
  CHECK_FALSE(fs::exists(folder / "out.pt"));
}

TEST_CASE("--outputs needs samples in dimension 0") {
  const Folder folder;
  Dataset data;
  data.inputs = {at::arange(6, at::kFloat).reshape({2, 3})};
  write_dataset(folder / "data.safetensors", data);
  expect_failure(run(folder.path(), {"eval", made("transposed").string(), "--data", "data.safetensors", "--outputs",
                                     "out.safetensors"}),
                 4, "output 0 is 3x2 for 2 samples");
}

TEST_CASE("--eval measures the written file") {
  const Folder folder;
  write_images(folder / "images.safetensors", 6);
  succeed(run(folder.path(), {"compress", cnn, "-o", "out.pt", "--passes", "quantize_dynamic(targets=Linear)",
                              "--lowering", "aten", "--eval", "images.safetensors", "--report", "report.json"}));
  std::ifstream report(folder / "report.json");
  const Json told = Json::parse(report)["evaluation"];
  const Json measured = Json::parse(
      succeed(run(folder.path(), {"eval", "out.pt", "--against", cnn, "--data", "images.safetensors", "--json"})).out);
  CHECK(told == measured);
}

TEST_CASE("a checkpoint has no operators to lower, and a file that grew says so") {
  const Folder folder;
  expect_failure(run(folder.path(), {"compress", mlp_weights, "-o", "out.safetensors", "--passes", "quantize_weights",
                                     "--lowering", "aten"}),
                 2, "--lowering");
  CHECK_THAT(succeed(run(folder.path(), {"compress", made("root_linear").string(), "-o", "out.pt", "--passes",
                                         "prune_l1(amount=0.5)"}))
                 .out,
             Contains("x larger"));
}

}  // namespace tersor
