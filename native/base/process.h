// Objects that own threads, and what becomes of them in a fork.
#pragma once

#include <unistd.h>

#include <memory>

namespace headrace {

// Takes an object over. A fork has a copy of it and none of its threads, neither to join nor to
// release a lock that one of them held: there the copy is never taken down.
template <typename T>
std::shared_ptr<T> owned_by_this_process(T* object) {
  return std::shared_ptr<T>(object, [owner = getpid()](T* taken) {
    if (getpid() == owner) delete taken;
  });
}

}  // namespace headrace
