// AVX-512 in plain C++, for CPUs that have AVX2 only: the levels above it then run there, slowly, for their tests.
//
// With -DQUIRE_EMULATE_AVX512=ON this comes before all else in each of those levels (CMakeLists.txt), which is compiled for AVX2, and told
// here that it has more. The functions hide the compiler's own of these names, in the kernels' namespace. They give the bits of the hardware (Intel's
// "Intrinsics Guide"), but for signals of floats; what a mask leaves out is not touched.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#undef _mm512_setr_ps
#undef _mm512_setr_epi32
#undef _mm512_setr_epi64
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#define __AVX512VNNI__ 1
#if defined(QUIRE_EMULATE_BF16)
#define __AVX512BF16__ 1
#endif
#if defined(QUIRE_EMULATE_AMX)
#define __AVX512VBMI__ 1
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#endif

namespace quire::QUIRE_NS {

namespace emulated {

template <class T, int kBytes = 64>
struct Lanes {
    static constexpr int kCount = kBytes / int(sizeof(T));
    T at[kCount];

    Lanes() = default;
    template <class V>
    explicit Lanes(const V& from) {
        static_assert(sizeof from == sizeof at);
        std::memcpy(at, &from, sizeof at);
    }
    template <class V>
    V as() const {
        V out;
        static_assert(sizeof out == sizeof at);
        std::memcpy(&out, at, sizeof at);
        return out;
    }
};
// Lane by lane: body(i) -> a T.
template <class T, class V, class Body>
inline V each(const Body& body) {
    Lanes<T, int(sizeof(V))> out;
    for (int i = 0; i < out.kCount; i++) out.at[i] = T(body(i));
    return out.template as<V>();
}
inline __m256 half(const __m512& x, int i) {
    __m256 out;
    std::memcpy(&out, reinterpret_cast<const char*>(&x) + 32 * i, 32);
    return out;
}
inline __m256i half(const __m512i& x, int i) {
    __m256i out;
    std::memcpy(&out, reinterpret_cast<const char*>(&x) + 32 * i, 32);
    return out;
}
inline __m512 joined(__m256 low, __m256 high) {
    const __m256 both[] = {low, high};
    __m512 out;
    std::memcpy(&out, both, 64);
    return out;
}
inline __m512i joined(__m256i low, __m256i high) {
    const __m256i both[] = {low, high};
    __m512i out;
    std::memcpy(&out, both, 64);
    return out;
}
// By the instruction of 256 bits that does the same.
template <class Body, class... Vs>
inline auto halves(const Body& body, const Vs&... vs) {
    return joined(body(half(vs, 0)...), body(half(vs, 1)...));
}
template <class T, class V>
inline V load(const void* p, uint64_t there, V other = V{}) {
    Lanes<T, int(sizeof(V))> out(other);
    for (int i = 0; i < out.kCount; i++)
        if (there >> i & 1) std::memcpy(&out.at[i], static_cast<const T*>(p) + i, sizeof(T));
    return out.template as<V>();
}
template <class T, class V>
inline void store(void* p, uint64_t there, const V& x) {
    const Lanes<T, int(sizeof(V))> from(x);
    for (int i = 0; i < from.kCount; i++)
        if (there >> i & 1) std::memcpy(static_cast<T*>(p) + i, &from.at[i], sizeof(T));
}
template <class T, class V>
inline V select(uint64_t mask, V yes, V no) {
    const Lanes<T> a(yes), b(no);
    return each<T, V>([&](int i) { return mask >> i & 1 ? a.at[i] : b.at[i]; });
}
template <class T, class V, class Body>
inline uint64_t mask_of(V x, V y, const Body& body) {
    const Lanes<T> a(x), b(y);
    uint64_t mask = 0;
    for (int i = 0; i < a.kCount; i++) mask |= uint64_t(body(a.at[i], b.at[i])) << i;
    return mask;
}
// Of two vectors' lanes, one after the other, those that the indices name.
template <class T, class V>
inline V permute(V low, __m512i indices, V high) {
    using Index = std::conditional_t<sizeof(T) == 1, uint8_t, std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;
    const Lanes<T> a(low), b(high);
    const Lanes<Index> from(indices);
    constexpr int kCount = Lanes<T>::kCount;
    return each<T, V>([&](int i) { return (from.at[i] & kCount ? b : a).at[from.at[i] & (kCount - 1)]; });
}
template <class V>
inline V quarters(V low, V high, int choice) {
    struct Quarter { uint64_t at[2]; };
    const Lanes<Quarter> a(low), b(high);
    return each<Quarter, V>([&](int i) { return (i < 2 ? a : b).at[choice >> 2 * i & 3]; });
}
template <class From, class To, class V>
inline auto widened(V x) {
    const Lanes<From, int(sizeof(V))> from(x);
    return each<To, __m512i>([&](int i) { return from.at[i]; });
}
// To the nearest, ties to even; denormal numbers are 0.
inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return uint16_t(bits >> 16 | 0x40);
    if (!(bits & 0x7f800000)) return uint16_t(bits >> 16 & 0x8000);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t half) {
    const uint32_t bits = half & 0x7f80 ? uint32_t(half) << 16 : uint32_t(half & 0x8000) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
template <class V>
inline V repeated(const V&, const void* part, int bytes) {
    V out;
    for (int i = 0; i < 64; i += bytes) std::memcpy(reinterpret_cast<char*>(&out) + i, part, bytes);
    return out;
}

}  // namespace emulated

// Memory.
inline __m512 _mm512_loadu_ps(const void* p) { return emulated::load<float, __m512>(p, ~0ull); }
inline __m512 _mm512_load_ps(const void* p) { return emulated::load<float, __m512>(p, ~0ull); }
inline __m512i _mm512_loadu_si512(const void* p) { return emulated::load<int64_t, __m512i>(p, ~0ull); }
inline __m512i _mm512_load_si512(const void* p) { return emulated::load<int64_t, __m512i>(p, ~0ull); }
inline __m512 _mm512_maskz_loadu_ps(__mmask16 there, const void* p) { return emulated::load<float, __m512>(p, there); }
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 there, const void* p) { return emulated::load<int16_t, __m512i>(p, there); }
inline __m256i _mm256_maskz_loadu_epi16(__mmask16 there, const void* p) { return emulated::load<int16_t, __m256i>(p, there); }
inline __m128i _mm_maskz_loadu_epi8(__mmask16 there, const void* p) { return emulated::load<int8_t, __m128i>(p, there); }
inline __m512i _mm512_mask_loadu_epi64(__m512i other, __mmask8 there, const void* p) { return emulated::load<int64_t>(p, there, other); }
inline void _mm512_storeu_ps(void* p, __m512 x) { emulated::store<float>(p, ~0ull, x); }
inline void _mm512_store_ps(void* p, __m512 x) { emulated::store<float>(p, ~0ull, x); }
inline void _mm512_storeu_si512(void* p, __m512i x) { emulated::store<int64_t>(p, ~0ull, x); }
inline void _mm512_store_si512(void* p, __m512i x) { emulated::store<int64_t>(p, ~0ull, x); }
inline void _mm512_mask_storeu_ps(void* p, __mmask16 there, __m512 x) { emulated::store<float>(p, there, x); }
inline void _mm512_mask_storeu_epi32(void* p, __mmask16 there, __m512i x) { emulated::store<int32_t>(p, there, x); }
inline void _mm512_mask_storeu_epi16(void* p, __mmask32 there, __m512i x) { emulated::store<int16_t>(p, there, x); }

