#include "tersor/io/safetensors.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <set>
#include <tuple>

#include <ATen/ops/empty.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "tersor/core/checked.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr std::uint64_t kMaxHeader = 100'000'000;
constexpr std::size_t kMaxDims = 64;  // LibTorch's own limit
constexpr int kMaxDepth = 64;
constexpr std::string_view kMetadata = "__metadata__";

struct Dtype {
  std::string_view name;
  int bits;
  std::optional<at::ScalarType> type;
};

// In the order of the reference implementation's enumeration, which its writer sorts by.
constexpr std::array kDtypes{
    Dtype{"BOOL", 8, at::kBool},
    Dtype{"F4", 4, std::nullopt},
    Dtype{"F6_E2M3", 6, std::nullopt},
    Dtype{"F6_E3M2", 6, std::nullopt},
    Dtype{"U8", 8, at::kByte},
    Dtype{"I8", 8, at::kChar},
    Dtype{"F8_E5M2", 8, at::ScalarType::Float8_e5m2},
    Dtype{"F8_E4M3", 8, at::ScalarType::Float8_e4m3fn},
    Dtype{"F8_E8M0", 8, at::ScalarType::Float8_e8m0fnu},
    Dtype{"F8_E4M3FNUZ", 8, at::ScalarType::Float8_e4m3fnuz},
    Dtype{"F8_E5M2FNUZ", 8, at::ScalarType::Float8_e5m2fnuz},
    Dtype{"I16", 16, at::kShort},
    Dtype{"U16", 16, at::ScalarType::UInt16},
    Dtype{"F16", 16, at::kHalf},
    Dtype{"BF16", 16, at::kBFloat16},
    Dtype{"I32", 32, at::kInt},
    Dtype{"U32", 32, at::ScalarType::UInt32},
    Dtype{"F32", 32, at::kFloat},
    Dtype{"C64", 64, at::kComplexFloat},
    Dtype{"F64", 64, at::kDouble},
    Dtype{"I64", 64, at::kLong},
    Dtype{"U64", 64, at::ScalarType::UInt64},
};

const Dtype* find_dtype(std::string_view name) {
  const auto it = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const Dtype& d) { return d.name == name; });
  return it == kDtypes.end() ? nullptr : &*it;
}

std::size_t rank(std::string_view dtype) { return static_cast<std::size_t>(find_dtype(dtype) - kDtypes.data()); }

