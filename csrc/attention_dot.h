// Paged attention of bf16 queries on AVX-512 by dot products of pairs, by the plan of attention.h.
//
// A chunk's keys are gathered as pairs of features, its values as pairs of keys, so that one kernel does both products:
// the scores of 64 keys, and the weighted sums of 64 features, each in a lane of its own and over the pairs in order.
//
// Where floats_are_faster() (float_pairs.h), all of them are floats instead: the second of a pair is added first, as an instruction for pairs does.
// A level without that instruction has nothing else, and need not round weights to bf16.
#pragma once

#include "attention_parts.h"
#include "expand.h"
#include "float_pairs.h"

namespace quire::QUIRE_NS {

constexpr int kDotRows = 4;            // rows whose sums of 64 columns stay in registers, beside what the softmax needs
constexpr int kScoreParts = 2 * kDotRows;  // of their products with keys, after each of which comes a step of the softmax
constexpr int kFloatRows = 12;         // rows whose sums of 32 columns do, where the softmax comes after them
constexpr int64_t kDotTaskRows = 256;  // of a task, which share each gathered chunk
constexpr int kDirectRows = 8;         // rows that at a time meet keys and values as they lie in memory, the first ones of which bring them near
constexpr int64_t kManyRows = 48;      // rows that share gathered chunks: in their long products what comes is fetched, and not while gathering
constexpr int64_t kNear = 2048;        // and into L1, where floats are faster

// Where a task keeps what it works on. D is the padded head size; a word is a pair of bf16 or, of 32 that follow each other, first the float
// of each pair's first one and then those of the second ones.
template <class Word>
constexpr int64_t kWords = std::is_same_v<Word, float> ? 2 : 1;  // for a pair
template <bool kFloats>
struct DotScratch {
    using Word = std::conditional_t<kFloats, float, uint32_t>;
    static constexpr int64_t kWords = QUIRE_NS::kWords<Word>;
    static constexpr int64_t kScores = (kFloats ? kFloatRows : 2 * kDotRows) * kChunk;

    Word* pairs;                       // of keys, and then of values: [D / 2][64], [32][D]; floats by 32 columns, [2][D][32], [D / 32][64][32]
    float *key_scales, *value_scales;  // [64], of an i8 cache
    float* scores;                     // [row][64]
    Word* weights;                     // [row][32 * kWords]
    Word* queries;                     // [row][D / 2 * kWords]
    float *sums, *totals;              // [row][16], of a chunk's weights, and of all so far
    float* decays;                     // [row], what the sums so far shrink by
    uint64_t* seen;                    // [row], a bit for each key of the chunk

    DotScratch(Scratch& scratch, int64_t dim, int64_t num_rows) {
        const int64_t chunk = kWords * kChunk / 2 * dim;
        pairs = scratch.get<Word>(chunk + 2 * kChunk + kScores + num_rows * (kWords * (kChunk / 2 + dim / 2) + 32 + 3));
        key_scales = reinterpret_cast<float*>(pairs + chunk);
        value_scales = key_scales + kChunk;
        scores = value_scales + kChunk;
        weights = reinterpret_cast<Word*>(scores + kScores);
        queries = weights + kWords * num_rows * kChunk / 2;
        sums = reinterpret_cast<float*>(queries + kWords * num_rows * dim / 2);
        totals = sums + num_rows * 16;
        seen = reinterpret_cast<uint64_t*>(totals + num_rows * 16);
        decays = reinterpret_cast<float*>(seen + num_rows);
    }
    // For the rows from `row` on, of the queries and totals.
    DotScratch from(int64_t row, int64_t dim) const {
        DotScratch rest = *this;
        rest.queries += kWords * row * dim / 2, rest.totals += row * 16;
        rest.weights += kWords * row * kChunk / 2, rest.sums += row * 16, rest.decays += row, rest.seen += row;
        return rest;
    }
};

// What an i8 cache holds, -127 to 127, where bytes can be looked up (expand.h): that takes half the work of conversions.
struct LookedUp {
    int8_t code;
};

// Up to 16 elements as bf16, in the lower halves of words.
inline __m512i load_halves(const bf16* p, __mmask16 there) { return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, p)); }
inline __m512i load_halves(const int8_t* p, __mmask16 there) {  // small integers are exact in bf16
    return _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(there, p)))), 16);
}
inline __m512i load_halves(const LookedUp* p, __mmask16 there) { return load_halves(&p->code, there); }
inline __mmask16 first_lanes(int64_t n) { return n < 16 ? __mmask16((1u << n) - 1) : __mmask16(0xffff); }

// 32 elements as bf16.
inline __m512i load_32(const bf16* p) { return _mm512_loadu_si512(p); }
#if defined(__AVX512BF16__)
inline __m512i load_32(const int8_t* p) {  // small integers are exact in bf16
    auto half = [&](int64_t i) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i)))); };
    return rounded_to_bf16(half(16), half(0));
}
inline __m512i load_32(const LookedUp* p) { return load_32(&p->code); }
#endif

// Which of two vectors' 32 elements make pairs from `first` on.
inline __m512i in_turn(int first) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i even = _mm512_add_epi32(lane, _mm512_set1_epi32(first));
    return _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(32)), 16));
}

// Up to `count` elements of two arrays in turn, as pairs.
template <class Cached>
inline void zip(const Cached* even, const Cached* odd, int64_t count, uint32_t* out) {
    const __m512i first = in_turn(0), second = in_turn(16);
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m512i a = load_32(even + i), b = load_32(odd + i);
        _mm512_storeu_si512(out + i, _mm512_permutex2var_epi16(a, first, b));
        _mm512_storeu_si512(out + i + 16, _mm512_permutex2var_epi16(a, second, b));
    }
    for (; i < count; i += 16) {
        const __mmask16 there = first_lanes(count - i);
        const __m512i upper = _mm512_slli_epi32(load_halves(odd + i, there), 16);
        _mm512_mask_storeu_epi32(out + i, there, _mm512_or_si512(load_halves(even + i, there), upper));
    }
}

// One half of pairs; the other one stays.
template <class Cached>
inline void put_half(const Cached* from, int64_t count, bool upper, uint32_t* out) {
    for (int64_t i = 0; i < count; i += 16) {
        const __m512i half = load_halves(from + i, 0xffff), old = _mm512_loadu_si512(out + i);
        const __m512i low_half = _mm512_set1_epi32(0xffff);
        _mm512_storeu_si512(out + i, upper ? _mm512_or_si512(_mm512_and_si512(old, low_half), _mm512_slli_epi32(half, 16))
                                           : _mm512_or_si512(_mm512_andnot_si512(low_half, old), half));
    }
}

