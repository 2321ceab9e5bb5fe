// Activations times a number.
#pragma once

#include "rows.h"

namespace quire::QUIRE_NS {

inline void scale(const ScaleArgs& a, Context& context) {
    for_rows(a.num_rows, context, [&](int64_t row) {
        auto multiply = [&](auto zero) {
            using T = decltype(zero);
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
            T* out = static_cast<T*>(a.out) + row * a.out_stride;
            for_vectors(a.size, [&](int64_t i, int n) { store_n(out + i, load_n(x + i, n) * a.factor, n); });
        };
        a.type == Type::f32 ? multiply(float{}) : multiply(bf16{});
    });
}

}  // namespace quire::QUIRE_NS