std::string list(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

/// Position of the first byte that does not belong to UTF-8 (RFC 3629: no overlong forms, surrogates or values beyond
/// U+10FFFF); npos when there is none.
std::size_t find_non_utf8(std::string_view s) {
  const auto byte = [&](std::size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0U; };
  for (std::size_t i = 0; i < s.size();) {
    const unsigned c = byte(i);
    std::size_t more = 0;
    unsigned low = 0x80, high = 0xBF;  // of the second byte
    if (c < 0x80) {
      ++i;
      continue;
    }
    if (c >= 0xC2 && c <= 0xDF) {
      more = 1;
    } else if (c >= 0xE0 && c <= 0xEF) {
      more = 2;
      if (c == 0xE0) low = 0xA0;
      if (c == 0xED) high = 0x9F;
    } else if (c >= 0xF0 && c <= 0xF4) {
      more = 3;
      if (c == 0xF0) low = 0x90;
      if (c == 0xF4) high = 0x8F;
    } else {
      return i;
    }
    if (byte(i + 1) < low || byte(i + 1) > high) return i;
    for (std::size_t k = 2; k <= more; ++k)
      if (byte(i + k) < 0x80 || byte(i + k) > 0xBF) return i;
    i += 1 + more;
  }
  return std::string_view::npos;
}

/// Reads the header's events. What breaks a rule of the format is remembered, not thrown, until the text is known to be
/// JSON; so a header that is wrong in both ways is HeaderNotJson.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata;

  void finish() {
    if (syntax_) throw *syntax_;
    if (rule_) throw *rule_;
  }

  bool null() override { return scalar("null"); }
  bool boolean(bool) override { return scalar("a boolean"); }
  bool number_integer(number_integer_t) override { return scalar("a negative number"); }
  bool number_float(number_float_t, const string_t& text) override { return scalar(text); }
  bool binary(binary_t&) override { return scalar("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (where_ == Where::shape || where_ == Where::offsets) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        return scalar(std::to_string(value));
      (where_ == Where::shape ? shape_ : offsets_).push_back(static_cast<std::int64_t>(value));
      return true;
    }
    return scalar(std::to_string(value));
  }

  bool string(string_t& value) override {
    if (where_ == Where::metadata) {
      metadata[key_] = value;
      return true;
    }
    if (where_ == Where::entry && field_ == "dtype") {
      entry_.dtype = value;
      return true;
    }
    return scalar(fmt::format("'{}'", escaped(value)));
  }

  bool start_object(std::size_t) override {
    if (!enter()) return false;
    if (where_ == Where::start) {
      where_ = Where::top;
    } else if (where_ == Where::top) {
      if (key_ == kMetadata) {
        where_ = Where::metadata;
      } else {
        where_ = Where::entry;
        entry_ = SafetensorsEntry{key_, {}, {}, 0, 0};
        shape_.clear();
        offsets_.clear();
      }
      keys_.clear();
    } else {
      scalar("an object");
      skip();
    }
    return true;
  }

  bool key(string_t& name) override {
    if (where_ == Where::top) {
      key_ = name;
      if (!names_.insert(name).second) broken(ErrorCode::DuplicateKey, "duplicate key '{}'", escaped(name));
    } else if (where_ == Where::entry || where_ == Where::metadata) {
      if (!keys_.insert(name).second) {
        broken(ErrorCode::DuplicateKey, "duplicate key '{}' in {}", escaped(name),
               where_ == Where::entry ? fmt::format("tensor '{}'", escaped(entry_.name)) : std::string(kMetadata));
      }
      if (where_ == Where::metadata) {
        key_ = name;
      } else {
        field_ = name;
        if (name != "dtype" && name != "shape" && name != "data_offsets") {
          broken(ErrorCode::BadTensorEntry, "tensor '{}' has a field '{}'; expected dtype, shape and data_offsets only",
                 escaped(entry_.name), escaped(name));
        }
      }
    }
    return true;
  }

  bool end_object() override {
    if (leave()) return true;
    if (where_ == Where::entry) {
      finish_entry();
      where_ = Where::top;
    } else if (where_ == Where::metadata) {
      where_ = Where::top;
    }
    return true;
  }

  bool start_array(std::size_t) override {
    if (!enter()) return false;
    if (where_ == Where::entry && field_ == "shape") {
      where_ = Where::shape;
    } else if (where_ == Where::entry && field_ == "data_offsets") {
      where_ = Where::offsets;
    } else {
      scalar("an array");
      skip();
    }
    return true;
  }

  bool end_array() override {
    if (!leave()) where_ = Where::entry;
    return true;
  }

  bool parse_error(std::size_t position, const std::string& token, const nlohmann::detail::exception&) override {
    const std::string what = fmt::format("the header is not JSON at byte {}, near '{}'", position, escaped(token));
    // `01` is a number to people and two tokens to a parser; say what it spoils.
    const bool number = !token.empty() && token.find_first_not_of("0123456789.eE+-") == std::string::npos;
    const ErrorCode code = number && where_ == Where::shape     ? ErrorCode::BadShape
                           : number && where_ == Where::offsets ? ErrorCode::BadOffsets
                                                                : ErrorCode::HeaderNotJson;
    syntax_ = Error(code, what);
    return false;
  }

 private:
  enum class Where { start, top, metadata, entry, shape, offsets };

  template <typename... Args>
  void broken(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
    if (!rule_) rule_ = Error(code, fmt::format(format, std::forward<Args>(args)...));
  }

  /// A value that may not stand here. Always true: parsing goes on.
  bool scalar(std::string_view what) {
    if (skipping_ > 0) return true;
    const std::string tensor = escaped(where_ == Where::top ? key_ : entry_.name);
    switch (where_) {
      case Where::start:
        broken(ErrorCode::HeaderNotJson, "the header is {}; expected an object", what);
        break;
      case Where::top:
        if (key_ == kMetadata) {
          broken(ErrorCode::BadMetadata, "__metadata__ is {}; expected an object of strings", what);
        } else {
          broken(ErrorCode::BadTensorEntry, "tensor '{}' is {}; expected an object", tensor, what);
        }
        break;
      case Where::metadata:
        broken(ErrorCode::BadMetadata, "'{}' in __metadata__ is {}; expected a string", escaped(key_), what);
        break;
      case Where::entry:
        broken(field_ == "shape"          ? ErrorCode::BadShape
               : field_ == "data_offsets" ? ErrorCode::BadOffsets
                                          : ErrorCode::BadTensorEntry,
               "{} of tensor '{}' is {}", escaped(field_), tensor, what);
        break;
      case Where::shape:
        broken(ErrorCode::BadShape, "shape of tensor '{}' contains {}; expected whole numbers from 0 to 2^63 - 1",
               tensor, what);
        break;
      case Where::offsets:
        broken(ErrorCode::BadOffsets,
               "data_offsets of tensor '{}' contain {}; expected two whole numbers from 0 to 2^63 - 1", tensor, what);
        break;
    }
    return true;
  }

  bool enter() {
    if (skipping_ > 0) ++skipping_;
    if (++depth_ <= kMaxDepth) return true;
    syntax_ = fail(ErrorCode::HeaderNotJson, "the header is nested more than {} deep", kMaxDepth);
    return false;
  }
  /// True when what ends here was skipped.
  bool leave() {
    --depth_;
    if (skipping_ == 0) return false;
    --skipping_;
    return true;
  }
  void skip() {
    if (skipping_ == 0) skipping_ = 1;
  }

  void finish_entry() {
    const std::string name = escaped(entry_.name);
    for (const char* field : {"dtype", "shape", "data_offsets"})
      if (!keys_.contains(field)) broken(ErrorCode::BadTensorEntry, "tensor '{}' has no {}", name, field);
    if (rule_) return;

    const Dtype* dtype = find_dtype(entry_.dtype);
    if (dtype == nullptr) {
      broken(ErrorCode::UnknownDtype, "tensor '{}' has the unknown dtype '{}'", name, escaped(entry_.dtype));
      return;
    }
    if (shape_.size() > kMaxDims) {
      broken(ErrorCode::TooManyDims, "tensor '{}' has {} dimensions; at most {} are supported", name, shape_.size(),
             kMaxDims);
      return;
    }
    if (offsets_.size() != 2 || offsets_[0] > offsets_[1]) {
      broken(ErrorCode::BadOffsets, "data_offsets of tensor '{}' are {}; expected [begin, end]", name, list(offsets_));
      return;
    }
    // Strides are products of the dimensions that are not 0, so these must fit as well.
    std::vector<std::int64_t> strides = shape_;
    for (std::int64_t& dim : strides) dim = std::max<std::int64_t>(dim, 1);
    const auto elements = checked_product(std::span<const std::int64_t>(shape_));
    const auto bits = elements ? checked_mul<std::uint64_t>(*elements, dtype->bits) : std::nullopt;
    if (!bits || !checked_product(std::span<const std::int64_t>(strides))) {
      broken(ErrorCode::SizeOverflow, "tensor '{}': the size of shape {} in {} does not fit in 64 bits", name,
             list(shape_), entry_.dtype);
      return;
    }
    if (*bits % 8 != 0) {
      broken(ErrorCode::MisalignedSubByte, "tensor '{}': {} elements of {} are no whole number of bytes", name,
             *elements, entry_.dtype);
      return;
    }
    entry_.begin = static_cast<std::uint64_t>(offsets_[0]);
    entry_.end = static_cast<std::uint64_t>(offsets_[1]);
    if (*bits / 8 != entry_.nbytes()) {
      broken(ErrorCode::SizeMismatch, "tensor '{}': shape {} in {} takes {} bytes, data_offsets say {}", name,
             list(shape_), entry_.dtype, *bits / 8, entry_.nbytes());
      return;
    }
    entry_.shape = shape_;
    entries.push_back(std::move(entry_));
  }

  Where where_ = Where::start;
  int depth_ = 0;
  int skipping_ = 0;   // depth inside a value that may not stand where it stands
  std::string key_;    // at the top or in the metadata
  std::string field_;  // in an entry
  std::set<std::string> names_;
  std::set<std::string> keys_;
  SafetensorsEntry entry_;
  std::vector<std::int64_t> shape_;
  std::vector<std::int64_t> offsets_;
  std::optional<Error> rule_;
  std::optional<Error> syntax_;
};

