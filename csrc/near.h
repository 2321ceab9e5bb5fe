// A bare loop of an instruction on values in registers: how fast it is at best.
#pragma once

#include <ctime>

#include "vec.h"

namespace quire::QUIRE_NS {

// Sums that wait for none of each other, all in registers (of which AVX2 has 16); no two alike, or one would do. The compiler can't
// know x. `add` does so many operations; they are added to `count`.
template <class V, class Add>
inline float add_near(int64_t rounds, double operations, double& count, const Add& add) {
    constexpr int kSums = kLanes == 8 ? 12 : 16;
    V sums[kSums] = {}, x{};
    for (int j = 0; j < kSums; j++) sums[j][0] = j;
    for (int64_t i = 0; i < rounds; i++) {
        x = plain(x);
#pragma GCC unroll 16
        for (int j = 0; j < kSums; j++) sums[j] = add(sums[j], x);
    }
    count += operations * kSums * double(rounds);
    for (int j = 1; j < kSums; j++) sums[0] += sums[j];
    return float(sums[0][0]);
}

// Seconds that 256 rounds of it take, at best of several times.
template <class V, class Add>
inline double least_seconds(const Add& add) {
    auto now = [] {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
    };
    double least = 1, count = 0;
    volatile float kept = 0;  // or all would be left out
    for (int time = 0; time < 8; time++) {
        const double start = now();
        kept = kept + add_near<V>(256, 1, count, add);
        const double seconds = now() - start;
        least = seconds < least ? seconds : least;
    }
    return least;
}

}  // namespace quire::QUIRE_NS
