// Linear layers of pairs of integers: on AVX2, where neither bf16 nor bytes and bytes can be multiplied, whatever the weights are kept as; with
// AVX512_VNNI codes that have scales for some columns, and bf16 where the CPU can't multiply that, or not as fast (order_of in
// linear_op.h). VPMADDWD and VPDPWSSD multiply twice as many as floats are multiplied.
//
// 32 columns of a row of x, or 64, share a power of 2, counted in which the largest takes 14 bits: the bf16 numbers down to 1/64 of it
// stay what they are, and no smaller one is off by more than 1/16384 of it. Likewise as many columns of a row of bf16 weights, in about
// 12 bits, as they are packed. Other weights are the integers that their codes are, and meet their scales afterwards: no weight is rounded.
// Where x is to be rounded to eight bits (w8a8, w4a8), all columns of a row share what they are counted in, and sums of all of them are exact.
// Other sums of 32 columns are, or of 64, and are added up in fp32 in the order of the columns: a row's bits are its own, however many
// rows there are and whichever way below is taken.
//
// Codes of four bits and bytes (w4a8) are multiplied by VPMADDUBSW, twice as many again, and sums of 32 columns fit in 16 bits.
#pragma once

#include <cpuid.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdlib>

#include "linear.h"
#include "transpose.h"

namespace quire::QUIRE_NS {

#if defined(__AVX512VNNI__)
constexpr int kParts = 1;                    // vectors that a block's sixteen rows of two columns take
constexpr int kPairedRows = 12;              // rows of x in a panel, and of a register tile
constexpr int kFewPaired = 12;               // that meet weights as they are expanded; more meet panels of integers
#else
constexpr int kParts = 2;
constexpr int kPairedRows = 6;
constexpr int kFewPaired = 4;                // twice as many do so in turn, where panels take longer
#endif
constexpr int kMostTiles = kSharedTiles;     // whose columns of x share a unit, where weights allow it
constexpr int kPanelVectors = 2;             // of two columns: those of a block, or of two
constexpr int kPanelBlocks = kPanelVectors / kParts;
constexpr int64_t kPairSums = 32;            // of a row and a pair of blocks, next to each other
constexpr int64_t kSharingPanels = 8;        // of x, about, that weights are expanded for at least
constexpr int64_t kPanelTiles = 8;           // of a panel, a superblock: with its rows of x it stays in L1
constexpr int kRowBits = 14;

// x as integers: of a panel's rows in turn the pairs of columns; then for each tile of 32 columns what the rows are counted in,
// and of each group of columns that share a scale of weights the sum of x. Where all codes mean so much less than they are,
// that is an integer, so many times less than none, with which sums of a few rows' products begin: as if codes were what they mean.
struct PairedRows {
    int32_t* codes;  // [panels][pairs of columns, or fours][width]
    float* scales;   // [panels][tiles][3][width]: the unit; of up to two groups the sum, or the integer
    int64_t num_rows, num_tiles;
    int width, steps;  // places of a panel; pairs or fours of a tile
    RowGroups groups;  // of the panels

