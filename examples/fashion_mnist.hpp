#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <zlib.h>

#include "tersor/core/error.hpp"
#include "tersor/io/dataset.hpp"

/// Reads Fashion-MNIST as Debian's package `dataset-fashion-mnist` installs it: gzipped IDX files.
namespace fashion_mnist {

inline const std::filesystem::path default_directory = "/usr/share/datasets/fashion-mnist";

/// The dimensions and bytes of one IDX file of unsigned bytes (magic 0, 0, 8, number of dimensions; then each
/// dimension as a big-endian 32-bit integer; then the data).
struct Idx {
  std::vector<std::int64_t> shape;
  std::vector<unsigned char> bytes;
};

inline Idx read_idx(const std::filesystem::path& path, std::size_t dims) {
  using tersor::ErrorCode;
  gzFile file = gzopen(path.c_str(), "rb");
  tersor::check(file != nullptr, ErrorCode::IoError, "cannot open {}; on Debian, install dataset-fashion-mnist",
                path.string());
  auto read = [&](std::vector<unsigned char>& out, std::size_t count) {
    out.resize(count);
    return gzread(file, out.data(), static_cast<unsigned>(count)) == static_cast<int>(count);
  };
  Idx idx;
  std::vector<unsigned char> header;
  bool ok = read(header, 4 + 4 * dims) && header[2] == 8 && header[3] == dims;
  std::size_t count = 1;
  for (std::size_t d = 0; ok && d < dims; ++d) {
    const unsigned char* p = header.data() + 4 + 4 * d;
    idx.shape.push_back(p[0] << 24 | p[1] << 16 | p[2] << 8 | p[3]);
    count *= static_cast<std::size_t>(idx.shape.back());
  }
  ok = ok && count <= 1U << 30 && read(idx.bytes, count);
  gzclose(file);
  tersor::check(ok, ErrorCode::BadData, "{} is not a gzipped IDX file of bytes with {} dimensions", path.string(),
                dims);
  return idx;
}

/// Images as float [N, 1, 28, 28], normalised to (x / 255 - 0.2860) / 0.3530, and labels as int64 [N].
inline tersor::Dataset read(const std::filesystem::path& directory, const std::string& split) {
  const Idx images = read_idx(directory / (split + "-images-idx3-ubyte.gz"), 3);
  const Idx labels = read_idx(directory / (split + "-labels-idx1-ubyte.gz"), 1);
  const std::int64_t n = images.shape[0];
  tersor::check(labels.shape[0] == n, tersor::ErrorCode::BadData, "{}: {} images but {} labels", directory.string(), n,
                labels.shape[0]);
  at::Tensor x = at::empty({n, 1, images.shape[1], images.shape[2]}, at::kFloat);
  at::Tensor y = at::empty({n}, at::kLong);
  for (std::size_t i = 0; i < images.bytes.size(); ++i)
    x.mutable_data_ptr<float>()[i] = (static_cast<float>(images.bytes[i]) / 255.0F - 0.2860F) / 0.3530F;
  for (std::size_t i = 0; i < labels.bytes.size(); ++i) y.mutable_data_ptr<std::int64_t>()[i] = labels.bytes[i];
  return {{x}, y};
}

inline tersor::Dataset train(const std::filesystem::path& directory = default_directory) {
  return read(directory, "train");
}
inline tersor::Dataset test(const std::filesystem::path& directory = default_directory) {
  return read(directory, "t10k");
}

}  // namespace fashion_mnist
