// Linear layers where neither bf16 nor bytes can be multiplied (AVX2): numbers become integers, of which VPMADDWD multiplies
// twice as many as floats are multiplied, whatever the weights are kept as.
//
// 32 columns of a row of x share a power of 2, counted in which the largest takes 14 bits: the bf16 numbers down to 1/64 of it
// stay what they are, and no smaller one is off by more than 1/16384 of it. Likewise 32 columns of a row of bf16 weights, in
// 12 bits. Other weights are the integers that their codes are, and meet their scales afterwards: no weight is rounded.
// Where x is to be rounded to eight bits (w8a8, w4a8), all columns of a row share what they are counted in.
// Sums of 32 columns are exact, and are added up in fp32 in the order of the columns: a row's bits are its own, however many
// rows there are and whichever way below is taken.
#pragma once

#include <immintrin.h>

#include "linear.h"

namespace quire::QUIRE_NS {

constexpr int kPairRows = 6;                 // rows of x in a panel, and of a register tile
constexpr int kFewRows = 4;                  // that meet weights as they are expanded; twice as many do so in turn where that takes
                                             // little, more meet panels of integers
constexpr int64_t kPanelTiles = 8;           // of a panel, a superblock: with its rows of x it stays in L1
constexpr int64_t kPanelWindow = 480;        // rows that share a panel, whose sums stay in L2
constexpr int kRowBits = 14, kWeightBits = 12;

// x as integers: of a panel's rows in turn the pairs of columns; then for each tile of 32 columns what the rows are counted in,
// and of each group of columns that share a scale of weights the sum of x. Where all codes mean so much less than they are,
// that is an integer, so many times less than none, with which sums of products begin: as if codes were what they mean.
struct PairedRows {
    int32_t* codes;  // [panels][pairs of columns][width]
    float* scales;   // [panels][tiles][3][width]: the unit; of up to two groups the sum, or the integer
    int64_t num_tiles;
    int width;  // rows of a panel

    PairedRows(const LinearArgs& a, int panel_rows, Scratch& memory) : num_tiles(a.weight.num_tiles()), width(panel_rows) {
        const int64_t panels = divide_up(a.num_rows, width);
        codes = memory.get<int32_t>(panels * num_tiles * (16 + 3) * width);
        scales = reinterpret_cast<float*>(codes + panels * num_tiles * 16 * width);
    }
    const int32_t* panel(int64_t first_row, int64_t tile) const { return codes + (first_row / width * num_tiles + tile) * 16 * width; }
    const float* unit(int64_t first_row, int64_t tile) const { return scales + (first_row / width * num_tiles + tile) * 3 * width; }
};

// 2^(exponent - bias), where that is a normal number.
inline float power_of_2(int field) {
    const uint32_t bits = uint32_t(field) << 23;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// 32 columns' integers at a row's place in a panel of `width`, in `groups` groups; `zero` is the code that means 0.
inline void put_integers(const int16_t* numbers, float counted_in, int groups, int zero, int width, int32_t* codes, float* unit) {
    for (int p = 0; p < 16; p++) std::memcpy(codes + p * width, numbers + 2 * p, 4);
    *unit = counted_in;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i halves[2];
    for (int i = 0; i < 2; i++) halves[i] = _mm256_madd_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + 16 * i)), ones);
    const __m256i quarters = _mm256_hadd_epi32(halves[0], halves[1]), both = _mm256_hadd_epi32(quarters, quarters);
    alignas(16) int32_t sums[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(sums), _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)));
    if (groups == 1) sums[0] += sums[1];
    for (int group = 0; group < groups; group++) {
        float* to = unit + (1 + group) * width;
        const int32_t less = -zero * sums[group];
        if (zero) std::memcpy(to, &less, 4);
        else *to = float(sums[group]) * counted_in;
    }
}

// In eight bits, as int8 weights are chosen (pack.h): into 32 integers.
QUIRE_ONE_COPY inline void to_bytes(const float* x, float factor, int16_t* numbers) {
    for (int c = 0; c < 32; c += kLanes) {
        const vi bounded = __builtin_convertvector(min(max(round_product(load(x + c), factor), splat(-127.0f)), splat(127.0f)), vi);
        for (int i = 0; i < kLanes; i++) numbers[c + i] = int16_t(bounded[i]);
    }
}

