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
    const StepArgs* step(const HeadSpec& heads) const { return args.steps + heads.group; }
    CacheShape cache_shape(const HeadSpec& heads) const {
        return {step(heads)->block_size, heads.num_kv_heads, heads.head_dim, args.cache_type};
    }

    void embedding(const EmbeddingSpec& s, int32_t out) const {
        const int32_t* indices = s.by_position ? args.steps->positions : args.steps->ids;
        kernels.embedding({s.table, indices, s.offset, at(out), args.num_rows, stride(out), type}, context);
    }
    void norm(const NormSpec& s, int32_t x, int32_t out) const {
        kernels.norm({at(x), s.weight, s.bias, at(out), args.num_rows, s.size, stride(x), stride(out), s.eps, s.subtract_mean != 0,
                      s.plus_one != 0, type},
                     context);
    }
    void linear(const LinearSpec& s, int32_t x, int32_t residual, int32_t out) const {
        kernels.linear({s.weight, s.bias, at(x), at(out), at(residual), args.num_rows, stride(x), stride(out), stride(residual), type,
                        buffers[out].type, s.epilogue},
                       context);
    }
    void prepare(const PrepareSpec& s, int32_t qkv) const {
        kernels.prepare({at(qkv), stride(qkv), s.heads.num_heads, cache_shape(s.heads), args.caches[s.heads.layer], s.q_norm, s.k_norm,
                         s.eps, s.plus_one != 0, s.cos_sin, s.rotary_dim, step(s.heads), type},
                        context);
    }
    void attention(const AttentionSpec& s, int32_t query, int32_t out) const {
        kernels.attention({at(query), at(out), stride(query), stride(out), s.heads.num_heads, cache_shape(s.heads),
                           args.caches[s.heads.layer], s.scale, s.softcap, s.sinks, s.window, step(s.heads), type},
                          context);
    }
    void add(const ElementwiseSpec& s, int32_t x, int32_t y, int32_t out) const {
        kernels.add({at(x), at(y), at(out), args.num_rows, s.size, stride(x), stride(y), stride(out), buffers[x].type}, context);
    }
    void activation(const ActivationSpec& s, int32_t x, int32_t out) const {
        kernels.activation({at(x), at(out), args.num_rows, s.size, stride(x), stride(out), s.function, type}, context);
    }
    ScaleArgs scaling(const ElementwiseSpec& s, int32_t x, int32_t out) const {
        return {at(x), at(out), args.num_rows, s.size, stride(x), stride(out), s.factor, buffers[x].type};
    }

    void operator()(const Instruction& i) const {
        const int32_t x = i.inputs[0], y = i.inputs[1], out = i.output;
        switch (i.op) {
            case Op::embedding: return embedding(i.spec.embedding, out);
            case Op::norm: return norm(i.spec.norm, x, out);
            case Op::linear: return linear(i.spec.linear, x, y, out);
            case Op::prepare: return prepare(i.spec.prepare, x);
            case Op::attention: return attention(i.spec.attention, x, out);
            case Op::add: return add(i.spec.elementwise, x, y, out);
            case Op::activation: return activation(i.spec.activation, x, out);
            case Op::scale: return kernels.scale(scaling(i.spec.elementwise, x, out), context);
            case Op::softcap: return kernels.softcap(scaling(i.spec.elementwise, x, out), context);
            case Op::count: return;
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
        for (int64_t i = args.first; i < args.last; i++) run(instructions_[i]);
        return;
    }
    using Clock = std::chrono::steady_clock;
    for (int64_t i = args.first; i < args.last; i++) {
        const auto start = Clock::now();
        run(instructions_[i]);
        seconds_[int32_t(instructions_[i].op)] += std::chrono::duration<double>(Clock::now() - start).count();
    }
}

}  // namespace quire

using namespace quire;

QUIRE_API Program* quire_program_create(const ProgramSpec* spec) { return new Program(*spec); }
QUIRE_API void quire_program_destroy(Program* program) { delete program; }
QUIRE_API void quire_program_reserve(Program* program, int64_t num_rows) {
    const Call call(program->num_threads());
    program->reserve(num_rows);
}
QUIRE_API void quire_program_run(Program* program, const RunArgs* args) {
    const Call call(program->num_threads());
    program->run(*args, call.context);
}

QUIRE_API const double* quire_program_times(Program* program) { return program->times(); }

QUIRE_API void quire_pack(const Kernels* level, int32_t num_threads, const PackArgs* args) {
    const Call call(num_threads);
    level->pack(*args, call.context);
}
QUIRE_API void quire_unpack(const Kernels* level, const Matrix* matrix, int64_t first_row, int64_t num_rows, float* out) {
    for (int64_t i = 0; i < num_rows; i++) level->unpack_row(*matrix, first_row + i, out + i * matrix->cols);
}

// Touches every page of writable memory, on all threads. Contents are kept.
QUIRE_API void quire_prefault(int32_t num_threads, uint8_t* memory, int64_t num_bytes) {
    const Call call(num_threads);
    constexpr int64_t kPage = 4096, kPiece = 2 << 20;
    call.context.pool.run(divide_up(num_bytes, kPiece), [&](int64_t piece, int) {
        for (int64_t i = piece * kPiece; i < num_bytes && i < (piece + 1) * kPiece; i += kPage) {
            volatile uint8_t* p = memory + i;
            *p = *p;
        }
    });
}
