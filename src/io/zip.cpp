#include "tersor/io/zip.hpp"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "tersor/core/checked.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

constexpr std::uint32_t kLocalHeader = 0x04034b50;
constexpr std::uint32_t kDirectoryEntry = 0x02014b50;
constexpr std::uint32_t kEnd = 0x06054b50;
constexpr std::uint32_t kEnd64 = 0x06064b50;
constexpr std::uint32_t kEnd64Locator = 0x07064b50;
constexpr std::uint64_t kEndSize = 22, kEnd64Size = 56, kLocatorSize = 20, kLocalSize = 30, kEntrySize = 46;
constexpr std::uint16_t kEncrypted = 1, kStored = 0, kDeflated = 8;
constexpr std::uint64_t kMaxDirectory = 64 << 20;

/// Little-endian numbers at fixed places of a block of bytes that was checked to be long enough.
class Fields {
 public:
  explicit Fields(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  T get(std::size_t at) const {
    check(at + sizeof(T) <= bytes_.size(), ErrorCode::BadZip, "a header of the archive is cut off");
    T value;
    std::memcpy(&value, bytes_.data() + at, sizeof(T));
    return value;
  }

 private:
  std::span<const std::byte> bytes_;
};

std::vector<std::byte> read_block(const InputFile& file, std::uint64_t offset, std::uint64_t size) {
  const auto end = checked_add(offset, size);
  check(end && *end <= file.size(), ErrorCode::BadZip, "the archive ends before byte {} + {}", offset, size);
  std::vector<std::byte> out(size);
  file.read(offset, out);
  return out;
}

struct Directory {
  std::uint64_t offset = 0, size = 0, entries = 0;
};

Directory find_directory(const InputFile& file) {
  check(file.size() >= kEndSize, ErrorCode::BadZip, "{} bytes are too few for an archive", file.size());
  const std::uint64_t end_at = file.size() - kEndSize;
  const std::vector<std::byte> block = read_block(file, end_at, kEndSize);
  const Fields end(block);
  check(end.get<std::uint32_t>(0) == kEnd && end.get<std::uint16_t>(20) == 0, ErrorCode::BadZip,
        "the archive does not end with its directory: it is cut off, or something was appended");
  Directory out{end.get<std::uint32_t>(16), end.get<std::uint32_t>(12), end.get<std::uint16_t>(10)};
  bool one_disk = end.get<std::uint16_t>(4) == 0 && end.get<std::uint16_t>(6) == 0 &&
                  end.get<std::uint16_t>(8) == end.get<std::uint16_t>(10);
  std::uint64_t directory_end = end_at;

  if (end_at >= kLocatorSize) {
    const std::vector<std::byte> locator_block = read_block(file, end_at - kLocatorSize, kLocatorSize);
    const Fields locator(locator_block);
    if (locator.get<std::uint32_t>(0) == kEnd64Locator) {
      directory_end = locator.get<std::uint64_t>(8);
      check(directory_end == end_at - kLocatorSize - std::min(end_at - kLocatorSize, kEnd64Size), ErrorCode::BadZip,
            "the zip64 end of the directory is not where it should be");
      const std::vector<std::byte> end64_block = read_block(file, directory_end, kEnd64Size);
      const Fields end64(end64_block);
      const Directory large{end64.get<std::uint64_t>(48), end64.get<std::uint64_t>(40), end64.get<std::uint64_t>(32)};
      const auto agrees = [](std::uint64_t small, std::uint64_t wide, std::uint64_t unset) {
        return small == unset || small == wide;
      };
      check(end64.get<std::uint32_t>(0) == kEnd64 && agrees(out.offset, large.offset, 0xFFFFFFFF) &&
                agrees(out.size, large.size, 0xFFFFFFFF) && agrees(out.entries, large.entries, 0xFFFF),
            ErrorCode::BadZip, "the two ends of the directory disagree");
      one_disk = end64.get<std::uint32_t>(16) == 0 && end64.get<std::uint32_t>(20) == 0 &&
                 end64.get<std::uint64_t>(24) == large.entries;
      out = large;
    }
  }
  check(one_disk, ErrorCode::BadZip, "archives in several parts are not supported");
  const auto stop = checked_add(out.offset, out.size);
  check(stop && *stop == directory_end, ErrorCode::BadZip, "the directory does not end where its end record begins");
  check(out.size <= kMaxDirectory, ErrorCode::BadZip, "a directory of {} bytes; at most {} are supported", out.size,
        kMaxDirectory);
  return out;
}

bool safe_name(std::string_view name) {
  if (name.empty() || name.front() == '/' || name.find('\\') != name.npos || name.find('\0') != name.npos) return false;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t slash = std::min(name.find('/', begin), name.size());
    if (name.substr(begin, slash - begin) == "..") return false;
    begin = slash + 1;
  }
  return true;
}

