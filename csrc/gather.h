// Columns that the ranks of a tensor group have of every row, put together on each of them through shared memory.
#pragma once

#include <cstring>

#include "meeting.h"
#include "operation.h"
#include "rows.h"

namespace quire::QUIRE_NS {

struct GatherSpec {  // rank r has the columns [starts[r], starts[r + 1])
    Meeting* meeting;
    int64_t capacity;       // bytes of each of its buffers; one row fits
    const int64_t* starts;  // [size + 1]
    int64_t width;          // of a row
    int64_t first;          // starts[rank]
    int32_t rank, size;
};

// Rows at once as many as the buffer holds: each rank writes what it has, all meet, and each reads what it lacks.
// pieces(first row, count, piece) calls piece(row - first, rank, column, columns, place in the buffer) for what ranks have.
template <class Pieces>
void exchange(const GatherSpec& s, const Operands& o, const Pieces& pieces) {
    const int64_t item = type_bytes(o.x.type), at_once = s.capacity / (s.width * item);
    auto at = [&](const Rows& rows, int64_t row, int64_t column) {
        return static_cast<uint8_t*>(rows.data) + (row * rows.stride + column) * item;
    };
    for (int64_t first = 0; first < o.num_rows; first += at_once) {
        const int64_t count = o.num_rows - first < at_once ? o.num_rows - first : at_once;
        uint8_t* buffer = s.meeting->buffer(s.rank, s.capacity);
        pieces(first, count, [&](int64_t i, int32_t rank, int64_t column, int64_t columns, int64_t place) {
            if (rank != s.rank) return;
            std::memcpy(buffer + place * item, at(o.x, first + i, 0), columns * item);
            if (o.out.data != o.x.data) std::memcpy(at(o.out, first + i, column), at(o.x, first + i, 0), columns * item);
        });
        if (!meet(*s.meeting, s.rank, s.size)) return;  // aborted, which the caller finds out
        pieces(first, count, [&](int64_t i, int32_t rank, int64_t column, int64_t columns, int64_t place) {
            if (rank != s.rank) std::memcpy(at(o.out, first + i, column), buffer + place * item, columns * item);
        });
    }
}

inline void gather(const GatherSpec& s, const Operands& o, Context& context) {
    exchange(s, o, [&](int64_t, int64_t count, const auto& piece) {
        for_rows(count, context, [&](int64_t i) {
            for (int32_t r = 0; r < s.size; r++) {
                const int64_t first = s.starts[r], columns = s.starts[r + 1] - first;
                piece(i, r, first, columns, count * first + i * columns);
            }
        });
    });
}

QUIRE_OPERATION(gather, GatherSpec, QUIRE_FIELD(meeting), QUIRE_FIELD(capacity), QUIRE_FIELD(starts), QUIRE_FIELD(width),
                QUIRE_FIELD(first), QUIRE_FIELD(rank), QUIRE_FIELD(size));

}  // namespace quire::QUIRE_NS
