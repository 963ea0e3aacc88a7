#include "cli/run.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "catch.hpp"
#include "tersor/io/safetensors.hpp"

namespace tersor {
namespace {

int decoded(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status); }

int spawn(const std::string& program, const std::filesystem::path& directory, const std::vector<std::string>& arguments,
          const std::map<std::string, std::string>& environment, const std::string& out, const std::string& err) {
  std::vector<std::string> words{program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const int child = fork();
  if (child != 0) return child;
  const auto redirect = [](const std::string& path, int to) {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || dup2(fd, to) < 0) _exit(126);
  };
  redirect(out, STDOUT_FILENO);
  redirect(err, STDERR_FILENO);
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  if (chdir(directory.c_str()) != 0) _exit(126);
  alarm(120);
  execvp(program.c_str(), pointers.data());
  _exit(127);
}

}  // namespace

Ran run_program(const std::string& program, const std::filesystem::path& directory,
                const std::vector<std::string>& arguments, const std::map<std::string, std::string>& environment) {
  const Folder logs;
  const int child = spawn(program, directory, arguments, environment, logs / "out", logs / "err");
  Ran ran;
  ran.status = wait_for(child);
  ran.out = bytes_of(logs / "out");
  ran.err = bytes_of(logs / "err");
  return ran;
}

Ran run(const std::filesystem::path& directory, const std::vector<std::string>& arguments,
        const std::map<std::string, std::string>& environment) {
  return run_program(TERSOR_PROGRAM, directory, arguments, environment);
}

int start(const std::filesystem::path& directory, const std::vector<std::string>& arguments) {
  return spawn(TERSOR_PROGRAM, directory, arguments, {}, "/dev/null", "/dev/null");
}

int wait_for(int process) {
  int status = 0;
  if (waitpid(process, &status, 0) != process) throw std::runtime_error("waitpid failed");
  return decoded(status);
}

Folder::Folder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "tersor-cli-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  path_ = pattern;
}

Folder::~Folder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> Folder::names() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path_))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::string test_file(std::string_view name) { return (std::filesystem::path(TERSOR_TEST_DATA) / name).string(); }

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(in), {}};
}

std::map<std::string, at::Tensor> tensors_of(const std::filesystem::path& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  std::map<std::string, at::Tensor> tensors;
  for (const SafetensorsEntry& entry : file.entries()) tensors[entry.name] = file.read(entry);
  return tensors;
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  REQUIRE(a.sizes() == b.sizes());
  return a.numel() == 0 ? 0.0 : a.to(at::kDouble).sub(b.to(at::kDouble)).abs().max().item<double>();
}

}  // namespace tersor
