// The fields of the structs that Python makes: quire/ops/native/structs.py declares none of them again.
#include <cstddef>
#include <vector>

#include "api.h"
#include "lora.h"
#include "rounds.h"
#include "step_inputs.h"

namespace quire {
namespace {

#define WHOLE(S) {#S, "", "", 0, int64_t(sizeof(S))}
#define FIELD(S, f) {#S, #f, kind_of<decltype(S::f)>(), int64_t(offsetof(S, f)), int64_t(sizeof(S::f))}

constexpr Field kFields[] = {
    WHOLE(Matrix), FIELD(Matrix, data), FIELD(Matrix, scales), FIELD(Matrix, rows), FIELD(Matrix, cols), FIELD(Matrix, type), FIELD(Matrix, paired),
    WHOLE(WeightFormat), FIELD(WeightFormat, tile_bytes), FIELD(WeightFormat, span), FIELD(WeightFormat, has_scales),
    FIELD(WeightFormat, has_pairs), FIELD(WeightFormat, block_values), FIELD(WeightFormat, block_bytes),
    WHOLE(HeadSpec), FIELD(HeadSpec, num_heads), FIELD(HeadSpec, num_kv_heads), FIELD(HeadSpec, head_dim), FIELD(HeadSpec, layer), FIELD(HeadSpec, group),
    WHOLE(Instruction), FIELD(Instruction, op), FIELD(Instruction, inputs), FIELD(Instruction, output), FIELD(Instruction, spec),
    WHOLE(Buffer), FIELD(Buffer, width), FIELD(Buffer, type), FIELD(Buffer, bound),
    WHOLE(ProgramSpec), FIELD(ProgramSpec, instructions), FIELD(ProgramSpec, num_instructions), FIELD(ProgramSpec, buffers),
    FIELD(ProgramSpec, num_buffers), FIELD(ProgramSpec, kernels), FIELD(ProgramSpec, num_threads),
    WHOLE(StepArgs), FIELD(StepArgs, num_tokens), FIELD(StepArgs, num_seqs), FIELD(StepArgs, max_blocks), FIELD(StepArgs, block_size), FIELD(StepArgs, ids),
    FIELD(StepArgs, positions), FIELD(StepArgs, slots), FIELD(StepArgs, query_start_loc), FIELD(StepArgs, seq_lens),
    FIELD(StepArgs, block_tables), FIELD(StepArgs, tail_starts), FIELD(StepArgs, tail_counts),
    FIELD(StepArgs, tail_slots), FIELD(StepArgs, max_tail),
    WHOLE(LoraPart), FIELD(LoraPart, a), FIELD(LoraPart, b), FIELD(LoraPart, rank), FIELD(LoraPart, first), FIELD(LoraPart, last), FIELD(LoraPart, factor),
    FIELD(LoraPart, num_virtual),
    WHOLE(LoraRows), FIELD(LoraRows, slots),
    WHOLE(LoraLayer), FIELD(LoraLayer, rows), FIELD(LoraLayer, parts), FIELD(LoraLayer, num_parts), FIELD(LoraLayer, max_rank),
    WHOLE(MoveArgs), FIELD(MoveArgs, cache), FIELD(MoveArgs, block_size), FIELD(MoveArgs, num_kv_heads), FIELD(MoveArgs, head_dim),
    FIELD(MoveArgs, sources), FIELD(MoveArgs, destinations), FIELD(MoveArgs, count), FIELD(MoveArgs, type), FIELD(MoveArgs, activations),
    WHOLE(RunArgs), FIELD(RunArgs, num_rows), FIELD(RunArgs, steps), FIELD(RunArgs, bound), FIELD(RunArgs, bound_strides),
    FIELD(RunArgs, caches), FIELD(RunArgs, first), FIELD(RunArgs, last), FIELD(RunArgs, cache_type),
    WHOLE(PackArgs), FIELD(PackArgs, matrix), FIELD(PackArgs, source), FIELD(PackArgs, source_stride), FIELD(PackArgs, start),
    FIELD(PackArgs, num_rows), FIELD(PackArgs, source_type),
    WHOLE(SampleArgs), FIELD(SampleArgs, logits), FIELD(SampleArgs, type), FIELD(SampleArgs, vocab_size), FIELD(SampleArgs, stride),
    FIELD(SampleArgs, num_rows), FIELD(SampleArgs, rows), FIELD(SampleArgs, logits_rows), FIELD(SampleArgs, positions),
    FIELD(SampleArgs, first_sample), FIELD(SampleArgs, errors), FIELD(SampleArgs, token_ids), FIELD(SampleArgs, width),
    FIELD(SampleArgs, listed_ids), FIELD(SampleArgs, logprobs), FIELD(SampleArgs, ranks), FIELD(SampleArgs, masks),
    FIELD(SampleArgs, drawn),
    WHOLE(RoundsArgs), FIELD(RoundsArgs, body), FIELD(RoundsArgs, head), FIELD(RoundsArgs, kernels), FIELD(RoundsArgs, num_rows),
    FIELD(RoundsArgs, num_rounds), FIELD(RoundsArgs, rows), FIELD(RoundsArgs, records), FIELD(RoundsArgs, token_ids),
    FIELD(RoundsArgs, token_stride), FIELD(RoundsArgs, block_tables), FIELD(RoundsArgs, table_stride),
    FIELD(RoundsArgs, group_stride), FIELD(RoundsArgs, num_groups), FIELD(RoundsArgs, block_size), FIELD(RoundsArgs, caches),
    FIELD(RoundsArgs, cache_type), FIELD(RoundsArgs, hidden_type), FIELD(RoundsArgs, hidden), FIELD(RoundsArgs, hidden_stride),
    FIELD(RoundsArgs, logits), FIELD(RoundsArgs, vocab_size), FIELD(RoundsArgs, drafts),
    WHOLE(StepInputs), FIELD(StepInputs, token_ids), FIELD(StepInputs, token_stride), FIELD(StepInputs, block_tables),
    FIELD(StepInputs, table_stride), FIELD(StepInputs, group_stride), FIELD(StepInputs, num_groups), FIELD(StepInputs, block_size),
    FIELD(StepInputs, num_rows), FIELD(StepInputs, num_tokens), FIELD(StepInputs, rows), FIELD(StepInputs, max_blocks),
    FIELD(StepInputs, out),
};

// With those of the operations' own structs, which every level has alike.
std::vector<Field> all_fields() {
    std::vector<Field> fields(std::begin(kFields), std::end(kFields));
    for (int32_t i = 0; i < kPortableKernels.num_operations; i++) {
        const Operation& operation = kPortableKernels.operations[i];
        fields.insert(fields.end(), operation.fields, operation.fields + operation.num_fields);
    }
    return fields;
}

}  // namespace
}  // namespace quire

QUIRE_API const void* quire_fields(int64_t* count) {
    static const std::vector<quire::Field> fields = quire::all_fields();
    *count = int64_t(fields.size());
    return fields.data();
}
