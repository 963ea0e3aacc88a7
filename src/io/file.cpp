#include "tersor/io/file.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

std::string quoted(const std::filesystem::path& path) { return fmt::format("'{}'", escaped(path.string())); }

std::string reason(int error) { return std::generic_category().message(error); }

/// The error class of a failed system call on `path`.
Error system_error(std::string_view doing, const std::filesystem::path& path, int error) {
  switch (error) {
    case ENOSPC:
    case EFBIG:
    case EDQUOT:
      return fail(ErrorCode::DiskFull, "cannot {} {}: {}; free some space or choose another place", doing, quoted(path),
                  reason(error));
    case EACCES:
    case EPERM:
    case EROFS:
      return fail(ErrorCode::PermissionDenied, "cannot {} {}: {}", doing, quoted(path), reason(error));
    default:
      return fail(ErrorCode::IoError, "cannot {} {}: {}", doing, quoted(path), reason(error));
  }
}

/// Paths of the temporary files that exist now, where a signal handler can read them: no allocation, no lock.
struct PartialSlot {
  std::atomic<bool> taken = false;
  std::atomic<bool> live = false;
  std::array<char, PATH_MAX> path{};
};
static_assert(std::atomic<bool>::is_always_lock_free);
std::array<PartialSlot, 16> partial_slots;

/// Makes a temporary file known to `remove_partial_files` while it lives, and removes it unless it was renamed.
class PartialFile {
 public:
  explicit PartialFile(const std::filesystem::path& path) : path_(path) {
    check(path.native().size() < PATH_MAX, ErrorCode::IoError, "{} is too long a path; choose a shorter one",
          quoted(path));
    for (PartialSlot& slot : partial_slots) {
      if (slot.taken.exchange(true)) continue;
      slot_ = &slot;
      std::memcpy(slot.path.data(), path.c_str(), path.native().size() + 1);
      return;
    }
    throw fail(ErrorCode::OutputBusy, "{} files are being written at once; wait for one to finish",
               partial_slots.size());
  }
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;
  ~PartialFile() {
    if (slot_->live) ::unlink(path_.c_str());
    slot_->live = false;
    slot_->taken = false;
  }

  /// To be set before the file is created, so that no signal falls between.
  void set_live(bool live) { slot_->live = live; }

 private:
  std::filesystem::path path_;
  PartialSlot* slot_ = nullptr;
};

/// The file that a write to `path` replaces: through a symbolic link its target, which may not exist yet.
std::filesystem::path output_target(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_symlink(std::filesystem::symlink_status(path, error))) return path;
  const std::filesystem::path target = std::filesystem::canonical(path, error);
  check(!error, ErrorCode::IoError, "{} is a symbolic link that leads nowhere; remove it or choose another output",
        quoted(path));
  return target;
}

std::filesystem::path parent_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

/// `<name>.partial-<pid>-<n>` with digits only.
bool is_partial_name(std::string_view file, std::string_view name) {
  const std::string prefix = std::string(name) + ".partial-";
  if (!file.starts_with(prefix)) return false;
  const std::string_view rest = file.substr(prefix.size());
  const std::size_t dash = rest.find('-');
  const auto digits = [](std::string_view s) {
    return !s.empty() && s.find_first_not_of("0123456789") == std::string_view::npos;
  };
  return dash != std::string_view::npos && digits(rest.substr(0, dash)) && digits(rest.substr(dash + 1));
}