// The same in all lanes, lanes one by one, and parts again and again.
inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512 _mm512_set1_ps(float x) { return emulated::each<float, __m512>([&](int) { return x; }); }
inline __m512i _mm512_set1_epi8(char x) { return emulated::each<char, __m512i>([&](int) { return x; }); }
inline __m512i _mm512_set1_epi16(short x) { return emulated::each<short, __m512i>([&](int) { return x; }); }
inline __m512i _mm512_set1_epi32(int x) { return emulated::each<int, __m512i>([&](int) { return x; }); }
inline __m512i _mm512_set1_epi64(long long x) { return emulated::each<long long, __m512i>([&](int) { return x; }); }
template <class... Xs>
inline __m512 _mm512_setr_ps(Xs... xs) {
    const float all[] = {float(xs)...};
    return _mm512_loadu_ps(all);
}
template <class... Xs>
inline __m512i _mm512_setr_epi32(Xs... xs) {
    const int32_t all[] = {int32_t(xs)...};
    static_assert(sizeof all == 64);
    return _mm512_loadu_si512(all);
}
template <class... Xs>
inline __m512i _mm512_setr_epi64(Xs... xs) {
    const int64_t all[] = {int64_t(xs)...};
    static_assert(sizeof all == 64);
    return _mm512_loadu_si512(all);
}
inline __m512 _mm512_broadcast_f32x4(__m128 x) { return emulated::repeated(__m512{}, &x, 16); }
inline __m512i _mm512_broadcast_i32x4(__m128i x) { return emulated::repeated(__m512i{}, &x, 16); }
inline __m512i _mm512_broadcast_i64x4(__m256i x) { return emulated::repeated(__m512i{}, &x, 32); }
inline __m512i _mm512_inserti64x4(__m512i x, __m256i part, int where) {
    std::memcpy(reinterpret_cast<char*>(&x) + 32 * where, &part, 32);
    return x;
}
inline __m512i _mm512_castsi256_si512(__m256i x) { return _mm512_inserti64x4(_mm512_set1_epi8(0x5a), x, 0); }  // the rest may be anything
inline __m512 _mm512_castsi512_ps(__m512i x) { return (__m512)x; }
inline __m512i _mm512_castps_si512(__m512 x) { return (__m512i)x; }
inline __m512d _mm512_castps_pd(__m512 x) { return (__m512d)x; }
inline __m512 _mm512_castpd_ps(__m512d x) { return (__m512)x; }
inline float _mm512_cvtss_f32(__m512 x) { return x[0]; }

