// Linear layers of eight bits on both sides: x is rounded to eight bits, with a scale for each row of its own, and integers
// are multiplied.
//
// Sums of integers are exact, so a row's bits are its own, whatever is computed beside it and in which order. Weights are
// bytes around 128 and x is signed, as VPDPBUSD (AVX512_VNNI) wants them; what 128 adds is taken off at the end. Weights of four bits
// become such bytes, or meet few rows as they are (w4a8.h).
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "linear.h"
#include "w4a8.h"

namespace quire::QUIRE_NS {

constexpr int kIntRows = 12;                  // rows of x whose sums with two blocks of weights stay in registers

// x in eight bits, laid out for a kernel: panels of kRows rows, in them by kGroup columns: [columns / kGroup][kRows][kGroup].
template <int kRows, int kGroup>
struct IntRows {
    const int8_t* panels;
    const float* scales;   // [rows]
    const int32_t* excess; // [rows] what 128 adds to the sums of a row
    const int32_t* less;   // [panels][tiles][kRows] what 8 takes from the sums of 32 columns, or null
    int64_t panel_bytes;

    const int8_t* panel(int64_t first_row) const { return panels + first_row / kRows * panel_bytes; }
    const int32_t* panel_less(int64_t first_row) const { return less + first_row / kRows * (panel_bytes / 32); }
};

inline int32_t sum_of(vi x) {
    int32_t sum = 0;
    for (int i = 0; i < kLanes; i++) sum += x[i];
    return sum;
}

// The codes and scale of one row, as those of int8 weights are chosen (pack.h).
template <int kRows, int kGroup>
inline float quantize_row(const float* x, int64_t padded, int8_t* out, int32_t& excess, int32_t* less) {
    const float most = largest_magnitude(x, padded), inverse = most > 0 ? 127.0f / most : 0.0f;
    vi total{};
    for (int64_t first = 0; first < padded; first += 32) {
        vi tile{};
        for (int64_t i = first; i < first + 32; i += kLanes) {
            const vf bounded = min(max(round_product(load(x + i), inverse), splat(-127.0f)), splat(127.0f));
            const vi codes = __builtin_convertvector(bounded, vi);
            tile += codes;
            constexpr int kPiece = kGroup < kLanes ? kGroup : kLanes;
            const vb bytes = __builtin_convertvector(codes, vb);
            int8_t values[kLanes];
            std::memcpy(values, &bytes, sizeof bytes);
            for (int lane = 0; lane < kLanes; lane += kPiece) {
                const int64_t column = i + lane;
                std::memcpy(out + column / kGroup * kRows * kGroup + column % kGroup, values + lane, kPiece);
            }
        }
        if (less) less[first / 32 * kRows] = -8 * sum_of(tile);
        total += tile;
    }
    excess = 128 * sum_of(total);
    return most / 127.0f;  // NaN where any of the row is: it shows
}

// `for_codes`: with what 8 takes from sums.
template <int kRows, int kGroup>
inline IntRows<kRows, kGroup> quantize_rows(const LinearArgs& a, bool for_codes, Context& context) {
    const int64_t padded = round_up(a.weight.num_tiles() * 32, kGroup), num_panels = divide_up(a.num_rows, kRows);
    const int64_t panel_bytes = kRows * padded, panel_tiles = panel_bytes / 32;
    int8_t* panels = context.shared.get<int8_t>(num_panels * (panel_bytes + kRows * 8 + (for_codes ? panel_tiles * 4 : 0)));
    float* scales = reinterpret_cast<float*>(panels + num_panels * panel_bytes);
    int32_t* excess = reinterpret_cast<int32_t*>(scales + num_panels * kRows);
    int32_t* less = for_codes ? excess + num_panels * kRows : nullptr;
    context.pool.run(num_panels, [&](int64_t panel, int thread) {
        float* values = context.thread_scratch[thread].get<float>(padded);
        for (int64_t i = a.weight.cols; i < padded; i++) values[i] = 0;
        for (int64_t row = panel * kRows; row < a.num_rows && row < (panel + 1) * kRows; row++) {
            for_vectors(a.weight.cols, [&](int64_t i, int n) {
                const vf v = a.type == Type::bf16 ? load_n(static_cast<const bf16*>(a.x) + row * a.x_stride + i, n)
                                                  : load_n(static_cast<const float*>(a.x) + row * a.x_stride + i, n);
                store_n(values + i, v, n);
            });
            const int64_t place = row % kRows;
            int8_t* out = panels + panel * panel_bytes + place * kGroup;
            scales[row] = quantize_row<kRows, kGroup>(values, padded, out, excess[row], less ? less + panel * panel_tiles + place : nullptr);
        }
    });
    return {panels, scales, excess, less, panel_bytes};
}

#if defined(__ARM_FEATURE_DOTPROD)
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kSignedSums = false;
inline int32x4_t add_products(int32x4_t sum, uint8x16_t w, int8x16_t x) { return vusdotq_s32(sum, w, x); }

// Pairs of features and of rows: 2 x 8 products with 8 x 2 elements, of eight features at a time.
template <int kRows>
inline void int_pairs(const uint8_t* weights, int64_t num_quads, const int8_t* x, int32_t* sums) {
    int32x4_t acc[kRows / 2][4];
    for (auto& pair : acc)
        for (int32x4_t& sum : pair) sum = vdupq_n_s32(0);
    auto zip = [](auto a, auto b, bool upper) {
        const uint32x4_t first = vreinterpretq_u32_u8(a), second = vreinterpretq_u32_u8(b);
        return vreinterpretq_u8_u32(upper ? vzip2q_u32(first, second) : vzip1q_u32(first, second));
    };
    const uint8_t* rows = reinterpret_cast<const uint8_t*>(x);
    for (int64_t q = 0; q < num_quads; q += 2, weights += 128, rows += 2 * kIntRows * 4) {
        uint8x16_t w[4];
        for (int n = 0; n < 4; n++) w[n] = zip(vld1q_u8(weights + n / 2 * 16), vld1q_u8(weights + 64 + n / 2 * 16), n % 2);
        for (int m = 0; m < kRows / 2; m++) {
            const uint8x16_t pair = zip(vld1q_u8(rows + m / 2 * 16), vld1q_u8(rows + kIntRows * 4 + m / 2 * 16), m % 2);
            for (int n = 0; n < 4; n++) acc[m][n] = vusmmlaq_s32(acc[m][n], w[n], vreinterpretq_s8_u8(pair));
        }
    }
    for (int m = 0; m < kRows / 2; m++)
        for (int n = 0; n < 4; n++)
            for (int i = 0; i < 4; i++) sums[(2 * m + i % 2) * 16 + 2 * n + i / 2] = acc[m][n][i];
}
#else
constexpr bool kSignedSums = true;  // what 128 adds is not in them
inline int32x4_t add_products(int32x4_t sum, uint8x16_t w, int8x16_t x) {
    return vdotq_s32(sum, vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(128))), x);
}
#endif
#else
constexpr bool kSignedSums = false;
#endif

