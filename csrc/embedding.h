// Rows of a table, expanded from whatever it is packed in.
#pragma once

#include "pack.h"
#include "rows.h"

namespace quire::QUIRE_NS {

template <class T>
void embed_rows(const EmbeddingArgs& a, Context& context) {
    const int64_t size = a.table.cols;
    context.pool.run(divide_up(a.num_rows, kRowsPerTask), [&](int64_t task, int thread) {
        float* row = context.thread_scratch[thread].get<float>(size);
        for (int64_t t = task * kRowsPerTask; t < a.num_rows && t < (task + 1) * kRowsPerTask; t++) {
            // An index beyond the table is the caller's fault; here it must not read foreign memory.
            const int64_t index = a.indices[t] + a.offset;
            if (index >= 0 && index < a.table.rows)
                unpack_row(a.table, index, row);
            else
                std::memset(row, 0, size * sizeof(float));
            T* out = static_cast<T*>(a.out) + t * a.out_stride;
            for_vectors(size, [&](int64_t i, int n) { store_n(out + i, load_n(row + i, n), n); });
        }
    });
}

inline void embedding(const EmbeddingArgs& a, Context& context) {
    a.type == Type::f32 ? embed_rows<float>(a, context) : embed_rows<bf16>(a, context);
}

}  // namespace quire::QUIRE_NS
