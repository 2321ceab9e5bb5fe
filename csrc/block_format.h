// What weights are kept as: the one list of types and of what each is. Of most the formats of blocks, of GGUF files and our own.
//
// A GGUF value is code * scale + shift, where the codes and scales are the file's own: nothing is quantized anew. Of a block of
// 32 columns, scale and min are two f16. A superblock of 256 columns has two f16 for all, times a few bits for each group of
// 16 or 32: those f16 are striped over its eight tiles (tile i holds the ones of rows 2i and 2i + 1), so that tiles are alike.
//
// What other checkpoints hold (GPTQ, FP8, ...) is brought to formats of our own: (number - zero) * scale, where the scale is
// a float32 for 32 columns of a row, or for 128, and the number is an integer, or as an 8-bit float has it, or from a curve,
// which `zero` then names. Of 128 columns the scales are striped over four tiles, and rows have tiles for whole ones. The
// source has 40 bytes for 32 columns, whatever the format: a byte a code, the scale, `zero` as int8, three unused.
#pragma once

#include <cstdint>
#include <type_traits>

namespace quire {

enum class Type : int32_t {
    f32, bf16, i8, i4, w8a8, w4a8, bf16_turned, bf16_ints, w8a16,
    q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs,
    u4_32, u4_128, u8_32, u8_128, f8_128, c4_32,
};
constexpr bool is_blocks(Type type) { return type >= Type::q4_0; }
constexpr bool has_bytes(Type type) { return type == Type::w8a8 || type == Type::w8a16; }  // codes plus 128, by four columns
constexpr int kNumBlockTypes = 18;

struct BlockFormat {
    const char* name;
    int values, bytes;  // of a block in the file
    int bits;           // of a code: planes of 4, 2 and 1 bits, or signed bytes
    int groups;         // of a tile's 32 columns, each with a scale of its own
    bool has_min;       // the shift is a min, else -zero * scale
    int zero;           // the code that means 0
    bool curved;        // the code is a place in kCurve, or one of kCurves
    int span = 0;       // of our own formats: tiles that share a row's scale
    bool tiny = false;  // the code is a float of 8 bits (e4m3, without infinities)

