// The one exception type of the native core. Its kind names the class of headrace/errors.py that
// Python callers see; the message already says what, where, expected and got.
#pragma once

#include <stdexcept>
#include <string>

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

}  // namespace headrace
