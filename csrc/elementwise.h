// Functions of elements, of one row or of two: computed in fp32, rounded once.
#pragma once

#include <type_traits>

#include "operation.h"
#include "rows.h"

namespace quire::QUIRE_NS {

// out = function(x), or function(x, y), of vectors, for the first `size` columns; `out` may be x or y.
template <class Function>
void elementwise(int64_t size, const Operands& o, Context& context, const Function& function) {
    for_rows(o.num_rows, context, [&](int64_t row) {
        auto apply = [&](auto zero) {
            using T = decltype(zero);
            const T* x = o.x.row<const T>(row);
            T* out = o.out.row<T>(row);
            for_vectors(size, [&](int64_t i, int n) {
                if constexpr (std::is_invocable_v<Function, vf, vf>)
                    store_n(out + i, function(load_n(x + i, n), load_n(o.y.row<const T>(row) + i, n)), n);
                else
                    store_n(out + i, function(load_n(x + i, n)), n);
            });
        };
        o.x.type == Type::f32 ? apply(float{}) : apply(bf16{});
    });
}

}  // namespace quire::QUIRE_NS
