// The operation `linear`, by the level's best product.
#pragma once

#include <algorithm>

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
    if (multiplies_pairs(type)) return {type, 1, type == Type::w4a8 ? bytes_of_x(type) : kPairBytes};  // w4a8: fours of bytes
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

// Rows [first, first + num_rows).
inline void linear_rows(const LinearSpec& s, const Operands& o, int64_t first, int64_t num_rows, Context& context) {
    auto from = [&](const Rows& rows, int64_t column) {
        return rows.data ? static_cast<uint8_t*>(rows.data) + (first * rows.stride + column) * type_bytes(rows.type) : nullptr;
    };
    const Rows x{from(o.x, 0), o.x.stride, o.x.type};
    LoraRows slots{};
    LoraLayer lora{};
    if (s.lora) lora = *s.lora, slots = lora.rows->from(first), lora.rows = &slots;
    const LoraLayer* added = s.lora ? &lora : nullptr;
    const LinearArgs args{s.weight, s.bias, x.data, from(o.out, s.first), from(o.y, s.residual_start), num_rows, x.stride, o.out.stride, o.y.stride,
                          x.type, o.out.type, s.epilogue, added, lora_inner(added, x, num_rows, s.weight.cols, context), s.first};
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

// Each task reads all rows of x, some of the weights with them: so many rows at a time as stay in the last cache, or to read them takes
// longer than to multiply them. AMX's tasks are of some rows by themselves.
inline void linear(const LinearSpec& s, const Operands& o, Context& context) {
    int64_t windows = 1;
#if !defined(__AMX_BF16__)
    constexpr int64_t kBytes = 4 << 20, kLeastRows = 256;  // for fewer rows, weights would be read and expanded too often
    windows = divide_up(o.num_rows, std::max(kBytes / (s.weight.cols * type_bytes(o.x.type)), kLeastRows));
#endif
    if (windows < 2) return linear_rows(s, o, 0, o.num_rows, context);
    const int64_t rows = round_up(divide_up(o.num_rows, windows), 12);  // whole panels
    for (int64_t first = 0; first < o.num_rows; first += rows) linear_rows(s, o, first, std::min(rows, o.num_rows - first), context);
}

QUIRE_OPERATION(linear, LinearSpec, QUIRE_FIELD(weight), QUIRE_FIELD(bias), QUIRE_FIELD(epilogue),
                QUIRE_FIELD(residual_start), QUIRE_FIELD(first), QUIRE_FIELD(lora));

}  // namespace quire::QUIRE_NS