// Sums of kRows rows of a panel and the sixteen features of each of kBlocks blocks, over all columns.
template <int kRows, int kBlocks>
inline void int_tile(const uint8_t* const (&weights)[2], int64_t num_quads, const int8_t* x, int32_t (*sums)[kIntRows * 16]) {
#if defined(__AVX512VNNI__)
    __m512i acc[kBlocks][kRows];
    for (auto& block : acc)
        for (__m512i& sum : block) sum = _mm512_setzero_si512();
    for (int64_t q = 0; q < num_quads; q++, x += kIntRows * 4) {
        __m512i w[kBlocks];
        for (int b = 0; b < kBlocks; b++) {
            w[b] = _mm512_loadu_si512(weights[b] + q * 64);
            _mm_prefetch(reinterpret_cast<const char*>(weights[b] + q * 64 + (kRows <= 4 ? 4096 : 1024)), _MM_HINT_T0);
        }
        for (int m = 0; m < kRows; m++) {
            int32_t four;
            std::memcpy(&four, x + m * 4, 4);
            const __m512i v = _mm512_set1_epi32(four);
            for (int b = 0; b < kBlocks; b++) acc[b][m] = _mm512_dpbusd_epi32(acc[b][m], w[b], v);
        }
    }
    for (int b = 0; b < kBlocks; b++)
        for (int m = 0; m < kRows; m++) _mm512_storeu_si512(sums[b] + m * 16, acc[b][m]);
#elif defined(__AVX2__)
    for (int b = 0; b < kBlocks; b++)
        for (int m = 0; m < kRows; m++) {
            __m256i acc[4] = {};  // two lanes a feature
            for (int64_t q = 0; q < num_quads; q++) {
                int32_t four;
                std::memcpy(&four, x + q * kIntRows * 4 + m * 4, 4);
                const __m256i v = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
                for (int i = 0; i < 4; i++) {
                    const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights[b] + q * 64 + i * 16)));
                    acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(w, v));
                }
            }
            for (int i = 0; i < 4; i++) {
                alignas(32) int32_t lanes[8];
                std::memcpy(lanes, &acc[i], sizeof lanes);
                for (int feature = 0; feature < 4; feature++) sums[b][m * 16 + i * 4 + feature] = lanes[2 * feature] + lanes[2 * feature + 1];
            }
        }
