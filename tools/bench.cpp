#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <fstream>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "inputs.hpp"
#include "script.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/kernels/cpu.hpp"
#include "tersor/model/model.hpp"
#include "tersor/pipeline/progress.hpp"
#include "text.hpp"

extern char** environ;

namespace tersor::cli {
namespace {

struct BenchOptions {
  std::vector<std::string> files;
  std::string input_shape, example;
  std::vector<std::int64_t> batches{1, 4, 8, 16};
  int threads = 1;
  int clients = 1;
  int rounds = 30;
  double seconds = 0.02;  // of one burst
  bool json = false;
};

/// What was measured of one file at one batch size.
struct Timing {
  std::vector<double> calls;   // seconds of every call
  std::vector<double> bursts;  // median of each round's burst

  double quantile(double q) const {
    std::vector<double> sorted = calls;
    const auto at = static_cast<std::size_t>(std::ceil(q * static_cast<double>(sorted.size()))) - 1;
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(at), sorted.end());
    return sorted[at];
  }
  double fastest() const { return *std::min_element(calls.begin(), calls.end()); }
  double mean() const { return std::accumulate(calls.begin(), calls.end(), 0.0) / static_cast<double>(calls.size()); }
};

double median(std::vector<double> x) {
  const std::size_t half = x.size() / 2;
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(half), x.end());
  if (x.size() % 2 == 1) return x[half];
  return (x[half] + *std::max_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(half))) / 2;
}

/// Inputs of any batch size: dimension 0 of every input is replaced.
class Inputs {
 public:
  Inputs(const std::string& shape, const std::string& example) {
    check(!shape.empty() || !example.empty(), ErrorCode::BadUsage,
          "bench needs to know the inputs: --input-shape 1,3,32,32 (dimension 0 is replaced by each batch size) or "
          "--example FILE");
    if (example.empty()) {
      specs_ = parse_input_shape(shape);
    } else {
      data_ = read_dataset(example);
    }
  }
  std::vector<at::Tensor> of(std::int64_t batch) const {
    if (data_) return repeat_samples(*data_, batch);
    std::vector<InputSpec> specs = specs_;
    for (InputSpec& spec : specs) spec.shape[0] = batch;
    return make_inputs(specs);
  }

 private:
  std::vector<InputSpec> specs_;
  std::optional<Dataset> data_;
};

/// Loads `file` as bench measures it, after the checks that refuse what is no sound TorchScript file.
Script load_script(const std::string& file) {
  check(Model::load(file).runnable(), ErrorCode::UnsupportedModel,
        "'{}' holds only weights and cannot be run; bench measures TorchScript files", escaped(file));
  return Script(file);
}

/// Peak resident memory of this process in bytes (`VmHWM`).
std::int64_t peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
  throw fail(ErrorCode::IoError, "/proc/self/status has no VmHWM");
}

