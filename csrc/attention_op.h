// The operation `attention`, by the level's best attention.
#pragma once

#include "attention.h"
#include "operation.h"
#if defined(__AMX_BF16__)
#include "attention_amx.h"
#elif defined(__AVX512F__)
#include "attention_dot.h"
#endif

namespace quire::QUIRE_NS {

struct AttentionSpec {  // x: queries, maybe with more columns after them
    HeadSpec heads;
    const float* sinks;
    int64_t window;
    float scale, softcap;
};

inline void attention(const AttentionSpec& s, const Operands& o, Context& context) {
    const AttentionArgs args{o.x.data, o.out.data, o.x.stride, o.out.stride, s.heads.num_heads, s.heads.cache_shape(o),
                             s.heads.cache(o), s.scale, s.softcap, s.sinks, s.window, s.heads.step(o), o.out.type};
#if defined(__AMX_BF16__)
    attention_amx(args, context);
#elif defined(__AVX512F__)
    attention_dot(args, context);
#else
    attention(args, context);
#endif
}

QUIRE_OPERATION(attention, AttentionSpec, QUIRE_FIELD(heads), QUIRE_FIELD(sinks), QUIRE_FIELD(window), QUIRE_FIELD(scale),
                QUIRE_FIELD(softcap));

}  // namespace quire::QUIRE_NS
