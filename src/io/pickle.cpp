#include "pickle.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tersor/core/checked.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

constexpr std::size_t kMaxValues = 4'000'000;
constexpr std::uint32_t kMaxDepth = 1000;  // LibTorch destroys nested values recursively
constexpr std::size_t kMaxDims = 64;

using Id = std::uint32_t;

struct Value {
  enum class Kind { other, integer, text, global, tuple, list, dict, storage, object };
  Kind kind = Kind::other;
  std::int64_t number = 0;  ///< an integer, or the elements of a storage
  std::string_view text;    ///< of a text; `module name` of a global
  std::vector<Id> items;    ///< what it holds
};
using Kind = Value::Kind;

/// Bytes of an element of the storages that TorchScript knows; 0 for others.
std::uint64_t item_size(std::string_view global) {
  static constexpr std::pair<std::string_view, std::uint64_t> sizes[] = {
      {"torch FloatStorage", 4},       {"torch DoubleStorage", 8},       {"torch HalfStorage", 2},
      {"torch BFloat16Storage", 2},    {"torch LongStorage", 8},         {"torch IntStorage", 4},
      {"torch ShortStorage", 2},       {"torch CharStorage", 1},         {"torch ByteStorage", 1},
      {"torch BoolStorage", 1},        {"torch ComplexFloatStorage", 8}, {"torch ComplexDoubleStorage", 16},
      {"torch QInt8Storage", 1},       {"torch QUInt8Storage", 1},       {"torch QInt32Storage", 4},
      {"torch QUInt4x2Storage", 1},    {"torch QUInt2x4Storage", 1},     {"torch Float8_e4m3fnStorage", 1},
      {"torch Float8_e5m2Storage", 1}, {"torch UInt16Storage", 2},       {"torch UInt32Storage", 4},
      {"torch UInt64Storage", 8},
  };
  for (const auto& [name, size] : sizes)
    if (name == global) return size;
  return 0;
}

bool allowed_global(std::string_view module, std::string_view name) {
  const auto inside = [&](std::string_view package) {
    return module == package || (module.starts_with(package) && module[package.size()] == '.');
  };
  if (module == "torch._utils") return name == "_rebuild_tensor_v2" || name == "_rebuild_qtensor";
  if (module == "collections") return name == "OrderedDict";
  if (module == "builtins") return name == "complex";
  return inside("__torch__") || module == "torch" || module == "torch.jit._pickle";
}

class Walker {
 public:
  Walker(std::span<const std::byte> bytes, const StorageSize& storage_size)
      : bytes_(bytes), storage_size_(storage_size) {}

  void run() {
    while (step()) {
    }
    check(stack_.size() == 1 && marks_.empty(), ErrorCode::BadPickle, "the pickle ends with {} values on the stack",
          stack_.size());
    check(at_ == bytes_.size(), ErrorCode::BadPickle, "{} bytes follow the end of the pickle", bytes_.size() - at_);
    check_depth(stack_.front());
  }

 private:
  template <typename... Args>
  void require(bool ok, fmt::format_string<Args...> format, Args&&... args) const {
    if (!ok) {
      throw fail(ErrorCode::BadPickle, "byte {}: {}", opcode_at_, fmt::format(format, std::forward<Args>(args)...));
    }
  }

  // --- bytes ---
  std::string_view take(std::uint64_t n) {
    require(n <= bytes_.size() - at_, "{} bytes are announced and {} are left", n, bytes_.size() - at_);
    const std::string_view out(reinterpret_cast<const char*>(bytes_.data()) + at_, n);
    at_ += n;
    return out;
  }
  template <typename T>
  T number() {
    T out;
    std::memcpy(&out, take(sizeof(T)).data(), sizeof(T));
    return out;
  }
  std::string_view line() {
    const std::string_view rest(reinterpret_cast<const char*>(bytes_.data()) + at_, bytes_.size() - at_);
    const std::size_t end = rest.find('\n');
    require(end != rest.npos, "a line is not ended");
    at_ += end + 1;
    return rest.substr(0, end);
  }

