// Tokens of several rows drawn one after another by a small model: each round computes the newest token of every row and
// draws the next one, without going back to Python. quire/ops/native/rounds.py calls it, for draft models and EAGLE heads.
#include <algorithm>
#include <cstring>

#include "api.h"
#include "program.h"
#include "sample_args.h"

namespace quire {
namespace {

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

QUIRE_STRUCT(RoundsArgs, QUIRE_FIELD(body), QUIRE_FIELD(head), QUIRE_FIELD(kernels), QUIRE_FIELD(num_rows),
             QUIRE_FIELD(num_rounds), QUIRE_FIELD(rows), QUIRE_FIELD(records), QUIRE_FIELD(token_ids),
             QUIRE_FIELD(token_stride), QUIRE_FIELD(block_tables), QUIRE_FIELD(table_stride), QUIRE_FIELD(group_stride),
             QUIRE_FIELD(num_groups), QUIRE_FIELD(block_size), QUIRE_FIELD(caches), QUIRE_FIELD(cache_type),
             QUIRE_FIELD(hidden_type), QUIRE_FIELD(hidden), QUIRE_FIELD(hidden_stride), QUIRE_FIELD(logits),
             QUIRE_FIELD(vocab_size), QUIRE_FIELD(drafts));

// The arrays of a step, in the vectors of its memory.
class Rounds {
public:
    Rounds(const RoundsArgs& args, Context& context) : a_(args), context_(context) {
        for (int64_t r = 0; r < a_.num_rows; r++) {
            num_tokens_ += a_.rows[r].end - a_.rows[r].start;
            num_blocks_ = std::max(num_blocks_, divide_up(a_.rows[r].end + a_.rows[r].num_drafts - 1, a_.block_size));
        }
        num_blocks_ = std::max<int64_t>(num_blocks_, 1);
        tables_.resize(a_.num_groups * a_.num_rows * num_blocks_);
        for (int64_t g = 0; g < a_.num_groups; g++)
            for (int64_t r = 0; r < a_.num_rows; r++)
                std::memcpy(table(g, r), a_.block_tables + g * a_.group_stride + a_.rows[r].row * a_.table_stride,
                            num_blocks_ * sizeof(int32_t));
        ids_.resize(num_tokens_), positions_.resize(num_tokens_), slots_.resize(a_.num_groups * num_tokens_);
        starts_.resize(a_.num_rows + 1), lengths_.resize(a_.num_rows), steps_.resize(a_.num_groups);
        hidden_ = static_cast<uint8_t*>(a_.hidden);
    }

    void run() {
        read();
        int64_t count = a_.num_rows;  // rows come by their numbers of drafts, the most first
        for (int64_t round = 0;; round++) {
            while (count && a_.rows[count - 1].num_drafts <= round) count--;
            if (!count) return;
            if (round) next(round, count);
            draw(round, count);
        }
    }

private:
    int32_t* table(int64_t group, int64_t r) { return tables_.data() + (group * a_.num_rows + r) * num_blocks_; }
    int64_t& draft(int64_t r, int64_t round) { return a_.drafts[r * a_.num_rounds + round]; }

    void place(int64_t at, int64_t r, int64_t position, int32_t id) {
        ids_[at] = id, positions_[at] = int32_t(position);
        for (int64_t g = 0; g < a_.num_groups; g++) slots_[g * num_tokens_ + at] = slot_of(table(g, r), position, a_.block_size);
    }

    // What each row has that the model has not read yet.
    void read() {
        int64_t at = 0;
        for (int64_t r = 0; r < a_.num_rows; r++) {
            const RoundRow& row = a_.rows[r];
            starts_[r] = int32_t(at), lengths_[r] = int32_t(row.end);
            const int32_t* ids = a_.token_ids + row.row * a_.token_stride;
            for (int64_t p = row.start; p < row.end; p++) place(at++, r, p, ids[p]);
        }
        starts_[a_.num_rows] = int32_t(at);
        std::vector<int32_t> last(a_.num_rows);
        for (int64_t r = 0; r < a_.num_rows; r++) last[r] = starts_[r + 1] - 1;
        compute(at, a_.num_rows, at > a_.num_rows ? last.data() : nullptr);
    }

