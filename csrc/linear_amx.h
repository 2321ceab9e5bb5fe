// Linear layers of bf16 activations on AMX: the weights are the A operand, as they lie in memory, and x, packed in pairs
// of k, is B. The result is a tile [16 features][16 rows of x], so one row costs what sixteen do: the time it takes
// to read the weights. i8 and i4 weights are expanded to bf16 tiles just ahead, by table look-up; so are blocks.
// How a product is cut up, and what runs beside the tiles, is the same where bytes are multiplied (linear_amx_int8.h).
#pragma once

#include <atomic>
#include <iterator>

#include "amx.h"
#include "expand.h"
#include "linear.h"

namespace quire::QUIRE_NS {

inline void expand_i8_tile(const uint8_t* tile, bf16* out) {
    for (int i = 0; i < 8; i++) {
        __m512i even, odd;
        expand_i8(_mm512_loadu_si512(tile + i * 64), even, odd);
        _mm512_store_si512(out + i * 64, even);
        _mm512_store_si512(out + i * 64 + 32, odd);
    }
}

inline void expand_i4_tile(const uint8_t* tile, bf16* out) {
    const I4Shifts shifted;
    const bf16* scales = reinterpret_cast<const bf16*>(tile);
    for (int i = 0; i < 4; i++) {
        const __m512i words = _mm512_loadu_si512(tile + 32 + i * 64);
        for (int j = 0; j < 4; j++) _mm512_store_si512(out + (4 * i + j) * 32, expand_i4(scales[4 * i + j], shifted(words, j)));
    }
}

constexpr int64_t kAhead = 2048;       // bytes of bf16 weights to prefetch ahead, into L2
constexpr int64_t kCodesAhead = 2048;  // of codes, into L1: they are read by vectors, at once
constexpr int64_t kFewRows = 32;       // up to here the weights are read once, straight through
constexpr int64_t kMostPanelRows = 512;  // rows of x that a task multiplies, a chunk of k at a time out of L2

// How a product of many rows is cut up. What is fastest depends on how large L1 and L2 are and on how fast they and memory are
// beside the tiles, so each machine finds it out (tuning.h). The bits are the same.
struct Blocking {
    int64_t chunk_tiles;  // of k, whole superblocks, that a pair of blocks is multiplied with before its sums go to memory
    int64_t group_pairs;  // pairs of blocks that a task multiplies with a chunk of x
    int64_t quarters;     // of L2, for that chunk and the sums
    bool fetches_x;       // the next chunk of x, while this one is multiplied
};
constexpr Blocking kBlockings[] = {
    {8, 4, 1, false},   // what was fastest on the first machine: a chunk of weights, and of 32 rows, stays in L1 of 48 KB
    {8, 4, 1, true},
    {8, 8, 2, false},   // x is read from L3 half as often
    {8, 8, 2, true},
    {16, 8, 2, true},   // half as many sums go to memory
    {64, 4, 2, true},   // none, up to 2,048 features: weights and x both come from L2
};
constexpr int64_t kMostGroupPairs = 8;
inline std::atomic<int32_t> chosen_blocking{0};
constexpr int64_t kTileBytes = 1024;  // of one as it is multiplied

inline void prefetch(const uint8_t* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T1);
}

// Tiles of one type after the other, from a superblock's first on, as bf16.
template <Type kType>
class Expander {
public:
    QUIRE_ALWAYS void operator()(const uint8_t* tile, int64_t t, uint8_t* to) {
        bf16* out = reinterpret_cast<bf16*>(to);
        if constexpr (kType == Type::i8) return expand_i8_tile(tile, out);
        if constexpr (kType == Type::i4) return expand_i4_tile(tile, out);
        if constexpr (is_blocks(kType)) {
            scales_.read(tile, t);
            if constexpr (has_numbers(kType)) return expand_numbers(tile, out);
            else for (int row = 0; row < 16; row++) _mm512_store_si512(out + row * 32, expand_blocks<kType>(tile, scales_, row));
        }
    }

private:
    QUIRE_ALWAYS void expand_numbers(const uint8_t* tile, bf16* out) {
        __m512i pieces[4][4], rows[4];
        for_numbers<kType>(tile, scales_, [&](int c, int j, __m512i weights) QUIRE_ALWAYS { pieces[j][c] = weights; });
        for (int j = 0; j < 4; j++) {
            turn(pieces[j], rows);
            for (int i = 0; i < 4; i++) _mm512_store_si512(out + (4 * i + j) * 32, rows[i]);
        }
    }