// By their own power of 2, which is returned. No product of the largest with the largest weights is beyond 32 bits, nor are
// 32 of them: bf16's eight bits make them 16320 x 4080 at most, other weights are codes of eight bits.
QUIRE_ONE_COPY inline float to_integers(const float* x, int16_t* numbers) {
    __m256 v[4];
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(0x7fffffff)));
    }
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    int exponent = _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1))) >> 23;
    if (exponent < 255) {
        exponent = exponent < kRowBits ? kRowBits : exponent;  // whose unit is a normal number
        const __m256 factor = _mm256_set1_ps(power_of_2(254 + kRowBits - 1 - exponent));
        for (int i = 0; i < 4; i += 2) {
            const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], factor)), high = _mm256_cvtps_epi32(_mm256_mul_ps(v[i + 1], factor));
            const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers + 8 * i), words);
        }
        return power_of_2(exponent - kRowBits + 1);
    }
    bool is_number = true;  // infinities, if nothing else, show as such
    for (int i = 0; i < 32; i++) {
        is_number = is_number && x[i] == x[i];
        numbers[i] = int16_t(x[i] - x[i] == 0 ? 0 : x[i] > 0 ? 1 : -1);
    }
    return is_number ? __builtin_inff() : __builtin_nanf("");
}

// x as integers: the rows of one panel.
inline void fill_panel(const LinearArgs& a, int64_t panel, int groups, int zero, const PairedRows& out, Scratch& scratch) {
    const int64_t tiles = out.num_tiles, width = out.width;
    const bool in_bytes = weight_format(a.weight.type).rounds_x;
    float* x = scratch.get<float>(tiles * 32);
    for (int64_t i = a.weight.cols; i < tiles * 32; i++) x[i] = 0;
    for (int64_t row = panel * width; row < a.num_rows && row < (panel + 1) * width; row++) {
        const bf16* from = static_cast<const bf16*>(a.x) + row * a.x_stride;
        for_vectors(a.weight.cols, [&](int64_t i, int n) { store_n(x + i, load_n(from + i, n), n); });
        const float most = in_bytes ? largest_magnitude(x, tiles * 32) : 0;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t at = panel * tiles + t, place = row % width;
            alignas(32) int16_t numbers[32];
            float counted_in = most / 127.0f;
            if (in_bytes) to_bytes(x + t * 32, most > 0 ? 127.0f / most : 0.0f, numbers);
            else counted_in = to_integers(x + t * 32, numbers);
            put_integers(numbers, counted_in, groups, zero, out.width, out.codes + at * 16 * width + place, out.scales + at * 3 * width + place);
        }
    }
}

QUIRE_INLINE __m256i load_words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// A tile's weights as integers, a half's pairs of columns in turn, of which kZero means 0, and what the rows' sums are
// multiplied with: `scale`, and `shift` with the sum of x. kMade: making integers takes more than multiplying them.
template <Type kType, bool = is_blocks(kType)>
struct PairedTile;

template <Type kType>
struct PairedTile<kType, true> {
    static constexpr BlockFormat f = block_format(kType);
    static constexpr int kGroups = f.groups;
    static constexpr int kZero = f.curved ? 127 : f.zero;
    static constexpr bool kMade = false, kScaled = true, kShifted = f.has_min || f.is_own();
    BlockScales<kType> scales;
    const uint8_t* tile;

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t t) {
        tile = from;
        scales.read(from, t);
    }
    QUIRE_ALWAYS void prepare() {}
    QUIRE_ALWAYS __m256 scale(int half, int group) const { return _mm256_loadu_ps(scales.scale(group) + 8 * half); }
    QUIRE_ALWAYS __m256 shift(int half, int group) const {
        const __m256 shift = _mm256_loadu_ps(scales.shift(group) + 8 * half);
        return f.is_own() ? _mm256_mul_ps(scale(half, group), _mm256_sub_ps(_mm256_setzero_ps(), shift)) : shift;
    }
    QUIRE_ALWAYS __m256i pair(int half, int p) const {
        if constexpr (f.bits == 8) return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + half * 256 + p * 16)));
        __m256i codes = _mm256_setzero_si256();
        // A plane's codes, the first bit where a code has it.
        auto add = [&](int offset, int first, int bits) QUIRE_ALWAYS {
            const int shared = 16 / bits, right = p % shared * bits - first;
            const __m256i words = load_words(tile + offset + half * (512 / shared) + p / shared * 32);
            const __m256i placed = right >= 0 ? _mm256_srli_epi16(words, right) : _mm256_slli_epi16(words, -right);
            codes = _mm256_or_si256(codes, _mm256_and_si256(placed, _mm256_set1_epi16(short(((1 << bits) - 1) << first))));
        };
        for_planes(f, add);
        if constexpr (f.curved) {  // above -127
            const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 23, 44, 62, 78, 92, 105, 117, char(128), char(140), char(152), char(165), char(180), char(196), char(216), char(240)));
            codes = _mm256_shuffle_epi8(table, _mm256_or_si256(codes, _mm256_set1_epi16(short(0x8000))));
        }
        return codes;
    }
};

