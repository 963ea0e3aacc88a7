#include "tersor/io/dataset.hpp"

#include <algorithm>
#include <map>
#include <string>

#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/io/safetensors.hpp"

namespace tersor {

Dataset Dataset::slice(std::int64_t begin, std::int64_t count) const {
  const std::int64_t first = std::clamp<std::int64_t>(begin, 0, size());
  const std::int64_t length = std::clamp<std::int64_t>(count, 0, size() - first);
  Dataset out;
  for (const at::Tensor& input : inputs) out.inputs.push_back(input.narrow(0, first, length));
  if (labels) out.labels = labels->narrow(0, first, length);
  return out;
}

Dataset read_dataset(const std::filesystem::path& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const std::string shown = escaped(path.string());
  Dataset out;
  while (const SafetensorsEntry* entry = file.find(fmt::format("input{}", out.inputs.size())))
    out.inputs.push_back(file.read(*entry));
  check(!out.inputs.empty(), ErrorCode::BadData,
        "{} has no tensor 'input0'; name the model's inputs input0, input1, … with the samples in dimension 0", shown);
  if (file.find("label") != nullptr) out.labels = file.read("label");

  for (const SafetensorsEntry& entry : file.entries()) {
    if (!entry.name.starts_with("input")) continue;
    const bool known = std::any_of(out.inputs.begin(), out.inputs.end(), [&, i = 0](const at::Tensor&) mutable {
      return entry.name == fmt::format("input{}", i++);
    });
    check(known, ErrorCode::BadData, "{} has '{}' but no 'input{}'; inputs are numbered without gaps", shown,
          escaped(entry.name), out.inputs.size());
  }
  const auto samples = [&](const at::Tensor& tensor, const std::string& name) {
    check(tensor.dim() >= 1, ErrorCode::BadData, "'{}' in {} is a single number; expected samples in dimension 0", name,
          shown);
    return tensor.size(0);
  };
  const std::int64_t size = samples(out.inputs[0], "input0");
  check(size > 0, ErrorCode::BadData, "'input0' in {} has no samples", shown);
  for (std::size_t i = 1; i < out.inputs.size(); ++i) {
    const std::string name = fmt::format("input{}", i);
    check(samples(out.inputs[i], name) == size, ErrorCode::BadData, "'{}' in {} has {} samples and 'input0' has {}",
          name, shown, out.inputs[i].size(0), size);
  }
  if (out.labels) {
    check(samples(*out.labels, "label") == size, ErrorCode::BadData, "'label' in {} has {} samples and 'input0' has {}",
          shown, out.labels->size(0), size);
  }
  return out;
}

void write_dataset(const std::filesystem::path& path, const Dataset& data) {
  std::map<std::string, at::Tensor> tensors;
  for (std::size_t i = 0; i < data.inputs.size(); ++i) tensors[fmt::format("input{}", i)] = data.inputs[i];
  if (data.labels) tensors["label"] = *data.labels;
  write_safetensors(path, tensors);
}

}  // namespace tersor