    typename ScalesOf<kType>::type scales_;
};

// Tiles of any other type, which only other levels like to have: no faster than it has to be.
class Unpacker {
public:
    explicit Unpacker(Type type) { matrix_.type = type; }

    void operator()(const uint8_t* tile, int64_t, uint8_t* to) const {
        for (int row = 0; row < 16; row++) {
            float values[32];
            unpack_tile_row(matrix_, tile, row, values);
            for (int c = 0; c < 32; c += kLanes) store(reinterpret_cast<bf16*>(to) + row * 32 + c, load(values + c));
        }
    }

private:
    Matrix matrix_{};
};

// Calls body with what makes bf16 tiles of this type's.
template <class Body>
inline void with_expander(Type type, const Body& body) {
    if (type == Type::i8) return body(Expander<Type::i8>());
    if (type == Type::i4) return body(Expander<Type::i4>());
    if (is_blocks(type)) return with_blocks(type, [&](auto blocks) { body(Expander<blocks>()); });
    body(Unpacker(type));
}
inline void prefetch_codes(const uint8_t* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

// Weights in the order of tiles: there is nothing to expand.
struct AsTheyLie {
    void operator()(const uint8_t*, int64_t, uint8_t*) {}
};

// What is a product's own: how a block's weights lie as steps of k, each of which becomes a tile, and what its sums are.
// Here tiles of weights are [16 features][32 columns] and those of sums [16 features][16 rows of x].
struct Bf16Tiles {
    static constexpr bool kBytes = false;
    const Matrix& w;

    int64_t num_steps() const { return w.num_tiles(); }
    int64_t step_bytes() const { return w.tile_bytes(); }
    const uint8_t* step(int64_t block, int64_t t) const { return w.tile(block, t); }
    template <class Body>
    void with_expander(const Body& body) const {
        w.type == Type::bf16 ? body(AsTheyLie()) : quire::QUIRE_NS::with_expander(w.type, body);
    }
    // Sums of rows from `first_row` on -> out [count][32].
    void to_rows(const float* sums, int64_t first_row, int64_t count, float* out) const {
        (void)first_row;
        transpose_to(sums, out, 32, count);
    }
};

// The steps of a chunk of k of a pair of blocks, [2][num_steps], expanded one by one while other ones are multiplied: vector work
// that the tiles' own takes as long as.
template <class Kind, class Expand>
class Expansion {
public:
    Expansion(const Kind& kind, const Expand& expand) : kind_(kind), expand_{expand, expand} {}

    void begin(BlockPair pair, int64_t first, int64_t num_steps, uint8_t* out) {
        pair_ = pair, first_ = first, num_steps_ = num_steps, out_ = out, done_ = 0;
    }
    void step() {
        if (done_ < 2 * num_steps_) expand();
    }
    void rest() {
        while (done_ < 2 * num_steps_) expand();
    }

private:
    QUIRE_ONE_COPY void expand() {
        const int64_t second = done_ % 2, i = done_++ / 2;
        const uint8_t* codes = kind_.step(second ? pair_.second : pair_.first, first_ + i);
        prefetch_codes(codes + kCodesAhead, kind_.step_bytes());
        expand_[second](codes, first_ + i, out_ + (second * num_steps_ + i) * kTileBytes);
    }

    const Kind& kind_;
    Expand expand_[2];
    BlockPair pair_{};
    int64_t first_ = 0, num_steps_ = 0, done_ = 0;
    uint8_t* out_ = nullptr;
};

// What to fetch from memory while tiles are multiplied: `step` bytes of each block with each tile.
struct Ahead {
    const uint8_t *first, *second;
    int64_t step;
    const uint32_t *x0 = nullptr, *x1 = nullptr;  // and of two groups of 16 rows of x, `x_step` bytes of each tile
    int64_t x_step = 0;
};

// Adds the product of a tile of weights, 4 or 5, and one of x, 6 or 7, to one of sums, 0 to 3. Rows of x are A where they are bytes.
template <bool kBytes, int kSums>
QUIRE_INLINE void add_product() {
    if constexpr (kBytes) {
        if constexpr (kSums == 0) _tile_dpbsud(0, 6, 4);
        if constexpr (kSums == 1) _tile_dpbsud(1, 6, 5);
        if constexpr (kSums == 2) _tile_dpbsud(2, 7, 4);
        if constexpr (kSums == 3) _tile_dpbsud(3, 7, 5);
    } else {
        if constexpr (kSums == 0) _tile_dpbf16ps(0, 4, 6);
        if constexpr (kSums == 1) _tile_dpbf16ps(1, 5, 6);
        if constexpr (kSums == 2) _tile_dpbf16ps(2, 4, 7);
        if constexpr (kSums == 3) _tile_dpbf16ps(3, 5, 7);
    }
}

// Adds the products of steps of k to four tiles of sums (features 0..15 and 16..31 of up to two groups of `width` rows of x).
// Calls between(t) after step t: vector work that runs while the tiles are being multiplied.
template <class Kind, bool kTwo, class Between>
inline void multiply(const uint8_t* w0, const uint8_t* w1, const uint32_t* x0, const uint32_t* x1, int64_t width, int64_t num_steps,
                     Ahead ahead, const Between& between) {
    for (int64_t t = 0; t < num_steps; t++) {
        prefetch(ahead.first + t * ahead.step, ahead.step);
        prefetch(ahead.second + t * ahead.step, ahead.step);
        if (ahead.x_step > 0) {
            prefetch(reinterpret_cast<const uint8_t*>(ahead.x0 + t * 256), ahead.x_step);
            prefetch(reinterpret_cast<const uint8_t*>(ahead.x1 + t * 256), ahead.x_step);
        }
        _tile_loadd(4, w0 + t * kTileBytes, 64);
        _tile_loadd(6, x0 + t * 16 * width, 4 * width);
        add_product<Kind::kBytes, 0>();
        _tile_loadd(5, w1 + t * kTileBytes, 64);
        add_product<Kind::kBytes, 1>();
        if (kTwo) {
            _tile_loadd(7, x1 + t * 16 * width, 4 * width);
            add_product<Kind::kBytes, 2>();
            add_product<Kind::kBytes, 3>();
        }
        between(t);
    }
}
template <class Kind>
inline void multiply(bool two, const uint8_t* w0, const uint8_t* w1, const uint32_t* x0, const uint32_t* x1, int64_t width,
                     int64_t num_steps, Ahead ahead) {
    auto nothing = [](int64_t) {};
    two ? multiply<Kind, true>(w0, w1, x0, x1, width, num_steps, ahead, nothing)
        : multiply<Kind, false>(w0, w1, x0, x1, width, num_steps, ahead, nothing);
}

inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}
inline void load_sums(const float* c) {
    _tile_loadd(0, c, 64);
    _tile_loadd(1, c + 256, 64);
    _tile_loadd(2, c + 512, 64);
    _tile_loadd(3, c + 768, 64);
}
inline void store_sums(float* c, bool two) {
    _tile_stored(0, c, 64);
    _tile_stored(1, c + 256, 64);
    if (!two) return;
    _tile_stored(2, c + 512, 64);
    _tile_stored(3, c + 768, 64);
}

