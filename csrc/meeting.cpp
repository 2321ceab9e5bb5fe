// Meetings of processes. Waiting is spinning at first, as the others do the same work at the same time, and then sleeping
// in the kernel: ranks may have to share cores.
#include "meeting.h"

#include <chrono>
#include <ctime>
#include <thread>

#include "api.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr long kLook = 20 * 1000 * 1000;  // ns: so often a sleeper looks whether the meeting was aborted

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
    const timespec most{0, kLook};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
#else
    if (word == value) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

bool wait_for(Meeting& meeting, std::atomic<uint32_t>& arrivals, uint32_t turn) {
    auto there = [&] { return int32_t(arrivals.load(std::memory_order_acquire) - turn) >= 0; };
    if (there()) return true;
    const auto until = Clock::now() + kSpin;
    for (int spins = 1; !there(); spins++) {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
        if (spins % 64 || Clock::now() < until) continue;
        meeting.sleepers.fetch_add(1);
        for (uint32_t seen = arrivals.load(); !there() && !meeting.aborted.load(); seen = arrivals.load())
            sleep_while(arrivals, seen);
        meeting.sleepers.fetch_sub(1);
        return there();
    }
    return true;
}

}  // namespace

uint32_t arrive(Meeting& meeting, int32_t rank) {
    std::atomic<uint32_t>& own = meeting.places[rank].arrivals;
    const uint32_t turn = own.fetch_add(1) + 1;
    if (meeting.sleepers.load()) wake(own);
    return turn;
}

bool meet(Meeting& meeting, int32_t rank, int32_t size) {
    if (meeting.aborted.load(std::memory_order_relaxed)) return false;
    const uint32_t turn = arrive(meeting, rank);
    for (int32_t other = 0; other < size; other++)
        if (other != rank && !wait_for(meeting, meeting.places[other].arrivals, turn)) return false;
    return true;
}

}  // namespace quire

QUIRE_API(int32_t, quire_meet, quire::Meeting* meeting, int32_t rank, int32_t size) { return quire::meet(*meeting, rank, size); }

// The halves of a meeting, for those of whom some wait for others and not these for them.
QUIRE_API(void, quire_arrive, quire::Meeting* meeting, int32_t rank) { quire::arrive(*meeting, rank); }
QUIRE_API(int32_t, quire_await, quire::Meeting* meeting, int32_t rank, uint32_t turn) {
    return quire::wait_for(*meeting, meeting->places[rank].arrivals, turn);
}