// 16 pairs -> 16 floats of the first ones, and then those of the second ones.
QUIRE_INLINE void store_floats(__m512i pairs, float* to) {
    const FloatPairs floats(pairs);
    _mm512_storeu_ps(to, floats.first);
    _mm512_storeu_ps(to + 16, floats.second);
}

// `count` keys of a block, from place `at` of the chunk on, in floats.
template <class Cached>
inline void spread_keys(const Cached* from, int64_t block_size, int64_t dim, int64_t at, int64_t count, float* keys) {
    for (int64_t i = 0, n; i < count; i += n) {
        n = std::min<int64_t>(16 - (at + i) % 16, count - i);
        float* to = keys + (at + i) / 32 * 32 * dim + (at + i) % 32;
        for (int64_t d = 0; d < dim; d++)
            _mm512_mask_storeu_epi32(to + d * 32, first_lanes(n), _mm512_slli_epi32(load_halves(from + d * block_size + i, first_lanes(n)), 16));
    }
}
// A value, at place `at` of the chunk.
template <class Cached>
inline void spread_value(const Cached* from, int64_t dim, int64_t at, float* values) {
    for (int64_t d = 0; d < dim; d += 16)
        _mm512_storeu_si512(values + d / 32 * 32 * kChunk + at * 32 + d % 32, _mm512_slli_epi32(load_halves(from + d, 0xffff), 16));
}

// A chunk's keys [low, high).
struct ChunkRange {
    int64_t chunk, low, high;

    bool is_whole() const { return low <= chunk && high >= chunk + kChunk; }
};

// The keys of a chunk, zeros elsewhere; and the scales of an i8 cache's keys and values, which weights are made with.
template <class Cached, bool kFloats>
void gather_keys(const Sight& sight, ChunkRange range, const DotScratch<kFloats>& s) {
    const CacheShape& shape = sight.a.cache_shape;
    const int64_t dim = shape.padded_dim(), size = shape.block_size;
    if (!range.is_whole()) {
        std::memset(s.pairs, 0, kChunk * dim * 2 * s.kWords);
        std::memset(s.key_scales, 0, kChunk * 4);
        std::memset(s.value_scales, 0, kChunk * 4);
    }
    sight.for_blocks(range.low, range.high, [&](int64_t position, int64_t offset, int64_t count) {
        const Cached* k = reinterpret_cast<const Cached*>(sight.head(position, false));
        const int64_t at = position - range.chunk;
        if constexpr (kFloats)
            spread_keys(k + offset, size, dim, at, count, s.pairs);
        else
            for (int64_t d = 0; d < dim; d += 2)
                zip(k + d * size + offset, k + (d + 1) * size + offset, count, s.pairs + d / 2 * kChunk + at);
        if (sizeof(Cached) > 1) return;
        const Cached* v = reinterpret_cast<const Cached*>(sight.head(position, true));
        std::memcpy(s.key_scales + at, reinterpret_cast<const float*>(k + size * dim) + offset, count * 4);
        std::memcpy(s.value_scales + at, reinterpret_cast<const float*>(v + size * dim) + offset, count * 4);
    });
}
// Its values, in place of the keys.
template <class Cached, bool kFloats>
void gather_values(const Sight& sight, ChunkRange range, CacheAhead<Cached>* ahead, const DotScratch<kFloats>& s) {
    const int64_t dim = sight.a.cache_shape.padded_dim();
    if (!range.is_whole()) std::memset(s.pairs, 0, kChunk * dim * 2 * s.kWords);
    sight.for_blocks(range.low, range.high, [&](int64_t position, int64_t offset, int64_t count) {
        const Cached* v = reinterpret_cast<const Cached*>(sight.head(position, true)) + offset * dim;
        for (int64_t at = position - range.chunk, end = at + count; at < end;) {
            const bool two = !kFloats && at % 2 == 0 && at + 1 < end;
            if (ahead) ahead->fetch((two ? 4 : 2) * dim * int64_t(sizeof(Cached)));
            if constexpr (kFloats)
                spread_value(v, dim, at, s.pairs);
            else if (two)
                zip(v, v + dim, dim, s.pairs + at / 2 * dim);
            else
                put_half(v, dim, at % 2, s.pairs + at / 2 * dim);
            at += two ? 2 : 1, v += two ? 2 * dim : dim;
        }
    });
}

// Calls body with the constants below kCount: loops that GCC unrolls late leave an array of sums in memory.
template <class Body, int... kAt>
QUIRE_INLINE void each(const Body& body, std::integer_sequence<int, kAt...>) {
    (body(std::integral_constant<int, kAt>()), ...);
}
template <int kCount, class Body>
QUIRE_INLINE void times(const Body& body) {
    each(body, std::make_integer_sequence<int, kCount>());
}

// Adds the products of pairs [begin, end) to sums that stay in registers.
template <int kRows, int kVectors>
QUIRE_INLINE void add_pairs(const uint32_t* x, int64_t x_stride, const uint32_t* y, int64_t y_stride, int64_t begin, int64_t end,
                            __m512 (&acc)[kRows][kVectors]) {
    for (int64_t p = begin; p < end; p++) {
        __m512i columns[kVectors];
        times<kVectors>([&](auto j) QUIRE_ALWAYS { columns[j] = _mm512_loadu_si512(y + p * y_stride + j * 16); });
        times<kRows>([&](auto r) QUIRE_ALWAYS {
            const __m512i pair = _mm512_set1_epi32(int(x[r * x_stride + p]));
            times<kVectors>([&](auto j) QUIRE_ALWAYS { acc[r][j] = add_dot(acc[r][j], columns[j], pair); });
        });
    }
}

// out[row][16 * kVectors] = the products of pairs, of which there are a multiple of kScoreParts; after each of so many equal parts
// calls between(part).
template <int kRows, int kVectors, class Between>
inline void dot_scores(const uint32_t* x, const uint32_t* y, int64_t num_pairs, float* out, const Between& between) {
    __m512 acc[kRows][kVectors];
    times<kRows>([&](auto r) QUIRE_ALWAYS { times<kVectors>([&](auto j) QUIRE_ALWAYS { acc[r][j] = _mm512_setzero_ps(); }); });
    const int64_t part = num_pairs / kScoreParts;
    times<kScoreParts>([&](auto i) QUIRE_ALWAYS {
        add_pairs<kRows, kVectors>(x, num_pairs, y, kChunk, i * part, (i + 1) * part, acc);
        between(i);
    });
    times<kRows>([&](auto r) QUIRE_ALWAYS { times<kVectors>([&](auto j) QUIRE_ALWAYS { _mm512_storeu_ps(out + r * kChunk + j * 16, acc[r][j]); }); });
}

