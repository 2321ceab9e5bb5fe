// Where the ranks of a tensor group meet: the head of a piece of shared memory, before its two buffers.
//
// Executors make it, all zeros; quire/distributed/groups.py has the same layout. A rank that arrives counts its own place up
// and waits for the others; what they wrote to the turn's buffer before is then there to be read. The buffers take turns:
// who writes to one again has met everybody once more since, so all have read it, and one meeting a turn is enough.
#pragma once

#include <atomic>
#include <cstdint>

namespace quire {

struct Meeting {  // 4 KiB
    struct alignas(64) Place {
        std::atomic<uint32_t> arrivals;  // of one rank, so far; they wrap around
    };

    std::atomic<uint32_t> aborted;   // whoever waits stops waiting
    std::atomic<uint32_t> sleepers;  // those who wait in the kernel
    Place places[63];

    // The buffer of the turn that `rank` is in.
    uint8_t* buffer(int32_t rank, int64_t capacity) {
        const bool odd = places[rank].arrivals.load(std::memory_order_relaxed) & 1;
        return reinterpret_cast<uint8_t*>(this + 1) + (odd ? capacity : 0);
    }
};
static_assert(sizeof(Meeting) == 4096, "groups.py knows where the buffers are");

// Counts the place of `rank` up, and wakes who waits for that; returns how often it has arrived.
uint32_t arrive(Meeting& meeting, int32_t rank);

// Ends the turn of `rank`: true once all `size` ranks have ended it, false where the meeting is aborted.
bool meet(Meeting& meeting, int32_t rank, int32_t size);

}  // namespace quire
