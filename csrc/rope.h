// What stands between a merged projection and attention: norms of heads, rotation by position, the write to the cache.
#pragma once

#include "lora.h"
#include "norm.h"
#include "operation.h"
#include "pack.h"
#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace quire::QUIRE_NS {

constexpr int64_t kMaxHeadDim = 512;

struct PrepareArgs {  // norm and rotate queries and keys of qkv [T, (Hq + 2 Hkv) * D] in place; write keys and values
    void* qkv;
    int64_t qkv_stride, num_heads;
    CacheShape cache_shape;
    uint8_t* cache;
    const void *q_norm, *k_norm;  // [D] or null
    float eps;
    bool plus_one;  // norms multiply with 1 + weight
    const float* cos_sin;  // [positions, rotary_dim]: cosines, then sines; null: no rotation
    int64_t rotary_dim;
    const StepArgs* step;
    Type type;
    const LoraLayer* prefix;  // keys and values of virtual tokens, as they are to be in the cache; or null
};

// Which of keys and values a cache holds by feature; see CacheShape.
#if defined(__AMX_BF16__)
inline bool values_by_feature(Type activations) { return activations == Type::bf16; }
#else
inline bool values_by_feature(Type) { return false; }
#endif

// One token's keys or values of one head into its place in a block; x is padded with zeros.
template <class T>
inline void write_elements(const float* x, uint8_t* head, const CacheShape& shape, int64_t offset, bool by_feature) {
    T* out = reinterpret_cast<T*>(head);
    const int64_t size = shape.padded_dim();
    if (!by_feature) {
        for (int64_t i = 0; i < size; i += kLanes) store(out + offset * size + i, load(x + i));
        return;
    }
    alignas(64) T row[kMaxHeadDim];
    for (int64_t i = 0; i < size; i += kLanes) store(row + i, load(x + i));
    for (int64_t i = 0; i < size; i++) out[i * shape.block_size + offset] = row[i];
}

inline void write_i8(const float* x, uint8_t* head, const CacheShape& shape, int64_t offset, bool by_feature) {
    const int64_t size = shape.padded_dim();
    const float most = largest_magnitude(x, size), inverse = most > 0 ? 127.0f / most : 0.0f;
    int8_t* out = reinterpret_cast<int8_t*>(head);
    for (int64_t i = 0; i < size; i += kLanes) {
        vf bounded = min(max(round_nearest(load(x + i) * inverse), splat(-127.0f)), splat(127.0f));
        vi q = __builtin_convertvector(bounded, vi);
        for (int j = 0; j < kLanes; j++)
            out[by_feature ? (i + j) * shape.block_size + offset : offset * size + i + j] = int8_t(q[j]);
    }
    // NaN or infinity among the features makes the scale, and so the whole token, what it should be: NaN.
    reinterpret_cast<float*>(head + shape.block_size * size)[offset] = most / 127.0f;
}

inline void write_head(const float* x, uint8_t* head, const CacheShape& shape, int64_t offset, bool by_feature) {
    if (shape.type == Type::f32)
        write_elements<float>(x, head, shape, offset, by_feature);
    else if (shape.type == Type::bf16)
        write_elements<bf16>(x, head, shape, offset, by_feature);
    else
        write_i8(x, head, shape, offset, by_feature);
}

// Feature i and i + R/2 of a head turn by the angle of the position (arXiv:2104.09864).
inline void rotate(float* x, const float* cos_sin, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    for_vectors(half, [&](int64_t i, int n) {
        vf c = load_n(cos_sin + i, n), s = load_n(cos_sin + half + i, n);
        vf a = load_n(x + i, n), b = load_n(x + half + i, n);
        store_n(x + i, a * c - b * s, n);
        store_n(x + half + i, b * c + a * s, n);
    });
}

