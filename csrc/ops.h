// The list of operations: an operation is a line here, the header that it names, and its twin in quire/ops.
#pragma once

#include "activation.h"
#include "add.h"
#include "attention_op.h"
#include "embedding.h"
#include "experts.h"
#include "gather.h"
#include "gather_experts.h"
#include "gather_rows.h"
#include "linear_op.h"
#include "mix.h"
#include "norm.h"
#include "reduce.h"
#include "rope.h"
#include "route.h"
#include "scale.h"
#include "softcap.h"

namespace quire::QUIRE_NS {

// In an order that Python asks for; the same on every level.
constexpr auto kOperations = operations_at(std::make_integer_sequence<int, __COUNTER__ - kFirstPlace>{});

}  // namespace quire::QUIRE_NS
