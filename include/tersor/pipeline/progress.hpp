#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace tersor {

/// Watches long work from outside: `begin` what of how many steps, `step` with how many are done, `end`. The base class
/// is silent; TerminalProgress draws a line when standard error is a terminal.
class Progress {
 public:
  virtual ~Progress() = default;
  virtual void begin(std::string_view what, std::int64_t steps);
  virtual void step(std::int64_t done);
  virtual void end();  ///< also when nothing was begun
};

/// One line that is drawn over and over, `what [####----]  50 %  0:12 left`, and erased at the end.
class TerminalProgress final : public Progress {
 public:
  TerminalProgress();  ///< on standard error, silent unless that is a terminal
  TerminalProgress(std::FILE* out, int columns);

  void begin(std::string_view what, std::int64_t steps) override;
  void step(std::int64_t done) override;
  void end() override;

 private:
  void draw(std::int64_t done);

  std::FILE* out_ = nullptr;  ///< nullptr: silent
  int columns_ = 80;
  bool drawn_ = false;
  std::int64_t steps_ = 0;
  std::string what_;
  std::chrono::steady_clock::time_point begun_, drawn_at_;
};

}  // namespace tersor
