// The second-level cache of a core: how much of a product is done at a time follows from its size. The bits do not.
#pragma once

#include <cstdint>
#include <string>

namespace quire {

constexpr int64_t kUsualCache = 1 << 20;  // bytes, where a machine does not say

// Bytes that each core has of a cache which several may share, as Linux describes caches in `folder` (index0, index1, ...);
// threads of one core count once, as the pool wants one of them. 0 where there is no second level.
int64_t cache_of(const std::string& folder);

// Of this machine's cores the least; QUIRE_L2_CACHE (bytes) where that is set.
int64_t second_level_cache();

}  // namespace quire
