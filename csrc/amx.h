// What the AMX kernels share: tile set-up, and moving 16 x 16 values between rows and columns.
//
// All tiles are 16 rows of 64 bytes. A product is C[i][j] += sum over 32 k of A[i][k] * B[k][j] with A's rows as they lie
// in memory and B as pairs of k: row p holds (k = 2p, k = 2p + 1) of column 0, of column 1, ... Of bytes it is 64 k, and quads.
#pragma once

#include <immintrin.h>

#include "vec.h"
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

// Transposes 16 rows of 16 floats in registers.
inline void transpose16(__m512 (&r)[16]) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        auto pd = [&](int j) { return _mm512_castps_pd(t[i + j]); };
        r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(0), pd(2)));
        r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(0), pd(2)));
        r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(1), pd(3)));
        r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(1), pd(3)));
    }
    // r[4g + c] holds column c, c+4, c+8, c+12 (one per 128-bit lane) of rows 4g .. 4g+3.
    for (int c = 0; c < 4; c++) {
        __m512 a = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        __m512 d = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88), e = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_f32x4(a, d, 0x88);
        t[8 + c] = _mm512_shuffle_f32x4(a, d, 0xdd);
        t[4 + c] = _mm512_shuffle_f32x4(b, e, 0x88);
        t[12 + c] = _mm512_shuffle_f32x4(b, e, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

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

// 16 rows of `size` features, a multiple of 32, by feature: out[feature * stride + row].
inline void transpose_features(const bf16* rows, int64_t size, bf16* out, int64_t stride) {
    for (int64_t d = 0; d < size; d += 32) {
        __m512 r[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(reinterpret_cast<const float*>(rows + i * size + d));
        transpose16(r);  // two features a word
        for (int p = 0; p < 16; p++) {
            bf16* to = out + (d + 2 * p) * stride;
            const __m512i words = _mm512_castps_si512(r[p]);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(words));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + stride), _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
        }
    }
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