template <>
struct PairedTile<Type::i8, false> {
    static constexpr int kGroups = 1, kZero = 0;
    static constexpr bool kMade = false, kScaled = false, kShifted = false;  // a row's scale waits for the end
    const uint8_t* tile;

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t) { tile = from; }
    QUIRE_ALWAYS void prepare() {}
    QUIRE_ALWAYS __m256 scale(int, int) const { return _mm256_set1_ps(1); }
    QUIRE_ALWAYS __m256 shift(int, int) const { return _mm256_setzero_ps(); }
    QUIRE_ALWAYS __m256i pair(int half, int p) const {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + half * 256 + p * 16)));
    }
};

// Codes of four bits of a half, the columns' p-th pair.
QUIRE_INLINE __m256i nibble_pair(const uint8_t* codes, int p) {
    const __m256i words = _mm256_srli_epi16(load_words(codes + p / 4 * 32), p % 4 * 4);
    return p % 4 == 3 ? words : _mm256_and_si256(words, _mm256_set1_epi16(15));
}

template <>
struct PairedTile<Type::i4, false> {
    static constexpr int kGroups = 1, kZero = 8;
    static constexpr bool kMade = false, kScaled = true, kShifted = false;
    const uint8_t* tile;

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t) { tile = from; }
    QUIRE_ALWAYS void prepare() {}
    QUIRE_ALWAYS __m256 scale(int half, int) const { return (__m256)load(reinterpret_cast<const bf16*>(tile) + 8 * half); }
    QUIRE_ALWAYS __m256 shift(int, int) const { return _mm256_setzero_ps(); }
    QUIRE_ALWAYS __m256i pair(int half, int p) const { return nibble_pair(tile + 32 + half * 128, p); }
};

template <>
struct PairedTile<Type::w4a8, false> {
    static constexpr int kGroups = 1, kZero = 8;
    static constexpr bool kMade = false, kScaled = true, kShifted = false;
    const uint8_t* tile;

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t) { tile = from; }
    QUIRE_ALWAYS void prepare() {}
    QUIRE_ALWAYS __m256 scale(int half, int) const { return (__m256)numbers_of(signed_bytes(tile + 256 + 8 * half)); }
    QUIRE_ALWAYS __m256 shift(int, int) const { return _mm256_setzero_ps(); }
    QUIRE_ALWAYS __m256i pair(int half, int p) const { return nibble_pair(tile + half * 128, p); }
};

