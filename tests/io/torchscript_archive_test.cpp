#include "tersor/io/torchscript_archive.hpp"

#include <vector>

#include <nlohmann/json.hpp>

#include "temporary.hpp"
#include "tersor/io/zip.hpp"

using namespace tersor;

namespace {

template <typename T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

struct Record {
  std::string name;
  std::string bytes;
  std::uint16_t method = 0;
  std::uint32_t size = 0;  ///< when it is not that of `bytes`
};

/// A zip archive without zip64, and with the local names changed by `local_suffix`.
std::string zip(const std::vector<Record>& records) {
  std::string out, directory;
  for (const Record& r : records) {
    const auto offset = static_cast<std::uint32_t>(out.size());
    const auto stored = static_cast<std::uint32_t>(r.bytes.size());
    const std::uint32_t size = r.size != 0 ? r.size : stored;
    const auto fields = [&](std::string& to) {
      put<std::uint16_t>(to, 0);  // version
      put<std::uint16_t>(to, 0);  // flags
      put(to, r.method);
      put<std::uint32_t>(to, 0);  // time
      put<std::uint32_t>(to, 0);  // checksum
      put(to, stored);
      put(to, size);
      put(to, static_cast<std::uint16_t>(r.name.size()));
      put<std::uint16_t>(to, 0);  // extra
    };
    put<std::uint32_t>(out, 0x04034b50);
    fields(out);
    out += r.name + r.bytes;
    put<std::uint32_t>(directory, 0x02014b50);
    put<std::uint16_t>(directory, 0);
    fields(directory);
    put<std::uint16_t>(directory, 0);  // comment
    put<std::uint16_t>(directory, 0);  // disk
    put<std::uint16_t>(directory, 0);
    put<std::uint32_t>(directory, 0);
    put(directory, offset);
    directory += r.name;
  }
  const auto start = static_cast<std::uint32_t>(out.size());
  out += directory;
  put<std::uint32_t>(out, 0x06054b50);
  put<std::uint32_t>(out, 0);
  put(out, static_cast<std::uint16_t>(records.size()));
  put(out, static_cast<std::uint16_t>(records.size()));
  put(out, static_cast<std::uint32_t>(directory.size()));
  put(out, start);
  put<std::uint16_t>(out, 0);
  return out;
}

const std::string kNothing = "\x80\x02).";

/// A TorchScript archive around `data.pkl`.
std::vector<Record> model(const std::string& pickle, std::vector<Record> more = {}) {
  std::vector<Record> out{{"m/data.pkl", pickle}, {"m/constants.pkl", kNothing}, {"m/code/__torch__.py", "class M"}};
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

ErrorCode scan(const std::string& bytes) {
  const TemporaryDirectory dir;
  write_bytes(dir / "m.pt", bytes);
  return error_of([&] { scan_torchscript(dir / "m.pt"); }).code();
}

void scan_passes(const std::string& bytes) {
  const TemporaryDirectory dir;
  write_bytes(dir / "m.pt", bytes);
  CHECK_NOTHROW(scan_torchscript(dir / "m.pt"));
}

std::string text(std::string_view s) {
  std::string out = "X";
  put(out, static_cast<std::uint32_t>(s.size()));
  return out.append(s);
}

std::string integer(std::int32_t n) {
  std::string out = "J";
  put(out, n);
  return out;
}

std::string tuple(std::initializer_list<std::int32_t> items) {
  std::string out = "(";
  for (const std::int32_t item : items) out += integer(item);
  return out + "t";
}

std::string storage(std::int32_t numel, std::string_view key = "0", std::string_view type = "FloatStorage") {
  return "(" + text("storage") + "ctorch\n" + std::string(type) + "\n" + text(key) + text("cpu") + integer(numel) +
         "tQ";
}

std::string tensor(const std::string& storage, std::int32_t offset, std::initializer_list<std::int32_t> sizes,
                   std::initializer_list<std::int32_t> strides) {
  return "\x80\x02"
         "ctorch._utils\n_rebuild_tensor_v2\n(" +
         storage + integer(offset) + tuple(sizes) + tuple(strides) +
         "\x89"
         "ccollections\nOrderedDict\n)RtR.";
}

const Record kFour{"m/data/0", std::string(16, 'x')};

}  // namespace

TEST_CASE("every TorchScript file of LibTorch passes the scan") {
  int seen = 0;
  for (const char* folder : {"good", "cases", "fashion"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(test_data(folder))) {
      const std::string file = entry.path().filename();
      if (entry.path().extension() != ".pt" || file.find("state_dict") != file.npos ||
          file == "cnn_checkpoint_nested.pt")
        continue;
      INFO(entry.path());
      ++seen;
      CHECK(sniff(entry.path()) == FileKind::torchscript);
      CHECK_NOTHROW(scan_torchscript(entry.path()));
    }
  }
  CHECK(seen >= 20);
}

TEST_CASE("pickles that are no TorchScript are refused with the way to convert them") {
  for (const char* file : {"cnn_state_dict.pt", "cnn_checkpoint_nested.pt", "cnn_state_dict_legacy.pt"}) {
    INFO(file);
    const std::filesystem::path path = test_data("good") / file;
    for (const Error& error : {error_of([&] { sniff(path); }), error_of([&] { scan_torchscript(path); })}) {
      CHECK(error.code() == ErrorCode::UnsupportedFormat);
      CHECK(error.message().find("weights_only=True") != std::string::npos);
    }
  }
}

TEST_CASE("every broken .pt fixture is refused as it is") {
  int seen = 0;
  for (const auto& entry : std::filesystem::directory_iterator(test_data("bad"))) {
    if (entry.path().extension() != ".pt") continue;
    INFO(entry.path());
    ++seen;
    CHECK(error_of([&] { sniff(entry.path()); }).code() == ErrorCode::UnsupportedFormat);
    CHECK(error_of([&] { scan_torchscript(entry.path()); }).code() == ErrorCode::UnsupportedFormat);
  }
  CHECK(seen >= 8);
}

TEST_CASE("the broken pickles of the fixtures are found out inside a TorchScript archive too") {
  const auto manifest = nlohmann::json::parse(read_bytes(test_data("bad/manifest.json")));
  for (const auto& row : manifest) {
    if (row["format"] != "pt") continue;
    const std::string file = row["file"], expected = row["expect"];
    INFO(file << " expects " << expected);
    const InputFile input = InputFile::open(test_data("bad/" + file));
    const ZipArchive archive(input);
    std::vector<Record> records{{"archive/constants.pkl", kNothing}, {"archive/code/__torch__.py", "class M"}};
    for (const ZipRecord& record : archive.records()) {
      const std::vector<std::byte> bytes = archive.read(record);
      records.push_back({record.name, std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size())});
    }
    CHECK(name(scan(zip(records))) == expected);
  }
}

