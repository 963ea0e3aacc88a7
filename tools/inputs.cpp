#include "inputs.hpp"

#include <array>
#include <charconv>
#include <memory>
#include <random>
#include <span>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <openssl/evp.h>

#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor::cli {
namespace {

constexpr std::array<std::pair<std::string_view, at::ScalarType>, 7> dtypes{{{"f32", at::kFloat},
                                                                             {"f16", at::kHalf},
                                                                             {"bf16", at::kBFloat16},
                                                                             {"f64", at::kDouble},
                                                                             {"i64", at::kLong},
                                                                             {"i32", at::kInt},
                                                                             {"bool", at::kBool}}};

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string_view trim(std::string_view s) {
  s.remove_prefix(std::min(s.find_first_not_of(' '), s.size()));
  s.remove_suffix(s.size() - (s.find_last_not_of(' ') + 1));
  return s;
}

}  // namespace

std::vector<InputSpec> parse_input_shape(std::string_view text) {
  constexpr std::int64_t most = std::int64_t{1} << 31;  // elements; a typing error must not become an allocation
  std::vector<InputSpec> specs;
  for (std::string_view part : split(text, ';')) {
    InputSpec spec;
    const std::size_t colon = part.find(':');
    if (colon != std::string_view::npos) {
      const std::string_view word = trim(part.substr(colon + 1));
      const auto* known = std::find_if(dtypes.begin(), dtypes.end(), [&](const auto& d) { return d.first == word; });
      check(known != dtypes.end(), ErrorCode::BadUsage,
            "--input-shape '{}': unknown type '{}'; expected f32, f16, bf16, f64, i64, i32 or bool", escaped(part),
            escaped(word));
      spec.dtype = known->second;
    }
    std::int64_t elements = 1;
    for (std::string_view size : split(part.substr(0, colon), ',')) {
      size = trim(size);
      std::int64_t n = 0;
      const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), n);
      check(error == std::errc{} && end == size.data() + size.size() && n > 0, ErrorCode::BadUsage,
            "--input-shape '{}': expected sizes of at least 1 such as 1,3,32,32 or 1,16:i64, several inputs separated "
            "by ';'",
            escaped(part));
      check(n <= most / elements, ErrorCode::BadUsage, "--input-shape '{}' asks for more than 2^31 elements",
            escaped(part));
      elements *= n;
      spec.shape.push_back(n);
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

std::vector<at::Tensor> make_inputs(const std::vector<InputSpec>& specs) {
  std::mt19937_64 random(0x7e4504);
  std::vector<at::Tensor> inputs;
  for (const InputSpec& spec : specs) {
    if (spec.dtype == at::kBool) {
      inputs.push_back(at::empty(spec.shape, at::kBool).fill_(true));
    } else if (at::isIntegralType(spec.dtype, false)) {
      at::Tensor ids = at::empty(spec.shape, spec.dtype);
      ids.view({-1}).copy_(at::arange(ids.numel(), at::kLong).remainder(2));
      inputs.push_back(ids);
    } else {
      at::Tensor values = at::empty(spec.shape, at::kFloat);
      float* p = values.mutable_data_ptr<float>();
      for (std::int64_t i = 0; i < values.numel(); ++i) p[i] = static_cast<float>(random() >> 40) * 0x1p-23F - 1.0F;
      inputs.push_back(values.to(spec.dtype));
    }
  }
  return inputs;
}

std::vector<at::Tensor> repeat_samples(const Dataset& data, std::int64_t count) {
  check(data.size() > 0, ErrorCode::BadData, "the example file holds no samples");
  const at::Tensor index = at::arange(count, at::kLong).remainder(data.size());
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& input : data.inputs) inputs.push_back(input.index_select(0, index));
  return inputs;
}

AtomicWriteOptions output_options(bool overwrite, const std::filesystem::path& source) {
  AtomicWriteOptions options;
  options.overwrite = overwrite;
  options.source = source;
  return options;
}

std::string source_identity(const std::filesystem::path& path, bool contents) {
  constexpr std::uint64_t block = 1 << 20;
  const InputFile file = InputFile::open(path);
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  bool ok = context && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1;
  const std::uint64_t end = contents ? file.size() : std::min(file.size(), block);
  std::vector<std::byte> buffer(std::min(end, block));
  for (std::uint64_t offset = 0; offset < end; offset += block) {
    const std::span<std::byte> part(buffer.data(), std::min(block, end - offset));
    file.read(offset, part);
    ok = ok && EVP_DigestUpdate(context.get(), part.data(), part.size()) == 1;
  }
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  ok = ok && EVP_DigestFinal_ex(context.get(), digest.data(), &size) == 1;
  check(ok, ErrorCode::Internal, "OpenSSL refused SHA-256");
  std::string hex;
  for (unsigned i = 0; i < size; ++i) hex += fmt::format("{:02x}", digest[i]);
  return contents ? "sha256:" + hex : fmt::format("sha256-head:{}:{}", hex, file.size());
}

}  // namespace tersor::cli
