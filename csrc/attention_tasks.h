// The tasks of attention: which rows of which sequences are computed together. Plain sequences are cut into pieces; those that
// share keys are joined, which changes no bit of theirs, as a row's own sums are its own (attention.h).
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "rope.h"

namespace quire::QUIRE_NS {

struct AttentionArgs {
    const void* query;  // [T, Hq * D]
    void* out;          // [T, Hq * D]
    int64_t query_stride, out_stride, num_heads;
    CacheShape cache_shape;
    const uint8_t* cache;
    float scale;
    float softcap;   // scores become softcap * tanh(score / softcap); 0: they stay
    const float* sinks;  // [Hq], a score of each head that weighs in the softmax and has no value; or null
    int64_t window;  // tokens seen, the query's own included; 0: all; below: all but so many first ones
    const StepArgs* step;
    Type type;
};

constexpr int64_t kChunk = 64;        // keys
constexpr int64_t kSpan = 1024;       // keys of a partial result, a multiple of kChunk
constexpr int64_t kNever = INT64_MAX;  // a position that no key has
constexpr int64_t kHeadsInTurn = 8;   // at most
constexpr int64_t kLeastShared = 2 * kChunk;  // keys that sequences begin with, to be taken together

// The query rows of one task: rows [begin, end) of a sequence, or of several that are taken together, and a KV head,
// row = token * group + query head of it. Several are of a token each, and have the keys before `shared` in common; kNever
// where there is but one. Of few rows some KV heads follow each other, of a chunk first all their keys and then their values: memory is
// read in longer pieces.
struct RowRange {
    const int32_t* sequences;
    int64_t kv_head, begin, end, shared, num_heads = 1;

    int64_t num_rows() const { return end - begin; }
};

// Every sequence's rows, cut into tasks of up to `rows_per_task`. The nodes of a tree are taken together, and so are sequences
// that begin with the same blocks (of a common prompt, beams), whose keys are read once for all of them then.
class AttentionTasks {
public:
    // `rows_in_turn`: so many rows of a KV head at most take heads in turn.
    AttentionTasks(const AttentionArgs& a, int64_t rows_per_task, int64_t rows_in_turn, int64_t num_threads)
        : step_(*a.step), group_(a.num_heads / a.cache_shape.num_kv_heads), num_kv_(a.cache_shape.num_kv_heads),
          rows_per_task_(rows_per_task), order_(step_.num_seqs), sets_(1) {
        std::iota(order_.begin(), order_.end(), 0);
        for (int64_t s = 0; s < step_.num_seqs; s++) num_keys_ += step_.seq_lens[s], longest_ = std::max<int64_t>(longest_, step_.seq_lens[s]);
        const bool may_share = a.window == 0 && !step_.tail_starts && step_.num_seqs > 1;
        if (may_share) std::stable_sort(order_.begin(), order_.end(), [&](int32_t s, int32_t other) { return comes_before(s, other); });
        // So many that every thread still has a few tasks.
        const int64_t most = may_share ? std::min(rows_per_task / group_, step_.num_seqs * num_kv_ / (2 * num_threads)) : 1;
        for (int64_t at = 0; at < step_.num_seqs; at = sets_.back().place) {
            const int32_t s = order_[at];
            int64_t count = 1, shared = kNever;
            if (step_.tail_counts && step_.tail_counts[s] > 1)
                count = step_.tail_counts[s], shared = step_.tail_starts[s];
            else if (num_tokens(s) == 1)
                take_together(at, most, count, shared);
            Set& set = sets_.back();
            set.shared = shared, set.num_rows = (count > 1 ? count : num_tokens(s)) * group_;
            sets_.push_back({0, at + count, 0, 0});
        }
        // Of a few sequences spans of keys are tasks, too, so that more heads can follow each other.
        const int64_t few = 4 * num_threads;
        if (num_threads > 1 && longest_ > kSpan && int64_t(sets_.size()) <= few) {
            take_in_turn(rows_in_turn, num_threads, kSpan);
            cut_by_keys_ = count() < few;
        }
        if (!cut_by_keys_) take_in_turn(rows_in_turn, num_threads, longest_);
    }
    // Whether a task is to be computed span by span, by any thread.
    bool cut_by_keys() const { return cut_by_keys_; }
    int64_t most_spans() const { return divide_up(longest_, kSpan); }
    int64_t count() const { return sets_.back().first_task; }
    int64_t most_rows() const { return most_rows_; }  // of a task, all heads'
    // A head's tasks follow each other, so that its keys and values stay in L2; the last rows see most and come first.
    RowRange operator[](int64_t task) const {
        const Set& set = *(std::upper_bound(sets_.begin(), sets_.end(), task, [](int64_t t, const Set& other) { return t < other.first_task; }) - 1);
        int64_t pieces = divide_up(set.num_rows, rows_per_task_), local = task - set.first_task;
        int64_t begin = (pieces - 1 - local % pieces) * rows_per_task_, end = begin + rows_per_task_;
        return {&order_[set.place], local / pieces * set.num_heads, begin, end < set.num_rows ? end : set.num_rows, set.shared, set.num_heads};
    }

private:
    // Sequences that are taken together: from a place in the order on.
    struct Set {
        int64_t first_task, place, num_rows, shared, num_heads = 1;
    };

