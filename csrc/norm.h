// RMSNorm and LayerNorm of rows.
#pragma once

#include "operation.h"
#include "rows.h"

namespace quire::QUIRE_NS {

// What a row is multiplied with and shifted by. weight, bias: [size] of the activations' type, or null.
struct NormWeights {
    const void *weight, *bias;
    float eps;
    bool subtract_mean;  // LayerNorm; else RMSNorm
    bool plus_one;       // times 1 + weight, summed in fp32 (Gemma)
};

template <class T>
inline vf weight_at(const NormWeights& w, int64_t i, int n) {
    if (!w.weight) return splat(1.0f);
    const vf weight = load_n(static_cast<const T*>(w.weight) + i, n);
    return w.plus_one ? weight + 1.0f : weight;
}

// x -> (x - mean) / sqrt(variance + eps) * weight + bias, or without the mean and the bias; `out` may be x.
template <class T, class Out>
QUIRE_ONE_COPY void norm_row(const T* x, Out* out, int64_t size, const NormWeights& w) {
    vf mean = vf{};
    if (w.subtract_mean) {
        vf sum = vf{};
        for_vectors(size, [&](int64_t i, int n) { sum += load_n(x + i, n); });
        mean = splat(hsum(sum) / float(size));
    }
    vf squares = vf{};
    for_vectors(size, [&](int64_t i, int n) {
        vf v = load_n(x + i, n) - mean;
        if (n < kLanes && w.subtract_mean)  // the lanes beyond the end hold -mean
            for (int j = n; j < kLanes; j++) v[j] = 0;
        squares += v * v;
    });
    vf factor = splat(1.0f / __builtin_sqrtf(hsum(squares) / float(size) + w.eps));
    for_vectors(size, [&](int64_t i, int n) {
        vf v = (load_n(x + i, n) - mean) * factor * weight_at<T>(w, i, n);
        if (w.bias) v = v + load_n(static_cast<const T*>(w.bias) + i, n);
        store_n(out + i, v, n);
    });
}

struct NormSpec {
    const void *weight, *bias;  // or null
    int64_t size;               // columns
    float eps;
    int32_t subtract_mean, plus_one;
};

template <class T>
void norm_rows(const NormSpec& s, const Operands& o, Context& context) {
    const NormWeights weights{s.weight, s.bias, s.eps, s.subtract_mean != 0, s.plus_one != 0};
    for_rows(o.num_rows, context, [&](int64_t row) { norm_row(o.x.row<const T>(row), o.out.row<T>(row), s.size, weights); });
}

inline void norm(const NormSpec& s, const Operands& o, Context& context) {
    o.out.type == Type::f32 ? norm_rows<float>(s, o, context) : norm_rows<bf16>(s, o, context);
}

QUIRE_OPERATION(norm, NormSpec, QUIRE_FIELD(weight), QUIRE_FIELD(bias), QUIRE_FIELD(size), QUIRE_FIELD(eps),
                QUIRE_FIELD(subtract_mean), QUIRE_FIELD(plus_one));

}  // namespace quire::QUIRE_NS
