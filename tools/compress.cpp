#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "inputs.hpp"
#include "metrics.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/passes/registry.hpp"
#include "tersor/pipeline/pipeline.hpp"
#include "text.hpp"

namespace tersor::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct CompressOptions {
  std::string input, output, passes, recipe, example, input_shape, calibration, eval, report;
  std::string lowering = "tersor";
  std::int64_t samples = RunOptions{}.samples, batch_size = RunOptions{}.batch_size;
  std::uint64_t seed = RunOptions{}.seed;
  int threads = 0;  // 0: as LibTorch sets them
  bool dry_run = false, overwrite = false, quiet = false, hash = false;
};

/// Refuses, before any work, an output or a report that exists or that is one of the files read.
void check_outputs(const CompressOptions& options) {
  std::vector<std::string> written{options.output};
  if (!options.report.empty()) written.push_back(options.report);
  for (const std::string& path : written)
    for (const std::string& read : {options.input, options.recipe, options.example, options.calibration, options.eval})
      if (!read.empty()) check_output(path, output_options(options.overwrite, read));
  std::error_code ignored;
  const auto place = [](const std::string& path) { return fs::weakly_canonical(fs::absolute(path)); };
  check(options.report.empty() || (place(options.report) != place(options.output) &&
                                   !fs::equivalent(options.report, options.output, ignored)),
        ErrorCode::BadUsage, "--report and --output are the same file '{}'; give the report another name",
        escaped(options.report));
}

