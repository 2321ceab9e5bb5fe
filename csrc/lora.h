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
    int64_t num_virtual;  // what stands at the first so many positions of a sequence are the rows of a, [num_virtual, cols]
};

struct LoraRows {  // of a run
    const int32_t* slots;  // the adapter's place of each row, -1 for none; null where no row has any

    LoraRows from(int64_t row) const { return {slots ? slots + row : nullptr}; }
};

struct LoraLayer {
    const LoraRows* rows;
    const LoraPart* parts;  // [places][num_parts]
    int64_t num_parts;
    int64_t max_rank;  // of all parts

    const int32_t* slots() const { return rows->slots; }
    const LoraPart* of(int32_t slot) const { return parts + slot * num_parts; }
    int64_t width() const { return num_parts * max_rank; }
    // What an adapter has in the place of row t, or null.
    template <class T>
    const T* virtual_row(int64_t t, int64_t position, int64_t cols) const {
        if (!slots() || slots()[t] < 0 || position >= of(slots()[t])->num_virtual) return nullptr;
        return static_cast<const T*>(of(slots()[t])->a) + position * cols;
    }
};

}  // namespace quire

#if defined(QUIRE_NS)
#include "rows.h"

namespace quire::QUIRE_NS {

// What a product's rows need for its end: A x of each that has an adapter, and which row is the next one of the same adapter.
struct LoraInner {
    const float* values = nullptr;  // [row][width], scaled; null: no row has an adapter
    const int32_t* next = nullptr;  // [row], -1 after an adapter's last
};

// Calls body(r, rows, count) for rows of one adapter among [first, first + num_rows), up to kMost at a time: each of them once.
template <int kMost, class Body>
inline void lora_groups(const int32_t* next, int64_t first, int64_t num_rows, const Body& body) {
    uint64_t done = 0;  // num_rows <= 64
    for (int64_t r = 0; r < num_rows; r++) {
        if (done >> r & 1) continue;
        int64_t rows[kMost] = {r};
        int count = 1;
        for (int64_t n = next[first + r] - first; count < kMost && n >= 0 && n < num_rows; n = next[first + n] - first) rows[count++] = n;
        for (int i = 0; i < count; i++) done |= uint64_t(1) << rows[i];
        with_rows<kMost>(count, [&](auto exact) { body(exact, rows); });
    }
}

constexpr int kLoraRows = kLanes == 16 ? 4 : 2;  // that share what is loaded of A
constexpr int kLoraDots = 4;                     // rows of A
constexpr int kLoraShared = kLanes == 16 ? 8 : kLanes == 8 ? 6 : 3;  // that share what is loaded of B
constexpr int kLoraSums = kLanes == 16 ? 16 : 12;                   // of vectors, as there are registers
constexpr int64_t kLoraWindow = 32;              // rows among which those of one adapter are looked for

// kCount rows of A times kRows of x; every sum in one order, whatever the counts. `ahead`: another's rows of A, to prefetch.
template <class T, int kCount, int kRows>
inline void lora_dots(const T* a, const T* ahead, const T* const (&x)[kRows], int64_t cols, float scale, float* const (&out)[kRows]) {
    vf sums[kRows][kCount] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= cols; i += 2 * kLanes) {
        vf even[kRows], odd[kRows];
        for (int r = 0; r < kRows; r++) load_two(x[r] + i, even[r], odd[r]);
        for (int j = 0; j < kCount; j++) {
            vf even_weight, odd_weight;
            load_two(a + j * cols + i, even_weight, odd_weight);
            __builtin_prefetch(ahead + j * cols + i);
            for (int r = 0; r < kRows; r++) sums[r][j] += odd_weight * odd[r];
            for (int r = 0; r < kRows; r++) sums[r][j] += even_weight * even[r];
        }
    }
    for_vectors(cols - i, [&](int64_t rest, int n) {
        for (int j = 0; j < kCount; j++)
            for (int r = 0; r < kRows; r++) sums[r][j] += load_n(a + j * cols + i + rest, n) * load_n(x[r] + i + rest, n);
    });
    for (int r = 0; r < kRows; r++)
        for (int j = 0; j < kCount; j++) out[r][j] = hsum(sums[r][j]) * scale;
}

template <class T>
void lora_inner_rows(const LoraLayer& l, const int32_t* next, const Rows& x, int64_t num_rows, int64_t cols, float* inner, Context& context) {
    const int64_t per_part = divide_up(l.max_rank, kLoraDots), per_window = l.num_parts * per_part;
    context.pool.run(divide_up(num_rows, kLoraWindow) * per_window, [&](int64_t task, int) {
        const int64_t first = task / per_window * kLoraWindow, p = task % per_window / per_part, j = task % per_part * kLoraDots;
        const int64_t count = num_rows - first < kLoraWindow ? num_rows - first : kLoraWindow;
        lora_groups<kLoraRows>(next, first, count, [&](auto exact, const int64_t* rows) {
            constexpr int kRows = decltype(exact)::value;
            const int32_t slot = l.slots()[first + rows[0]];
            if (slot < 0 || l.of(slot)[p].rank <= j) return;
            const T* from[kRows];
            float* out[kRows];
            for (int r = 0; r < kRows; r++) {
                from[r] = x.row<T>(first + rows[r]);
                out[r] = inner + (first + rows[r]) * l.width() + p * l.max_rank + j;
            }
            const LoraPart& part = l.of(slot)[p];
            const int64_t after = rows[0] + 1 < count ? l.slots()[first + rows[0] + 1] : -1;
            const LoraPart& next_part = after >= 0 && l.of(after)[p].rank > j ? l.of(after)[p] : part;
            with_rows<kLoraDots>(part.rank - j, [&](auto num) {
                lora_dots<T, decltype(num)::value, kRows>(static_cast<const T*>(part.a) + j * cols, static_cast<const T*>(next_part.a) + j * cols,
                                                          from, cols, part.factor, out);
            });
        });
    });
}

