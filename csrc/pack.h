// What is in a tile of a packed Matrix (16 rows x 32 columns), how it gets there, and back.
//
//   f32, bf16  16 rows of 32 elements.
//   i8         sign and magnitude, |q| <= 127, times one scale a row. 64 bytes hold two rows, pieces of 8 columns in
//              turn: row 2i columns 0..7, row 2i+1 columns 0..7, row 2i columns 8..15, ...
//   w8a8       the same codes plus 128, for products with x in eight bits, too: of four columns in turn the rows' four bytes.
//   i4         -8..7 as 0..15, times one bf16 scale for a row's 32 columns. 16 scales, then 4 x 32 words: word c of
//              group i holds column c of the rows 4i .. 4i+3, lowest nibble first.
//   w4a8       -8..7 as 0..15, times the row's multiple for 32 columns, an integer of -15..15, and the row's scale: a product is of integers,
//              then. The codes as pairs.h says, then 16 multiples in bytes.
//   bf16_turned  as linear_dot.h multiplies them: of eight columns in turn the rows 0, 4, 8, 12, then 1, 5, 9, 13, ...
//   bf16_ints  as linear_pairs.h multiplies them: integers, in which a row's columns of a tile or two are counted, in words: of two columns
//              in turn the rows' two words; then the rows' powers of 2, the exponents as float32 has them, in bytes.
//   w8a16      w8a8's bytes, for products with x in sixteen bits.
//   q4_0 ...   blocks (blocks.h).
// Paired tiles of i8, w8a8, i4, w4a8 and blocks have the order of pairs.h; bytes are a two's complement there.
// i8 and i4 are symmetric, rounded to nearest; the i4 scale is the one of a few candidates with the least squared error.
#pragma once

#include "blocks.h"
#include "kernels.h"
#include "vec.h"

