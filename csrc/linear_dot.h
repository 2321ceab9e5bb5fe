// Linear layers of bf16 activations by dot products of pairs (AVX512_BF16).
//
// A vector of weights is eight columns of four features: lane 4i + j sums the pairs of k number j, j + 4, j + 8, ... of
// feature i, one after the other, and a feature's four lanes are added at the end. That happens to each row of x however
// many there are, so its bits are its own. Few rows meet weights as they come from memory, turned in registers; for
// many rows a block is turned once and kept in L2, and the first of them meet codes of four bits meanwhile.
//
// Intel's cores add four FMAs in the time of one product of pairs (float_pairs.h): there x becomes floats, and weights in registers.
#pragma once

#include "expand.h"
#include "float_pairs.h"
#include "linear.h"

namespace quire::QUIRE_NS {

constexpr int64_t kBytesAhead = 4096;  // of weights, to prefetch while they are expanded
constexpr int kFewRows = 6;            // rows whose sums with all of a block's features stay in registers
constexpr int kPairRows = 12;          // rows whose sums with half of them do, where x is in floats
constexpr int kOwnRows = 2 * kPairRows;  // rows of x that each thread copies for itself
constexpr int kStreamedPairs = 15;     // rows that meet turned weights of bf16 as they come from memory, a few at a time
constexpr int kTurningRows = 3;        // rows that meet codes of four bits while those are looked up, and hide half of what that takes
constexpr int64_t kMostRows = 96, kMostBlocks = 16;
constexpr int64_t kPieceTiles = 4;     // of a block that groups of rows meet in turn
constexpr int64_t kAlongRows = 7 * kFewRows;  // with more rows, fetching the next block takes a small part of the time

// Codes of four bits, of which four rows share a word: for_features expands them.
constexpr bool comes_turned(Type type) { return type == Type::c4_32; }

// Up to how many rows weights are multiplied as they come from memory.
constexpr int streamed_rows(Type type) { return type == Type::bf16_turned ? kStreamedPairs : type == Type::bf16 ? kFewRows : type == Type::f8_128 ? 3 : 4; }

// Likewise as floats, where that is faster: from so many rows on, as a row of blocks alone takes longer for it, and up to so many or 0.
constexpr int least_floats(Type type) { return is_blocks(type) ? 2 : 1; }
constexpr int streamed_floats(Type type) { return type == Type::bf16_turned ? kPairRows : type == Type::c4_32 ? 4 : 0; }

// Rows 4i + 2 * pair and the one after it of a tile, i = 0..3, of eight bits or more a weight.
template <Type kType, int pair, class Scales>
QUIRE_INLINE void load_rows(const uint8_t* tile, const Scales& scales, __m512i (&even)[4], __m512i (&odd)[4]) {
    for (int i = 0; i < 4; i++) {
        const int row = 4 * i + 2 * pair;
        if constexpr (kType == Type::bf16) {
            even[i] = _mm512_loadu_si512(tile + row * 64);
            odd[i] = _mm512_loadu_si512(tile + row * 64 + 64);
        } else {
            even[i] = expand_blocks<kType>(tile, scales, row);
            odd[i] = expand_blocks<kType>(tile, scales, row + 1);
        }
    }
}

// Calls body(pair, even, odd) for pair = 0 and 1, constants: rows 4i + 2 * pair of a tile and those after them, i = 0..3, turned.
template <Type kType, class Scales, class Body>
QUIRE_INLINE void for_pairs(const uint8_t* tile, const Scales& scales, const Body& body) {
    auto with = [&](auto pair) QUIRE_ALWAYS {
        __m512i even_rows[4], odd_rows[4], even[4], odd[4];
        load_rows<kType, pair>(tile, scales, even_rows, odd_rows);
        turn(even_rows, even);
        turn(odd_rows, odd);
        body(pair, even, odd);
    };
    with(std::integral_constant<int, 0>());
    with(std::integral_constant<int, 1>());
}

// Codes of four bits, four rows to a word: 16 columns of all rows, turned. Half of that are loads into half a register: shuffles
// and look-ups wait for the same unit.
QUIRE_INLINE void turn_codes(const uint8_t* words, __m512i& first, __m512i& second) {
    const __m512i low = two_halves(words, words + 64), high = two_halves(words + 128, words + 192);
    first = _mm512_shuffle_i64x2(low, high, 0x88);
    second = _mm512_shuffle_i64x2(low, high, 0xdd);
}

// Calls body(c, j, weights) of columns 8c .. 8c + 7 of the rows 4i + j, i = 0..3, with j = 0..3 for each c or each two: registers are left for many sums.
template <class Scales, class Body>
QUIRE_INLINE void for_features(const uint8_t* tile, const Scales& scales, const Body& body) {
    const uint8_t* words = tile;
    __m512i first, second, low[4], high[4];
    auto values_of_two = [&](int row) QUIRE_ALWAYS { return two_halves(scales.values[row], scales.values[row + 4]); };
    turn_codes(words, first, second);
    for (int j = 0; j < 4; j++) low[j] = values_of_two(j), high[j] = values_of_two(j + 8);
    // A look-up reads six bits of a word, of which two say whose values. Those of the rows j and j + 2 are made at once, in bytes.
    const __m512i whose = _mm512_mullo_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), _mm512_set1_epi64(0x1010101010101010));
    auto with = [&](int c, __m512i codes) QUIRE_ALWAYS {
        auto index = [&](__m512i words) QUIRE_ALWAYS { return _mm512_ternarylogic_epi32(words, _mm512_set1_epi8(15), whose, 0xea); };  // (words & 15) | whose
        const __m512i even = index(codes), odd = index(_mm512_srli_epi16(codes, 4));
        body(c, 0, _mm512_permutex2var_epi16(low[0], even, high[0]));
        body(c, 1, _mm512_permutex2var_epi16(low[1], odd, high[1]));
        body(c, 2, _mm512_permutex2var_epi16(low[2], _mm512_srli_epi16(even, 8), high[2]));
        body(c, 3, _mm512_permutex2var_epi16(low[3], _mm512_srli_epi16(odd, 8), high[3]));
    };
    with(0, first);
    with(1, second);
    asm("" : "+r"(words));  // the others no sooner, or registers run out
    turn_codes(words + 32, first, second);
    with(2, first);
    with(3, second);
}

