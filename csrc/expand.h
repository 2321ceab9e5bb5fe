// i8, i4 and blocks as bf16, row by row of a tile, for the levels that multiply bf16.
//
// i8 comes without its row's scale, which waits for the end of the product; i4 rounded to bf16 with it: every level has
// the same weights.
#pragma once

#include <immintrin.h>

#include "pack.h"

namespace quire::QUIRE_NS {

// bf16 of the magnitudes 0..127, by low and high byte. The sign bit is the code's own. Made by the compiler: no code of a level may run
// before the CPU is known to have it.
struct I8Tables {
    alignas(64) uint8_t low[128], high[128];
    constexpr I8Tables() : low(), high() {
        for (unsigned m = 1; m < 128; m++) {
            unsigned exponent = 0;
            while (m >> (exponent + 1)) exponent++;
            unsigned value = (127 + exponent) << 7 | ((m << (7 - exponent)) & 127);
            low[m] = uint8_t(value);
            high[m] = uint8_t(value >> 8);
        }
    }
};
constexpr I8Tables kI8Tables;

// Whether bytes can be looked up by a level that is made for CPUs that can't, too (Cooper Lake).
inline bool looks_up_bytes() {
#if defined(QUIRE_EMULATE_AVX512)
    return true;
#elif defined(__clang__)  // whose assembler wants it said for a whole function
    return false;
#else
    static const bool has = __builtin_cpu_supports("avx512vbmi");
    return has;
#endif
}
// Each byte's lowest seven bits -> a byte of `low` or `high`, 64 bytes each.
QUIRE_INLINE __m512i bytes_of(__m512i indices, const uint8_t* table) {
    const __m512i low = _mm512_load_si512(table), high = _mm512_load_si512(table + 64);
#if defined(__AVX512VBMI__) || defined(QUIRE_EMULATE_AVX512)
    return _mm512_permutex2var_epi8(low, indices, high);
#else
    asm("vpermi2b %2, %1, %0" : "+v"(indices) : "v"(low), "v"(high));
    return indices;
#endif
}

// 64 codes of a tile -> the two rows of 32 that they are, the odd ones the second half of each 16 bytes.
QUIRE_INLINE void expand_i8(__m512i codes, __m512i& even, __m512i& odd) {
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    const __m512i low = bytes_of(codes, kI8Tables.low);
    const __m512i high = _mm512_ternarylogic_epi32(bytes_of(codes, kI8Tables.high), codes, sign, 0xf8);  // high | (codes & sign)
    even = _mm512_unpacklo_epi8(low, high);
    odd = _mm512_unpackhi_epi8(low, high);
}

// i4: the 16 values of a row by its scale. 2 MB, of which a matrix's scales touch some KB: they stay in the caches. What is
// before the first ones is there to be loaded by `two_halves`.
alignas(64) inline bf16 i4_values[1 + 65536][16];
inline const bf16* i4_values_of(bf16 scale) { return i4_values[1 + scale]; }

inline void fill_i4_values() {
    static const bool filled = [] {
        const FlushDenormals flushed;
        const vf steps = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
        for (unsigned scale = 0; scale < 65536; scale++) store(i4_values[1 + scale], steps * to_float(bf16(scale)));
        return true;
    }();
    (void)filled;
}

// The words that hold four rows, shifted so that row `j` of them is lowest: by a product's upper half, as all shifts would wait
// for one unit, which look-ups need too. `plain`, as GCC would make the factors anew for each use.
struct I4Shifts {
    __m512i by4 = plain(_mm512_set1_epi16(1 << 12)), by8 = plain(_mm512_set1_epi16(1 << 8)), by12 = plain(_mm512_set1_epi16(1 << 4));

    QUIRE_ALWAYS __m512i operator()(__m512i words, int j) const {
        return j == 0 ? words : _mm512_mulhi_epu16(words, j == 1 ? by4 : j == 2 ? by8 : by12);
    }
};

// A row's 32 values by its scale and its codes, the lowest four bits of each word.
QUIRE_INLINE __m512i expand_i4(bf16 scale, __m512i codes) {
    // A look-up of words reads five bits of its index. The values are there twice: the fifth bit may be any.
    return _mm512_permutexvar_epi16(codes, _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(i4_values_of(scale)))));
}

