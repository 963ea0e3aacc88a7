#include "tersor/io/safetensors.hpp"

#include <set>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <nlohmann/json.hpp>

#include "temporary.hpp"
#include "tersor/core/names.hpp"

using namespace tersor;

namespace {

/// A file with this header and `data` bytes of zeros.
std::string file_bytes(std::string_view header, std::size_t data = 0) {
  const std::uint64_t length = header.size();
  std::string out(reinterpret_cast<const char*>(&length), 8);
  return out.append(header).append(data, '\0');
}

Error open_error(const std::filesystem::path& path) {
  return error_of([&] { SafetensorsFile::open(path); });
}

struct Broken {
  const char* header;
  std::size_t data;
  ErrorCode expected;
};

/// An entry with this shape and 16 bytes of F32.
std::string shaped(std::string_view shape) {
  return R"({"a":{"dtype":"F32","shape":)" + std::string(shape) + R"(,"data_offsets":[0,16]}})";
}

}  // namespace

TEST_CASE("every broken safetensors fixture gives its error class") {
  const auto manifest = nlohmann::json::parse(read_bytes(test_data("bad/manifest.json")));
  int seen = 0;
  for (const auto& row : manifest) {
    const std::string file = row["file"], expected = row["expect"];
    if (row["format"] != "safetensors") continue;
    INFO(file << " expects " << expected);
    ++seen;
    if (file == "st28_name_control.safetensors") {
      const SafetensorsFile opened = SafetensorsFile::open(test_data("bad/" + file));
      for (const SafetensorsEntry& entry : opened.entries()) {
        const std::string shown = escaped(entry.name);
        CHECK(std::none_of(shown.begin(), shown.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; }));
      }
      continue;
    }
    const Error error = open_error(test_data("bad/" + file));
    CHECK(expected.find(name(error.code())) != std::string::npos);
    CHECK(error.context().find(file) != std::string::npos);
  }
  CHECK(seen >= 20);
}

TEST_CASE("headers that break a rule of the format") {
  const TemporaryDirectory dir;
  using E = ErrorCode;
  const std::vector<Broken> rows{
      {"", 0, E::HeaderNotJson},
      {"not json", 0, E::HeaderNotJson},
      {"[]", 0, E::HeaderNotJson},
      {"{}x", 0, E::HeaderNotJson},
      {"\xEF\xBB\xBF{}", 0, E::HeaderNotJson},
      {R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]})", 4, E::HeaderNotJson},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, E::BadOffsets},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4, E::BadOffsets},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4.0]}})", 4, E::BadOffsets},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]}})", 4, E::BadOffsets},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":null}})", 4, E::BadOffsets},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4, E::SizeOverflow},
      {R"({"a":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}})", 0, E::SizeOverflow},
      {R"({"a":{"dtype":"F32","shape":4,"data_offsets":[0,16]}})", 16, E::BadShape},
      {R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2, E::MisalignedSubByte},
      {R"({"a":{"dtype":"F6_E2M3","shape":[3],"data_offsets":[0,3]}})", 3, E::MisalignedSubByte},
      {R"({"a":{"dtype":"f32","shape":[1],"data_offsets":[0,4]}})", 4, E::UnknownDtype},
      {R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})", 4, E::BadTensorEntry},
      {R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4, E::BadTensorEntry},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"extra":{"x":[1]}}})", 4, E::BadTensorEntry},
      {R"({"a":[]})", 0, E::BadTensorEntry},
      {R"({"a":null})", 0, E::BadTensorEntry},
      {R"({"__metadata__":{"a":1}})", 0, E::BadMetadata},
      {R"({"__metadata__":{"a":["x"]}})", 0, E::BadMetadata},
      {R"({"__metadata__":"x"})", 0, E::BadMetadata},
      {R"({"__metadata__":{"a":"x","\u0061":"y"}})", 0, E::DuplicateKey},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, E::DuplicateKey},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4, E::DuplicateKey},
      // Two names for one range, and an empty tensor that begins inside another.
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
       4, E::HoleOrOverlap},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[0],"data_offsets":[2,2]}})",
       4, E::HoleOrOverlap},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 5, E::TrailingOrMissingData},
      {"{}", 1, E::TrailingOrMissingData},
  };
  for (const Broken& row : rows) {
    INFO(row.header);
    CHECK(open_error(write_bytes(dir / "f", file_bytes(row.header, row.data))).code() == row.expected);
  }
  // A NUL does not end a header.
  CHECK(open_error(write_bytes(dir / "f", file_bytes(std::string_view("{}\0\0", 4)))).code() == E::HeaderNotJson);
  CHECK(open_error(write_bytes(dir / "f", file_bytes("{\"\xC0\xAF\":1}"))).code() == E::HeaderNotUtf8);
  CHECK(open_error(write_bytes(dir / "f", file_bytes("{\"\xED\xA0\x80\":1}"))).code() == E::HeaderNotUtf8);
}

