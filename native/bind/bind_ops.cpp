#include "bind/bind.h"

namespace headrace {
void bind_ops(nanobind::module_&) {}
}  // namespace headrace
