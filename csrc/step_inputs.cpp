// A step's input arrays, gathered from persistent rows: the compiled twin of quire/worker/gather.py's numpy,
// which fills in the struct.
#include <cstring>

#include "api.h"

namespace quire {
namespace {

// The persistent rows that a worker keeps of its sequences, and which tokens of which of them a step computes.
struct StepInputs {
    const int32_t* token_ids;  // [table rows, token_stride]
    int64_t token_stride;
    const int32_t* block_tables;  // [num_groups, table rows, table_stride]
    int64_t table_stride, group_stride, num_groups, block_size;
    int64_t num_rows, num_tokens;
    const int64_t* rows;  // [3, num_rows]: places in the tables, first positions, numbers of tokens, num_tokens in all
    int64_t max_blocks;   // of a row that hold its tokens up to the step's last
    // ids [num_tokens], positions [num_tokens], slots [num_groups, num_tokens], query_start_loc [num_rows + 1],
    // seq_lens [num_rows], block_tables [num_groups, num_rows, max_blocks]; as in StepArgs.
    int32_t* out;
};

QUIRE_STRUCT(StepInputs, QUIRE_FIELD(token_ids), QUIRE_FIELD(token_stride), QUIRE_FIELD(block_tables), QUIRE_FIELD(table_stride),
             QUIRE_FIELD(group_stride), QUIRE_FIELD(num_groups), QUIRE_FIELD(block_size), QUIRE_FIELD(num_rows),
             QUIRE_FIELD(num_tokens), QUIRE_FIELD(rows), QUIRE_FIELD(max_blocks), QUIRE_FIELD(out));

}  // namespace
}  // namespace quire

QUIRE_API(void, quire_step_inputs, const quire::StepInputs* inputs) {
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