// One token: norms and rotates its queries, in place, and its keys, and writes keys and values to the cache.
template <class T>
QUIRE_ONE_COPY void prepare_row(const PrepareArgs& a, int64_t t, bool write_values) {
    const CacheShape& shape = a.cache_shape;
    const int64_t dim = shape.head_dim, num_kv = shape.num_kv_heads;
    const bool feature_values = values_by_feature(a.type);
    T* row = static_cast<T*>(a.qkv) + t * a.qkv_stride;
    const int64_t slot = a.step->slots[t], offset = slot % shape.block_size;
    uint8_t* block = a.cache + slot / shape.block_size * shape.block_bytes();
    const float* angles = a.cos_sin ? a.cos_sin + a.step->positions[t] * a.rotary_dim : nullptr;
    const T* from = a.prefix ? a.prefix->virtual_row<T>(t, a.step->positions[t], 2 * num_kv * dim) : nullptr;
    alignas(64) float x[kMaxHeadDim];
    const int64_t num_heads = a.num_heads + num_kv + (write_values || from ? num_kv : 0);
    for (int64_t h = 0; h < num_heads; h++, row += dim) {
        const bool is_value = h >= a.num_heads + num_kv, is_key = h >= a.num_heads && !is_value;
        if (from && h >= a.num_heads) {
            const T* given = from + (h - a.num_heads) * dim;
            for_vectors(dim, [&](int64_t i, int n) { store_n(x + i, load_n(given + i, n), n); });
            for (int64_t i = dim; i < shape.padded_dim(); i++) x[i] = 0;
            write_head(x, block + (h - a.num_heads) * shape.head_bytes(), shape, offset, is_value == feature_values);
            continue;
        }
        const void* weight = is_value ? nullptr : is_key ? a.k_norm : a.q_norm;
        if (!weight && !angles && h < a.num_heads) continue;
        if (weight)
            norm_row(row, x, dim, {weight, nullptr, a.eps, false, a.plus_one});
        else
            for_vectors(dim, [&](int64_t i, int n) { store_n(x + i, load_n(row + i, n), n); });
        if (angles && !is_value) rotate(x, angles, a.rotary_dim);
        if (h < a.num_heads) {
            for_vectors(dim, [&](int64_t i, int n) { store_n(row + i, load_n(x + i, n), n); });
            continue;
        }
        for (int64_t i = dim; i < shape.padded_dim(); i++) x[i] = 0;
        write_head(x, block + (h - a.num_heads) * shape.head_bytes(), shape, offset, is_value == feature_values);
    }
}

#if defined(__AMX_BF16__)
// The values of 16 tokens whose slots follow each other in one block, turned by feature in registers.
inline void write_values_of_16(const PrepareArgs& a, int64_t first) {
    const CacheShape& shape = a.cache_shape;
    const int64_t dim = shape.head_dim, padded = shape.padded_dim(), slot = a.step->slots[first];
    uint8_t* block = a.cache + slot / shape.block_size * shape.block_bytes();
    alignas(64) bf16 rows[16 * kMaxHeadDim];
    if (padded > dim) std::memset(rows, 0, sizeof(bf16) * 16 * padded);
    for (int64_t h = 0; h < shape.num_kv_heads; h++) {
        for (int64_t t = 0; t < 16; t++) {
            const bf16* from = static_cast<const bf16*>(a.qkv) + (first + t) * a.qkv_stride + (a.num_heads + shape.num_kv_heads + h) * dim;
            for_vectors(dim, [&](int64_t i, int n) { store_n(rows + t * padded + i, load_n(from + i, n), n); });
        }
        bf16* out = reinterpret_cast<bf16*>(block + (shape.num_kv_heads + h) * shape.head_bytes());
        transpose_features(rows, padded, out + slot % shape.block_size, shape.block_size);
    }
}

inline bool follow_each_other(const PrepareArgs& a, int64_t first) {
    const int64_t slot = a.step->slots[first], size = a.cache_shape.block_size;
    if (first + 16 > a.step->num_tokens || slot % size + 16 > size) return false;
    for (int64_t t = 1; t < 16; t++)
        if (a.step->slots[first + t] != slot + t) return false;
    return true;
}
#endif

template <class T>
void prepare_rows(const PrepareArgs& a, Context& context) {
    // Few tokens are one a task: each is a decode's, whose place in the cache has to be fetched first.
    const int64_t tokens = a.step->num_tokens < 64 ? 1 : 16;
    context.pool.run(divide_up(a.step->num_tokens, tokens), [&](int64_t task, int) {
        const int64_t begin = task * tokens, end = begin + tokens < a.step->num_tokens ? begin + tokens : a.step->num_tokens;
        bool values_done = false;
#if defined(__AMX_BF16__)
        values_done = tokens == 16 && a.type == Type::bf16 && a.cache_shape.type == Type::bf16 && follow_each_other(a, begin);
        if (values_done) write_values_of_16(a, begin);
#endif
        for (int64_t t = begin; t < end; t++) prepare_row<T>(a, t, !values_done);
    });
}

struct PrepareSpec {  // in place
    HeadSpec heads;
    const void *q_norm, *k_norm;
    const float* cos_sin;
    int64_t rotary_dim;
    const LoraLayer* prefix;
    float eps;
    int32_t plus_one;
};

inline void prepare(const PrepareSpec& s, const Operands& o, Context& context) {
    const PrepareArgs args{o.x.data, o.x.stride, s.heads.num_heads, s.heads.cache_shape(o), s.heads.cache(o), s.q_norm, s.k_norm,
                           s.eps, s.plus_one != 0, s.cos_sin, s.rotary_dim, s.heads.step(o), o.x.type, s.prefix};
    args.type == Type::f32 ? prepare_rows<float>(args, context) : prepare_rows<bf16>(args, context);
}

QUIRE_OPERATION(prepare, PrepareSpec, QUIRE_FIELD(heads), QUIRE_FIELD(q_norm), QUIRE_FIELD(k_norm), QUIRE_FIELD(cos_sin),
                QUIRE_FIELD(rotary_dim), QUIRE_FIELD(prefix), QUIRE_FIELD(eps), QUIRE_FIELD(plus_one));

}  // namespace quire::QUIRE_NS
