#include "tersor/pipeline/progress.hpp"

#include <algorithm>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "tersor/core/names.hpp"

namespace tersor {
namespace {

using Seconds = std::chrono::duration<double>;
constexpr auto redraw_after = std::chrono::milliseconds(100);

int terminal_columns(int fd) {
  winsize size{};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string clock_text(double seconds) {
  const auto s = static_cast<std::int64_t>(seconds + 0.5);
  return s < 3600 ? fmt::format("{}:{:02}", s / 60, s % 60)
                  : fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

}  // namespace

void Progress::begin(std::string_view, std::int64_t) {}
void Progress::step(std::int64_t) {}
void Progress::end() {}

TerminalProgress::TerminalProgress() {
  if (::isatty(STDERR_FILENO) == 0) return;
  out_ = stderr;
  columns_ = terminal_columns(STDERR_FILENO);
}

TerminalProgress::TerminalProgress(std::FILE* out, int columns) : out_(out), columns_(columns) {}

void TerminalProgress::begin(std::string_view what, std::int64_t steps) {
  if (out_ == nullptr) return;
  what_ = escaped(what);
  steps_ = steps;
  begun_ = std::chrono::steady_clock::now();
  draw(0);
}

void TerminalProgress::step(std::int64_t done) {
  if (out_ == nullptr || !drawn_) return;
  if (done < steps_ && std::chrono::steady_clock::now() - drawn_at_ < redraw_after) return;
  draw(done);
}

void TerminalProgress::end() {
  if (!drawn_) return;
  fmt::print(out_, "\r\x1b[K");
  std::fflush(out_);
  drawn_ = false;
}

void TerminalProgress::draw(std::int64_t done) {
  drawn_at_ = std::chrono::steady_clock::now();
  std::string line = what_;
  if (steps_ > 0) {
    constexpr int width = 24;
    const double part = std::clamp(static_cast<double>(done) / static_cast<double>(steps_), 0.0, 1.0);
    const int filled = static_cast<int>(part * width);
    line += fmt::format(" [{:#<{}}{:-<{}}] {:3} %", "", filled, "", width - filled, static_cast<int>(part * 100));
    if (part > 0.0 && part < 1.0) {
      line += fmt::format("  {} left", clock_text(Seconds(drawn_at_ - begun_).count() * (1.0 - part) / part));
    }
  } else {
    line += fmt::format(" {}", done);
  }
  // A line that reaches the last column would wrap and could not be drawn over.
  const auto most = static_cast<std::size_t>(std::max(1, columns_ - 1));
  if (line.size() > most) {
    std::size_t cut = most;
    while (cut > 0 && (static_cast<unsigned char>(line[cut]) & 0xC0U) == 0x80U) --cut;
    line.resize(cut);
  }
  fmt::print(out_, "\r{}\x1b[K", line);
  std::fflush(out_);
  drawn_ = true;
}

}  // namespace tersor