    void next(int64_t round, int64_t count) {
        for (int64_t r = 0; r < count; r++) {
            const int64_t position = a_.rows[r].end - 1 + round;
            starts_[r] = int32_t(r), lengths_[r] = int32_t(position + 1);
            place(r, r, position, int32_t(draft(r, round - 1)));
        }
        starts_[count] = int32_t(count);
        compute(count, count);
    }

    // `wanted`: of each sequence the row whose hidden state is made; null for all.
    void compute(int64_t num_tokens, int64_t num_seqs, const int32_t* wanted = nullptr) {
        for (int64_t g = 0; g < a_.num_groups; g++) {
            StepArgs& step = steps_[g] = StepArgs{};
            step.num_tokens = num_tokens, step.num_seqs = num_seqs;
            step.max_blocks = num_blocks_, step.block_size = a_.block_size;
            step.ids = ids_.data(), step.positions = positions_.data(), step.slots = slots_.data() + g * num_tokens_;
            step.query_start_loc = starts_.data(), step.seq_lens = lengths_.data(), step.block_tables = table(g, 0);
        }
        std::vector<void*> bound(a_.body->num_buffers(), nullptr);
        std::vector<int64_t> strides(a_.body->num_buffers(), 0);
        bound[0] = hidden_, strides[0] = a_.hidden_stride;
        // A body that reads the hidden states before its tokens goes on from what it made; it has read them when it writes.
        if (a_.body->is_bound(1)) bound[1] = hidden_, strides[1] = a_.hidden_stride;
        a_.body->run({num_tokens, steps_.data(), bound.data(), strides.data(), a_.caches, 0, a_.body->size(), a_.cache_type,
                      wanted ? a_.num_groups : 0, num_seqs, wanted}, context_);
    }

    void draw(int64_t round, int64_t count) {
        std::vector<void*> bound(a_.head->num_buffers(), nullptr);
        std::vector<int64_t> strides(a_.head->num_buffers(), 0);
        bound[0] = hidden_, strides[0] = a_.hidden_stride;
        bound[1] = a_.logits, strides[1] = a_.vocab_size;
        a_.head->run({count, nullptr, bound.data(), strides.data(), nullptr, 0, a_.head->size(), Type::f32}, context_);
        std::vector<int64_t> numbers(5 * count + 1);
        int64_t *rows = numbers.data(), *positions = rows + count, *first = positions + count, *errors = first + count + 1;
        int64_t* drawn = errors + count;
        for (int64_t r = 0; r < count; r++) rows[r] = first[r] = r, positions[r] = a_.rows[r].position + round;
        first[count] = count;
        SampleArgs args{};
        args.logits = a_.logits, args.type = int64_t(Type::f32), args.vocab_size = args.stride = a_.vocab_size;
        args.num_rows = count, args.rows = a_.records, args.logits_rows = rows, args.positions = positions;
        args.first_sample = first, args.errors = errors, args.token_ids = drawn;
        a_.kernels->sample(args, context_);
        for (int64_t r = 0; r < count; r++) draft(r, round) = errors[r] ? -1 : drawn[r];
    }

    const RoundsArgs& a_;
    Context& context_;
    uint8_t* hidden_;
    int64_t num_tokens_ = 0, num_blocks_ = 0;
    std::vector<int32_t> ids_, positions_, slots_, starts_, lengths_, tables_;
    std::vector<StepArgs> steps_;
};

}  // namespace
}  // namespace quire

QUIRE_API(void, quire_rounds, const quire::RoundsArgs* args) {
    const quire::Call call(args->body->num_threads());
    quire::Rounds(*args, call.context).run();
}
