// Linear layers of pairs of integers: on AVX2, where neither bf16 nor bytes can be multiplied, whatever the weights are kept as; with
// AVX512_VNNI codes that have scales for some columns, and bf16 where that can't be multiplied. VPMADDWD and VPDPWSSD multiply twice as
// many as floats are multiplied.
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

#if defined(__AVX512VNNI__)
constexpr int kParts = 1;                    // vectors that a block's sixteen rows of two columns take
constexpr int kPairedRows = 12;              // rows of x in a panel, and of a register tile
constexpr int kFewPaired = 12;               // that meet weights as they are expanded; more meet panels of integers
#else
constexpr int kParts = 2;
constexpr int kPairedRows = 6;
constexpr int kFewPaired = 4;                // twice as many do so in turn where that takes little
#endif
constexpr int kPanelVectors = 2;             // of two columns: those of a block, or of two
constexpr int64_t kPanelTiles = 8;           // of a panel, a superblock: with its rows of x it stays in L1
constexpr int64_t kPanelWindow = 480;        // rows that share a panel, whose sums stay in L2
constexpr int kRowBits = 14;

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
    const Unit unit(_mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)))), kRowBits);
    if (unit.field < 255) {
        const __m256 factor = _mm256_set1_ps(unit.factor);
        for (int i = 0; i < 4; i += 2) {
            const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], factor)), high = _mm256_cvtps_epi32(_mm256_mul_ps(v[i + 1], factor));
            const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers + 8 * i), words);
        }
        return power_of_2(unit.field);
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

// Vectors of words, and of bytes made words, of a block's rows: of both halves, that lie so far apart, or of one.
#if defined(__AVX512VNNI__)
using Words = __m512i;
// Others meet bytes, or floats.
constexpr bool multiplies_pairs(Type type) {
    return type == Type::bf16_ints || type == Type::i4 || (is_blocks(type) && weight_format(type).has_pairs);
}
QUIRE_INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
QUIRE_INLINE Words load_words(const uint8_t* p, int64_t apart, int) { return two_halves(p, p + apart); }
QUIRE_INLINE Words load_bytes(const uint8_t* p, int64_t apart, int) {
    const __m256i first = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtepi8_epi16(_mm256_inserti128_si256(first, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + apart)), 1));
}
QUIRE_INLINE Words right(Words words, int bits) { return _mm512_srli_epi16(words, bits); }
QUIRE_INLINE Words left(Words words, int bits) { return _mm512_slli_epi16(words, bits); }
QUIRE_INLINE Words all_words(int word) { return _mm512_set1_epi16(short(word)); }
QUIRE_INLINE Words look_up(__m128i table, Words words) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), words); }
// In this register: left to GCC, sums move about, and through memory. Likewise below, and in this order: all products would come before all sums.
QUIRE_INLINE void add_pairs(Words& sum, Words weights, Words x) { asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x)); }
#else
using Words = __m256i;
constexpr bool multiplies_pairs(Type type) { return type == Type::bf16_ints || weight_format(type).has_pairs; }
QUIRE_INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
QUIRE_INLINE Words load_words(const uint8_t* p, int64_t apart, int part) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + part * apart)); }
QUIRE_INLINE Words load_bytes(const uint8_t* p, int64_t apart, int part) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + part * apart)));
}
QUIRE_INLINE Words right(Words words, int bits) { return _mm256_srli_epi16(words, bits); }
QUIRE_INLINE Words left(Words words, int bits) { return _mm256_slli_epi16(words, bits); }
QUIRE_INLINE Words all_words(int word) { return _mm256_set1_epi16(short(word)); }
QUIRE_INLINE Words look_up(__m128i table, Words words) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), words); }
QUIRE_INLINE void add_pairs(Words& sum, Words weights, Words x) {
    asm volatile("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(weights, x)));
}
#endif
QUIRE_INLINE Words two_columns(const int32_t* codes) { return (Words)splat_int(*codes); }

// A tile's weights as integers, a half's pairs of columns in turn, of which kZero means 0, and what the rows' sums are
// multiplied with: `scale`, and `shift` with the sum of x.
template <Type kType, bool = is_blocks(kType)>
struct PairedTile;

template <Type kType>
struct PairedTile<kType, true> {
    static constexpr BlockFormat f = block_format(kType);
    static constexpr int kGroups = f.groups;
    static constexpr int kZero = f.curved ? 127 : f.zero;
    static constexpr bool kScaled = true, kShifted = f.has_min || f.is_own();
    BlockScales<kType, false> scales;
    const uint8_t* tile;

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t t) {
        tile = from;
        scales.read(from, t);
    }
    QUIRE_ALWAYS vf scale(int part, int group) const { return load(scales.scale(group) + kLanes * part); }
    QUIRE_ALWAYS vf shift(int part, int group) const {
        const vf shift = load(scales.shift(group) + kLanes * part);
        return f.is_own() ? scale(part, group) * (vf{} - shift) : shift;
    }
    QUIRE_ALWAYS Words pair(int part, int p) const {
        if constexpr (f.bits == 8) return load_bytes(tile + p * 16, 256, part);
        vi codes{};
        // A plane's codes, the first bit where a code has it.
        auto add = [&](int offset, int first, int bits) QUIRE_ALWAYS {
            const int shared = 16 / bits, by = p % shared * bits - first;
            const Words words = load_words(tile + offset + p / shared * 32, 512 / shared, part);
            codes |= (vi)(by >= 0 ? right(words, by) : left(words, -by)) & (vi)all_words(((1 << bits) - 1) << first);
        };
        for_planes(f, add);
        if constexpr (f.curved) {  // above -127
            const __m128i table = _mm_setr_epi8(0, 23, 44, 62, 78, 92, 105, 117, char(128), char(140), char(152), char(165), char(180), char(196), char(216), char(240));
            codes = (vi)look_up(table, (Words)(codes | (vi)all_words(0x8000)));
        }
        return (Words)codes;
    }
};