  // --- stack ---
  void push(Value value) {
    require(values_.size() < kMaxValues, "more than {} values", kMaxValues);
    stack_.push_back(static_cast<Id>(values_.size()));
    values_.push_back(std::move(value));
  }
  void push(Kind kind, std::int64_t number = 0, std::string_view text = {}) { push(Value{kind, number, text, {}}); }

  Id top() const {
    const std::size_t floor = marks_.empty() ? 0 : marks_.back();
    require(stack_.size() > floor, "the stack is empty");
    return stack_.back();
  }
  Id pop() {
    const Id id = top();
    stack_.pop_back();
    return id;
  }
  void push_mark() {
    require(marks_.size() < std::size_t{4} * kMaxDepth, "more than {} open marks", 4 * kMaxDepth);
    marks_.push_back(stack_.size());
  }
  std::vector<Id> pop_to_mark() {
    require(!marks_.empty(), "no mark is set");
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Id> out(first, stack_.end());
    stack_.erase(first, stack_.end());
    marks_.pop_back();
    return out;
  }
  std::vector<Id> pop_items(int n) {
    std::vector<Id> out(static_cast<std::size_t>(n));
    for (auto it = out.rbegin(); it != out.rend(); ++it) *it = pop();
    return out;
  }
  void push_tuple(std::vector<Id> items) { push(Value{Kind::tuple, 0, {}, std::move(items)}); }

  void extend(Kind kind, const std::vector<Id>& items) {
    Value& container = values_[top()];
    require(container.kind == kind && (kind != Kind::dict || items.size() % 2 == 0), "items without a {} to hold them",
            kind == Kind::dict ? "dictionary" : "list");
    container.items.insert(container.items.end(), items.begin(), items.end());
  }

  void put(std::uint64_t index) {
    // LibTorch makes room for every index up to this one.
    require(index < bytes_.size(), "the memo index {} is too large", index);
    memo_[index] = top();
  }
  void get(std::uint64_t index) {
    const auto it = memo_.find(index);
    require(it != memo_.end(), "the memo has nothing at {}", index);
    stack_.push_back(it->second);
  }

  // --- what the values mean ---
  const Value& element(const Value& tuple, std::size_t i, Kind kind, std::string_view what) const {
    require(i < tuple.items.size() && values_[tuple.items[i]].kind == kind, "expected {}", what);
    return values_[tuple.items[i]];
  }

  void global() {
    const std::size_t begin = at_;
    const std::string_view module = line(), name = line();
    check(allowed_global(module, name), ErrorCode::ForbiddenGlobal,
          "the pickle names '{}.{}', which no TorchScript file needs; it may be an attack", escaped(module),
          escaped(name));
    // One view over both words; the line end between them reads as a space.
    const std::string_view both(reinterpret_cast<const char*>(bytes_.data()) + begin, module.size() + 1 + name.size());
    push(Kind::global, 0, both);
  }

  static std::string global_name(const Value& global) {
    std::string out(global.text);
    std::replace(out.begin(), out.end(), '\n', ' ');
    return out;
  }

  void persistent_id() {
    const Value& id = values_[pop()];
    require(id.kind == Kind::tuple && id.items.size() == 5, "expected a storage of five fields");
    require(element(id, 0, Kind::text, "the word 'storage'").text == "storage", "expected the word 'storage'");
    const std::string type = global_name(element(id, 1, Kind::global, "a storage type"));
    const std::string_view key = element(id, 2, Kind::text, "the key of a storage").text;
    const std::string_view device = element(id, 3, Kind::text, "the device of a storage").text;
    const std::int64_t numel = element(id, 4, Kind::integer, "the size of a storage").number;
    require(numel >= 0, "a storage of {} elements", numel);
    const std::uint64_t size = item_size(type);
    check(size != 0, ErrorCode::UnsupportedDtype, "storages of type '{}' are not supported", escaped(type));
    if (numel > 0) {
      const auto record = storage_size_(key);
      check(record.has_value() && device != "meta", ErrorCode::MissingStorage, "the storage '{}' is not in the archive",
            escaped(key));
      const auto expected = checked_mul(static_cast<std::uint64_t>(numel), size);
      check(expected == record, ErrorCode::SizeMismatch,
            "the record of storage '{}' has {} bytes; {} elements of {} bytes do not take that many", escaped(key),
            *record, numel, size);
    }
    push(Kind::storage, numel);
  }

