// AMX tiles in plain C++, for CPUs that have AVX-512 but no AMX: the tests of that level then run there, slowly.
//
// Built with -DQUIRE_EMULATE_AMX=ON only. The sums are those of the hardware: of bf16, products of pairs into two sums each, added
// to the tile at the end. Tiles that don't fit together end the process, as they do there.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace quire::QUIRE_NS {

struct EmulatedTile {
    int rows = 16, row_bytes = 64;
    alignas(64) uint8_t data[16][64] = {};
};
inline thread_local EmulatedTile emulated_tiles[8];

inline void emulate_loadconfig(const void* config) {
    const uint8_t* bytes = static_cast<const uint8_t*>(config);
    for (int i = 0; i < 8; i++) {
        emulated_tiles[i] = EmulatedTile();
        emulated_tiles[i].row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
        emulated_tiles[i].rows = bytes[48 + i];
    }
}
inline void emulate_load(int tile, const void* from, int64_t stride) {
    EmulatedTile& t = emulated_tiles[tile];
    std::memset(t.data, 0, sizeof t.data);
    for (int i = 0; i < t.rows; i++) std::memcpy(t.data[i], static_cast<const uint8_t*>(from) + i * stride, t.row_bytes);
}
inline void emulate_store(int tile, void* to, int64_t stride) {
    const EmulatedTile& t = emulated_tiles[tile];
    for (int i = 0; i < t.rows; i++) std::memcpy(static_cast<uint8_t*>(to) + i * stride, t.data[i], t.row_bytes);
}
inline void check_tiles(const EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b) {
    if (c.rows != a.rows || c.row_bytes != b.row_bytes || a.row_bytes != 4 * b.rows) std::abort();
}
inline void emulate_product(int c, int a, int b) {
    EmulatedTile& out = emulated_tiles[c];
    check_tiles(out, emulated_tiles[a], emulated_tiles[b]);
    auto value = [](const uint8_t* row, int i) {
        uint16_t half;
        std::memcpy(&half, row + 2 * i, 2);
        const uint32_t bits = uint32_t(half) << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    };
    for (int m = 0; m < out.rows; m++) {
        float sums[32] = {};
        for (int k = 0; k < emulated_tiles[a].row_bytes / 4; k++)
            for (int n = 0; n < out.row_bytes / 2; n++)
                sums[n] = __builtin_fmaf(value(emulated_tiles[a].data[m], 2 * k + n % 2), value(emulated_tiles[b].data[k], n), sums[n]);
        for (int n = 0; n < out.row_bytes / 4; n++) {
            float x;
            std::memcpy(&x, out.data[m] + 4 * n, 4);
            x += sums[2 * n] + sums[2 * n + 1];
            std::memcpy(out.data[m] + 4 * n, &x, 4);
        }
    }
}
// Of signed bytes in A and unsigned ones in B.
inline void emulate_byte_product(int c, int a, int b) {
    EmulatedTile& out = emulated_tiles[c];
    check_tiles(out, emulated_tiles[a], emulated_tiles[b]);
    for (int m = 0; m < out.rows; m++)
        for (int n = 0; n < out.row_bytes / 4; n++) {
            int32_t sum;
            std::memcpy(&sum, out.data[m] + 4 * n, 4);
            for (int k = 0; k < emulated_tiles[a].row_bytes; k++)
                sum += int8_t(emulated_tiles[a].data[m][k]) * int32_t(emulated_tiles[b].data[k / 4][4 * n + k % 4]);
            std::memcpy(out.data[m] + 4 * n, &sum, 4);
        }
}

}  // namespace quire::QUIRE_NS

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig(config) emulate_loadconfig(config)
#define _tile_release() ((void)0)
#define _tile_loadd(tile, from, stride) emulate_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulate_store(tile, to, stride)
#define _tile_zero(tile) std::memset(emulated_tiles[tile].data, 0, sizeof emulated_tiles[tile].data)
#define _tile_dpbf16ps(c, a, b) emulate_product(c, a, b)
#define _tile_dpbsud(c, a, b) emulate_byte_product(c, a, b)