#if !defined(__AVX512VNNI__)
template <>
struct PairedTile<Type::i8, false> {
    static constexpr int kGroups = 1, kZero = 0;
    static constexpr bool kScaled = false, kShifted = false;  // a row's scale waits for the end
    const uint8_t* tile;

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t) { tile = from; }
    QUIRE_ALWAYS vf scale(int, int) const { return splat(1); }
    QUIRE_ALWAYS vf shift(int, int) const { return vf{}; }
    QUIRE_ALWAYS Words pair(int part, int p) const { return load_bytes(tile + p * 16, 256, part); }
};
#endif

// Codes of four bits, the columns' p-th pair.
QUIRE_INLINE Words nibble_pair(const uint8_t* codes, int part, int p) {
    const Words words = right(load_words(codes + p / 4 * 32, 128, part), p % 4 * 4);
    return p % 4 == 3 ? words : (Words)((vi)words & (vi)all_words(15));
}

template <>
struct PairedTile<Type::i4, false> {
    static constexpr int kGroups = 1, kZero = 8;
    static constexpr bool kScaled = true, kShifted = false;
    const uint8_t* tile;

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t) { tile = from; }
    QUIRE_ALWAYS vf scale(int part, int) const { return load(reinterpret_cast<const bf16*>(tile) + kLanes * part); }
    QUIRE_ALWAYS vf shift(int, int) const { return vf{}; }
    QUIRE_ALWAYS Words pair(int part, int p) const { return nibble_pair(tile + 32, part, p); }
};

#if !defined(__AVX512VNNI__)
template <>
struct PairedTile<Type::w4a8, false> {
    static constexpr int kGroups = 1, kZero = 8;
    static constexpr bool kScaled = true, kShifted = false;
    const uint8_t* tile;

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t) { tile = from; }
    QUIRE_ALWAYS vf scale(int part, int) const { return numbers_of(signed_bytes(tile + 256 + kLanes * part)); }
    QUIRE_ALWAYS vf shift(int, int) const { return vf{}; }
    QUIRE_ALWAYS Words pair(int part, int p) const { return nibble_pair(tile, part, p); }
};
#endif

