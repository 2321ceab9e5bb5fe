#include "program.h"

#include <chrono>
#include <cstring>

#include "api.h"
#include "narrow_steps.h"

namespace quire {
namespace {

int64_t stride_of(const Buffer& buffer) { return row_stride(buffer.width, buffer.type); }

// One run: where each buffer is.
struct Run {
    const RunArgs& args;
    const std::vector<Buffer>& buffers;
    const std::vector<void*>& memory;
    const Kernels& kernels;
    Context& context;

    Rows rows(int32_t i) const {
        if (i < 0) return {nullptr, 0, Type::f32};
        return {memory[i], buffers[i].bound ? args.bound_strides[i] : stride_of(buffers[i]), buffers[i].type};
    }

    void operator()(const Instruction& i) const {
        const Operands operands{args.num_rows, rows(i.inputs[0]), rows(i.inputs[1]), rows(i.output),
                                args.steps,    args.caches,       args.cache_type,   {rows(i.inputs[2]), rows(i.inputs[3])}};
        kernels.operations[i.op].run(i.spec, operands, context);
    }
};

std::vector<HeadSpec> heads_in(const std::vector<Instruction>& instructions, const Kernels& kernels) {
    std::vector<HeadSpec> heads;
    for (const Instruction& instruction : instructions) {
        const Operation& operation = kernels.operations[instruction.op];
        for (const Field* field = operation.fields; field < operation.fields + operation.num_fields; field++)
            if (!std::strcmp(field->kind, "HeadSpec"))
                std::memcpy(&heads.emplace_back(), instruction.spec + field->offset, sizeof(HeadSpec));
    }
    return heads;
}

// Buffers that hold something when the instruction `at` comes which is read from there on.
std::vector<int32_t> crossing(const std::vector<Instruction>& instructions, int64_t at, const std::vector<Buffer>& buffers) {
    std::vector<bool> made, found(buffers.size());
    for (const Buffer& buffer : buffers) made.push_back(buffer.bound);  // what is brought
    for (int64_t i = 0; i < at; i++) made[instructions[i].output] = true;
    for (int64_t i = at; i < int64_t(instructions.size()); i++) {
        for (int32_t read : instructions[i].inputs)
            if (read >= 0 && made[read]) found[read] = true;
        made[instructions[i].output] = false;
    }
    std::vector<int32_t> numbers;
    for (size_t i = 0; i < buffers.size(); i++)
        if (found[i]) numbers.push_back(int32_t(i));
    return numbers;
}

}  // namespace

Program::Program(const ProgramSpec& spec)
    : instructions_(spec.instructions, spec.instructions + spec.num_instructions),
      buffers_(spec.buffers, spec.buffers + spec.num_buffers), own_(spec.num_buffers), kernels_(*spec.kernels),
      num_threads_(spec.num_threads), narrow_at_(spec.narrow_at),
      crossing_(crossing(instructions_, narrow_at_, buffers_)), caches_(heads_in(instructions_, kernels_)),
      spent_(spec.num_instructions) {}

void Program::reserve(int64_t num_rows) {
    for (size_t i = 0; i < buffers_.size(); i++) {
        if (buffers_[i].bound) continue;
        int64_t bytes = num_rows * stride_of(buffers_[i]) * type_bytes(buffers_[i].type);
        if (num_rows > reserved_rows_) std::memset(own_[i].get<uint8_t>(bytes), 0, bytes);
    }
    if (num_rows > reserved_rows_) reserved_rows_ = num_rows;
}

void Program::run(const RunArgs& args, Context& context) {
    std::vector<void*> memory(buffers_.size());
    for (size_t i = 0; i < buffers_.size(); i++) {
        int64_t bytes = args.num_rows * stride_of(buffers_[i]) * type_bytes(buffers_[i].type);
        memory[i] = buffers_[i].bound ? args.bound[i] : own_[i].get<uint8_t>(bytes);
    }
    caches_.reach({args.num_rows, {}, {}, {}, args.steps, args.caches, args.cache_type, {}}, context);
    if (!args.num_steps || args.last <= narrow_at_) return run_all(args, memory, args.first, args.last, context);
    run_all(args, memory, args.first, narrow_at_, context);
    if (!args.num_wanted) return;
    for (int32_t buffer : crossing_) {
        const Rows rows = Run{args, buffers_, memory, kernels_, context}.rows(buffer);
        const int64_t bytes = rows.stride * type_bytes(rows.type);
        uint8_t* data = static_cast<uint8_t*>(rows.data);
        for (int64_t i = 0; i < args.num_wanted; i++)  // they only move forward
            if (args.wanted[i] != i) std::memcpy(data + i * bytes, data + args.wanted[i] * bytes, bytes);
    }
    const NarrowSteps narrow(args.steps, args.num_steps, args.wanted, args.num_wanted);
    RunArgs rest = args;
    rest.num_rows = args.num_wanted, rest.steps = narrow.steps();
    run_all(rest, memory, narrow_at_, args.last, context);
}

void Program::run_all(const RunArgs& args, const std::vector<void*>& memory, int64_t first, int64_t last, Context& context) {
    const Run run{args, buffers_, memory, kernels_, context};
    if (!timed_) {
        for (int64_t i = first; i < last; i++) run(instructions_[i]);
        return;
    }
    using Clock = std::chrono::steady_clock;
    for (int64_t i = first; i < last; i++) {
        const auto start = Clock::now();
        run(instructions_[i]);
        Spent& spent = spent_[i];
        spent.seconds += std::chrono::duration<double>(Clock::now() - start).count();
        spent.calls++, spent.rows += args.num_rows;
    }
}

void Program::run_part(int64_t first, int64_t last, int64_t num_rows, const Rows& x, const Rows& out, Context& context) {
    const int64_t count = num_buffers();
    std::vector<void*> memory{x.data, out.data};
    std::vector<int64_t> strides{x.stride, out.stride}, starts{0};
    for (int64_t i = 2; i < count; i++) {
        strides.push_back(stride_of(buffers_[i]));
        starts.push_back(starts.back() + num_rows * strides.back() * type_bytes(buffers_[i].type));
    }
    uint8_t* between = context.between.get<uint8_t>(starts.back());
    for (int64_t i = 2; i < count; i++) memory.push_back(between + starts[i - 2]);
    run({num_rows, nullptr, memory.data(), strides.data(), nullptr, first, last, x.type}, context);
}

void run_part(Program& program, int64_t first, int64_t last, int64_t num_rows, const Rows& x, const Rows& out, Context& context) {
    program.run_part(first, last, num_rows, x, out, context);
}

namespace {

QUIRE_STRUCT(Instruction, QUIRE_FIELD(op), QUIRE_FIELD(inputs), QUIRE_FIELD(output), QUIRE_FIELD(spec));
QUIRE_STRUCT(Spent, QUIRE_FIELD(seconds), QUIRE_FIELD(calls), QUIRE_FIELD(rows));
QUIRE_STRUCT(Buffer, QUIRE_FIELD(width), QUIRE_FIELD(type), QUIRE_FIELD(bound));
QUIRE_STRUCT(ProgramSpec, QUIRE_FIELD(instructions), QUIRE_FIELD(num_instructions), QUIRE_FIELD(buffers),
             QUIRE_FIELD(num_buffers), QUIRE_FIELD(kernels), QUIRE_FIELD(num_threads), QUIRE_FIELD(narrow_at));
QUIRE_STRUCT(StepArgs, QUIRE_FIELD(num_tokens), QUIRE_FIELD(num_seqs), QUIRE_FIELD(max_blocks), QUIRE_FIELD(block_size),
             QUIRE_FIELD(ids), QUIRE_FIELD(positions), QUIRE_FIELD(slots), QUIRE_FIELD(query_start_loc), QUIRE_FIELD(seq_lens),
             QUIRE_FIELD(block_tables), QUIRE_FIELD(tail_starts), QUIRE_FIELD(tail_counts), QUIRE_FIELD(tail_slots),
             QUIRE_FIELD(max_tail));
QUIRE_STRUCT(RunArgs, QUIRE_FIELD(num_rows), QUIRE_FIELD(steps), QUIRE_FIELD(bound), QUIRE_FIELD(bound_strides),
             QUIRE_FIELD(caches), QUIRE_FIELD(first), QUIRE_FIELD(last), QUIRE_FIELD(cache_type), QUIRE_FIELD(num_steps),
             QUIRE_FIELD(num_wanted), QUIRE_FIELD(wanted));

}  // namespace
}  // namespace quire

using namespace quire;

QUIRE_API(Program*, quire_program_create, const ProgramSpec* spec) { return new Program(*spec); }
QUIRE_API(void, quire_program_destroy, Program* program) { delete program; }
QUIRE_API(void, quire_program_reserve, Program* program, int64_t num_rows) {
    const Call call(program->num_threads());
    program->reserve(num_rows);
}
QUIRE_API(void, quire_program_run, Program* program, const RunArgs* args) {
    const Call call(program->num_threads());
    program->run(*args, call.context);
}
QUIRE_API(const Spent*, quire_program_spent, Program* program) { return program->spent(); }