// Floats.
#define QUIRE_BY_HALVES(name, half, V) \
    inline V name(V a, V b) { return emulated::halves([](auto x, auto y) { return half(x, y); }, a, b); }
QUIRE_BY_HALVES(_mm512_add_ps, _mm256_add_ps, __m512)
QUIRE_BY_HALVES(_mm512_sub_ps, _mm256_sub_ps, __m512)
QUIRE_BY_HALVES(_mm512_mul_ps, _mm256_mul_ps, __m512)
QUIRE_BY_HALVES(_mm512_max_ps, _mm256_max_ps, __m512)
QUIRE_BY_HALVES(_mm512_min_ps, _mm256_min_ps, __m512)
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return emulated::halves([](__m256 x, __m256 y, __m256 z) { return _mm256_fmadd_ps(x, y, z); }, a, b, c);
}
inline __m512 _mm512_fmsub_ps(__m512 a, __m512 b, __m512 c) {
    return emulated::halves([](__m256 x, __m256 y, __m256 z) { return _mm256_fmsub_ps(x, y, z); }, a, b, c);
}
inline __m512 _mm512_roundscale_ps(__m512 x, int) {  // to integers, the nearest ones
    return emulated::halves([](__m256 half) { return _mm256_round_ps(half, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }, x);
}
inline __m512 _mm512_maskz_mul_ps(__mmask16 mask, __m512 a, __m512 b) { return emulated::select<float>(mask, _mm512_mul_ps(a, b), __m512{}); }
inline __m512 _mm512_mask_max_ps(__m512 other, __mmask16 mask, __m512 a, __m512 b) { return emulated::select<float>(mask, _mm512_max_ps(a, b), other); }
inline __m512 _mm512_mask_mov_ps(__m512 other, __mmask16 mask, __m512 x) { return emulated::select<float>(mask, x, other); }
inline __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 x, __m512 power) {
    return emulated::each<float, __m512>([&](int i) {
        if (!(mask >> i & 1)) return 0.0f;
        if (power[i] != power[i]) return power[i];
        return std::ldexp(x[i], int(std::fmax(-1000.0f, std::fmin(1000.0f, std::floor(power[i])))));
    });
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    return __mmask16(emulated::mask_of<float>(a, b, [&](float x, float y) {
        switch (how) {
            case _CMP_EQ_OQ: return x == y;
            case _CMP_NEQ_UQ: return !(x == y);
            case _CMP_NLT_UQ: return !(x < y);
            default: __builtin_abort();
        }
    }));
}
inline __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 mask, __m512 a, __m512 b, int how) { return mask & _mm512_cmp_ps_mask(a, b, how); }
// Halves onto halves, as compilers do it.
template <class T, class V, class Body>
inline T reduced(V x, const Body& body) {
    emulated::Lanes<T> lanes(x);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) lanes.at[i] = body(lanes.at[i + width], lanes.at[i]);
    return lanes.at[0];
}
inline float _mm512_reduce_add_ps(__m512 x) { return reduced<float>(x, [](float a, float b) { return a + b; }); }
inline float _mm512_reduce_max_ps(__m512 x) { return reduced<float>(x, [](float a, float b) { return a > b ? a : b; }); }
inline int _mm512_reduce_max_epi32(__m512i x) { return reduced<int32_t>(x, [](int a, int b) { return a > b ? a : b; }); }
inline int _mm512_reduce_min_epi32(__m512i x) { return reduced<int32_t>(x, [](int a, int b) { return a < b ? a : b; }); }

