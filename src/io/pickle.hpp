#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>

namespace tersor {

/// Size in bytes of the record of a storage; nothing when it is missing.
using StorageSize = std::function<std::optional<std::uint64_t>(std::string_view key)>;

/// Walks a pickle as LibTorch's TorchScript reader would, builds nothing, and checks everything that reader believes:
/// the opcodes and their operands, the globals, the size of every storage, and that every tensor lies inside its
/// storage.
///
/// BadPickle, ForbiddenGlobal, MissingStorage, SizeMismatch, SizeOverflow, OutOfBounds, UnsupportedDtype.
void check_pickle(std::span<const std::byte> bytes, const StorageSize& storage_size);

}  // namespace tersor
