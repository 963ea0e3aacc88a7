// Damaged and hostile files, to every command.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "catch.hpp"
#include "cli/run.hpp"
#include "tersor/core/error.hpp"
#include "tersor/io/dataset.hpp"

namespace tersor {
namespace {

struct Bad {
  std::string file;
  std::vector<std::string> classes;  ///< any of them; none: the file is fine, only odd
};

/// Files of tests/data/bad whose name starts so, with the classes of the manifest (`A`, `A or B`, `accept or A`).
std::vector<Bad> bad_files(const std::string& prefix) {
  std::vector<Bad> files;
  for (const auto& entry : nlohmann::json::parse(bytes_of(test_file("bad/manifest.json")))) {
    Bad bad{entry.at("file"), {}};
    if (!bad.file.starts_with(prefix) || !std::filesystem::exists(test_file("bad/" + bad.file))) continue;
    std::istringstream words(entry.at("expect").get<std::string>());
    for (std::string word; words >> word;)
      if (word != "or" && word != "accept") bad.classes.push_back(word);
    files.push_back(std::move(bad));
  }
  return files;
}

/// What each command is called with for `file`; all outputs go into the folder.
std::vector<std::vector<std::string>> every_command(const Folder& folder, const std::string& file) {
  return {{"compress", file, "-o", folder / "out", "--passes", "prune_l1(amount=0.5)", "--report", folder / "report"},
          {"compress", file, "-o", folder / "out", "--passes", "prune_structured(amount=0.5)", "--input-shape", "1,4"},
          {"inspect", file},
          {"inspect", file, "--json"},
          {"eval", file, "--data", folder / "data", "--outputs", folder / "outputs"},
          {"bench", file, "--input-shape", "1,4", "--batch", "1"}};
}

bool one_line(const std::string& text) {
  return std::count(text.begin(), text.end(), '\n') == 1 && text.ends_with('\n');
}

bool printable(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](unsigned char c) { return c == '\n' || (c >= 0x20 && c != 0x7F); });
}

int exit_of(const std::string& word) {
#define TERSOR_X(id, exit) \
  if (word == #id) return exit;
  TERSOR_ERROR_CODES(TERSOR_X)
#undef TERSOR_X
  return -1;
}

void write_data(const Folder& folder) {
  Dataset samples;
  samples.inputs = {tensors_of(test_file("cases/q-zero-row/weights.safetensors")).at("fc.weight")};
  write_dataset(folder / "data", samples);
}

/// The class that stands first in `tersor: error: Class: …`.
std::string stated_class(const std::string& err) {
  const std::string prefix = "tersor: error: ";
  return err.starts_with(prefix) ? err.substr(prefix.size(), err.find(':', prefix.size()) - prefix.size()) : "";
}

}  // namespace

TEST_CASE("every command refuses a broken safetensors file with its class, and leaves nothing") {
  const Folder folder;
  write_data(folder);
  const std::vector<Bad> files = bad_files("st");
  REQUIRE(files.size() >= 20);
  for (const Bad& bad : files) {
    if (bad.file.starts_with("st28") || bad.file.starts_with("st29")) continue;  // may be accepted; below
    for (const auto& command : every_command(folder, test_file("bad/" + bad.file))) {
      INFO(bad.file << " " << command[0]);
      const Ran ran = run(folder.path(), command);
      INFO(ran.err);
      const std::string stated = stated_class(ran.err);
      CHECK(std::find(bad.classes.begin(), bad.classes.end(), stated) != bad.classes.end());
      CHECK(ran.status == exit_of(stated));
      CHECK(ran.status == 3);
      CHECK(ran.out.empty());
      CHECK(one_line(ran.err));
      CHECK(printable(ran.err));
      CHECK_THAT(ran.err, Catch::Matchers::Contains(bad.file));
      CHECK(folder.names() == std::vector<std::string>{"data"});
    }
  }
}

TEST_CASE("odd names and many dimensions are escaped and never crash") {
  const Folder folder;
  write_data(folder);
  for (const Bad& bad : {bad_files("st28").at(0), bad_files("st29").at(0)}) {
    for (const auto& command : every_command(folder, test_file("bad/" + bad.file))) {
      INFO(bad.file << " " << command[0]);
      const Ran ran = run(folder.path(), command);
      INFO(ran.out << ran.err);
      CHECK(ran.status >= 0);
      CHECK(ran.status < 70);
      CHECK(printable(ran.out));
      CHECK(printable(ran.err));
      if (ran.status != 0) CHECK(ran.status == exit_of(stated_class(ran.err)));
      std::filesystem::remove(folder / "out");
      std::filesystem::remove(folder / "report");
    }
  }
}

TEST_CASE("every command refuses a hostile pickle archive without running it, and leaves nothing") {
  const Folder folder;
  write_data(folder);
  const std::vector<Bad> files = bad_files("pt");
  REQUIRE(files.size() >= 8);
  for (const Bad& bad : files) {
    for (const auto& command : every_command(folder, test_file("bad/" + bad.file))) {
      INFO(bad.file << " " << command[0]);
      const Ran ran = run(folder.path(), command);
      INFO(ran.out << ran.err);
      CHECK((ran.status == 3 || ran.status == 4));
      CHECK(ran.status == exit_of(stated_class(ran.err)));
      CHECK(ran.out.empty());
      CHECK(one_line(ran.err));
      CHECK(printable(ran.err));
      CHECK(folder.names() == std::vector<std::string>{"data"});
    }
  }
}

TEST_CASE("a TorchScript file cut anywhere is refused") {
  const Folder folder;
  write_data(folder);
  const std::string whole = bytes_of(test_file("cases/sp-layernorm/model.pt"));
  for (const double share : {0.1, 0.5, 0.9, 0.999}) {
    INFO(share);
    std::ofstream(folder / "cut.pt", std::ios::binary)
        << whole.substr(0, static_cast<std::size_t>(share * static_cast<double>(whole.size())));
    const Ran ran = run(folder.path(), {"inspect", "cut.pt"});
    INFO(ran.err);
    CHECK((ran.status == 3 || ran.status == 4));
    CHECK(ran.status == exit_of(stated_class(ran.err)));
    CHECK(one_line(ran.err));
  }
}

TEST_CASE("what is no regular file is refused at once") {
  const Folder folder;
  write_data(folder);
  REQUIRE(mkfifo((folder / "pipe").c_str(), 0600) == 0);
  for (const std::string& file :
       {folder / "pipe", folder.path().string(), std::string("/dev/zero"), folder / "missing"}) {
    for (const auto& command : every_command(folder, file)) {
      INFO(file << " " << command[0]);
      const Ran ran = run(folder.path(), command);
      INFO(ran.err);
      const std::string stated = stated_class(ran.err);
      const bool directory = std::filesystem::is_directory(file);
      CHECK(stated == (file.ends_with("missing") ? "IoError" : directory ? "UnsupportedFormat" : "NotRegularFile"));
      CHECK(ran.status == exit_of(stated));
    }
  }
  CHECK(folder.names() == std::vector<std::string>{"data", "pipe"});
}

}  // namespace tersor