// Integers.
QUIRE_BY_HALVES(_mm512_add_epi32, _mm256_add_epi32, __m512i)
QUIRE_BY_HALVES(_mm512_sub_epi32, _mm256_sub_epi32, __m512i)
QUIRE_BY_HALVES(_mm512_sub_epi16, _mm256_sub_epi16, __m512i)
QUIRE_BY_HALVES(_mm512_mullo_epi32, _mm256_mullo_epi32, __m512i)
QUIRE_BY_HALVES(_mm512_mulhi_epu16, _mm256_mulhi_epu16, __m512i)
QUIRE_BY_HALVES(_mm512_max_epi32, _mm256_max_epi32, __m512i)
QUIRE_BY_HALVES(_mm512_max_epi16, _mm256_max_epi16, __m512i)
QUIRE_BY_HALVES(_mm512_and_si512, _mm256_and_si256, __m512i)
QUIRE_BY_HALVES(_mm512_or_si512, _mm256_or_si256, __m512i)
QUIRE_BY_HALVES(_mm512_andnot_si512, _mm256_andnot_si256, __m512i)
QUIRE_BY_HALVES(_mm512_shuffle_epi8, _mm256_shuffle_epi8, __m512i)
QUIRE_BY_HALVES(_mm512_unpacklo_epi8, _mm256_unpacklo_epi8, __m512i)
QUIRE_BY_HALVES(_mm512_unpackhi_epi8, _mm256_unpackhi_epi8, __m512i)
QUIRE_BY_HALVES(_mm512_unpacklo_epi16, _mm256_unpacklo_epi16, __m512i)
QUIRE_BY_HALVES(_mm512_unpackhi_epi16, _mm256_unpackhi_epi16, __m512i)
QUIRE_BY_HALVES(_mm512_unpacklo_ps, _mm256_unpacklo_ps, __m512)
QUIRE_BY_HALVES(_mm512_unpackhi_ps, _mm256_unpackhi_ps, __m512)
#undef QUIRE_BY_HALVES
inline __m512i _mm512_abs_epi8(__m512i x) { return emulated::halves([](__m256i half) { return _mm256_abs_epi8(half); }, x); }
inline __m512i _mm512_slli_epi32(__m512i x, unsigned bits) { return emulated::halves([&](__m256i half) { return _mm256_slli_epi32(half, int(bits)); }, x); }
inline __m512i _mm512_srli_epi32(__m512i x, unsigned bits) { return emulated::halves([&](__m256i half) { return _mm256_srli_epi32(half, int(bits)); }, x); }
inline __m512i _mm512_slli_epi16(__m512i x, unsigned bits) { return emulated::halves([&](__m256i half) { return _mm256_slli_epi16(half, int(bits)); }, x); }
inline __m512i _mm512_srli_epi16(__m512i x, unsigned bits) { return emulated::halves([&](__m256i half) { return _mm256_srli_epi16(half, int(bits)); }, x); }
inline __m512i _mm512_mullo_epi64(__m512i a, __m512i b) {
    return emulated::each<uint64_t, __m512i>([&](int i) { return uint64_t(a[i]) * uint64_t(b[i]); });
}
inline __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
    __m512i out = {};
    for (int i = 0; i < 8; i++)
        if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return out;
}
inline __m512i _mm512_mask_mov_epi32(__m512i other, __mmask16 mask, __m512i x) { return emulated::select<int32_t>(mask, x, other); }
inline __m512i _mm512_mask_blend_epi16(__mmask32 mask, __m512i other, __m512i x) { return emulated::select<int16_t>(mask, x, other); }
inline __mmask16 _mm512_cmpeq_epi32_mask(__m512i a, __m512i b) {
    return __mmask16(emulated::mask_of<int32_t>(a, b, [](int x, int y) { return x == y; }));
}
inline __mmask16 _mm512_cmple_epi32_mask(__m512i a, __m512i b) {
    return __mmask16(emulated::mask_of<int32_t>(a, b, [](int x, int y) { return x <= y; }));
}