/// Runs this program as `bench-memory` on one file and reads the number that it prints.
std::int64_t child_memory(const BenchOptions& options, const std::string& file, std::int64_t batch) {
  std::vector<std::string> words{
      "tersor", "bench-memory", file, "--batch", std::to_string(batch), "--threads", std::to_string(options.threads)};
  if (!options.input_shape.empty()) words.insert(words.end(), {"--input-shape", options.input_shape});
  if (!options.example.empty()) words.insert(words.end(), {"--example", options.example});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);

  std::array<int, 2> ends{};
  check(pipe2(ends.data(), O_CLOEXEC) == 0, ErrorCode::IoError, "cannot make a pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  pid_t child = 0;
  const int spawned = posix_spawn(&child, "/proc/self/exe", &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string text;
  std::array<char, 256> buffer{};
  for (ssize_t n = 0; spawned == 0 && (n = read(ends[0], buffer.data(), buffer.size())) > 0;)
    text.append(buffer.data(), static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 0;
  check(spawned == 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
        ErrorCode::Internal, "the process that measures the memory of '{}' failed", escaped(file));
  return std::stoll(text);
}

void run_memory(const BenchOptions& options) {
  at::set_num_threads(options.threads);
  const Script script(options.files.at(0));
  script.time(Inputs(options.input_shape, options.example).of(options.batches.at(0)), 50);
  fmt::print("{}\n", peak_memory());
}

/// Seconds of every call, when each of `clients` threads makes `calls` of them at the same time as the others.
std::vector<double> burst(const Script& script, const std::vector<at::Tensor>& inputs, int calls, int clients) {
  if (clients == 1) return script.time(inputs, calls);
  std::vector<std::vector<double>> seconds(static_cast<std::size_t>(clients));
  std::barrier start(clients);
  {
    std::vector<std::jthread> threads;
    for (std::vector<double>& own : seconds)
      threads.emplace_back([&] {
        at::init_num_threads();
        start.arrive_and_wait();
        own = script.time(inputs, calls);
      });
  }
  std::vector<double> all;
  for (const std::vector<double>& own : seconds) all.insert(all.end(), own.begin(), own.end());
  return all;
}

/// Rounds A, B, C, A, B, C …: what slows the machine for a while meets every file alike.
std::vector<Timing> measure(const std::vector<Script>& scripts, const std::vector<at::Tensor>& inputs,
                            const BenchOptions& options, Progress& progress) {
  std::vector<int> calls;
  for (const Script& script : scripts) {
    // TorchScript specialises in its first calls; the fastest of the later ones says how many fill a burst.
    script.time(inputs, 10);
    const std::vector<double> warm = script.time(inputs, 5);
    calls.push_back(
        static_cast<int>(std::clamp(options.seconds / *std::min_element(warm.begin(), warm.end()), 3.0, 2000.0)));
  }
  std::vector<Timing> timings(scripts.size());
  for (int round = 0; round < options.rounds; ++round) {
    for (std::size_t i = 0; i < scripts.size(); ++i) {
      scripts[i].time(inputs, 1);  // brings its weights back into the cache
      const std::vector<double> seconds = burst(scripts[i], inputs, calls[i], options.clients);
      timings[i].bursts.push_back(median(seconds));
      timings[i].calls.insert(timings[i].calls.end(), seconds.begin(), seconds.end());
    }
    progress.step(round + 1);
  }
  return timings;
}

void run_bench(const BenchOptions& options) {
  const Inputs inputs(options.input_shape, options.example);
  at::set_num_threads(options.threads);
  std::vector<Script> scripts;
  for (const std::string& file : options.files) {
    scripts.push_back(load_script(file));
    for (const std::int64_t batch : options.batches)
      scripts.back().run(inputs.of(batch));  // what cannot run fails here
  }

  const std::string isa(name(best_isa()));
  nlohmann::ordered_json report;
  report["threads"] = options.threads;
  report["clients"] = options.clients;
  report["isa"] = isa;
  report["rounds"] = options.rounds;
  std::vector<std::int64_t> memory, bytes;
  for (const std::string& file : options.files) {
    bytes.push_back(static_cast<std::int64_t>(std::filesystem::file_size(file)));
    memory.push_back(child_memory(options, file, options.batches.back()));
    report["files"].push_back({{"file", file}, {"bytes", bytes.back()}, {"peak_memory_bytes", memory.back()}});
  }

  TerminalProgress terminal;
  Table files(
      {{"file"}, {"bytes", Table::Align::right}, {"ratio", Table::Align::right}, {"peak memory", Table::Align::right}});
  for (std::size_t i = 0; i < scripts.size(); ++i)
    files.row({escaped(options.files[i]), grouped(bytes[i]),
               fmt::format("{:.2f}x", double(bytes[0]) / double(bytes[i])),
               fmt::format("{:.1f} MiB", static_cast<double>(memory[i]) / (1 << 20))});
  if (!options.json)
    fmt::print("clients {}, threads {}, instruction set {}, {} rounds; ratios are to the first file\n\n{}",
               options.clients, options.threads, isa, options.rounds, files.text());

  for (const std::int64_t batch : options.batches) {
    const std::string title = fmt::format("batch {}", batch);
    terminal.begin(title, options.rounds);
    const std::vector<Timing> timings = measure(scripts, inputs.of(batch), options, terminal);
    terminal.end();
    Table table({{title},
                 {"p50", Table::Align::right},
                 {"p99", Table::Align::right},
                 {"min", Table::Align::right},
                 {"items/s", Table::Align::right},
                 {"ratio", Table::Align::right}});
    nlohmann::ordered_json rows;
    for (std::size_t i = 0; i < timings.size(); ++i) {
      std::vector<double> ratios;
      for (std::size_t round = 0; round < timings[i].bursts.size(); ++round)
        ratios.push_back(timings[0].bursts[round] / timings[i].bursts[round]);
      const double p50 = timings[i].quantile(0.5), p99 = timings[i].quantile(0.99), ratio = median(ratios);
      const double throughput = static_cast<double>(batch) * options.clients / timings[i].mean();
      table.row({escaped(options.files[i]), microseconds(p50), microseconds(p99), microseconds(timings[i].fastest()),
                 fmt::format("{:.0f}", throughput), fmt::format("{:.2f}x", ratio)});
      rows.push_back({{"file", options.files[i]},
                      {"calls", timings[i].calls.size()},
                      {"p50_us", p50 * 1e6},
                      {"p99_us", p99 * 1e6},
                      {"min_us", timings[i].fastest() * 1e6},
                      {"items_per_second", throughput},
                      {"ratio", ratio}});
    }
    if (!options.json) fmt::print("\n{}", table.text());
    report["batches"].push_back({{"batch", batch}, {"results", rows}});
  }
  if (options.json) fmt::print("{}\n", report.dump(2));
}

void add_input_options(CLI::App* command, BenchOptions& options) {
  CLI::Option* shape = command->add_option(
      "--input-shape", options.input_shape,
      "Inputs to make up: 1,3,32,32 or 1,16:i64, several separated by ';'; dimension 0 is replaced by each batch size");
  command->add_option("--example", options.example, "Take the inputs from this data file instead")
      ->excludes(shape)
      ->type_name("FILE");
  command->add_option("--batch", options.batches, "Batch sizes, separated by commas")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
      ->type_name("N,N,...")
      ->capture_default_str();
  command->add_option("--threads", options.threads, "Threads")
      ->check(CLI::Range(1, 1024))
      ->type_name("N")
      ->capture_default_str();
}

}  // namespace

void add_bench(CLI::App& app) {
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      app.add_subcommand("bench", "Measure TorchScript files side by side: latency, throughput, memory");
  command->add_option("FILE", options->files, "Networks with the same inputs; ratios are to the first")->required();
  add_input_options(command, *options);
  command
      ->add_option("--clients", options->clients,
                   "Callers at the same time, each a thread of its own: latency under load; items/s is of all")
      ->check(CLI::Range(1, 1024))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--rounds", options->rounds, "Rounds in which every file takes its turn")
      ->check(CLI::Range(1, 100000))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--seconds", options->seconds, "Length of one turn")
      ->check(CLI::Range(0.0001, 60.0))
      ->type_name("S")
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options] { run_bench(*options); });

  // Peak memory belongs to a process, so each file gets one of its own.
  const auto child = std::make_shared<BenchOptions>();
  CLI::App* memory = app.add_subcommand("bench-memory", "")->group("");
  memory->add_option("FILE", child->files)->required();
  add_input_options(memory, *child);
  memory->callback([child] { run_memory(*child); });
}

}  // namespace tersor::cli
