// What step_inputs.cpp is told; quire/worker/gather.py fills it in.
#pragma once

#include <cstdint>

namespace quire {

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

}  // namespace quire
