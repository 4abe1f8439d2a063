// Memory straight from the system: zeroed, 4096-aligned, and costing nothing until touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace headrace {

// Huge pages spare address-translation misses in weights read end to end; memory that fills slowly, as
// a pool of KV pages does, wants small ones, or its first byte costs 2 MiB.
enum class PageSize { Small, Huge };

// Throws Error(MemoryBudget) when the system refuses.
std::shared_ptr<std::byte> map_anonymous(int64_t num_bytes, PageSize page_size);

}  // namespace headrace
