// 16 rows of 16 words, turned in registers of 512 bits.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>

#include "vec.h"

namespace quire::QUIRE_NS {

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

}  // namespace quire::QUIRE_NS
#endif
