#include "tersor/io/file.hpp"

#include <csignal>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "temporary.hpp"

using namespace tersor;
namespace fs = std::filesystem;

namespace {

void put(const fs::path& path, std::string_view bytes, const AtomicWriteOptions& options = {}) {
  write_file_atomically(path, options, [&](OutputFile& out) { out.write(bytes); });
}

ErrorCode put_error(const fs::path& path, const AtomicWriteOptions& options = {}) {
  return error_of([&] { put(path, "new", options); }).code();
}

/// Runs `f` in a child process and gives its exit status; -signal when a signal ended it.
template <typename F>
int in_child(F&& f) {
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 99;
    try {
      status = f();
    } catch (...) {
    }
    ::_exit(status);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace

TEST_CASE("InputFile opens regular files only and never waits") {
  const TemporaryDirectory dir;
  const auto code = [](const fs::path& path) { return error_of([&] { InputFile::open(path); }).code(); };
  REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
  CHECK(code(dir / "fifo") == ErrorCode::NotRegularFile);
  CHECK(code("/dev/zero") == ErrorCode::NotRegularFile);
  CHECK(code(dir / "") == ErrorCode::NotRegularFile);
  CHECK(code(dir / "missing") == ErrorCode::IoError);
  const int s = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, (dir / "socket").c_str(), sizeof(address.sun_path) - 1);
  REQUIRE(::bind(s, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  CHECK(code(dir / "socket") == ErrorCode::NotRegularFile);
  ::close(s);
  write_bytes(dir / "closed", "x");
  fs::permissions(dir / "closed", fs::perms::none);
  if (::geteuid() != 0) CHECK(code(dir / "closed") == ErrorCode::PermissionDenied);
}

TEST_CASE("a file that is cut while it is open is an IoError") {
  const TemporaryDirectory dir;
  write_bytes(dir / "f", "0123456789");
  const InputFile file = InputFile::open(dir / "f");
  std::vector<std::byte> out(4);
  file.read(6, out);
  CHECK(std::memcmp(out.data(), "6789", 4) == 0);
  fs::resize_file(dir / "f", 8);
  CHECK(error_of([&] { file.read(6, out); }).code() == ErrorCode::IoError);
}

TEST_CASE("an output is written whole, keeps its neighbours, and leaves no temporary file") {
  const TemporaryDirectory dir;
  const mode_t old_mask = ::umask(027);
  put(dir / "out", "hello", {.size = 5});
  ::umask(old_mask);
  CHECK(read_bytes(dir / "out") == "hello");
  CHECK((fs::status(dir / "out").permissions() & fs::perms::all) == fs::perms(0640));
  CHECK(dir.files() == 1);
}

TEST_CASE("an existing output is replaced only when asked and keeps its mode") {
  const TemporaryDirectory dir;
  write_bytes(dir / "out", "old");
  fs::permissions(dir / "out", fs::perms(0604));
  CHECK(put_error(dir / "out") == ErrorCode::OutputExists);
  CHECK(read_bytes(dir / "out") == "old");
  put(dir / "out", "new", {.overwrite = true});
  CHECK(read_bytes(dir / "out") == "new");
  CHECK((fs::status(dir / "out").permissions() & fs::perms::all) == fs::perms(0604));
  CHECK(dir.files() == 1);
}

TEST_CASE("an output that appears while it is written is not replaced") {
  const TemporaryDirectory dir;
  const Error error = error_of([&] {
    write_file_atomically(dir / "out", {}, [&](OutputFile& out) {
      out.write("new");
      write_bytes(dir / "out", "other");
    });
  });
  CHECK(error.code() == ErrorCode::OutputExists);
  CHECK(read_bytes(dir / "out") == "other");
  CHECK(dir.files() == 1);
}

TEST_CASE("the input is never the output: by path, symbolic or hard link") {
  const TemporaryDirectory dir;
  write_bytes(dir / "in", "old");
  fs::create_symlink(dir / "in", dir / "symlink");
  fs::create_hard_link(dir / "in", dir / "hardlink");
  for (const char* name : {"in", "symlink", "hardlink", "./in"}) {
    INFO(name);
    CHECK(put_error(dir / name, {.overwrite = true, .source = dir / "in"}) == ErrorCode::OutputIsInput);
    CHECK(put_error(dir / name, {.source = dir / "symlink"}) == ErrorCode::OutputIsInput);
  }
  CHECK(read_bytes(dir / "in") == "old");
}

TEST_CASE("a symbolic link as output stays a link and its target is replaced") {
  const TemporaryDirectory dir;
  write_bytes(dir / "target", "old");
  fs::create_symlink(dir / "target", dir / "link");
  CHECK(put_error(dir / "link") == ErrorCode::OutputExists);
  put(dir / "link", "new", {.overwrite = true});
  CHECK(fs::is_symlink(dir / "link"));
  CHECK(read_bytes(dir / "target") == "new");
  fs::create_symlink(dir / "nowhere", dir / "dangling");
  CHECK(put_error(dir / "dangling", {.overwrite = true}) == ErrorCode::IoError);
}

TEST_CASE("places that cannot hold an output are refused before anything is written") {
  const TemporaryDirectory dir;
  fs::create_directory(dir / "sub");
  const Error missing = error_of([&] { put(dir / "no/such/out", "new"); });
  CHECK(missing.code() == ErrorCode::IoError);
  CHECK(missing.message().find("create it first") != std::string::npos);
  CHECK(put_error(dir / "sub", {.overwrite = true}) == ErrorCode::NotRegularFile);
  CHECK(put_error("/dev/null", {.overwrite = true}) == ErrorCode::NotRegularFile);
  CHECK(error_of([&] { check_output(dir / "no/out", {}); }).code() == ErrorCode::IoError);
  check_output(dir / "fine", {});
  CHECK(dir.files() == 1);
}

TEST_CASE("an error of the writer or of the check leaves the old output and no temporary file") {
  const TemporaryDirectory dir;
  write_bytes(dir / "out", "old");
  const AtomicWriteOptions overwrite{.overwrite = true};
  CHECK_THROWS_AS(write_file_atomically(dir / "out", overwrite,
                                        [](OutputFile& out) {
                                          out.write("half");
                                          throw std::runtime_error("stop");
                                        }),
                  std::runtime_error);
  std::string seen;
  const AtomicWriteOptions refusing{.overwrite = true, .verify = [&](const fs::path& temporary) {
                                      seen = read_bytes(temporary);
                                      throw Error(ErrorCode::VerificationFailed, "different");
                                    }};
  CHECK(put_error(dir / "out", refusing) == ErrorCode::VerificationFailed);
  CHECK(seen == "new");
  CHECK(read_bytes(dir / "out") == "old");
  CHECK(dir.files() == 1);
}

TEST_CASE("a size limit is DiskFull at every byte and leaves the old output") {
  const TemporaryDirectory dir;
  write_bytes(dir / "out", "old");
  const std::string bytes(4096, 'x');
  for (const bool reserve : {false, true}) {
    for (const rlim_t limit : {0, 1, 100, 4095}) {
      INFO(limit);
      CHECK(in_child([&] {
              ::signal(SIGXFSZ, SIG_IGN);
              const rlimit size{limit, limit};
              ::setrlimit(RLIMIT_FSIZE, &size);
              AtomicWriteOptions options{.overwrite = true};
              if (reserve) options.size = bytes.size();
              return static_cast<int>(error_of([&] { put(dir / "out", bytes, options); }).code());
            }) == static_cast<int>(ErrorCode::DiskFull));
      CHECK(read_bytes(dir / "out") == "old");
      CHECK(dir.files() == 1);
    }
  }
}

TEST_CASE("a killed writer leaves the old output, and the next run removes its temporary file") {
  const TemporaryDirectory dir;
  write_bytes(dir / "out", "old");
  write_bytes(dir / "out.partial-notes", "not ours");
  CHECK(in_child([&] {
          write_file_atomically(dir / "out", {.overwrite = true}, [](OutputFile& out) {
            out.write("half");
            ::raise(SIGKILL);
          });
          return 0;
        }) == -SIGKILL);
  CHECK(read_bytes(dir / "out") == "old");
  CHECK(dir.files() == 3);
  put(dir / "out", "new", {.overwrite = true});
  CHECK(read_bytes(dir / "out") == "new");
  CHECK(dir.files() == 2);
  CHECK(fs::exists(dir / "out.partial-notes"));
}

TEST_CASE("two writers of one output: the second is told that it is busy") {
  const TemporaryDirectory dir;
  ErrorCode second{};
  write_file_atomically(dir / "out", {}, [&](OutputFile& out) {
    second = put_error(dir / "out");
    out.write("first");
  });
  CHECK(second == ErrorCode::OutputBusy);
  CHECK(read_bytes(dir / "out") == "first");
  CHECK(dir.files() == 1);
}

TEST_CASE("a signal handler can remove the temporary files") {
  const TemporaryDirectory dir;
  CHECK(in_child([&] {
          ::signal(SIGTERM, [](int) {
            remove_partial_files();
            ::_exit(143);
          });
          write_file_atomically(dir / "out", {}, [](OutputFile& out) {
            out.write("half");
            ::raise(SIGTERM);
          });
          return 0;
        }) == 143);
  CHECK(dir.files() == 0);
}
