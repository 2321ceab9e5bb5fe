// Blocks, of GGUF files and our own: read, put into tiles, and expanded, for any level. What the formats are is in block_format.h.
//
// A tile's codes lie in planes of words, one for each column. Bits 4j of word c in group i of the plane of nibbles are row
// 4i + j's; likewise eight rows share a word of two bits each, sixteen one of bits. Codes of six bits, and eight, lie as NumberPlace says.
// Products of a code and a scale have 24 bits or less and are exact in float32, so a value is rounded once, however a
// level computes it.
#pragma once

#include "kernels.h"
#include "pairs.h"
#include "vec.h"

namespace quire::QUIRE_NS {

inline uint16_t half_at(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

inline float half_to_float(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude < 0x400) return (half & 0x8000 ? -1.0f : 1.0f) * 0x1p-24f * float(int32_t(magnitude));
    const uint32_t bits = uint32_t(half & 0x8000) << 16 | ((magnitude << 13) + (magnitude >= 0x7c00 ? 224u << 23 : 112u << 23));
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// 32 columns of a row.
struct BlockPiece {
    uint8_t codes[32];
    uint8_t scales[2], mins[2];  // of groups, in superblocks
    uint16_t d, m;               // f16: what scales and mins are counted in, or are
    float scale;                 // of our own formats, as the next
    int8_t zero;
};

// Columns 32i .. of a block. The layouts are those of ggml-common.h.
template <Type kType>
inline void read_piece(const uint8_t* b, int i, BlockPiece& p) {
    constexpr BlockFormat f = block_format(kType);
    if constexpr (f.is_own()) {
        std::memcpy(p.codes, b, 32);
        std::memcpy(&p.scale, b + 32, 4);
        std::memcpy(&p.zero, b + 36, 1);
        return;
    }
    p.d = half_at(b), p.m = f.has_min ? half_at(b + 2) : 0;
    if constexpr (kType == Type::q8_0) {
        std::memcpy(p.codes, b + 2, 32);
    } else if constexpr (!f.is_super() || f.curved) {  // nibbles of columns c and c + 16
        const uint8_t* codes = b + f.bytes - (f.is_super() ? 128 : 16) + 16 * i;
        for (int c = 0; c < 16; c++) p.codes[c] = codes[c] & 15, p.codes[c + 16] = codes[c] >> 4;
        for (int c = 0; c < 32 && f.bits == 5; c++) p.codes[c] |= uint8_t((codes[c / 8 - 4] >> c % 8 & 1) << 4);
        if (f.curved && f.is_super()) p.scales[0] = uint8_t(((b[4 + i / 2] >> i % 2 * 4 & 15) | (half_at(b + 2) >> 2 * i & 3) << 4) - 32);
    } else if constexpr (kType == Type::q4_k || kType == Type::q5_k) {
        const uint8_t *s = b + 4 + i % 4, *codes = b + f.bytes - 128 + i / 2 * 32;
        p.scales[0] = uint8_t(i < 4 ? s[0] & 63 : (s[8] & 15) | (s[0] >> 2 & 48));
        p.mins[0] = uint8_t(i < 4 ? s[4] & 63 : (s[8] >> 4) | (s[4] >> 2 & 48));
        for (int c = 0; c < 32; c++) p.codes[c] = codes[c] >> i % 2 * 4 & 15;
        for (int c = 0; c < 32 && f.bits == 5; c++) p.codes[c] |= uint8_t((b[16 + c] >> i & 1) << 4);
    } else if constexpr (kType == Type::q6_k) {
        const uint8_t *low = b + i / 4 * 64 + i % 2 * 32, *high = b + 128 + i / 4 * 32;
        for (int c = 0; c < 32; c++) p.codes[c] = uint8_t((low[c] >> i % 4 / 2 * 4 & 15) | (high[c] >> i % 4 * 2 & 3) << 4);
        std::memcpy(p.scales, b + 192 + 2 * i, 2);
        p.d = half_at(b + 208);
    } else {
        const uint8_t* codes = b + (kType == Type::q3_k ? 32 : 16) + i / 4 * 32;
        for (int c = 0; c < 32; c++) p.codes[c] = codes[c] >> i % 4 * 2 & 3;
        if constexpr (kType == Type::q2_k) {
            std::memcpy(p.scales, b + 2 * i, 2);
            p.d = half_at(b + 80), p.m = half_at(b + 82);
        } else {
            for (int c = 0; c < 32; c++) p.codes[c] |= uint8_t((b[c] >> i & 1) << 2);
            for (int g = 0; g < 2; g++) {
                const int s = 2 * i + g, low = b[96 + s % 8] >> s / 8 * 4 & 15, high = b[104 + s % 4] >> s / 4 * 2 & 3;
                p.scales[g] = uint8_t((low | high << 4) - 32);
            }
            p.d = half_at(b + 108);
        }
    }
}

// Where a plain tile has codes of six or eight bits: for each number 16 lanes, eight columns of two rows, and a dword of a lane has the codes
// of four numbers, or five of six bits: the two bits that are left in three dwords are a code of number 30 or 31. Codes of eight bits are
// 128 more than they mean. In the order of numbers linear_dot.h multiplies them.
template <int kBits>
struct NumberPlace {
    static constexpr int kFirst[5] = {0, 6, 14, 20, 26}, kLeft = 12;  // bits, of six
    int number, lane;
    constexpr NumberPlace(int row, int col) : number(col / 16 * 16 + row % 4 * 4 + col / 8 % 2 * 2 + row / 8), lane(row / 4 % 2 * 8 + col % 8) {}

    // Calls body(dword, first bit in it, first bit of the code, how many) for each piece of the code.
    template <class Body>
    QUIRE_ALWAYS void for_parts(const Body& body) const {
        if (kBits == 8) return body(number / 4 * 16 + lane, number % 4 * 8, 0, 8);
        if (number < 30) return body(number / 5 * 16 + lane, kFirst[number % 5], 0, 6);
        for (int i = 0; i < 3; i++) body(((number - 30) * 3 + i) * 16 + lane, kLeft, 2 * i, 2);
    }
};
template <int kBits>
inline void put_number(uint8_t* tile, int row, int col, unsigned code) {
    NumberPlace<kBits>(row, col).for_parts([&](int at, int first, int from, int bits) {
        uint32_t dword;
        std::memcpy(&dword, tile + 4 * at, 4);
        const uint32_t mask = (1u << bits) - 1;
        dword = (dword & ~(mask << first)) | (code >> from & mask) << first;
        std::memcpy(tile + 4 * at, &dword, 4);
    });
}
// Calls body(offset of a plane in the tile, the first bit of codes that it has, how many) for a format's planes of bits.
template <class Body>
inline void for_planes(const BlockFormat& f, const Body& body) {
    const int low = f.bits >= 4 ? 4 : 0;
    if (f.bits < 8 && low) body(0, 0, 4);
    if (f.ones() > f.twos()) body(f.twos(), low, 2);
    if (f.bits == 3 || f.bits == 5) body(f.ones(), f.bits - 1, 1);
}

// Row `row` of tile `t` of a block; `tile` is where that tile lies.
template <Type kType>
inline void put_piece(uint8_t* tile, int64_t t, int row, bool paired, const BlockPiece& p) {
    constexpr BlockFormat f = block_format(kType);
    if (f.has_numbers() && !paired)
        for (int c = 0; c < 32; c++) put_number<f.bits>(tile, row, c, f.bits == 8 ? p.codes[c] ^ 128 : p.codes[c]);
    else if (f.bits == 8)
        for (int c = 0; c < 32; c++) tile[paired ? paired_index(row, c) : row * 32 + c] = p.codes[c];
    else
        for_planes(f, [&](int offset, int first, int bits) {
            for (int c = 0; c < 32; c++) put_code(tile + offset, paired ? paired_place(row, c, bits) : plain_place(row, c, bits), bits, p.codes[c] >> first);
        });
    if constexpr (f.is_own()) {
        if (t % f.span != row / f.striped()) return;
        std::memcpy(tile + f.scales() + row % f.striped() * 4, &p.scale, 4);
        std::memcpy(tile + f.scales() + f.striped() * 4 + row % f.striped(), &p.zero, 1);
        return;
    }
    if (!f.is_super()) {
        std::memcpy(tile + f.scales() + 2 * row, &p.d, 2);
        if (f.has_min) std::memcpy(tile + f.mins() + 2 * row, &p.m, 2);
        return;
    }
    for (int g = 0; g < f.groups; g++) {
        tile[f.scales() + 16 * g + row] = p.scales[g];
        if (f.has_min && !f.nibble_scales()) tile[f.mins() + 16 * g + row] = p.mins[g];
    }
    if (t % 8 != row / 2) return;
    std::memcpy(tile + f.stripe() + row % 2 * 2, &p.d, 2);
    if (f.has_min) std::memcpy(tile + f.stripe() + 4 + row % 2 * 2, &p.m, 2);
}

inline void pack_blocks_row(const Matrix& m, int64_t row, const uint8_t* source) {
    uint8_t* tile = const_cast<uint8_t*>(m.tile(row / 16, 0));
    with_blocks(m.type, [&](auto type) {
        constexpr BlockFormat f = block_format(type);
        constexpr int pieces = f.values / 32;
        BlockPiece piece{};
        for (int64_t t = 0; t < m.num_tiles(); t++, tile += f.tile_bytes()) {
            if (t * 32 < m.cols) read_piece<type>(source + t / pieces * f.bytes, int(t % pieces), piece);
            else std::memset(piece.codes, 0, 32);  // where scales are striped
            put_piece<type>(tile, t, int(row % 16), m.paired, piece);
        }
    });
}

// Rows [first, first + count) of a paired tile in the order of a plain one, with all scales.
struct PlainTile {
    alignas(64) uint8_t bytes[1024] = {};

    PlainTile(const Matrix& m, const uint8_t* tile, int64_t first, int64_t count) {
        const bool blocks = is_blocks(m.type);
        const int64_t codes = blocks ? block_format(m.type).scales() : 0;
        if (blocks) std::memcpy(bytes + codes, tile + codes, m.tile_bytes() - codes);
        if (m.type == Type::i4) std::memcpy(bytes, tile, 32);
        if (m.type == Type::w4a8) std::memcpy(bytes + 256, tile + 256, 16);
        for (int64_t row = first; row < first + count; row++)
            for (int64_t c = 0; c < 32; c++) put(m.type, tile, row, c);
    }

private:
    void put(Type type, const uint8_t* tile, int64_t row, int64_t c) {
        auto code = [&](int offset, int bits) { return code_at(tile + offset, paired_place(row, c, bits), bits); };
        auto move = [&](int offset, int bits) { put_code(bytes + offset, plain_place(row, c, bits), bits, code(offset, bits)); };
        const uint8_t* byte = tile + paired_index(row, c);
        if (type == Type::i8) bytes[i8_offset(row, c)] = *byte < 128 ? *byte : uint8_t(128 | (256 - *byte));
        else if (type == Type::w8a8) bytes[w8a8_offset(row, c)] = *byte ^ 128;
        else if (type == Type::i4) move(32, 4);
        else if (type == Type::w4a8) put_code(bytes, w4a8_place(row, c), 4, code(0, 4));
        else if (type == Type::q8_0) put_number<8>(bytes, int(row), int(c), *byte ^ 128);
        else if (block_format(type).bits == 8) bytes[row * 32 + c] = *byte;
        else if (block_format(type).bits == 6) put_number<6>(bytes, int(row), int(c), code(0, 4) | code(block_format(type).twos(), 2) << 4);
        else for_planes(block_format(type), [&](int offset, int, int bits) { move(offset, bits); });
    }
};

// Lanes of bytes and words as integers. GCC 12 would convert bytes one by one.
QUIRE_INLINE vi signed_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    vb bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vi);
#endif
}
QUIRE_INLINE vi words_of(const void* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
    vh words;
    std::memcpy(&words, p, sizeof words);
    return __builtin_convertvector(words, vi);
#endif
}
QUIRE_INLINE vf numbers_of(vi x) { return __builtin_convertvector(x, vf); }