// Lanes elsewhere.
inline __m512 _mm512_permutexvar_ps(__m512i indices, __m512 x) { return emulated::permute<float>(x, indices, x); }
inline __m512i _mm512_permutexvar_epi16(__m512i indices, __m512i x) { return emulated::permute<int16_t>(x, indices, x); }
inline __m512i _mm512_permutexvar_epi8(__m512i indices, __m512i x) { return emulated::permute<int8_t>(x, indices, x); }
inline __m512 _mm512_permutex2var_ps(__m512 low, __m512i indices, __m512 high) { return emulated::permute<float>(low, indices, high); }
inline __m512i _mm512_permutex2var_epi8(__m512i low, __m512i indices, __m512i high) { return emulated::permute<int8_t>(low, indices, high); }
inline __m512i _mm512_permutex2var_epi16(__m512i low, __m512i indices, __m512i high) { return emulated::permute<int16_t>(low, indices, high); }
inline __m512i _mm512_permutex2var_epi64(__m512i low, __m512i indices, __m512i high) { return emulated::permute<int64_t>(low, indices, high); }
inline __m512 _mm512_shuffle_f32x4(__m512 low, __m512 high, int choice) { return emulated::quarters(low, high, choice); }
inline __m512i _mm512_shuffle_i64x2(__m512i low, __m512i high, int choice) { return emulated::quarters(low, high, choice); }
inline __m512 _mm512_shuffle_ps(__m512 low, __m512 high, int choice) {
    return emulated::each<float, __m512>([&](int i) { return (i % 4 < 2 ? low : high)[i / 4 * 4 + (choice >> i % 4 * 2 & 3)]; });
}
inline __m512d _mm512_unpacklo_pd(__m512d a, __m512d b) {
    return emulated::each<double, __m512d>([&](int i) { return (i % 2 ? b : a)[i / 2 * 2]; });
}
inline __m512d _mm512_unpackhi_pd(__m512d a, __m512d b) {
    return emulated::each<double, __m512d>([&](int i) { return (i % 2 ? b : a)[i / 2 * 2 + 1]; });
}

// From one type to another.
inline __m512i _mm512_cvtps_epi32(__m512 x) { return emulated::halves([](__m256 half) { return _mm256_cvtps_epi32(half); }, x); }
inline __m512 _mm512_cvtepi32_ps(__m512i x) { return emulated::halves([](__m256i half) { return _mm256_cvtepi32_ps(half); }, x); }
inline __m512i _mm512_cvtepi8_epi16(__m256i x) { return emulated::widened<int8_t, int16_t>(x); }
inline __m512i _mm512_cvtepi8_epi32(__m128i x) { return emulated::widened<int8_t, int32_t>(x); }
inline __m512i _mm512_cvtepu16_epi32(__m256i x) { return emulated::widened<uint16_t, int32_t>(x); }
inline __m256i _mm512_cvtepi32_epi16(__m512i x) {
    const emulated::Lanes<int32_t> from(x);
    return emulated::each<int16_t, __m256i>([&](int i) { return from.at[i]; });
}
inline __m512 _mm512_cvtph_ps(__m256i x) {
    return emulated::each<float, __m512>([&](int i) { return _cvtsh_ss(emulated::Lanes<uint16_t, 32>(x).at[i]); });
}
inline __m256bh _mm512_cvtneps_pbh(__m512 x) {
    return emulated::each<uint16_t, __m256bh>([&](int i) { return emulated::to_bf16(x[i]); });
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    return emulated::each<uint16_t, __m512bh>([&](int i) { return emulated::to_bf16(i < 16 ? low[i] : high[i - 16]); });
}

// Sums of products.
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    const emulated::Lanes<uint16_t> x(a), y(b);
    return emulated::each<float, __m512>([&](int i) {
        auto value = [&](const emulated::Lanes<uint16_t>& from, int j) { return emulated::from_bf16(from.at[2 * i + j]); };
        return std::fma(value(x, 0), value(y, 0), std::fma(value(x, 1), value(y, 1), sum[i]));
    });
}
inline __m512i _mm512_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
    return emulated::halves([](__m256i s, __m256i x, __m256i y) { return _mm256_add_epi32(s, _mm256_madd_epi16(x, y)); }, sum, a, b);
}
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {  // of unsigned bytes and signed ones
    const emulated::Lanes<uint32_t> s(sum);
    const emulated::Lanes<uint8_t> x(a);
    const emulated::Lanes<int8_t> y(b);
    return emulated::each<uint32_t, __m512i>([&](int i) {
        uint32_t out = s.at[i];
        for (int j = 4 * i; j < 4 * i + 4; j++) out += uint32_t(x.at[j] * y.at[j]);
        return out;
    });
}

}  // namespace quire::QUIRE_NS
