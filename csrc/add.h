// Sums of activations: the residual stream where it could not be fused to a product.
#pragma once

#include "elementwise.h"

namespace quire::QUIRE_NS {

struct AddSpec {
    int64_t size;  // columns
};

inline void add(const AddSpec& s, const Operands& o, Context& context) {
    elementwise(s.size, o, context, [](vf x, vf y) { return x + y; });
}

QUIRE_OPERATION(add, AddSpec, QUIRE_FIELD(size));

}  // namespace quire::QUIRE_NS
