// What a machine can do at a level: bare loops that read memory, and that multiply values which lie close by.
//
// `quire bench step` holds every kernel's time against them, in the same minutes.
#pragma once

#include "kernels.h"
#include "near.h"
#include "vec.h"
#if defined(__AMX_BF16__)
#include "amx.h"
#elif defined(__AVX512BF16__)
#include "linear_dot.h"
#elif defined(__AVX2__)
#include "linear_pairs.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace quire::QUIRE_NS {

// Reads a piece of memory once; returns what keeps the compiler from leaving it out.
inline float read_piece(const uint8_t* from, int64_t bytes) {
    vf sums[4] = {};
    const float* p = reinterpret_cast<const float*>(from);
    for (int64_t i = 0; i + 4 * kLanes <= bytes / 4; i += 4 * kLanes) {
        __builtin_prefetch(p + i + 768, 0, 2);  // into L2: as well as the CPU does by itself, and better from page to page
        for (int j = 0; j < 4; j++) sums[j] += load(p + i + j * kLanes);
    }
    return hsum(sums[0] + sums[1] + (sums[2] + sums[3]));
}

// Multiplies what lies in L1 `rounds` times: in floats, or as bf16 products of many rows do, or bytes where w8a8 and w4a8 take an instruction for
// those; adds its operations (a multiplication and an addition are two) to `count`.
inline float multiply_floats(int64_t rounds, double& count) {
    return add_near<vf>(rounds, 2 * kLanes, count, [](vf sum, vf x) { return sum + x * x; });
}

#if defined(__AMX_BF16__)
template <bool kBytes>
inline float multiply_near(int64_t rounds, double& count) {
    alignas(64) uint8_t tiles[4][1024] = {};
    alignas(64) float sums[256];
    const Tiles configured;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t i = 0; i < rounds; i++) {
        _tile_loadd(4, tiles[0], 64); _tile_loadd(5, tiles[1], 64); _tile_loadd(6, tiles[2], 64); _tile_loadd(7, tiles[3], 64);
        if constexpr (kBytes) { _tile_dpbsud(0, 4, 6); _tile_dpbsud(1, 4, 7); _tile_dpbsud(2, 5, 6); _tile_dpbsud(3, 5, 7); }
        else { _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7); }
    }
    count += 4.0 * 2 * 16 * 16 * (kBytes ? 64 : 32) * double(rounds);
    _tile_stored(0, sums, 64);
    return sums[0];
}
#else
template <bool kBytes>
inline float multiply_near(int64_t rounds, double& count) {
    if constexpr (kBytes) {
#if defined(__AVX512VNNI__)
        return add_near<vi>(rounds, 128, count, [](vi sum, vi x) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)x); });
#elif defined(__ARM_FEATURE_MATMUL_INT8)
        return add_near<vi>(rounds, 64, count, [](vi sum, vi x) { return (vi)vusmmlaq_s32((int32x4_t)sum, (uint8x16_t)x, (int8x16_t)x); });
#elif defined(__ARM_FEATURE_DOTPROD)
        return add_near<vi>(rounds, 32, count, [](vi sum, vi x) { return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)x, (int8x16_t)x); });
#elif defined(__AVX2__)
        return add_near<vi>(rounds, 64, count, [](vi sum, vi x) {  // fours of bytes and nibbles (linear_pairs.h)
            vi product;
            asm volatile("vpmaddubsw %1, %1, %0" : "=x"(product) : "x"(x));
            asm volatile("vpaddw %1, %0, %0" : "+x"(sum) : "x"(product));
            return sum;
        });
#endif
    }
#if defined(__AVX512BF16__)
    if (!floats_are_faster())
        return add_near<vf>(rounds, 64, count, [](vf sum, vf x) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)x); });
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return add_near<vf>(rounds, 32, count, [](vf sum, vf x) { return (vf)vbfmmlaq_f32((float32x4_t)sum, (bfloat16x8_t)x, (bfloat16x8_t)x); });
#elif defined(__AVX2__) && !defined(__AVX512F__)
    if (adds_at_once())
        return add_near<vi>(rounds, 32, count, [](vi sum, vi x) {
            Words total = (Words)sum;
            add_products<kHasTwoWays, false>(total, (Words)x, (Words)x);
            return (vi)total;
        });
    return add_near<vi>(rounds, 32, count, [](vi sum, vi x) {  // pairs of integers (linear_pairs.h)
        vi product;
        asm volatile("vpmaddwd %1, %1, %0" : "=x"(product) : "x"(x));  // each time, or one would do for all
        asm volatile("vpaddd %1, %0, %0" : "+x"(sum) : "x"(product));
        return sum;
    });
#endif
    return multiply_floats(rounds, count);
}
#endif

// Reads `size` bytes of memory on all threads or, without memory, multiplies so many times; returns the bytes read or operations done.
inline double bare_loop(const uint8_t* memory, int64_t size, Factors factors, Context& context) {
    constexpr int64_t kPiece = 1 << 20, kRounds = 1 << 14;
    const int64_t pieces = divide_up(size, memory ? kPiece : kRounds);
    std::vector<double> counts(context.pool.size());
    std::vector<float> kept(context.pool.size());
    context.pool.run(pieces, [&](int64_t piece, int thread) {
        const int64_t begin = piece * kPiece, bytes = size - begin < kPiece ? size - begin : kPiece;
        auto multiply = factors == Factors::floats ? multiply_floats : factors == Factors::bytes ? multiply_near<true> : multiply_near<false>;
        kept[thread] += memory ? read_piece(memory + begin, bytes) : multiply(kRounds, counts[thread]);
    });
    double count = memory ? double(size) : 0;
    for (size_t i = 0; i < counts.size(); i++) count += counts[i] + (kept[i] == 1.5f ? 1 : 0);  // nothing is left out
    return count;
}

}  // namespace quire::QUIRE_NS
