// Pairs of bf16, multiplied by AVX512_BF16's instruction for them or as floats by two FMAs, which have its bits.
//
// A product of pairs is an FMA of the second ones and then one of the first, with denormal numbers taken for 0 as all threads of the
// pool take them. Intel's cores add four FMAs in the time of one product; CPUs without the instruction have nothing else.
#pragma once

#include <immintrin.h>

#include <cstdlib>

#include "near.h"

namespace quire::QUIRE_NS {

// 16 pairs as floats: their first ones, and the second ones.
struct FloatPairs {
    __m512 first, second;

    QUIRE_ALWAYS explicit FloatPairs(__m512i pairs)
        : first((__m512)_mm512_slli_epi32(pairs, 16)), second((__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000)))) {}
};
// As add_dot, bit for bit.
QUIRE_INLINE __m512 add_floats(__m512 sum, const FloatPairs& weights, __m512 x_first, __m512 x_second) {
    return _mm512_fmadd_ps(weights.first, x_first, _mm512_fmadd_ps(weights.second, x_second, sum));
}

#if defined(__AVX512BF16__)
inline __m512 add_dot(__m512 sum, __m512i weights, __m512i x) { return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)x); }

// `low`, then `high`.
inline __m512i rounded_to_bf16(__m512 high, __m512 low) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// Whether two FMAs take clearly less than a product of pairs. That is measured, in some 30 us, as CPUs' names don't tell; QUIRE_FLOATS
// is 0 or 1 for tests, as bits are the same.
inline bool floats_are_faster() {
    static const bool faster = [] {
        if (const char* told = std::getenv("QUIRE_FLOATS")) return *told == '1';
        const double pairs = least_seconds<vf>([](vf sum, vf x) { return (vf)add_dot((__m512)sum, (__m512i)x, (__m512i)x); });
        auto fma = [](vf sum, vf x) { return (vf)_mm512_fmadd_ps((__m512)x, (__m512)x, (__m512)sum); };
        return least_seconds<vf>([&](vf sum, vf x) { return fma(fma(sum, x), x); }) < 0.75 * pairs;
    }();
    return faster;
}
#else
inline __m512 add_dot(__m512 sum, __m512i weights, __m512i x) {
    const FloatPairs floats(x);
    return add_floats(sum, FloatPairs(weights), floats.first, floats.second);
}
#endif

// Rows of x: elements from row to row, and from tile to tile.
struct RowsOfX {
    const bf16* x;
    int64_t stride, step;

    RowsOfX from(int64_t row) const { return {x + row * stride, stride, step}; }
};

// Of which every one is some registers' distance away: as many addresses as there are rows would not fit. `kNear`: all lie so many
// bytes apart, or 0.
template <int kRows, int kNear>
struct NearRows {
    const char *first, *fifth, *ninth;
    int64_t one, three;  // bytes to other rows

    explicit NearRows(const RowsOfX& rows)
        : first(reinterpret_cast<const char*>(rows.x)), fifth(first + (kRows > 4 ? 8 * rows.stride : 0)),
          ninth(first + (kRows > 8 ? 16 * rows.stride : 0)), one(2 * rows.stride), three(6 * rows.stride) {
        asm("" : "+r"(fifth), "+r"(ninth), "+r"(one), "+r"(three));  // or the compiler makes more of them
    }
    QUIRE_ALWAYS const bf16* at(int row, int c) const {
        const char* base = row < 4 ? first : row < 8 ? fifth : ninth;
        const char* from = row % 4 == 0 ? base : row % 4 == 1 ? base + one : row % 4 == 2 ? base + 2 * one : base + three;
        return reinterpret_cast<const bf16*>(kNear ? first + row * kNear + c * (kNear / 4) : from + c * 16);
    }
    QUIRE_ALWAYS void skip(int64_t bytes) { first += bytes, fifth += bytes, ninth += bytes; }
};

}  // namespace quire::QUIRE_NS
