// cap * tanh(x / cap): keeps numbers within +-cap, smoothly. Of vectors, for the scores of attention, and of rows (logits).
#pragma once

#include "elementwise.h"

namespace quire::QUIRE_NS {

// One copy, so that a score's bits do not depend on which kernel or which of its loops meets it.
QUIRE_ONE_COPY inline vf capped(vf x, float cap) { return tanh(x / cap) * cap; }

struct SoftcapSpec {
    int64_t size;  // columns
    float cap;
};

inline void softcap(const SoftcapSpec& s, const Operands& o, Context& context) {
    elementwise(s.size, o, context, [&](vf x) { return capped(x, s.cap); });
}

QUIRE_OPERATION(softcap, SoftcapSpec, QUIRE_FIELD(size), QUIRE_FIELD(cap));

}  // namespace quire::QUIRE_NS
