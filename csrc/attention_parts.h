// What attention by tiles and attention by dot products share: the softmax in powers of 2.
#pragma once

#include <immintrin.h>

#include "attention.h"

namespace quire::QUIRE_NS {

// 2^x for x <= 0 or so, to 2e-7; 2^0 is exactly 1, and below -100 it is 0 (rather than a denormal number later on).
// Where it is not wanted it is 0 too.
inline __m512 exp2_of(__m512 x, __mmask16 wanted = 0xffff) {
    const __mmask16 counts = _mm512_mask_cmp_ps_mask(wanted, x, _mm512_set1_ps(-100.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(kPowerOf2[0]);
    for (int i = 1; i < 6; i++) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kPowerOf2[i]));
    return _mm512_maskz_scalef_ps(counts, p, n);
}

// What products of queries and keys are multiplied with, to be the powers of 2 that weigh: the scale times log2(e), or with a
// softcap that times log2(e), once tanh(product * inner) has been taken.
struct ScoreFactors {
    float outer, inner;

    explicit ScoreFactors(const AttentionArgs& a)
        : outer((a.softcap > 0 ? a.softcap : a.scale) * kLog2e), inner(a.softcap > 0 ? a.scale / a.softcap : 0) {}
};

// One copy: the masked form must round as the other does.
QUIRE_ONE_COPY inline __m512 tanh_of(__m512 product, float inner) { return (__m512)tanh((vf)product * inner); }

}  // namespace quire::QUIRE_NS