template <>
struct PairedTile<Type::bf16_ints, false> {
    static constexpr int kGroups = 1, kZero = 0;
    static constexpr bool kScaled = true, kShifted = false;
    const uint8_t* tile;

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t) { tile = from; }
    QUIRE_ALWAYS vf scale(int part, int) const { return (vf)((signed_bytes(tile + 1024 + kLanes * part) & 255) << 23); }
    QUIRE_ALWAYS vf shift(int, int) const { return vf{}; }
    QUIRE_ALWAYS Words pair(int part, int p) const {
        Words words;
        std::memcpy(&words, tile + p * 64 + part * sizeof words, sizeof words);
        return words;
    }
};

// Adds to a row's totals those of a group of columns. `unit` is the row's, in a panel of `width`.
template <class Tile>
QUIRE_INLINE vf add_group(vf total, Words sum, vf scale, vf shift, const float* unit, int group, int width) {
    const vf counted_in = splat(*unit);
    total = fused(__builtin_convertvector((vi)sum, vf), Tile::kScaled ? scale * counted_in : counted_in, total);
    return Tile::kShifted ? fused(shift, splat(unit[(1 + group) * width]), total) : total;
}
// What a sum of products begins with.
template <class Tile>
QUIRE_INLINE Words first_sum(const float* unit, int group, int width) {
    return Tile::kZero ? (Words)splat(unit[(1 + group) * width]) : (Words)vi{};
}

// A few rows of x from `first` on, and a block's sixteen rows of weights, over all columns; sums [row][16].
template <class Tile, int kRows, int kWidth>
QUIRE_ONE_COPY void few_rows(const Matrix& w, int64_t block, const PairedRows& x, int64_t first, float* sums) {
    constexpr int kPairs = 16 / Tile::kGroups;
    constexpr int kApart = kParts == 1 && kRows < 4 ? (kRows + 3) / kRows : 1;  // sums of a row, added at the end: one product would wait for another
    const int64_t bytes = w.tile_bytes();
    const uint8_t* from = w.tile(block, 0);
    Tile tile;
    vf total[kRows][kParts];
    for (int m = 0; m < kRows; m++)
        for (int part = 0; part < kParts; part++) total[m][part] = vf{};
    for (int64_t t = 0; t < x.num_tiles; t++, from += bytes) {
        tile.read(from, t);
        const int32_t* codes = x.panel(first, t);
        const float* unit = x.unit(first, t);
        for (int64_t line = 0; line < bytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(from + 4096 + line), _MM_HINT_T1);
#pragma GCC unroll 2
        for (int group = 0; group < Tile::kGroups; group++) {
            Words acc[kApart][kRows][kParts];
#pragma GCC unroll 12
            for (int m = 0; m < kRows; m++)
                for (int part = 0; part < kParts; part++) {
                    acc[0][m][part] = first_sum<Tile>(unit + m, group, kWidth);
                    for (int i = 1; i < kApart; i++) acc[i][m][part] = (Words)vi{};
                }
#pragma GCC unroll 16
            for (int i = 0; i < kPairs; i++) {
                const int p = group * kPairs + i;
                Words weights[kParts];
                for (int part = 0; part < kParts; part++) weights[part] = tile.pair(part, p);
#pragma GCC unroll 12
                for (int m = 0; m < kRows; m++) {
                    const Words columns = two_columns(codes + p * kWidth + m);
                    for (int part = 0; part < kParts; part++) add_pairs(acc[i % kApart][m][part], weights[part], columns);
                }
            }
#pragma GCC unroll 12
            for (int m = 0; m < kRows; m++)
#pragma GCC unroll 2
                for (int part = 0; part < kParts; part++) {
                    vi sum = (vi)acc[0][m][part];
                    for (int i = 1; i < kApart; i++) sum += (vi)acc[i][m][part];
                    total[m][part] = add_group<Tile>(total[m][part], (Words)sum, tile.scale(part, group), tile.shift(part, group), unit + m, group, kWidth);
                }
        }
    }
    for (int m = 0; m < kRows; m++)
        for (int part = 0; part < kParts; part++) store(sums + m * 16 + part * kLanes, total[m][part]);
}

