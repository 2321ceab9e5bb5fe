// What stands between a merged projection and attention: norms of heads, rotation by position, the write to the cache.
#pragma once

#include "lora.h"
#include "norm.h"
#include "operation.h"
#include "pack.h"
#include "transpose.h"

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
    int64_t rotary_dim, queries_ahead;  // where queries' table begins, so many numbers after that of keys; 0: they have the same
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

// A token: its row of qkv, its place in the cache, and what is the same for all its heads.
template <class T>
struct TokenRow {
    T* row;
    uint8_t* block;
    int64_t offset;       // within the block
    const float* angles;  // of its keys, or null
    const T* given;       // a virtual token's keys and values, or null
};

template <class T>
inline TokenRow<T> token_row(const PrepareArgs& a, int64_t t) {
    const CacheShape& shape = a.cache_shape;
    const int64_t slot = a.step->slots[t], position = a.step->positions[t];
    return {static_cast<T*>(a.qkv) + t * a.qkv_stride, a.cache + slot / shape.block_size * shape.block_bytes(), slot % shape.block_size,
            a.cos_sin ? a.cos_sin + position * a.rotary_dim : nullptr,
            a.prefix ? a.prefix->virtual_row<T>(t, position, 2 * shape.num_kv_heads * shape.head_dim) : nullptr};
}

// Where a head's keys or values are written.
struct HeadPlace {
    uint8_t* head;
    int64_t offset;  // of the token
    bool by_feature;
};

// A head of a token: norms and rotates queries, in place, and keys, and writes keys and values.
template <class T>
QUIRE_INLINE void prepare_head(const PrepareArgs& a, const TokenRow<T>& token, int64_t h, HeadPlace place) {
    const CacheShape& shape = a.cache_shape;
    const int64_t dim = shape.head_dim;
    const bool is_query = h < a.num_heads, is_value = h >= a.num_heads + shape.num_kv_heads;
    const void* weight = is_query ? a.q_norm : is_value ? nullptr : a.k_norm;
    T* head = token.row + h * dim;
    alignas(64) float x[kMaxHeadDim];
    if (token.given && !is_query) {
        const T* given = token.given + (h - a.num_heads) * dim;
        for_vectors(dim, [&](int64_t i, int n) { store_n(x + i, load_n(given + i, n), n); });
    } else {
        if (!weight && !token.angles && is_query) return;
        if (weight)
            norm_row(head, x, dim, {weight, nullptr, a.eps, false, a.plus_one});
        else
            for_vectors(dim, [&](int64_t i, int n) { store_n(x + i, load_n(head + i, n), n); });
        if (token.angles && !is_value) rotate(x, token.angles + (is_query ? a.queries_ahead : 0), a.rotary_dim);
    }
    if (is_query) {
        for_vectors(dim, [&](int64_t i, int n) { store_n(head + i, load_n(x + i, n), n); });
        return;
    }
    for (int64_t i = dim; i < shape.padded_dim(); i++) x[i] = 0;
    write_head(x, place.head, shape, place.offset, place.by_feature);
}

// Whether the slots of 16 tokens follow each other in one block.
inline bool follow_each_other(const PrepareArgs& a, int64_t first) {
    const int64_t slot = a.step->slots[first], size = a.cache_shape.block_size;
    if (first + 16 > a.step->num_tokens || slot % size + 16 > size) return false;
    for (int64_t t = 1; t < 16; t++)
        if (a.step->slots[first + t] != slot + t) return false;
    return true;
}

#if defined(__AVX512F__)
// A head of 16 tokens that follow each other, whose keys or values are turned by feature in registers.
template <class T>
QUIRE_ONE_COPY void prepare_turned(const PrepareArgs& a, const TokenRow<T> (&tokens)[16], int64_t h, uint8_t* head) {
    alignas(64) bf16 rows[16 * kMaxHeadDim];
    for (int64_t t = 0; t < 16; t++) prepare_head(a, tokens[t], h, {reinterpret_cast<uint8_t*>(rows), t, false});
    transpose_features(rows, a.cache_shape.padded_dim(), reinterpret_cast<bf16*>(head) + tokens[0].offset, a.cache_shape.block_size);
}
#endif

// Up to 16 tokens, head after head: what is written by feature takes a line for each one, and those of all heads are more than L1 has.
template <class T>
QUIRE_ONE_COPY void prepare_tokens(const PrepareArgs& a, int64_t begin, int64_t count) {
    const CacheShape& shape = a.cache_shape;
    TokenRow<T> tokens[16];
    for (int64_t t = 0; t < count; t++) tokens[t] = token_row<T>(a, begin + t);
    [[maybe_unused]] const bool turns = count == 16 && shape.type == Type::bf16 && follow_each_other(a, begin);
    for (int64_t h = 0; h < a.num_heads + 2 * shape.num_kv_heads; h++) {
        const bool is_value = h >= a.num_heads + shape.num_kv_heads, by_feature = h >= a.num_heads && is_value == values_by_feature(a.type);
        const int64_t head = (h - a.num_heads) * shape.head_bytes();
#if defined(__AVX512F__)
        if (turns && by_feature) {
            prepare_turned(a, tokens, h, tokens[0].block + head);
            continue;
        }
#endif
        for (int64_t t = 0; t < count; t++) prepare_head(a, tokens[t], h, {tokens[t].block + head, tokens[t].offset, by_feature});
    }
}

template <class T>
void prepare_rows(const PrepareArgs& a, Context& context) {
    // Few tokens are one a task: each is a decode's, whose place in the cache has to be fetched first.
    const int64_t num_tokens = a.step->num_tokens, tokens = num_tokens < 64 ? 1 : 16;
    context.pool.run(divide_up(num_tokens, tokens), [&](int64_t task, int) {
        const int64_t begin = task * tokens;
        prepare_tokens<T>(a, begin, num_tokens - begin < tokens ? num_tokens - begin : tokens);
    });
}

struct PrepareSpec {  // in place
    HeadSpec heads;
    const void *q_norm, *k_norm;
    const float* cos_sin;
    int64_t rotary_dim, queries_ahead;
    const LoraLayer* prefix;
    float eps;
    int32_t plus_one;
};

inline void prepare(const PrepareSpec& s, const Operands& o, Context& context) {
    const PrepareArgs args{o.x.data, o.x.stride, s.heads.num_heads, s.heads.cache_shape(o), s.heads.cache(o), s.q_norm, s.k_norm,
                           s.eps, s.plus_one != 0, s.cos_sin, s.rotary_dim, s.queries_ahead, s.heads.step(o), o.x.type, s.prefix};
    args.type == Type::f32 ? prepare_rows<float>(args, context) : prepare_rows<bf16>(args, context);
}

QUIRE_OPERATION(prepare, PrepareSpec, QUIRE_FIELD(heads), QUIRE_FIELD(q_norm), QUIRE_FIELD(k_norm), QUIRE_FIELD(cos_sin),
                QUIRE_FIELD(rotary_dim), QUIRE_FIELD(queries_ahead), QUIRE_FIELD(prefix), QUIRE_FIELD(eps), QUIRE_FIELD(plus_one));

}  // namespace quire::QUIRE_NS