inline __m512i eight_of_x(const bf16* x) { return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }

// Sums of features 4i + g and 4i + g + 1, four lanes each -> two lanes each.
inline __m512 halves(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
// Those of g = 0 and g = 2 -> the 16 features.
inline void store_features(__m512 first, __m512 second, float* out) {
    _mm512_storeu_ps(out, _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xee)));
}

// Of a turned tile and eight columns features 4i + 2 * pair and those after them.
QUIRE_INLINE void load_pair(const uint8_t* tile, int c, int pair, __m512i& even, __m512i& odd) {
    even = _mm512_loadu_si512(tile + c * 256 + pair * 128);
    odd = _mm512_loadu_si512(tile + c * 256 + pair * 128 + 64);
}

// As add_pair, of x in floats: of eight columns the first ones of pairs, then the second ones.
QUIRE_INLINE void add_floats_pair(__m512& first, __m512& second, const FloatPairs& even, const FloatPairs& odd, const float* x) {
    const __m512 x_first = _mm512_broadcast_f32x4(_mm_loadu_ps(x)), x_second = _mm512_broadcast_f32x4(_mm_loadu_ps(x + 4));
    first = add_floats(first, even, x_first, x_second);
    second = add_floats(second, odd, x_first, x_second);
}

// What load_pair gave times eight columns of a row of x.
QUIRE_INLINE void add_pair(__m512& first, __m512& second, __m512i even, __m512i odd, const bf16* x) {
    const __m512i eight = eight_of_x(x);
    first = add_dot(first, even, eight);
    second = add_dot(second, odd, eight);
}

