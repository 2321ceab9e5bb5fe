// What a mixture's experts answer, of which one rank each of a tensor group has some, put together on all of them.
#pragma once

#include "experts.h"
#include "gather.h"

namespace quire::QUIRE_NS {

struct GatherExpertsSpec {  // inputs: answers, which are changed in place, and what `route` made
    Meeting* meeting;
    int64_t capacity;       // as of `gather`
    const int64_t* starts;  // [size + 1]; rank r has the experts [starts[r], starts[r + 1])
    int64_t width;          // of an answer
    int64_t first;          // starts[rank]
    int32_t rank, size;
    int64_t count, top_k, stride;  // as of `experts`
};

inline void gather_experts(const GatherExpertsSpec& s, const Operands& o, Context& context) {
    const ExpertRows r = sort_by_expert(s, o, context);
    const GatherSpec ranks{s.meeting, s.capacity, s.starts, s.width, s.first, s.rank, s.size};
    const Rows answers{o.out.data, s.stride, o.out.type};
    exchange(ranks, {o.num_rows * s.top_k, answers, {}, answers, nullptr, nullptr, Type::f32, {}}, [&](int64_t begin, int64_t count, const auto& piece) {
        for_rows(count, context, [&](int64_t i) {
            int32_t owner = 0;
            while (begin + i >= r.starts[s.starts[owner + 1]]) owner++;
            piece(i, owner, 0, s.width, i * s.width);
        });
    });
}

QUIRE_OPERATION(gather_experts, GatherExpertsSpec, QUIRE_FIELD(meeting), QUIRE_FIELD(capacity), QUIRE_FIELD(starts), QUIRE_FIELD(width),
                QUIRE_FIELD(first), QUIRE_FIELD(rank), QUIRE_FIELD(size), QUIRE_FIELD(count), QUIRE_FIELD(top_k), QUIRE_FIELD(stride));

}  // namespace quire::QUIRE_NS
