// What the sampler is told and what it answers; quire/sampling/native.py mirrors both structs, field by field.
//
// V is the vocabulary, R the number of rows, N that of samples: row r's are [first_sample[r], first_sample[r + 1]).
#pragma once

#include <cstdint>

namespace quire {

enum class SampleMode : int64_t {
    greedy = 0,  // the largest processed logit
    draw = 1,
    given = 2,  // the caller names the tokens: only their log-probabilities are wanted
};

enum SampleError : int64_t {
    kSampleOk = 0,
    kSampleNothingLeft = 1,  // the largest processed logit is -inf
    kSampleNaN = 2,
    kSampleInfinite = 3,
    kSampleBadId = 4,  // an id outside the vocabulary: our own bug
};

// Token ids, int64, with a float each where a field says so.
struct IdList {
    const int64_t* ids;
    int64_t num;
};

// One row's parameters. A row for which nothing is asked has empty lists, penalties 1, 0, 0.
struct SampleRow {
    SampleMode mode;
    uint64_t seed, sequence_index;  // of the first sample; sample j's index is j more
    int64_t top_k;                  // V or more: off
    int64_t min_weight;             // ceil(min_p * 2^40); 0: off
    double top_p;                   // 1: off
    float scale;                    // log2(e) / temperature
    float repetition_penalty, frequency_penalty, presence_penalty;
    int64_t num_logprobs;  // -1: none asked for
    IdList allowed;        // null: all. In the order in which they are applied:
    IdList forbidden;      // bad words of one token
    IdList completing;     // last tokens of bad words of which the output ends with the rest
    IdList stop;           // before min_tokens
    IdList biased;         // distinct
    const float* biases;   // one for each of them
    IdList seen;           // distinct: those to penalise
    const float* counts;   // how often the output has each
};
static_assert(sizeof(SampleRow) == 184);

struct SampleArgs {
    const void* logits;          // of as many rows as logits_rows tells, never written
    int64_t type;                // Type::f32 or Type::bf16
    int64_t vocab_size, stride;  // elements from row to row
    int64_t num_rows;
    const SampleRow* rows;        // [R]
    const int64_t* logits_rows;   // [R]: where in the logits
    const int64_t* positions;     // [R]: of the token in the output; 32 bits count
    const int64_t* first_sample;  // [R + 1]
    int64_t* errors;              // [R], SampleError
    int64_t* token_ids;           // [N]; read where the mode is `given`, or of chains; left alone where the row fails
    // [N, width], null where no row asks for them: the token itself, then the num_logprobs (at most V) most likely.
    int64_t width;
    int64_t* listed_ids;
    float* logprobs;
    int64_t* ranks;
    // [R], or null: a grammar's bits, of which bit t % 32 of word t / 32 is set where token t is allowed; null: all are.
    const uint32_t* const* masks;
    // [R], or null. Where it is there, row r stands for a chain of drafts: sample j is drawn from the j-th row of logits
    // after its first, for the j-th position, as long as those before came out as token_ids says beforehand; here goes
    // how many were drawn. Masks are [N] then, one a sample.
    int64_t* drawn;
};
static_assert(sizeof(SampleArgs) == 136);

}  // namespace quire