/// Removes what dead writers left beside `target`. A living writer holds a lock on its file, which ends with its
/// process, whatever became of the process number since.
void remove_stale_partials(const std::filesystem::path& target) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(parent_of(target), error)) {
    if (!is_partial_name(entry.path().filename().native(), target.filename().native())) continue;
    const Descriptor fd(::open(entry.path().c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (fd.get() < 0) continue;
    check(::flock(fd.get(), LOCK_EX | LOCK_NB) == 0, ErrorCode::OutputBusy,
          "{} is being written by another run ({}); wait for it to finish", quoted(target), quoted(entry.path()));
    ::unlink(entry.path().c_str());
  }
}

/// rename that never replaces: by flag, or by a hard link where the file system does not know the flag.
int rename_new(const char* from, const char* to) {
  if (::renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS) return errno;
  if (::link(from, to) != 0) return errno;
  ::unlink(from);
  return 0;
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

InputFile InputFile::open(const std::filesystem::path& path) {
  Descriptor fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (fd.get() < 0) {
    const int error = errno;
    // Sockets and devices without a driver cannot even be opened.
    check(error != ENXIO && error != ENODEV, ErrorCode::NotRegularFile, "{} is not a regular file", quoted(path));
    throw system_error("open", path, error);
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) throw system_error("examine", path, errno);
  check(!S_ISDIR(info.st_mode), ErrorCode::NotRegularFile, "{} is a directory; expected a file", quoted(path));
  check(S_ISREG(info.st_mode), ErrorCode::NotRegularFile, "{} is a pipe, socket or device; expected a regular file",
        quoted(path));
  return InputFile(path, std::move(fd), static_cast<std::uint64_t>(info.st_size));
}

void InputFile::read(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd_.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw system_error("read", path_, errno);
    check(n > 0, ErrorCode::IoError, "{} ended at byte {} while it was read: it was shortened by another program",
          quoted(path_), offset);
    offset += static_cast<std::uint64_t>(n);
    out = out.subspan(static_cast<std::size_t>(n));
  }
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw system_error("write", path_, errno);
    position_ += static_cast<std::uint64_t>(n);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

void check_output(const std::filesystem::path& path, const AtomicWriteOptions& options) {
  check(path.has_filename(), ErrorCode::IoError, "'{}' is no file name; give the output a name",
        escaped(path.string()));
  struct stat old {};
  if (::stat(path.c_str(), &old) == 0) {
    struct stat source {};
    if (!options.source.empty() && ::stat(options.source.c_str(), &source) == 0) {
      check(old.st_dev != source.st_dev || old.st_ino != source.st_ino, ErrorCode::OutputIsInput,
            "{} is the input itself; give the output another name", quoted(path));
    }
    check(S_ISREG(old.st_mode), ErrorCode::NotRegularFile, "output {} exists and is no regular file", quoted(path));
    check(options.overwrite, ErrorCode::OutputExists, "{} exists; use --overwrite or another name", quoted(path));
    if (::access(path.c_str(), W_OK) != 0) throw system_error("overwrite", path, errno);
  } else if (errno != ENOENT) {
    throw system_error("examine", path, errno);
  }
  const std::filesystem::path target = output_target(path);
  const std::filesystem::path parent = parent_of(target);
  struct stat directory {};
  check(::stat(parent.c_str(), &directory) == 0 && S_ISDIR(directory.st_mode), ErrorCode::IoError,
        "directory {} of the output does not exist; create it first", quoted(parent));
  if (::access(parent.c_str(), W_OK | X_OK) != 0) throw system_error("create a file in", parent, errno);
}

class AtomicFile {
 public:
  static void write(const std::filesystem::path& path, const AtomicWriteOptions& options,
                    const std::function<void(OutputFile&)>& writer) {
    check_output(path, options);
    const std::filesystem::path target = output_target(path);
    remove_stale_partials(target);

    static std::atomic<unsigned> counter = 0;
    std::filesystem::path temporary = target;
    temporary += fmt::format(".partial-{}-{}", ::getpid(), counter++);
    PartialFile partial(temporary);
    partial.set_live(true);
    Descriptor fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (fd.get() < 0) {
      const int error = errno;
      if (error == EEXIST) partial.set_live(false);  // not ours to remove
      throw system_error("create", temporary, error);
    }
    check(::flock(fd.get(), LOCK_EX | LOCK_NB) == 0, ErrorCode::OutputBusy, "{} is being written by another run",
          quoted(path));
    struct stat old {};
    if (::stat(target.c_str(), &old) == 0 && ::fchmod(fd.get(), old.st_mode & 0777) != 0)
      throw system_error("set the mode of", temporary, errno);
    if (options.size.value_or(0) > 0) {
      // Only an early warning: file systems that cannot reserve are written to all the same.
      if (::fallocate(fd.get(), 0, 0, static_cast<off_t>(*options.size)) != 0 && (errno == ENOSPC || errno == EFBIG))
        throw system_error("reserve space for", path, errno);
    }

    OutputFile output(path, fd.get());
    writer(output);

    if (options.size) {
      check(output.position() == *options.size, ErrorCode::Internal, "{} bytes were announced and {} written",
            *options.size, output.position());
    }
    if (::fsync(fd.get()) != 0) throw system_error("write", path, errno);
    if (options.verify) options.verify(temporary);

    // Some file systems report a failed write only here. The second descriptor keeps the lock until the rename is done.
    const Descriptor lock(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
    if (::close(fd.release()) != 0) throw system_error("close", path, errno);
    if (options.overwrite) {
      if (::rename(temporary.c_str(), target.c_str()) != 0) throw system_error("rename to", path, errno);
    } else if (const int error = rename_new(temporary.c_str(), target.c_str()); error != 0) {
      check(error != EEXIST, ErrorCode::OutputExists,
            "{} appeared while it was written; use --overwrite or another name", quoted(path));
      throw system_error("rename to", path, error);
    }
    partial.set_live(false);
    const Descriptor directory(::open(parent_of(target).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (directory.get() >= 0 && ::fsync(directory.get()) != 0 && errno != EINVAL)
      throw system_error("flush the directory of", path, errno);
  }
};

void write_file_atomically(const std::filesystem::path& path, const AtomicWriteOptions& options,
                           const std::function<void(OutputFile&)>& writer) {
  AtomicFile::write(path, options, writer);
}

void remove_partial_files() noexcept {
  for (PartialSlot& slot : partial_slots)
    if (slot.live) ::unlink(slot.path.data());
}

}  // namespace tersor