#elif defined(__ARM_FEATURE_DOTPROD)
    for (int b = 0; b < kBlocks; b++)
        for (int first = 0; first < 16; first += 8) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
            if constexpr (kRows > 1) {
                int_pairs<kRows>(weights[b] + first * 4, num_quads, x, sums[b] + first);
                continue;
            }
#endif
            int32x4_t acc[kRows][2];
            for (auto& row : acc) row[0] = row[1] = vdupq_n_s32(0);
            for (int64_t q = 0; q < num_quads; q++) {
                const uint8_t* from = weights[b] + q * 64 + first * 4;
                const uint8x16_t w[2] = {vld1q_u8(from), vld1q_u8(from + 16)};
                for (int m = 0; m < kRows; m++) {
                    int32_t four;
                    std::memcpy(&four, x + q * kIntRows * 4 + m * 4, 4);
                    const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(four));
                    for (int i = 0; i < 2; i++) acc[m][i] = add_products(acc[m][i], w[i], v);
                }
            }
            for (int m = 0; m < kRows; m++)
                for (int i = 0; i < 2; i++) vst1q_s32(sums[b] + m * 16 + first + 4 * i, acc[m][i]);
        }
#else
    for (int b = 0; b < kBlocks; b++) {
        int32_t acc[kRows][16] = {};
        for (int64_t q = 0; q < num_quads; q++)
            for (int m = 0; m < kRows; m++)
                for (int feature = 0; feature < 16; feature++)
                    for (int c = 0; c < 4; c++)
                        acc[m][feature] += int32_t(weights[b][q * 64 + feature * 4 + c]) * x[q * kIntRows * 4 + m * 4 + c];
        std::memcpy(sums[b], acc, sizeof acc);
    }
#endif
}

// Calls body with a constant of at least so many rows: places in a panel without one are computed for nobody.
template <class Body>
inline void with_panel_rows(int64_t num_rows, const Body& body) {
    if (num_rows == 1) return body(std::integral_constant<int, 1>());
    if (num_rows == 2) return body(std::integral_constant<int, 2>());
    if (num_rows <= 4) return body(std::integral_constant<int, 4>());
    if (num_rows <= 8) return body(std::integral_constant<int, 8>());
    body(std::integral_constant<int, kIntRows>());
}

