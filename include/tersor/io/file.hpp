#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

namespace tersor {

/// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

/// A regular file open for reading. Every read says where it reads, and a file that is cut or replaced while it is open
/// is an IoError, never a signal.
class InputFile {
 public:
  /// NotRegularFile for directories, pipes, sockets and devices (never blocks on them); PermissionDenied; IoError.
  static InputFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::uint64_t size() const { return size_; }

  /// Fills `out` from `offset`. IoError when the file ends before.
  void read(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  InputFile(std::filesystem::path path, Descriptor fd, std::uint64_t size)
      : path_(std::move(path)), fd_(std::move(fd)), size_(size) {}

  std::filesystem::path path_;
  Descriptor fd_;
  std::uint64_t size_;
};

/// What `write_file_atomically` hands to the writer.
class OutputFile {
 public:
  void write(std::span<const std::byte> bytes);  ///< DiskFull, IoError
  void write(std::string_view bytes) { write(std::as_bytes(std::span(bytes))); }
  std::uint64_t position() const { return position_; }

 private:
  friend class AtomicFile;
  OutputFile(const std::filesystem::path& path, int fd) : path_(path), fd_(fd) {}

  const std::filesystem::path& path_;  // of the output, for messages
  int fd_;
  std::uint64_t position_ = 0;
};

struct AtomicWriteOptions {
  bool overwrite = false;
  std::filesystem::path source = {};       ///< refused as output, also through links; empty: not checked
  std::optional<std::uint64_t> size = {};  ///< reserved up front when known, so that a full disk shows before the work
  /// Called with the finished temporary file before it takes the output's name; what it throws leaves no output.
  std::function<void(const std::filesystem::path&)> verify = {};
};

/// Throws what `write_file_atomically` would throw before it creates anything, so that a long run fails at its start:
/// OutputExists, OutputIsInput, NotRegularFile, PermissionDenied, IoError (parent directory missing).
void check_output(const std::filesystem::path& path, const AtomicWriteOptions& options);

/// Writes a file whole or not at all.
///
/// The bytes go to `<path>.partial-<pid>-<n>` in the same directory, are flushed to the disk, verified, and take the
/// output's name by a rename; the directory is flushed after it. Without `overwrite` an existing output is never
/// touched, not even one that appears meanwhile. A replaced file keeps its mode, a new one gets the umask's; a symbolic
/// link stays one and its target is replaced. Temporary files of writers that died are removed first; one that is being
/// written now is OutputBusy. A full disk or a size limit is DiskFull. On any error the temporary file is gone.
void write_file_atomically(const std::filesystem::path& path, const AtomicWriteOptions& options,
                           const std::function<void(OutputFile&)>& writer);

/// Removes the temporary files of this process. Async-signal-safe: for the handlers of SIGINT and SIGTERM, which end
/// the process afterwards.
void remove_partial_files() noexcept;

}  // namespace tersor