HeaderReader read_header(std::string_view text) {
  const std::size_t bad = find_non_utf8(text);
  check(bad == std::string_view::npos, ErrorCode::HeaderNotUtf8, "the header is not UTF-8 at byte {}", bad);
  // The parser takes a byte order mark and the end of the text at a NUL; JSON knows neither.
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  check(first != std::string_view::npos && text[first] == '{', ErrorCode::HeaderNotJson,
        "the header does not begin with '{{'");
  check(text.find('\0') == std::string_view::npos, ErrorCode::HeaderNotJson, "the header contains a NUL byte");
  HeaderReader reader;
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  reader.finish();
  return reader;
}

std::string json_string(std::string_view s) { return nlohmann::json(s).dump(); }

}  // namespace

std::optional<at::ScalarType> safetensors_scalar_type(std::string_view dtype) {
  const Dtype* found = find_dtype(dtype);
  return found == nullptr ? std::nullopt : found->type;
}

std::string_view safetensors_dtype(at::ScalarType type) {
  for (const Dtype& dtype : kDtypes)
    if (dtype.type == type) return dtype.name;
  throw fail(ErrorCode::UnsupportedDtype, "safetensors cannot hold {} tensors", c10::toString(type));
}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile out(InputFile::open(path));
  try {
    const std::uint64_t size = out.file_.size();
    check(size >= 8, ErrorCode::HeaderTooSmall, "{} bytes; a safetensors file has at least 8", size);
    std::uint64_t length = 0;
    out.file_.read(0, std::as_writable_bytes(std::span(&length, 1)));
    check(length <= kMaxHeader, ErrorCode::HeaderTooLarge, "the header claims {} bytes; at most {} are allowed", length,
          kMaxHeader);
    check(length <= size - 8, ErrorCode::HeaderTruncated, "the header claims {} bytes and {} follow", length, size - 8);
    std::string text(length, '\0');
    out.file_.read(8, std::as_writable_bytes(std::span(text)));
    out.data_ = 8 + length;

    HeaderReader header = read_header(text);
    out.entries_ = std::move(header.entries);
    out.metadata_ = std::move(header.metadata);
    std::sort(out.entries_.begin(), out.entries_.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
      return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
    std::uint64_t position = 0;
    for (std::size_t i = 0; i < out.entries_.size(); ++i) {
      const SafetensorsEntry& entry = out.entries_[i];
      check(entry.begin == position, ErrorCode::HoleOrOverlap,
            "tensor '{}' begins at byte {} of the data; expected {}, where the one before it ends", escaped(entry.name),
            entry.begin, position);
      position = entry.end;
      out.index_[entry.name] = i;
    }
    check(position == size - out.data_, ErrorCode::TrailingOrMissingData,
          "the tensors end at byte {} of the data, the file at byte {}", position, size - out.data_);
  } catch (Error& error) {
    throw error.in(escaped(path.string()));
  }
  return out;
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &entries_[it->second];
}