// out[row][16 * kVectors] = out * keep + the products of pairs; `shrink`: whether any of them is not 1.
template <int kRows, int kVectors>
QUIRE_INLINE void dot_columns(const uint32_t* x, const uint32_t* y, int64_t dim, int64_t num_pairs, bool shrink, const float* keep, float* out) {
    __m512 acc[kRows][kVectors];
    times<kRows>([&](auto r) QUIRE_ALWAYS {
        times<kVectors>([&](auto j) QUIRE_ALWAYS { acc[r][j] = _mm512_loadu_ps(out + r * dim + j * 16); });
    });
    if (shrink)
        times<kRows>([&](auto r) QUIRE_ALWAYS {
            times<kVectors>([&](auto j) QUIRE_ALWAYS { acc[r][j] = _mm512_mul_ps(acc[r][j], _mm512_set1_ps(keep[r])); });
        });
    add_pairs<kRows, kVectors>(x, kChunk / 2, y, dim, 0, num_pairs, acc);
    asm("" : "+r"(out), "+r"(dim));  // or the compiler keeps all addresses
    times<kRows>([&](auto r) QUIRE_ALWAYS { times<kVectors>([&](auto j) QUIRE_ALWAYS { _mm512_storeu_ps(out + r * dim + j * 16, acc[r][j]); }); });
}
// All columns of some rows: what comes before a product must be little beside it.
template <int kRows>
inline void dot_values(const uint32_t* x, const uint32_t* y, int64_t dim, int64_t num_pairs, const float* keep, float* out) {
    bool shrink = false;
    for (int r = 0; r < kRows; r++) shrink |= keep[r] != 1;
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) dot_columns<kRows, 4>(x, y + d, dim, num_pairs, shrink, keep, out + d);
    if (d < dim) dot_columns<kRows, 2>(x, y + d, dim, num_pairs, shrink, keep, out + d);
}

// As dot_scores and dot_values, of floats, for 16 * kVectors of 32 columns: out = out * keep, or zeros, + the products of pairs [begin, end).
template <int kRows, int kVectors>
QUIRE_ONE_COPY void multiply_floats(const float* x, int64_t x_stride, const float* y, int64_t begin, int64_t end, const float* keep,
                                    float* out, int64_t out_stride) {
    __m512 acc[kRows][kVectors];
    auto for_sums = [&](const auto& body) QUIRE_ALWAYS {
        times<kRows>([&](auto r) QUIRE_ALWAYS { times<kVectors>([&](auto j) QUIRE_ALWAYS { body(acc[r][j], out + r * out_stride + j * 16, r); }); });
    };
    if (keep)
        for_sums([&](__m512& sum, const float* at, int r) QUIRE_ALWAYS { sum = _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(keep[r])); });
    else
        for_sums([](__m512& sum, const float*, int) QUIRE_ALWAYS { sum = _mm512_setzero_ps(); });
    y += begin * 64;
    for (int64_t stop; begin < end; begin = stop) {
        stop = std::min(begin / 16 * 16 + 16, end);
        NearRows<kRows, 0> rows({reinterpret_cast<const bf16*>(x + begin / 16 * 32 + begin % 16), 2 * x_stride, 0});
        for (int64_t pair = begin; pair < stop; pair++, y += 64, rows.skip(4)) {
            auto add = [&](int which) QUIRE_ALWAYS {
                __m512 columns[kVectors];
                times<kVectors>([&](auto j) QUIRE_ALWAYS { columns[j] = _mm512_loadu_ps(y + which * 32 + j * 16); });
                times<kRows>([&](auto r) QUIRE_ALWAYS {
                    const __m512 factor = _mm512_set1_ps(*reinterpret_cast<const float*>(rows.at(r, which * 4)));
                    times<kVectors>([&](auto j) QUIRE_ALWAYS { acc[r][j] = _mm512_fmadd_ps(columns[j], factor, acc[r][j]); });
                });
            };
            add(1);
            add(0);
        }
    }
    for_sums([](const __m512& sum, float* at, int) QUIRE_ALWAYS { _mm512_storeu_ps(at, sum); });
}

// 2^x to 4e-7, for x <= 0 or so; 2^0 is exactly 1, and far below 0 it is 0; where it is not wanted it is 0 too. Of a sixteenth
// by look-up, of what is left by a polynomial: next to products, only its four multiplications take time.
alignas(64) constexpr float kRoots[16] = {1.0f, 1.04427378f, 1.09050773f, 1.13878863f, 1.18920712f, 1.24185781f, 1.29683955f, 1.35425555f,
                                          1.41421356f, 1.47682615f, 1.54221083f, 1.61049033f, 1.68179283f, 1.75625216f, 1.83400809f, 1.91520656f};
QUIRE_INLINE __m512 power_of_2(__m512 x, __mmask16 wanted) {
    const __m512 magic = _mm512_set1_ps(786432.0f);  // the last bit of which is a sixteenth
    x = _mm512_max_ps(_mm512_set1_ps(-300.0f), x);   // NaN stays NaN
    const __m512 t = _mm512_add_ps(x, magic), n = _mm512_sub_ps(t, magic), r = _mm512_sub_ps(x, n);
    const __m512 root = _mm512_permutexvar_ps(_mm512_castps_si512(t), _mm512_load_ps(kRoots));
    const __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(2.4023590e-1f), r, _mm512_set1_ps(6.9318783e-1f));
    return _mm512_maskz_scalef_ps(wanted, _mm512_fmadd_ps(_mm512_mul_ps(root, r), p, root), n);
}

// The softmax of a row's scores of a chunk. First its maximum:
template <bool kScaled, bool kCapped, class Scratches>
QUIRE_INLINE void raise_highest(const Scratches& s, float* scores, uint64_t seen, ScoreFactors factors, float& highest) {
    __m512 most = _mm512_set1_ps(-__builtin_inff());
    for (int j = 0; j < 4; j++) {
        __m512 raw = _mm512_loadu_ps(scores + j * 16);
        if (kScaled) raw = _mm512_mul_ps(raw, _mm512_loadu_ps(s.key_scales + j * 16));
        if (kCapped) raw = tanh_of(raw, factors.inner);
        if (kScaled || kCapped) _mm512_storeu_ps(scores + j * 16, raw);
        most = _mm512_mask_max_ps(most, __mmask16(seen >> 16 * j), most, raw);
    }
    const float reached = _mm512_reduce_max_ps(most) * factors.outer;
    highest = reached > highest ? reached : highest;
}

