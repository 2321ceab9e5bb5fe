// A program: the kernels of a model's forward pass in order, recorded once and run for every step with its sizes.
//
// quire/ops/native/program.py records it and mirrors these structs. Values live in numbered buffers of as many rows as
// the step has tokens; a buffer is the program's own or bound to the caller's memory for a run.
#pragma once

#include "kernels.h"

namespace quire {

enum class Op : int32_t { embedding = 0, norm = 1, linear = 2, prepare = 3, attention = 4, add = 5, activation = 6 };
constexpr int kNumOps = 7;

struct Instruction {
    Op op;
    Epilogue epilogue;        // linear; activation
    int32_t in, other, out;   // buffers; `other` is linear's residual or add's second operand, -1: none
    int32_t subtract_mean;    // norm
    int32_t layer;            // prepare, attention: which cache
    float eps;                // norm, prepare
    float scale;              // attention
    int32_t by_position;      // embedding: of the token's position, not of its id
    Matrix weight;            // linear, embedding
    const void *vector, *bias;     // norm's weight; linear's and norm's bias
    const void *q_norm, *k_norm;   // prepare
    const float* cos_sin;          // prepare
    int64_t rotary_dim, num_heads, num_kv_heads, head_dim;  // prepare, attention
    int64_t window;                // attention
    int64_t offset;                // embedding: added to the index
    int64_t size;                  // columns: norm, add, activation's result
};

struct Buffer {
    int64_t width;  // columns; rows start at multiples of 32 elements
    Type type;
    int32_t bound;  // the caller brings the memory
};

struct RunArgs {
    int64_t num_rows;
    const StepArgs* step;           // null when no instruction needs it
    void* const* bound;             // by buffer; null for the program's own
    const int64_t* bound_strides;   // by buffer, elements
    uint8_t* const* caches;         // by layer
    int64_t block_size;
    Type cache_type;
};

class Program {
public:
    Program(const Instruction* instructions, int64_t count, const Buffer* buffers, int64_t num_buffers, Type type,
            const Kernels& kernels)
        : instructions_(instructions, instructions + count), buffers_(buffers, buffers + num_buffers), own_(num_buffers), type_(type),
          kernels_(kernels) {}

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
    Type type_;  // of activations
    const Kernels& kernels_;  // of the level it was made for: a KV cache's layout belongs to one
    int64_t reserved_rows_ = 0;
    bool timed_ = false;
    double seconds_[kNumOps] = {};
};

}  // namespace quire