// The end of four tiles of sums, as stored above, in kSteps steps: to rows of the result, [32][32], then on
// to where they belong. At most 32 rows from first_row on.
template <class Kind>
class Finisher {
public:
    static constexpr int64_t kSteps = 8;

    Finisher(const LinearArgs& args, const Kind& kind, BlockPair pair) : a_(args), kind_(kind), pair_(pair) {}

    void begin(const float* c, int64_t first_row, int64_t num_rows) {
        c_ = c, first_row_ = first_row, num_rows_ = num_rows, step_ = 0;
    }
    void step() {
        if (step_ >= kSteps) return;
        const int64_t i = step_++;
        if (i < 4) {  // tile i: rows 16 * (i / 2) .., features of the first or the second block
            const int64_t half = i / 2, part = i % 2, count = num_rows_ - half * 16 < 16 ? num_rows_ - half * 16 : 16;
            if (count > 0 && (part == 0 || pair_.has_second)) kind_.to_rows(c_ + i * 256, first_row_ + half * 16, count, rows_ + half * 512 + part * 16);
            return;
        }
        const int64_t row = (i - 4) * 8, count = num_rows_ - row < 8 ? num_rows_ - row : 8;
        if (count > 0) finish_pair(a_, pair_, rows_ + row * 32, first_row_ + row, count);
    }
    void rest() {
        while (step_ < kSteps) step();
    }

private:
    const LinearArgs& a_;
    const Kind& kind_;
    BlockPair pair_;
    const float* c_ = nullptr;
    int64_t first_row_ = 0, num_rows_ = 0, step_ = kSteps;
    alignas(64) float rows_[1024];
};

