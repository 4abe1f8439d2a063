// Memory in which a kernel keeps its own copies of what it multiplies.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

// Of the calling thread, at a multiple of 64; valid until the thread's next call. It grows to the
// largest size that the thread has asked for and stays until the thread ends.
std::byte* thread_scratch(int64_t num_bytes);

}  // namespace headrace
