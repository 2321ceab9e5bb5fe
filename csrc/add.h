// Sums of activations: the residual stream where it could not be fused to a product.
#pragma once

#include "rows.h"

namespace quire::QUIRE_NS {

inline void add_rows(const AddArgs& a, Context& context) {
    for_rows(a.num_rows, context, [&](int64_t row) {
        auto add = [&](auto zero) {
            using T = decltype(zero);
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
            const T* y = static_cast<const T*>(a.y) + row * a.y_stride;
            T* out = static_cast<T*>(a.out) + row * a.out_stride;
            for_vectors(a.size, [&](int64_t i, int n) { store_n(out + i, load_n(x + i, n) + load_n(y + i, n), n); });
        };
        a.type == Type::f32 ? add(float{}) : add(bf16{});
    });
}

}  // namespace quire::QUIRE_NS