inline LoraInner lora_inner(const LoraLayer* l, const Rows& x, int64_t num_rows, int64_t cols, Context& context) {
    if (!l || !l->slots() || !l->max_rank) return {};
    int32_t places = 0;
    for (int64_t r = 0; r < num_rows; r++) places = l->slots()[r] >= places ? l->slots()[r] + 1 : places;
    float* inner = context.lora.get<float>(num_rows * l->width() + num_rows + places + 1);
    int32_t* next = reinterpret_cast<int32_t*>(inner + num_rows * l->width());
    int32_t* after = next + num_rows + 1;  // by place, from -1 on
    for (int64_t place = -1; place < places; place++) after[place] = -1;
    for (int64_t r = num_rows - 1; r >= 0; r--) next[r] = after[l->slots()[r]], after[l->slots()[r]] = int32_t(r);
    x.type == Type::f32 ? lora_inner_rows<float>(*l, next, x, num_rows, cols, inner, context)
                        : lora_inner_rows<bf16>(*l, next, x, num_rows, cols, inner, context);
    return {inner, next};
}

// Fetches an adapter's matrices of a block whose sums will be finished later.
template <class T>
QUIRE_INLINE void lora_fetch(const LoraLayer& l, int32_t slot, int64_t block) {
    for (int64_t p = 0; p < l.num_parts && slot >= 0; p++) {
        const LoraPart& part = l.of(slot)[p];
        if (block < part.first || block >= part.last) continue;
        const T* b = static_cast<const T*>(part.b) + (block - part.first) * part.rank * 16;
        for (int64_t i = 0; i < part.rank * 16; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(b + i);
    }
}

// What kRows rows of one adapter get in a block of 16 features. Sums go by parts and ranks, even ones and odd ones by themselves.
template <class T, int kRows>
QUIRE_ONE_COPY void lora_block_rows(const LoraLayer& l, int32_t slot, int64_t block, const float* const (&inner)[kRows], float* const (&out)[kRows]) {
    constexpr int kVectors = 16 / kLanes;
    constexpr int kHalves = 2 * kRows * kVectors <= kLoraSums ? 2 : 1;  // even and odd ones at a time, or one after the other
    for (int half = 0; half < 2; half += kHalves) {
        vf sums[kHalves][kRows][kVectors];
        for (auto& some : sums)
            for (auto& row : some)
                for (vf& sum : row) sum = splat(-0.0f);  // to add it changes nothing
        for (int64_t p = 0; p < l.num_parts && slot >= 0; p++) {
            const LoraPart& part = l.of(slot)[p];
            if (!part.rank || block < part.first || block >= part.last) continue;
            const T* b = static_cast<const T*>(part.b) + (block - part.first) * part.rank * 16;
            auto add = [&](int64_t j, int to) QUIRE_ALWAYS {
                vf weight[kVectors];
                for (int v = 0; v < kVectors; v++) weight[v] = load(b + j * 16 + v * kLanes);
                for (int r = 0; r < kRows; r++) {
                    const vf value = splat(inner[r][p * l.max_rank + j]);
                    for (int v = 0; v < kVectors; v++) sums[to][r][v] += value * weight[v];
                }
            };
            int64_t j = half;
            for (; j + kHalves <= part.rank; j += 2)
                for (int to = 0; to < kHalves; to++) add(j + to, to);
            if (j < part.rank) add(j, 0);  // the last even one
        }
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < kVectors; v++) {
                float* to = out[r] + v * kLanes;
                store(to, kHalves == 2 ? sums[0][r][v] + sums[kHalves - 1][r][v] : half ? load(to) + sums[0][r][v] : sums[0][r][v]);
            }
    }
}

// What rows [first_row, first_row + num_rows), kLoraWindow at most, get in a block; -0 where they have no adapter. `next` is
// the block that is likely to be asked for after it.
template <class T>
void lora_block(const LoraLayer& l, const LoraInner& inner, int64_t block, int64_t next, int64_t first_row, int64_t num_rows, float* out, int64_t stride) {
    int32_t fetched = -1;
    lora_groups<kLoraShared>(inner.next, first_row, num_rows, [&](auto exact, const int64_t* rows) {
        constexpr int kRows = decltype(exact)::value;
        const float* from[kRows];
        float* to[kRows];
        for (int r = 0; r < kRows; r++) from[r] = inner.values + (first_row + rows[r]) * l.width(), to[r] = out + rows[r] * stride;
        const int32_t slot = l.slots()[first_row + rows[0]];
        if (slot != fetched) lora_fetch<T>(l, fetched = slot, next);
        lora_block_rows<T, kRows>(l, slot, block, from, to);
    });
}

}  // namespace quire::QUIRE_NS
#endif