template <>
struct PairedTile<Type::bf16, false> {
    static constexpr int kGroups = 1, kZero = 0;
    static constexpr bool kMade = true, kScaled = true, kShifted = false;
    const uint8_t* tile;
    __m256 factor[2], unit[2];

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t) { tile = from; }
    // Each row's unit, from its largest number.
    QUIRE_ALWAYS void prepare() {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m256i most[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 16
            for (int p = 0; p < 16; p++)
                most[p % 2] = _mm256_max_epi16(most[p % 2], _mm256_and_si256(load_words(tile + half * 512 + p * 32), _mm256_set1_epi16(0x7fff)));
            const __m256i both = _mm256_max_epi16(most[0], most[1]);
            const __m256i largest = _mm256_max_epi32(_mm256_srli_epi32(both, 16), _mm256_and_si256(both, _mm256_set1_epi32(0xffff)));
            __m256i exponent = _mm256_srli_epi32(largest, 7);
            const __m256i is_broken = _mm256_cmpeq_epi32(exponent, _mm256_set1_epi32(255));
            exponent = _mm256_max_epi32(exponent, _mm256_set1_epi32(kWeightBits));
            factor[half] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(254 + kWeightBits - 1), exponent), 23));
            const __m256i field = _mm256_slli_epi32(_mm256_sub_epi32(exponent, _mm256_set1_epi32(kWeightBits - 1)), 23);
            unit[half] = _mm256_castsi256_ps(_mm256_or_si256(field, is_broken));
        }
    }
    QUIRE_ALWAYS __m256 scale(int half, int) const { return unit[half]; }
    QUIRE_ALWAYS __m256 shift(int, int) const { return _mm256_setzero_ps(); }
    QUIRE_ALWAYS __m256i pair(int half, int p) const {
        const __m256i words = load_words(tile + half * 512 + p * 32);
        const __m256 magic = _mm256_set1_ps(12582912.0f);  // an integer's bits are a sum's lowest then
        const __m256 even = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)), factor[half], magic);
        const __m256 odd = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000)))), factor[half], magic);
        return _mm256_blend_epi16(_mm256_castps_si256(even), _mm256_slli_epi32(_mm256_castps_si256(odd), 16), 0xaa);
    }
};

// Adds to a row's eight totals those of a group of columns. `unit` is the row's, in a panel of kWidth.
template <class Tile, int kWidth>
QUIRE_INLINE __m256 add_group(__m256 total, __m256i sum, __m256 scale, __m256 shift, const float* unit, int group) {
    const __m256 counted_in = _mm256_broadcast_ss(unit);
    total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), Tile::kScaled ? _mm256_mul_ps(scale, counted_in) : counted_in, total);
    return Tile::kShifted ? _mm256_fmadd_ps(shift, _mm256_broadcast_ss(unit + (1 + group) * kWidth), total) : total;
}
// What a sum of products begins with.
template <class Tile, int kWidth>
QUIRE_INLINE __m256i first_sum(const float* unit, int group) {
    return Tile::kZero ? _mm256_castps_si256(_mm256_broadcast_ss(unit + (1 + group) * kWidth)) : _mm256_setzero_si256();
}
QUIRE_INLINE __m256i two_columns(const int32_t* codes) { return _mm256_set1_epi32(*codes); }