// A block of weights on its way from memory times kRows rows of x -> sums[row][16]. `kTurns`: the weights, of four bits, are kept as
// turn_block has them, and the rows may lie far apart.
template <Type kType, int kRows, bool kTurns = false>
inline void stream_block(const uint8_t* tile, int64_t num_tiles, int64_t tile_bytes, const RowsOfX& x, float* sums, uint8_t* turned = nullptr) {
    __m512 acc[kRows][4];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++) acc[m][0] = acc[m][1] = acc[m][2] = acc[m][3] = _mm512_setzero_ps();  // unrolled, or GCC keeps them in memory
    typename ScalesOf<kType>::type scales;
    NearRows<kRows, kTurns ? 0 : 64> rows(x);
    for (int64_t t = 0; t < num_tiles; t++, tile += tile_bytes, rows.skip(2 * x.step)) {
        scales.read(tile, t);
        constexpr bool kCodes = comes_turned(kType);  // L1 has little room beside what they stand for
        for (int64_t i = 0; i < tile_bytes; i += 64)
            _mm_prefetch(reinterpret_cast<const char*>(tile + (kCodes ? 2 : 1) * kBytesAhead + i), kCodes ? _MM_HINT_T1 : _MM_HINT_T0);
        if constexpr (kCodes) {
            __m512i eights[kRows][2];
            for_features(tile, scales, [&](int c, int j, __m512i weights) QUIRE_ALWAYS {
                if (kTurns) _mm512_store_si512(turned + t * 1024 + c * 256 + j * 64, weights);
#pragma GCC unroll 8
                for (int m = 0; m < kRows; m++) {
                    if (j == 0) eights[m][c % 2] = eight_of_x(rows.at(m, c));
                    acc[m][j] = add_dot(acc[m][j], weights, eights[m][c % 2]);
                }
            });
        } else for_pairs<kType>(tile, scales, [&](auto pair, const __m512i (&even)[4], const __m512i (&odd)[4]) QUIRE_ALWAYS {
            for (int m = 0; m < kRows; m++)
                for (int c = 0; c < 4; c++) {
                    const __m512i eight = eight_of_x(rows.at(m, c));
                    acc[m][2 * pair] = add_dot(acc[m][2 * pair], even[c], eight);
                    acc[m][2 * pair + 1] = add_dot(acc[m][2 * pair + 1], odd[c], eight);
                }
        });
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++) store_features(halves(acc[m][0], acc[m][1]), halves(acc[m][2], acc[m][3]), sums + m * 16);
}

// Memory to fetch while something else is multiplied: `step` bytes with every tile.
struct Fetch {
    const uint8_t* from;
    int64_t step;
};

// As stream_block, of kRows rows of x, in floats or turned weights' own pairs, `step` apart from tile to tile. Adds to sums as they are in
// registers, [row][4][16]. Some groups of rows meet the tiles, one after the other, and each fetches its share of what lies ahead.
template <Type kType, bool kFloats, int kRows, int kGroups>
inline void stream_piece(const uint8_t* tile, int64_t num_tiles, int64_t tile_bytes, const void* rows, int64_t step, Fetch ahead, float* sums) {
    using X = std::conditional_t<kFloats, float, bf16>;
    __m512 acc[kRows][4];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[m][j] = _mm512_load_ps(sums + (m * 4 + j) * 16);
    auto four = [](const float* at) QUIRE_ALWAYS { return _mm512_broadcast_f32x4(_mm_loadu_ps(at)); };
    [[maybe_unused]] const int64_t line_step = ahead.step / 16;
    // Line after line as they are multiplied, not some at once. Intel's CPUs fetch what lies between every fourth one by themselves, but
    // learn it anew in every page: those are fetched a page sooner.
    auto fetch = [&](int line) QUIRE_ALWAYS {
        if constexpr (!kFloats) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead.from), _MM_HINT_T0);
            ahead.from += line_step;
            return;
        }
        _mm_prefetch(reinterpret_cast<const char*>(tile + kBytesAhead / 8 + line * 64), _MM_HINT_T0);
        if (line % kGroups) return;
        _mm_prefetch(reinterpret_cast<const char*>(ahead.from + line / kGroups * 64), _MM_HINT_T1);
        if (line / kGroups % 4 == 0) _mm_prefetch(reinterpret_cast<const char*>(ahead.from + line / kGroups * 64 + kBytesAhead), _MM_HINT_T1);
    };
    typename ScalesOf<kType>::type scales;
    const X* x = static_cast<const X*>(rows);
    for (int64_t t = 0; t < num_tiles; t++, tile += tile_bytes, x += step) {
        scales.read(tile, t);
        auto add = [&](int c, int j, __m512i pairs) QUIRE_ALWAYS {
            const FloatPairs weights(pairs);
#pragma GCC unroll 8
            for (int m = 0; m < kRows; m++) {
                const X* at = x + m * 32 + c * 8;
                if constexpr (kFloats) acc[m][j] = add_floats(acc[m][j], weights, four(at), four(at + 4));
                else acc[m][j] = add_dot(acc[m][j], pairs, eight_of_x(at));
            }
        };
        if constexpr (kType == Type::bf16_turned) {
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    fetch(c * 4 + j);
                    add(c, j, _mm512_loadu_si512(tile + c * 256 + j * 64));
                }
        } else {
            for (int64_t i = 0; i < tile_bytes; i += 64) {
                _mm_prefetch(reinterpret_cast<const char*>(ahead.from + i), _MM_HINT_T1);
                _mm_prefetch(reinterpret_cast<const char*>(tile + kBytesAhead / 4 + i), _MM_HINT_T0);
            }
            for_features(tile, scales, add);
        }
        if constexpr (kFloats) ahead.from += ahead.step;
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_store_ps(sums + (m * 4 + j) * 16, acc[m][j]);
}