// x in tiles of `width` rows. The first steps of `next`, the pair that this thread is likely to see next, are fetched.
template <class Kind>
inline void linear_few_rows(const LinearArgs& a, const Kind& kind, const uint32_t* x, int64_t width, BlockPair pair, BlockPair next,
                            uint8_t* scratch) {
    const int64_t steps = kind.num_steps(), bytes = kind.step_bytes();
    const bool two = a.num_rows > 16;
    const uint32_t* x1 = x + (two ? steps * 256 : 0);
    const uint8_t *first = kind.step(pair.first, 0), *second = kind.step(pair.second, 0);
    const int64_t first_skip = kind.step(next.first, 0) - kind.step(pair.first, steps);  // from a block's end to the next one
    const int64_t second_skip = kind.step(next.second, 0) - kind.step(pair.second, steps);
    alignas(64) float c[1024];
    zero_sums();
    kind.with_expander([&](auto expand_first) {
        if constexpr (std::is_same_v<decltype(expand_first), AsTheyLie>) {
            auto some = [&](int64_t begin, int64_t end, bool skip) {
                const int64_t at = begin * bytes;
                multiply<Kind>(two, first + at, second + at, x + begin * 16 * width, x1 + begin * 16 * width, width, end - begin,
                               {first + at + kAhead + (skip ? first_skip : 0), second + at + kAhead + (skip ? second_skip : 0), bytes});
            };
            const int64_t inside = steps > kAhead / bytes ? steps - kAhead / bytes : 0;
            some(0, inside, false);
            some(inside, steps, true);
        } else {
            // Expanded one step before they are multiplied: tiles can be loaded only once they have left the store buffer, and the
            // products run while the next step is being expanded. Two sets of scratch, in turn.
            auto expand_second = expand_first;
            auto expanded = [&](int64_t t) {
                uint8_t* set = scratch + t % 2 * 2 * kTileBytes;
                if (t >= steps) return set;
                const int64_t at = t * bytes, ahead = at + kCodesAhead;
                const bool skip = ahead >= steps * bytes;
                prefetch_codes(first + ahead + (skip ? first_skip : 0), bytes);
                expand_first(first + at, t, set);
                prefetch_codes(second + ahead + (skip ? second_skip : 0), bytes);
                expand_second(second + at, t, set + kTileBytes);
                return set;
            };
            const uint8_t* set = expanded(0);
            for (int64_t t = 0; t < steps; t++) {
                const uint8_t* next = expanded(t + 1);
                multiply<Kind>(two, set, set + kTileBytes, x + t * 16 * width, x1 + t * 16 * width, width, 1, {nullptr, nullptr, 0});
                set = next;
            }
        }
    });
    if (!Kind::kBytes && a.num_rows == 1) {  // a row already
        _tile_stored(0, c, 4);
        _tile_stored(1, c + 16, 4);
        return finish_pair(a, pair, c, 0, 1);
    }
    store_sums(c, two);
    Finisher<Kind> finisher(a, kind, pair);
    finisher.begin(c, 0, a.num_rows);
    finisher.rest();
}

