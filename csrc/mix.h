// The weighted sum of what a mixture's experts answer, and of what one does that all rows share.
#pragma once

#include "experts.h"

namespace quire::QUIRE_NS {

struct MixSpec {
    int64_t count, top_k, width, stride;  // as of `experts`
};

template <class T>
inline void mix_rows(const MixSpec& s, const Operands& o, Context& context) {
    const ExpertRows r = sort_by_expert(s, o, context);
    const Rows answers{o.x.data, s.stride, o.x.type}, &shared = o.more[0], &gate = o.more[1];
    for_rows(o.num_rows, context, [&](int64_t row) {
        const int32_t* places = r.places + row * s.top_k;
        const float* weights = o.y.row<const float>(row);
        const vf closed = gate.data ? 1.0f + exp(-load_part(gate.row<const T>(row), 1)) : splat(1.0f);
        for_vectors(s.width, [&](int64_t i, int n) {
            vf sum{};
            for (int64_t k = 0; k < s.top_k; k++) sum += load_n(answers.row<const T>(places[k]) + i, n) * weights[k];
            if (shared.data) sum += load_n(shared.row<const T>(row) + i, n) / closed[0];
            store_n(o.out.row<T>(row) + i, sum, n);
        });
    });
}

// Inputs: answers, what `route` made, what a shared expert answers, or none, and its gate's score, or none. In the order of experts'
// numbers, and then the shared one, weighed by the sigmoid of its score.
inline void mix(const MixSpec& s, const Operands& o, Context& context) {
    o.out.type == Type::f32 ? mix_rows<float>(s, o, context) : mix_rows<bf16>(s, o, context);
}

QUIRE_OPERATION(mix, MixSpec, QUIRE_FIELD(count), QUIRE_FIELD(top_k), QUIRE_FIELD(width), QUIRE_FIELD(stride));

}  // namespace quire::QUIRE_NS
