// Rows that one rank each of a tensor group has, put together on all of them: those of a table shared by token ids.
#pragma once

#include "gather.h"

namespace quire::QUIRE_NS {

// Rank r has the rows of the tokens whose ids are in [starts[r], starts[r + 1]); those in no range are rank 0's.
inline void gather_rows(const GatherSpec& s, const Operands& o, Context& context) {
    exchange(s, o, [&](int64_t begin, int64_t count, const auto& piece) {
        for_rows(count, context, [&](int64_t i) {
            const int32_t id = o.steps->ids[begin + i];
            int32_t owner = s.size - 1;
            while (owner > 0 && !(id >= s.starts[owner] && id < s.starts[owner + 1])) owner--;
            piece(i, owner, 0, s.width, i * s.width);
        });
    });
}

QUIRE_OPERATION(gather_rows, GatherSpec, QUIRE_FIELD(meeting), QUIRE_FIELD(capacity), QUIRE_FIELD(starts), QUIRE_FIELD(width),
                QUIRE_FIELD(first), QUIRE_FIELD(rank), QUIRE_FIELD(size));

}  // namespace quire::QUIRE_NS
