#pragma once

#include <filesystem>

#include "tersor/io/file.hpp"

namespace tersor {

/// What a file holds, told by its content.
enum class FileKind { safetensors, torchscript };

/// UnsupportedFormat with advice for what is recognised but not read: a directory, a state dict or another pickle,
/// GGUF. UnknownFormat for anything else. Looks at the start and, in an archive, at the record names.
FileKind sniff(const std::filesystem::path& path);

/// Checks a TorchScript archive before LibTorch sees it, since LibTorch trusts what the pickles say about their
/// storages.
///
/// The archive must be sound, with stored records (only `code/` may be deflated, as LibTorch writes it); `data.pkl` and
/// `constants.pkl` may name only what a TorchScript file needs; every storage they use must have a record of exactly
/// its size, and every tensor must lie inside its storage. Nothing is executed and nothing is built.
///
/// BadZip, CompressedRecord, UnsupportedFormat, UnknownFormat, BadPickle, ForbiddenGlobal, MissingStorage,
/// SizeMismatch, OutOfBounds.
void scan_torchscript(const std::filesystem::path& path);

}  // namespace tersor
