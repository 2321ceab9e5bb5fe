// Weights of w4a8 are integers of eight bits, a code times the multiple of its 32 columns: in -120..120 (pack.h). Two ways lead to the
// same sums, which are exact: many rows of x meet those integers, made once for all of them; few meet the codes, and 32 columns' sums the
// multiple. On AVX2 all meet the codes (linear_pairs.h).
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "pack.h"

namespace quire::QUIRE_NS {

// Up to so many rows of x meet codes: to multiply sums, and expand codes for each panel of rows, takes less than to make bytes. Where pairs
// of rows, or of blocks, are multiplied faster, that is so for fewer.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int64_t kCodeRows = 4;
#elif defined(__AVX512VNNI__)
constexpr int64_t kCodeRows = 12;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int64_t kCodeRows = 24;
#else
constexpr int64_t kCodeRows = 0;
#endif

constexpr int64_t kCodeTileBytes = weight_format(Type::w4a8).tile_bytes;

// Tiles as w8a8 has them.
inline void expand_w4a8(const uint8_t* tile, int64_t num_tiles, uint8_t* out) {
    typedef uint16_t vw __attribute__((vector_size(sizeof(vi))));
    typedef uint8_t vc __attribute__((vector_size(sizeof(vi))));
    for (int64_t t = 0; t < num_tiles; t++, tile += kCodeTileBytes, out += 512) {
        for (int64_t line = 0; line < kCodeTileBytes; line += 64) __builtin_prefetch(tile + 4096 + line);
        for (int row = 0; row < 16; row += kLanes) {
            const vi multiple = signed_bytes(tile + 256 + row), sign = multiple >> 31, magnitude = (multiple ^ sign) - sign;
            const vw factor = (vw)(magnitude | magnitude << 16);
            const vc zero = (vc)((vu)((128 - 8 * multiple - sign) & 255) * 0x01010101u);  // with what is left of -x = (x ^ -1) + 1
            for (int i = 0; i < 4; i++) {
                vi codes;
                std::memcpy(&codes, tile + i * 64 + row * 4, sizeof codes);
                for (int half = 0; half < 2; half++) {
                    // A word's two products at once: 15 * 15 has eight bits.
                    const vw products = (vw)(codes >> 4 * half & 0x0f0f0f0f) * factor;
                    const vc bytes = (vc)((vi)products ^ sign) + zero;
                    std::memcpy(out + i * 128 + half * 64 + row * 4, &bytes, sizeof bytes);
                }
            }
        }
    }
}

// Four columns of a row: the i-th quad of a panel.
inline int32_t four_of(const int8_t* x, int64_t i) {
    int32_t columns;
    std::memcpy(&columns, x + i * 4, 4);
    return columns;
}

#if defined(__AVX512VNNI__)
// Weights on their way from memory to kRows rows. The CPU fetches what is read straight through by itself, and for one row a line of four
// keeps it going from page to page; where more is done with a line, it lags behind.
template <int kRows>
QUIRE_INLINE void fetch_ahead(const uint8_t* tile, int64_t bytes) {
    constexpr int64_t kStep = kRows == 1 ? 256 : 64, kAhead = kRows == 1 ? 3072 : 6144;
    for (int64_t i = 0; i < bytes; i += kStep) _mm_prefetch(reinterpret_cast<const char*>(tile + kAhead + i), _MM_HINT_T1);
}
#endif

// Sums of kRows rows of x and the sixteen features of a block over all columns. x is a panel of them, by four columns, with `less`:
// what sums of a tile begin with, as codes are 8 more than they mean.
template <int kRows>
inline void code_tile([[maybe_unused]] const uint8_t* tile, [[maybe_unused]] int64_t num_tiles, [[maybe_unused]] const int8_t* x,
                      [[maybe_unused]] const int32_t* less, [[maybe_unused]] int32_t* sums) {
#if defined(__AVX512VNNI__)
    __m512i total[kRows];
    for (__m512i& sum : total) sum = _mm512_setzero_si512();
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t t = 0; t < num_tiles; t++, tile += 272, x += 8 * kRows * 4, less += kRows) {
        fetch_ahead<kRows>(tile, kCodeTileBytes);
        __m512i acc[kRows];
        for (int m = 0; m < kRows; m++) acc[m] = _mm512_set1_epi32(less[m]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512i codes = _mm512_loadu_si512(tile + i * 64);
            const __m512i first = _mm512_and_si512(codes, low), second = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
#pragma GCC unroll 12
            for (int m = 0; m < kRows; m++) {
                acc[m] = _mm512_dpbusd_epi32(acc[m], first, _mm512_set1_epi32(four_of(x, 2 * i * kRows + m)));
                acc[m] = _mm512_dpbusd_epi32(acc[m], second, _mm512_set1_epi32(four_of(x, (2 * i + 1) * kRows + m)));
            }
        }
        // The sum of 32 columns has 16 bits, as it is -8 * 127 * 32 at least: it is the lower of two words, and the other meets 0.
        const __m512i multiple = _mm512_cvtepu16_epi32(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + 256))));
        for (int m = 0; m < kRows; m++) total[m] = _mm512_dpwssd_epi32(total[m], acc[m], multiple);
    }
    for (int m = 0; m < kRows; m++) _mm512_storeu_si512(sums + m * 16, total[m]);
#elif defined(__ARM_FEATURE_DOTPROD)
    const int8_t* first_x = x;
    for (int feature = 0; feature < 16; feature += 4) {
        int32x4_t total[kRows];
        for (int32x4_t& sum : total) sum = vdupq_n_s32(0);
        x = first_x;
        const uint8_t* from = tile;
        for (int64_t t = 0; t < num_tiles; t++, from += 272, x += 8 * kRows * 4) {
            int32x4_t acc[kRows];
            for (int m = 0; m < kRows; m++) acc[m] = vdupq_n_s32(less[t * kRows + m]);
            for (int i = 0; i < 4; i++) {
                const uint8x16_t codes = vld1q_u8(from + i * 64 + feature * 4);
                const int8x16_t first = vreinterpretq_s8_u8(vandq_u8(codes, vdupq_n_u8(15))), second = vreinterpretq_s8_u8(vshrq_n_u8(codes, 4));
                for (int m = 0; m < kRows; m++) {
                    acc[m] = vdotq_s32(acc[m], first, vreinterpretq_s8_s32(vdupq_n_s32(four_of(x, 2 * i * kRows + m))));
                    acc[m] = vdotq_s32(acc[m], second, vreinterpretq_s8_s32(vdupq_n_s32(four_of(x, (2 * i + 1) * kRows + m))));
                }
            }
            const int32x4_t multiple = (int32x4_t)signed_bytes(from + 256 + feature);
            for (int m = 0; m < kRows; m++) total[m] = vmlaq_s32(total[m], acc[m], multiple);
        }
        for (int m = 0; m < kRows; m++) vst1q_s32(sums + m * 16 + feature, total[m]);
    }
#endif
}

}  // namespace quire::QUIRE_NS