// 32 weights as the words of pairs that they are multiplied as.
#if defined(__AVX512BF16__)
QUIRE_INLINE void store_weights(__m512 low, __m512 high, float* to) { store_floats(rounded_to_bf16(high, low), to); }
QUIRE_INLINE void store_weights(__m512 low, __m512 high, uint32_t* to) { _mm512_storeu_si512(to, rounded_to_bf16(high, low)); }
#else
QUIRE_INLINE void store_weights(__m512 low, __m512 high, float* to) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, even, high));
    _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high));
}
#endif

// Then its weights, and their sums.
template <bool kScaled, bool kFloats>
QUIRE_INLINE void weigh_row(const DotScratch<kFloats>& s, int64_t row, const float* scores, float scale, float highest) {
    const uint64_t seen = s.seen[row];
    auto weigh = [&](int j) QUIRE_ALWAYS {
        return power_of_2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + j * 16), _mm512_set1_ps(scale), _mm512_set1_ps(highest)), __mmask16(seen >> 16 * j));
    };
    auto scaled = [&](__m512 weight, int j) QUIRE_ALWAYS {
        return kScaled ? _mm512_maskz_mul_ps(__mmask16(seen >> 16 * j), weight, _mm512_loadu_ps(s.value_scales + j * 16)) : weight;
    };
    __m512 sum;
    times<2>([&](auto i) QUIRE_ALWAYS {
        const __m512 first = weigh(2 * i), second = weigh(2 * i + 1);
        sum = i == 0 ? _mm512_add_ps(first, second) : _mm512_add_ps(_mm512_add_ps(sum, first), second);
        auto* to = s.weights + row * s.kWords * kChunk / 2 + s.kWords * i * 16;
        store_weights(scaled(first, 2 * i), scaled(second, 2 * i + 1), to);
    });
    _mm512_storeu_ps(s.sums + row * 16, sum);
}

// Both of a few rows: at once, or a step after each part of others' products.
template <bool kScaled, bool kCapped, bool kFloats>
struct RowsSoftmax {
    DotScratch<kFloats> s;
    float *scores, *highest;
    int64_t count;
    ScoreFactors factors;

    QUIRE_INLINE void raise(int64_t r) const { raise_highest<kScaled, kCapped>(s, scores + r * kChunk, s.seen[r], factors, highest[r]); }
    QUIRE_INLINE void weigh(int64_t r) const { weigh_row<kScaled>(s, r, scores + r * kChunk, factors.outer, highest[r]); }
    QUIRE_INLINE void all() const {
        for (int64_t r = 0; r < count; r++) raise(r);
        for (int64_t r = 0; r < count; r++) weigh(r);
    }
    QUIRE_INLINE void operator()(int64_t part) const {
        if (count == 0) return;
        part < kDotRows ? raise(part) : weigh(part - kDotRows);
    }
};

// Last what rows' sums shrink by, in place of their maxima before, and their totals.
template <class Scratches>
inline void add_totals(const Scratches& s, int64_t num_rows, const float* highest, float* totals) {
    float* const decays = s.decays;  // which a store might change, for all the compiler knows
    const float* const sums = s.sums;
    for (int64_t r = 0; r < num_rows; r += 16) {
        const __mmask16 there = first_lanes(num_rows - r);
        const __m512 raised = _mm512_sub_ps(_mm512_maskz_loadu_ps(there, decays + r), _mm512_maskz_loadu_ps(there, highest + r));
        const bool same = _mm512_cmp_ps_mask(raised, _mm512_setzero_ps(), _CMP_NEQ_UQ) == 0;  // so mostly, after the first keys
        _mm512_mask_storeu_ps(decays + r, there, same ? _mm512_set1_ps(1.0f) : exp2_of(raised));
    }
    for (int64_t r = 0; r < num_rows; r++)
        _mm512_storeu_ps(totals + r * 16, _mm512_fmadd_ps(_mm512_loadu_ps(totals + r * 16), _mm512_set1_ps(decays[r]), _mm512_loadu_ps(sums + r * 16)));
}

// The first `count` keys of a chunk of two blocks of 32, where they lie.
template <class Cached>
struct DirectChunk {
    const Cached *keys[2], *values[2];
    int64_t dim, counts[2], num_blocks;

    DirectChunk(const Sight& sight, int64_t chunk, int64_t count)
        : dim(sight.a.cache_shape.padded_dim()), counts{std::min<int64_t>(count, 32), std::max<int64_t>(count - 32, 0)}, num_blocks(count > 32 ? 2 : 1) {
        for (int64_t i = 0; i < num_blocks; i++) {
            keys[i] = reinterpret_cast<const Cached*>(sight.head(chunk + i * 32, false));
            values[i] = reinterpret_cast<const Cached*>(sight.head(chunk + i * 32, true));
        }
    }
};

// Brings to L1 what is read kNear bytes after two rows of a block's keys or values, maybe of the next ones already. Intel's cores read lines
// from L2 late while those that CacheAhead fetches into it are on their way.
template <class Cached>
QUIRE_INLINE void fetch_near(const Cached* even, const Cached* odd, const Cached* end, const Cached* next) {
    constexpr int64_t kElements = kNear / sizeof(Cached);
    const int64_t past = even + kElements - end;
    const Cached* near = past < 0 ? even + kElements : next + past;
    _mm_prefetch(reinterpret_cast<const char*>(near), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(near + (odd - even)), _MM_HINT_T0);
}

// Which of two halves' 32 bytes make them alternate.
struct Alternating {
    alignas(64) uint8_t bytes[64];
    constexpr Alternating() : bytes() {
        for (int i = 0; i < 64; i++) bytes[i] = uint8_t(i / 2 + i % 2 * 32);
    }
};

// Pairs of two rows' columns in turn: of the lower halves of 128 bits, and of the upper ones.
struct ColumnPairs {
    __m512i low, high;

