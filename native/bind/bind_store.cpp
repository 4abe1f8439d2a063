#include "bind/bind.h"

namespace headrace {
void bind_store(nanobind::module_&) {}
}  // namespace headrace
