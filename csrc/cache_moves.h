// Tokens' keys and values moved to other slots of a cache, when a path of a tree of drafts has been accepted.
#pragma once

#include "rope.h"

namespace quire::QUIRE_NS {

// A token's elements of one head lie `step` apart in `head`; `line` has them in a row.
template <class T>
inline void take_token(const uint8_t* head, int64_t first, int64_t step, int64_t dim, uint8_t* line) {
    const T* from = reinterpret_cast<const T*>(head) + first;
    for (int64_t i = 0; i < dim; i++) reinterpret_cast<T*>(line)[i] = from[i * step];
}
template <class T>
inline void put_token(uint8_t* head, int64_t first, int64_t step, int64_t dim, const uint8_t* line) {
    T* to = reinterpret_cast<T*>(head) + first;
    for (int64_t i = 0; i < dim; i++) to[i * step] = reinterpret_cast<const T*>(line)[i];
}

// Every source is read before any destination is written.
template <class T>
void move_tokens(const MoveArgs& a) {
    const CacheShape shape{a.block_size, a.num_kv_heads, a.head_dim, a.type};
    const int64_t dim = shape.padded_dim(), scale = a.type == Type::i8 ? 4 : 0, line = dim * int64_t(sizeof(T)) + scale;
    std::vector<uint8_t> lines(a.count * line);
    for (int64_t part = 0; part < 2 * a.num_kv_heads; part++) {
        const bool by_feature = (part >= a.num_kv_heads) == values_by_feature(a.activations);
        auto place = [&](int32_t slot, const auto& move) {
            const int64_t offset = slot % a.block_size;
            uint8_t* head = a.cache + slot / a.block_size * shape.block_bytes() + part * shape.head_bytes();
            move(head, by_feature ? offset : offset * dim, by_feature ? a.block_size : 1, head + a.block_size * dim + offset * 4);
        };
        for (int64_t i = 0; i < a.count; i++)
            place(a.sources[i], [&](uint8_t* head, int64_t first, int64_t step, const uint8_t* own_scale) {
                take_token<T>(head, first, step, dim, &lines[i * line]);
                if (scale) std::memcpy(&lines[i * line] + dim, own_scale, scale);
            });
        for (int64_t i = 0; i < a.count; i++)
            place(a.destinations[i], [&](uint8_t* head, int64_t first, int64_t step, uint8_t* own_scale) {
                put_token<T>(head, first, step, dim, &lines[i * line]);
                if (scale) std::memcpy(own_scale, &lines[i * line] + dim, scale);
            });
    }
}

inline void move_slots(const MoveArgs& a) {
    switch (a.type) {
        case Type::f32: return move_tokens<uint32_t>(a);
        case Type::bf16: return move_tokens<uint16_t>(a);
        default: return move_tokens<uint8_t>(a);
    }
}

}  // namespace quire::QUIRE_NS
