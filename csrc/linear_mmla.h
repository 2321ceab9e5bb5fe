// Linear layers of bf16 activations by products of 2 x 4 with 4 x 2 elements (BFMMLA, 64-bit Arm).
//
// An instruction adds four products to each of 2 x 2 sums, with roundings of its own, and k goes up four by four. A sum is
// of one row of x and one feature, so a row's bits are its own, whichever row is its partner and however many there are.
#pragma once

#include <arm_neon.h>

#include "linear.h"

namespace quire::QUIRE_NS {

// sums[row][16] of kPairs pairs of features and kRowPairs pairs of rows of x, over all of k; x: [pair][k / 4][2][4].
template <int kPairs, int kRowPairs>
inline void mmla_tile(const bf16* weights, int64_t num_tiles, const bf16* x, float* sums) {
    auto as_bf16 = [](uint64x2_t v) { return vreinterpretq_bf16_u64(v); };
    auto load8 = [](const bf16* p) { return vreinterpretq_u64_u16(vld1q_u16(p)); };
    float32x4_t acc[kPairs][kRowPairs];
    for (auto& pair : acc)
        for (float32x4_t& sum : pair) sum = vdupq_n_f32(0);
    for (int64_t t = 0; t < num_tiles; t++, weights += 512) {
        __builtin_prefetch(weights + 2048);
        for (int c = 0; c < 32; c += 8) {
            uint64x2_t low[kPairs], high[kPairs];  // columns c .. c + 3 of a pair of features, and the four after them
            for (int n = 0; n < kPairs; n++) {
                const uint64x2_t first = load8(weights + 2 * n * 32 + c), second = load8(weights + (2 * n + 1) * 32 + c);
                low[n] = vzip1q_u64(first, second), high[n] = vzip2q_u64(first, second);
            }
            for (int m = 0; m < kRowPairs; m++) {
                const bf16* rows = x + m * num_tiles * 64 + t * 64 + c * 2;
                const uint64x2_t x_low = load8(rows), x_high = load8(rows + 8);
                for (int n = 0; n < kPairs; n++) {
                    acc[n][m] = vbfmmlaq_f32(acc[n][m], as_bf16(x_low), as_bf16(low[n]));
                    acc[n][m] = vbfmmlaq_f32(acc[n][m], as_bf16(x_high), as_bf16(high[n]));
                }
            }
        }
    }
    for (int m = 0; m < kRowPairs; m++)
        for (int n = 0; n < kPairs; n++) {
            vst1_f32(sums + 2 * m * 16 + 2 * n, vget_low_f32(acc[n][m]));
            vst1_f32(sums + (2 * m + 1) * 16 + 2 * n, vget_high_f32(acc[n][m]));
        }
}

inline void mmla_block(const bf16* weights, int64_t num_tiles, const bf16* x, int64_t num_rows, float* sums) {
    constexpr int kMost = 4;
    for (int64_t row = 0; row < num_rows; row += 2 * kMost, x += kMost * num_tiles * 64, sums += kMost * 32)
        with_rows<kMost>(divide_up(num_rows - row, 2), [&](auto pairs) {
            constexpr int kPairs = decltype(pairs)::value <= 2 ? 8 : 4;  // as many sums as registers hold
            for (int n = 0; n < 8; n += kPairs) mmla_tile<kPairs, decltype(pairs)::value>(weights + n * 64, num_tiles, x, sums + 2 * n);
        });
}

inline void linear_mmla(const LinearArgs& a, Context& context) {
    if (a.type != Type::bf16 || a.weight.type == Type::f32) return linear(a, context);
    const Matrix& w = a.weight;
    const int64_t tiles = w.num_tiles(), num_pairs = divide_up(a.num_rows, 2);
    bf16* x = context.shared.get<bf16>(num_pairs * tiles * 64);
    context.pool.run(divide_up(num_pairs, 4), [&](int64_t task, int) {
        for (int64_t pair = task * 4; pair < num_pairs && pair < task * 4 + 4; pair++) {
            bf16* out = x + pair * tiles * 64;
            std::memset(out, 0, tiles * 64 * sizeof(bf16));
            for (int64_t i = 0; i < 2 && 2 * pair + i < a.num_rows; i++) {
                const bf16* row = static_cast<const bf16*>(a.x) + (2 * pair + i) * a.x_stride;
                for (int64_t k = 0; k < w.cols; k += 4) std::memcpy(out + 2 * k + 4 * i, row + k, (w.cols - k < 4 ? w.cols - k : 4) * sizeof(bf16));
            }
        }
    });
    const int parts = is_gated(a.epilogue) ? 2 : 1;
    const int64_t num_blocks = w.num_blocks() / parts;
    context.pool.run(num_blocks, [&](int64_t block, int thread) {
        const bf16* weights[2];
        for (int part = 0; part < parts; part++) {
            weights[part] = reinterpret_cast<const bf16*>(w.tile(block + part * num_blocks, 0));
            if (w.type == Type::bf16) continue;
            float* values = context.thread_scratch[thread].get<float>(512 * tiles);
            bf16* rounded = context.thread_scratch2[thread].get<bf16>(parts * 512 * tiles) + part * 512 * tiles;
            unpack_tiles(w, block + part * num_blocks, 0, tiles, false, values);
            for (int64_t i = 0; i < 512 * tiles; i += kLanes) store(rounded + i, load(values + i));
            weights[part] = rounded;
        }
        alignas(64) float sums[2][kVectorRows * 16];
        for (int64_t m = 0; m < a.num_rows; m += kVectorRows) {
            const int64_t rows = a.num_rows - m < kVectorRows ? a.num_rows - m : kVectorRows;
            for (int part = 0; part < parts; part++) mmla_block(weights[part], tiles, x + m * tiles * 32, rows, sums[part]);
            finish(a, {sums[0], parts == 2 ? sums[1] : nullptr, 16, 16, block * 16, (block + num_blocks) * 16, m, rows});
        }
    });
}

}  // namespace quire::QUIRE_NS
