// Where the keys and values of a task of attention lie, and which of them its rows see.
#pragma once

#include <algorithm>

#include "attention_tasks.h"

namespace quire::QUIRE_NS {

// One task's place in the step: which token and position each row has, and where keys and values lie.
struct Sight {
    const AttentionArgs& a;
    RowRange range;
    int64_t group, first_token, first_position;  // of the sequence in this step
    int64_t tail;                                // from this position on, slots are looked up one by one
    int64_t node = 0;                            // of sequences taken together, the one whose keys these are

    Sight(const AttentionArgs& args, RowRange r)
        : a(args), range(r), group(args.num_heads / args.cache_shape.num_kv_heads),
          first_token(args.step->query_start_loc[*r.sequences]) {
        first_position = a.step->seq_lens[*r.sequences] - (a.step->query_start_loc[*r.sequences + 1] - first_token);
        tail = a.step->tail_starts ? a.step->tail_starts[*r.sequences] : kNever;
    }
    bool is_several() const { return range.shared != kNever; }
    int64_t token(int64_t row) const {
        return is_several() ? a.step->query_start_loc[range.sequences[row / group]] : first_token + row / group;
    }
    int64_t position(int64_t row) const {
        return is_several() ? a.step->seq_lens[range.sequences[row / group]] - 1 : first_position + row / group;
    }
    // After the last key that any row sees.
    int64_t end_key() const {
        int64_t last = position(range.end - 1);
        for (int64_t row = range.begin; is_several() && row < range.end; row += group) last = std::max(last, position(row));
        return last + 1;
    }
    int64_t lowest_key(int64_t row) const {
        int64_t low = a.window > 0 ? position(row) - a.window + 1 : -a.window;
        return low > 0 ? low : 0;
    }
    int64_t query_head(int64_t row) const { return range.kv_head * group + row % group; }
    int64_t query_offset(int64_t row, int64_t stride) const {
        return token(row) * stride + query_head(row) * a.cache_shape.head_dim;
    }
    int64_t tail_slot(int64_t position) const {
        return a.step->tail_slots[range.sequences[node] * a.step->max_tail + position - tail];
    }
    const uint8_t* head(int64_t position, bool value) const {
        const int64_t size = a.cache_shape.block_size;
        int64_t block = position < tail ? a.step->block_tables[range.sequences[node] * a.step->max_blocks + position / size]
                                        : tail_slot(position) / size;
        return a.cache + block * a.cache_shape.block_bytes() +
               (range.kv_head + (value ? a.cache_shape.num_kv_heads : 0)) * a.cache_shape.head_bytes();
    }
    // Calls body(position, offset in its block, count) for the stretches of [low, high) that lie in one block each; in a
    // tail, for every position.
    template <class Body>
    void for_blocks(int64_t low, int64_t high, const Body& body) const {
        const int64_t size = a.cache_shape.block_size;
        const int64_t end = high < tail ? high : tail;
        for (int64_t p = low; p < end;) {
            int64_t offset = p % size, count = size - offset < end - p ? size - offset : end - p;
            body(p, offset, count);
            p += count;
        }
        for (int64_t p = low > tail ? low : tail; p < high; p++) body(p, tail_slot(p) % size, 1);
    }
};

// Calls body(end of the keys, first row, end of the rows) for the rows of a task and a chunk of keys: for all at once, or beyond
// what sequences share for each one's, which is the sight's node then.
template <class Body>
inline void for_views(Sight& sight, int64_t chunk, int64_t high, const Body& body) {
    const int64_t num_rows = sight.range.num_rows(), stop = high < chunk + kChunk ? high : chunk + kChunk;
    const bool whole = stop <= sight.range.shared;
    for (int64_t row = 0, next; row < num_rows; row = next) {
        int64_t end = stop;
        next = num_rows;
        if (!whole) {
            sight.node = (sight.range.begin + row) / sight.group;
            next = std::min(num_rows, (sight.node + 1) * sight.group - sight.range.begin);
            end = std::min(stop, sight.position(sight.range.begin + row) + 1);
        }
        if (end > chunk) body(end, row, next);
    }
}

}  // namespace quire::QUIRE_NS