namespace quire::QUIRE_NS {

constexpr bool is_bf16(Type type) { return type == Type::bf16 || type == Type::bf16_turned || type == Type::bf16_ints; }

// Calls body(elements in the tile, elements in the row) for pieces of 8 of a row in bf16.
template <class Body>
inline void for_pieces(Type type, int64_t row, const Body& body) {
    for (int64_t c = 0; c < 32; c += 8) body(type == Type::bf16 ? row * 32 + c : c * 16 + row % 4 * 32 + row / 4 * 8, c);
}

// 2^(field - 127), where that is a number; 255: infinity.
inline float power_of_2(int field) {
    const uint32_t bits = uint32_t(field) << 23;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// NaN where any of them is.
template <class T>
inline float largest_magnitude(const T* x, int64_t n) {
    using Bits = std::conditional_t<sizeof(T) == 2, int16_t, int32_t>;  // as integers, positive numbers have their order, and NaN is the largest
    typedef Bits vs __attribute__((vector_size(sizeof(vf))));
    constexpr int kCount = sizeof(vf) / sizeof(T);
    constexpr Bits kMagnitude = Bits(~(Bits(1) << (8 * sizeof(T) - 1)));
    vs most{};
    int64_t i = 0;
    for (; i + kCount <= n; i += kCount) {
        vs magnitude;
        std::memcpy(&magnitude, x + i, sizeof magnitude);
        magnitude &= kMagnitude;
        most = magnitude > most ? magnitude : most;
    }
    Bits out = 0;
    for (int lane = 0; lane < kCount; lane++) out = most[lane] > out ? most[lane] : out;
    for (; i < n; i++) {
        Bits magnitude;
        std::memcpy(&magnitude, x + i, sizeof magnitude);
        magnitude &= kMagnitude;
        out = magnitude > out ? magnitude : out;
    }
    T found;
    std::memcpy(&found, &out, sizeof found);
    return to_float(found);
}

// What 32 numbers of this largest magnitude are counted in, so that it takes `bits`: a power of 2 that is a normal number.
struct Unit {
    int field;     // its exponent, as float32 has it; 255: one of them is no number
    float factor;  // what makes integers of them, where they are numbers

    Unit(float most, int bits) {
        uint32_t pattern;
        std::memcpy(&pattern, &most, 4);
        const int exponent = int(pattern >> 23 & 255), normal = exponent < bits ? bits : exponent;
        field = exponent == 255 ? 255 : normal - bits + 1;
        factor = power_of_2(253 + bits - normal);
    }
};

// bf16 weights as integers. Those of two tiles share a power of 2: so many bits that no sum of their products with x, which are 16320 at most
// (linear_pairs.h), is beyond 32 of them. To begin a sum with each tile takes longer.
constexpr int kSharedTiles = 2, kMostBits = 15;
constexpr int64_t ints_index(int64_t row, int64_t col) { return col / 2 * 32 + row * 2 + col % 2; }

inline void put_ints_row(uint8_t* tile, int64_t row, const bf16* values, int64_t num_tiles) {  // values [num_tiles * 32]
    const float most = largest_magnitude(values, num_tiles * 32);
    Unit unit(most, kMostBits);
    const float finest = unit.factor;
    vi sums{};
    for (int64_t c = 0; c < num_tiles * 32 && unit.field < 255; c += kLanes) sums += nearest(max(load(values + c) * finest, load(values + c) * -finest));
    int32_t sum = 0;
    for (int lane = 0; lane < kLanes; lane++) sum += sums[lane];
    // Coarser ones may be as much larger as rounding makes them.
    constexpr float kLargestSum = float(0x7fffffff / 16320 - kSharedTiles * 32);
    for (int bits = kMostBits; float(sum) * (unit.factor / finest) > kLargestSum;) unit = Unit(most, --bits);
    for (int64_t t = 0; t < num_tiles; t++, tile += weight_format(Type::bf16_ints).tile_bytes, values += 32) {
        int16_t integers[32] = {};
        for (int c = 0; c < 32 && unit.field < 255; c += kLanes) {
            const vh words = __builtin_convertvector(nearest(load(values + c) * unit.factor), vh);
            std::memcpy(integers + c, &words, sizeof words);
        }
        for (int64_t c = 0; c < 32; c += 2) std::memcpy(tile + 2 * ints_index(row, c), integers + c, 4);
        tile[1024 + row] = uint8_t(unit.field);
    }
}

inline void pack_bf16_row(const Matrix& m, int64_t row, const bf16* x) {  // x [cols]
    const int64_t shared = m.type == Type::bf16_ints ? kSharedTiles : 1;
    for (int64_t t = 0; t < m.num_tiles(); t += shared) {
        const int64_t count = t + shared < m.num_tiles() ? shared : m.num_tiles() - t, left = m.cols - t * 32;
        bf16 last[kSharedTiles * 32] = {};
        const bf16* values = x + t * 32;
        if (left < count * 32) std::memcpy(last, values, left * 2), values = last;
        uint8_t* tile = const_cast<uint8_t*>(m.tile(row / 16, t));
        if (m.type == Type::bf16_ints) put_ints_row(tile, row % 16, values, count);
        else for_pieces(m.type, row % 16, [&](int64_t at, int64_t c) { std::memcpy(reinterpret_cast<bf16*>(tile) + at, values + c, 16); });
    }
}

// One tile's row of 32 values -> floats, without the row's scale in i8, w8a8 and w4a8.
inline void unpack_tile_row(const Matrix& m, const uint8_t* tile, int64_t row, float* out) {
    if (m.paired && m.type != Type::bf16_ints) {  // whose one order is that of pairs
        Matrix plain = m;
        plain.paired = 0;
        return unpack_tile_row(plain, PlainTile(m, tile, row, 1).bytes, row, out);
    }
    switch (m.type) {
        case Type::f32:
            std::memcpy(out, tile + row * 128, 128);
            break;
        case Type::bf16:
        case Type::bf16_turned: {
            bf16 values[32];
            for_pieces(m.type, row, [&](int64_t at, int64_t c) { std::memcpy(values + c, reinterpret_cast<const bf16*>(tile) + at, 16); });
            for (int c = 0; c < 32; c += kLanes) store(out + c, load(values + c));
            break;
        }
        case Type::bf16_ints:
            for (int c = 0; c < 32; c++) {
                int16_t integer;
                std::memcpy(&integer, tile + 2 * ints_index(row, c), 2);
                out[c] = float(integer) * power_of_2(tile[1024 + row]);
            }
            break;
        case Type::i8: {
            for (int c = 0; c < 32; c += kLanes) {
                uint8_t bytes[kLanes];
                for (int i = 0; i < kLanes; i += 8) std::memcpy(bytes + i, tile + i8_offset(row, c + i), kLanes < 8 ? kLanes : 8);
                const vi q = signed_bytes(bytes);
                store(out + c, as_float(as_int(numbers_of(q & 127)) | (q & 128) << 24));
            }
            break;
        }
        case Type::w8a8:
        case Type::w8a16:
            for (int c = 0; c < 32; c++) out[c] = float(tile[w8a8_offset(row, c)]) - 128.0f;
            break;
        case Type::w4a8:
            for (int c = 0; c < 32; c++) out[c] = (float(code_at(tile, w4a8_place(row, c), 4)) - 8.0f) * float(int8_t(tile[256 + row]));
            break;
        default: {  // i4
            float scale = to_float(reinterpret_cast<const bf16*>(tile)[row]);
            const uint16_t* words = reinterpret_cast<const uint16_t*>(tile + 32) + row / 4 * 32;
            // Rounded to bf16, as the AMX kernel multiplies: every level has the same weights.
            for (int c = 0; c < 32; c += kLanes) {
                const vi codes = words_of(words + c) >> int(row % 4) * 4 & 15;
                store(out + c, rounded_to_bf16(numbers_of(codes - 8) * scale));
            }
            break;
        }
    }
}

// Tiles [begin, end) of a block of 16 rows as f32 tiles of 16 x 32, without i8's scales; `rounded`: blocks' values as bf16 has them.
inline void unpack_tiles(const Matrix& m, int64_t block, int64_t begin, int64_t end, bool rounded, float* out) {
    if (is_blocks(m.type)) return rounded ? unpack_blocks<true>(m, block, begin, end, 0, 16, out) : unpack_blocks(m, block, begin, end, 0, 16, out);
    for (int64_t t = begin; t < end; t++)
        for (int64_t row = 0; row < 16; row++, out += 32) unpack_tile_row(m, m.tile(block, t), row, out);
}

inline void unpack_row(const Matrix& m, int64_t row, float* out) {
    float values[32];
    float scale = m.scales ? m.scales[row] : 1.0f;
    if (is_blocks(m.type)) return unpack_blocks(m, row / 16, 0, m.cols / 32, int(row % 16), 1, out);  // which have whole tiles
    for (int64_t t = 0; t < m.num_tiles(); t++) {
        unpack_tile_row(m, m.tile(row / 16, t), row % 16, values);
        int64_t count = m.cols - t * 32 < 32 ? m.cols - t * 32 : 32;
        for (int64_t c = 0; c < count; c++) out[t * 32 + c] = values[c] * scale;
    }
}

// x * factor to the nearest integer, the product rounded first: not fused, so that every level and the twin in
// quire/quantization/coded.py choose the same code where two are equally near.
inline vf round_product(vf x, float factor) { return round_nearest(plain(x * factor)); }

inline void pack_i8_row(const Matrix& m, uint8_t* first_tile, int64_t row, const float* x) {
    float most = largest_magnitude(x, m.num_tiles() * 32);
    float scale = most / 127.0f, inverse = most > 0 ? 127.0f / most : 0.0f;
    const_cast<float*>(m.scales)[row] = scale;
    int32_t q[32];
    for (int64_t t = 0; t < m.num_tiles(); t++) {
        for (int c = 0; c < 32; c += kLanes) {
            // Within bounds before it is an integer: NaN and infinity are none (their row's scale says what they were).
            vf bounded = min(max(round_product(load(x + t * 32 + c), inverse), splat(-127.0f)), splat(127.0f));
            vi v = __builtin_convertvector(bounded, vi);
            vi magnitude = v < 0 ? -v : v;
            vi coded = m.paired ? v & 255 : has_bytes(m.type) ? v + 128 : magnitude | (v < 0 ? splat_int(128) : splat_int(0));
            std::memcpy(q + c, &coded, sizeof coded);
        }
        auto offset = m.paired ? paired_index : has_bytes(m.type) ? w8a8_offset : i8_offset;
        for (int c = 0; c < 32; c++) first_tile[t * 512 + offset(row % 16, c)] = uint8_t(q[c]);
    }
}

// A row as a checkpoint has it: its codes plus 128, then its scale in f32.
inline void pack_w8a8_row(const Matrix& m, int64_t row, const uint8_t* source) {
    uint8_t* tile = const_cast<uint8_t*>(m.tile(row / 16, 0));
    auto offset = m.paired ? paired_index : w8a8_offset;
    for (int64_t c = 0; c < m.cols; c++) tile[c / 32 * 512 + offset(row % 16, c % 32)] = source[c] ^ (m.paired ? 128 : 0);
    std::memcpy(const_cast<float*>(m.scales) + row, source + m.cols, 4);
}

// The codes -8..7 nearest to values by a scale whose inverse this is.
inline vf nearest_codes(vf x, float inverse) { return min(max(round_product(x, inverse), splat(-8.0f)), splat(7.0f)); }
inline float inverse_of(float scale) { return scale != 0 ? 1.0f / scale : 0.0f; }

// The sum of the squares by which 32 values are off as codes of this scale. Products and squares are rounded one by one and halves added
// onto halves, whatever the lanes: the same sum on every level and in the twin.
inline float squared_error(const float* x, float scale) {
    alignas(64) float squares[32];
    for (int c = 0; c < 32; c += kLanes) {
        const vf v = load(x + c), d = v - plain(nearest_codes(v, inverse_of(scale)) * scale);
        store(squares + c, plain(d * d));
    }
    for (int width = 16; width; width /= 2)
        for (int c = 0; c < width; c++) squares[c] += squares[c + width];
    return squares[0];
}

// The codes of 32 values, as 0..15.
inline void put_nearest_codes(const float* x, float scale, int32_t* codes) {
    for (int c = 0; c < 32; c += kLanes) {
        const vi code = __builtin_convertvector(nearest_codes(load(x + c), inverse_of(scale)), vi) + 8;
        std::memcpy(codes + c, &code, sizeof code);
    }
}

// The bf16 scale for 32 values: NaN where one of them is no number.
inline bf16 best_i4_scale(const float* x) {
    // The value of largest magnitude gets the code -8, which has no positive twin: its sign decides the scale's.
    float extreme = 0;
    for (int c = 0; c < 32; c++)
        if (__builtin_fabsf(x[c]) > __builtin_fabsf(extreme)) extreme = x[c];
    bf16 best_scale = 0;
    float best_error = __builtin_inff();
    for (int candidate = 0; candidate < 9; candidate++) {
        bf16 scale = to_bf16(extreme / -(8.0f - 0.25f * float(candidate - 2)));  // -8.5 .. -6.5
        const float total = squared_error(x, to_float(scale));
        if (total < best_error) best_error = total, best_scale = scale;
    }
    return best_error < __builtin_inff() ? best_scale : 0x7fc0;
}

// A row's scale, and for 32 columns each the multiple of it that is nearest to their own best scale, or one beside it that leaves less error.
inline void pack_w4a8_row(const Matrix& m, uint8_t* first_tile, int64_t row, const float* x, float* scales) {
    for (int64_t t = 0; t < m.num_tiles(); t++) scales[t] = to_float(best_i4_scale(x + t * 32));
    const float most = largest_magnitude(scales, m.num_tiles()), scale = most / 15.0f, inverse = most > 0 ? 15.0f / most : 0.0f;
    const_cast<float*>(m.scales)[row] = scale;
    for (int64_t t = 0; t < m.num_tiles(); t++, first_tile += m.tile_bytes(), x += 32) {
        const float nearest = __builtin_fabsf(round_product(splat(scales[t]), inverse)[0]);
        float best = 1, best_error = __builtin_inff();
        for (int near = -1; near <= 1; near++) {
            float multiple = nearest + float(near);
            multiple = multiple < 1 ? 1 : multiple > 15 ? 15 : multiple;
            if (scales[t] < 0) multiple = -multiple;
            const float total = squared_error(x, multiple * scale);
            if (total < best_error) best_error = total, best = multiple;
        }
        int32_t codes[32];
        put_nearest_codes(x, best * scale, codes);
        for (int c = 0; c < 32; c++) put_code(first_tile, m.paired ? paired_place(row % 16, c, 4) : w4a8_place(row % 16, c), 4, unsigned(codes[c]));
        first_tile[256 + row % 16] = uint8_t(int8_t(best));
    }
}

inline void pack_row(const Matrix& m, int64_t row, const float* x, float* scratch) {  // x [tiles * 32], zeros beyond cols; scratch [tiles * 16]
    uint8_t* first = const_cast<uint8_t*>(m.tile(row / 16, 0));
    int64_t r = row % 16;
    if (m.type == Type::w4a8) return pack_w4a8_row(m, first, row, x, scratch);
    if (m.scales) return pack_i8_row(m, first, row, x);
    if (is_bf16(m.type)) {
        bf16* rounded = reinterpret_cast<bf16*>(scratch);
        for (int64_t c = 0; c < m.num_tiles() * 32; c += kLanes) store(rounded + c, load(x + c));
        return pack_bf16_row(m, row, rounded);
    }
    for (int64_t t = 0; t < m.num_tiles(); t++) {
        uint8_t* tile = first + t * m.tile_bytes();
        const float* values = x + t * 32;
        if (m.type == Type::f32) {
            std::memcpy(tile + r * 128, values, 128);
        } else {
            int32_t codes[32];
            const bf16 scale = reinterpret_cast<bf16*>(tile)[r] = best_i4_scale(values);
            put_nearest_codes(values, to_float(scale), codes);
            for (int c = 0; c < 32; c++) put_code(tile + 32, m.paired ? paired_place(r, c, 4) : plain_place(r, c, 4), 4, unsigned(codes[c]));
        }
    }
}

inline void pack(const PackArgs& a, Context& context) {
    const Matrix& m = a.matrix;
    int64_t padded = m.num_tiles() * 32;
    // A task owns whole blocks of 16 rows: in i4 four rows share a word.
    int64_t first_block = a.start / 16, last_block = (a.start + a.num_rows - 1) / 16;
    context.pool.run(a.num_rows ? last_block - first_block + 1 : 0, [&](int64_t task, int thread) {
        float* values = context.thread_scratch[thread].get<float>(padded + m.num_tiles() * 16);
        int64_t low = (first_block + task) * 16, high = low + 16;
        low = low < a.start ? a.start : low;
        high = high > a.start + a.num_rows ? a.start + a.num_rows : high;
        for (int64_t row = low; row < high; row++) {
            int64_t offset = (row - a.start) * a.source_stride;
            if (a.source_type == Type::w8a8) {
                pack_w8a8_row(m, row, static_cast<const uint8_t*>(a.source) + offset);
                continue;
            }
            if (is_blocks(m.type)) {
                pack_blocks_row(m, row, static_cast<const uint8_t*>(a.source) + offset);
                continue;
            }
            if (a.source_type == Type::bf16 && is_bf16(m.type)) {  // nothing to convert
                pack_bf16_row(m, row, static_cast<const bf16*>(a.source) + offset);
                continue;
            }
            for_vectors(m.cols, [&](int64_t i, int count) {
                vf v = a.source_type == Type::bf16 ? load_n(static_cast<const bf16*>(a.source) + offset + i, count)
                                                   : load_n(static_cast<const float*>(a.source) + offset + i, count);
                store_n(values + i, v, count);
            });
            for (int64_t i = m.cols; i < padded; i++) values[i] = 0;
            pack_row(m, row, values, values + padded);
        }
    });
}

}  // namespace quire::QUIRE_NS
