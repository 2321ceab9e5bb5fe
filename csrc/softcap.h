// cap * tanh(x / cap): keeps numbers within +-cap, smoothly. Of vectors, for the scores of attention, and of rows (logits).
#pragma once

#include "rows.h"

namespace quire::QUIRE_NS {

// One copy, so that a score's bits do not depend on which kernel or which of its loops meets it.
QUIRE_ONE_COPY inline vf capped(vf x, float cap) { return tanh(x / cap) * cap; }

inline void softcap(const ScaleArgs& a, Context& context) {
    for_rows(a.num_rows, context, [&](int64_t row) {
        auto cap = [&](auto zero) {
            using T = decltype(zero);
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
            T* out = static_cast<T*>(a.out) + row * a.out_stride;
            for_vectors(a.size, [&](int64_t i, int n) { store_n(out + i, capped(load_n(x + i, n), a.factor), n); });
        };
        a.type == Type::f32 ? cap(float{}) : cap(bf16{});
    });
}

}  // namespace quire::QUIRE_NS