TEST_CASE("files are told apart by content") {
  const TemporaryDirectory dir;
  std::filesystem::copy_file(test_data("good/all_dtypes.safetensors"), dir / "weights.pt");
  CHECK(sniff(dir / "weights.pt") == FileKind::safetensors);
  std::filesystem::copy_file(test_data("good/cnn_script.pt"), dir / "script.safetensors");
  CHECK(sniff(dir / "script.safetensors") == FileKind::torchscript);
  for (const auto& entry : std::filesystem::directory_iterator(test_data("bad")))
    if (entry.path().extension() == ".safetensors") CHECK(sniff(entry.path()) == FileKind::safetensors);

  const auto code = [](const std::filesystem::path& path) { return error_of([&] { sniff(path); }).code(); };
  CHECK(code(test_data("good")) == ErrorCode::UnsupportedFormat);
  CHECK(code(test_data("bad/gg02_huge_counts.gguf")) == ErrorCode::UnsupportedFormat);
  CHECK(code(test_data("bad/manifest.json")) == ErrorCode::UnknownFormat);
  CHECK(code(write_bytes(dir / "empty", "")) == ErrorCode::UnknownFormat);
  CHECK(code(write_bytes(dir / "short", "PK\3\4")) == ErrorCode::BadZip);
  CHECK(code(dir / "missing") == ErrorCode::IoError);
}

