// The C functions that are a kernel of a level each.
#include "api.h"
#include "sample_args.h"

namespace quire {
namespace {

QUIRE_STRUCT(MoveArgs, QUIRE_FIELD(cache), QUIRE_FIELD(block_size), QUIRE_FIELD(num_kv_heads), QUIRE_FIELD(head_dim),
             QUIRE_FIELD(sources), QUIRE_FIELD(destinations), QUIRE_FIELD(count), QUIRE_FIELD(type), QUIRE_FIELD(activations));
QUIRE_STRUCT(WeightFormat, QUIRE_FIELD(tile_bytes), QUIRE_FIELD(span), QUIRE_FIELD(has_scales), QUIRE_FIELD(has_pairs), QUIRE_FIELD(rounds_x),
             QUIRE_FIELD(block_values), QUIRE_FIELD(block_bytes));
QUIRE_STRUCT(WeightOrder, QUIRE_FIELD(type), QUIRE_FIELD(paired), QUIRE_FIELD(bytes));
QUIRE_STRUCT(PackArgs, QUIRE_FIELD(matrix), QUIRE_FIELD(source), QUIRE_FIELD(source_stride), QUIRE_FIELD(start),
             QUIRE_FIELD(num_rows), QUIRE_FIELD(source_type));
QUIRE_STRUCT(SampleArgs, QUIRE_FIELD(logits), QUIRE_FIELD(type), QUIRE_FIELD(vocab_size), QUIRE_FIELD(stride),
             QUIRE_FIELD(num_rows), QUIRE_FIELD(rows), QUIRE_FIELD(logits_rows), QUIRE_FIELD(positions),
             QUIRE_FIELD(first_sample), QUIRE_FIELD(errors), QUIRE_FIELD(token_ids), QUIRE_FIELD(width),
             QUIRE_FIELD(listed_ids), QUIRE_FIELD(logprobs), QUIRE_FIELD(ranks), QUIRE_FIELD(masks), QUIRE_FIELD(drawn));

}  // namespace
}  // namespace quire

using namespace quire;

// The struct's promises (sample_args.h) are quire/sampling/native.py's to keep.
QUIRE_API(void, quire_sample, const Kernels* level, int32_t num_threads, const SampleArgs* args) {
    const Call call(num_threads);
    level->sample(*args, call.context);
}

QUIRE_API(void, quire_move_slots, const Kernels* level, const MoveArgs* args) { level->move_slots(*args); }

QUIRE_API(void, quire_pack, const Kernels* level, int32_t num_threads, const PackArgs* args) {
    const Call call(num_threads);
    level->pack(*args, call.context);
}
QUIRE_API(void, quire_unpack, const Kernels* level, const Matrix* matrix, int64_t first_row, int64_t num_rows, float* out) {
    for (int64_t i = 0; i < num_rows; i++) level->unpack_row(*matrix, first_row + i, out + i * matrix->cols);
}
// What stays there.
QUIRE_API(const WeightFormat*, quire_weight_format, int32_t type) {
    static const std::vector<WeightFormat> formats = [] {
        std::vector<WeightFormat> all;
        for (int i = 0; i < int(Type::q4_0) + kNumBlockTypes; i++) all.push_back(weight_format(Type(i)));
        return all;
    }();
    return &formats[type];
}

QUIRE_API(void, quire_weight_order, const Kernels* level, int32_t type, WeightOrder* found) { *found = level->order_of(Type(type)); }

// bare_loop of limits.h.
QUIRE_API(double, quire_bare_loop, const Kernels* level, int32_t num_threads, const uint8_t* memory, int64_t size, int32_t factors) {
    const Call call(num_threads);
    return level->bare_loop(memory, size, Factors(factors), call.context);
}

// The way in which the level cuts up large products from now on, of those that it has, or below 0 the fastest one, which takes a moment
// to find. Returns which it is; -1: there is no such, or no choice.
QUIRE_API(int32_t, quire_tune, const Kernels* level, int32_t num_threads, int32_t way) {
    if (level->num_ways < 2 || way >= level->num_ways) return -1;
    if (way < 0) {
        const Call call(num_threads);
        return level->tune(call.context);
    }
    level->choose_way(way);
    return way;
}