  std::vector<std::int64_t> integers(const Value& tuple) const {
    std::vector<std::int64_t> out;
    for (std::size_t i = 0; i < tuple.items.size(); ++i)
      out.push_back(element(tuple, i, Kind::integer, "integers in a shape").number);
    return out;
  }

  void check_tensor(const Value& arguments) const {
    const std::int64_t numel = element(arguments, 0, Kind::storage, "the storage of a tensor").number;
    const std::int64_t offset = element(arguments, 1, Kind::integer, "the offset of a tensor").number;
    const std::vector<std::int64_t> sizes = integers(element(arguments, 2, Kind::tuple, "the shape of a tensor"));
    const std::vector<std::int64_t> strides = integers(element(arguments, 3, Kind::tuple, "the strides of a tensor"));
    require(sizes.size() == strides.size() && sizes.size() <= kMaxDims, "{} sizes and {} strides", sizes.size(),
            strides.size());
    const auto negative = [](std::int64_t x) { return x < 0; };
    require(std::none_of(sizes.begin(), sizes.end(), negative), "a negative size");

    bool inside = offset >= 0 && std::none_of(strides.begin(), strides.end(), negative);
    const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    std::optional<std::int64_t> last = offset;
    for (std::size_t i = 0; i < sizes.size() && inside && !empty; ++i) {
      const auto step = checked_mul(sizes[i] - 1, strides[i]);
      last = step ? checked_add(*last, *step) : std::nullopt;
      inside = last.has_value();
    }
    inside = inside && (empty ? offset <= numel : *last < numel);
    check(inside, ErrorCode::OutOfBounds,
          "a tensor of {} dimensions with offset {} reaches out of its storage of {} elements", sizes.size(), offset,
          numel);
    check(checked_product(std::span<const std::int64_t>(sizes)).has_value(), ErrorCode::SizeOverflow,
          "a tensor has more than 2^63 elements");
  }

  void reduce() {
    const Id arguments = pop();
    const Value& function = values_[pop()];
    require(function.kind == Kind::global && values_[arguments].kind == Kind::tuple, "a call of something uncallable");
    const std::string name = global_name(function);
    if (name == "torch._utils _rebuild_tensor_v2" || name == "torch._utils _rebuild_qtensor") {
      check_tensor(values_[arguments]);
      push(Kind::other);
    } else {
      push(Value{Kind::other, 0, {}, {arguments}});
    }
  }

  void new_object() {
    const Value& arguments = values_[pop()];
    const Value& type = values_[pop()];
    require(type.kind == Kind::global && arguments.kind == Kind::tuple && arguments.items.empty(),
            "an object without a class");
    push(Kind::object);
  }

  void build() {
    const Id state = pop();
    require(values_[top()].kind == Kind::object, "a state without an object");
    values_[top()].items.push_back(state);
  }