TEST_CASE("tensors must lie inside their storages, and storages in records of their size") {
  scan_passes(zip(model(tensor(storage(4), 0, {2, 2}, {2, 1}), {kFour})));
  scan_passes(zip(model(tensor(storage(4), 3, {1}, {1000}), {kFour})));
  scan_passes(zip(model(tensor(storage(4), 0, {1000}, {0}), {kFour})));
  scan_passes(zip(model(tensor(storage(4), 4, {0, 9}, {9, 1}), {kFour})));
  scan_passes(zip(model(tensor(storage(0), 0, {0}, {1}))));
  scan_passes(zip(model(tensor(storage(2, "0", "DoubleStorage"), 1, {}, {}), {kFour})));

  using E = ErrorCode;
  CHECK(scan(zip(model(tensor(storage(4), 1, {2, 2}, {2, 1}), {kFour}))) == E::OutOfBounds);
  CHECK(scan(zip(model(tensor(storage(4), 4, {}, {}), {kFour}))) == E::OutOfBounds);
  CHECK(scan(zip(model(tensor(storage(4), -1, {2}, {1}), {kFour}))) == E::OutOfBounds);
  CHECK(scan(zip(model(tensor(storage(4), 3, {2}, {-1}), {kFour}))) == E::OutOfBounds);
  CHECK(scan(zip(model(tensor(storage(4), 0, {INT32_MAX, INT32_MAX, INT32_MAX}, {INT32_MAX, INT32_MAX, INT32_MAX}),
                       {kFour}))) == E::OutOfBounds);
  CHECK(scan(zip(model(tensor(storage(4), 0, {INT32_MAX, INT32_MAX, INT32_MAX}, {0, 0, 0}), {kFour}))) ==
        E::SizeOverflow);
  CHECK(scan(zip(model(tensor(storage(4), 0, {2}, {1, 1}), {kFour}))) == E::BadPickle);
  CHECK(scan(zip(model(tensor(storage(4), 0, {-2}, {1}), {kFour}))) == E::BadPickle);
  CHECK(scan(zip(model(tensor(storage(-4), 0, {2}, {1}), {kFour}))) == E::BadPickle);
  CHECK(scan(zip(model(tensor(storage(5), 0, {2}, {1}), {kFour}))) == E::SizeMismatch);
  CHECK(scan(zip(model(tensor(storage(3), 0, {2}, {1}), {kFour}))) == E::SizeMismatch);
  CHECK(scan(zip(model(tensor(storage(4, "0", "DoubleStorage"), 0, {2}, {1}), {kFour}))) == E::SizeMismatch);
  CHECK(scan(zip(model(tensor(storage(4, "1"), 0, {2}, {1}), {kFour}))) == E::MissingStorage);
  CHECK(scan(zip(model(tensor(storage(4, "../data/0"), 0, {2}, {1}), {kFour}))) == E::MissingStorage);
  CHECK(scan(zip(model(tensor(storage(4, "0", "UntypedStorage"), 0, {2}, {1}), {kFour}))) == E::UnsupportedDtype);
}

TEST_CASE("constants.pkl is checked like data.pkl") {
  std::vector<Record> records = model(kNothing, {{"m/constants/0", std::string(8, 'x')}});
  records[1].bytes = tensor(storage(4), 0, {2}, {1});
  CHECK(scan(zip(records)) == ErrorCode::SizeMismatch);
}

TEST_CASE("pickles name nothing but what a TorchScript file needs") {
  const auto global = [](const std::string& module, const std::string& name) {
    return zip(
        model("\x80\x02"
              "c" +
              module + "\n" + name + "\n."));
  };
  scan_passes(global("__torch__.torch.classes.tersor", "PackedLinear"));
  scan_passes(global("torch.jit._pickle", "restore_type_tag"));
  scan_passes(global("torch", "per_channel_affine"));
  for (const auto& [module, name] :
       std::vector<std::pair<const char*, const char*>>{{"os", "system"},
                                                        {"builtins", "eval"},
                                                        {"__builtin__", "print"},
                                                        {"torch._utils", "_rebuild_sparse_tensor"},
                                                        {"torch.hub", "load"},
                                                        {"__torch__x", "y"},
                                                        {"collections", "deque"},
                                                        {"torch.jit._pickle.os", "x"}}) {
    INFO(module << '.' << name);
    CHECK(scan(global(module, name)) == ErrorCode::ForbiddenGlobal);
  }
}

