#include "program.h"

#include <chrono>
#include <cstring>

#include "api.h"

namespace quire {
namespace {

int64_t stride_of(const Buffer& buffer) { return round_up(buffer.width, 32); }

// One run: where each buffer is, and one function an operation.
struct Run {
    const RunArgs& args;
    const std::vector<Buffer>& buffers;
    const std::vector<void*>& memory;
    const Kernels& kernels;
    Context& context;
    Type type;

    void* at(int32_t i) const { return i < 0 ? nullptr : memory[i]; }
    int64_t stride(int32_t i) const {
        if (i < 0) return 0;
        return buffers[i].bound ? args.bound_strides[i] : stride_of(buffers[i]);
    }
    CacheShape cache_shape(const Instruction& i) const { return {args.block_size, i.num_kv_heads, i.head_dim, args.cache_type}; }

    void operator()(const Instruction& i) const {
        switch (i.op) {
            case Op::embedding:
                return kernels.embedding({i.weight, i.by_position ? args.step->positions : args.step->ids, i.offset, at(i.out),
                                          args.num_rows, stride(i.out), type},
                                         context);
            case Op::norm:
                return kernels.norm({at(i.in), i.vector, i.bias, at(i.out), args.num_rows, i.size, stride(i.in), stride(i.out), i.eps,
                                     i.subtract_mean != 0, type},
                                    context);
            case Op::linear:
                return kernels.linear({i.weight, i.bias, at(i.in), at(i.out), at(i.other), args.num_rows, stride(i.in), stride(i.out),
                                       stride(i.other), type, buffers[i.out].type, i.epilogue},
                                      context);
            case Op::prepare:
                return kernels.prepare({at(i.in), stride(i.in), i.num_heads, cache_shape(i), args.caches[i.layer], i.q_norm, i.k_norm,
                                        i.eps, i.cos_sin, i.rotary_dim, args.step, type},
                                       context);
            case Op::attention:
                return kernels.attention({at(i.in), at(i.out), stride(i.in), stride(i.out), i.num_heads, cache_shape(i),
                                          args.caches[i.layer], i.scale, i.window, args.step, type},
                                         context);
            case Op::add:
                return kernels.add({at(i.in), at(i.other), at(i.out), args.num_rows, i.size, stride(i.in), stride(i.other), stride(i.out),
                                    type},
                                   context);
            case Op::activation:
                return kernels.activation({at(i.in), at(i.out), args.num_rows, i.size, stride(i.in), stride(i.out), i.epilogue, type},
                                          context);
        }
    }
};

}  // namespace

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
    const Run run{args, buffers_, memory, kernels_, context, type_};
    if (!timed_) {
        for (const Instruction& instruction : instructions_) run(instruction);
        return;
    }
    using Clock = std::chrono::steady_clock;
    for (const Instruction& instruction : instructions_) {
        const auto start = Clock::now();
        run(instruction);
        seconds_[int32_t(instruction.op)] += std::chrono::duration<double>(Clock::now() - start).count();
    }
}

}  // namespace quire

using namespace quire;

QUIRE_API Program* quire_program_create(const Instruction* instructions, int64_t count, const Buffer* buffers, int64_t num_buffers,
                                        int32_t type) {
    return new Program(instructions, count, buffers, num_buffers, Type(type), kernels());
}
QUIRE_API void quire_program_destroy(Program* program) { delete program; }
QUIRE_API void quire_program_reserve(Program* program, int64_t num_rows) {
    std::lock_guard<std::mutex> lock(call_mutex());
    program->reserve(num_rows);
}
QUIRE_API void quire_program_run(Program* program, const RunArgs* args) {
    std::lock_guard<std::mutex> lock(call_mutex());
    program->run(*args, context());
}

QUIRE_API const double* quire_program_times(Program* program) { return program->times(); }

// Sizes of what Python mirrors, so that a library and a package of different versions refuse each other.
QUIRE_API int64_t quire_struct_size(int32_t i) {
    constexpr int64_t kSizes[] = {sizeof(Matrix), sizeof(Instruction), sizeof(Buffer), sizeof(RunArgs), sizeof(StepArgs), sizeof(PackArgs)};
    return i >= 0 && i < 6 ? kSizes[i] : -1;
}

QUIRE_API void quire_pack(const PackArgs* args) {
    std::lock_guard<std::mutex> lock(call_mutex());
    kernels().pack(*args, context());
}
QUIRE_API void quire_unpack(const Matrix* matrix, int64_t first_row, int64_t num_rows, float* out) {
    for (int64_t i = 0; i < num_rows; i++) kernels().unpack_row(*matrix, first_row + i, out + i * matrix->cols);
}

// Touches every page of writable memory, on all threads. Contents are kept.
QUIRE_API void quire_prefault(uint8_t* memory, int64_t num_bytes) {
    std::lock_guard<std::mutex> lock(call_mutex());
    constexpr int64_t kPage = 4096, kPiece = 2 << 20;
    context().pool.run(divide_up(num_bytes, kPiece), [&](int64_t piece, int) {
        for (int64_t i = piece * kPiece; i < num_bytes && i < (piece + 1) * kPiece; i += kPage) {
            volatile uint8_t* p = memory + i;
            *p = *p;
        }
    });
}
