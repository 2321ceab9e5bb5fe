// Vectors of floats in the width of the level that this file is compiled for, on GCC's and Clang's vector extensions.
//
// Kernels that need no instruction of one level are written once, against this header, and compiled once per level (level.cpp)
// into the namespace QUIRE_NS. Lanes never depend on each other but in `hsum` and `hmax`, whose order is fixed.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define QUIRE_LANES 16
#elif defined(__AVX2__)
#define QUIRE_LANES 8
#else
#define QUIRE_LANES 4
#endif

namespace quire {

using bf16 = uint16_t;  // the upper half of a float32

inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline float to_float(float x) { return x; }

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40);
    return bf16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

}  // namespace quire

// One copy of a function, wherever it is called from and with whatever constants: two inlined copies of `a * b + c * d` may be fused in two ways, and a
// row's bits would depend on which of them it meets.
#if defined(__clang__)
#define QUIRE_ONE_COPY __attribute__((noinline))
#else
#define QUIRE_ONE_COPY __attribute__((noinline, noclone))
#endif

// For what works on registers: as a call of its own it would pass them through memory.
#define QUIRE_ALWAYS __attribute__((always_inline))
#define QUIRE_INLINE QUIRE_ALWAYS inline

namespace quire::QUIRE_NS {

constexpr int kLanes = QUIRE_LANES;

typedef float vf __attribute__((vector_size(4 * QUIRE_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * QUIRE_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * QUIRE_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * QUIRE_LANES)));
typedef int8_t vb __attribute__((vector_size(QUIRE_LANES)));

inline vf splat(float x) { return x - vf{}; }  // and not vf{} + x, which makes 0 of -0
inline vi splat_int(int32_t x) { return vi{} + x; }
inline vf as_float(vi x) { return (vf)x; }
inline vi as_int(vf x) { return (vi)x; }
inline vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
// Where one is NaN, or both are 0, the second one: as x86 has it, which compilers don't see.
#if defined(__AVX512F__)
inline vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
inline vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
inline vf max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
inline vf min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }
#endif

inline vf load(const float* p) {
    vf out;
    std::memcpy(&out, p, sizeof out);
    return out;
}
inline vf load(const bf16* p) {
#if defined(__AVX512F__)  // GCC 12 makes two halves of the conversion below
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
    vh half;
    std::memcpy(&half, p, sizeof half);
    return as_float(__builtin_convertvector(half, vi) << 16);
#endif
}
// 2 * kLanes numbers in two vectors: of bf16 those at even and at odd places, which takes half of what two vectors above take.
inline void load_two(const float* p, vf& first, vf& second) { first = load(p), second = load(p + kLanes); }
inline void load_two(const bf16* p, vf& even, vf& odd) {
    vi pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    even = as_float(pairs << 16), odd = as_float(pairs & int32_t(0xffff0000));
}
inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline void store(bf16* p, vf x) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)x);  // takes denormal numbers for 0
    std::memcpy(p, &half, sizeof half);
    return;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    const bfloat16x4_t half = vcvt_bf16_f32((float32x4_t)x);
    std::memcpy(p, &half, sizeof half);
    return;
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vi is_nan = x != x;
    rounded = (vu)is_nan ? vu{} + 0x7fc0u : rounded;
    vh half = __builtin_convertvector(rounded, vh);
    std::memcpy(p, &half, sizeof half);
#endif
}

// The first `n` < kLanes elements; the other lanes are 0, and nothing beyond is read or written.
template <class T>
inline vf load_part(const T* p, int n) {
    T padded[kLanes] = {};
    std::memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
template <class T>
inline void store_part(T* p, vf x, int n) {
    T padded[kLanes];
    store(padded, x);
    std::memcpy(p, padded, n * sizeof(T));
}

// Calls body(offset, count) for each vector of [0, n): count is kLanes but in the last one, perhaps.
template <class Body>
inline void for_vectors(int64_t n, Body&& body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
    if (i < n) body(i, int(n - i));
}
template <class T>
inline vf load_n(const T* p, int n) {
    return n == kLanes ? load(p) : load_part(p, n);
}
template <class T>
inline void store_n(T* p, vf x, int n) {
    if (n == kLanes)
        store(p, x);
    else
        store_part(p, x, n);
}

// Calls body with a number in [1, kMost] as a constant, for kernels whose sums stay in registers.
template <int kMost, class Body>
inline void with_rows(int64_t num_rows, const Body& body) {
    if constexpr (kMost > 1) {
        if (num_rows < kMost) return with_rows<kMost - 1>(num_rows, body);
    }
    body(std::integral_constant<int, kMost>());
}

// Sum and maximum of the lanes, halves onto halves: the same order always.
inline float hsum(vf x) {
#if defined(__AVX512F__)  // GCC 12 makes a loop through memory of the one below
    return _mm512_reduce_add_ps((__m512)x);
#else
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
#endif
}
inline float hmax(vf x) {
    float out = x[0];
    for (int i = 1; i < kLanes; i++) out = x[i] > out ? x[i] : out;
    return out;
}

#if defined(__AVX512F__)
// 32 bytes from `low`, then 32 from `high`. The second load leaves half of a register as it is: where memory is inserted, a shuffle
// does it. (Half a register more is read than used: memory before `high` must be there, or that takes thousands of cycles.)
QUIRE_INLINE __m512i two_halves(const void* low, const void* high) {
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(low)));
    return _mm512_mask_loadu_epi64(first, 0xf0, static_cast<const uint8_t*>(high) - 32);
}
#endif