// In this order and in this register: left to GCC, all products come before all sums, in the sums' registers or in memory.
QUIRE_INLINE void add_in_place(__m256i& sum, __m256i x) { asm volatile("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x)); }

// A few rows of x from `first` on, and a block's sixteen rows of weights, over all columns; sums [row][16].
template <class Tile, int kRows>
QUIRE_ONE_COPY void few_rows(const Matrix& w, int64_t block, const PairedRows& x, int64_t first, float* sums) {
    constexpr int kPairs = 16 / Tile::kGroups;
    const int64_t bytes = w.tile_bytes();
    const uint8_t* from = w.tile(block, 0);
    Tile tile;
    __m256 total[kRows][2];
    for (int m = 0; m < kRows; m++) total[m][0] = total[m][1] = _mm256_setzero_ps();
    for (int64_t t = 0; t < x.num_tiles; t++, from += bytes) {
        tile.read(from, t);
        const int32_t* codes = x.panel(first, t);
        const float* unit = x.unit(first, t);
        for (int64_t line = 0; line < bytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(from + 4096 + line), _MM_HINT_T1);
        tile.prepare();
#pragma GCC unroll 2
        for (int group = 0; group < Tile::kGroups; group++) {
            __m256i acc[kRows][2];
#pragma GCC unroll 4
            for (int m = 0; m < kRows; m++) acc[m][0] = acc[m][1] = first_sum<Tile, kFewRows>(unit + m, group);
#pragma GCC unroll 16
            for (int i = 0; i < kPairs; i++) {
                const int p = group * kPairs + i;
                const __m256i low = tile.pair(0, p), high = tile.pair(1, p);
#pragma GCC unroll 4
                for (int m = 0; m < kRows; m++) {
                    const __m256i columns = two_columns(codes + p * kFewRows + m);
                    add_in_place(acc[m][0], _mm256_madd_epi16(low, columns));
                    add_in_place(acc[m][1], _mm256_madd_epi16(high, columns));
                }
            }
#pragma GCC unroll 4
            for (int m = 0; m < kRows; m++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++)
                    total[m][half] = add_group<Tile, kFewRows>(total[m][half], acc[m][half], tile.scale(half, group), tile.shift(half, group), unit + m, group);
        }
    }
    for (int m = 0; m < kRows; m++)
        for (int half = 0; half < 2; half++) _mm256_storeu_ps(sums + m * 16 + half * 8, total[m][half]);
}

// Tiles of a block of weights as integers, in L1, and what belongs to them.
struct WeightPanel {
    alignas(64) int16_t codes[kPanelTiles][2][256];
    alignas(64) float scale[kPanelTiles][2][16], shift[kPanelTiles][2][16];
};

template <class Tile>
QUIRE_ONE_COPY void expand_panel(const Matrix& w, int64_t block, int64_t begin, int64_t end, WeightPanel& out) {
    const int64_t bytes = w.tile_bytes(), ahead = kPanelTiles * bytes;
    const uint8_t* from = w.tile(block, begin);
    Tile tile;
    for (int64_t t = begin; t < end; t++, from += bytes) {
        for (int64_t line = 0; line < bytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(from + ahead + line), _MM_HINT_T1);
        tile.read(from, t);
        tile.prepare();
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
#pragma GCC unroll 16
            for (int p = 0; p < 16; p++) _mm256_store_si256(reinterpret_cast<__m256i*>(out.codes[t - begin][half] + p * 16), tile.pair(half, p));
            for (int group = 0; group < Tile::kGroups; group++) {
                _mm256_store_ps(out.scale[t - begin][group] + half * 8, tile.scale(half, group));
                if (Tile::kShifted) _mm256_store_ps(out.shift[t - begin][group] + half * 8, tile.shift(half, group));
            }
        }
    }
}

// A panel of weights and kRows rows of one of x; sums [row][16].
template <class Tile, int kRows>
QUIRE_ONE_COPY void panel_rows(const WeightPanel& w, int64_t num_tiles, const int32_t* codes, const float* unit, float* sums) {
    constexpr int kPairs = 16 / Tile::kGroups;
    for (int64_t t = 0; t < num_tiles; t++, unit += 3 * kPairRows) {
        asm volatile("" : : : "memory");  // sums stay where they are: there is no register for them
        for (int group = 0; group < Tile::kGroups; group++) {
            __m256i acc[kRows][2];
#pragma GCC unroll 6
            for (int m = 0; m < kRows; m++) acc[m][0] = acc[m][1] = first_sum<Tile, kPairRows>(unit + m, group);
            const int16_t *first = w.codes[t][0] + group * kPairs * 16, *second = w.codes[t][1] + group * kPairs * 16;
            for (int p = 0; p < kPairs; p++, codes += kPairRows) {
                const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(first + p * 16));
                const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(second + p * 16));
#pragma GCC unroll 6
                for (int m = 0; m < kRows; m++) {
                    const __m256i columns = two_columns(codes + m);
                    add_in_place(acc[m][0], _mm256_madd_epi16(low, columns));
                    add_in_place(acc[m][1], _mm256_madd_epi16(high, columns));
                }
            }
            const float *scale = w.scale[t][group], *shift = w.shift[t][group];
#pragma GCC unroll 6
            for (int m = 0; m < kRows; m++)
                for (int half = 0; half < 2; half++) {
                    float* to = sums + m * 16 + half * 8;
                    const __m256 total = add_group<Tile, kPairRows>(_mm256_loadu_ps(to), acc[m][half], _mm256_load_ps(scale + half * 8),
                                                         _mm256_load_ps(shift + half * 8), unit + m, group);
                    _mm256_storeu_ps(to, total);
                }
        }
    }
}