    PairedRows(const LinearArgs& a, int panel_rows, int tile_steps, Scratch& memory)
        : num_rows(a.num_rows), num_tiles(a.weight.num_tiles()), width(panel_rows), steps(tile_steps), groups(num_rows, width) {
        codes = memory.get<int32_t>(num_panels() * panel_bytes() / 4);
        scales = reinterpret_cast<float*>(codes + num_panels() * num_tiles * steps * width);
    }
    int64_t num_panels() const { return groups.count; }
    int64_t panel_bytes() const { return num_tiles * (steps + 3) * 4 * width; }
    RowGroup rows_of(int64_t panel) const { return groups[panel]; }
    int32_t* columns(int64_t panel, int64_t tile) const { return codes + (panel * num_tiles + tile) * steps * width; }
    float* unit(int64_t panel, int64_t tile) const { return scales + (panel * num_tiles + tile) * 3 * width; }
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

// Likewise 32 columns of eight bits, four of them as nibbles of weights lie (pairs.h): 0, 4, 1, 5 and 2, 6, 3, 7 of eight. The integer, which
// sums begin with, is two of 16 bits: of columns that are even, and that are not.
inline void put_fours(const int16_t* numbers, float counted_in, int zero, int width, int32_t* codes, float* unit) {
    *unit = counted_in;
    int sums[2] = {};
    for (int c = 0; c < 32; c++) sums[c % 2] += numbers[c];
    for (int i = 0; i < 8; i++, codes += width) {
        const int16_t* from = numbers + i / 2 * 8 + i % 2 * 2;
        const int8_t four[4] = {int8_t(from[0]), int8_t(from[4]), int8_t(from[1]), int8_t(from[5])};
        std::memcpy(codes, four, 4);
    }
    const int16_t less[2] = {int16_t(-zero * sums[0]), int16_t(-zero * sums[1])};
    std::memcpy(unit + width, less, 4);
}

// In eight bits, as int8 weights are chosen (pack.h).
QUIRE_ONE_COPY inline void to_bytes(const float* x, int count, float factor, int16_t* numbers) {
    for (int c = 0; c < count; c += kLanes) {
        const vi bounded = __builtin_convertvector(min(max(round_product(load(x + c), factor), splat(-127.0f)), splat(127.0f)), vi);
        for (int i = 0; i < kLanes; i++) numbers[c + i] = int16_t(bounded[i]);
    }
}

// By their own power of 2, which is returned. No sum of their products with weights is beyond 32 bits: bf16's eight bits make them 16320 at most,
// other weights are codes of eight bits, and bf16 ones are as small as that takes (put_ints_row in pack.h).
QUIRE_ONE_COPY inline float to_integers(const float* x, int count, int16_t* numbers) {
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < count; i += 8)
        most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), _mm256_set1_epi32(0x7fffffff)));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    const Unit unit(_mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)))), kRowBits);
    if (unit.field < 255) {
        const __m256 factor = _mm256_set1_ps(unit.factor);
        for (int i = 0; i < count; i += 16) {
            const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor));
            const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), factor));
            const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers + i), words);
        }
        return power_of_2(unit.field);
    }
    bool is_number = true;  // infinities, if nothing else, show as such
    for (int i = 0; i < count; i++) {
        is_number = is_number && x[i] == x[i];
        numbers[i] = int16_t(x[i] - x[i] == 0 ? 0 : x[i] > 0 ? 1 : -1);
    }
    return is_number ? __builtin_inff() : __builtin_nanf("");
}

#if defined(__AVX512VNNI__)
// The columns of kShared tiles from `tile` on, of all rows of a panel at once, each in a lane: bit for bit as below. Returns the lanes that are not
// all numbers.
template <int kShared>
QUIRE_ONE_COPY uint32_t fill_lanes(const LinearArgs& a, const bf16* x, int64_t panel, int64_t tile, int groups, int zero, const PairedRows& out) {
    const int64_t num_rows = out.rows_of(panel).count;
    __m512 columns[kShared][16];  // in registers, of one
    __m512i most = _mm512_setzero_si512();
    for (int u = 0; u < kShared; u++) {
        const int64_t left = a.weight.cols - (tile + u) * 32;
        const uint32_t present = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;  // rows may have tiles beyond their columns
#pragma GCC unroll 16
        for (int m = 0; m < 16; m++) columns[u][m] = (__m512)_mm512_maskz_loadu_epi16(m < num_rows ? present : 0, x + m * a.x_stride + (tile + u) * 32);
        transpose16(columns[u]);
#pragma GCC unroll 16
        for (int p = 0; p < 16; p++) most = _mm512_max_epi16(most, _mm512_and_si512((__m512i)columns[u][p], _mm512_set1_epi16(0x7fff)));
    }
    most = _mm512_max_epi32(_mm512_srli_epi32(most, 16), _mm512_and_si512(most, _mm512_set1_epi32(0xffff)));
    const vi exponent = (vi)_mm512_srli_epi32(most, 7), normal = exponent < kRowBits ? vi{} + kRowBits : exponent;
    const __m512 factor = (__m512)((253 + kRowBits - normal) << 23), counted_in = (__m512)((normal - (kRowBits - 1)) << 23);
    const __mmask16 places = __mmask16((1 << out.width) - 1);
    for (int u = 0; u < kShared && tile + u < out.num_tiles; u++) {
        int32_t* codes = out.columns(panel, tile + u);
        float* unit = out.unit(panel, tile + u);
        __m512i sums[2] = {};
#pragma GCC unroll 16
        for (int p = 0; p < 16; p++) {
            const __m512i pairs = (__m512i)columns[u][p];
            const __m512i even = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)_mm512_slli_epi32(pairs, 16), factor));
            const __m512i odd = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))), factor));
            const __m512i integers = _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_slli_epi32(odd, 16));
            _mm512_mask_storeu_epi32(codes + p * out.width, places, integers);
            sums[p / 8] = _mm512_dpwssd_epi32(sums[p / 8], integers, _mm512_set1_epi16(1));
        }
        _mm512_mask_storeu_ps(unit, places, counted_in);
        if (groups == 1) sums[0] = _mm512_add_epi32(sums[0], sums[1]);
        for (int group = 0; group < groups; group++) {
            const __m512i less = _mm512_mullo_epi32(sums[group], _mm512_set1_epi32(-zero));
            _mm512_mask_storeu_ps(unit + (1 + group) * out.width, places, zero ? (__m512)less : _mm512_mul_ps(_mm512_cvtepi32_ps(sums[group]), counted_in));
        }
    }
    return _mm512_cmpeq_epi32_mask((__m512i)exponent, _mm512_set1_epi32(255));
}
#endif

