// out = epilogue(x @ weight.T + bias) + residual, for any level.
//
// A row of the result is a function of that row of x alone: every product is summed over k in one order, lane by lane
// and then across lanes, however many rows there are and whichever thread computes it.
#pragma once

#include "activation.h"
#include "lora.h"
#include "pack.h"

namespace quire::QUIRE_NS {

struct LinearArgs {  // out[m, n] = epilogue(sum_k x[m, k] * weight[n, k] + bias[n]) + residual[m, n]
    Matrix weight;
    const void* bias;  // in the type of x, or null
    const void* x;
    void* out;           // may be the residual itself
    const void* residual;  // or null
    int64_t num_rows;    // M
    int64_t x_stride, out_stride, residual_stride;  // elements from row to row
    Type type;           // of x, bias, residual: f32 or bf16
    Type out_type;       // f32 or bf16
    Epilogue epilogue;   // gated: out has half as many columns
    const LoraLayer* lora = nullptr;  // added to the product of weight and x, before all else
    LoraInner inner = {};             // of x
    int64_t lora_first = 0;           // the layer's feature that is this product's first one
};

// Sums to be finished: `width` output features from `first` on, of `num_rows` rows from `first_row` on.
struct Sums {
    const float* gate;     // [row][stride]
    const float* up;       // with a gated epilogue, what the gate is multiplied with; else null
    int64_t stride, width, first;  // width, first: features
    int64_t up_first;      // the first of `up` among the weight's rows
    int64_t first_row, num_rows;
    const float *delta = nullptr, *up_delta = nullptr;  // likewise, added to gate and up; or null
};

constexpr int64_t kDeltaStride = 32;

constexpr int64_t kTaskBytes = 65536;  // of weights: threads are done at about the same time, and seldom write to the same line of memory

// Pieces of a product in tasks of about `group`: as many for each thread, and none larger than the others by more than a piece.
struct EvenTasks {
    int64_t pieces, count;

    EvenTasks(int64_t num_pieces, int64_t group, int64_t num_threads)
        : pieces(num_pieces), count(round_up(divide_up(num_pieces, group), num_threads)) {
        if (count > pieces) count = pieces;
    }
    int64_t begin(int64_t task) const { return pieces * task / count; }
    int64_t end(int64_t task) const { return begin(task + 1); }
};

struct RowGroup {
    int64_t first, count;
};

// So many rows in groups of at most `most`, all about as large, as the sums of one or two rows wait for each other.
struct RowGroups {
    int64_t count, least, more;  // `more` of them have a row more than `least`

