// Mixtures of experts: each row goes to a few of many functions of rows, and gets the weighted sum of what they answer.
//
// `route` chooses, `experts` answers, and `mix` sums up; where ranks have some of the experts each, `gather_experts` brings together
// what they answer. A row's choice, answers and sum are its own, whichever other rows go to the same experts.
#pragma once

#include "operation.h"
#include "rows.h"

namespace quire::QUIRE_NS {

struct ExpertsSpec {  // of `experts` the inputs are x, and what `route` made
    int64_t count, top_k;
    int64_t width, stride;  // of the answers, which are sorted by expert, and then by row: elements, and from one to the next
    Program* program;       // of those that are here, one after the other, each from its buffer 0 to its buffer 1
    const int64_t* ends;    // [num_here] of their instructions
    int64_t first, num_here;
};

// Where rows go. A slot is one of a row's choices.
struct ExpertRows {
    int32_t* places;  // [rows, top_k], among the answers
    int32_t* rows;    // [places]
    int32_t* starts;  // [count + 1], of an expert's places
};

template <class Spec>
inline ExpertRows sort_by_expert(const Spec& s, const Operands& o, Context& context) {
    const int64_t num_slots = o.num_rows * s.top_k;
    int32_t* memory = context.choices.get<int32_t>(2 * num_slots + s.count + 1);
    const ExpertRows r{memory, memory + num_slots, memory + 2 * num_slots};
    auto each = [&](const auto& body) {
        for (int64_t row = 0; row < o.num_rows; row++)
            for (int64_t i = 0; i < s.top_k; i++) body(row, row * s.top_k + i, o.y.row<const int32_t>(row)[s.top_k + i]);
    };
    std::fill(r.starts, r.starts + s.count + 1, 0);
    each([&](int64_t, int64_t, int32_t expert) { r.starts[expert + 1]++; });
    for (int64_t e = 0; e < s.count; e++) r.starts[e + 1] += r.starts[e];
    each([&](int64_t row, int64_t slot, int32_t expert) { r.rows[r.places[slot] = r.starts[expert]++] = int32_t(row); });
    for (int64_t e = s.count; e; e--) r.starts[e] = r.starts[e - 1];
    r.starts[0] = 0;
    return r;
}

inline void experts(const ExpertsSpec& s, const Operands& o, Context& context) {
    const ExpertRows r = sort_by_expert(s, o, context);
    const int64_t item = type_bytes(o.x.type), stride = row_stride(s.width, o.x.type);
    auto at = [&](const Rows& rows, int64_t row) { return rows.row<uint8_t>(0) + row * rows.stride * item; };
    const Rows answers{o.out.data, s.stride, o.x.type};
    int64_t most = 0;
    for (int64_t e = s.first; e < s.first + s.num_here; e++) most = std::max<int64_t>(most, r.starts[e + 1] - r.starts[e]);
    const Rows gathered{context.gathered.get<uint8_t>(most * stride * item), stride, o.x.type};
    for (int64_t i = 0, begin = 0; i < s.num_here; begin = s.ends[i++]) {
        const int64_t first = r.starts[s.first + i], count = r.starts[s.first + i + 1] - first;
        if (!count) continue;
        Rows x{at(o.x, r.rows[first]), o.x.stride, o.x.type};  // one row lies where it is
        if (count > 1) {
            for_rows(count, context, [&](int64_t row) { std::memcpy(at(gathered, row), at(o.x, r.rows[first + row]), s.width * item); });
            x = gathered;
        }
        run_part(*s.program, begin, s.ends[i], count, x, {at(answers, first), s.stride, o.x.type}, context);
    }
}

QUIRE_OPERATION(experts, ExpertsSpec, QUIRE_FIELD(count), QUIRE_FIELD(top_k), QUIRE_FIELD(width), QUIRE_FIELD(stride),
                QUIRE_FIELD(program), QUIRE_FIELD(ends), QUIRE_FIELD(first), QUIRE_FIELD(num_here));

}  // namespace quire::QUIRE_NS
