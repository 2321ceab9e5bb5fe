// What the AMX kernels share: tile set-up, and values moved from rows to columns.
//
// All tiles are 16 rows of 64 bytes. A product is C[i][j] += sum over 32 k of A[i][k] * B[k][j] with A's rows as they lie
// in memory and B as pairs of k: row p holds (k = 2p, k = 2p + 1) of column 0, of column 1, ... Of bytes it is 64 k, and quads.
#pragma once

#include <immintrin.h>

#include "transpose.h"
#if defined(QUIRE_EMULATE_AMX)
#include "amx_emulated.h"
#endif

namespace quire::QUIRE_NS {

// Tiles belong to a thread and torch's own kernels set theirs: each task configures them and lets them go.
class Tiles {
public:
    // `columns` of the C tiles, 0..3, and of 6 and 7, which are B where that has fewer than 16; 4 and 5 are always whole.
    explicit Tiles(int64_t columns = 16) {
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; i++) {
            config.row_bytes[i] = uint16_t(i == 4 || i == 5 ? 64 : 4 * columns);
            config.rows[i] = 16;
        }
        asm volatile("" : "+m"(config));  // GCC's intrinsic does not say that it reads all of it
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// in [16][16] floats -> out[j * stride + i] for j < num_columns.
inline void transpose_to(const float* in, float* out, int64_t stride, int64_t num_columns) {
    if (num_columns <= 2) {
        for (int64_t j = 0; j < num_columns; j++)
            for (int i = 0; i < 16; i++) out[j * stride + i] = in[i * 16 + j];
        return;
    }
    __m512 r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_load_ps(in + i * 16);
    transpose16(r);
    for (int64_t j = 0; j < num_columns; j++) _mm512_store_ps(out + j * stride, r[j]);
}

// Up to `width` rows of x as B tiles, [tile][pair of k][row] of bf16 pairs; zeros beyond the last row and column.
inline void pack_columns(const bf16* x, int64_t stride, int64_t num_rows, int64_t num_columns, uint32_t* out,
                         int64_t width = 16) {
    const __mmask16 wide = __mmask16((1u << width) - 1);
    for (int64_t k = 0; k < num_columns; k += 32, out += 16 * width) {
        __m512 r[16];
        __mmask32 there = num_columns - k >= 32 ? ~0u : (1u << (num_columns - k)) - 1;
        if (width == 1) {
            _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(there, x + k));
            continue;
        }
        // 16 streams are more than the hardware follows by itself.
        for (int64_t i = 0; i < num_rows; i++) _mm_prefetch(reinterpret_cast<const char*>(x + i * stride + k + 256), _MM_HINT_T0);
        for (int i = 0; i < 16; i++)
            r[i] = i < num_rows ? _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(there, x + i * stride + k)) : _mm512_setzero_ps();
        transpose16(r);
        for (int p = 0; p < 16; p++) _mm512_mask_storeu_ps(out + p * width, wide, r[p]);
    }
}

}  // namespace quire::QUIRE_NS
