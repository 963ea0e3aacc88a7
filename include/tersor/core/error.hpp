#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

// clang-format off
/// Every error class of the library and the exit status the command-line tool maps it to.
///
///   2 usage    3 bad or hostile input    4 model not supported
///   5 file system    6 verification failed    7 out of memory
#define TERSOR_ERROR_CODES(X)                                                                 \
  /* what the caller wrote */                                                                 \
  X(BadUsage, 2) X(BadSyntax, 2) X(UnknownPass, 2) X(UnknownOption, 2) X(BadOption, 2)        \
  X(NoSuchTarget, 2) X(MissingData, 2) X(NothingToDo, 2) X(BadRecipe, 2)                      \
  /* safetensors */                                                                           \
  X(HeaderTooSmall, 3) X(HeaderTooLarge, 3) X(HeaderTruncated, 3) X(HeaderNotJson, 3)         \
  X(HeaderNotUtf8, 3) X(TrailingOrMissingData, 3) X(HoleOrOverlap, 3) X(BadOffsets, 3)        \
  X(SizeMismatch, 3) X(SizeOverflow, 3) X(BadShape, 3) X(UnknownDtype, 3) X(DuplicateKey, 3)  \
  X(BadMetadata, 3) X(BadTensorEntry, 3) X(MisalignedSubByte, 3) X(TooManyDims, 3)            \
  X(NonFiniteWeight, 3) X(NonFiniteActivation, 3) X(BadName, 3)                               \
  /* archives and pickles */                                                                  \
  X(UnknownFormat, 3) X(BadZip, 3) X(CompressedRecord, 3) X(MissingStorage, 3)                \
  X(OutOfBounds, 3) X(BadPickle, 3) X(ForbiddenGlobal, 3) X(BadConfig, 3) X(BadData, 3)       \
  X(AlreadyQuantized, 3)                                                                      \
  /* what we cannot do with this model */                                                     \
  X(UnsupportedFormat, 4) X(UnsupportedModel, 4) X(UnsupportedGraph, 4) X(UnsupportedDtype, 4)\
  X(UnsupportedLayer, 4) X(NeedUnmet, 4)                                                      \
  /* file system */                                                                           \
  X(IoError, 5) X(NotRegularFile, 5) X(OutputExists, 5) X(OutputIsInput, 5) X(OutputBusy, 5)  \
  X(PermissionDenied, 5) X(DiskFull, 5)                                                       \
  /* results that did not hold */                                                             \
  X(VerificationFailed, 6)                                                                    \
  X(OutOfMemory, 7)                                                                           \
  /* our own mistakes */                                                                      \
  X(Internal, 70)
// clang-format on

namespace tersor {

enum class ErrorCode {
#define TERSOR_X(name, exit) name,
  TERSOR_ERROR_CODES(TERSOR_X)
#undef TERSOR_X
};

constexpr std::string_view name(ErrorCode code) {
  switch (code) {
#define TERSOR_X(id, exit) \
  case ErrorCode::id:      \
    return #id;
    TERSOR_ERROR_CODES(TERSOR_X)
#undef TERSOR_X
  }
  return "Internal";
}

constexpr int exit_code(ErrorCode code) {
  switch (code) {
#define TERSOR_X(id, exit) \
  case ErrorCode::id:      \
    return exit;
    TERSOR_ERROR_CODES(TERSOR_X)
#undef TERSOR_X
  }
  return 70;
}

/// The one exception type of the library: a class of error, a sentence that says what was found,
/// what was expected and what to do, and the places it passed on its way out.
///
/// `what()` reads `Code: outer context: inner context: message`.
class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) { compose(); }

  /// Puts a place in front of the message, e.g. `pass 2 (prune_l1)` or a file name. Contexts added
  /// later stand further left.
  Error& in(std::string_view place) {
    context_ = context_.empty() ? std::string(place) : fmt::format("{}: {}", place, context_);
    compose();
    return *this;
  }

  ErrorCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }
  const std::string& context() const noexcept { return context_; }
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  void compose() {
    what_ = context_.empty() ? fmt::format("{}: {}", name(code_), message_)
                             : fmt::format("{}: {}: {}", name(code_), context_, message_);
  }

  ErrorCode code_;
  std::string message_;
  std::string context_;
  std::string what_;
};

/// Throws `Error{code, format(args...)}` unless `ok` holds. For public edges; our own mistakes are `assert`.
template <typename... Args>
void check(bool ok, ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  if (!ok) throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

/// `throw fail(code, "…", …)`: an Error from a format string.
template <typename... Args>
Error fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  return Error(code, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace tersor