// x as a result that is rounded by itself: the compiler neither fuses it into the next operation nor reorders past it.
// Where two of its choices would round differently, the same value could come out differently in two places.
template <class V>
inline V plain(V x) {
#if defined(__x86_64__) && !defined(QUIRE_EMULATE_AVX512)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#else
    asm("" : "+m"(x));
#endif
    return x;
}

inline vf round_nearest(vf x) {  // |x| < 2^22
    const vf magic = splat(12582912.0f);
    return plain(x + magic) - magic;
}

// To the nearest integer, ties to even.
inline vi nearest(vf x) {  // |x| < 2^22
#if defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (vi)_mm256_cvtps_epi32((__m256)x);
#else
    return __builtin_convertvector(round_nearest(x), vi);
#endif
}

// e^x = y * 2^n, for -87.33 <= x <= 88.72; y is within 1 ulp or so of the true value. (Cephes' polynomial.)
inline vf split_exp(vf x, vf& n) {
    n = round_nearest(x * 1.44269504088896341f);
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * (r * r) + r + 1.0f;
}

// e^x; 0 below -87.3, inf above 88.7; e^0 is exactly 1.
inline vf exp(vf x) {
    vi under = x < splat(-87.33f), over = x > splat(88.72f);
    vf n, y = split_exp(min(max(x, splat(-87.33f)), splat(88.72f)), n);
    vi k = __builtin_convertvector(n, vi);
    // In two steps, as 2^128 is no float.
    vi half = k >> 1;
    y = y * as_float((half + 127) << 23) * as_float((k - half + 127) << 23);
    y = select(under, vf{}, y);
    y = select(over, splat(__builtin_inff()), y);
    return select(x != x, x, y);
}
// The same in half of the operations, for x <= 0.
inline vf exp_below_0(vf x) {
    vf n, y = split_exp(max(splat(-87.33f), x), n);  // NaN stays NaN
    return select(x < splat(-87.33f), vf{}, y * as_float((nearest(n) + 127) << 23));
}
// 2^r = 1 + r * (...), for |r| <= 1/2, to 1e-7 of its size: nearest to it among such polynomials, the highest power first.
constexpr float kPowerOf2[] = {1.3264727e-3f, 9.6715130e-3f, 5.5507336e-2f, 2.4022242e-1f, 6.9314700e-1f, 1.0f};
// 2^x for x <= 0, to 2e-7, in two thirds of the operations; 2^0 is exactly 1, and at -127 and below it is 0.
inline vf exp2_below_0(vf x) {
    const vf magic = splat(12582912.0f);
    x = max(splat(-127.0f), x);  // NaN stays NaN
    const vf n = plain(x + magic), r = x - (n - magic);
    vf p = splat(kPowerOf2[0]);
    for (int i = 1; i < 6; i++) p = p * r + kPowerOf2[i];
    return as_float(as_int(p) + (as_int(n) << 23));  // the integer is n's lowest bits, to be added to the exponent
}

inline vf tanh(vf x) {
    vf a = max(x, -x);
    vf e = exp(a * -2.0f);
    vf big = (1.0f - e) / (1.0f + e);
    // Near 0 the difference above cancels: the odd series.
    vf s = x * x;
    vf small = x + x * s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f)));
    vf signed_big = select(x < vf{}, -big, big);
    return select(a < splat(0.25f), small, signed_big);
}

// Error function: Abramowitz and Stegun 7.1.26 away from 0 (absolute error 1.5e-7), the series near it.
inline vf erf(vf x) {
    vf a = max(x, -x);
    vf t = 1.0f / (1.0f + 0.3275911f * a);
    vf poly = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    vf big = 1.0f - poly * exp(-a * a);
    vf s = x * x;
    vf small = x * 1.12837916709551f *
               (1.0f + s * (-0.333333333f + s * (0.1f + s * (-0.0238095238f + s * (4.62962963e-3f + s * -7.57575758e-4f)))));
    vf signed_big = select(x < vf{}, -big, big);
    return select(a < splat(0.5f), small, signed_big);
}

}  // namespace quire::QUIRE_NS