// x as integers: the rows of one panel. `shared`: tiles that share a unit.
inline void fill_panel(const LinearArgs& a, int64_t panel, int shared, int groups, int zero, const PairedRows& out) {
    const RowGroup rows = out.rows_of(panel);
    const bool in_bytes = weight_format(a.weight.type).rounds_x;
    const bf16* first = static_cast<const bf16*>(a.x) + rows.first * a.x_stride;
    auto fill = [&](int64_t place, int64_t t, float most) {
        const bf16* from = first + place * a.x_stride + t * 32;
        alignas(64) float x[kMostTiles * 32];
        alignas(32) int16_t numbers[kMostTiles * 32];
        const int64_t left = a.weight.cols - t * 32;
        const int count = shared * 32;
        for (int i = 0; i < count; i += kLanes) store(x + i, left < count ? vf{} : load(from + i));
        if (left < count) for_vectors(left, [&](int64_t i, int n) { store(x + i, load_n(from + i, n)); });
        float counted_in = most / 127.0f;
        if (in_bytes) to_bytes(x, count, most > 0 ? 127.0f / most : 0.0f, numbers);
        else counted_in = to_integers(x, count, numbers);
        for (int64_t u = 0; u < shared && t + u < out.num_tiles; u++) {
            int32_t* codes = out.columns(panel, t + u) + place;
            float* unit = out.unit(panel, t + u) + place;
            if (out.steps == 8) put_fours(numbers + 32 * u, counted_in, zero, out.width, codes, unit);
            else put_integers(numbers + 32 * u, counted_in, groups, zero, out.width, codes, unit);
        }
    };
#if defined(__AVX512VNNI__)
    const auto fill_all = shared == 1 ? fill_lanes<1> : fill_lanes<kMostTiles>;
    for (int64_t t = 0; t < out.num_tiles && rows.count > 3; t += shared)  // fewer take less one by one
        for (uint32_t broken = fill_all(a, first, panel, t, groups, zero, out); broken; broken &= broken - 1) fill(__builtin_ctz(broken), t, 0);
    if (rows.count > 3) return;
#endif
    for (int64_t place = 0; place < rows.count; place++) {
        const float most = in_bytes ? largest_magnitude(first + place * a.x_stride, a.weight.cols) : 0;
        for (int64_t t = 0; t < out.num_tiles; t += shared) fill(place, t, most);
    }
}

// AVX-VNNI, which most CPUs of laptops have that lack AVX-512, multiplies and adds in one instruction. It is worth no level of its own: only the
// product of many rows is bound by that. QUIRE_VNNI is 0 for tests, as bits are the same.
#if defined(QUIRE_CAN_VNNI)
constexpr bool kHasTwoWays = true;
inline bool adds_at_once() {
    static const bool has = [] {
        const char* told = std::getenv("QUIRE_VNNI");
        unsigned a, b, c, d;
        return !(told && *told == '0') && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
    }();
    return has;
}
#else
constexpr bool kHasTwoWays = false;
inline bool adds_at_once() { return false; }
#endif

