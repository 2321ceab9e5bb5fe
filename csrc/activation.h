// The activation functions, gated and plain: of vectors, for the end of a product (linear.h), and of rows.
#pragma once

#include "operation.h"
#include "rows.h"

namespace quire::QUIRE_NS {

inline vf silu(vf x) { return x / (1.0f + exp(-x)); }
inline vf gelu(vf x) { return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f)); }
inline vf gelu_tanh(vf x) { return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x))); }

inline vf relu(vf x) { return select(x < vf{}, vf{}, x); }  // NaN stays

// gpt-oss's gate: one that opens no further than this, and what it opens is held within it on both sides. NaN stays.
constexpr float kOaiLimit = 7.0f, kOaiSlope = 1.702f;
inline vf swiglu_oai(vf x) {
    vf held = select(x > kOaiLimit, splat(kOaiLimit), x);
    return held / (1.0f + exp(-kOaiSlope * held));
}

// The function itself; of a gated one, that of the gate.
template <Epilogue kEpilogue>
inline vf activate(vf x) {
    switch (kEpilogue) {
        case Epilogue::silu:
        case Epilogue::silu_mul: return silu(x);
        case Epilogue::gelu:
        case Epilogue::gelu_mul: return gelu(x);
        case Epilogue::gelu_tanh:
        case Epilogue::gelu_tanh_mul: return gelu_tanh(x);
        case Epilogue::relu: return relu(x);
        case Epilogue::relu2: return relu(x) * relu(x);
        case Epilogue::swiglu_oai_mul: return swiglu_oai(x);
        default: return x;
    }
}

// What the gate is multiplied by, of the second half of the columns.
template <Epilogue kEpilogue>
inline vf opened(vf x) {
    if constexpr (kEpilogue == Epilogue::swiglu_oai_mul) {
        x = select(x > kOaiLimit, splat(kOaiLimit), x);
        return select(x < -kOaiLimit, splat(-kOaiLimit), x) + 1.0f;
    }
    return x;
}

struct ActivationSpec {
    int64_t size;  // columns of the result; a gated function's x has twice as many
    Epilogue function;
};

template <class T, Epilogue kFunction>
void activate_rows(const ActivationSpec& s, const Operands& o, Context& context) {
    for_rows(o.num_rows, context, [&](int64_t row) {
        const T* x = o.x.row<const T>(row);
        T* out = o.out.row<T>(row);
        for_vectors(s.size, [&](int64_t i, int n) {
            vf v = activate<kFunction>(load_n(x + i, n));
            store_n(out + i, is_gated(kFunction) ? v * opened<kFunction>(load_n(x + s.size + i, n)) : v, n);
        });
    });
}

template <class T>
void activation_of(const ActivationSpec& s, const Operands& o, Context& context) {
    switch (s.function) {
        case Epilogue::none: return activate_rows<T, Epilogue::none>(s, o, context);
        case Epilogue::silu_mul: return activate_rows<T, Epilogue::silu_mul>(s, o, context);
        case Epilogue::gelu: return activate_rows<T, Epilogue::gelu>(s, o, context);
        case Epilogue::gelu_tanh: return activate_rows<T, Epilogue::gelu_tanh>(s, o, context);
        case Epilogue::relu: return activate_rows<T, Epilogue::relu>(s, o, context);
        case Epilogue::relu2: return activate_rows<T, Epilogue::relu2>(s, o, context);
        case Epilogue::gelu_mul: return activate_rows<T, Epilogue::gelu_mul>(s, o, context);
        case Epilogue::gelu_tanh_mul: return activate_rows<T, Epilogue::gelu_tanh_mul>(s, o, context);
        case Epilogue::silu: return activate_rows<T, Epilogue::silu>(s, o, context);
        case Epilogue::swiglu_oai_mul: return activate_rows<T, Epilogue::swiglu_oai_mul>(s, o, context);
    }
}

inline void activation(const ActivationSpec& s, const Operands& o, Context& context) {
    o.out.type == Type::f32 ? activation_of<float>(s, o, context) : activation_of<bf16>(s, o, context);
}

QUIRE_OPERATION(activation, ActivationSpec, QUIRE_FIELD(size), QUIRE_FIELD(function));

}  // namespace quire::QUIRE_NS