// Tiles of a block of weights as integers, in L1, and what belongs to them; of two blocks where a vector has one's.
struct WeightPanel {
    alignas(64) int16_t codes[kPanelTiles][kPanelVectors][32 * kLanes];
    alignas(64) float scale[kPanelTiles][2][kPanelVectors * kLanes], shift[kPanelTiles][2][kPanelVectors * kLanes];
};

// `place`: of the block's vectors among the panel's.
template <class Tile>
QUIRE_ONE_COPY void expand_panel(const Matrix& w, int64_t block, int64_t begin, int64_t end, int place, WeightPanel& out) {
    const int64_t bytes = w.tile_bytes(), ahead = kPanelTiles * bytes;
    const uint8_t* from = w.tile(block, begin);
    Tile tile;
    for (int64_t t = begin; t < end; t++, from += bytes) {
        for (int64_t line = 0; line < bytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(from + ahead + line), _MM_HINT_T1);
        tile.read(from, t);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; part++) {
            const int at = place + part;
#pragma GCC unroll 16
            for (int p = 0; p < 16; p++) {
                const Words words = tile.pair(part, p);
                std::memcpy(out.codes[t - begin][at] + p * 2 * kLanes, &words, sizeof words);
            }
            for (int group = 0; group < Tile::kGroups; group++) {
                store(out.scale[t - begin][group] + at * kLanes, tile.scale(part, group));
                if (Tile::kShifted) store(out.shift[t - begin][group] + at * kLanes, tile.shift(part, group));
            }
        }
    }
}

// A panel of weights and kRows rows of one of x; sums [row][kPanelVectors * kLanes].
template <class Tile, int kRows>
QUIRE_ONE_COPY void panel_rows(const WeightPanel& w, int64_t num_tiles, const int32_t* codes, const float* unit, float* sums) {
    constexpr int kPairs = 16 / Tile::kGroups;
    for (int64_t t = 0; t < num_tiles; t++, unit += 3 * kPairedRows) {
        asm volatile("" : : : "memory");  // sums stay where they are: there is no register for them
        for (int group = 0; group < Tile::kGroups; group++) {
            Words acc[kRows][2];
#pragma GCC unroll 12
            for (int m = 0; m < kRows; m++) acc[m][0] = acc[m][1] = first_sum<Tile>(unit + m, group, kPairedRows);
            const int16_t *first = w.codes[t][0] + group * kPairs * 2 * kLanes, *second = w.codes[t][1] + group * kPairs * 2 * kLanes;
            for (int p = 0; p < kPairs; p++, codes += kPairedRows) {
                Words weights[2];
                std::memcpy(weights, first + p * 2 * kLanes, sizeof(Words));
                std::memcpy(weights + 1, second + p * 2 * kLanes, sizeof(Words));
#pragma GCC unroll 12
                for (int m = 0; m < kRows; m++) {
                    const Words columns = two_columns(codes + m);
                    add_pairs(acc[m][0], weights[0], columns);
                    add_pairs(acc[m][1], weights[1], columns);
                }
            }
            const float *scale = w.scale[t][group], *shift = w.shift[t][group];
#pragma GCC unroll 12
            for (int m = 0; m < kRows; m++)
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    float* to = sums + (m * 2 + i) * kLanes;
                    store(to, add_group<Tile>(load(to), acc[m][i], load(scale + i * kLanes), load(shift + i * kLanes), unit + m, group, kPairedRows));
                }
        }
    }
}

// Rows of a panel that few are: one kernel for each width.
constexpr int few_width(int num_rows) { return num_rows <= 4 ? num_rows : (num_rows + 1) / 2 * 2; }