// Likewise a block times all rows -> sums[row][16]. More than a group's meet some tiles group after group, all but the first from L1.
template <Type kType, bool kFloats>
inline void stream_groups(const uint8_t* block, int64_t num_tiles, int64_t tile_bytes, const void* x, int64_t num_rows, float* sums) {
    constexpr int kRows = kFloats ? streamed_floats(kType) : kStreamedPairs, kMost = kRows > kFewRows ? kFewRows : kRows;
    constexpr int kGroups = kRows > kMost ? 2 : 1;  // at most, in floats
    alignas(64) float lanes[kRows * 64];
    std::memset(lanes, 0, num_rows * 256);
    const int64_t groups = divide_up(num_rows, kMost), step = num_rows * 32;
    const int64_t piece = groups == 1 ? num_tiles : kPieceTiles;
    for (int64_t t = 0; t < num_tiles; t += piece) {
        const int64_t tiles = num_tiles - t < piece ? num_tiles - t : piece;
        for (int64_t i = 0; i < groups; i++) {
            const RowGroup group = RowGroups(num_rows, kMost)[i];
            const uint8_t* tile = block + t * tile_bytes;
            const int64_t pages = kFloats ? 2 : groups == 1 ? 1 : 3;  // from 8 KB on Zen 5 gets 5 to 9% less where memory is fast
            const Fetch ahead{tile + pages * kBytesAhead + tiles * tile_bytes * i / groups, tile_bytes / groups};
            const int64_t at = t * step + group.first * 32;
            const void* rows = kFloats ? static_cast<const void*>(static_cast<const float*>(x) + at) : static_cast<const bf16*>(x) + at;
            with_rows<kMost>(group.count, [&](auto count) {
                auto run = [&](auto of) { stream_piece<kType, kFloats, count, of>(tile, tiles, tile_bytes, rows, step, ahead, lanes + group.first * 64); };
                if constexpr (!kFloats) run(std::integral_constant<int, 1>());
                else if constexpr (count >= least_floats(kType)) groups == 1 ? run(std::integral_constant<int, 1>()) : run(std::integral_constant<int, kGroups>());
            });
        }
    }
    for (int64_t m = 0; m < num_rows; m++) {
        const float* of = lanes + m * 64;
        auto half = [&](int at) QUIRE_ALWAYS { return halves(_mm512_load_ps(of + at * 16), _mm512_load_ps(of + at * 16 + 16)); };
        store_features(half(0), half(2), sums + m * 16);
    }
}

// A block of weights, turned: [tile][piece of 8 columns][feature % 4][64 bytes]. No rows of x meet them meanwhile.
template <Type kType>
inline void turn_block(const uint8_t* tile, int64_t num_tiles, int64_t tile_bytes, const RowsOfX&, float*, uint8_t* out) {
    typename ScalesOf<kType>::type scales;
    for (int64_t t = 0; t < num_tiles; t++, tile += tile_bytes, out += 1024) {
        for (int64_t i = 0; i < tile_bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(tile + kBytesAhead + i), _MM_HINT_T1);
        scales.read(tile, t);
        if constexpr (comes_turned(kType)) {
            for_features(tile, scales, [&](int c, int j, __m512i weights) QUIRE_ALWAYS { _mm512_store_si512(out + c * 256 + j * 64, weights); });
        } else for_pairs<kType>(tile, scales, [&](auto pair, const __m512i (&even)[4], const __m512i (&odd)[4]) QUIRE_ALWAYS {
            for (int c = 0; c < 4; c++) {
                _mm512_store_si512(out + c * 256 + pair * 128, even[c]);
                _mm512_store_si512(out + c * 256 + pair * 128 + 64, odd[c]);
            }
        });
    }
}

