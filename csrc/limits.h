// What a machine can do at a level: bare loops that read memory, and that multiply values which lie close by.
//
// `quire bench step` holds every kernel's time against them, in the same minutes.
#pragma once

#include "kernels.h"
#include "vec.h"
#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace quire::QUIRE_NS {

// Reads a piece of memory once; returns what keeps the compiler from leaving it out.
inline float read_piece(const uint8_t* from, int64_t bytes) {
    vf sums[4] = {};
    const float* p = reinterpret_cast<const float*>(from);
    for (int64_t i = 0; i + 4 * kLanes <= bytes / 4; i += 4 * kLanes) {
        __builtin_prefetch(p + i + 1024);
        for (int j = 0; j < 4; j++) sums[j] += load(p + i + j * kLanes);
    }
    return hsum(sums[0] + sums[1] + (sums[2] + sums[3]));
}

// Multiplies what lies in L1 `rounds` times; adds its operations (a multiplication and an addition are two) to `count`.
inline float multiply_near(int64_t rounds, double& count) {
#if defined(__AMX_BF16__)
    alignas(64) uint8_t tiles[4][1024] = {};
    alignas(64) float sums[256];
    const Tiles configured;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t i = 0; i < rounds; i++) {
        _tile_loadd(4, tiles[0], 64); _tile_loadd(5, tiles[1], 64); _tile_loadd(6, tiles[2], 64); _tile_loadd(7, tiles[3], 64);
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    count += 4.0 * 2 * 16 * 16 * 32 * double(rounds);
    _tile_stored(0, sums, 64);
    return sums[0];
#else
    // Sums that wait for none of each other, all in registers (of which AVX2 has 16); no two alike, or one would do. The
    // compiler can't know x.
    constexpr int kSums = kLanes == 8 ? 12 : 16;
    alignas(64) float values[16] = {};
#if defined(__AVX512BF16__)
    __m512 sums[kSums];
    for (int j = 0; j < kSums; j++) sums[j] = _mm512_set1_ps(float(j));
    __m512i x = _mm512_load_si512(values);
    for (int64_t i = 0; i < rounds; i++) {
        asm volatile("" : "+v"(x));
#pragma GCC unroll 16
        for (int j = 0; j < kSums; j++) sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)x, (__m512bh)x);
    }
    count += 4.0 * kSums * 16 * double(rounds);
    float result = 0;
    for (const __m512& sum : sums) result += _mm512_reduce_add_ps(sum);
    return result;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    float32x4_t sums[kSums];
    for (int j = 0; j < kSums; j++) sums[j] = vdupq_n_f32(float(j));
    float32x4_t x = vld1q_f32(values);
    for (int64_t i = 0; i < rounds; i++) {
        asm volatile("" : "+w"(x));
        const bfloat16x8_t y = vreinterpretq_bf16_f32(x);
#pragma GCC unroll 16
        for (int j = 0; j < kSums; j++) sums[j] = vbfmmlaq_f32(sums[j], y, y);
    }
    count += 32.0 * kSums * double(rounds);
    float result = 0;
    for (const float32x4_t& sum : sums) result += vaddvq_f32(sum);
    return result;
#elif defined(__AVX2__) && !defined(__AVX512F__)  // pairs of integers (linear_pairs.h)
    __m256i sums[kSums];
    for (int j = 0; j < kSums; j++) sums[j] = _mm256_set1_epi32(j);
    const __m256i x = _mm256_castps_si256(_mm256_load_ps(values));
    for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 16
        for (int j = 0; j < kSums; j++) {
            __m256i product;
            asm volatile("vpmaddwd %1, %1, %0" : "=x"(product) : "x"(x));  // each time, or one would do for all
            asm volatile("vpaddd %1, %0, %0" : "+x"(sums[j]) : "x"(product));
        }
    count += 32.0 * kSums * double(rounds);
    float result = 0;
    for (const __m256i& sum : sums) result += float(_mm256_extract_epi32(sum, 0));
    return result;
#else
    vf sums[kSums];
    for (int j = 0; j < kSums; j++) sums[j] = splat(float(j));
    vf x = load(values);
    for (int64_t i = 0; i < rounds; i++) {
#if defined(__aarch64__)
        asm volatile("" : "+w"(x));
#else
        asm volatile("" : "+x"(x));
#endif
#pragma GCC unroll 16
        for (int j = 0; j < kSums; j++) sums[j] += x * x;
    }
    count += 2.0 * kSums * kLanes * double(rounds);
    float result = 0;
    for (const vf& sum : sums) result += hsum(sum);
    return result;
#endif
#endif
}

// Reads `size` bytes of memory on all threads; without memory multiplies so many times, and returns the operations done.
inline double bare_loop(const uint8_t* memory, int64_t size, Context& context) {
    constexpr int64_t kPiece = 1 << 20, kRounds = 1 << 14;
    const int64_t pieces = divide_up(size, memory ? kPiece : kRounds);
    std::vector<double> counts(context.pool.size());
    std::vector<float> kept(context.pool.size());
    context.pool.run(pieces, [&](int64_t piece, int thread) {
        const int64_t begin = piece * kPiece, bytes = size - begin < kPiece ? size - begin : kPiece;
        kept[thread] += memory ? read_piece(memory + begin, bytes) : multiply_near(kRounds, counts[thread]);
    });
    double count = 0;
    for (size_t i = 0; i < counts.size(); i++) count += counts[i] + (kept[i] == 1.5f ? 1 : 0);  // nothing is left out
    return count;
}

}  // namespace quire::QUIRE_NS