    QUIRE_INLINE ColumnPairs() : ColumnPairs(_mm512_setzero_si512(), _mm512_setzero_si512()) {}
    QUIRE_INLINE ColumnPairs(__m512i even, __m512i odd)
        : low(_mm512_unpacklo_epi16(even, odd)), high(_mm512_unpackhi_epi16(even, odd)) {}
    QUIRE_INLINE ColumnPairs(const LookedUp* even, const LookedUp* odd) {
        static constexpr Alternating alternating;
        __m512i codes = two_halves(even, odd);
        const __m512i order = _mm512_load_si512(alternating.bytes);
#if defined(QUIRE_EMULATE_AVX512)
        codes = _mm512_permutexvar_epi8(order, codes);
#else
        asm("vpermb %0, %1, %0" : "+v"(codes) : "v"(order));
#endif
        const __m512i magnitudes = _mm512_abs_epi8(codes), lows = bytes_of(magnitudes, kI8Tables.low);
        const __m512i highs = _mm512_ternarylogic_epi32(bytes_of(magnitudes, kI8Tables.high), codes, _mm512_set1_epi8(char(0x80)), 0xf8);  // with the codes' signs
        low = _mm512_unpacklo_epi8(lows, highs), high = _mm512_unpackhi_epi8(lows, highs);
    }
    template <class Cached>
    QUIRE_INLINE ColumnPairs(const Cached* even, const Cached* odd) : ColumnPairs(load_32(even), load_32(odd)) {}
    template <class Cached>
    QUIRE_INLINE explicit ColumnPairs(const Cached* even) : ColumnPairs(load_32(even), _mm512_setzero_si512()) {}

    QUIRE_INLINE void add(const uint32_t* weights, __m512 (&sums)[2]) const {
        const __m512i pair = _mm512_set1_epi32(int(*weights));
        sums[0] = add_dot(sums[0], low, pair), sums[1] = add_dot(sums[1], high, pair);
    }
    // Sums from and to 32 columns in order.
    static QUIRE_INLINE void load_sums(__m512 a, __m512 b, __m512 (&sums)[2]) {
        sums[0] = _mm512_shuffle_f32x4(a, b, 0x88), sums[1] = _mm512_shuffle_f32x4(a, b, 0xdd);  // columns 0-3 8-11 16-19 24-27, the others
    }
    static QUIRE_INLINE void store_sums(const __m512 (&sums)[2], float* to) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        _mm512_storeu_ps(to, _mm512_permutex2var_ps(sums[0], first, sums[1]));
        _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(sums[0], second, sums[1]));
    }
};

// Two rows' columns in floats: of bf16 the even columns and the odd ones, of bytes the first 16 and the others.
template <class Cached>
struct ColumnFloats {
    __m512 first[2] = {}, second[2] = {};

    QUIRE_INLINE ColumnFloats() {}
    QUIRE_INLINE explicit ColumnFloats(const Cached* even) { load(even, first); }
    QUIRE_INLINE ColumnFloats(const Cached* even, const Cached* odd) { load(even, first), load(odd, second); }
    static QUIRE_INLINE void load(const Cached* from, __m512 (&to)[2]) {
        if constexpr (sizeof(Cached) == 1) {
            auto bytes = [](const Cached* p) QUIRE_ALWAYS { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); };
            to[0] = bytes(from), to[1] = bytes(from + 16);
        } else {
            const FloatPairs floats(load_32(from));
            to[0] = floats.first, to[1] = floats.second;
        }
    }

    QUIRE_INLINE void add(const float* weights, __m512 (&sums)[2]) const {
        const __m512 of_first = _mm512_set1_ps(weights[0]), of_second = _mm512_set1_ps(weights[16]);
        for (int i = 0; i < 2; i++) sums[i] = _mm512_fmadd_ps(first[i], of_first, _mm512_fmadd_ps(second[i], of_second, sums[i]));
    }
    static QUIRE_INLINE void load_sums(__m512 a, __m512 b, __m512 (&sums)[2]) {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        sums[0] = sizeof(Cached) == 1 ? a : _mm512_permutex2var_ps(a, even, b);
        sums[1] = sizeof(Cached) == 1 ? b : _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
    }
    static QUIRE_INLINE void store_sums(const __m512 (&sums)[2], float* to) {
        const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        _mm512_storeu_ps(to, sizeof(Cached) == 1 ? sums[0] : _mm512_permutex2var_ps(sums[0], first, sums[1]));
        _mm512_storeu_ps(to + 16, sizeof(Cached) == 1 ? sums[1] : _mm512_permutex2var_ps(sums[0], _mm512_add_epi32(first, _mm512_set1_epi32(8)), sums[1]));
    }
};

// By the words of queries and weights (DotScratch): columns, and where a pair lies.
template <class Cached, class Word>
using ColumnsOf = std::conditional_t<std::is_same_v<Word, float>, ColumnFloats<Cached>, ColumnPairs>;
QUIRE_INLINE const uint32_t* pair_at(const uint32_t* words, int64_t pair) { return words + pair; }
QUIRE_INLINE const float* pair_at(const float* words, int64_t pair) { return words + pair + (pair & ~15); }

// Of so many pairs of rows calls fetch() and add(pair, part, columns) with columns_at(pair, part). `kEarly`: what a cache holds is looked
// up for the next pair while this one is multiplied.
template <bool kEarly, int kParts, class Fetch, class ColumnsAt, class Add>
QUIRE_INLINE void for_columns(int64_t num_pairs, const Fetch& fetch, const ColumnsAt& columns_at, const Add& add) {
    if constexpr (!kEarly) {
        for (int64_t pair = 0; pair < num_pairs; pair++) {
            fetch();
            times<kParts>([&](auto part) QUIRE_ALWAYS { add(pair, part, columns_at(pair, part)); });
        }
        return;
    }
    constexpr std::integral_constant<int, 0> part;
    auto next = columns_at(0, part);
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        fetch();
        const auto columns = next;
        next = columns_at(pair + 1 < num_pairs ? pair + 1 : pair, part);
        add(pair, part, columns);
    }
}
// Whether there are products enough beside which to do that, and registers: more rows have one part at a time.
template <class Cached>
constexpr bool is_early(int num_rows) { return sizeof(Cached) == 1 && num_rows > 4; }

