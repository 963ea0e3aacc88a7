#pragma once

namespace CLI {
class App;
}

namespace tersor::cli {

// Each adds one subcommand; what it does runs as the subcommand's callback, inside App::parse.
void add_compress(CLI::App& app);
void add_inspect(CLI::App& app);
void add_eval(CLI::App& app);
void add_bench(CLI::App& app);
void add_passes(CLI::App& app);

}  // namespace tersor::cli
