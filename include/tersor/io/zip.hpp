#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tersor/io/file.hpp"

namespace tersor {

/// One file inside a zip archive.
struct ZipRecord {
  std::string name;
  std::uint64_t offset = 0;  ///< of its bytes, from the start of the archive
  std::uint64_t stored = 0;  ///< bytes in the archive
  std::uint64_t size = 0;    ///< bytes when unpacked; as `stored` without compression
  bool deflated = false;
};

/// The directory of a zip archive, checked so that no two readers can see different archives in one file: one directory
/// that ends at the end of the file, local headers that repeat it, records that do not overlap, names that are unique
/// whatever their case (LibTorch looks records up without regard to it) and lead nowhere outside. zip64 is read.
class ZipArchive {
 public:
  static bool looks_like_zip(const InputFile& file);  ///< begins with the signature of a record

  /// BadZip with the place.
  explicit ZipArchive(const InputFile& file);

  const std::vector<ZipRecord>& records() const { return records_; }
  const ZipRecord* find(std::string_view name) const;  ///< whatever the case, like LibTorch; nullptr when there is none
  /// The bytes of a record that is not compressed.
  std::vector<std::byte> read(const ZipRecord& record) const;

 private:
  const InputFile& file_;
  std::vector<ZipRecord> records_;
  std::map<std::string, std::size_t> index_;  // by name in lower case
};

}  // namespace tersor