std::string read_text(const fs::path& path) {
  constexpr std::uint64_t most = 1 << 20;
  const InputFile file = InputFile::open(path);
  check(file.size() <= most, ErrorCode::BadRecipe, "'{}' has {} bytes; a recipe has at most {}", escaped(path.string()),
        file.size(), most);
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

Pipeline read_pipeline(const CompressOptions& options) {
  if (options.recipe.empty()) return parse_pipeline(options.passes, registry());
  try {
    return parse_recipe(read_text(options.recipe), registry());
  } catch (Error& error) {
    throw error.in(escaped(options.recipe));
  }
}

/// The example inputs: given, made up, or the first calibration samples.
void give_example(Model& model, const CompressOptions& options, const std::optional<Dataset>& calibration) {
  const bool asked = !options.example.empty() || !options.input_shape.empty();
  if (!model.runnable()) {
    check(
        !asked, ErrorCode::UnsupportedModel,
        "'{}' holds only weights and cannot be run; leave out --example and --input-shape, or give a TorchScript file",
        escaped(options.input));
    return;
  }
  const auto file = [](const std::string& path) { return fmt::format("'{}'", escaped(path)); };
  if (calibration)
    check_inputs(model, calibration->slice(0, example_samples).inputs, ErrorCode::BadData, file(options.calibration));
  if (!options.input_shape.empty()) {
    model.set_example(make_inputs(parse_input_shape(options.input_shape)));
    check_inputs(model, model.example(), ErrorCode::BadUsage, fmt::format("--input-shape {}", options.input_shape));
  } else if (!options.example.empty()) {
    model.set_example(read_dataset(options.example).slice(0, example_samples).inputs);
    check_inputs(model, model.example(), ErrorCode::BadData, file(options.example));
  } else if (calibration) {
    model.set_example(calibration->slice(0, example_samples).inputs);
  }
}

std::string file_line(std::int64_t before, std::int64_t after) {
  const auto ratio = [](std::int64_t more, std::int64_t less) {
    return static_cast<double>(more) / static_cast<double>(less);
  };
  return fmt::format("file            {} -> {} bytes, {:.2f}x {}\n", grouped(before), grouped(after),
                     before >= after ? ratio(before, after) : ratio(after, before),
                     before >= after ? "smaller" : "larger");
}

void run_compress(const CompressOptions& options) {
  check(options.passes.empty() != options.recipe.empty(), ErrorCode::BadUsage,
        "say what to do: --passes 'prune_l1(amount=0.5), quantize_dynamic' or --recipe FILE.yaml; `tersor passes` "
        "lists the passes");
  const Pipeline pipeline = read_pipeline(options);
  if (!options.input_shape.empty()) parse_input_shape(options.input_shape);
  check_outputs(options);
  if (options.threads > 0) at::set_num_threads(options.threads);

  Model model = Model::load(options.input);
  check(options.lowering == "tersor" || model.runnable(), ErrorCode::BadUsage,
        "--lowering {} is for TorchScript; '{}' holds only weights, which are written as they are", options.lowering,
        escaped(options.input));
  std::optional<Dataset> data;
  if (!options.eval.empty()) {
    check(model.runnable(), ErrorCode::UnsupportedModel,
          "'{}' holds only weights and cannot be evaluated; leave out --eval", escaped(options.input));
    data = read_dataset(options.eval);
    if (data->size() > 0)
      check_inputs(model, data->slice(0, example_samples).inputs, ErrorCode::BadData,
                   fmt::format("'{}'", escaped(options.eval)));
  }
  TerminalProgress terminal;
  Progress silent;
  Progress& progress = options.quiet ? silent : terminal;
  RunOptions run;
  if (!options.calibration.empty()) run.calibration = read_dataset(options.calibration);
  run.samples = options.samples;
  run.batch_size = options.batch_size;
  run.seed = options.seed;
  run.progress = &progress;
  give_example(model, options, run.calibration);

  pipeline.check_needs(model, run);
  const std::optional<Model> original = data ? std::optional(model.clone()) : std::nullopt;
  const Report report = pipeline.run(model, run);
  std::optional<Evaluation> evaluation;
  const auto evaluate_result = [&](const Model& result) {
    if (data) evaluation = evaluate(result, &*original, *data, options.batch_size, &progress);
  };
  if (options.dry_run) evaluate_result(model);
  model.metadata()["tersor.source"] = source_identity(options.input, options.hash);

  const auto file_bytes = [](const std::string& path) { return static_cast<std::int64_t>(fs::file_size(path)); };
  const auto save = [&] {
    model.save(options.output, {.lowering = options.lowering == "aten" ? Lowering::aten : Lowering::tersor,
                                .overwrite = options.overwrite,
                                .source = options.input,
                                .examine = [&](const fs::path& file) {
                                  if (data) evaluate_result(Model::load(file));
                                }});
  };
  if (!options.dry_run && options.report.empty()) save();
  if (!options.dry_run && !options.report.empty()) {
    // The model is saved while the report is a temporary file, so that neither stands without the other.
    write_file_atomically(options.report, output_options(options.overwrite), [&](OutputFile& file) {
      const bool replaces = fs::exists(options.output);
      save();
      try {
        Json json = Json::parse(report.json());
        json["input"] = {{"file", options.input}, {"bytes", file_bytes(options.input)}};
        json["output"] = {{"file", options.output}, {"bytes", file_bytes(options.output)}};
        if (evaluation) json["evaluation"] = evaluation->json();
        file.write(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
      } catch (...) {
        if (!replaces) fs::remove(options.output);
        throw;
      }
    });
  }
  if (options.quiet) return;
  fmt::print("{}\n", report.table());
  if (evaluation) fmt::print("{}", evaluation->text());
  if (options.dry_run) {
    fmt::print("dry run: nothing was written\n");
  } else {
    fmt::print("{}wrote {}\n", file_line(file_bytes(options.input), file_bytes(options.output)),
               escaped(options.output));
  }
}

}  // namespace

void add_compress(CLI::App& app) {
  const auto options = std::make_shared<CompressOptions>();
  CLI::App* command = app.add_subcommand("compress", "Run passes over a network and write the result");
  command->add_option("IN", options->input, "A TorchScript or safetensors file")->required();
  command->add_option("-o,--output", options->output, "Where the result goes")->required()->type_name("OUT");
  CLI::Option* passes =
      command->add_option("--passes", options->passes, "Passes in order: 'prune_l1(amount=0.5), quantize_dynamic'")
          ->type_name("TEXT");
  command->add_option("--recipe", options->recipe, "Passes in a YAML file")->type_name("FILE.yaml")->excludes(passes);
  CLI::Option* example =
      command->add_option("--example", options->example, "Example inputs: the first samples of a data file")
          ->type_name("FILE");
  command
      ->add_option("--input-shape", options->input_shape,
                   "Example inputs to make up: 1,3,32,32 or 1,16:i64, several separated by ';'")
      ->type_name("SHAPE")
      ->excludes(example);
  command
      ->add_option("--calibration", options->calibration,
                   "Calibration samples: safetensors with input0, input1, ... and perhaps label; also the example when "
                   "none is given")
      ->type_name("FILE");
  command->add_option("--eval", options->eval, "Evaluate original and result on this data file")->type_name("FILE");
  command
      ->add_option("--lowering", options->lowering,
                   "tersor: our operators, fast; aten: stock operators, loads in any PyTorch")
      ->check(CLI::IsMember({"tersor", "aten"}))
      ->type_name("tersor|aten")
      ->capture_default_str();
  command->add_option("--report", options->report, "Write the report to this file as JSON")->type_name("FILE.json");
  command->add_option("--samples", options->samples, "Calibration samples to use at most")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--batch-size", options->batch_size, "Samples per run in calibration and evaluation")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of passes that draw random numbers; today's draw none")
      ->check(CLI::Number)
      ->check([](const std::string& text) { return text.starts_with('-') ? "expected 0 or more" : std::string(); })
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--threads", options->threads, "Threads; default: one per core")
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
  command->add_flag("--hash", options->hash, "Record the hash of the whole input in the result, not of its first MiB");
  command->add_flag("--dry-run", options->dry_run, "Do everything but write");
  command->add_flag("--overwrite", options->overwrite, "Replace an existing output or report");
  command->add_flag("--quiet", options->quiet, "Print nothing but errors");
  command->callback([options] { run_compress(*options); });
}

}  // namespace tersor::cli
