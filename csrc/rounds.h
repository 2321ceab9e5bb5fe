// What rounds.cpp is told; quire/ops/native/rounds.py mirrors both structs, field by field.
#pragma once

#include "program.h"
#include "sample_args.h"

namespace quire {

// Tokens [start, end) of a row are computed first; num_drafts more are then drawn.
struct RoundRow {
    int64_t row;  // of token_ids and block_tables
    int64_t start, end, num_drafts;
    int64_t position;  // in the output, of the first token that is drawn
};

struct RoundsArgs {
    Program *body, *head;  // ids (and hidden states before them) to hidden states, these to logits; of as many threads
    const Kernels* kernels;
    int64_t num_rows, num_rounds;
    const RoundRow* rows;         // those with more drafts first
    const SampleRow* records;     // one for each, none with logprobs
    const int32_t* token_ids;     // [table rows, token_stride]
    int64_t token_stride;
    const int32_t* block_tables;  // [num_groups, table rows, table_stride]
    int64_t table_stride, group_stride, num_groups, block_size;
    uint8_t* const* caches;  // by layer
    Type cache_type, hidden_type;
    void* hidden;  // [tokens of the rows, hidden_stride]
    int64_t hidden_stride;
    float* logits;  // [num_rows, vocab_size]
    int64_t vocab_size;
    int64_t* drafts;  // [num_rows, num_rounds]; -1 where none could be drawn, and what follows it means nothing
};

}  // namespace quire
