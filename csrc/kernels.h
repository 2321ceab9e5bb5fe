// What all kernels are given, and the table of them that each level of CPU features fills in (level.cpp).
//
// Sizes are in elements unless named bytes. A "step" computes T tokens of S sequences; rows are tokens.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "block_format.h"
#include "caches.h"
#include "thread_pool.h"

namespace quire {

// What follows a product. The gated ones, *_mul, halve the columns: function(first half) * second half.
enum class Epilogue : int32_t { none = 0, silu_mul = 1, gelu = 2, gelu_tanh = 3, relu = 4, gelu_mul = 5, gelu_tanh_mul = 6, silu = 7, swiglu_oai_mul = 8, relu2 = 9 };

constexpr bool is_gated(Epilogue e) {
    return e == Epilogue::silu_mul || e == Epilogue::gelu_mul || e == Epilogue::gelu_tanh_mul || e == Epilogue::swiglu_oai_mul;
}

inline int64_t type_bytes(Type type) { return type == Type::f32 ? 4 : type == Type::bf16 ? 2 : 1; }
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Elements from row to row. Not whole pages: the rows that a kernel reads at once would meet in the same few lines of L1.
inline int64_t row_stride(int64_t width, Type type) {
    const int64_t stride = round_up(width, 32);
    return stride * type_bytes(type) % 4096 ? stride : stride + 32;
}

// A weight matrix, [rows = output features, cols = input features], in blocks of 16 rows; a block holds its tiles of
// 16 x 32 one after the other, zeros beyond the last row and column. See pack.h for what is in a tile.
struct Matrix {
    const uint8_t* data;
    const float* scales;  // one a row, or null where the format has none
    int64_t rows, cols;
    Type type;
    int32_t paired;  // 1: codes in the order in which AVX2 multiplies pairs of them (pairs.h), in tiles of as many bytes

    static constexpr int64_t kRows = 16, kCols = 32;
    int64_t num_blocks() const { return divide_up(rows, kRows); }
    int64_t num_tiles() const {  // of a block
        return round_up(divide_up(cols, kCols), weight_format(type).span);
    }
    int64_t tile_bytes() const { return weight_format(type).tile_bytes; }
    const uint8_t* tile(int64_t block, int64_t tile) const { return data + (block * num_tiles() + tile) * tile_bytes(); }
};

// Scratch memory that grows and is kept: fresh pages cost more than what is computed in them.
class Scratch {
public:
    template <class T>
    T* get(int64_t count) {
        size_t bytes = round_up(count * sizeof(T), 4096);
        if (bytes > size_) {
            memory_.reset();
            memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, size_ = bytes)));
            if (!memory_) {
                std::fprintf(stderr, "quire: there is no memory for the %zu bytes that a kernel works in; ", bytes);
                std::fprintf(stderr, "lower max_num_batched_tokens; `quire plan` says what is needed\n");
                std::abort();
            }
        }
        return reinterpret_cast<T*>(memory_.get());
    }

    size_t bytes() const { return size_; }

private:
    struct Free {
        void operator()(uint8_t* p) const { std::free(p); }
    };
    std::unique_ptr<uint8_t, Free> memory_;
    size_t size_ = 0;
};

// Threads, and the memory that kernels work in: one call at a time. Programs of as many threads share one.
struct Context {
    explicit Context(int num_threads) : pool(num_threads), thread_scratch(num_threads), thread_scratch2(num_threads) {}
    std::mutex mutex;  // held by every call
    ThreadPool pool;
    const int64_t cache = second_level_cache();  // bytes of it that blocking may count on, a core
    Scratch shared, lora;
    Scratch choices, gathered, between;  // of experts (experts.h)
    std::vector<Scratch> thread_scratch, thread_scratch2;

    size_t scratch_bytes() const {
        size_t bytes = shared.bytes() + lora.bytes() + choices.bytes() + gathered.bytes() + between.bytes();
        for (const Scratch& scratch : thread_scratch) bytes += scratch.bytes();
        for (const Scratch& scratch : thread_scratch2) bytes += scratch.bytes();
        return bytes;
    }
};

