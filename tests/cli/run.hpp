#pragma once
// Runs the program as a user does, and keeps what it said.

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tersor {

struct Ran {
  int status = 0;  ///< exit status; a signal that killed the program as its negative number
  std::string out, err;
};

/// `tersor <arguments>` in `directory` with these environment variables on top. Ends within two minutes or is killed.
Ran run(const std::filesystem::path& directory, const std::vector<std::string>& arguments,
        const std::map<std::string, std::string>& environment = {});

/// Any other program, in the same way.
Ran run_program(const std::string& program, const std::filesystem::path& directory,
                const std::vector<std::string>& arguments, const std::map<std::string, std::string>& environment = {});

/// Starts it and returns at once; `wait_for` gives its end.
int start(const std::filesystem::path& directory, const std::vector<std::string>& arguments);
int wait_for(int process);

/// A fresh directory that is removed with this object.
class Folder {
 public:
  Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder();

  const std::filesystem::path& path() const { return path_; }
  std::string operator/(std::string_view name) const { return (path_ / name).string(); }
  std::vector<std::string> names() const;  ///< of everything inside, sorted

 private:
  std::filesystem::path path_;
};

std::string test_file(std::string_view name);  ///< full path of a file in tests/data
std::string bytes_of(const std::filesystem::path& path);
/// All tensors of a safetensors file.
std::map<std::string, at::Tensor> tensors_of(const std::filesystem::path& path);
/// Same dtype, shape and bits.
bool same(const at::Tensor& a, const at::Tensor& b);
/// Largest |a - b|; fails the test when the shapes differ.
double distance(const at::Tensor& a, const at::Tensor& b);

}  // namespace tersor