template <class Tile>
void linear_paired(const LinearArgs& a, Context& context) {
    const bool few = a.num_rows <= kFewPaired * kParts;
    const int width = !few ? kPairedRows : kParts == 1 ? few_width(int(a.num_rows)) : kFewPaired;
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
            alignas(64) float sums[2][kParts * kFewPaired * 16];
            do {
                for (int part = 0; part < 1 + gated; part++)
                    for (int64_t m = 0; m < a.num_rows; m += kFewPaired)
                        with_rows<kFewPaired>(kParts == 1 ? width : a.num_rows - m, [&](auto num) {
                            constexpr int kWidth = kParts == 1 ? int(num) : kFewPaired;
                            if constexpr (kParts == 2 || num == few_width(num)) few_rows<Tile, num, kWidth>(w, block + part * count, rows, m, sums[part] + m * 16);
                        });
                finish(a, {sums[0], gated ? sums[1] : nullptr, 16, 16, block * 16, (block + count) * 16, 0, a.num_rows});
            } while (tasks.take(block));
        });
        return;
    }
    // Two blocks share rows of x in L1, or in registers: gate and up, or neighbours.
    const int64_t at_once = gated ? 1 : 2;
    constexpr int64_t kStride = kPanelVectors * kLanes;
    context.pool.run(divide_up(count, at_once), [&](int64_t task, int thread) {
        const int64_t block = task * at_once, other = gated ? block + count : block + 1;
        const bool both = gated || other < count;
        float* sums = context.thread_scratch2[thread].get<float>(2 * kPanelWindow * 16);
        WeightPanel* panels = context.thread_scratch[thread].get<WeightPanel>(2);
        for (int64_t first = 0; first < a.num_rows; first += kPanelWindow) {
            const int64_t rows = a.num_rows - first < kPanelWindow ? a.num_rows - first : kPanelWindow;
            const int num_panels = kParts == 1 ? 1 : 1 + both;
            std::memset(sums, 0, num_panels * rows * kStride * sizeof(float));
            for (int64_t t = 0; t < x.num_tiles; t += kPanelTiles) {
                const int64_t end = t + kPanelTiles < x.num_tiles ? t + kPanelTiles : x.num_tiles;
                for (int part = 0; part < (kParts == 1 ? 2 : 1 + both); part++)
                    expand_panel<Tile>(w, part && both ? other : block, t, end, kParts == 1 ? part : 0, panels[kParts == 1 ? 0 : part]);
                for (int64_t m = 0; m < rows; m += kPairedRows)
                    for (int i = 0; i < num_panels; i++)
                        with_rows<kPairedRows>(rows - m < kPairedRows ? rows - m : kPairedRows, [&](auto num) {
                            panel_rows<Tile, num>(panels[i], end - t, x.panel(first + m, t), x.unit(first + m, t), sums + (i * rows + m) * kStride);
                        });
            }
            if constexpr (kParts == 1) {
                finish_pair(a, {block, other, both}, sums, first, rows);
                continue;
            }
            const float* second = sums + rows * kStride;
            finish(a, {sums, gated ? second : nullptr, 16, 16, block * 16, other * 16, first, rows});
            if (both && !gated) finish(a, {second, nullptr, 16, 16, other * 16, 0, first, rows});
        }
    });
}

// Formats whose codes are no integers are not paired.
inline void linear_pairs(const LinearArgs& a, Context& context) {
    if (a.num_rows == 0) return;
    if (a.weight.type == Type::bf16_ints) return linear_paired<PairedTile<Type::bf16_ints>>(a, context);
#if !defined(__AVX512VNNI__)
    if (a.weight.type == Type::i8 || a.weight.type == Type::w8a8) return linear_paired<PairedTile<Type::i8>>(a, context);
    if (a.weight.type == Type::w4a8) return linear_paired<PairedTile<Type::w4a8>>(a, context);
#endif
    if (a.weight.type == Type::i4) return linear_paired<PairedTile<Type::i4>>(a, context);
    with_blocks(a.weight.type, [&](auto type) {
        if constexpr (block_format(type).has_integers()) linear_paired<PairedTile<type>>(a, context);
    });
}

}  // namespace quire::QUIRE_NS