inline void linear_int8(const LinearArgs& a, Context& context) {
    if (a.num_rows == 0) return;
    const Matrix& w = a.weight;
    const bool gated = is_gated(a.epilogue);
    const bool codes = w.type == Type::w4a8 && a.num_rows <= kCodeRows, expands = w.type == Type::w4a8 && !codes;
    const auto rows = quantize_rows<kIntRows, 4>(a, codes, context);
    const int64_t tiles = w.num_tiles(), count = gated ? w.num_blocks() / 2 : w.num_blocks();
    const int64_t at_once = gated ? 1 : 2;  // blocks of the result; two of weights in any case
    const int64_t pairs = divide_up(count, at_once), block_bytes = tiles * (codes ? w.tile_bytes() : 512);
    // As many weights as stay in L2 while panels of x meet them in turn.
    int64_t group = context.cache / 4 / (2 * block_bytes), fair = pairs / (4 * context.pool.size());  // no thread waits long for another
    group = group < fair ? group : fair;
    group = group < 1 ? 1 : group;
    auto others = [&](int64_t pair) { return gated ? pair + count : 2 * pair + 1; };  // of a pair's blocks the second, if there is one
    context.pool.run(divide_up(pairs, group), [&](int64_t task, int thread) {
        alignas(64) int32_t sums[2][kIntRows * 16];
        alignas(64) float scaled[2][kIntRows * 16];
        const int64_t begin = task * group, end = begin + group < pairs ? begin + group : pairs;
        uint8_t* expanded = expands ? context.thread_scratch[thread].get<uint8_t>(2 * group * block_bytes) : nullptr;
        for (int64_t pair = begin; expands && pair < end; pair++) {
            uint8_t* to = expanded + (pair - begin) * 2 * block_bytes;
            expand_w4a8(w.tile(pair * at_once, 0), tiles, to);
            if (others(pair) < w.num_blocks()) expand_w4a8(w.tile(others(pair), 0), tiles, to + block_bytes);
        }
        for (int64_t first = 0; first < a.num_rows; first += kIntRows) {
            const int64_t n = a.num_rows - first < kIntRows ? a.num_rows - first : kIntRows;
            for (int64_t pair = begin; pair < end; pair++) {
                const int64_t block = pair * at_once, other = others(pair);
                const bool both = other < w.num_blocks();
                const uint8_t* weights[2] = {w.tile(block, 0), w.tile(other, 0)};
                for (int b = 0; expands && b < 2; b++) weights[b] = expanded + ((pair - begin) * 2 + b) * block_bytes;
                with_panel_rows(n, [&](auto rows_of_panel) {
                    const int8_t* x = rows.panel(first);
                    for (int b = 0; codes && b < 1 + both; b++) code_tile<rows_of_panel, kIntRows>(weights[b], tiles, x, rows.panel_less(first), sums[b]);
                    if (codes) return;
                    both ? int_tile<rows_of_panel, 2>(weights, tiles * 8, x, sums) : int_tile<rows_of_panel, 1>(weights, tiles * 8, x, sums);
                });
                for (int b = 0; b < 1 + both; b++)
                    for (int64_t m = 0; m < n; m++)
                        for (int i = 0; i < 16; i += kLanes) {
                            vi sum;
                            std::memcpy(&sum, sums[b] + m * 16 + i, sizeof sum);
                            store(scaled[b] + m * 16 + i, __builtin_convertvector(sum - (kSignedSums || codes ? 0 : rows.excess[first + m]), vf) * rows.scales[first + m]);
                        }
                finish(a, {scaled[0], gated ? scaled[1] : nullptr, 16, 16, block * 16, other * 16, first, n});
                if (both && !gated) finish(a, {scaled[1], nullptr, 16, 16, other * 16, 0, first, n});
            }
        }
    });
}

}  // namespace quire::QUIRE_NS
