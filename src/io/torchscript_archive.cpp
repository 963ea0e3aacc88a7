#include "tersor/io/torchscript_archive.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pickle.hpp"
#include "tersor/core/checked.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/io/zip.hpp"

namespace tersor {
namespace {

constexpr std::uint64_t kMaxPickle = 64 << 20;
constexpr std::uint64_t kMaxCode = 64 << 20;

constexpr std::string_view kConvert =
    "python -c \"import torch, safetensors.torch as s; d = torch.load('IN.pt', map_location='cpu', weights_only=True); "
    "s.save_file({k: v.contiguous() for k, v in d.items()}, 'OUT.safetensors')\"";

/// The part of every record's name before the first slash, with the slash.
std::string archive_prefix(const ZipArchive& zip) {
  check(!zip.records().empty(), ErrorCode::BadZip, "the archive is empty");
  const std::string& first = zip.records().front().name;
  const std::string prefix = first.substr(0, first.find('/') + 1);
  check(!prefix.empty(), ErrorCode::UnknownFormat, "the archive holds no TorchScript model");
  return prefix;
}

void expect_torchscript(const ZipArchive& zip, const std::string& prefix) {
  const bool data = zip.find(prefix + "data.pkl") != nullptr;
  const bool constants = zip.find(prefix + "constants.pkl") != nullptr;
  const bool code = std::any_of(zip.records().begin(), zip.records().end(),
                                [&](const ZipRecord& r) { return r.name.starts_with(prefix + "code/"); });
  check(!data || constants, ErrorCode::UnsupportedFormat,
        "this is a PyTorch pickle (a state dict or a whole module), not a TorchScript file; convert a state dict with: "
        "{}",
        kConvert);
  check(data && code, ErrorCode::UnknownFormat, "the archive holds no TorchScript model");
  // With this record LibTorch takes the file for its first format and reads it by other rules.
  check(zip.find(prefix + "model.json") == nullptr, ErrorCode::UnsupportedFormat,
        "this TorchScript file was written before PyTorch 1.0; save it again");
}

/// What the first bytes say of a file that is neither an archive nor safetensors.
[[noreturn]] void refuse(const InputFile& file) {
  std::array<unsigned char, 4> start{};
  if (file.size() >= start.size()) file.read(0, std::as_writable_bytes(std::span(start)));
  check(!(start[0] == 0x80 && start[1] <= 5), ErrorCode::UnsupportedFormat,
        "this is a pickle in PyTorch's format from before version 1.6; convert a state dict with: {}", kConvert);
  check(std::memcmp(start.data(), "GGUF", 4) != 0, ErrorCode::UnsupportedFormat, "GGUF files are not supported");
  throw fail(ErrorCode::UnknownFormat, "neither a safetensors nor a TorchScript file");
}

/// A header length that the format allows, and JSON behind it.
bool looks_like_safetensors(const InputFile& file) {
  std::uint64_t length = 0;
  if (file.size() < 9) return false;
  file.read(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length == 0 || length > file.size() - 8) return false;
  std::array<char, 64> text{};
  const std::size_t n = std::min<std::uint64_t>({text.size(), length, file.size() - 8});
  file.read(8, std::as_writable_bytes(std::span(text).first(n)));
  const std::size_t at = std::string_view(text.data(), n).find_first_not_of(" \t\r\n");
  return at != std::string_view::npos && text[at] == '{';
}

/// LibTorch deflates source text; its size is bounded so that a small file cannot fill the memory.
void check_compression(const ZipArchive& zip, const std::string& prefix) {
  for (const ZipRecord& record : zip.records()) {
    if (!record.deflated) continue;
    check(record.name.starts_with(prefix + "code/") && record.size <= kMaxCode, ErrorCode::CompressedRecord,
          "record '{}' is compressed ({} bytes from {}); expected a stored one", escaped(record.name), record.size,
          record.stored);
  }
}

/// Checks `<name>.pkl` against its storages, which are the records `<name>/<key>`.
void check_pickle_record(const ZipArchive& zip, const std::string& prefix, const std::string& name) {
  const ZipRecord& record = *zip.find(prefix + name + ".pkl");
  check(record.size <= kMaxPickle, ErrorCode::BadPickle, "{}.pkl has {} bytes; at most {} are supported", name,
        record.size, kMaxPickle);
  try {
    check_pickle(zip.read(record), [&](std::string_view key) -> std::optional<std::uint64_t> {
      const ZipRecord* storage = zip.find(fmt::format("{}{}/{}", prefix, name, key));
      return storage == nullptr ? std::nullopt : std::optional(storage->size);
    });
  } catch (Error& error) {
    throw error.in(name + ".pkl");
  }
}

}  // namespace

FileKind sniff(const std::filesystem::path& path) {
  std::error_code ignored;
  check(!std::filesystem::is_directory(path, ignored), ErrorCode::UnsupportedFormat,
        "'{}' is a directory; directories come later: give the safetensors file inside", escaped(path.string()));
  const InputFile file = InputFile::open(path);
  try {
    if (ZipArchive::looks_like_zip(file)) {
      const ZipArchive zip(file);
      const std::string prefix = archive_prefix(zip);
      check_compression(zip, prefix);
      expect_torchscript(zip, prefix);
      return FileKind::torchscript;
    }
    // A broken file that calls itself safetensors is left to that reader, which says what is broken.
    if (looks_like_safetensors(file) || path.extension() == ".safetensors") return FileKind::safetensors;
    refuse(file);
  } catch (Error& error) {
    throw error.in(escaped(path.string()));
  }
}

void scan_torchscript(const std::filesystem::path& path) {
  const InputFile file = InputFile::open(path);
  try {
    if (!ZipArchive::looks_like_zip(file)) refuse(file);
    const ZipArchive zip(file);
    const std::string prefix = archive_prefix(zip);
    check_compression(zip, prefix);
    expect_torchscript(zip, prefix);
    check_pickle_record(zip, prefix, "data");
    check_pickle_record(zip, prefix, "constants");
  } catch (Error& error) {
    throw error.in(escaped(path.string()));
  }
}

}  // namespace tersor
