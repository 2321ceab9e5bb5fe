// The first touch of memory by those who are to write there: touch.cpp.
#pragma once

#include <vector>

#include "operation.h"

namespace quire {

struct Region {
    uint8_t* begin;
    int64_t num_bytes;
};

// Touches every page of writable memory on all threads; contents stay.
void touch(const std::vector<Region>& regions, Context& context);

// How far the caches of a program's layers have been touched.
class TouchedCaches {
public:
    // `heads`: of the operations on caches; several may be on one layer's.
    explicit TouchedCaches(const std::vector<HeadSpec>& heads);

    // Touches them as far as a step writes, in case it comes farther than any before: a pool hands out the first blocks
    // first. All layers' at once: one after the other would be one page at a time, for which all threads wait.
    void reach(const Operands& operands, Context& context);

private:
    struct Layer {
        HeadSpec heads;
        const uint8_t* cache;  // of the last step
        int64_t num_touched;   // bytes at its front
    };
    std::vector<Layer> layers_;  // by KV group
};

}  // namespace quire