// What must be known of a tile beside its bytes: the scales of blocks.
struct NoScales {
    static constexpr bool kTables = false;
    void read(const uint8_t*, int64_t) {}
};
template <Type kType, bool = is_blocks(kType)>
struct ScalesOf {
    using type = NoScales;
};
template <Type kType>
struct ScalesOf<kType, true> {
    using type = BlockScales<kType>;
};

QUIRE_INLINE __m512i shifted_words(__m512i words, int right) {
    typedef uint16_t Words __attribute__((vector_size(64)));
    return right >= 0 ? (__m512i)((Words)words >> right) : (__m512i)((Words)words << -right);
}
// The low `bits` of `low`, above them what `high` has there.
QUIRE_INLINE __m512i joined(__m512i low, __m512i high, int bits) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(short((1 << bits) - 1)), low, high, 0xca);
}

// What codes of four bits count: their places, or those of the curve.
QUIRE_INLINE __m512 numbers_of_codes(const BlockFormat& f) {
    return f.curved ? _mm512_loadu_ps(kCurve) : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// A row of a tile of blocks. Up to five bits of index are looked up among the row's own values; wider codes are converted.
template <Type kType>
QUIRE_INLINE __m512i expand_blocks(const uint8_t* tile, const BlockScales<kType>& scales, int row) {
    constexpr BlockFormat f = block_format(kType);
    constexpr int last = f.groups - 1;
    const __m512 scale = _mm512_set1_ps(scales.scale(0)[row]), last_scale = _mm512_set1_ps(scales.scale(last)[row]);
    const __m512 shift = _mm512_set1_ps(scales.shift(0)[row]), last_shift = _mm512_set1_ps(scales.shift(last)[row]);
    // A plane's words with this row's bits `at` the place where the code has them.
    auto plane = [&](int offset, int bits, int at) {
        const int shared = 16 / bits;
        return shifted_words(_mm512_loadu_si512(tile + offset + row / shared * 64), row % shared * bits - at);
    };
    const __m512 steps = numbers_of_codes(f);
    if constexpr (f.is_own()) {
        if constexpr (f.bits == 4) {
            __m256i values;
            if constexpr (BlockScales<kType>::kTables) values = _mm256_load_si256(reinterpret_cast<const __m256i*>(scales.values[row]));
            else values = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_sub_ps(steps, shift), scale));
            return _mm512_permutexvar_epi16(plane(0, 4, 0), _mm512_broadcast_i64x4(values));
        } else {
            const __m128i* codes = reinterpret_cast<const __m128i*>(tile + row * 32);
            auto value = [&](__m128i c) {
                if constexpr (f.tiny) {
                    const __m256i words = _mm256_cvtepi8_epi16(c);
                    const __m256i sign = _mm256_and_si256(words, _mm256_set1_epi16(short(0x8000)));
                    const __m256i rest = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(0x3f80));
                    return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256)), scale);
                }
                return _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(c)), shift), scale);
            };
            return (__m512i)_mm512_cvtne2ps_pbh(value(_mm_loadu_si128(codes + 1)), value(_mm_loadu_si128(codes)));
        }
    } else {
        const __m512 values = _mm512_fmadd_ps(steps, scale, shift);
        if constexpr (f.bits == 4) {  // the values are there twice: the fifth bit may be any
            const __m512i both = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(values));
            return _mm512_permutexvar_epi16(plane(0, 4, 0), both);
        } else if constexpr (f.bits == 5) {
            const __m512 above = _mm512_fmadd_ps(_mm512_add_ps(steps, _mm512_set1_ps(16)), scale, shift);
            return _mm512_permutexvar_epi16(joined(plane(0, 4, 0), plane(f.ones(), 1, 4), 4), (__m512i)_mm512_cvtne2ps_pbh(above, values));
        } else {  // the fifth bit is the group
            const __m512 others = _mm512_fmadd_ps(steps, last_scale, last_shift);
            __m512i codes = plane(f.twos(), 2, 0);
            if constexpr (f.bits == 3) codes = joined(codes, plane(f.ones(), 1, 2), 2);
            const __m512i group = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
            codes = joined(codes, group, f.bits);
            return _mm512_permutexvar_epi16(codes, (__m512i)_mm512_cvtne2ps_pbh(others, values));
        }
    }
}