TEST_CASE("dimensions are whole numbers from 0 to 2^63 - 1, and at most 64") {
  const TemporaryDirectory dir;
  for (const char* shape : {"[4e0]", "[1e3]", "[4.0]", "[-4]", "[-0]", "[04]", "[01]", "[18446744073709551616]",
                            "[9223372036854775808]", "[\"4\"]", "[[4]]", "[true]", "[null]"}) {
    INFO(shape);
    CHECK(open_error(write_bytes(dir / "f", file_bytes(shaped(shape), 16))).code() == ErrorCode::BadShape);
  }
  std::string ones = "[4";
  for (int i = 1; i < 64; ++i) ones += ",1";
  CHECK(SafetensorsFile::open(write_bytes(dir / "f", file_bytes(shaped(ones + "]"), 16))).read("a").dim() == 64);
  CHECK(open_error(write_bytes(dir / "f", file_bytes(shaped(ones + ",1]"), 16))).code() == ErrorCode::TooManyDims);
}

TEST_CASE("a header length beyond the limit is refused before anything is allocated") {
  const TemporaryDirectory dir;
  for (const std::uint64_t length :
       {std::uint64_t{1} << 63, (std::uint64_t{1} << 63) - 1, std::uint64_t{100'000'001}}) {
    const std::string bytes(reinterpret_cast<const char*>(&length), 8);
    CHECK(open_error(write_bytes(dir / "f", bytes + "{}")).code() == ErrorCode::HeaderTooLarge);
  }
  const std::uint64_t allowed = 100'000'000;
  CHECK(open_error(write_bytes(dir / "f", std::string(reinterpret_cast<const char*>(&allowed), 8))).code() ==
        ErrorCode::HeaderTruncated);
}

TEST_CASE("nesting is limited to 64, and what is nested deeper is not JSON to us") {
  const TemporaryDirectory dir;
  const auto nested = [](std::size_t depth) {
    return "{\"a\":" + std::string(depth, '[') + std::string(depth, ']') + "}";
  };
  CHECK(open_error(write_bytes(dir / "f", file_bytes(nested(63)))).code() == ErrorCode::BadTensorEntry);
  CHECK(open_error(write_bytes(dir / "f", file_bytes(nested(64)))).code() == ErrorCode::HeaderNotJson);
  CHECK(open_error(write_bytes(dir / "f", file_bytes(nested(1'000'000)))).code() == ErrorCode::HeaderNotJson);
}

TEST_CASE("a file cut at any byte is refused") {
  const TemporaryDirectory dir;
  const std::string whole = read_bytes(test_data("good/all_dtypes.safetensors"));
  std::uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);
  for (std::size_t n = 0; n < whole.size(); ++n) {
    INFO(n);
    const ErrorCode expected = n < 8            ? ErrorCode::HeaderTooSmall
                               : n < 8 + header ? ErrorCode::HeaderTruncated
                                                : ErrorCode::TrailingOrMissingData;
    REQUIRE(open_error(write_bytes(dir / "f", std::string_view(whole).substr(0, n))).code() == expected);
  }
}

TEST_CASE("a duplicate name is refused however it is spelled") {
  for (const char* file : {"cases/c-dup-key/dup.safetensors", "cases/c-dup-key/dup_escaped.safetensors"}) {
    const Error error = open_error(test_data(file));
    CHECK(error.code() == ErrorCode::DuplicateKey);
    CHECK(error.message() == "duplicate key 'w'");
  }
}

TEST_CASE("white space around the header and a file without tensors are accepted") {
  const TemporaryDirectory dir;
  CHECK(SafetensorsFile::open(write_bytes(dir / "f", file_bytes("{}"))).entries().empty());
  const SafetensorsFile file =
      SafetensorsFile::open(write_bytes(dir / "f", file_bytes(" \t\r\n" + shaped("[2,2]") + "\n\t\r   ", 16)));
  CHECK(file.entries().size() == 1);
  CHECK(file.read("a").equal(at::zeros({2, 2})));
}

TEST_CASE("every dtype of the reference writer is read, and written back byte for byte") {
  const TemporaryDirectory dir;
  const std::filesystem::path source = test_data("good/all_dtypes.safetensors");
  const SafetensorsFile file = SafetensorsFile::open(source);
  CHECK(file.metadata().at("note") == "üñí");
  std::map<std::string, at::Tensor> tensors;
  for (const SafetensorsEntry& entry : file.entries()) {
    const at::Tensor tensor = file.read(entry);
    CHECK(tensor.sizes() == at::IntArrayRef(entry.shape));
    CHECK(safetensors_dtype(tensor.scalar_type()) == entry.dtype);
    tensors[entry.name] = tensor;
  }
  CHECK(tensors.at("noncontig").stride(1) == 1);
  CHECK(tensors.at("scalar").dim() == 0);
  CHECK(tensors.at("z").numel() == 0);
  write_safetensors(dir / "out", tensors, file.metadata());
  CHECK(read_bytes(dir / "out") == read_bytes(source));
}

TEST_CASE("files of the reference writer with one metadata key are reproduced byte for byte") {
  const TemporaryDirectory dir;
  for (const char* name : {"cases/q-tied/hf/model.safetensors", "cases/c-sidecars/hf/model.safetensors"}) {
    INFO(name);
    const SafetensorsFile file = SafetensorsFile::open(test_data(name));
    std::vector<SafetensorsItem> items;
    for (const SafetensorsEntry& entry : file.entries()) items.insert(items.begin(), {entry.name, file.read(entry)});
    write_safetensors(dir / "out", items, {}, {.overwrite = true});
    CHECK(read_bytes(dir / "out") == read_bytes(test_data(name)));
  }
}

