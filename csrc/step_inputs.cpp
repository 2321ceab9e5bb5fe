// A step's input arrays, gathered from persistent rows: the compiled twin of quire/worker/gather.py's numpy.
#include "step_inputs.h"

#include <cstring>

#include "api.h"
#include "kernels.h"

QUIRE_API void quire_step_inputs(const quire::StepInputs* inputs) {
    const quire::StepInputs& a = *inputs;
    int32_t *ids = a.out, *positions = ids + a.num_tokens, *slots = positions + a.num_tokens;
    int32_t *starts = slots + a.num_groups * a.num_tokens, *lengths = starts + a.num_rows + 1;
    int32_t* tables = lengths + a.num_rows;
    int64_t at = 0;
    for (int64_t r = 0; r < a.num_rows; r++) {
        const int64_t row = a.rows[r], first = a.rows[a.num_rows + r], count = a.rows[2 * a.num_rows + r];
        starts[r] = int32_t(at), lengths[r] = int32_t(first + count);
        std::memcpy(ids + at, a.token_ids + row * a.token_stride + first, count * sizeof(int32_t));
        for (int64_t i = 0; i < count; i++) positions[at + i] = int32_t(first + i);
        for (int64_t g = 0; g < a.num_groups; g++) {
            const int32_t* blocks = a.block_tables + g * a.group_stride + row * a.table_stride;
            std::memcpy(tables + (g * a.num_rows + r) * a.max_blocks, blocks, a.max_blocks * sizeof(int32_t));
            for (int64_t i = 0; i < count; i++) slots[g * a.num_tokens + at + i] = quire::slot_of(blocks, first + i, a.block_size);
        }
        at += count;
    }
    starts[a.num_rows] = int32_t(at);
}