    constexpr bool is_super() const { return values == 256; }
    constexpr bool nibble_scales() const { return bits == 2; }  // scale and min in a byte
    // Of a tile: the planes of codes, then the rows' scales, then their mins, then the stripe.
    constexpr int twos() const { return bits >= 4 ? 256 : 0; }
    constexpr int ones() const { return twos() + (bits == 2 || bits == 3 || bits == 6 ? 128 : 0); }
    constexpr int scales() const { return bits * 64; }
    constexpr int mins() const { return scales() + (is_super() ? 16 * groups : 32); }
    constexpr int stripe() const { return has_min && !nibble_scales() ? 2 * mins() - scales() : mins(); }
    constexpr bool is_own() const { return span != 0; }
    constexpr bool has_numbers() const { return bits == 6 || (bits == 8 && !is_own()); }  // a plain tile's codes lie as NumberPlace says
    constexpr bool has_integers() const { return !tiny && !(is_own() && curved); }  // as codes, or as what they mean
    constexpr int striped() const { return 16 / (is_own() ? span : 1); }  // rows whose scales are in a tile, then their zeros
    constexpr int tile_bytes() const { return is_own() ? scales() + striped() * 5 : stripe() + (is_super() ? has_min ? 8 : 4 : 0); }
};

constexpr BlockFormat kBlockFormats[kNumBlockTypes] = {
    {"Q4_0", 32, 18, 4, 1, false, 8, false},   {"Q4_1", 32, 20, 4, 1, true, 0, false},
    {"Q5_0", 32, 22, 5, 1, false, 16, false},  {"Q5_1", 32, 24, 5, 1, true, 0, false},
    {"Q8_0", 32, 34, 8, 1, false, 0, false},   {"Q2_K", 256, 84, 2, 2, true, 0, false},
    {"Q3_K", 256, 110, 3, 2, false, 4, false}, {"Q4_K", 256, 144, 4, 1, true, 0, false},
    {"Q5_K", 256, 176, 5, 1, true, 0, false},  {"Q6_K", 256, 210, 6, 2, false, 32, false},
    {"IQ4_NL", 32, 18, 4, 1, false, 0, true},  {"IQ4_XS", 256, 136, 4, 1, false, 0, true},
    {"U4_32", 32, 40, 4, 1, false, 0, false, 1},  {"U4_128", 32, 40, 4, 1, false, 0, false, 4},
    {"U8_32", 32, 40, 8, 1, false, 0, false, 1},  {"U8_128", 32, 40, 8, 1, false, 0, false, 4},
    {"F8_128", 32, 40, 8, 1, false, 0, false, 4, true}, {"C4_32", 32, 40, 4, 1, false, 0, true, 1},
};
constexpr const BlockFormat& block_format(Type type) { return kBlockFormats[int(type) - int(Type::q4_0)]; }

// Of any type: what all who hold a matrix of it have to know, Python's too.
struct WeightFormat {
    int32_t tile_bytes;  // of 16 rows by 32 columns
    int32_t span;        // tiles of which a row has whole multiples
    int32_t has_scales;  // 1: one a row, beside the tiles
    int32_t has_pairs;   // 1: there is an order of it, of as many bytes, in which pairs are multiplied (pairs.h)
    int32_t rounds_x;    // to so many bytes, or 0: products round x, with a scale for each row, and multiply bytes
    int32_t block_values = 0, block_bytes = 0;  // of a block in a file; 0: the type is none of blocks
};

constexpr WeightFormat weight_format(Type type) {
    switch (type) {
        case Type::f32: return {2048, 1, false, false, 0};
        case Type::bf16:
        case Type::bf16_turned: return {1024, 1, false, false, 0};
        case Type::bf16_ints: return {1040, 1, false, true, 0};  // 512 integers, then 16 powers of 2
        case Type::i8: return {512, 1, true, true, 0};
        case Type::w8a8: return {512, 1, true, true, 1};
        case Type::w8a16: return {512, 1, true, false, 2};
        case Type::i4: return {288, 1, false, true, 0};  // 16 scales in bf16, then 512 nibbles
        case Type::w4a8: return {272, 1, true, true, 1};  // 512 nibbles, then 16 multiples
        default: break;
    }
    const BlockFormat& blocks = block_format(type);
    return {blocks.tile_bytes(), blocks.is_own() ? blocks.span : 1, false, blocks.has_integers(), 0, blocks.values, blocks.bytes};
}

// How a level likes best to have weights of a type, where activations are bfloat16. All multiply all types.
struct WeightOrder {
    Type type;       // as which
    int32_t paired;  // in the order of pairs
    int32_t bytes;   // that the level's loop of bytes (limits.h) multiplies for a number; 0: its other loop tells what is near
};

constexpr float kCurve[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// By their numbers: NF4 and FP4 as bitsandbytes has them, and the floats of 4 bits (e2m1) of MXFP4.
constexpr float kCurves[3][16] = {
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
     -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
     0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
    {0.0f, 0.0052083333f, 0.66666667f, 1.0f, 0.33333333f, 0.5f, 0.16666667f, 0.25f,
     -0.0f, -0.0052083333f, -0.66666667f, -1.0f, -0.33333333f, -0.5f, -0.16666667f, -0.25f},
    {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f},
};

// Calls body with the type, one of blocks, as a constant.
template <int kFirst = int(Type::q4_0), class Body>
inline void with_blocks(Type type, const Body& body) {
    if constexpr (kFirst < int(Type::q4_0) + kNumBlockTypes) {
        if (int(type) != kFirst) return with_blocks<kFirst + 1>(type, body);
        body(std::integral_constant<Type, Type(kFirst)>());
    }
}

}  // namespace quire