QUIRE_INLINE vf halves_of(vi halves) {  // as half_to_float
    const vi magnitude = halves & 0x7fff, exponent = magnitude >= 0x7c00 ? splat_int(224 << 23) : splat_int(112 << 23);
    const vf value = select(magnitude < 0x400, numbers_of(magnitude) * 0x1p-24f, as_float((magnitude << 13) + exponent));
    return as_float(as_int(value) | (halves & 0x8000) << 16);
}

// To the nearest of bf16; of what is not a number the bits must not be all ones.
QUIRE_INLINE vf rounded_to_bf16(vf x) {
    const vu bits = (vu)x;
    return (vf)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// Floats of eight bits: e4m3, without infinities.
QUIRE_INLINE vf tiny_floats(vi codes) {
    const vi magnitude = codes & 0x7f;
    const vf value = select(magnitude < 8, numbers_of(magnitude) * 0x1p-9f, as_float((magnitude << 20) + (120 << 23)));
    return as_float(as_int(value) | (codes & 0x80) << 24);
}

// What the codes of a tile's rows are multiplied with, and what is added. Tiles are read one after the other, a superblock's
// from its first on, and its scales with that one: no tile's weights wait for the scales to be computed.
// `kValues`: values of codes of four bits are wanted, too.
template <Type kType, bool kValues = true>
struct BlockScales {
    static constexpr BlockFormat f = block_format(kType);
    static constexpr int kTiles = f.is_super() ? 8 : 1;
#if defined(__AVX512BF16__)
    static constexpr bool kTables = kValues && f.is_own() && f.bits == 4 && (f.span > 1 || f.curved);
    alignas(64) bf16 values[kTables ? 16 : 1][16];  // of a row's codes, made once for all tiles that share its scale or as a curve has them
#endif

    const float* scale(int group) const { return scales[tile_read][group]; }
    const float* shift(int group) const { return shifts[tile_read][group]; }

    QUIRE_ALWAYS void read(const uint8_t* tile, int64_t t) {
        if constexpr (f.is_own()) {  // the shift is the zero
            if (t % f.span) return;
            alignas(16) uint8_t zeros[16];
            for (int i = 0; i < f.span; i++) {
                const uint8_t* from = tile + i * f.tile_bytes() + f.scales();
                std::memcpy(scales[0][0] + i * f.striped(), from, f.striped() * 4);
                std::memcpy(zeros + i * f.striped(), from + f.striped() * 4, f.striped());
            }
            for (int r = 0; r < 16; r += kLanes) store(shifts[0][0] + r, numbers_of(signed_bytes(zeros + r)));
            keep_in_memory();
#if defined(__AVX512BF16__)
            const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            for (int r = 0; r < 16 && kTables; r++) {
                const __m512 numbers = f.curved ? _mm512_loadu_ps(kCurves[zeros[r]]) : _mm512_sub_ps(steps, _mm512_set1_ps(shifts[0][0][r]));
                const __m512 scaled = _mm512_mul_ps(numbers, _mm512_set1_ps(scales[0][0][r]));
                _mm256_store_si256(reinterpret_cast<__m256i*>(values[r]), (__m256i)_mm512_cvtneps_pbh(scaled));
            }
#endif
            return;
        }
        tile_read = int(t % kTiles);
        if (tile_read) return;
        if constexpr (!f.is_super()) {
            to_floats(tile + f.scales(), scales[0][0]);
            if (f.has_min) to_floats(tile + f.mins(), shifts[0][0]);
        } else {
            read_superblock(tile);
        }
        for (int i = 0; i < kTiles && !f.has_min; i++)
            for (int g = 0; g < f.groups; g++)
                for (int r = 0; r < 16; r++) shifts[i][g][r] = f.zero ? scales[i][g][r] * float(-f.zero) : 0.0f;
        keep_in_memory();
    }

    // What is not a number becomes one that can be rounded.
    QUIRE_ALWAYS void quiet() {
        auto set = [](float* p) QUIRE_ALWAYS {
            for (int r = 0; r < 16; r += kLanes) store(p + r, select(load(p + r) == load(p + r), load(p + r), splat(to_float(bf16(0x7fc0)))));
        };
        for (int g = 0; g < f.groups; g++) set(scales[tile_read][g]), set(shifts[tile_read][g]);
        keep_in_memory();
    }

private:
    alignas(64) float scales[kTiles][f.groups][16], shifts[kTiles][f.groups][16];
    int tile_read = 0;

    QUIRE_ALWAYS void read_superblock(const uint8_t* first) {
        alignas(64) uint8_t halves[2][32];
        for (int i = 0; i < 8; i++) {
            std::memcpy(halves[0] + 4 * i, first + i * f.tile_bytes() + f.stripe(), 4);
            if (f.has_min) std::memcpy(halves[1] + 4 * i, first + i * f.tile_bytes() + f.stripe() + 4, 4);
        }
        alignas(64) float d[16], m[16];
        to_floats(halves[0], d);
        if (f.has_min) to_floats(halves[1], m);
        for (int i = 0; i < 8; i++)
            for (int g = 0; g < f.groups; g++)
                for (int r = 0; r < 16; r += kLanes) {
                    const uint8_t* tile = first + i * f.tile_bytes();
                    const vi counts = signed_bytes(tile + f.scales() + 16 * g + r);
                    store(scales[i][g] + r, load(d + r) * numbers_of(f.nibble_scales() ? counts & 15 : counts));
                    if (!f.has_min) continue;
                    const vi mins = f.nibble_scales() ? counts >> 4 & 15 : signed_bytes(tile + f.mins() + 16 * g + r);
                    store(shifts[i][g] + r, -load(m + r) * numbers_of(mins));
                }
    }
    // From where each is read into all lanes: out of the register that it was made in, that would take shuffles.
    QUIRE_ALWAYS void keep_in_memory() { asm volatile("" : "+m"(scales), "+m"(shifts)); }
    QUIRE_ALWAYS static void to_floats(const uint8_t* halves, float* out) {
#if defined(__AVX512F__)
        _mm512_store_ps(out, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves))));
