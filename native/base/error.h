// The one exception type of the native core. Its kind names the class of headrace/errors.py that
// Python callers see; the message already says what, where, expected and got.
#pragma once

#include <stdexcept>
#include <string>
#include <system_error>

namespace headrace {

enum class ErrorKind {
  Config,
  Checkpoint,
  UnsupportedModel,
  MemoryBudget,
  ExpertRead,
  Request,
  Numeric,
  Shape,
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// What to throw where the system does not give a thread.
inline Error no_threads(const char* purpose, int num_threads, const std::system_error& error) {
  return {ErrorKind::Config, "cannot start " + std::to_string(num_threads) + " threads for " +
                                 purpose + ": " + error.code().message() +
                                 "\nhint: ask for fewer, or raise the limit of processes "
                                 "(`ulimit -u`, the cgroup's pids.max)"};
}

}  // namespace headrace