// Scores of a block's 32 keys: as dot_scores has them. Of those that are not there, anything: nobody looks at them. One copy, as is that
// of sums: inlined beside other calls, some numbers of rows lose their registers (int8's four rows a seventh of their speed).
template <int kRows, int kBlocks, class Cached, class Word>
QUIRE_ONE_COPY void direct_scores(const DirectChunk<Cached>& c, CacheAhead<Cached>* ahead, int64_t block, const Word* queries, float* scores) {
    using Columns = ColumnsOf<Cached, Word>;
    constexpr bool kFloats = std::is_same_v<Word, float>;
    __m512 acc[kRows][kBlocks][2];
    auto for_sums = [&](const auto& body) QUIRE_ALWAYS {
        times<kRows>([&](auto r) QUIRE_ALWAYS { times<kBlocks>([&](auto b) QUIRE_ALWAYS { body(acc[r][b], scores + r * kChunk + (block + b) * 32); }); });
    };
    for_sums([](auto& sums, float*) QUIRE_ALWAYS { sums[0] = sums[1] = _mm512_setzero_ps(); });
    const Cached *first = c.keys[block], *second = c.keys[block + kBlocks - 1];
    const int64_t num_pairs = c.dim / 2;
    auto columns_at = [&](int64_t pair, int b) QUIRE_ALWAYS {
        const Cached* keys = (b ? second : first) + pair * 64;
        if (kFloats && ahead) fetch_near(keys, keys + 32, (b ? second : first) + 32 * c.dim, kBlocks == 2 ? c.values[b] : block + 1 < c.num_blocks ? c.keys[1] : c.values[0]);
        return Columns(keys, keys + 32);
    };
    auto fetch = [&]() QUIRE_ALWAYS {
        if (ahead) ahead->fetch(2 * 32 * kBlocks * sizeof(Cached));
    };
    for_columns<is_early<Cached>(kRows), kBlocks>(num_pairs, fetch, columns_at, [&](int64_t pair, auto b, const Columns& columns) QUIRE_ALWAYS {
        const Word* x = pair_at(queries, pair);
        times<kRows>([&](auto r) QUIRE_ALWAYS { columns.add(x + r * kWords<Word> * num_pairs, acc[r][b]); });
    });
    for_sums([](const auto& sums, float* at) QUIRE_ALWAYS { Columns::store_sums(sums, at); });
}

// out = out * keep + weighted sums of 32 * kParts features of the values from `first` on, likewise. What is not there, is
// not read: it may be no number.
template <int kRows, int kParts, class Cached, class Word>
QUIRE_ONE_COPY void direct_sums(const DirectChunk<Cached>& c, CacheAhead<Cached>* ahead, int64_t first, const Word* weights, const float* keep, float* out) {
    using Columns = ColumnsOf<Cached, Word>;
    constexpr bool kFloats = std::is_same_v<Word, float>;
    __m512 acc[kRows][kParts][2];
    auto for_sums = [&](const auto& body) QUIRE_ALWAYS {
        times<kRows>([&](auto r) QUIRE_ALWAYS { times<kParts>([&](auto j) QUIRE_ALWAYS { body(acc[r][j], out + r * c.dim + first + j * 32, keep[r]); }); });
    };
    for_sums([](auto& sums, const float* at, float shrink) QUIRE_ALWAYS {
        const __m512 keep = _mm512_set1_ps(shrink);
        Columns::load_sums(_mm512_mul_ps(_mm512_loadu_ps(at), keep), _mm512_mul_ps(_mm512_loadu_ps(at + 16), keep), sums);
    });
    for (int64_t block = 0; block < c.num_blocks; block++) {
        const Cached* values = c.values[block] + first;
        const int64_t count = c.counts[block], num_pairs = count / 2;
        auto columns_at = [&](int64_t pair, int part) QUIRE_ALWAYS {
            const Cached* even = values + 2 * pair * c.dim + part * 32;
            if (kFloats && ahead) fetch_near(even, even + c.dim, c.values[block] + 32 * c.dim, c.values[c.num_blocks - 1]);
            return Columns(even, even + c.dim);
        };
        auto add = [&](int64_t pair, auto part, const Columns& columns) QUIRE_ALWAYS {
            const Word* x = pair_at(weights, block * 16 + pair);
            times<kRows>([&](auto r) QUIRE_ALWAYS { columns.add(x + r * kWords<Word> * kChunk / 2, acc[r][part]); });
        };
        auto fetch = [&]() QUIRE_ALWAYS {
            if (ahead) ahead->fetch(2 * 32 * kParts * sizeof(Cached));
        };
        for_columns<is_early<Cached>(kRows), kParts>(num_pairs, fetch, columns_at, add);
        if (count % 2 == 0) continue;
        if (ahead) ahead->fetch(32 * kParts * sizeof(Cached));
        times<kParts>([&](auto part) QUIRE_ALWAYS { add(num_pairs, part, Columns(values + (count - 1) * c.dim + part * 32)); });
    }
    if (c.counts[1] < 31)  // pairs of zeros, which gathered chunks end with, make +0 of -0
        for_sums([](auto& sums, float*, float) QUIRE_ALWAYS {
            constexpr Word kZeros[kWords<Word> * 16] = {};
            Columns().add(kZeros, sums);
        });
    for_sums([](const auto& sums, float* at, float) QUIRE_ALWAYS { Columns::store_sums(sums, at); });
}

// Whether few rows meet keys and values where they lie.
inline bool lies_well(const AttentionArgs& a) { return a.cache_shape.block_size == 32 && !a.step->tail_starts; }

template <class Cached, bool kCapped, bool kFloats>
struct DotKernel {
    using Memory = DotScratch<kFloats>;
    const AttentionArgs& a;
    Context& context;

    static constexpr bool kScaled = sizeof(Cached) == 1;

    // Which keys of a chunk rows from `row` of the range on see; false if that is all.
    bool look(const Sight& sight, const Memory& s, int64_t row, int64_t num_rows, int64_t chunk) const {
        const int64_t begin = sight.range.begin + row;
        const bool all = !sight.is_several() && sight.position(begin) >= chunk + kChunk - 1 && sight.lowest_key(begin + num_rows - 1) <= chunk;
        std::fill_n(s.seen, num_rows, ~uint64_t(0));
        for (int64_t r = 0; !all && r < num_rows; r++) {
            const int64_t first = sight.lowest_key(begin + r) - chunk, last = sight.position(begin + r) - chunk;
            s.seen[r] = first >= kChunk || last < 0 ? 0 : s.seen[r] >> (last < kChunk ? kChunk - 1 - last : 0);
            if (first > 0 && s.seen[r]) s.seen[r] = s.seen[r] >> first << first;
        }
        return !all;
    }