    RowGroups(int64_t num_rows, int64_t most) : count(divide_up(num_rows, most)), least(num_rows / count), more(num_rows % count) {}
    RowGroup operator[](int64_t index) const { return {least * index + (index < more ? index : more), least + (index < more)}; }
};

// The end of a product. Only the features there are are written.
template <class T, class Out, Epilogue kEpilogue>
QUIRE_ONE_COPY void finish_rows(const LinearArgs& args, const Sums& sums) {
    const LinearArgs a = args;  // copies, as the compiler would read them again after whatever is written
    const Sums s = sums;
    constexpr bool kGated = is_gated(kEpilogue);
    const int64_t num_features = kGated ? a.weight.rows / 2 : a.weight.rows;
    const int64_t count = num_features - s.first < s.width ? num_features - s.first : s.width;
    auto factor = [&](int64_t i, int n) { return a.weight.scales ? load_n(a.weight.scales + i, n) : splat(1.0f); };
    auto bias = [&](int64_t i, int n) { return a.bias ? load_n(static_cast<const T*>(a.bias) + i, n) : vf{}; };
    // Columns outside, in steps of a vector or two, so that scales and biases stay in registers.
    constexpr int kStep = 32 / kLanes > 2 ? 2 : 32 / kLanes;
    for (int64_t i = 0; i < count; i += kStep * kLanes) {
        vf scale[kStep], shift[kStep], up_scale[kStep], up_shift[kStep];
        int n[kStep];
        for (int j = 0; j < kStep; j++) {
            int64_t at = i + j * kLanes;
            n[j] = count - at < kLanes ? int(count - at > 0 ? count - at : 0) : kLanes;
            scale[j] = factor(s.first + at, n[j]), shift[j] = bias(s.first + at, n[j]);
            if (kGated) up_scale[j] = factor(s.up_first + at, n[j]), up_shift[j] = bias(s.up_first + at, n[j]);
        }
        for (int64_t r = 0; r < s.num_rows; r++) {
            Out* out = static_cast<Out*>(a.out) + (s.first_row + r) * a.out_stride + s.first + i;
            for (int j = 0; j < kStep; j++) {
                int64_t at = j * kLanes;
                if (n[j] == 0) break;
                vf v = plain(load(s.gate + r * s.stride + i + at) * scale[j] + shift[j]);
                if (s.delta) v = plain(v + load(s.delta + r * kDeltaStride + i + at));
                v = activate<kEpilogue>(v);
                if (kGated) {
                    vf up = plain(load(s.up + r * s.stride + i + at) * up_scale[j] + up_shift[j]);
                    if (s.delta) up = plain(up + load(s.up_delta + r * kDeltaStride + i + at));
                    v = v * opened<kEpilogue>(up);
                }
                if (a.residual)
                    v = v + load_n(static_cast<const T*>(a.residual) + (s.first_row + r) * a.residual_stride + s.first + i + at, n[j]);
                store_n(out + at, v, n[j]);
            }
        }
    }
}

template <class T, class Out>
void finish_with(const LinearArgs& a, const Sums& s) {
    auto run = [&](auto kernel) { kernel(a, s); };
    switch (a.epilogue) {
        case Epilogue::none: return run(finish_rows<T, Out, Epilogue::none>);
        case Epilogue::silu_mul: return run(finish_rows<T, Out, Epilogue::silu_mul>);
        case Epilogue::gelu: return run(finish_rows<T, Out, Epilogue::gelu>);
        case Epilogue::gelu_tanh: return run(finish_rows<T, Out, Epilogue::gelu_tanh>);
        case Epilogue::relu: return run(finish_rows<T, Out, Epilogue::relu>);
        case Epilogue::relu2: return run(finish_rows<T, Out, Epilogue::relu2>);
        case Epilogue::gelu_mul: return run(finish_rows<T, Out, Epilogue::gelu_mul>);
        case Epilogue::gelu_tanh_mul: return run(finish_rows<T, Out, Epilogue::gelu_tanh_mul>);
        case Epilogue::silu: return run(finish_rows<T, Out, Epilogue::silu>);
        case Epilogue::swiglu_oai_mul: return run(finish_rows<T, Out, Epilogue::swiglu_oai_mul>);
    }
}

inline void finish_sums(const LinearArgs& a, const Sums& s) {
    auto run = [&](auto kernel) { kernel(a, s); };
    if (a.type == Type::f32) return run(finish_with<float, float>);
    if (a.out_type == Type::f32) return run(finish_with<bf16, float>);
    run(finish_with<bf16, bf16>);
}

// Likewise some rows at a time, where rows have adapters.
inline void finish_adapted(const LinearArgs& a, Sums s) {
    constexpr int64_t kRows = kLoraWindow;
    alignas(64) float delta[2][kRows * kDeltaStride];
    s.delta = delta[0], s.up_delta = delta[1];
    const int64_t last = s.first_row + s.num_rows;
    for (; s.first_row < last; s.first_row += kRows, s.gate += kRows * s.stride) {
        s.num_rows = last - s.first_row < kRows ? last - s.first_row : kRows;
        for (int64_t i = 0; i < s.width; i += 16) {
            auto add = [&](int64_t feature, float* out) {
                const int64_t at = a.lora_first + feature + i, shift = at % 16;
                alignas(64) float pair[kRows * kDeltaStride];  // of blocks that the features begin within
                auto run = [&](auto kernel, int64_t block, float* to) {
                    kernel(*a.lora, a.inner, block, block + 1, s.first_row, s.num_rows, to, kDeltaStride);
                };
                auto add_block = [&](int64_t block, float* to) {
                    a.type == Type::f32 ? run(lora_block<float>, block, to) : run(lora_block<bf16>, block, to);
                };
                add_block(at / 16, shift ? pair : out + i);
                if (!shift) return;
                add_block(at / 16 + 1, pair + 16);
                for (int64_t r = 0; r < s.num_rows; r++) std::memcpy(out + r * kDeltaStride + i, pair + r * kDeltaStride + shift, 16 * sizeof(float));
            };
            add(s.first, delta[0]);
            if (s.up) add(s.up_first, delta[1]);
        }
        finish_sums(a, s);
        if (s.up) s.up += kRows * s.stride;
    }
}

inline void finish(const LinearArgs& a, const Sums& s) { a.inner.values ? finish_adapted(a, s) : finish_sums(a, s); }

#if defined(__AVX2__)
// A line of weights that several panels of rows meet next: into L2, and on AMD's Zen 4 into L1, too, where a core waits less for it (8 to 24 rows
// of integers take 0.8 to 0.97 of the time). Rows that meet weights as they come from memory take longer so.
QUIRE_INLINE void fetch_soon(const uint8_t* line) { __builtin_cpu_is("intel") ? __builtin_prefetch(line, 0, 2) : __builtin_prefetch(line, 0, 3); }
#endif

// The two blocks of 16 features that a task multiplies at a time: neighbours, or a gate's and its factor's.
struct BlockPair {
    int64_t first, second;
    bool has_second;
};

// The pairs of blocks that a product is made of.
struct BlockPairs {
    int64_t num_blocks, count;
    bool gated;

