// Rows of a table, expanded from whatever it is packed in.
#pragma once

#include "lora.h"
#include "operation.h"
#include "pack.h"
#include "rows.h"

namespace quire::QUIRE_NS {

struct EmbeddingSpec {  // out[t] = table[index of t + offset]; zeros where the table has no such row
    Matrix table;
    int64_t offset;
    int32_t by_position;  // rows of the tokens' positions, not of their ids
    const LoraLayer* lora;  // what adapters add to the rows that there are, or have in their place; or null
};

template <class T>
QUIRE_ONE_COPY void add_adapted(const LoraLayer& l, int64_t t, int64_t index, int64_t size, float* row) {
    const LoraPart& part = *l.of(l.slots()[t]);
    const T* a = static_cast<const T*>(part.a) + index * part.rank;
    for (int64_t block = part.first; block < part.last; block++) {
        const T* b = static_cast<const T*>(part.b) + block * part.rank * 16;
        float sums[16] = {};
        for (int64_t j = 0; j < part.rank; j++)
            for (int i = 0; i < 16; i++) sums[i] += to_float(a[j]) * part.factor * to_float(b[j * 16 + i]);
        for (int64_t i = block * 16; i < size && i < (block + 1) * 16; i++) row[i] += sums[i - block * 16];
    }
}

template <class T>
void embed_rows(const EmbeddingSpec& s, const Operands& o, Context& context) {
    const int64_t size = s.table.cols;
    const int32_t* indices = s.by_position ? o.steps->positions : o.steps->ids;
    context.pool.run(divide_up(o.num_rows, kRowsPerTask), [&](int64_t task, int thread) {
        float* row = context.thread_scratch[thread].get<float>(size);
        for (int64_t t = task * kRowsPerTask; t < o.num_rows && t < (task + 1) * kRowsPerTask; t++) {
            // An index beyond the table is the caller's fault; here it must not read foreign memory.
            const int64_t index = indices[t] + s.offset;
            if (const T* from = s.lora ? s.lora->virtual_row<T>(t, o.steps->positions[t], size) : nullptr) {
                for_vectors(size, [&](int64_t i, int n) { store_n(row + i, load_n(from + i, n), n); });
            } else if (index >= 0 && index < s.table.rows) {
                unpack_row(s.table, index, row);
                if (s.lora && s.lora->slots() && s.lora->slots()[t] >= 0) add_adapted<T>(*s.lora, t, index, size, row);
            } else
                std::memset(row, 0, size * sizeof(float));
            T* out = o.out.row<T>(t);
            for_vectors(size, [&](int64_t i, int n) { store_n(out + i, load_n(row + i, n), n); });
        }
    });
}

inline void embedding(const EmbeddingSpec& s, const Operands& o, Context& context) {
    o.out.type == Type::f32 ? embed_rows<float>(s, o, context) : embed_rows<bf16>(s, o, context);
}

QUIRE_OPERATION(embedding, EmbeddingSpec, QUIRE_FIELD(table), QUIRE_FIELD(offset), QUIRE_FIELD(by_position),
                QUIRE_FIELD(lora));

}  // namespace quire::QUIRE_NS