// Vectors of words, and of bytes made words, of a block's rows: of both halves, that lie so far apart, or of one.
#if defined(__AVX512VNNI__)
using Words = __m512i;
// Others meet bytes, or floats.
constexpr bool multiplies_pairs(Type type) {
    return weight_format(type).has_pairs && !weight_format(type).has_scales;
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
QUIRE_INLINE Words less(Words words, int word) { return _mm512_sub_epi16(words, all_words(word)); }
QUIRE_INLINE Words look_up(__m128i table, Words words) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), words); }
// In this register: left to GCC, sums move about, and through memory. Likewise below, and in this order: all products would come before all sums.
template <bool, bool>
QUIRE_INLINE void add_products(Words& sum, Words weights, Words x) {
#if defined(QUIRE_EMULATE_AVX512)
    sum = _mm512_dpwssd_epi32(sum, weights, x);
#else
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
#endif
}
#else
using Words = __m256i;
constexpr bool multiplies_pairs(Type type) { return weight_format(type).has_pairs; }
QUIRE_INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
QUIRE_INLINE Words load_words(const uint8_t* p, int64_t apart, int part) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + part * apart)); }
QUIRE_INLINE Words load_bytes(const uint8_t* p, int64_t apart, int part) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + part * apart)));
}
QUIRE_INLINE Words right(Words words, int bits) { return _mm256_srli_epi16(words, bits); }
QUIRE_INLINE Words left(Words words, int bits) { return _mm256_slli_epi16(words, bits); }
QUIRE_INLINE Words all_words(int word) { return _mm256_set1_epi16(short(word)); }
QUIRE_INLINE Words less(Words words, int word) { return _mm256_sub_epi16(words, all_words(word)); }
QUIRE_INLINE Words look_up(__m128i table, Words words) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), words); }
template <bool kAtOnce, bool kFours>
QUIRE_INLINE void add_products(Words& sum, Words weights, Words x) {
    if constexpr (kFours) {
        asm volatile("vpaddw %1, %0, %0" : "+x"(sum) : "x"(_mm256_maddubs_epi16(weights, x)));
    } else if constexpr (kAtOnce) {
        asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(x));
    } else {
        asm volatile("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(weights, x)));
    }
}
#endif
QUIRE_INLINE Words two_columns(const int32_t* codes) { return (Words)splat_int(*codes); }

// A tile's weights as integers, a half's pairs of columns in turn, of which kZero means 0, and what the rows' sums are
// multiplied with: `scale`, and `shift` with the sum of x.
template <Type kType, bool = is_blocks(kType)>
struct PairedTile;

// What tiles are unless they say otherwise.
struct PairsOfColumns {
    static constexpr int kSteps = 16, kGroups = 1, kZero = 0;  // kSteps: pairs
    static constexpr bool kReady = false;                      // tiles are integers already
    static constexpr bool kWhole = false;                      // sums are of all columns
    static constexpr int kShared = 1;                          // tiles that a sum is of, in which a row's columns share a unit
    static constexpr bool kFours = false;                      // not pairs: a `scale` is two integers of 16 bits then
};

template <Type kType>
struct PairedTile<kType, true> : PairsOfColumns {
    static constexpr BlockFormat f = block_format(kType);
    static constexpr int kBytes = f.tile_bytes(), kGroups = f.groups;
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
struct PairedTile<Type::i8, false> : PairsOfColumns {
    static constexpr int kBytes = weight_format(Type::i8).tile_bytes, kShared = kMostTiles;
    static constexpr bool kScaled = false, kShifted = false;  // a row's scale waits for the end
    const uint8_t* tile;

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t) { tile = from; }
    QUIRE_ALWAYS vf scale(int, int) const { return splat(1); }
    QUIRE_ALWAYS vf shift(int, int) const { return vf{}; }
    QUIRE_ALWAYS Words pair(int part, int p) const { return load_bytes(tile + p * 16, 256, part); }
};

template <>
struct PairedTile<Type::w8a8, false> : PairedTile<Type::i8, false> {
    static constexpr bool kWhole = true;
};

template <>
struct PairedTile<Type::w4a8, false> : PairsOfColumns {
    static constexpr int kBytes = weight_format(Type::w4a8).tile_bytes, kSteps = 8, kZero = 8;
    static constexpr bool kScaled = true, kShifted = false, kWhole = true, kFours = true;
    const uint8_t* tile;

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t) { tile = from; }
    QUIRE_ALWAYS vf scale(int part, int) const {
        const vi multiple = signed_bytes(tile + 256 + kLanes * part);
        return (vf)((multiple & 0xffff) | multiple << 16);
    }
    QUIRE_ALWAYS vf shift(int, int) const { return vf{}; }
    QUIRE_ALWAYS Words pair(int part, int p) const {
        return (Words)((vi)right(load_words(tile + p / 2 * 32, 128, part), p % 2 * 4) & 0x0f0f0f0f);
    }
};
#endif

// Codes of four bits, the columns' p-th pair.
QUIRE_INLINE Words nibble_pair(const uint8_t* codes, int part, int p) {
    const Words words = right(load_words(codes + p / 4 * 32, 128, part), p % 4 * 4);
    return p % 4 == 3 ? words : (Words)((vi)words & (vi)all_words(15));
}

template <>
struct PairedTile<Type::i4, false> : PairsOfColumns {
    static constexpr int kBytes = weight_format(Type::i4).tile_bytes, kZero = 8;
    static constexpr bool kScaled = true, kShifted = false;
    const uint8_t* tile;

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t) { tile = from; }
    QUIRE_ALWAYS vf scale(int part, int) const { return load(reinterpret_cast<const bf16*>(tile) + kLanes * part); }
    QUIRE_ALWAYS vf shift(int, int) const { return vf{}; }
    QUIRE_ALWAYS Words pair(int part, int p) const { return nibble_pair(tile + 32, part, p); }
};

