// Rows of a table, expanded from whatever it is packed in.
#pragma once

#include "operation.h"
#include "pack.h"
#include "rows.h"

namespace quire::QUIRE_NS {

struct EmbeddingSpec {  // out[t] = table[index of t + offset]; zeros where the table has no such row
    Matrix table;
    int64_t offset;
    int32_t by_position;  // rows of the tokens' positions, not of their ids
};

template <class T>
void embed_rows(const EmbeddingSpec& s, const Operands& o, Context& context) {
    const int64_t size = s.table.cols;
    const int32_t* indices = s.by_position ? o.steps->positions : o.steps->ids;
    context.pool.run(divide_up(o.num_rows, kRowsPerTask), [&](int64_t task, int thread) {
        float* row = context.thread_scratch[thread].get<float>(size);
        for (int64_t t = task * kRowsPerTask; t < o.num_rows && t < (task + 1) * kRowsPerTask; t++) {
            // An index beyond the table is the caller's fault; here it must not read foreign memory.
            const int64_t index = indices[t] + s.offset;
            if (index >= 0 && index < s.table.rows)
                unpack_row(s.table, index, row);
            else
                std::memset(row, 0, size * sizeof(float));
            T* out = o.out.row<T>(t);
            for_vectors(size, [&](int64_t i, int n) { store_n(out + i, load_n(row + i, n), n); });
        }
    });
}

inline void embedding(const EmbeddingSpec& s, const Operands& o, Context& context) {
    o.out.type == Type::f32 ? embed_rows<float>(s, o, context) : embed_rows<bf16>(s, o, context);
}

QUIRE_OPERATION(embedding, EmbeddingSpec, QUIRE_FIELD(table), QUIRE_FIELD(offset), QUIRE_FIELD(by_position));

}  // namespace quire::QUIRE_NS