// Rows [begin, end) of x, 32 at a time, against a group of pairs of blocks, a chunk of k at a time: a pair's chunk of weights
// stays in L1, x's chunk in L2 for the whole group, and the sums wait in memory, which is exact: they are the same in the tile.
// Weights that have to be expanded are so once, while the pair before them is multiplied; `scratch` has room for both.
template <class Kind, class Expand>
inline void linear_many_rows(const LinearArgs& a, const Kind& kind, int64_t chunk, bool fetches_x, const uint32_t* x, const BlockPair* pairs,
                             int64_t num_pairs, int64_t begin, int64_t end, const Expand& expand, uint8_t* scratch, float* sums) {
    constexpr bool kExpands = !std::is_same_v<Expand, AsTheyLie>;
    const int64_t steps = kind.num_steps(), panels = divide_up(end - begin, 32), out_bytes = type_bytes(a.out_type);
    const int64_t items = divide_up(steps, chunk) * num_pairs;  // of work: pairs, for a chunk of k after the other
    const int64_t pace = panels < 4 ? 1 : panels / 2;  // steps of the products for each one of the next item that is expanded
    auto first_of = [&](int64_t item) { return item / num_pairs * chunk; };
    auto count_of = [&](int64_t item) { return steps - first_of(item) < chunk ? steps - first_of(item) : chunk; };
    auto place_of = [&](int64_t item) { return scratch + item % 2 * 2 * chunk * kTileBytes; };
    Expansion<Kind, Expand> expansion(kind, expand);
    auto expand_next = [&](int64_t item) {
        if (kExpands && item < items) expansion.begin(pairs[item % num_pairs], first_of(item), count_of(item), place_of(item));
    };
    expand_next(0);
    for (int64_t item = 0; item < items; item++) {
        const BlockPair pair = pairs[item % num_pairs];
        const int64_t t = first_of(item), count = count_of(item);
        expansion.rest();
        const uint8_t* w0 = kExpands ? place_of(item) : kind.step(pair.first, t);
        const uint8_t* w1 = kExpands ? w0 + count * kTileBytes : kind.step(pair.second, t);
        expand_next(item + 1);
        const bool last = t + count == steps;
        // The weights that come next are fetched meanwhile, a slice of both blocks with every step of every 32 rows. (Beyond
        // the matrix, a prefetch does nothing.)
        const int64_t fetched = item + (kExpands ? 2 : 1);
        const BlockPair& next = pairs[fetched % num_pairs];
        // So is a slice of the chunk of x that comes next; after the last one that is the first, for the next task.
        const int64_t lines = fetches_x ? divide_up(16, num_pairs) : 0, line = item % num_pairs * lines;
        const int64_t x_step = 64 * (lines < 16 - line ? lines : 16 - line), x_ahead = (last ? 0 : t + count) * 256 + line * 16;
        Ahead ahead{kind.step(next.first, first_of(fetched)), kind.step(next.second, first_of(fetched)),
                    round_up(divide_up(kind.step_bytes(), panels), 64), nullptr, nullptr, x_step};
        Finisher<Kind> finisher(a, kind, pair);
        int64_t turn = 0;
        auto between = [&](int64_t) {
            finisher.step();
            if (kExpands && ++turn == pace) expansion.step(), turn = 0;
        };
        for (int64_t row = begin; row < end; row += 32) {
            const bool two = row + 16 < end;
            float* c = sums + (item % num_pairs * panels + (row - begin) / 32) * 1024;
            const uint32_t* x0 = x + (row / 16 * steps + t) * 256;
            const uint32_t* x1 = two ? x0 + steps * 256 : x0;
            ahead.x0 = x + row / 16 * steps * 256 + x_ahead, ahead.x1 = ahead.x0 + (two ? steps * 256 : 0);
            t ? load_sums(c) : zero_sums();
            // One behind: the sums of the 32 rows before are finished while these are multiplied. And where these will
            // go is fetched, as the stores would wait for it.
            if (last)
                for (int64_t r = row; r < row + 32 && r < end; r++)
                    _mm_prefetch(static_cast<const char*>(a.out) + (r * a.out_stride + pair.first * 16) * out_bytes, _MM_HINT_T0);
            two ? multiply<Kind, true>(w0, w1, x0, x1, 16, count, ahead, between)
                : multiply<Kind, false>(w0, w1, x0, x1, 16, count, ahead, between);
            ahead.first += count * ahead.step;
            ahead.second += count * ahead.step;
            store_sums(c, true);
            finisher.rest();
            if (last) finisher.begin(c, row, end - row < 32 ? end - row : 32);
        }
        finisher.rest();
    }
}

// Up to kFewRows rows; x_of(thread) has them, in tiles of `width`.
template <class Kind, class X>
inline void share_few_rows(const LinearArgs& a, const Kind& kind, int64_t width, const X& x_of, Context& context) {
    const BlockPairs pairs(a);
    // About 128 KB of weights a task: enough to stream, few enough to share out evenly.
    const int64_t group = divide_up(131072, 2 * kind.num_steps() * kind.step_bytes());
    const EvenTasks all_tasks(pairs.count, group, context.pool.size());
    context.pool.run_parts(all_tasks.count, [&](ThreadPool::Tasks& tasks, int thread) {
        int64_t task;
        if (!tasks.take(task)) return;
        Tiles configured(width);
        uint8_t* scratch = context.thread_scratch[thread].get<uint8_t>(2 * 2 * kTileBytes);
        const uint32_t* x = x_of(thread);
        do for (int64_t i = all_tasks.begin(task); i < all_tasks.end(task); i++)
            linear_few_rows(a, kind, x, width, pairs[i], pairs[i + 1 < pairs.count ? i + 1 : i], scratch);
        while (tasks.take(task));
    });
}