// Four rows -> for each piece of 8 columns, the rows' pieces side by side, and back.
QUIRE_INLINE void turn(const __m512i (&rows)[4], __m512i (&out)[4]) {
    const __m512i a = _mm512_shuffle_i64x2(rows[0], rows[1], 0x44), b = _mm512_shuffle_i64x2(rows[0], rows[1], 0xee);
    const __m512i c = _mm512_shuffle_i64x2(rows[2], rows[3], 0x44), d = _mm512_shuffle_i64x2(rows[2], rows[3], 0xee);
    out[0] = _mm512_shuffle_i64x2(a, c, 0x88);
    out[1] = _mm512_shuffle_i64x2(a, c, 0xdd);
    out[2] = _mm512_shuffle_i64x2(b, d, 0x88);
    out[3] = _mm512_shuffle_i64x2(b, d, 0xdd);
}

constexpr bool has_numbers(Type type) { return is_blocks(type) && block_format(type).has_numbers(); }

// Codes of six or eight bits: calls body(c, j, weights) of columns 8c .. 8c + 7 of the rows 4i + j, i = 0..3, turned. A code becomes a number
// where it lies among the bits of a power of 2 whose last are worth as much: 512 + code, or 32768 + code. What stands for 0 there, 17 * 32 or
// 257 * 128, has 23 bits or less times a scale, so what is subtracted is exact.
template <Type kType, class Body>
QUIRE_INLINE void for_numbers(const uint8_t* tile, const BlockScales<kType>& scales, const Body& body) {
    constexpr BlockFormat f = block_format(kType);
    constexpr int kOne = f.bits == 6 ? 14 : 8;  // of that float32 the bit that is worth 1
    constexpr float kBase = float(1 << (23 - kOne)), kZero = kBase + float(1 << (f.bits - 1));
    using Place = NumberPlace<f.bits>;
    const __m512i number_bits = _mm512_set1_epi32(((1 << f.bits) - 1) << kOne), base = (__m512i)_mm512_set1_ps(kBase);
    auto moved = [](__m512i dwords, int right) QUIRE_ALWAYS {
        return right == 0 ? dwords : right > 0 ? _mm512_srli_epi32(dwords, right) : _mm512_slli_epi32(dwords, -right);
    };
    auto bits_of = [](__m512i x, __m512i mask, __m512i others) QUIRE_ALWAYS { return _mm512_ternarylogic_epi32(x, mask, others, 0xea); };  // (x & mask) | others
    constexpr int kShared = 32 / f.bits;  // numbers of a dword
    __m512i dwords;
    auto number = [&](int n) QUIRE_ALWAYS {
        if (n < 30 || f.bits == 8) {
            if (n % kShared == 0) dwords = plain(_mm512_loadu_si512(tile + n / kShared * 64));  // once: it lies across two lines
            return (__m512)bits_of(moved(dwords, (f.bits == 8 ? 8 * (n % 4) : Place::kFirst[n % 5]) - kOne), number_bits, base);
        }
        __m512i x = base;
        for (int i = 0; i < 3; i++)
            x = bits_of(moved(_mm512_loadu_si512(tile + ((n - 30) * 3 + i) * 64), Place::kLeft - kOne - 2 * i), _mm512_set1_epi32(3 << (kOne + 2 * i)), x);
        return (__m512)x;
    };
    const __m512i rows = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const __m512 of_group = _mm512_load_ps(scales.scale(g % f.groups));
            const __m512 low = _mm512_permutexvar_ps(_mm512_add_epi32(rows, _mm512_set1_epi32(j)), of_group), low_shift = _mm512_mul_ps(low, _mm512_set1_ps(-kZero));
            const __m512 high = _mm512_permutexvar_ps(_mm512_add_epi32(rows, _mm512_set1_epi32(j + 8)), of_group), high_shift = _mm512_mul_ps(high, _mm512_set1_ps(-kZero));
#pragma GCC unroll 2
            for (int c = 2 * g; c < 2 * g + 2; c++) {
                const int n = 16 * g + 4 * j + c % 2 * 2;
                const __m512 first = _mm512_fmadd_ps(number(n), low, low_shift);
                body(c, j, (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(number(n + 1), high, high_shift), first));
            }
        }
}

}  // namespace quire::QUIRE_NS
