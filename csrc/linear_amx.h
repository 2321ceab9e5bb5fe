// Linear layers of bf16 activations on AMX: the weights are the A operand, as they lie in memory, and x, packed in pairs
// of k, is B. The result is a tile [16 features][16 rows of x], so one row costs what sixteen do: the time it takes
// to read the weights. i8 and i4 weights are expanded to bf16 tiles just ahead, by table look-up.
#pragma once

#include "amx.h"
#include "linear.h"

namespace quire::QUIRE_NS {

// i8: the bf16 of a magnitude m < 128 by its low and high byte; the sign bit is the code's own. Made by the compiler: no
// code of this level may run before the CPU is known to have it.
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

inline void expand_i8_tile(const uint8_t* tile, bf16* out) {
    const __m512i low0 = _mm512_load_si512(kI8Tables.low), low1 = _mm512_load_si512(kI8Tables.low + 64);
    const __m512i high0 = _mm512_load_si512(kI8Tables.high), high1 = _mm512_load_si512(kI8Tables.high + 64);
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    for (int i = 0; i < 8; i++) {
        __m512i codes = _mm512_loadu_si512(tile + i * 64);
        __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
        __m512i high = _mm512_permutex2var_epi8(high0, codes, high1);
        high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8);  // high | (codes & sign)
        _mm512_store_si512(out + i * 64, _mm512_unpacklo_epi8(low, high));
        _mm512_store_si512(out + i * 64 + 32, _mm512_unpackhi_epi8(low, high));
    }
}

inline void expand_i4_tile(const uint8_t* tile, bf16* out) {
    const __m512 steps = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    const __m512i nibble = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(16);
    alignas(64) float scales[16];
    _mm512_store_ps(scales, load(reinterpret_cast<const bf16*>(tile)));
    for (int i = 0; i < 4; i++) {
        __m512i words = _mm512_loadu_si512(tile + 32 + i * 64);
        for (int j = 0; j < 4; j += 2) {
            // A table of two rows' 16 values each; the look-up of words reads five bits of its index.
            __m512i table = __m512i(_mm512_cvtne2ps_pbh(_mm512_mul_ps(steps, _mm512_set1_ps(scales[4 * i + j + 1])),
                                                        _mm512_mul_ps(steps, _mm512_set1_ps(scales[4 * i + j]))));
            __m512i even = _mm512_and_si512(_mm512_srli_epi16(words, 4 * j), nibble);
            __m512i odd = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 4 * j + 4), nibble, upper, 0xea);  // (a & b) | c
            _mm512_store_si512(out + (4 * i + j) * 32, _mm512_permutexvar_epi16(even, table));
            _mm512_store_si512(out + (4 * i + j + 1) * 32, _mm512_permutexvar_epi16(odd, table));
        }
    }
}

constexpr int64_t kAhead = 2048;       // bytes of weights to prefetch ahead
constexpr int64_t kFewRows = 32;       // up to here the weights are read once, straight through
constexpr int64_t kChunkTiles = 8;     // k in tiles that a pair of blocks keeps in L1 when there are many rows
constexpr int64_t kPanelRows = 256;    // rows of x that a task keeps in L2

inline void prefetch(const uint8_t* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T1);
}

// The two blocks of 16 features that a task multiplies at a time: neighbours, or a gate's and its factor's.
struct BlockPair {
    int64_t first, second;
    bool has_second;
};

// Tiles [begin, end) of a block as bf16, expanded into `scratch` where they are not.
inline const bf16* bf16_tiles(const Matrix& w, int64_t block, int64_t begin, int64_t end, bf16* scratch) {
    if (w.type == Type::bf16) return reinterpret_cast<const bf16*>(w.tile(block, begin));
    for (int64_t t = begin; t < end; t++) {
        const uint8_t* tile = w.tile(block, t);
        prefetch(tile + kAhead, w.tile_bytes());
        w.type == Type::i8 ? expand_i8_tile(tile, scratch + (t - begin) * 512) : expand_i4_tile(tile, scratch + (t - begin) * 512);
    }
    return scratch;
}

// What to fetch from memory while tiles are multiplied: `step` bytes of each block with each tile.
struct Ahead {
    const uint8_t *first, *second;
    int64_t step;
};

