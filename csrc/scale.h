// Activations times a number.
#pragma once

#include "elementwise.h"

namespace quire::QUIRE_NS {

struct ScaleSpec {
    int64_t size;  // columns
    float factor;
};

inline void scale(const ScaleSpec& s, const Operands& o, Context& context) {
    elementwise(s.size, o, context, [&](vf x) { return x * s.factor; });
}

QUIRE_OPERATION(scale, ScaleSpec, QUIRE_FIELD(size), QUIRE_FIELD(factor));

}  // namespace quire::QUIRE_NS