template <>
struct PairedTile<Type::bf16_ints, false> : PairsOfColumns {
    static constexpr int kBytes = weight_format(Type::bf16_ints).tile_bytes, kShared = kMostTiles;
    static constexpr bool kScaled = true, kShifted = false, kReady = true;
    const uint8_t* tile = nullptr;  // GCC 12 warns of it in few_rows otherwise

    QUIRE_ALWAYS void read(const uint8_t* from, int64_t) { tile = from; }
    QUIRE_ALWAYS vf scale(int part, int) const { return (vf)((signed_bytes(tile + 1024 + kLanes * part) & 255) << 23); }
    QUIRE_ALWAYS vf shift(int, int) const { return vf{}; }
    QUIRE_ALWAYS Words pair(int part, int p) const {
        Words words;
        std::memcpy(&words, tile + p * 64 + part * sizeof words, sizeof words);
        return words;
    }
};

// Adds to a row's totals, integers where they are of all columns, those of a group of columns. `unit` is the row's, in a panel of `width`.
template <class Tile>
QUIRE_INLINE vf add_group(vf total, Words sum, vf scale, vf shift, const float* unit, int group, int width) {
#if !defined(__AVX512VNNI__)
    if constexpr (Tile::kWhole) return (vf)((vi)total + (vi)(Tile::kFours ? _mm256_madd_epi16(sum, (Words)scale) : sum));
#endif
    const vf counted_in = splat(*unit);
    total = fused(__builtin_convertvector((vi)sum, vf), Tile::kScaled ? scale * counted_in : counted_in, total);
    return Tile::kShifted ? fused(shift, splat(unit[(1 + group) * width]), total) : total;
}
// Integers of all columns as what they mean, a row's scale of weights apart.
QUIRE_INLINE vf meant(vf sums, float unit) { return __builtin_convertvector((vi)sums, vf) * unit; }
// What a sum of a few rows' products begins with.
template <class Tile>
QUIRE_INLINE Words first_sum(const float* unit, int group, int width) {
    return Tile::kZero ? (Words)splat(unit[(1 + group) * width]) : (Words)vi{};
}