// How blocks are turned, if they are, and how many rows of x they meet meanwhile.
struct Turning {
    void (*turn_block)(const uint8_t* tile, int64_t num_tiles, int64_t tile_bytes, const RowsOfX& x, float* sums, uint8_t* turned);
    int64_t rows;
};

// Memory to fetch into L2 while something else is multiplied.
struct MemorySpan {
    const uint8_t* from;
    int64_t bytes;
};

// A turned block times kRows rows of x -> sums[row][16]: all features at once or, with x in floats, half of them after the other. Of pairs,
// fewer rows with more features take fewer of the loads that spread eight columns, which Zen 5 makes beside no more than some products.
// `fetch` has its steps with the tiles of half the features, by whole lines or, `kAlong`, parts of them with each eight columns.
template <bool kFloats, bool kAlong, int kRows>
inline void multiply_turned(const uint8_t* block, int64_t num_tiles, const RowsOfX& x, Fetch fetch, float* sums) {
    constexpr int kPairs = kFloats ? 1 : 2;
    for (int first = 0; first < 2; first += kPairs) {
        __m512 acc[kRows][2 * kPairs];
#pragma GCC unroll 12
        for (int m = 0; m < kRows; m++)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * kPairs; i++) acc[m][i] = _mm512_setzero_ps();
        const uint8_t* tile = block;
        NearRows<kRows, kFloats ? 128 : 0> rows(x);
        for (int64_t t = 0; t < num_tiles; t++, tile += 1024, rows.skip(2 * x.step)) {
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                __m512i even[kPairs], odd[kPairs];
                for (int i = 0; i < kPairs; i++) load_pair(tile, c, first + i, even[i], odd[i]);
                auto ask = [&](int64_t i) QUIRE_ALWAYS { _mm_prefetch(reinterpret_cast<const char*>(fetch.from + i), _MM_HINT_T1); };
                if constexpr (kAlong) {
                    const int64_t part = kPairs * fetch.step / 4;
                    for (int64_t i = 0; i < part; i += 64) ask(i);
                    fetch.from += part;
                } else {
                    for (int64_t i = c * 64; i < kPairs * fetch.step; i += 256) ask(i);
                }
                if constexpr (kFloats) {
                    const FloatPairs even_floats(even[0]), odd_floats(odd[0]);
#pragma GCC unroll 12
                    for (int m = 0; m < kRows; m++)
                        add_floats_pair(acc[m][0], acc[m][1], even_floats, odd_floats, reinterpret_cast<const float*>(rows.at(m, c)));
                    continue;
                }
#pragma GCC unroll 12
                for (int m = 0; m < kRows; m++)
#pragma GCC unroll 2
                    for (int i = 0; i < kPairs; i++) add_pair(acc[m][2 * i], acc[m][2 * i + 1], even[i], odd[i], rows.at(m, c));
            }
            if constexpr (!kAlong) fetch.from += kPairs * fetch.step;
        }
        for (int m = 0; m < kRows; m++) {
            const __m512 half = halves(acc[m][0], acc[m][1]);
            if constexpr (kPairs == 2) store_features(half, halves(acc[m][2], acc[m][3]), sums + m * 16);
            else if (first == 0) _mm512_storeu_ps(sums + m * 16, half);
            else store_features(_mm512_loadu_ps(sums + m * 16), half, sums + m * 16);
        }
    }
}

// x as the kernels read it: where it lies or, of one group or in floats (of each eight columns the first ones of pairs, then the second
// ones), a copy by groups of rows that meet weights at once, in them by tiles:
// [tile][row][32], zeros up to a multiple of 32 columns. In rows that lie apart by a power of two, what reads much waits for lines of L1.
struct DotRows {
    const bf16* x;
    int64_t num_rows, stride = 0;
    int64_t most = kPairRows;   // rows of a group, at most
    int64_t panel = kMostRows;  // rows that are grouped by themselves: a multiple of kPairRows
    bool floats;
    int64_t tile;               // elements of a tile's row
    bool grouped = false;
    bool own = false;  // each thread makes a copy of its own: what another core has written comes slowly where cores are far apart

