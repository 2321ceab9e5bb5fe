// Linear layers of eight bits on both sides on AMX: linear_int8.h's codes, and linear_amx.h's way through them.
//
// Of w8a8's tiles two neighbours are, as they lie, the B operand of a product with 64 columns of x, the A operand: quads of columns
// of 16 features. Such a pair is 1 KB, as a tile of bf16 is, and is multiplied in the same time, so what is the fastest blocking
// there is so here; w4a8's are expanded to such ones. Sums of integers are exact: the bits are those of linear_int8.h.
#pragma once

#include "linear_amx.h"
#include "linear_int8.h"

namespace quire::QUIRE_NS {

// Up to here VPDPBUSD takes less time than memory does: a KB of weights comes in 150 to 300 cycles, and each row takes 8 of them.
constexpr int64_t kRowsOfVectors = kIntRows;

// Pairs of tiles: codes as bytes, and bytes as they are, where an odd number of tiles leaves the last one alone and what follows it
// may be no memory.
class PairExpander {
public:
    explicit PairExpander(const Matrix& w) : num_tiles_(w.num_tiles()), codes_(w.type == Type::w4a8) {}
    void operator()(const uint8_t* tiles, int64_t step, uint8_t* out) const {
        const int64_t there = 2 * step + 2 > num_tiles_ ? 1 : 2, bytes = there * kTileBytes / 2;
        codes_ ? expand_w4a8(tiles, there, out) : void(std::memcpy(out, tiles, bytes));
        std::memset(out + bytes, 0, kTileBytes - bytes);
    }

private:
    int64_t num_tiles_;
    bool codes_;
};

// Steps of two tiles. Those of sums are [16 rows of x][16 features], integers in the place of floats.
struct ByteTiles {
    static constexpr bool kBytes = true;
    const Matrix& w;
    const IntRows<16, 64>& x;

    int64_t num_steps() const { return divide_up(w.num_tiles(), 2); }
    int64_t step_bytes() const { return 2 * w.tile_bytes(); }
    const uint8_t* step(int64_t block, int64_t t) const { return w.tile(block, 2 * t); }
    template <class Body>
    void with_expander(const Body& body) const {
        w.num_tiles() % 2 || w.type == Type::w4a8 ? body(PairExpander(w)) : body(AsTheyLie());
    }
    void to_rows(const float* sums, int64_t first_row, int64_t count, float* out) const {
        for (int64_t r = 0; r < count; r++) {
            const __m512i sum = _mm512_load_si512(sums + r * 16), excess = _mm512_set1_epi32(x.excess[first_row + r]);
            const __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, excess));
            _mm512_store_ps(out + r * 32, _mm512_mul_ps(value, _mm512_set1_ps(x.scales[first_row + r])));
        }
    }
};

inline void linear_amx_int8(const LinearArgs& a, Context& context) {
    if (a.num_rows <= kRowsOfVectors) return linear_int8(a, context);
    const IntRows<16, 64> rows(a, false, context.shared);
    rows.fill_all(a, context.pool);
    const ByteTiles kind{a.weight, rows};
    const uint32_t* x = reinterpret_cast<const uint32_t*>(rows.panels);
    if (a.num_rows > kFewRows) return share_many_rows(a, kind, x, context);
    share_few_rows(a, kind, 16, [&](int) { return x; }, context);
}

}  // namespace quire::QUIRE_NS
