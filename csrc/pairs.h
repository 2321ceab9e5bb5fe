// The order of codes in a paired tile, which AVX2 multiplies two columns at a time (linear_pairs.h).
//
// A tile's first half is of rows 0..7, the second of rows 8..15. In each, 16 numbers follow each other for two columns:
// those of the first row, those of the second, ... Codes of a few bits have the place of two columns' 16 numbers shared by
// as many next columns as words have room for. Scales lie where they lie in a plain tile, and tiles are as large.
#pragma once

#include <cstring>

#include "kernels.h"

namespace quire {

// Among a tile's 512 numbers of a byte or more.
constexpr int64_t paired_index(int64_t row, int64_t col) { return row / 8 * 256 + col / 2 * 16 + row % 8 * 2 + col % 2; }

inline int64_t i8_offset(int64_t row, int64_t col) { return (row / 2) * 64 + (col / 8) * 16 + (row % 2) * 8 + col % 8; }  // in a plain tile
constexpr int64_t w8a8_offset(int64_t row, int64_t col) { return col / 4 * 64 + row * 4 + col % 4; }

struct Place {  // of a code among words that several share
    int64_t word;
    int shift;
};
constexpr Place paired_place(int64_t row, int64_t col, int bits) {
    const int shared = 16 / bits;
    return {row / 8 * (256 / shared) + col / 2 / shared * 16 + row % 8 * 2 + col % 2, int(col / 2 % shared) * bits};
}
constexpr Place plain_place(int64_t row, int64_t col, int bits) {  // in a plain tile
    const int shared = 16 / bits;
    return {row / shared * 32 + col, int(row % shared) * bits};
}
// In a plain tile of w4a8, whose bytes have two codes of w8a8's order, 64 numbers apart.
constexpr Place w4a8_place(int64_t row, int64_t col) {
    const int64_t byte = col / 8 * 64 + w8a8_offset(row, col % 4);
    return {byte / 2, int(byte % 2 * 8 + col / 4 % 2 * 4)};
}

inline unsigned code_at(const uint8_t* plane, Place at, int bits) {
    uint16_t word;
    std::memcpy(&word, plane + 2 * at.word, 2);
    return unsigned(word) >> at.shift & ((1u << bits) - 1);
}
inline void put_code(uint8_t* plane, Place at, int bits, unsigned code) {
    uint16_t word;
    std::memcpy(&word, plane + 2 * at.word, 2);
    const unsigned mask = ((1u << bits) - 1) << at.shift;
    word = uint16_t((word & ~mask) | (code << at.shift & mask));
    std::memcpy(plane + 2 * at.word, &word, 2);
}

}  // namespace quire
