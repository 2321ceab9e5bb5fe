// A program: the kernels of a model's forward pass in order, recorded once and run for every step with its sizes.
//
// quire/ops/native/builder.py records it, and program.cpp tells Python of these structs. Which operations
// there are is none of its business: an instruction names a place in the level's table (ops.h). Values live in
// numbered buffers of as many rows as the step has tokens; a buffer is the program's own or bound to the caller's memory
// for a run.
#pragma once

#include <algorithm>

#include "touch.h"

namespace quire {

struct Instruction {
    int32_t op;         // a place in the list of operations
    int32_t inputs[4];  // buffers; -1: none
    int32_t output;
    alignas(8) uint8_t spec[kSpecBytes];  // the operation's own struct
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
    int64_t narrow_at;  // the last attention's instruction, or the first one where there is none
};

struct RunArgs {
    int64_t num_rows;
    const StepArgs* steps;          // by KV group; null when no instruction needs one
    void* const* bound;             // by buffer; null for the program's own
    const int64_t* bound_strides;   // by buffer, elements
    uint8_t* const* caches;         // by layer
    int64_t first, last;            // instructions [first, last)
    Type cache_type;
    // Where `steps` are counted, the rows, ascending, whose results alone are wanted, perhaps none. From the last attention on nothing else
    // is computed: keys and values of all rows are in the caches by then. What the caller brings is made of these rows then.
    int64_t num_steps = 0, num_wanted = 0;
    const int32_t* wanted = nullptr;
};

struct Spent {  // in an instruction
    double seconds;
    int64_t calls, rows;
};

class Program {
public:
    explicit Program(const ProgramSpec& spec);

    int num_threads() const { return num_threads_; }
    int64_t num_buffers() const { return int64_t(buffers_.size()); }
    bool is_bound(int64_t buffer) const { return buffer < num_buffers() && buffers_[buffer].bound; }
    int64_t size() const { return int64_t(instructions_.size()); }

    // Makes room for that many rows and touches it: fresh pages are slow.
    void reserve(int64_t num_rows);
    void run(const RunArgs& args, Context& context);
    void run_part(int64_t first, int64_t last, int64_t num_rows, const Rows& x, const Rows& out, Context& context);

    // What was spent in each instruction since this was last asked for; nothing the first time.
    const Spent* spent() {
        timed_ = true;
        told_ = spent_;
        std::fill(spent_.begin(), spent_.end(), Spent{});
        return told_.data();
    }

private:
    void run_all(const RunArgs& args, const std::vector<void*>& memory, int64_t first, int64_t last, Context& context);

    std::vector<Instruction> instructions_;
    std::vector<Buffer> buffers_;
    std::vector<Scratch> own_;
    const Kernels& kernels_;
    int num_threads_;
    int64_t narrow_at_;
    std::vector<int32_t> crossing_;  // buffers that are made before the last attention, and read by it or after it
    TouchedCaches caches_;
    int64_t reserved_rows_ = 0;
    bool timed_ = false;
    std::vector<Spent> spent_, told_;
};

}  // namespace quire
