// The activation functions, gated and plain: of vectors, for the end of a product (linear.h), and of rows.
#pragma once

#include "rows.h"

namespace quire::QUIRE_NS {

inline vf silu(vf x) { return x / (1.0f + exp(-x)); }
inline vf gelu(vf x) { return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f)); }
inline vf gelu_tanh(vf x) { return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x))); }

// The function itself; of a gated one, that of the gate.
template <Epilogue kEpilogue>
inline vf activate(vf x) {
    switch (kEpilogue) {
        case Epilogue::silu_mul: return silu(x);
        case Epilogue::gelu:
        case Epilogue::gelu_mul: return gelu(x);
        case Epilogue::gelu_tanh:
        case Epilogue::gelu_tanh_mul: return gelu_tanh(x);
        case Epilogue::relu: return select(x < vf{}, vf{}, x);  // NaN stays
        default: return x;
    }
}

template <class T, Epilogue kFunction>
void activate_rows(const ActivationArgs& a, Context& context) {
    for_rows(a.num_rows, context, [&](int64_t row) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        T* out = static_cast<T*>(a.out) + row * a.out_stride;
        for_vectors(a.size, [&](int64_t i, int n) {
            vf v = activate<kFunction>(load_n(x + i, n));
            store_n(out + i, is_gated(kFunction) ? v * load_n(x + a.size + i, n) : v, n);
        });
    });
}

template <class T>
void activation_of(const ActivationArgs& a, Context& context) {
    switch (a.function) {
        case Epilogue::none: return activate_rows<T, Epilogue::none>(a, context);
        case Epilogue::silu_mul: return activate_rows<T, Epilogue::silu_mul>(a, context);
        case Epilogue::gelu: return activate_rows<T, Epilogue::gelu>(a, context);
        case Epilogue::gelu_tanh: return activate_rows<T, Epilogue::gelu_tanh>(a, context);
        case Epilogue::relu: return activate_rows<T, Epilogue::relu>(a, context);
        case Epilogue::gelu_mul: return activate_rows<T, Epilogue::gelu_mul>(a, context);
        case Epilogue::gelu_tanh_mul: return activate_rows<T, Epilogue::gelu_tanh_mul>(a, context);
    }
}

inline void activation(const ActivationArgs& a, Context& context) {
    a.type == Type::f32 ? activation_of<float>(a, context) : activation_of<bf16>(a, context);
}

}  // namespace quire::QUIRE_NS