    explicit BlockPairs(const LinearArgs& a)
        : num_blocks(a.weight.num_blocks()), count(is_gated(a.epilogue) ? num_blocks / 2 : divide_up(num_blocks, 2)), gated(is_gated(a.epilogue)) {}
    BlockPair operator[](int64_t i) const {
        if (gated) return BlockPair{i, num_blocks / 2 + i, true};
        bool second = 2 * i + 1 < num_blocks;
        return BlockPair{2 * i, second ? 2 * i + 1 : 2 * i, second};
    }
};

// Rows [32] of a pair's sums, a gate's and its factor's or neighbours', to where they belong.
inline void finish_pair(const LinearArgs& a, BlockPair pair, const float* rows, int64_t first_row, int64_t count) {
    const bool gated = is_gated(a.epilogue);
    // Neighbours are finished as one piece of 32 features: a row's cache line is written once and whole.
    const int64_t width = pair.has_second && !gated ? 32 : 16;
    finish(a, {rows, gated ? rows + 16 : nullptr, 32, width, pair.first * 16, pair.second * 16, first_row, count});
}

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kManyRegisters = true;  // 32 of them
#else
constexpr bool kManyRegisters = false;
#endif
constexpr int kTileN = 4;                                                       // weight rows of a register tile
constexpr int kTileM = kManyRegisters ? 4 : 3;                                  // rows of x
constexpr int64_t kVectorRows = 64;                                             // rows of x that share a block's weights

// Lanes' sums between the pieces of k that they are of, [16][rows] of kLanes; a piece may be the first one, the last one or both.
struct LaneSums {
    float* lanes;
    bool first, last;
};

// sums[m][n] for N weight rows and M rows of x, over all of k or a piece of it.
template <class W, int N, int M>
inline void dot_tile(const W* weights, int64_t num_tiles, const float* x, int64_t x_stride, LaneSums between, float* sums) {
    vf acc[N][M] = {};
    for (int n = 0; n < N && !between.first; n++)
        for (int m = 0; m < M; m++) acc[n][m] = load(between.lanes + (n * M + m) * kLanes);
    for (int64_t t = 0; t < num_tiles; t++, weights += 512) {
        for (int c = 0; c < 32; c += kLanes) {
            vf w[N];
            for (int n = 0; n < N; n++) w[n] = load(weights + n * 32 + c);
            for (int m = 0; m < M; m++) {
                vf v = load(x + m * x_stride + t * 32 + c);
                for (int n = 0; n < N; n++) acc[n][m] += w[n] * v;
            }
        }
    }
    for (int n = 0; n < N && !between.last; n++)
        for (int m = 0; m < M; m++) store(between.lanes + (n * M + m) * kLanes, acc[n][m]);
    for (int m = 0; m < M && between.last; m++)
        for (int n = 0; n < N; n++) sums[m * 16 + n] = hsum(acc[n][m]);
}

template <class W>
void dot_block(const W* weights, int64_t num_tiles, const float* x, int64_t x_stride, int64_t num_rows, LaneSums between, float* sums) {
    constexpr int kAlone = 2 * kTileN;  // weight rows that the last rows of x meet one by one: enough sums to hide what adding takes
    constexpr int kRows = kManyRegisters || sizeof(W) == 4 ? kTileM : kTileM - 1;  // what becomes a float first takes registers
    int64_t m = 0;
    auto rows_of = [&](auto n_rows, auto m_rows) {
        for (int64_t n = 0; n < 16; n += n_rows) {
            const LaneSums part{between.lanes + (m * 16 + n * m_rows) * kLanes, between.first, between.last};
            dot_tile<W, n_rows, m_rows>(weights + n * 32, num_tiles, x + m * x_stride, x_stride, part, sums + m * 16 + n);
        }
        m += m_rows;
    };
    while (m + kRows <= num_rows) rows_of(std::integral_constant<int, kTileN>(), std::integral_constant<int, kRows>());
    while (m < num_rows) rows_of(std::integral_constant<int, kAlone>(), std::integral_constant<int, 1>());
}

constexpr int64_t kPieceRows = 8;      // up to so many rows of x meet a block's weights as they are unpacked,
constexpr int64_t kUnpackedTiles = 8;  // so many tiles at a time, a superblock: they stay in L1

inline void linear(const LinearArgs& a, Context& context) {
    const Matrix& w = a.weight;
    const int64_t tiles = w.num_tiles(), padded = tiles * 32;
    float* x = context.shared.get<float>(a.num_rows * padded);
    context.pool.run(divide_up(a.num_rows, 8), [&](int64_t task, int) {
        for (int64_t row = task * 8; row < a.num_rows && row < task * 8 + 8; row++) {
            float* out = x + row * padded;
            for_vectors(w.cols, [&](int64_t i, int n) {
                vf v = a.type == Type::bf16 ? load_n(static_cast<const bf16*>(a.x) + row * a.x_stride + i, n)
                                            : load_n(static_cast<const float*>(a.x) + row * a.x_stride + i, n);
                store_n(out + i, v, n);
            });
            for (int64_t i = w.cols; i < padded; i++) out[i] = 0;
        }
    });
    const bool gated = is_gated(a.epilogue);
    const int64_t up_offset = gated ? w.num_blocks() / 2 : 0;
    const int64_t num_blocks = gated ? w.num_blocks() / 2 : w.num_blocks();
    const bool is_packed = w.paired || (w.type != Type::f32 && w.type != Type::bf16);
    // As the levels that multiply bf16 have blocks' values; float32 models keep what they are.
    const bool rounded = a.type == Type::bf16;
    const int64_t piece = is_packed && a.num_rows <= kPieceRows && tiles > kUnpackedTiles ? kUnpackedTiles : tiles;
    context.pool.run(num_blocks, [&](int64_t block, int thread) {
        const int num_parts = gated ? 2 : 1;
        float* unpacked = is_packed ? context.thread_scratch[thread].get<float>(num_parts * 512 * piece) : nullptr;
        alignas(64) float sums[2][kVectorRows * 16];
        alignas(64) float lanes[2][16 * kPieceRows * kLanes];
        for (int64_t t = 0; t < tiles; t += piece) {
            const int64_t end = t + piece < tiles ? t + piece : tiles;
            for (int part = 0; part < num_parts && is_packed; part++)
                unpack_tiles(w, block + part * up_offset, t, end, rounded, unpacked + part * 512 * piece);
            for (int64_t m = 0; m < a.num_rows; m += kVectorRows) {
                const int64_t rows = a.num_rows - m < kVectorRows ? a.num_rows - m : kVectorRows;
                for (int part = 0; part < num_parts; part++) {
                    auto dot = [&](auto* weights) {
                        dot_block(weights, end - t, x + m * padded + t * 32, padded, rows, {lanes[part], t == 0, end == tiles}, sums[part]);
                    };
                    const uint8_t* weights = w.tile(block + part * up_offset, t);
                    if (is_packed) dot(unpacked + part * 512 * piece);
                    else if (w.type == Type::bf16) dot(reinterpret_cast<const bf16*>(weights));
                    else dot(reinterpret_cast<const float*>(weights));
                }
                if (end == tiles) finish(a, {sums[0], gated ? sums[1] : nullptr, 16, 16, block * 16, (block + up_offset) * 16, m, rows});
            }
        }
    });
}

}  // namespace quire::QUIRE_NS
