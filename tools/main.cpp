#include <csignal>
#include <exception>
#include <filesystem>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <unistd.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/headeronly/version.h>
#include <CLI/CLI.hpp>

#include "commands.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/io/file.hpp"
#include "tersor/version.hpp"
#include "text.hpp"

namespace {

using tersor::ErrorCode;

extern "C" void stop(int signal) {
  tersor::remove_partial_files();
  _exit(128 + signal);
}

void catch_signals() {
  struct sigaction action {};
  action.sa_handler = stop;
  sigemptyset(&action.sa_mask);
  sigaddset(&action.sa_mask, SIGINT);
  sigaddset(&action.sa_mask, SIGTERM);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  signal(SIGXFSZ, SIG_IGN);  // a write past a size limit then fails as on a full disk
}

int report(std::string_view text, ErrorCode code) {
  fmt::print(stderr, "tersor: error: {}\n", text);
  return tersor::exit_code(code);
}

/// What LibTorch throws has no class of ours: a network that does not run, or memory that ran out.
int report_foreign(std::string_view what) {
  const bool memory = what.find("can't allocate memory") != std::string_view::npos ||
                      what.find("not enough memory") != std::string_view::npos;
  const ErrorCode code = memory ? ErrorCode::OutOfMemory : ErrorCode::UnsupportedModel;
  return report(fmt::format("{}: LibTorch says: {}", name(code), tersor::cli::first_cause(what)), code);
}

/// CLI11 only says that a subcommand is missing.
void check_command(const CLI::App& app, std::string_view word) {
  if (word.empty() || word.starts_with('-')) return;
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == word) return;
    if (!command->get_group().empty()) names.push_back(command->get_name());
  }
  throw tersor::fail(ErrorCode::BadUsage, "there is no command '{}'{}; see tersor --help", tersor::escaped(word),
                     tersor::did_you_mean(word, names));
}

}  // namespace

int main(int argc, char** argv) {
  catch_signals();
  CLI::App app{
      "Makes LibTorch models smaller and faster: pruning, quantization and distillation as passes that compose",
      "tersor"};
  app.set_version_flag("--version", fmt::format("tersor {} (LibTorch {})", tersor::version, TORCH_VERSION));
  app.require_subcommand(1);
  tersor::cli::add_compress(app);
  tersor::cli::add_inspect(app);
  tersor::cli::add_eval(app);
  tersor::cli::add_bench(app);
  tersor::cli::add_passes(app);
  try {
    check_command(app, argc > 1 ? argv[1] : "");
    app.parse(argc, argv);
    std::fflush(stdout);
    if (std::ferror(stdout) != 0) return report("IoError: cannot write to standard output", ErrorCode::IoError);
    return 0;
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return report(fmt::format("BadUsage: {}; see tersor --help", error.what()), ErrorCode::BadUsage);
  } catch (const tersor::Error& error) {
    return report(error.what(), error.code());
  } catch (const std::bad_alloc&) {
    return report("OutOfMemory: not enough memory for this model; close other programs or use a larger machine",
                  ErrorCode::OutOfMemory);
  } catch (const c10::OutOfMemoryError& error) {
    return report(fmt::format("OutOfMemory: {}", tersor::cli::first_cause(error.what_without_backtrace())),
                  ErrorCode::OutOfMemory);
  } catch (const c10::Error& error) {
    return report_foreign(error.what_without_backtrace());
  } catch (const std::filesystem::filesystem_error& error) {
    return report(fmt::format("IoError: {}", tersor::escaped(error.what())), ErrorCode::IoError);
  } catch (const std::runtime_error& error) {  // TorchScript's interpreter
    return report_foreign(error.what());
  } catch (const std::exception& error) {
    return report(fmt::format("Internal: {}; please report this", tersor::escaped(error.what())), ErrorCode::Internal);
  }
}