// The few rows of a panel, and a block's sixteen rows of weights, over all columns; sums [row][16].
template <class Tile, int kRows, int kWidth>
QUIRE_ONE_COPY void few_rows(const Matrix& w, int64_t block, const PairedRows& x, int64_t panel, float* sums) {
    constexpr int kPairs = Tile::kSteps / Tile::kGroups;
    constexpr int kApart = kParts == 1 && kRows < 4 ? (kRows + 3) / kRows : 1;  // sums of a row, added at the end: one product would wait for another
    constexpr int kAhead = 6144, kLines = (Tile::kBytes + 63) / 64;  // to fetch into L2, one by one
    const uint8_t* from = w.tile(block, 0);
    Tile tile;
    vf total[kRows][kParts];
    for (int m = 0; m < kRows; m++)
        for (int part = 0; part < kParts; part++) total[m][part] = vf{};
    for (int64_t t = 0; t < x.num_tiles; t += Tile::kShared) {
        const float* unit = x.unit(panel, t);
#pragma GCC unroll 2
        for (int group = 0; group < Tile::kGroups; group++) {
            Words acc[kApart][kRows][kParts];
#pragma GCC unroll 12
            for (int m = 0; m < kRows; m++)
                for (int part = 0; part < kParts; part++) {
                    acc[0][m][part] = first_sum<Tile>(unit + m, group, kWidth);
                    for (int i = 1; i < kApart; i++) acc[i][m][part] = (Words)vi{};
                }
            for (int u = 0; u < Tile::kShared && t + u < x.num_tiles; u++) {
                if (group == 0) tile.read(from, t + u), from += Tile::kBytes;
                const int32_t* codes = x.columns(panel, t + u);
#pragma GCC unroll 16
                for (int i = 0; i < kPairs; i++) {
                    const int p = group * kPairs + i;
                    if (p < kLines) _mm_prefetch(reinterpret_cast<const char*>(from + kAhead + p * 64), _MM_HINT_T1);
                    Words weights[kParts];
                    for (int part = 0; part < kParts; part++) weights[part] = tile.pair(part, p);
#pragma GCC unroll 12
                    for (int m = 0; m < kRows; m++) {
                        const Words columns = two_columns(codes + p * kWidth + m);
                        for (int part = 0; part < kParts; part++) add_products<false, Tile::kFours>(acc[i % kApart][m][part], weights[part], columns);
                    }
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
        for (int part = 0; part < kParts; part++) store(sums + m * 16 + part * kLanes, Tile::kWhole ? meant(total[m][part], x.unit(panel, 0)[m]) : total[m][part]);
}

// Tiles of a block of weights as the integers that codes mean, in L1, where they are none already, and what belongs to them; of two blocks
// where a vector has one's.
struct WeightPanel {
    alignas(64) uint8_t codes[kPanelVectors][kPanelTiles][16][sizeof(Words)];
    alignas(64) float scale[kPanelTiles][2][kPanelVectors * kLanes], shift[kPanelTiles][2][kPanelVectors * kLanes];
};

// `place`: of the block's vectors among the panel's.
template <class Tile>
QUIRE_ONE_COPY void expand_panel(const uint8_t* from, int64_t begin, int64_t end, int place, WeightPanel& out) {
    Tile tile;
    for (int64_t t = begin; t < end; t++, from += Tile::kBytes) {
        tile.read(from, t);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; part++) {
            const int at = place + part;
#pragma GCC unroll 16
            for (int p = 0; p < Tile::kSteps && !Tile::kReady; p++) {
                const Words pair = tile.pair(part, p), words = Tile::kFours ? pair : less(pair, Tile::kZero);  // once for all rows: no sum of theirs has to begin with that
                std::memcpy(out.codes[at][t - begin][p], &words, sizeof words);
            }
            for (int group = 0; group < Tile::kGroups; group++) {
                store(out.scale[t - begin][group] + at * kLanes, tile.scale(part, group));
                if (Tile::kShifted) store(out.shift[t - begin][group] + at * kLanes, tile.shift(part, group));
            }
        }
    }
}

// What comes next, to fetch meanwhile: of each block so many bytes with every tile, and of x a tile of a panel, which lies apart.
struct PanelFetch {
    const uint8_t* blocks[kPanelBlocks];
    int64_t step;
    const int32_t* x;  // null where another panel of weights meets these rows next

    template <int kSteps>
    QUIRE_ALWAYS void next() {
        for (int64_t i = 0; i < step; i += 64)
            for (const uint8_t* block : blocks) fetch_soon(block + i);
        for (const uint8_t*& block : blocks) block += step;
        if (kPanelBlocks == 1 && !x) return;
        for (int64_t i = 0; i < kSteps * kPairedRows; i += 16) _mm_prefetch(reinterpret_cast<const char*>(x + i), _MM_HINT_T0);
        x += kSteps * kPairedRows;
    }
};

// A panel of weights, whose `vectors` of pairs of columns lie at these places, and kRows rows of one of x: what to add to the sums `before`,
// which then are `sums`, [row][kPairSums].
template <class Tile, int kRows, bool kAtOnce>
QUIRE_INLINE void panel_rows(const WeightPanel& w, const uint8_t* const (&vectors)[2], int64_t num_tiles, const int32_t* codes, const float* unit, PanelFetch& fetch,
                             const float* before, float* sums) {
    constexpr int kPairs = Tile::kSteps / Tile::kGroups, kApart = Tile::kReady ? 64 : sizeof(Words), kTileBytes = Tile::kReady ? Tile::kBytes : 16 * kApart;
    for (int64_t t = 0; t < num_tiles; t += Tile::kShared, unit += Tile::kShared * 3 * kPairedRows) {
        asm volatile("" : : : "memory");  // sums stay where they are: there is no register for them
        for (int group = 0; group < Tile::kGroups; group++) {
            Words acc[kRows][2];
#pragma GCC unroll 12
            for (int m = 0; m < kRows; m++) acc[m][0] = acc[m][1] = Tile::kFours ? first_sum<Tile>(unit + m, group, kPairedRows) : (Words)vi{};
            for (int u = 0; u < Tile::kShared && t + u < num_tiles; u++) {
                if (group == 0) fetch.next<Tile::kSteps>();
                const int64_t at = (t + u) * kTileBytes + group * kPairs * kApart;
                for (int p = 0; p < kPairs; p++, codes += kPairedRows) {
                    Words weights[2];
                    for (int i = 0; i < 2; i++) std::memcpy(weights + i, vectors[i] + at + p * kApart, sizeof(Words));
#pragma GCC unroll 12
                    for (int m = 0; m < kRows; m++) {
                        const Words columns = two_columns(codes + m);
                        add_products<kAtOnce, Tile::kFours>(acc[m][0], weights[0], columns);
                        add_products<kAtOnce, Tile::kFours>(acc[m][1], weights[1], columns);
                    }
                }
            }
            const float *scale = w.scale[t][group], *shift = w.shift[t][group];
#pragma GCC unroll 12
            for (int m = 0; m < kRows; m++)
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    const int64_t at = m * kPairSums + i * kLanes;
                    store(sums + at, add_group<Tile>(load(before + at), acc[m][i], load(scale + i * kLanes), load(shift + i * kLanes), unit + m, group, kPairedRows));
                }
            before = sums;
        }
    }
}

// Likewise all panels of a pair of blocks, whose sums lie beside each other: a call for each takes 5% longer.
template <class Tile, int kRows, bool kAtOnce>
QUIRE_ONE_COPY void pair_rows(const WeightPanel* panels, const uint8_t* const (*vectors)[2], int num_panels, int64_t num_tiles, const int32_t* codes, const float* unit,
                              PanelFetch* fetch, const float* before, float* sums) {
    for (int i = 0; i < num_panels; i++) panel_rows<Tile, kRows, kAtOnce>(panels[i], vectors[i], num_tiles, codes, unit, fetch[i], before + i * 16, sums + i * 16);
}

// Rows of a panel that few are: one kernel for each width.
constexpr int few_width(int num_rows) { return num_rows <= 4 ? num_rows : (num_rows + 1) / 2 * 2; }

// A pair of blocks of weights, gate and up or neighbours, and the rows of the panels [begin, end) of x. `next`: the pair that comes next.
template <class Tile>
inline void multiply_pair(const LinearArgs& a, BlockPair pair, BlockPair next, const PairedRows& x, int64_t begin, int64_t end, WeightPanel* panels, float* sums) {
    constexpr int64_t kFetched = kPanelTiles * Tile::kBytes;
    const Matrix& w = a.weight;
    const int num_panels = kPanelBlocks == 2 ? 1 : 1 + pair.has_second;
    const int64_t first_row = x.rows_of(begin).first;
    alignas(64) static constexpr float kNone[kPairedRows * kPairSums] = {};
    for (int64_t t = 0; t < x.num_tiles; t += kPanelTiles) {
        const bool is_last = t + kPanelTiles >= x.num_tiles;
        const int64_t last = is_last ? x.num_tiles : t + kPanelTiles, step = round_up(divide_up(kFetched, (end - begin) * (last - t)), 64);
        for (int i = 0; i < 2; i++) expand_panel<Tile>(w.tile(i ? pair.second : pair.first, t), t, last, i % kPanelBlocks, panels[i / kPanelBlocks]);
        const uint8_t* vectors[2][2] = {{panels[0].codes[0][0][0], panels[0].codes[1][0][0]}, {panels[1].codes[0][0][0], panels[1].codes[1][0][0]}};
        for (int i = 0; i < 2 && Tile::kReady; i++)
            for (int part = 0; part < kParts; part++) vectors[i / kPanelBlocks][i % kPanelBlocks + part] = w.tile(i ? pair.second : pair.first, t) + part * sizeof(Words);
        const BlockPair then = is_last ? next : pair;
        const uint8_t* ahead[2] = {w.tile(then.first, is_last ? 0 : last), w.tile(then.second, is_last ? 0 : last)};
        for (int64_t panel = begin, fetched = 0; panel < end; panel++, fetched += step * (last - t)) {
            const RowGroup group = x.rows_of(panel);
            float* pair_sums = sums + (group.first - first_row) * kPairSums;
            const int32_t* next_x = panel + 1 < end ? x.columns(panel + 1, t) : x.columns(begin, is_last ? 0 : last);
            PanelFetch fetch[2];
            for (int i = 0; i < num_panels; i++) {
                fetch[i] = {{}, fetched < kFetched ? step : 0, i + 1 < num_panels ? nullptr : next_x};
                for (int b = 0; b < kPanelBlocks; b++) fetch[i].blocks[b] = ahead[i + b] + fetched;
            }
            with_rows<kPairedRows>(group.count, [&](auto num) {
                const auto rows = adds_at_once() ? pair_rows<Tile, num, kHasTwoWays> : pair_rows<Tile, num, false>;
                rows(panels, vectors, num_panels, last - t, x.columns(panel, t), x.unit(panel, t), fetch, t ? pair_sums : kNone, pair_sums);
            });
            if (!is_last) continue;
            for (int64_t m = 0; m < group.count && Tile::kWhole; m++)
                for (float* sum = pair_sums + m * kPairSums; sum < pair_sums + (m + 1) * kPairSums; sum += kLanes) store(sum, meant(load(sum), x.unit(panel, 0)[m]));
            finish_pair(a, pair, pair_sums, group.first, group.count);
        }
    }
}

template <class Tile>
void linear_paired(const LinearArgs& a, Context& context) {
    const bool few = a.num_rows <= kFewPaired * (adds_at_once() ? 1 : kParts);
    const int width = !few ? kPairedRows : kParts == 1 ? few_width(int(a.num_rows)) : kFewPaired;
    // One panel each thread makes for itself: to wait for one that does, and to get it from there, takes longer.
    const bool own = few && a.num_rows <= width && a.out != a.x;
    const PairedRows x(a, width, Tile::kSteps, context.shared);
    auto fill = [&](const PairedRows& rows, int64_t panel) { fill_panel(a, panel, Tile::kShared, Tile::kGroups, Tile::kZero, rows); };
    if (!own) context.pool.run(x.num_panels(), [&](int64_t panel, int) { fill(x, panel); });
    const Matrix& w = a.weight;
    if (few) {
        const bool gated = is_gated(a.epilogue);
        const int64_t count = gated ? w.num_blocks() / 2 : w.num_blocks();
        context.pool.run_parts(count, [&](ThreadPool::Tasks& tasks, int thread) {
            int64_t block;
            if (!tasks.take(block)) return;
            const PairedRows rows = own ? PairedRows(a, width, Tile::kSteps, context.thread_scratch2[thread]) : x;
            if (own) fill(rows, 0);
            alignas(64) float sums[2][kParts * kFewPaired * 16];
            do {
                for (int part = 0; part < 1 + gated; part++)
                    for (int64_t panel = 0; panel < rows.num_panels(); panel++) {
                        const RowGroup group = rows.rows_of(panel);
                        with_rows<kFewPaired>(kParts == 1 ? width : group.count, [&](auto num) {
                            constexpr int kWidth = kParts == 1 ? int(num) : kFewPaired;
                            if constexpr (kParts == 2 || num == few_width(num)) few_rows<Tile, num, kWidth>(w, block + part * count, rows, panel, sums[part] + group.first * 16);
                        });
                    }
                finish(a, {sums[0], gated ? sums[1] : nullptr, 16, 16, block * 16, (block + count) * 16, 0, a.num_rows});
            } while (tasks.take(block));
        });
        return;
    }
    // Two blocks share rows of x in L1, or in registers; a task's blocks share some panels of them in L2.
    const BlockPairs pairs(a);
    const int64_t all = x.num_panels(), parts = divide_up(all * x.panel_bytes(), context.cache / 2);
    // Of long rows so few stay there that to expand weights for them alone takes longer than to fetch more of them again.
    const int64_t share = Tile::kReady ? parts : std::min(parts, divide_up(all, kSharingPanels));
    const int64_t window = divide_up(all, share), group = pairs.count / (4 * context.pool.size());
    const EvenTasks all_tasks(pairs.count, share == 1 || group < 1 ? 1 : group, context.pool.size());
    context.pool.run_parts(all_tasks.count, [&](ThreadPool::Tasks& tasks, int thread) {
        float* sums = context.thread_scratch2[thread].get<float>(window * width * kPairSums);
        WeightPanel* panels = context.thread_scratch[thread].get<WeightPanel>(2);
        for (int64_t task; tasks.take(task);)
            for (int64_t begin = 0; begin < all; begin += window)
                for (int64_t i = all_tasks.begin(task); i < all_tasks.end(task); i++)
                    multiply_pair<Tile>(a, pairs[i], pairs[i + 1 < pairs.count ? i + 1 : i], x, begin, begin + window < all ? begin + window : all, panels, sums);
    });
}

// Formats whose codes are no integers are not paired.
inline void linear_pairs(const LinearArgs& a, Context& context) {
    if (a.num_rows == 0) return;
    if (a.weight.type == Type::bf16_ints) return linear_paired<PairedTile<Type::bf16_ints>>(a, context);
#if !defined(__AVX512VNNI__)
    if (a.weight.type == Type::i8) return linear_paired<PairedTile<Type::i8>>(a, context);
    if (a.weight.type == Type::w8a8) return linear_paired<PairedTile<Type::w8a8>>(a, context);
    if (a.weight.type == Type::w4a8) return linear_paired<PairedTile<Type::w4a8>>(a, context);
#endif
    if (a.weight.type == Type::i4) return linear_paired<PairedTile<Type::i4>>(a, context);
    with_blocks(a.weight.type, [&](auto type) {
        if constexpr (block_format(type).has_integers()) linear_paired<PairedTile<type>>(a, context);
    });
}

}  // namespace quire::QUIRE_NS