#elif defined(__F16C__)
        for (int r = 0; r < 16; r += 8) _mm256_store_ps(out + r, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + 2 * r))));
#else
        for (int r = 0; r < 16; r += kLanes) store(out + r, halves_of(words_of(halves + 2 * r)));
#endif
    }
};

// A row of a tile as float32, whose scales have been read; `kRounded` as bf16 has it.
template <Type kType, bool kRounded>
QUIRE_INLINE void unpack_blocks_row(const uint8_t* tile, const BlockScales<kType>& scales, int row, float* out) {
    constexpr BlockFormat f = block_format(kType);
    for (int c = 0; c < 32; c += kLanes) {
        const int g = c * f.groups / 32;
        const float scale = scales.scale(g)[row], shift = scales.shift(g)[row];
        vi codes{};
        auto plane = [&](const uint8_t* p, int first, int bits) QUIRE_ALWAYS {
            const int shared = 16 / bits, right = row % shared * bits;
            const uint16_t* words = reinterpret_cast<const uint16_t*>(p) + row / shared * 32;
            codes |= (words_of(words + c) >> right & ((1 << bits) - 1)) << first;
        };
        if constexpr (f.has_numbers()) {
            constexpr int kRun = kLanes < 8 ? kLanes : 8;  // columns whose dwords are neighbours
            for (int i = 0; i < kLanes; i += kRun) {
                typedef uint32_t Run __attribute__((vector_size(4 * kRun)));
                Run run{};
                NumberPlace<f.bits>(row, c + i).for_parts([&](int at, int first, int from, int bits) QUIRE_ALWAYS {
                    Run dwords;
                    std::memcpy(&dwords, tile + 4 * at, sizeof dwords);
                    run |= (dwords >> first & ((1u << bits) - 1)) << from;
                });
                std::memcpy(reinterpret_cast<int32_t*>(&codes) + i, &run, sizeof run);
            }
        }
        if (f.bits == 8) codes = f.has_numbers() ? codes - 128 : signed_bytes(tile + row * 32 + c);
        if (f.bits == 4 || f.bits == 5) plane(tile, 0, 4);
        if (f.bits == 2 || f.bits == 3) plane(tile, 0, 2);
        if (f.bits == 3 || f.bits == 5) plane(tile + f.ones(), f.bits - 1, 1);
        vf value;
        if constexpr (f.curved) {
            const float* curve = f.is_own() ? kCurves[int(shift)] : kCurve;
            for (int i = 0; i < kLanes; i++) value[i] = curve[codes[i] & 15];
        } else {
            value = f.tiny ? tiny_floats(codes) : numbers_of(codes);
        }
        if constexpr (f.is_own()) value = (f.curved || f.tiny ? value : value - shift) * scale;
        else value = value * scale + shift;
        store(out + c, kRounded ? rounded_to_bf16(value) : value);
    }
}

// Rows [first, first + count) of tiles [begin, end) of a block of 16, the first tile a superblock's: [tile][row] of 32 floats.
template <bool kRounded = false>
inline void unpack_blocks(const Matrix& m, int64_t block, int64_t begin, int64_t end, int first, int count, float* out) {
    with_blocks(m.type, [&](auto type) {
        constexpr int64_t bytes = block_format(type).tile_bytes();
        BlockScales<type> scales;
        const uint8_t* tile = m.tile(block, begin);
        for (int64_t t = begin; t < end; t++, tile += bytes) {
            scales.read(tile, t);
            if constexpr (kRounded) scales.quiet();
            if (m.paired) {
                const PlainTile plain(m, tile, first, count);
                for (int row = first; row < first + count; row++, out += 32) unpack_blocks_row<type, kRounded>(plain.bytes, scales, row, out);
            } else if constexpr (kRounded) {  // whole tiles
#pragma GCC unroll 16
                for (int row = 0; row < 16; row++, out += 32) unpack_blocks_row<type, true>(tile, scales, row, out);
            } else {
                for (int row = first; row < first + count; row++, out += 32) unpack_blocks_row<type, false>(tile, scales, row, out);
            }
        }
    });
}

}  // namespace quire::QUIRE_NS