    // Sets' heads, where so many keys at most are one thread's at a time. The last thread works for a quarter of the time alone at worst.
    void take_in_turn(int64_t rows_in_turn, int64_t num_threads, int64_t most_keys) {
        const int64_t share = num_threads > 1 ? num_keys_ * num_kv_ / (4 * (num_threads - 1)) : kNever;
        most_rows_ = 1;
        for (size_t i = 0; i + 1 < sets_.size(); i++) {
            Set& set = sets_[i];
            const int64_t count = sets_[i + 1].place - set.place, keys = std::min<int64_t>(step_.seq_lens[order_[set.place]], most_keys);
            set.num_heads = set.num_rows <= rows_in_turn ? kHeadsInTurn : 1;
            while (set.num_heads > 1 && (num_kv_ % set.num_heads || set.num_heads * count * keys > share)) set.num_heads /= 2;
            most_rows_ = std::max(most_rows_, std::min(set.num_rows, rows_per_task_) * set.num_heads);
            sets_[i + 1].first_task = set.first_task + divide_up(set.num_rows, rows_per_task_) * num_kv_ / set.num_heads;
        }
    }
    int64_t num_tokens(int64_t s) const { return step_.query_start_loc[s + 1] - step_.query_start_loc[s]; }
    const int32_t* table(int64_t s) const { return step_.block_tables + s * step_.max_blocks; }
    int64_t num_whole_blocks(int64_t s) const { return (step_.seq_lens[s] - 1) / step_.block_size; }
    // Sequences of many tokens, whose tasks are long, and then the others by their blocks.
    bool comes_before(int64_t s, int64_t other) const {
        if (num_tokens(s) > 1 || num_tokens(other) > 1) return num_tokens(s) > 1 && num_tokens(other) <= 1;
        return std::lexicographical_compare(table(s), table(s) + num_whole_blocks(s), table(other), table(other) + num_whole_blocks(other));
    }
    // Adds up to `most` - 1 sequences, as long as another one saves more reading than it costs.
    void take_together(int64_t place, int64_t most, int64_t& count, int64_t& shared) const {
        for (; count < most && place + count < step_.num_seqs; count++) {
            const int64_t next = std::min(shared, num_shared(order_[place], order_[place + count]));
            if (next < kLeastShared || (count > 1 && next * count < shared * (count - 1))) break;
            shared = next;
        }
    }
    // Keys that two sequences of a token each have in common, in whole chunks.
    int64_t num_shared(int64_t s, int64_t other) const {
        if (num_tokens(other) != 1) return 0;
        const int32_t* end = table(s) + std::min(num_whole_blocks(s), num_whole_blocks(other));
        return (std::mismatch(table(s), end, table(other)).first - table(s)) * step_.block_size / kChunk * kChunk;
    }

    const StepArgs& step_;
    int64_t group_, num_kv_, rows_per_task_, most_rows_ = 1, num_keys_ = 0, longest_ = 0;
    bool cut_by_keys_ = false;
    std::vector<int32_t> order_;  // of sequences
    std::vector<Set> sets_;       // and the end
};

}  // namespace quire::QUIRE_NS