// One layer's KV cache: [blocks, 2 (keys, values), Hkv, head_bytes]. A head's part of a block holds block_size tokens of
// head_dim features, features padded with zeros to a multiple of 32. Of keys and values one is stored by token,
// [block_size, D], the other by feature, [D, block_size]: as the level's attention wants to multiply them. i8: the
// elements, then block_size scales in f32.
struct CacheShape {
    int64_t block_size, num_kv_heads, head_dim;
    Type type;  // f32, bf16 or i8

    int64_t padded_dim() const { return round_up(head_dim, 32); }
    int64_t head_bytes() const {
        return block_size * (padded_dim() * type_bytes(type) + (type == Type::i8 ? 4 : 0));
    }
    int64_t block_bytes() const { return 2 * num_kv_heads * head_bytes(); }
};

// Where a sequence's token lies in a cache, by the sequence's blocks.
inline int32_t slot_of(const int32_t* blocks, int64_t position, int64_t block_size) {
    return int32_t(blocks[position / block_size] * block_size + position % block_size);
}

struct StepArgs {  // the step as one KV group sees it
    int64_t num_tokens, num_seqs;
    int64_t max_blocks;              // width of block_tables
    int64_t block_size;              // tokens
    const int32_t *ids, *positions;  // [T]
    const int32_t* slots;            // [T], as slot_of says
    const int32_t* query_start_loc;  // [S + 1]
    const int32_t* seq_lens;         // [S]
    const int32_t* block_tables;     // [S, max_blocks]
    // Where drafts are a tree, a node is a sequence of its own, and position p >= tail_starts[s] lies in the slot
    // tail_slots[s, p - tail_starts[s]]: its ancestor's. tail_counts[s] nodes from s on are of one tree, by depth, and share
    // what lies before its tail; 0 where they are counted already. Null where there is no tree.
    const int32_t* tail_starts;  // [S]
    const int32_t* tail_counts;  // [S]
    const int32_t* tail_slots;   // [S, max_tail]
    int64_t max_tail;
};

struct MoveArgs {  // tokens' keys and values of a layer's cache to other slots (cache_moves.h)
    uint8_t* cache;
    int64_t block_size, num_kv_heads, head_dim;
    const int32_t *sources, *destinations;  // [count] slots
    int64_t count;
    Type type, activations;
};

// Rows of a dense matrix into a Matrix, quantizing where its type asks for it; of one in blocks, the blocks of a file.
struct PackArgs {
    Matrix matrix;          // data and scales are written
    const void* source;     // [num_rows, cols], f32 or bf16, or blocks, or rows of w8a8
    int64_t source_stride;  // elements, or bytes
    int64_t start, num_rows;  // first row of the matrix
    Type source_type;
};

struct SampleArgs;  // sample_args.h
struct SampleRow;

struct Operation;  // operation.h

enum class Factors : int32_t { bf16, bytes, floats };  // of a bare loop (limits.h)

struct Kernels {
    const char* name;
    const Operation* operations;  // what programs are made of (ops.h)
    int32_t num_operations;
    void (*pack)(const PackArgs&, Context&);
    void (*unpack_row)(const Matrix&, int64_t row, float* out);  // [cols]
    void (*sample)(const SampleArgs&, Context&);
    void (*move_slots)(const MoveArgs&);
    double (*bare_loop)(const uint8_t* memory, int64_t size, Factors, Context&);
    int32_t num_ways;  // to cut up large products (tuning.h)
    void (*choose_way)(int32_t);
    int32_t (*tune)(Context&);
    WeightOrder (*order_of)(Type);
};

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512VnniKernels;
extern const Kernels kAvx512Bf16Kernels;
extern const Kernels kAmxKernels;
extern const Kernels kNeonDotKernels;
extern const Kernels kNeonBf16Kernels;

}  // namespace quire
