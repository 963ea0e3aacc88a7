#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "inputs.hpp"
#include "metrics.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/io/safetensors.hpp"
#include "tersor/pipeline/progress.hpp"
#include "text.hpp"

namespace tersor::cli {
namespace {

struct EvalOptions {
  std::string file, data, against, outputs;
  std::int64_t batch_size = 32;
  int threads = 0;  // 0: as LibTorch sets them
  bool overwrite = false;
  bool json = false;
};

/// Batches are written one after the other, so samples must stand in dimension 0.
void check_samples(const std::vector<at::Tensor>& outputs, std::int64_t batch) {
  for (std::size_t i = 0; i < outputs.size(); ++i)
    check(outputs[i].dim() > 0 && outputs[i].size(0) == batch, ErrorCode::UnsupportedModel,
          "output {} is {} for {} samples; --outputs needs the samples in dimension 0 of every output", i,
          by_shape(outputs[i].sizes().vec()), batch);
}

void run_eval(const EvalOptions& options) {
  if (!options.outputs.empty())
    for (const std::string& source : {options.file, options.data, options.against})
      check_output(options.outputs, output_options(options.overwrite, source));
  if (options.threads > 0) at::set_num_threads(options.threads);
  const Model model = Model::load(options.file);
  const std::optional<Model> original =
      options.against.empty() ? std::nullopt : std::optional(Model::load(options.against));
  const Dataset data = read_dataset(options.data);
  if (model.runnable() && data.size() > 0)
    check_inputs(model, data.slice(0, example_samples).inputs, ErrorCode::BadData,
                 fmt::format("'{}'", escaped(options.data)));

  TerminalProgress terminal;
  std::vector<std::vector<at::Tensor>> kept;  // [output][batch]
  std::int64_t seen = 0;
  const Evaluation result = evaluate(model, original ? &*original : nullptr, data, options.batch_size, &terminal,
                                     [&](const std::vector<at::Tensor>& outputs) {
                                       if (options.outputs.empty()) return;
                                       const std::int64_t batch = std::min(options.batch_size, data.size() - seen);
                                       seen += batch;
                                       check_samples(outputs, batch);
                                       kept.resize(outputs.size());
                                       for (std::size_t i = 0; i < outputs.size(); ++i) kept[i].push_back(outputs[i]);
                                     });
  if (!options.outputs.empty()) {
    std::map<std::string, at::Tensor> tensors;
    for (std::size_t i = 0; i < kept.size(); ++i) tensors[fmt::format("output{}", i)] = at::cat(kept[i], 0);
    write_safetensors(options.outputs, tensors, std::map<std::string, std::string>{}, {.overwrite = options.overwrite});
  }
  if (options.json) {
    fmt::print("{}\n", result.json().dump(2));
  } else {
    fmt::print("{}", result.text());
  }
}

}  // namespace

void add_eval(CLI::App& app) {
  const auto options = std::make_shared<EvalOptions>();
  CLI::App* command = app.add_subcommand("eval", "Measure accuracy, and how close the outputs are to the original's");
  command->add_option("FILE", options->file, "A TorchScript file")->required();
  command->add_option("--data", options->data, "Data file: safetensors with input0, input1, ... and perhaps label")
      ->required()
      ->type_name("FILE");
  command->add_option("--against", options->against, "The network to compare with")->type_name("ORIGINAL");
  command->add_option("--batch-size", options->batch_size, "Samples per run")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--outputs", options->outputs, "Write the outputs to this safetensors file: output0, output1, ...")
      ->type_name("FILE");
  command->add_option("--threads", options->threads, "Threads; default: one per core")
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
  command->add_flag("--overwrite", options->overwrite, "Replace an existing --outputs file");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options] { run_eval(*options); });
}

}  // namespace tersor::cli