  bool step() {
    opcode_at_ = at_;
    const auto opcode = number<std::uint8_t>();
    switch (opcode) {
      case 0x80:
        require(number<std::uint8_t>() == 2, "not protocol 2");
        break;
      case '.':
        return false;
      case '(':
        push_mark();
        break;
      case 'N':
      case 0x88:
      case 0x89:
        push(Kind::other);
        break;  // none, true, false
      case 'K':
        push(Kind::integer, number<std::uint8_t>());
        break;
      case 'M':
        push(Kind::integer, number<std::uint16_t>());
        break;
      case 'J':
        push(Kind::integer, number<std::int32_t>());
        break;
      case 0x8a:
        long_integer();
        break;
      case 'G':
        number<double>();
        push(Kind::other);
        break;
      case 'X':
        push(Kind::text, 0, take(number<std::uint32_t>()));
        break;
      case 0x8d:
        push(Kind::text, 0, take(number<std::uint64_t>()));
        break;
      case ')':
        push_tuple({});
        break;
      case 't':
        push_tuple(pop_to_mark());
        break;
      case 0x85:
        push_tuple(pop_items(1));
        break;
      case 0x86:
        push_tuple(pop_items(2));
        break;
      case 0x87:
        push_tuple(pop_items(3));
        break;
      case ']':
        push(Kind::list);
        break;
      case 'a': {
        const Id item = pop();
        extend(Kind::list, {item});
        break;
      }
      case 'e': {
        const std::vector<Id> items = pop_to_mark();
        extend(Kind::list, items);
        break;
      }
      case '}':
        push(Kind::dict);
        break;
      case 's': {
        const std::vector<Id> items = pop_items(2);
        extend(Kind::dict, items);
        break;
      }
      case 'u': {
        const std::vector<Id> items = pop_to_mark();
        extend(Kind::dict, items);
        break;
      }
      case 'q':
        put(number<std::uint8_t>());
        break;
      case 'r':
        put(number<std::uint32_t>());
        break;
      case 'h':
        get(number<std::uint8_t>());
        break;
      case 'j':
        get(number<std::uint32_t>());
        break;
      case 'c':
        global();
        break;
      case 'Q':
        persistent_id();
        break;
      case 'R':
        reduce();
        break;
      case 0x81:
        new_object();
        break;
      case 'b':
        build();
        break;
      default:
        require(false, "TorchScript does not use opcode {:#04x}", opcode);
    }
    return true;
  }

  void long_integer() {
    const std::string_view digits = take(number<std::uint8_t>());
    require(digits.size() <= 8, "an integer of {} bytes", digits.size());
    std::uint64_t value = !digits.empty() && (digits.back() & 0x80) != 0 ? ~std::uint64_t{0} : 0;
    std::memcpy(&value, digits.data(), digits.size());
    push(Kind::integer, static_cast<std::int64_t>(value));
  }

  /// Refuses values that hold themselves, and nesting that would overflow the stack of whoever destroys them.
  void check_depth(Id root) const {
    constexpr std::uint32_t open = std::numeric_limits<std::uint32_t>::max();
    std::vector<std::uint32_t> depth(values_.size(), 0);  // 0: not seen yet
    std::vector<std::pair<Id, std::size_t>> path{{root, 0}};
    depth[root] = open;
    while (!path.empty()) {
      auto& [id, next] = path.back();
      const std::vector<Id>& items = values_[id].items;
      if (next < items.size()) {
        const Id child = items[next++];
        check(depth[child] != open, ErrorCode::BadPickle, "a value contains itself");
        if (depth[child] == 0) {
          depth[child] = open;
          path.emplace_back(child, 0);
        }
      } else {
        std::uint32_t below = 0;
        for (const Id child : items) below = std::max(below, depth[child]);
        check(below < kMaxDepth, ErrorCode::BadPickle, "values are nested more than {} deep", kMaxDepth);
        depth[id] = below + 1;
        path.pop_back();
      }
    }
  }

  std::span<const std::byte> bytes_;
  const StorageSize& storage_size_;
  std::size_t at_ = 0;
  std::size_t opcode_at_ = 0;
  std::vector<Value> values_;
  std::vector<Id> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, Id> memo_;
};

}  // namespace

void check_pickle(std::span<const std::byte> bytes, const StorageSize& storage_size) {
  Walker(bytes, storage_size).run();
}

}  // namespace tersor