TEST_CASE("sub-byte tensors pass through unchanged") {
  const TemporaryDirectory dir;
  std::string header = R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F6_E3M2","shape":[2,2],"data_offsets":[0,3]},)"
                       R"("b":{"dtype":"F4","shape":[2,3],"data_offsets":[3,6]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::string bytes = file_bytes(header) + "\x01\x02\x03\xAA\xBB\xCC";
  const SafetensorsFile file = SafetensorsFile::open(write_bytes(dir / "in", bytes));
  std::vector<SafetensorsItem> items;
  for (const SafetensorsEntry& entry : file.entries()) {
    CHECK_FALSE(safetensors_scalar_type(entry.dtype).has_value());
    items.push_back({entry.name, file.read(entry), entry.dtype, entry.shape});
  }
  CHECK(items[0].tensor.sizes() == at::IntArrayRef({3}));
  write_safetensors(dir / "out", items);
  CHECK(read_bytes(dir / "out") == bytes);
}

TEST_CASE("the order of the tensors and of the metadata does not reach the file") {
  const TemporaryDirectory dir;
  const at::Tensor a = at::arange(6, at::kFloat).view({2, 3}), b = at::arange(4, at::kHalf),
                   c = at::arange(2, at::kLong);
  write_safetensors(dir / "x", {{"a", a}, {"b", b}, {"c", c}}, {{"z", "1"}, {"k", "2"}});
  write_safetensors(dir / "y", {{"c", c}, {"b", b}, {"a", a.t().contiguous().t()}},
                    {{"k", "2"}, {"z", "1"}, {"format", "np"}});
  const std::string bytes = read_bytes(dir / "x");
  CHECK(bytes == read_bytes(dir / "y"));
  CHECK(bytes.substr(8).starts_with(R"({"__metadata__":{"format":"pt","k":"2","z":"1"},"c":{"dtype":"I64")"));
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  CHECK(header % 8 == 0);
}

TEST_CASE("names are escaped in the header and come back") {
  const TemporaryDirectory dir;
  const std::string name("a\"\\\n\x01\x7Fü/\0z", 11);
  write_safetensors(dir / "f", std::vector<SafetensorsItem>{{name, at::arange(3)}});
  const SafetensorsFile file = SafetensorsFile::open(dir / "f");
  CHECK(file.entries().at(0).name == name);
  CHECK(file.read(name).equal(at::arange(3)));
}

TEST_CASE("what the format cannot hold is refused and nothing is written") {
  const TemporaryDirectory dir;
  const at::Tensor x = at::zeros({2});
  const auto code = [&](const std::vector<SafetensorsItem>& items,
                        const std::map<std::string, std::string>& metadata = {}) {
    return error_of([&] { write_safetensors(dir / "f", items, metadata); }).code();
  };
  CHECK(code({{"__metadata__", x}}) == ErrorCode::BadName);
  CHECK(code({{"a", x}, {"a", x}}) == ErrorCode::BadName);
  CHECK(code({{"\xFF", x}}) == ErrorCode::BadName);
  CHECK(code({{"a", at::zeros({2}, at::kComplexDouble)}}) == ErrorCode::UnsupportedDtype);
  CHECK(code({{"a", x.to_sparse()}}) == ErrorCode::UnsupportedDtype);
  CHECK(code({{"a", x}}, {{"k", "\xFF"}}) == ErrorCode::BadMetadata);
  CHECK(dir.files() == 0);
}

TEST_CASE("an unknown tensor is named with its near misses") {
  const SafetensorsFile file = SafetensorsFile::open(test_data("cases/q-zero-row/weights.safetensors"));
  const Error error = error_of([&] { file.read("fc.wieght"); });
  CHECK(error.code() == ErrorCode::NoSuchTarget);
  CHECK(error.message().find("fc.weight") != std::string::npos);
}

TEST_CASE("a file cut after it was opened is an IoError") {
  const TemporaryDirectory dir;
  write_safetensors(dir / "f", {{"a", at::zeros({100})}});
  const SafetensorsFile file = SafetensorsFile::open(dir / "f");
  std::filesystem::resize_file(dir / "f", 200);
  CHECK(error_of([&] { file.read("a"); }).code() == ErrorCode::IoError);
}

TEST_CASE("many small tensors and a long name take no time to speak of") {
  const TemporaryDirectory dir;
  std::vector<SafetensorsItem> items{{std::string(65536, 'n'), at::zeros({1})}};
  for (int i = 0; i < 100'000; ++i) items.push_back({"tensor." + std::to_string(i), at::empty({0}, at::kFloat)});
  write_safetensors(dir / "f", items);
  const SafetensorsFile file = SafetensorsFile::open(dir / "f");
  CHECK(file.entries().size() == 100'001);
  CHECK(file.read("tensor.99999").numel() == 0);
}