std::string lower(std::string_view name) {
  std::string out(name);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

/// Sizes and offset that do not fit in 32 bits stand in the zip64 extra field, in this order.
void read_zip64(std::span<const std::byte> extra, ZipRecord& record, std::uint64_t& header) {
  const Fields fields(extra);
  for (std::size_t at = 0; at + 4 <= extra.size();) {
    const std::size_t size = fields.get<std::uint16_t>(at + 2);
    check(at + 4 + size <= extra.size(), ErrorCode::BadZip, "an extra field of record '{}' is cut off",
          escaped(record.name));
    if (fields.get<std::uint16_t>(at) == 1) {
      const Fields zip64(extra.subspan(at + 4, size));
      std::size_t next = 0;
      for (std::uint64_t* value : {&record.size, &record.stored, &header}) {
        if (*value != 0xFFFFFFFF) continue;
        *value = zip64.get<std::uint64_t>(next);
        next += 8;
      }
      return;
    }
    at += 4 + size;
  }
}

}  // namespace

bool ZipArchive::looks_like_zip(const InputFile& file) {
  std::uint32_t signature = 0;
  if (file.size() < sizeof(signature)) return false;
  file.read(0, std::as_writable_bytes(std::span(&signature, 1)));
  return signature == kLocalHeader;
}

ZipArchive::ZipArchive(const InputFile& file) : file_(file) {
  const Directory directory = find_directory(file);
  const std::vector<std::byte> bytes = read_block(file, directory.offset, directory.size);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> extents;
  std::size_t at = 0;
  while (at < bytes.size()) {
    const Fields entry{std::span<const std::byte>(bytes).subspan(at)};
    const std::size_t name_size = entry.get<std::uint16_t>(28), extra_size = entry.get<std::uint16_t>(30),
                      comment_size = entry.get<std::uint16_t>(32);
    check(entry.get<std::uint32_t>(0) == kDirectoryEntry && at + kEntrySize + name_size + extra_size <= bytes.size(),
          ErrorCode::BadZip, "entry {} of the directory is broken", records_.size());
    ZipRecord record;
    record.name.assign(reinterpret_cast<const char*>(bytes.data()) + at + kEntrySize, name_size);
    record.stored = entry.get<std::uint32_t>(20);
    record.size = entry.get<std::uint32_t>(24);
    std::uint64_t header = entry.get<std::uint32_t>(42);
    read_zip64(std::span(bytes).subspan(at + kEntrySize + name_size, extra_size), record, header);
    const std::string shown = escaped(record.name);
    check(safe_name(record.name), ErrorCode::BadZip, "record '{}' has a name that leads out of the archive", shown);
    check(!index_.contains(lower(record.name)), ErrorCode::BadZip, "there are two records '{}'", shown);
    check((entry.get<std::uint16_t>(8) & kEncrypted) == 0, ErrorCode::BadZip, "record '{}' is encrypted", shown);
    const auto method = entry.get<std::uint16_t>(10);
    check(method == kStored || method == kDeflated, ErrorCode::CompressedRecord,
          "record '{}' is compressed by method {}; expected stored records", shown, method);
    record.deflated = method == kDeflated;
    check(record.deflated || record.stored == record.size, ErrorCode::BadZip,
          "record '{}' is stored but has two sizes, {} and {}", shown, record.stored, record.size);

    const std::vector<std::byte> local_block = read_block(file, header, kLocalSize + name_size);
    const Fields local(local_block);
    check(local.get<std::uint32_t>(0) == kLocalHeader && local.get<std::uint16_t>(8) == method &&
              local.get<std::uint16_t>(26) == name_size &&
              std::memcmp(local_block.data() + kLocalSize, record.name.data(), name_size) == 0,
          ErrorCode::BadZip, "record '{}' and the directory disagree", shown);
    record.offset = header + kLocalSize + name_size + local.get<std::uint16_t>(28);
    const auto stop = checked_add(record.offset, record.stored);
    check(stop && *stop <= directory.offset, ErrorCode::BadZip, "record '{}' reaches past the records' end", shown);
    extents.emplace_back(header, *stop);
    index_[lower(record.name)] = records_.size();
    records_.push_back(std::move(record));
    at += kEntrySize + name_size + extra_size + comment_size;
  }
  check(at == bytes.size() && records_.size() == directory.entries, ErrorCode::BadZip,
        "the directory has {} entries and announces {}", records_.size(), directory.entries);
  std::sort(extents.begin(), extents.end());
  for (std::size_t i = 1; i < extents.size(); ++i) {
    check(extents[i - 1].second <= extents[i].first, ErrorCode::BadZip, "records overlap at byte {}", extents[i].first);
  }
}

const ZipRecord* ZipArchive::find(std::string_view name) const {
  const auto it = index_.find(lower(name));
  return it == index_.end() ? nullptr : &records_[it->second];
}

std::vector<std::byte> ZipArchive::read(const ZipRecord& record) const {
  assert(!record.deflated);
  return read_block(file_, record.offset, record.stored);
}

}  // namespace tersor
