// Sums of what the ranks of a tensor group have of every row, made on each of them through shared memory.
#pragma once

#include "gather.h"

namespace quire::QUIRE_NS {

// Each rank writes its addends, all meet, and each adds them up: in fp32, in the order of ranks, then y if there is one, and
// rounded once. So all get the same bits, whatever other rows there are.
inline void reduce(const GatherSpec& s, const Operands& o, Context& context) {
    auto with_type = [&](auto zero) {
        using T = decltype(zero);
        const int64_t at_once = s.capacity / (s.size * s.width * int64_t(sizeof(T)));
        for (int64_t first = 0; first < o.num_rows; first += at_once) {
            const int64_t count = o.num_rows - first < at_once ? o.num_rows - first : at_once;
            T* buffer = reinterpret_cast<T*>(s.meeting->buffer(s.rank, s.capacity));
            auto addends = [&](int32_t rank, int64_t i) { return buffer + (rank * count + i) * s.width; };
            for_rows(count, context, [&](int64_t i) {
                std::memcpy(addends(s.rank, i), o.x.row<const T>(first + i), s.width * sizeof(T));
            });
            if (!meet(*s.meeting, s.rank, s.size)) return;  // aborted, which the caller finds out
            for_rows(count, context, [&](int64_t i) {
                for_vectors(s.width, [&](int64_t column, int n) {
                    vf sum = load_n(addends(0, i) + column, n);
                    for (int32_t r = 1; r < s.size; r++) sum += load_n(addends(r, i) + column, n);
                    if (o.y.data) sum += load_n(o.y.row<const T>(first + i) + column, n);
                    store_n(o.out.row<T>(first + i) + column, sum, n);
                });
            });
        }
    };
    o.x.type == Type::f32 ? with_type(float{}) : with_type(bf16{});
}

QUIRE_OPERATION(reduce, GatherSpec, QUIRE_FIELD(meeting), QUIRE_FIELD(capacity), QUIRE_FIELD(starts), QUIRE_FIELD(width),
                QUIRE_FIELD(first), QUIRE_FIELD(rank), QUIRE_FIELD(size));

}  // namespace quire::QUIRE_NS
