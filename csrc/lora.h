// Low-rank additions to a product's rows, each by the matrices of its own adapter: out += scale * B (A x). What a row gets is
// a function of that row and its adapter, whoever else is in the batch. The end of every product adds it (finish, linear.h).
#pragma once

#include "operation.h"

namespace quire {

struct LoraPart {   // of one adapter, for some of a layer's output features
    const void* a;  // [rank, cols] in the type of x; of a table [its rows, rank]
    const void* b;  // likewise, by blocks of 16 features: [blocks][rank][16], zeros where a block has others' features
    int64_t rank;   // 0: nothing is added
    int64_t first, last;  // blocks of the features
    float factor;
    int64_t num_virtual;  // of a table: its rows at the first so many positions of a sequence are those of a, [num_virtual, cols]
};

struct LoraRows {  // of a run
    const int32_t* slots;  // the adapter's place of each row, -1 for none; null where no row has any
};

struct LoraLayer {
    const LoraRows* rows;
    const LoraPart* parts;  // [places][num_parts]
    int64_t num_parts;
    int64_t max_rank;  // of all parts

    const int32_t* slots() const { return rows->slots; }
    const LoraPart* of(int32_t slot) const { return parts + slot * num_parts; }
    int64_t width() const { return num_parts * max_rank; }
};

}  // namespace quire

#if defined(QUIRE_NS)
namespace quire::QUIRE_NS {

// kCount rows of A times x; every sum in one order, whatever kCount.
template <class T, int kCount>
inline void lora_dots(const T* a, const T* x, int64_t cols, float scale, float* out) {
    vf sums[kCount] = {};
    for_vectors(cols, [&](int64_t i, int n) {
        const vf v = load_n(x + i, n);
        for (int j = 0; j < kCount; j++) sums[j] += load_n(a + j * cols + i, n) * v;
    });
    for (int j = 0; j < kCount; j++) out[j] = hsum(sums[j]) * scale;
}

template <class T>
void lora_inner_rows(const LoraLayer& l, const Rows& x, int64_t num_rows, int64_t cols, float* inner, Context& context) {
    constexpr int64_t kRows = 4;
    context.pool.run(divide_up(num_rows, kRows), [&](int64_t task, int) {
        for (int64_t r = task * kRows; r < num_rows && r < (task + 1) * kRows; r++) {
            if (l.slots()[r] < 0) continue;
            const LoraPart* parts = l.of(l.slots()[r]);
            for (int64_t p = 0; p < l.num_parts; p++) {
                const T* a = static_cast<const T*>(parts[p].a);
                float* out = inner + r * l.width() + p * l.max_rank;
                int64_t j = 0;
                for (; j + 4 <= parts[p].rank; j += 4) lora_dots<T, 4>(a + j * cols, x.row<T>(r), cols, parts[p].factor, out + j);
                for (; j < parts[p].rank; j++) lora_dots<T, 1>(a + j * cols, x.row<T>(r), cols, parts[p].factor, out + j);
            }
        }
    });
}

// A x of all rows that have an adapter, scaled: [row][width]; null where no row has any.
inline const float* lora_inner(const LoraLayer* l, const Rows& x, int64_t num_rows, int64_t cols, Context& context) {
    if (!l || !l->slots() || !l->max_rank) return nullptr;
    float* inner = context.lora.get<float>(num_rows * l->width());
    x.type == Type::f32 ? lora_inner_rows<float>(*l, x, num_rows, cols, inner, context)
                        : lora_inner_rows<bf16>(*l, x, num_rows, cols, inner, context);
    return inner;
}

// What kRows rows of one adapter get in a block of 16 features. Sums go by parts and ranks, in order.
template <class T, int kRows>
inline void lora_block_rows(const LoraPart* parts, int64_t num_parts, int64_t max_rank, int64_t block, const float* inner, float* out, int64_t stride) {
    constexpr int kVectors = 16 / kLanes;
    vf sums[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kVectors; v++) sums[r][v] = splat(-0.0f);  // to add it changes nothing
    for (int64_t p = 0; p < num_parts; p++) {
        if (block < parts[p].first || block >= parts[p].last) continue;
        const T* b = static_cast<const T*>(parts[p].b) + (block - parts[p].first) * parts[p].rank * 16;
        const float* h = inner + p * max_rank;
        for (int64_t j = 0; j < parts[p].rank; j++, b += 16) {
            for (int v = 0; v < kVectors; v++) {
                const vf weight = load(b + v * kLanes);
                for (int r = 0; r < kRows; r++) sums[r][v] += splat(h[r * num_parts * max_rank + j]) * weight;
            }
        }
    }
    for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kVectors; v++) store(out + r * stride + v * kLanes, sums[r][v]);
}

// What rows [first_row, first_row + num_rows) get in a block; -0 where they have no adapter.
template <class T>
QUIRE_ONE_COPY void lora_block(const LoraLayer& l, const float* inner, int64_t block, int64_t first_row, int64_t num_rows, float* out, int64_t stride) {
    for (int64_t r = 0; r < num_rows;) {
        const int32_t* slots = l.slots() + first_row + r;
        const float* own = inner + (first_row + r) * l.width();
        const int64_t num_parts = slots[0] < 0 ? 0 : l.num_parts;
        const LoraPart* parts = slots[0] < 0 ? nullptr : l.of(slots[0]);
        if (r + 4 <= num_rows && slots[1] == slots[0] && slots[2] == slots[0] && slots[3] == slots[0]) {
            lora_block_rows<T, 4>(parts, num_parts, l.max_rank, block, own, out + r * stride, stride);
            r += 4;
        } else {
            lora_block_rows<T, 1>(parts, num_parts, l.max_rank, block, own, out + r * stride, stride);
            r++;
        }
    }
}

}  // namespace quire::QUIRE_NS
#endif