    DotRows(const LinearArgs& a, bool as_floats, bool streamed, Context& context)
        : x(static_cast<const bf16*>(a.x)), num_rows(a.num_rows), floats(as_floats), tile(floats ? 64 : 32) {
        stride = a.weight.num_tiles() * tile;
        // The blocks have half of L2, x a quarter: of floats, these rows and those that come after them.
        const int64_t near = context.cache / (floats ? 8 : 4) / (stride * 2) / kPairRows * kPairRows;
        if (num_rows > kMostRows && near < kMostRows) panel = near < kPairRows ? kPairRows : near;
        if (!floats) most = streamed && a.weight.type == Type::bf16_turned ? kStreamedPairs : kFewRows;
        grouped = floats || streamed || num_rows <= kPairRows || a.weight.cols != stride || a.out == a.x;
        own = grouped && num_rows <= kOwnRows && a.out != a.x;
        if (!grouped) {
            stride = a.x_stride;
            return;
        }
        if (own) return;
        bf16* copy = context.shared.get<bf16>(num_rows * stride);
        context.pool.run(divide_up(num_rows, most), [&](int64_t task, int) { copy_rows(a, task * most, copy); });
        x = copy;
    }
    // As a thread reads them.
    DotRows here(const LinearArgs& a, Scratch& scratch) const {
        DotRows rows = *this;
        if (!own) return rows;
        bf16* copy = scratch.get<bf16>(num_rows * stride);
        for (int64_t row = 0; row < num_rows; row += most) copy_rows(a, row, copy);
        rows.x = copy;
        return rows;
    }
    int64_t in_panel(int64_t first) const { return num_rows - first < panel ? num_rows - first : panel; }
    int64_t num_groups(int64_t first) const { return divide_up(in_panel(first), most); }  // of the panel that row `first` begins
    RowGroup group_of(int64_t first, int64_t index) const { return RowGroups(in_panel(first), most)[index]; }
    RowsOfX group(int64_t first, int64_t count) const {
        const bf16* rows = x + first * stride;
        return grouped ? RowsOfX{rows, tile, tile * count} : RowsOfX{rows, stride, 32};
    }

    // One of so many equal shares of the panel after that of row `first`; after the last one its thread begins anew.
    MemorySpan ahead(int64_t first, int64_t share, int64_t shares) const {
        if (!floats) return {};
        const int64_t next = first + panel < num_rows ? first + panel : 0, bytes = in_panel(next) * stride * 2 / shares;
        return {reinterpret_cast<const uint8_t*>(x + next * stride) + share * bytes, bytes};
    }

private:
    static void store_floats(const FloatPairs& pairs, bf16* to) {
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64((__m512i)pairs.first, first, (__m512i)pairs.second));
        _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi64((__m512i)pairs.first, second, (__m512i)pairs.second));
    }
    // The group of rows that row `at`, a multiple of `most`, would begin if all groups had so many.
    void copy_rows(const LinearArgs& a, int64_t at, bf16* copy) const {
        const int64_t first = at / panel * panel;
        const RowGroup group = group_of(first, (at - first) / most);
        const bf16* from = static_cast<const bf16*>(a.x) + (first + group.first) * a.x_stride;
        bf16* to = copy + (first + group.first) * stride;
        for (int64_t c = 0; c < a.weight.num_tiles() * 32; c += 32) {
            const int64_t left = a.weight.cols - c;
            const __mmask32 there = left >= 32 ? ~__mmask32(0) : left > 0 ? (__mmask32(1) << left) - 1 : 0;
            for (int64_t row = 0; row < group.count; row++, to += tile) {
                const __m512i pairs = _mm512_maskz_loadu_epi16(there, from + row * a.x_stride + c);
                floats ? store_floats(FloatPairs(pairs), to) : _mm512_storeu_si512(to, pairs);
            }
        }
    }
};

