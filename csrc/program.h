// A program: the kernels of a model's forward pass in order, recorded once and run for every step with its sizes.
//
// quire/ops/native/builder.py records it, and structs.py mirrors these structs (layout.cpp checks that). Values live in
// numbered buffers of as many rows as the step has tokens; a buffer is the program's own or bound to the caller's memory
// for a run.
#pragma once

#include "kernels.h"

namespace quire {

enum class Op : int32_t { embedding, norm, linear, prepare, attention, add, activation, scale, softcap, count };

// What an instruction says beside its buffers, one struct an operation; see kernels.h for what the fields mean.
struct EmbeddingSpec {
    Matrix table;
    int64_t offset;
    int32_t by_position;  // rows of the tokens' positions, not of their ids
};
struct NormSpec {
    const void *weight, *bias;
    int64_t size;
    float eps;
    int32_t subtract_mean, plus_one;
};
struct LinearSpec {  // inputs: x, and a residual or none
    Matrix weight;
    const void* bias;
    Epilogue epilogue;
};
struct HeadSpec {
    int64_t num_heads, num_kv_heads, head_dim;
    int32_t layer;  // which of the run's caches
    int32_t group;  // which of the run's steps says where tokens lie in it
};
struct PrepareSpec {  // in place: the output is the input
    HeadSpec heads;
    const void *q_norm, *k_norm;
    const float* cos_sin;
    int64_t rotary_dim;
    float eps;
    int32_t plus_one;
};
struct AttentionSpec {
    HeadSpec heads;
    const float* sinks;
    int64_t window;
    float scale, softcap;
};
struct ActivationSpec {
    int64_t size;
    Epilogue function;
};
struct ElementwiseSpec {  // add; scale and softcap, of which alone the factor is
    int64_t size;
    float factor;
};

struct Instruction {
    Op op;
    int32_t inputs[2];  // buffers; -1: none
    int32_t output;
    union {
        EmbeddingSpec embedding;
        NormSpec norm;
        LinearSpec linear;
        PrepareSpec prepare;
        AttentionSpec attention;
        ActivationSpec activation;
        ElementwiseSpec elementwise;
    } spec;
};

struct Buffer {
    int64_t width;  // columns; rows start at multiples of 32 elements
    Type type;
    int32_t bound;  // the caller brings the memory
};

struct ProgramSpec {
    const Instruction* instructions;
    int64_t num_instructions;
    const Buffer* buffers;
    int64_t num_buffers;
    const Kernels* kernels;  // of a level; a KV cache's layout belongs to one
    int32_t num_threads;
    Type type;  // of activations
};

struct RunArgs {
    int64_t num_rows;
    const StepArgs* steps;          // by KV group; null when no instruction needs one
    void* const* bound;             // by buffer; null for the program's own
    const int64_t* bound_strides;   // by buffer, elements
    uint8_t* const* caches;         // by layer
    int64_t first, last;            // instructions [first, last)
    Type cache_type;
};

class Program {
public:
    explicit Program(const ProgramSpec& spec)
        : instructions_(spec.instructions, spec.instructions + spec.num_instructions),
          buffers_(spec.buffers, spec.buffers + spec.num_buffers), own_(spec.num_buffers), type_(spec.type), kernels_(*spec.kernels),
          num_threads_(spec.num_threads) {}

    int num_threads() const { return num_threads_; }

    // Makes room for that many rows and touches it: fresh pages are slow.
    void reserve(int64_t num_rows);
    void run(const RunArgs& args, Context& context);

    // Seconds spent in each kind of instruction since this was first asked for; [number of Op values].
    const double* times() {
        timed_ = true;
        return seconds_;
    }

private:
    std::vector<Instruction> instructions_;
    std::vector<Buffer> buffers_;
    std::vector<Scratch> own_;
    Type type_;
    const Kernels& kernels_;
    int num_threads_;
    int64_t reserved_rows_ = 0;
    bool timed_ = false;
    double seconds_[int(Op::count)] = {};
};

}  // namespace quire
