// A step of which some rows alone go on: those that are sampled, once keys and values of all are in the caches.
#pragma once

#include <vector>

#include "kernels.h"

namespace quire {

// These rows, ascending, of steps as KV groups see them: of each sequence that has any, neighbours as one sequence that ends with the last
// of them, as if the rest of it had been computed before. A row's results do not depend on how its sequence is cut into steps.
class NarrowSteps {
public:
    NarrowSteps(const StepArgs* steps, int64_t num_steps, const int32_t* rows, int64_t count) : steps_(steps, steps + num_steps) {
        const StepArgs& first = *steps;  // what groups share
        std::vector<int32_t> sequences;
        for (int64_t i = 0, s = 0; i < count; i++) {
            const int32_t row = rows[i];
            while (first.query_start_loc[s + 1] <= row) s++;
            if (sequences.empty() || sequences.back() != s || rows[i - 1] + 1 != row)
                starts_.push_back(int32_t(i)), lengths_.push_back(0), sequences.push_back(int32_t(s));
            lengths_.back() = first.seq_lens[s] - (first.query_start_loc[s + 1] - 1 - row);
            ids_.push_back(first.ids[row]), positions_.push_back(first.positions[row]);
        }
        starts_.push_back(int32_t(count));
        for (const StepArgs& step : steps_) {
            for (int64_t i = 0; i < count; i++) slots_.push_back(step.slots[rows[i]]);
            for (int32_t s : sequences) tables_.insert(tables_.end(), step.block_tables + s * step.max_blocks, step.block_tables + (s + 1) * step.max_blocks);
        }
        const int32_t *slots = slots_.data(), *tables = tables_.data();
        for (StepArgs& step : steps_) {
            step.num_tokens = count, step.num_seqs = int64_t(sequences.size());
            step.ids = ids_.data(), step.positions = positions_.data(), step.query_start_loc = starts_.data(), step.seq_lens = lengths_.data();
            step.slots = slots, step.block_tables = tables;
            slots += count, tables += step.num_seqs * step.max_blocks;
        }
    }
    const StepArgs* steps() const { return steps_.data(); }

private:
    std::vector<StepArgs> steps_;
    std::vector<int32_t> ids_, positions_, starts_, lengths_, slots_, tables_;
};

}  // namespace quire