template <class Tile>
void linear_paired(const LinearArgs& a, Context& context) {
    const bool few = a.num_rows <= kFewRows * (Tile::kMade ? 1 : 2);
    const int width = few ? kFewRows : kPairRows;
    // One panel each thread makes for itself: to wait for one that does, and to get it from there, takes longer.
    const bool own = few && a.num_rows <= width && a.out != a.x;
    const PairedRows x(a, width, context.shared);
    auto fill = [&](const PairedRows& rows, int64_t panel, int thread) { fill_panel(a, panel, Tile::kGroups, Tile::kZero, rows, context.thread_scratch[thread]); };
    if (!own) context.pool.run(divide_up(a.num_rows, width), [&](int64_t panel, int thread) { fill(x, panel, thread); });
    const Matrix& w = a.weight;
    const bool gated = is_gated(a.epilogue);
    const int64_t count = gated ? w.num_blocks() / 2 : w.num_blocks();
    if (few) {
        context.pool.run_parts(count, [&](ThreadPool::Tasks& tasks, int thread) {
            int64_t block;
            if (!tasks.take(block)) return;
            const PairedRows rows = own ? PairedRows(a, width, context.thread_scratch2[thread]) : x;
            if (own) fill(rows, 0, thread);
            alignas(64) float sums[2][2 * kFewRows * 16];
            do {
                for (int part = 0; part < 1 + gated; part++)
                    for (int64_t m = 0; m < a.num_rows; m += kFewRows)
                        with_rows<kFewRows>(a.num_rows - m, [&](auto num) {
                            few_rows<Tile, num>(w, block + part * count, rows, m, sums[part] + m * 16);
                        });
                finish(a, {sums[0], gated ? sums[1] : nullptr, 16, 16, block * 16, (block + count) * 16, 0, a.num_rows});
            } while (tasks.take(block));
        });
        return;
    }
    // Two blocks share rows of x in L1: gate and up, or neighbours.
    const int64_t at_once = gated ? 1 : 2;
    context.pool.run(divide_up(count, at_once), [&](int64_t task, int thread) {
        const int64_t block = task * at_once, other = gated ? block + count : block + 1;
        const bool both = gated || other < count;
        float* sums = context.thread_scratch2[thread].get<float>(2 * kPanelWindow * 16);
        WeightPanel* panels = context.thread_scratch[thread].get<WeightPanel>(2);
        for (int64_t first = 0; first < a.num_rows; first += kPanelWindow) {
            const int64_t rows = a.num_rows - first < kPanelWindow ? a.num_rows - first : kPanelWindow;
            float* second = sums + rows * 16;
            std::memset(sums, 0, 2 * rows * 16 * sizeof(float));
            for (int64_t t = 0; t < x.num_tiles; t += kPanelTiles) {
                const int64_t end = t + kPanelTiles < x.num_tiles ? t + kPanelTiles : x.num_tiles;
                for (int part = 0; part < 1 + both; part++) expand_panel<Tile>(w, part ? other : block, t, end, panels[part]);
                for (int64_t m = 0; m < rows; m += kPairRows)
                    for (int part = 0; part < 1 + both; part++)
                        with_rows<kPairRows>(rows - m < kPairRows ? rows - m : kPairRows, [&](auto num) {
                            panel_rows<Tile, num>(panels[part], end - t, x.panel(first + m, t), x.unit(first + m, t), (part ? second : sums) + m * 16);
                        });
            }
            finish(a, {sums, gated ? second : nullptr, 16, 16, block * 16, other * 16, first, rows});
            if (both && !gated) finish(a, {second, nullptr, 16, 16, other * 16, 0, first, rows});
        }
    });
}

// Formats whose codes are no integers are not paired.
inline void linear_pairs(const LinearArgs& a, Context& context) {
    if (a.num_rows == 0) return;
    if (a.weight.type == Type::bf16) return linear_paired<PairedTile<Type::bf16>>(a, context);
    if (a.weight.type == Type::i8 || a.weight.type == Type::w8a8) return linear_paired<PairedTile<Type::i8>>(a, context);
    if (a.weight.type == Type::i4) return linear_paired<PairedTile<Type::i4>>(a, context);
    if (a.weight.type == Type::w4a8) return linear_paired<PairedTile<Type::w4a8>>(a, context);
    with_blocks(a.weight.type, [&](auto type) {
        if constexpr (block_format(type).has_integers()) linear_paired<PairedTile<type>>(a, context);
    });
}

}  // namespace quire::QUIRE_NS
