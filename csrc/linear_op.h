// The operation `linear`, by the level's best product.
#pragma once

#include "linear.h"
#include "linear_int8.h"
#include "operation.h"
#if defined(__AMX_BF16__)
#include "linear_amx_int8.h"
#elif defined(__AVX512BF16__)
#include "linear_dot.h"
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "linear_mmla.h"
#endif
#if defined(__AVX2__) && !defined(__AMX_BF16__)
#include "linear_pairs.h"
#endif

namespace quire::QUIRE_NS {

// The one place where a level says so. The same on each start: bits follow from it.
inline WeightOrder order_of(Type type) {
#if defined(__AVX512VNNI__) && !defined(__AMX_BF16__)
    if (type == Type::i8) return {Type::w8a16, 0, bytes_of_x(Type::w8a16)};
#if defined(__AVX512BF16__)
    // Intel's cores multiply four times as many pairs of integers as of bf16, others as many.
    static const bool ints = __builtin_cpu_is("intel");
    if (type == Type::bf16 && !ints) return {Type::bf16_turned, 0, 0};
#endif
    constexpr int32_t kPairBytes = 2;  // VPDPWSSD multiplies half as many as VPDPBUSD
#else
    [[maybe_unused]] constexpr int32_t kPairBytes = 0;
#endif
#if defined(__AVX2__) && !defined(__AMX_BF16__)
    if (type == Type::bf16) return {Type::bf16_ints, 1, kPairBytes};
    if (multiplies_pairs(type)) return {type, 1, kPairBytes};
#endif
    return {type, 0, bytes_of_x(type)};
}

struct LinearSpec {  // inputs: x, and a residual or none
    Matrix weight;
    const void* bias;
    Epilogue epilogue;
    int64_t residual_start;  // its column that is added to the first one
    int64_t first;           // column of the result where this product's begin
    const LoraLayer* lora;   // what adapters add, or null
};

inline void linear(const LinearSpec& s, const Operands& o, Context& context) {
    const void* residual = o.y.data ? static_cast<const uint8_t*>(o.y.data) + s.residual_start * type_bytes(o.y.type) : nullptr;
    void* out = static_cast<uint8_t*>(o.out.data) + s.first * type_bytes(o.out.type);
    const LinearArgs args{s.weight, s.bias, o.x.data, out, residual, o.num_rows, o.x.stride, o.out.stride, o.y.stride,
                          o.x.type, o.out.type, s.epilogue, s.lora, lora_inner(s.lora, o.x, o.num_rows, s.weight.cols, context), s.first};
#if defined(__AVX2__) && !defined(__AMX_BF16__)
    if (args.weight.paired && multiplies_pairs(args.weight.type) && args.type == Type::bf16) return linear_pairs(args, context);
#endif
    if (weight_format(args.weight.type).rounds_x && !args.weight.paired) {
#if defined(__AMX_BF16__)
        if (bytes_of_x(args.weight.type) == 1) return linear_amx_int8(args, context);
#endif
        return linear_int8(args, context);
    }
    if (args.weight.paired) return linear(args, context);
#if defined(__AMX_BF16__)
    linear_amx(args, context);
#elif defined(__AVX512BF16__)
    linear_dot(args, context);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    linear_mmla(args, context);
#else
    linear(args, context);
#endif
}

QUIRE_OPERATION(linear, LinearSpec, QUIRE_FIELD(weight), QUIRE_FIELD(bias), QUIRE_FIELD(epilogue),
                QUIRE_FIELD(residual_start), QUIRE_FIELD(first), QUIRE_FIELD(lora));

}  // namespace quire::QUIRE_NS