    // A few rows, from `row` of the range on, meet a chunk's keys where they lie. `ahead` is null if others did before.
    template <int kRows>
    void weigh_direct(const Sight& sight, const Memory& s, int64_t row, int64_t chunk, int64_t end, CacheAhead<Cached>* ahead,
                      ScoreFactors factors, Partial partial) const {
        const DirectChunk<Cached> c(sight, chunk, end - chunk);
        const auto* queries = s.queries + s.kWords * row * c.dim / 2;
        constexpr bool kMayAtOnce = kRows <= (kFloats && sizeof(Cached) > 1 ? 2 : 4);
        const bool at_once = kMayAtOnce && c.num_blocks == 2;  // as the sums of a few rows wait for each other
        if constexpr (kMayAtOnce)
            if (at_once) direct_scores<kRows, 2>(c, ahead, 0, queries, s.scores);
        for (int64_t block = 0; block < c.num_blocks; block++) {
            if (!at_once) direct_scores<kRows, 1>(c, ahead, block, queries, s.scores);
            if (sizeof(Cached) > 1) continue;
            std::memcpy(s.key_scales + block * 32, c.keys[block] + 32 * c.dim, 32 * sizeof(float));
            std::memcpy(s.value_scales + block * 32, c.values[block] + 32 * c.dim, 32 * sizeof(float));
        }
        look(sight, s, row, kRows, chunk);
        float* highest = partial.highest + row;
        for (int r = 0; r < kRows; r++) {
            s.decays[r] = highest[r];
            raise_highest<kScaled, kCapped>(s, s.scores + r * kChunk, s.seen[r], factors, highest[r]);
        }
        for (int r = 0; r < kRows; r++) weigh_row<kScaled>(s, r, s.scores + r * kChunk, factors.outer, highest[r]);
        add_totals(s, kRows, highest, s.totals + row * 16);
    }
    // And its values.
    template <int kRows>
    void sum_direct(const Sight& sight, const Memory& s, int64_t row, int64_t chunk, int64_t end, CacheAhead<Cached>* ahead, Partial partial) const {
        const DirectChunk<Cached> c(sight, chunk, end - chunk);
        constexpr int kParts = kRows <= 2 ? 4 : kRows <= 4 ? 2 : 1;
        float* weighted = partial.weighted + row * c.dim;
        int64_t d = 0;
        for (; d + 32 * kParts <= c.dim; d += 32 * kParts) direct_sums<kRows, kParts>(c, ahead, d, s.weights, s.decays, weighted);
        for (; d < c.dim; d += 32) direct_sums<kRows, 1>(c, ahead, d, s.weights, s.decays, weighted);
    }

    // Rows [first_row, end_row) meet a chunk that is gathered: first its keys, then its values, so that L1 need hold but one of them. The
    // softmax of a few rows goes between products of the next ones, by execution units that products leave idle: maxima too, as
    // right after their own products they would wait for the last of them, and the next products with them.
    QUIRE_ONE_COPY void attend(const Sight& sight, const Memory& s, int64_t first_row, int64_t end_row, ChunkRange keys, CacheAhead<Cached>& ahead,
                               ScoreFactors factors, Partial partial) const {
        gather_keys<Cached>(sight, keys, s);
        const int64_t dim = a.cache_shape.padded_dim(), num_rows = end_row - first_row;
        const auto* queries = s.queries + s.kWords * first_row * dim / 2;
        float *weighted = partial.weighted + first_row * dim, *highest = partial.highest + first_row;
        const bool masked = look(sight, s, first_row, num_rows, keys.chunk);
        std::memcpy(s.decays, highest, num_rows * sizeof(float));
        const bool is_many = num_rows >= kManyRows;
        int64_t owed = 0;
        const int64_t at_once = kFloats ? divide_up(num_rows, divide_up(num_rows, kFloatRows)) : kDotRows;
        auto for_rows = [&](auto body) {  // a few at a time, and which keys they see; in either part, half of what is fetched
            for (int64_t row = 0; row < num_rows; row += at_once) {
                const int64_t count = std::min(at_once, num_rows - row);
                if (is_many)
                    for (owed += 32 * count; owed >= num_rows; owed -= num_rows) ahead.fetch(2 * dim * int64_t(sizeof(Cached)));
                uint64_t seen = masked ? 0 : ~uint64_t(0);
                for (int64_t r = 0; masked && r < count; r++) seen |= s.seen[row + r];
                if (seen) body(row, count, __builtin_ctzll(seen), 64 - __builtin_clzll(seen));
            }
        };
        if (masked) std::memset(s.sums, 0, num_rows * 64);
        if constexpr (kFloats) {
            for_rows([&](int64_t row, int64_t count, int64_t first, int64_t end) {
                with_rows<kFloatRows>(count, [&](auto rows) {
                    for (int64_t at = first / 16, stop = divide_up(end, 16), n; at < stop; at += n) {
                        n = std::min(2 - at % 2, stop - at);
                        const float* columns = s.pairs + at / 2 * 32 * dim + at % 2 * 16;
                        const auto multiply = n == 2 ? multiply_floats<rows, 2> : multiply_floats<rows, 1>;
                        multiply(queries + row * dim, dim, columns, 0, dim / 2, nullptr, s.scores + at * 16, kChunk);
                    }
                });
                RowsSoftmax<kScaled, kCapped, kFloats>{s.from(row, dim), s.scores, highest + row, count, factors}.all();
            });
            add_totals(s, num_rows, highest, s.totals + first_row * 16);
            gather_values(sight, keys, is_many ? nullptr : &ahead, s);
            for_rows([&](int64_t row, int64_t count, int64_t first, int64_t end) {
                const float *weights = s.weights + row * kChunk, *keep = s.decays + row;
                float* out = weighted + row * dim;
                with_rows<kFloatRows>(count, [&](auto rows) {
                    for (int64_t d = 0; d < dim; d += 32)
                        multiply_floats<rows, 2>(weights, kChunk, s.pairs + d * kChunk, first / 2, divide_up(end, 2), keep, out + d, dim);
                });
            });
        } else {
            RowsSoftmax<kScaled, kCapped, kFloats> before{s, nullptr, nullptr, 0, factors};
            auto scores_of = [&](int64_t row) { return s.scores + row % (2 * kDotRows) * kChunk; };
            for_rows([&](int64_t row, int64_t count, int64_t first, int64_t end) {
                const int64_t vector = first / 16;
                auto multiply = [&](auto rows, auto vectors) { dot_scores<rows, vectors>(queries + row * dim / 2, s.pairs + vector * 16, dim / 2, scores_of(row) + vector * 16, before); };
                if (count < kDotRows)
                    with_rows<kDotRows>(count, [&](auto rows) { dot_scores<rows, 4>(queries + row * dim / 2, s.pairs, dim / 2, scores_of(row), before); });
                else
                    with_rows<4>(divide_up(end, 16) - vector, [&](auto vectors) { multiply(std::integral_constant<int, kDotRows>(), vectors); });
                before = {s.from(row, dim), scores_of(row), highest + row, count, factors};
            });
            before.all();
            add_totals(s, num_rows, highest, s.totals + first_row * 16);
            gather_values(sight, keys, is_many ? nullptr : &ahead, s);
            for_rows([&](int64_t row, int64_t count, int64_t first, int64_t end) {
                const int64_t pair = first / 2, pairs = divide_up(end, 2) - pair;
                const uint32_t *weights = s.weights + row * kChunk / 2 + pair, *values = s.pairs + pair * dim;
                float* out = weighted + row * dim;
                with_rows<kDotRows>(count, [&](auto rows) { dot_values<rows>(weights, values, dim, pairs, s.decays + row, out); });
            });
        }
    }