// Adds the products of tiles of k to four C tiles (features 0..15 and 16..31 of up to two groups of 16 rows of x).
template <bool kTwo>
inline void multiply(const bf16* w0, const bf16* w1, const uint32_t* x0, const uint32_t* x1, int64_t num_tiles, Ahead ahead) {
    for (int64_t t = 0; t < num_tiles; t++) {
        prefetch(ahead.first + t * ahead.step, ahead.step);
        prefetch(ahead.second + t * ahead.step, ahead.step);
        _tile_loadd(4, w0 + t * 512, 64);
        _tile_loadd(6, x0 + t * 256, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, w1 + t * 512, 64);
        _tile_dpbf16ps(1, 5, 6);
        if (kTwo) {
            _tile_loadd(7, x1 + t * 256, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}
inline void multiply(bool two, const bf16* w0, const bf16* w1, const uint32_t* x0, const uint32_t* x1, int64_t num_tiles,
                     Ahead ahead) {
    two ? multiply<true>(w0, w1, x0, x1, num_tiles, ahead) : multiply<false>(w0, w1, x0, x1, num_tiles, ahead);
}

inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}
inline void load_sums(const float* c) {
    _tile_loadd(0, c, 64);
    _tile_loadd(1, c + 256, 64);
    _tile_loadd(2, c + 512, 64);
    _tile_loadd(3, c + 768, 64);
}
inline void store_sums(float* c, bool two) {
    _tile_stored(0, c, 64);
    _tile_stored(1, c + 256, 64);
    if (!two) return;
    _tile_stored(2, c + 512, 64);
    _tile_stored(3, c + 768, 64);
}

// c: four tiles as stored above; writes rows [first_row, first_row + num_rows), at most 32.
inline void finish_tiles(const LinearArgs& a, const float* c, BlockPair pair, int64_t first_row, int64_t num_rows) {
    const bool gated = a.epilogue == Epilogue::silu_mul;
    // Neighbours are finished as one piece of 32 features: a row's cache line is written once and whole.
    const int64_t width = pair.has_second && !gated ? 32 : 16;
    alignas(64) float rows[2][512];
    for (int64_t half = 0; half * 16 < num_rows; half++) {
        int64_t count = num_rows - half * 16 < 16 ? num_rows - half * 16 : 16;
        const float* tiles = c + half * 512;
        transpose_to(tiles, rows[0], width, count);
        if (pair.has_second) transpose_to(tiles + 256, gated ? rows[1] : rows[0] + 16, width, count);
        finish(a, {rows[0], gated ? rows[1] : nullptr, width, pair.first * 16, pair.second * 16, first_row + half * 16, count});
    }
}

inline void linear_few_rows(const LinearArgs& a, const uint32_t* x, BlockPair pair, bf16* scratch) {
    const Matrix& w = a.weight;
    const int64_t tiles = w.num_tiles();
    const bool two = a.num_rows > 16;
    const uint32_t* x1 = x + (two ? tiles * 256 : 0);
    alignas(64) float c[1024];
    zero_sums();
    if (w.type == Type::bf16) {
        const bf16* w0 = bf16_tiles(w, pair.first, 0, tiles, nullptr);
        const bf16* w1 = bf16_tiles(w, pair.second, 0, tiles, nullptr);
        auto bytes = [](const bf16* w) { return reinterpret_cast<const uint8_t*>(w) + kAhead; };
        multiply(two, w0, w1, x, x1, tiles, {bytes(w0), bytes(w1), 1024});
    } else {
        // Expanded one step before they are multiplied: tiles can be loaded only once they have left the store buffer,
        // and the products run while the next step is being expanded.
        constexpr int64_t kStep = 2;
        auto expanded = [&](int64_t t) {
            int64_t end = t + kStep < tiles ? t + kStep : tiles;
            bf16* set = scratch + t / kStep % 2 * 2 * kStep * 512;
            if (t < tiles) bf16_tiles(w, pair.first, t, end, set), bf16_tiles(w, pair.second, t, end, set + kStep * 512);
            return set;
        };
        const bf16* set = expanded(0);
        for (int64_t t = 0; t < tiles; t += kStep) {
            const bf16* next = expanded(t + kStep);
            int64_t count = t + kStep < tiles ? kStep : tiles - t;
            multiply(two, set, set + kStep * 512, x + t * 256, x1 + t * 256, count, {nullptr, nullptr, 0});
            set = next;
        }
    }
    store_sums(c, two);
    finish_tiles(a, c, pair, 0, a.num_rows);
}

// Rows [begin, end) of x, 32 at a time, against one pair of blocks, a chunk of k at a time: the chunk's weights stay in
// L1, x comes from L2 and the sums wait in `sums`, which is exact: they are floats in the tile, too.
inline void linear_many_rows(const LinearArgs& a, const uint32_t* x, BlockPair pair, int64_t begin, int64_t end, bf16* scratch,
                             float* sums) {
    const Matrix& w = a.weight;
    const int64_t tiles = w.num_tiles();
    for (int64_t t = 0; t < tiles; t += kChunkTiles) {
        int64_t stop = t + kChunkTiles < tiles ? t + kChunkTiles : tiles;
        const bf16* w0 = bf16_tiles(w, pair.first, t, stop, scratch);
        const bf16* w1 = bf16_tiles(w, pair.second, t, stop, scratch + kChunkTiles * 512);
        // The next chunk's weights come from memory meanwhile, a slice of both blocks with every tile of every 32 rows.
        // (Beyond a block's end lies the next block, which comes next; beyond the matrix, a prefetch does nothing.)
        const int64_t chunk_bytes = kChunkTiles * w.tile_bytes(), panels = divide_up(end - begin, 32);
        Ahead ahead{w.tile(pair.first, t) + chunk_bytes, w.tile(pair.second, t) + chunk_bytes,
                    round_up(divide_up(w.tile_bytes(), panels), 64)};
        for (int64_t row = begin; row < end; row += 32) {
            bool two = row + 16 < end;
            float* c = sums + (row - begin) / 32 * 1024;
            const uint32_t* x0 = x + (row / 16 * tiles + t) * 256;
            const uint32_t* x1 = two ? x0 + tiles * 256 : x0;
            t ? load_sums(c) : zero_sums();
            multiply(two, w0, w1, x0, x1, stop - t, ahead);
            ahead.first += (stop - t) * ahead.step;
            ahead.second += (stop - t) * ahead.step;
            store_sums(c, true);
            // One behind: these sums were stored a while ago, and finishing them overlaps with the products just begun.
            if (stop == tiles && row > begin) finish_tiles(a, c - 1024, pair, row - 32, 32);
        }
    }
    const int64_t last = begin + (end - begin - 1) / 32 * 32;
    finish_tiles(a, sums + (last - begin) / 32 * 1024, pair, last, end - last);
}

inline void linear_amx(const LinearArgs& a, Context& context) {
    const Matrix& w = a.weight;
    if (a.type != Type::bf16 || w.type == Type::f32) return linear(a, context);
    const int64_t tiles = w.num_tiles(), row_blocks = divide_up(a.num_rows, 16);
    uint32_t* x = context.shared.get<uint32_t>(row_blocks * tiles * 256);
    context.pool.run(row_blocks, [&](int64_t i, int) {
        int64_t rows = a.num_rows - i * 16 < 16 ? a.num_rows - i * 16 : 16;
        pack_columns(static_cast<const bf16*>(a.x) + i * 16 * a.x_stride, a.x_stride, rows, w.cols, x + i * tiles * 256);
    });
    const bool gated = a.epilogue == Epilogue::silu_mul;
    const int64_t num_blocks = w.num_blocks(), num_pairs = gated ? num_blocks / 2 : divide_up(num_blocks, 2);
    auto pair = [&](int64_t i) {
        if (gated) return BlockPair{i, num_blocks / 2 + i, true};
        bool second = 2 * i + 1 < num_blocks;
        return BlockPair{2 * i, second ? 2 * i + 1 : 2 * i, second};
    };
    const bool few = a.num_rows <= kFewRows;
    const int64_t panels = few ? 1 : divide_up(a.num_rows, kPanelRows);
    // About 128 KB of weights a task: enough to stream, few enough to share out evenly.
    const int64_t pair_bytes = 2 * tiles * w.tile_bytes();
    int64_t group = few ? (131072 + pair_bytes - 1) / pair_bytes : 4;
    const int64_t groups = divide_up(num_pairs, group);
    context.pool.run(groups * panels, [&](int64_t task, int thread) {
        Tiles configured;
        bf16* scratch = context.thread_scratch[thread].get<bf16>(2 * kChunkTiles * 512);
        int64_t first = task % groups * group, panel = task / groups;  // a panel of x is done with before the next
        for (int64_t i = first; i < first + group && i < num_pairs; i++) {
            if (few) {
                linear_few_rows(a, x, pair(i), scratch);
            } else {
                int64_t begin = panel * kPanelRows, end = begin + kPanelRows < a.num_rows ? begin + kPanelRows : a.num_rows;
                float* sums = context.thread_scratch2[thread].get<float>(kPanelRows / 32 * 1024);
                linear_many_rows(a, x, pair(i), begin, end, scratch, sums);
            }
        }
    });
}

}  // namespace quire::QUIRE_NS