// The blocks of a product: one at a time or, gated, the gate's with its factor's.
struct DotBlocks {
    const LinearArgs& a;
    int parts;       // of a block of the result
    int64_t count;   // of blocks of the result
    int64_t bytes;   // of a block of weights

    explicit DotBlocks(const LinearArgs& args)
        : a(args), parts(is_gated(a.epilogue) ? 2 : 1), count(a.weight.num_blocks() / parts), bytes(a.weight.num_tiles() * a.weight.tile_bytes()) {}
    const uint8_t* weights(int64_t block, int part) const { return a.weight.tile(block + part * count, 0); }
    void finish(int64_t block, const float* gate, const float* up, int64_t first_row, int64_t num_rows) const {
        QUIRE_NS::finish(a, {gate, parts == 2 ? up : nullptr, 16, 16, block * 16, (block + count) * 16, first_row, num_rows});
    }
};

// Blocks [begin, end) of the result.
struct BlockRange {
    int64_t begin, end;
};

// Rows of one group, as stream(weights, sums) has a block's sums with them.
template <class Stream>
inline void stream_rows(const DotBlocks& blocks, BlockRange range, const Stream& stream) {
    alignas(64) float sums[2][kStreamedPairs * 16];
    for (int64_t block = range.begin; block < range.end; block++) {
        for (int part = 0; part < blocks.parts; part++) stream(blocks.weights(block, part), sums[part]);
        blocks.finish(block, sums[0], sums[1], 0, blocks.a.num_rows);
    }
}

// The block of weights that is multiplied after this one; after the last of all it is fetched again.
inline const uint8_t* weights_ahead(const DotBlocks& blocks, int64_t block, int part) {
    if (part + 1 < blocks.parts) return blocks.weights(block, part + 1);
    return blocks.weights(block + 1 < blocks.count ? block + 1 : block, 0);
}

// Rows of x as many at a time as stay in L2 with the range's blocks. Blocks are turned into `turned`, one place for each of the
// range or, where all rows are there at once, one for all; without turn_block they lie so. What comes next is fetched meanwhile:
// weights with the first rows, then rows.
template <bool kFloats, bool kAlong>
inline void multiply_blocks(const DotBlocks& blocks, const DotRows& rows, BlockRange range, Turning turning, uint8_t* turned) {
    const LinearArgs& a = blocks.a;
    const int64_t tiles = a.weight.num_tiles();
    const int64_t items = (range.end - range.begin) * blocks.parts;
    alignas(64) float sums[2][kMostRows * 16];
    for (int64_t first = 0; first < a.num_rows; first += rows.panel) {
        const int64_t count = rows.in_panel(first);
        for (int64_t block = range.begin; block < range.end; block++) {
            for (int part = 0; part < blocks.parts; part++) {
                const int64_t item = (block - range.begin) * blocks.parts + part;
                const uint8_t* weights = blocks.weights(block, part);
                int64_t done = 0;  // of the first group's rows
                if (turning.turn_block) {
                    uint8_t* place = turned + (a.num_rows > rows.panel ? item : 0) * tiles * 1024;
                    if (first == 0) {
                        turning.turn_block(weights, tiles, a.weight.tile_bytes(), rows.group(0, rows.group_of(0, 0).count), sums[part], place);
                        done = turning.rows;
                    }
                    weights = place;
                }
                const MemorySpan ahead = first == 0 ? MemorySpan{weights_ahead(blocks, block, part), blocks.bytes} : rows.ahead(first, item, items);
                // Zen 5 takes lines with each eight columns for a pattern to go on with, and a product of few groups is up to a fifth slower,
                // or not, by where the loops of groups lie: their steps are four odd parts.
                const int64_t least = divide_up(ahead.bytes, 2 * rows.num_groups(first) * tiles);
                const int64_t step = kAlong ? 4 * (divide_up(least, 4) | 1) : round_up(least, 64);
                int64_t fetched = 0;
                for (int64_t i = 0; i < rows.num_groups(first); i++, done = 0) {
                    const RowGroup group = rows.group_of(first, i);
                    const Fetch fetch{ahead.from + fetched, fetched < ahead.bytes ? step : 0};
                    fetched += 2 * tiles * step;
                    const RowsOfX x = rows.group(first + group.first, group.count).from(done);
                    with_rows<kFloats ? kPairRows : kFewRows>(group.count - done, [&](auto n) {
                        multiply_turned<kFloats, kAlong, n>(weights, tiles, x, fetch, sums[part] + (group.first + done) * 16);
                    });
                }
            }
            blocks.finish(block, sums[0], sums[1], first, count);
        }
    }
}

