#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tersor/io/file.hpp"

namespace tersor {

/// One row of a safetensors header.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< as the file spells it: `F32`, `BF16`, `F8_E4M3`, …
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< bytes from the end of the header
  std::uint64_t end = 0;

  std::uint64_t nbytes() const { return end - begin; }
};

/// The torch type of a safetensors dtype; nothing for F4, F6_E2M3 and F6_E3M2, whose elements are no whole bytes.
std::optional<at::ScalarType> safetensors_scalar_type(std::string_view dtype);
/// The dtype a tensor of this type is written as. UnsupportedDtype for what the format cannot hold (quantized,
/// complex128).
std::string_view safetensors_dtype(at::ScalarType type);

/// A safetensors file, open and checked: every rule of the format holds for it before the first tensor is read.
///
/// Stricter than the reference reader in two points: duplicate keys are refused, and so are more than 64 dimensions.
class SafetensorsFile {
 public:
  /// HeaderTooSmall, HeaderTooLarge, HeaderTruncated, HeaderNotUtf8, HeaderNotJson, DuplicateKey, BadMetadata,
  /// BadTensorEntry, UnknownDtype, BadShape, TooManyDims, BadOffsets, SizeOverflow, MisalignedSubByte, SizeMismatch,
  /// HoleOrOverlap, TrailingOrMissingData.
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  ///< in the order of their data
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  const SafetensorsEntry* find(std::string_view name) const;  ///< nullptr when there is none

  /// The values, in memory of their own. A sub-byte dtype comes as its raw bytes, uint8 [nbytes].
  at::Tensor read(std::string_view name) const;  ///< NoSuchTarget with near misses
  at::Tensor read(const SafetensorsEntry& entry) const;

 private:
  explicit SafetensorsFile(InputFile file) : file_(std::move(file)) {}

  InputFile file_;
  std::uint64_t data_ = 0;  // where the header ends
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::size_t, std::less<>> index_;
  std::map<std::string, std::string> metadata_;
};

/// A tensor to write. `dtype` and `shape` are empty except for a sub-byte dtype, whose raw bytes are in `tensor`.
struct SafetensorsItem {
  std::string name;
  at::Tensor tensor;
  std::string dtype = {};
  std::vector<std::int64_t> shape = {};
};

struct SafetensorsWriteOptions {
  bool overwrite = false;
  std::filesystem::path source = {};  ///< refused as output, also through links
  /// Called with the finished file before it takes the output's name.
  std::function<void(const std::filesystem::path&)> verify = {};
};

/// Writes the tensors in the reference writer's byte order, whatever order they are given in; equal input gives equal
/// bytes. `format: pt` is put into the metadata, whose keys are sorted. Tensors may be strided; they are written in C
/// order. BadName for a duplicate or reserved name and for one that is not UTF-8; UnsupportedDtype; and all errors of
/// `write_file_atomically`.
void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorsItem> items,
                       std::map<std::string, std::string> metadata = {}, const SafetensorsWriteOptions& options = {});
void write_safetensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors,
                       std::map<std::string, std::string> metadata = {}, const SafetensorsWriteOptions& options = {});

}  // namespace tersor
