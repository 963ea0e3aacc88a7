#pragma once

#include <cstdint>
#include <string_view>

namespace tersor {

/// Watches long work from outside. The base class is silent; TerminalProgress draws a line when standard error is a terminal.
class Progress {
 public:
  virtual ~Progress() = default;
  virtual void begin(std::string_view what, std::int64_t steps);
  virtual void step(std::int64_t done);
  virtual void end();
};

class TerminalProgress final : public Progress {
 public:
  TerminalProgress();
  void begin(std::string_view what, std::int64_t steps) override;
  void step(std::int64_t done) override;
  void end() override;

 private:
  bool on_ = false;
  std::int64_t steps_ = 0;
  std::int64_t shown_ = -1;
  std::string_view what_;
};

}  // namespace tersor