    QUIRE_ONE_COPY void compute(RowRange range, int64_t low, int64_t high, Partial partial, int thread, const RowRange* after) const {
        Sight sight(a, range);
        const int64_t dim = a.cache_shape.padded_dim(), rows_of_head = range.num_rows(), num_rows = rows_of_head * range.num_heads;
        const Memory all(context.thread_scratch[thread], dim, num_rows);
        auto query_of = [&](int64_t r) {
            const int64_t head = r / rows_of_head;
            return static_cast<const bf16*>(a.query) + sight.query_offset(range.begin + r % rows_of_head, a.query_stride) + head * sight.group * a.cache_shape.head_dim;
        };
        for (int64_t r = 0; r < num_rows; r++)
            for (int64_t i = 0; i < a.cache_shape.head_dim; i += 32) _mm_prefetch(reinterpret_cast<const char*>(query_of(r) + i), _MM_HINT_T0);
        for (int64_t r = 0; r < num_rows; r++) {
            const bf16* query = query_of(r);
            if constexpr (kFloats) {
                for (int64_t i = 0; i < dim; i += 32) {
                    const int64_t left = a.cache_shape.head_dim - i;
                    const __mmask32 there = left < 32 ? (__mmask32(1) << left) - 1 : ~__mmask32(0);
                    store_floats(_mm512_maskz_loadu_epi16(there, query + i), all.queries + r * dim + i);
                }
            } else {
                std::memset(all.queries + (r + 1) * dim / 2 - 16, 0, 64);  // padding is less than 32 features
                std::memcpy(all.queries + r * dim / 2, query, a.cache_shape.head_dim * sizeof(bf16));
            }
            std::memset(partial.weighted + r * dim, 0, dim * sizeof(float));
            partial.highest[r] = kLowest;
            _mm512_storeu_ps(all.totals + r * 16, _mm512_setzero_ps());
        }
        const ScoreFactors factors(a);
        CacheAhead<Cached> ahead(sight, low, high, after, rows_of_head >= kManyRows);  // whose chunks are gathered without fetching
        const bool in_place = lies_well(a);
        auto attend_chunk = [&](int64_t chunk, int64_t end, int64_t first_row, int64_t end_row, const Memory& s, Partial partial) {
            auto sees = [&](int64_t row) { return sight.lowest_key(range.begin + row) < chunk + kChunk && sight.position(range.begin + row) >= chunk; };
            while (first_row < end_row && !sees(first_row)) first_row++;
            while (first_row < end_row && !sees(end_row - 1)) end_row--;
            if (first_row < end_row) attend(sight, s, first_row, end_row, {chunk, std::max(low, chunk), end}, ahead, factors, partial);
        };
        auto for_heads = [&](const auto& body) {
            for (int64_t head = 0; head < range.num_heads; head++) {
                sight.range.kv_head = range.kv_head + head;
                body(all.from(head * rows_of_head, dim), partial.from(head * rows_of_head, dim));
            }
            sight.range.kv_head = range.kv_head;
        };
        for (int64_t chunk = low / kChunk * kChunk; chunk < high; chunk += kChunk)
            for_views(sight, chunk, high, [&](int64_t end, int64_t first_row, int64_t end_row) {
                const int64_t count = end_row - first_row;
                if (!in_place || count >= kManyRows || chunk < low)
                    return for_heads([&](const Memory& s, Partial partial) { attend_chunk(chunk, end, first_row, end_row, s, partial); });
                const int64_t most = divide_up(count, divide_up(count, kDirectRows));
                for (int64_t row = first_row, next; row < end_row; row = next) {
                    next = std::min(row + most, end_row);
                    const int64_t stop = std::min(end, sight.position(range.begin + next - 1) + 1);
                    if (stop <= chunk) continue;
                    CacheAhead<Cached>* const bring = row == first_row ? &ahead : nullptr;
                    with_rows<kDirectRows>(next - row, [&](auto n) {
                        for_heads([&](const Memory& s, Partial partial) { weigh_direct<n>(sight, s, row, chunk, stop, bring, factors, partial); });
                        for_heads([&](const Memory& s, Partial partial) { sum_direct<n>(sight, s, row, chunk, stop, bring, partial); });
                    });
                }
            });
        for (int64_t r = 0; r < num_rows; r++) partial.total[r] = _mm512_reduce_add_ps(_mm512_loadu_ps(all.totals + r * 16));
    }

    void merge(Partial into, Partial from, int64_t num_rows) const {
        merge_rows(into, from, num_rows, a.cache_shape.padded_dim(), [](vf x) { return vf(exp2_of(__m512(x))); });
    }
    void write(RowRange range, Partial partial, int) const {
        write_rows<bf16>(a, range, partial, kLog2e, [](vf x) { return vf(exp2_of(__m512(x))); });
    }
};

inline void attention_dot(const AttentionArgs& a, Context& context) {
    if (a.type != Type::bf16 || a.scale < 0) return attention(a, context);  // the greatest product has to be the greatest score
    const bool in_bf16 = a.cache_shape.type == Type::bf16;
    auto run = [&](auto cached, auto floats) {
        auto with = [&](auto capped) { run_attention(a, context, kDotTaskRows, DotKernel<decltype(cached), capped, floats>{a, context}, floats || !lies_well(a) ? 0 : kDirectRows); };
        a.softcap > 0 ? with(std::true_type()) : with(std::false_type());
    };
#if defined(__AVX512BF16__)
    if (!floats_are_faster()) {
        if (in_bf16) return run(bf16(), std::false_type());
        return looks_up_bytes() ? run(LookedUp(), std::false_type()) : run(int8_t(), std::false_type());
    }
#endif
    in_bf16 ? run(bf16(), std::true_type()) : run(int8_t(), std::true_type());
}

}  // namespace quire::QUIRE_NS