TEST_CASE("pickles that are no pickles") {
  const auto bad = [](const std::string& pickle) {
    INFO(pickle.substr(0, 20));
    CHECK(scan(zip(model(pickle))) == ErrorCode::BadPickle);
  };
  bad("");
  bad("\x80\x02");                                     // no end
  bad("\x80\x02.");                                    // nothing to give back
  bad("\x80\x02)).");                                  // two values
  bad("\x80\x02(.");                                   // an open mark
  bad("\x80\x02).x");                                  // bytes behind the end
  bad("\x80\x04).");                                   // another protocol
  bad("\x80\x02(a.");                                  // a mark is no value
  bad("\x80\x02t.");                                   // no mark
  bad("\x80\x02h\x05.");                               // memo of nothing
  bad(std::string("\x80\x02)r\xFF\xFF\xFF\x7F.", 9));  // LibTorch would make room for 2^31 values
  bad(std::string("\x80\x02X\xFF\xFF\xFF\xFF.", 8));   // a text of 4 GiB
  bad(std::string("\x80\x02\x8A\x09", 4) + "123456789.");
  bad(std::string("\x80\x02\x8B\x00\x00\x00\x80.", 8));  // LONG4 of 2^31 bytes
  bad("\x80\x02"
      "cbuiltins\ncomplex");  // a line without end
  bad("\x80\x02"
      "K\x01)R.");  // LibTorch would call the global of that number
  bad("\x80\x02"
      "c__torch__\nM\nK\x01"
      "b.");  // a state for a class
  bad("\x80\x02]q\x01h\x01"
      "a.");  // a list inside itself
  bad("\x80\x02"
      "}(K\x01u.");              // a key without a value
  bad("\x80\x02]K\x01K\x02s.");  // a list used as a dictionary
  bad("\x80\x02" + std::string(1'000'000, '(') + ").");
  bad("\x80\x02" + std::string(5'000'000, ')') + ".");
  // Nesting from the inside out and from the outside in.
  bad("\x80\x02)" + std::string(100'000, '\x85') + ".");
  std::string outside = "\x80\x02]r" + std::string("\0\0\0\0", 4);
  for (std::uint32_t i = 1; i < 2000; ++i) {
    outside += "]r";
    put(outside, i);
    outside += "a";  // the new list goes into the one before
    outside += "j";
    put(outside, i);
  }
  // 2000 lists stay on the stack; gather them into one tuple.
  outside.insert(2, "(");
  bad(outside + "t.");
  scan_passes(zip(model("\x80\x02)" + std::string(900, '\x85') + ".")));
}

TEST_CASE("archives that two readers could read differently are BadZip") {
  const std::vector<Record> good = model(kNothing, {kFour});
  const std::string bytes = zip(good);
  scan_passes(bytes);
  CHECK(scan(bytes + "x") == ErrorCode::BadZip);
  CHECK(scan(zip({good[0], good[0], good[1], good[2]})) == ErrorCode::BadZip);
  CHECK(scan(zip({good[0], {"m/DATA.PKL", ""}, good[1], good[2]})) == ErrorCode::BadZip);
  for (const char* bad_name : {"m/../x", "/x", "..", "m\\x"}) {
    INFO(bad_name);
    CHECK(scan(zip(model(kNothing, {{bad_name, ""}}))) == ErrorCode::BadZip);
  }
  CHECK(scan(zip(model(kNothing, {{"m/data/1", "x", 0, 2}}))) == ErrorCode::BadZip);

  std::string changed = bytes;  // the local header of the first record names another
  changed[30] = 'n';
  CHECK(scan(changed) == ErrorCode::BadZip);
  CHECK(scan(zip({{"data.pkl", kNothing}})) == ErrorCode::UnknownFormat);
  CHECK(scan(zip({{"m/readme", "x"}})) == ErrorCode::UnknownFormat);
  CHECK(scan(zip(model(kNothing, {{"m/model.json", "{}"}}))) == ErrorCode::UnsupportedFormat);
}

TEST_CASE("an archive cut at any byte, or with any byte of its directory changed, is refused or still sound") {
  const TemporaryDirectory dir;
  const std::string whole = read_bytes(test_data("good/ts_weight_only_int8_from_cpp.pt"));
  for (std::size_t n = 0; n < whole.size(); ++n) {
    INFO(n);
    write_bytes(dir / "cut", std::string_view(whole).substr(0, n));
    CHECK_THROWS_AS(scan_torchscript(dir / "cut"), Error);
  }
  int refused = 0;
  for (std::size_t n = 0; n < whole.size(); ++n) {
    std::string changed = whole;
    changed[n] = static_cast<char>(changed[n] ^ 0xFF);
    write_bytes(dir / "changed", changed);
    try {
      scan_torchscript(dir / "changed");
    } catch (const Error&) {
      ++refused;
    }
  }
  CHECK(refused > 100);
}

TEST_CASE("only source text may be compressed, and not without bounds") {
  scan_passes(zip(model(kNothing, {{"m/code/x.py", "deflated", 8, 100}})));
  CHECK(scan(zip(model(kNothing, {{"m/data/1", "deflated", 8, 100}}))) == ErrorCode::CompressedRecord);
  CHECK(scan(zip(model(kNothing, {{"m/code/x.py", "deflated", 8, 1U << 31}}))) == ErrorCode::CompressedRecord);
  CHECK(scan(zip(model(kNothing, {{"m/code/x.py", "bzip2", 12, 100}}))) == ErrorCode::CompressedRecord);
}
