// What attention by tiles and attention by dot products share: the softmax in powers of 2, and fetching ahead.
#pragma once

#include <immintrin.h>

#include "attention.h"

namespace quire::QUIRE_NS {

// The next chunk's keys and values, to be fetched from memory while this one is computed: in four pieces, a few lines with
// every step of the softmax. All at once they would only fill the queue that loads wait in.
struct NextChunk {
    const uint8_t* pieces[4];
    int64_t piece_bytes = 0;

    // Line `i` of 64 of each piece, or several where a piece is longer.
    void fetch(int64_t i) const {
        for (int64_t at = i * 64; at < piece_bytes; at += 4096)
            for (const uint8_t* piece : pieces) _mm_prefetch(reinterpret_cast<const char*>(piece + at), _MM_HINT_T1);
    }
};

// Only where a block of 32 keys is one piece of memory for keys and one for values.
template <class Cached>
NextChunk next_chunk(const Sight& sight, int64_t chunk, int64_t high) {
    const CacheShape& shape = sight.a.cache_shape;
    NextChunk next;
    if (shape.block_size != 32 || chunk >= high) return next;
    for (int64_t i = 0; i < 2; i++) {
        const int64_t position = chunk + i * 32 < high ? chunk + i * 32 : chunk;
        next.pieces[2 * i] = sight.head(position, false), next.pieces[2 * i + 1] = sight.head(position, true);
    }
    next.piece_bytes = 32 * shape.padded_dim() * int64_t(sizeof(Cached));
    return next;
}

// 2^x for x <= 0 or so, to 2e-7; 2^0 is exactly 1, and below -100 it is 0 (rather than a denormal number later on).
// Where it is not wanted it is 0 too.
inline __m512 exp2_of(__m512 x, __mmask16 wanted = 0xffff) {
    const __mmask16 counts = _mm512_mask_cmp_ps_mask(wanted, x, _mm512_set1_ps(-100.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.33990057e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6151773e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5503331e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022648e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314720e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(counts, p, n);
}

// What products of queries and keys are multiplied with, to be the powers of 2 that weigh: the scale times log2(e), or with a
// softcap that times log2(e), once tanh(product * inner) has been taken.
struct ScoreFactors {
    float outer, inner;

    explicit ScoreFactors(const AttentionArgs& a)
        : outer((a.softcap > 0 ? a.softcap : a.scale) * kLog2e), inner(a.softcap > 0 ? a.scale / a.softcap : 0) {}
    static constexpr float kLog2e = 1.44269504088896341f;
};

// One copy: the masked form must round as the other does.
QUIRE_ONE_COPY inline __m512 tanh_of(__m512 product, float inner) { return (__m512)tanh((vf)product * inner); }

}  // namespace quire::QUIRE_NS
