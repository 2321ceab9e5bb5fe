// Rows in parallel, for the kernels between the products: each row is computed by itself, in fp32, and rounded once.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace quire::QUIRE_NS {

constexpr int64_t kRowsPerTask = 8;  // rows that are worth waking a thread for

// Calls body(row) for every row, in parallel where there are many.
template <class Body>
void for_rows(int64_t num_rows, Context& context, const Body& body) {
    context.pool.run(divide_up(num_rows, kRowsPerTask), [&](int64_t task, int) {
        int64_t end = task * kRowsPerTask + kRowsPerTask;
        for (int64_t row = task * kRowsPerTask; row < num_rows && row < end; row++) body(row);
    });
}

}  // namespace quire::QUIRE_NS