at::Tensor SafetensorsFile::read(std::string_view name) const {
  const SafetensorsEntry* entry = find(name);
  if (entry == nullptr) {
    std::vector<std::string> names;
    for (const auto& [known, position] : index_) names.push_back(known);
    throw fail(ErrorCode::NoSuchTarget, "{} has no tensor '{}'{}", escaped(file_.path().string()), escaped(name),
               did_you_mean(name, names));
  }
  return read(*entry);
}

at::Tensor SafetensorsFile::read(const SafetensorsEntry& entry) const {
  const std::optional<at::ScalarType> type = safetensors_scalar_type(entry.dtype);
  const at::Tensor out =
      type ? at::empty(entry.shape, *type) : at::empty({static_cast<std::int64_t>(entry.nbytes())}, at::kByte);
  file_.read(data_ + entry.begin, {static_cast<std::byte*>(out.mutable_data_ptr()), entry.nbytes()});
  return out;
}

void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorsItem> given,
                       std::map<std::string, std::string> metadata, const SafetensorsWriteOptions& options) {
  std::vector<SafetensorsItem> items(given.begin(), given.end());
  metadata["format"] = "pt";
  std::set<std::string_view> names;
  for (SafetensorsItem& item : items) {
    const std::string shown = escaped(item.name);
    check(item.name != kMetadata, ErrorCode::BadName, "a tensor cannot be named __metadata__, a reserved name");
    check(find_non_utf8(item.name) == std::string::npos, ErrorCode::BadName, "the tensor name '{}' is not UTF-8",
          shown);
    check(names.insert(item.name).second, ErrorCode::BadName, "there are two tensors named '{}'", shown);
    if (item.dtype.empty()) {
      check(item.tensor.layout() == at::kStrided && item.tensor.is_cpu(), ErrorCode::UnsupportedDtype,
            "tensor '{}' is sparse or not in main memory; give a dense CPU tensor", shown);
      item.dtype = safetensors_dtype(item.tensor.scalar_type());
      item.shape = item.tensor.sizes().vec();
    }
  }
  for (const auto& [key, value] : metadata) {
    check(find_non_utf8(key) == std::string::npos && find_non_utf8(value) == std::string::npos, ErrorCode::BadMetadata,
          "metadata '{}' is not UTF-8", escaped(key));
  }
  std::sort(items.begin(), items.end(), [](const SafetensorsItem& a, const SafetensorsItem& b) {
    const std::size_t rank_a = rank(a.dtype), rank_b = rank(b.dtype);
    return rank_a != rank_b ? rank_a > rank_b : a.name < b.name;
  });

  std::string header = "{\"__metadata__\":{";
  for (const auto& [key, value] : metadata) {
    if (header.back() != '{') header += ',';
    header += json_string(key) + ":" + json_string(value);
  }
  header += "}";
  std::uint64_t position = 0;
  for (const SafetensorsItem& item : items) {
    const std::uint64_t end = position + item.tensor.nbytes();
    header += fmt::format(",{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", json_string(item.name),
                          item.dtype, fmt::join(item.shape, ","), position, end);
    position = end;
  }
  header += '}';
  header.append((8 - header.size() % 8) % 8, ' ');
  check(header.size() <= kMaxHeader, ErrorCode::HeaderTooLarge,
        "names and metadata take {} bytes; the format allows {}", header.size(), kMaxHeader);

  AtomicWriteOptions atomic{options.overwrite, options.source, 8 + header.size() + position, options.verify};
  write_file_atomically(path, atomic, [&](OutputFile& file) {
    const std::uint64_t length = header.size();
    file.write(std::as_bytes(std::span(&length, 1)));
    file.write(header);
    for (const SafetensorsItem& item : items) {
      const at::Tensor values = item.tensor.contiguous().resolve_conj().resolve_neg();
      file.write({static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()});
    }
  });
}

void write_safetensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors,
                       std::map<std::string, std::string> metadata, const SafetensorsWriteOptions& options) {
  std::vector<SafetensorsItem> items;
  for (const auto& [name, tensor] : tensors) items.push_back({name, tensor});
  write_safetensors(path, std::span<const SafetensorsItem>(items), std::move(metadata), options);
}

}  // namespace tersor