// More rows, x in tiles of 16.
template <class Kind>
inline void share_many_rows(const LinearArgs& a, const Kind& kind, const uint32_t* x, Context& context) {
    const BlockPairs pairs(a);
    const int64_t steps = kind.num_steps();
    const Blocking& blocking = kBlockings[chosen_blocking.load(std::memory_order_relaxed)];
    const int64_t chunk = blocking.chunk_tiles < steps ? blocking.chunk_tiles : steps;
    // A row takes a chunk of x, and a sum for each feature of the group.
    const int64_t fitting = context.cache * blocking.quarters / 4 / (chunk * 64 + blocking.group_pairs * 128) / 32 * 32;
    const int64_t most_rows = fitting < 32 ? 32 : fitting < kMostPanelRows ? fitting : kMostPanelRows;
    // Even panels: one of a few rows would wait for its weights, from memory, longer than it multiplies.
    const int64_t panels = divide_up(a.num_rows, most_rows), panel_rows = round_up(divide_up(a.num_rows, panels), 32);
    int64_t group = blocking.group_pairs;
    while (group > 4 && pairs.count * panels < 2 * group * context.pool.size()) group /= 2;  // no thread waits long for another
    const int64_t groups = divide_up(pairs.count, group);
    context.pool.run(groups * panels, [&](int64_t task, int thread) {
        Tiles configured;
        uint8_t* scratch = context.thread_scratch[thread].get<uint8_t>(2 * 2 * chunk * kTileBytes);
        int64_t first = task % groups * group, panel = task / groups;  // a panel of x is done with before the next
        const int64_t last = first + group < pairs.count ? first + group : pairs.count;
        BlockPair its_pairs[kMostGroupPairs];
        for (int64_t i = first; i < last; i++) its_pairs[i - first] = pairs[i];
        const int64_t begin = panel * panel_rows, end = begin + panel_rows < a.num_rows ? begin + panel_rows : a.num_rows;
        float* sums = context.thread_scratch2[thread].get<float>(group * panel_rows / 32 * 1024);
        kind.with_expander([&](const auto& expand) {
            linear_many_rows(a, kind, chunk, blocking.fetches_x, x, its_pairs, last - first, begin, end, expand, scratch, sums);
        });
    });
}

inline void linear_amx(const LinearArgs& a, Context& context) {
    const Matrix& w = a.weight;
    if (a.type != Type::bf16 || w.type == Type::f32) return linear(a, context);
    const int64_t tiles = w.num_tiles(), row_blocks = divide_up(a.num_rows, 16);
    if (a.num_rows == 0) return;
    if (w.type == Type::i4) fill_i4_values();
    const int64_t width = a.num_rows < 16 ? a.num_rows : 16;  // no wider than need be: x is read again with every block
    const int64_t x_size = row_blocks * tiles * 16 * width;
    auto pack_rows = [&](int64_t i, uint32_t* x) {
        int64_t rows = a.num_rows - i * 16 < 16 ? a.num_rows - i * 16 : 16;
        uint32_t* out = x + i * tiles * 16 * width;
        pack_columns(static_cast<const bf16*>(a.x) + i * 16 * a.x_stride, a.x_stride, rows, w.cols, out, width);
        const int64_t there = divide_up(w.cols, 32);  // of tiles; where scales are striped there may be more
        std::memset(out + there * 16 * width, 0, (tiles - there) * 64 * width);
    };
    // So few rows each thread packs for itself: to wait for one that does, and to get them from there, takes longer.
    const bool own = row_blocks == 1 && a.out != a.x;
    uint32_t* shared_x = own ? nullptr : context.shared.get<uint32_t>(x_size);
    if (!own) context.pool.run(row_blocks, [&](int64_t i, int) { pack_rows(i, shared_x); });
    const Bf16Tiles kind{w};
    if (a.num_rows > kFewRows) return share_many_rows(a, kind, shared_x, context);
    share_few_rows(a, kind, width, [&](int thread) {
        if (!own) return shared_x;
        uint32_t* x = context.thread_scratch2[thread].get<uint32_t>(x_size);
        pack_rows(0, x);
        return x;
    }, context);
}

}  // namespace quire::QUIRE_NS
