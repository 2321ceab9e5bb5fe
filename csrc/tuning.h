// Finds out how this machine multiplies large matrices fastest, where a level knows several ways: by trying them.
//
// quire/worker/tuning.py keeps what was found, so that a machine does it but once.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "linear_op.h"

namespace quire::QUIRE_NS {

constexpr double kTuningSeconds = 0.12;
constexpr size_t kLeastRounds = 3;
constexpr double kClearly = 0.97;  // of another's time

// Which of several ways was fastest, by the times that each took; the first one unless another is clearly faster, in the middle and
// at best: what others did on the machine meanwhile decides nothing.
inline int32_t fastest(std::vector<std::vector<double>> seconds) {
    auto middle = [](const std::vector<double>& sorted) { return sorted[sorted.size() / 2]; };
    int32_t found = 0;
    for (auto& times : seconds) std::sort(times.begin(), times.end());
    for (size_t way = 1; way < seconds.size() && seconds[0].size() >= kLeastRounds; way++) {
        const auto &times = seconds[way], &first = seconds[0], &best = seconds[found];
        if (times[0] < kClearly * first[0] && middle(times) < kClearly * middle(first) && middle(times) < middle(best)) found = int32_t(way);
    }
    return found;
}

#if defined(__AMX_BF16__)
constexpr int32_t kNumWays = int32_t(std::size(kBlockings));

inline void choose_way(int32_t way) { chosen_blocking.store(way, std::memory_order_relaxed); }

// Tries them on a product of 512 rows with a matrix that comes from memory, and leaves the fastest chosen. A machine too slow or too
// busy for a few rounds keeps the first one.
inline int32_t tune(Context& context) {
    constexpr int64_t kRows = 512, kCols = 2048;
    using Clock = std::chrono::steady_clock;
    const int64_t features = std::min<int64_t>(512 * context.pool.size(), 4096);  // two tasks a thread, or more
    Scratch memory[3];
    bf16* weights = memory[0].get<bf16>(features * kCols);
    bf16* x = memory[1].get<bf16>(kRows * kCols);
    bf16* out = memory[2].get<bf16>(kRows * features);
    auto fill = [](bf16* values, int64_t count) {  // from 0.5 to 1, of both signs: zeros are multiplied faster
        uint32_t draw = 1;
        for (int64_t i = 0; i < count; i++) draw = draw * 1664525 + 1013904223, values[i] = bf16((draw >> 16 & 0x807f) | 0x3f00);
    };
    context.pool.run(features / 16, [&](int64_t block, int) { fill(weights + block * 16 * kCols, 16 * kCols); });
    fill(x, kRows * kCols);
    const Matrix matrix{reinterpret_cast<uint8_t*>(weights), nullptr, features, kCols, Type::bf16, 0};
    const LinearArgs args{matrix, nullptr, x, out, nullptr, kRows, kCols, features, 0, Type::bf16, Type::bf16, Epilogue::none};
    auto seconds = [&](int32_t way) {
        context.pool.run(features / 16, [&](int64_t block, int) {
            for (int64_t i = 0; i < 16 * kCols; i += 32) _mm_clflush(weights + block * 16 * kCols + i);
        });
        choose_way(way);
        const auto start = Clock::now();
        linear_amx(args, context);
        return std::chrono::duration<double>(Clock::now() - start).count();
    };
    const auto end = Clock::now() + std::chrono::duration<double>(kTuningSeconds);
    std::vector<std::vector<double>> found(kNumWays);
    seconds(0);  // which touches memory
    const double once = seconds(0);
    if (once * kNumWays * kLeastRounds < kTuningSeconds)
        while (Clock::now() < end)
            for (int32_t way = 0; way < kNumWays; way++) found[way].push_back(seconds(way));
    const int32_t way = fastest(found);
    choose_way(way);
    return way;
}
#else
constexpr int32_t kNumWays = 1;
inline void choose_way(int32_t) {}
inline int32_t tune(Context&) { return 0; }
#endif

}  // namespace quire::QUIRE_NS