template <Type kType>
inline void linear_dot_of(const LinearArgs& a, Context& context) {
    constexpr int kFloatRows = streamed_floats(kType);
    const bool floats = a.num_rows >= (kFloatRows ? least_floats(kType) : streamed_rows(kType) + 1) && floats_are_faster();
    const bool streamed = a.num_rows <= (floats ? kFloatRows : streamed_rows(kType));
    const DotRows all_rows(a, floats, streamed, context);
    const DotBlocks blocks(a);
    const int64_t turned_bytes = a.weight.num_tiles() * 1024;
    int64_t group = divide_up(kTaskBytes, blocks.bytes * blocks.parts), places = 1;
    if (a.num_rows > kMostRows) {
        const int64_t fair = blocks.count / (4 * context.pool.size());  // no thread waits long for another
        group = context.cache / 2 / (turned_bytes * blocks.parts);
        group = group < fair ? group : fair;
        group = group < 1 ? 1 : group > kMostBlocks ? kMostBlocks : group;
        places = group * blocks.parts;
    }
    Turning turning{};
    static_assert(!comes_turned(kType) || streamed_rows(kType) >= kTurningRows, "there are more rows than that");
    if constexpr (kType != Type::bf16_turned) {
        turning = {turn_block<kType>, 0};
        if constexpr (comes_turned(kType))
            if (!floats) turning = {stream_block<kType, kTurningRows, true>, kTurningRows};
    }
    const auto multiply = floats ? multiply_blocks<true, false> : a.num_rows <= kAlongRows ? multiply_blocks<false, true> : multiply_blocks<false, false>;
    const EvenTasks all_tasks(blocks.count, group, context.pool.size());
    context.pool.run_parts(all_tasks.count, [&](ThreadPool::Tasks& tasks, int thread) {
        int64_t task;
        if (!tasks.take(task)) return;  // before x is copied: there may be more threads than blocks
        const DotRows rows = all_rows.here(a, context.thread_scratch2[thread]);
        uint8_t* turned = turning.turn_block ? context.thread_scratch[thread].get<uint8_t>(places * turned_bytes) : nullptr;
        do {
            const BlockRange range{all_tasks.begin(task), all_tasks.end(task)};
            [[maybe_unused]] auto stream_in_groups = [&](auto of_floats) {
                stream_rows(blocks, range, [&](const uint8_t* weights, float* sums) {
                    stream_groups<kType, of_floats>(weights, a.weight.num_tiles(), a.weight.tile_bytes(), rows.x, a.num_rows, sums);
                });
            };
            if (!streamed) multiply(blocks, rows, range, turning, turned);
            else if constexpr (kType == Type::bf16_turned) floats ? stream_in_groups(std::true_type()) : stream_in_groups(std::false_type());
            else if (!floats) stream_rows(blocks, range, [&](const uint8_t* weights, float* sums) {
                with_rows<streamed_rows(kType)>(a.num_rows, [&](auto count) {
                    stream_block<kType, count>(weights, a.weight.num_tiles(), a.weight.tile_bytes(), rows.group(0, count), sums);
                });
            });
            else if constexpr (kFloatRows) stream_in_groups(std::true_type());
        } while (tasks.take(task));
    });
}

// Types that have a better way here, bytes or pairs of integers, are multiplied as any are where they come in another order.
inline void linear_dot(const LinearArgs& a, Context& context) {
    if (a.type != Type::bf16) return linear(a, context);
    if (a.num_rows == 0) return;
    if (a.weight.type == Type::bf16) return linear_dot_of<Type::bf16>(a, context);
    if (a.weight.type == Type::bf16_turned) return linear_dot_of<Type::bf16_turned>(a, context);
    if (a.weight.type == Type::c4_32) return linear_dot_of<Type::c4_32>(a, context);
    if (a.weight.type == Type::f8_128) return linear_dot_of<Type::f8_128>(a, context);
    linear(a, context);
}

}  // namespace quire::QUIRE_NS
