// A row of logits, read in parts, and the weights of its tokens: what sampler.h draws with. See there.
//
// Weights are integers, weight = floor(2^((logit - max) * log2(e) / temperature) * 2^40), by a polynomial in plain
// float32 steps (`plain` keeps the compiler from fusing two of them); select.py has the same ones.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels.h"
#include "vec.h"

namespace quire::QUIRE_NS::sampling {

constexpr int64_t kBlock = 512;  // logits of which the maximum and the sum of weights are kept
constexpr int kChunk = 2 * kLanes;
constexpr int kWeightBits = 40;
constexpr int64_t kMaxListed = 1024;  // up to this top_k the tokens left are listed in order
constexpr float kPlainScale = 1.44269504f;  // log2(e) / 1
constexpr float kMasked = -std::numeric_limits<float>::infinity();

// ---- what is not said in vec.h

// A chunk of logits. Which of them stands in which lane is the type's affair (`place`), as bf16 are cheapest in pairs.
struct Two {
    vf v[2];
};
inline Two load_two(const float* p) { return {{load(p), load(p + kLanes)}}; }
inline Two load_two(const bf16* p) {
    vi both;
    std::memcpy(&both, p, sizeof both);
    return {{(vf)(both << 16), (vf)(both & int32_t(0xffff0000))}};
}
template <class T>
constexpr int place(int lane, int which) {
    return sizeof(T) == 4 ? lane + which * kLanes : 2 * lane + which;
}

template <class Part, class V, class Join>
inline Part fold_to_four(const V& x, Join join) {
    Part parts[kLanes / 4];
    std::memcpy(parts, &x, sizeof x);
    for (int i = 1; i < kLanes / 4; i++) parts[0] = join(parts[0], parts[i]);
    return parts[0];
}
typedef float four_floats __attribute__((vector_size(16)));
typedef int32_t four_ints __attribute__((vector_size(16)));

inline int64_t sum_lanes(vi x) {  // below 2^31
    four_ints f = fold_to_four<four_ints>(x, [](four_ints a, four_ints b) { return a + b; });
    return f[0] + f[1] + f[2] + f[3];
}
inline bool any_lane(vi x) {
    four_ints f = fold_to_four<four_ints>(x, [](four_ints a, four_ints b) { return a | b; });
    return f[0] | f[1] | f[2] | f[3];
}
inline float max_lanes(vf x) {
    four_floats f = fold_to_four<four_floats>(x, [](four_floats a, four_floats b) { return a > b ? a : b; });
    float low = f[0] > f[1] ? f[0] : f[1], high = f[2] > f[3] ? f[2] : f[3];
    return low > high ? low : high;
}

// Philox4x32-10, as quire/sampling/random.py: 64 bits for the attempt-th draw of a token.
inline uint64_t random_bits(uint64_t seed, uint64_t sequence_index, int64_t position, uint32_t attempt) {
    uint32_t c0 = uint32_t(position), c1 = attempt, c2 = uint32_t(sequence_index), c3 = uint32_t(sequence_index >> 32);
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0, c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1, c3 = uint32_t(p0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return uint64_t(c1) << 32 | c0;
}

// What is sorted: ascending is the order of tokens.
struct Key {
    uint64_t bits;

    Key() = default;
    Key(float logit, int64_t id) {
        logit += 0.0f;  // -0 is 0
        uint32_t raw;
        std::memcpy(&raw, &logit, 4);
        bits = uint64_t(raw >> 31 ? raw : ~raw & 0x7fffffffu) << 32 | uint32_t(id);
    }
    bool operator<(const Key& other) const { return bits < other.bits; }
    int64_t id() const { return uint32_t(bits); }
    float logit() const {
        uint32_t raw = uint32_t(bits >> 32);
        if (!(raw >> 31)) raw = ~raw & 0x7fffffffu;
        float out;
        std::memcpy(&out, &raw, 4);
        return out;
    }
};
struct Token {  // ascending by id
    int64_t id, weight;
    bool operator<(const Token& other) const { return id < other.id; }
};

// A thread's memory for one row.
struct Workspace {
    float* processed;      // [blocks, kBlock]
    float* lane_maxima;    // [blocks, kLanes]: of the chunks of a block
    float* maxima;         // [blocks]
    int64_t* sums;         // [blocks], of weights
    int64_t* sums_before;  // [blocks]
    Key* keys;             // [blocks, kBlock]
    Token* tokens;         // [kMaxListed]

    Workspace(Scratch& scratch, int64_t num_blocks) {
        int64_t n = num_blocks;
        int64_t sizes[] = {n * kBlock * 4, n * kLanes * 4,  n * 4, n * 8,
                           n * 8,          n * kBlock * 8, kMaxListed * int64_t(sizeof(Token))};
        int64_t total = 0;
        for (int64_t& size : sizes) total += size = round_up(size, 64);
        uint8_t* at = scratch.get<uint8_t>(total);
        const int64_t* size = sizes;
        auto take = [&](auto*& part) {
            part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(at);
            at += *size++;
        };
        take(processed), take(lane_maxima), take(maxima), take(sums), take(sums_before), take(keys), take(tokens);
    }
};

// ---- weights

struct Weights {  // weight = high * 2^20 + low, each at most 2^20
    vi high, low;
};

// Of logits of at most `maximum`.
inline Weights weigh(vf x, vf maximum, vf scale) {
    const vf shift = splat(12582912.0f + 127 + kWeightBits / 2);  // the sum's last bits are the power's exponent
    vf y = plain((x - maximum) * scale);
    y = max(y, plain(splat(-42.0f)));  // `plain`, or GCC makes two instructions of it
    vf shifted = y + shift;
    vf f = y - (shifted - shift);  // in [-0.5, 0.5]
    vf p = plain(f * 0x1.5bd97ap-10f) + 0x1.3ce8b2p-7f;
    p = plain(p * f) + 0x1.c6b6dap-5f;
    p = plain(p * f) + 0x1.ebf9c2p-3f;
    p = plain(p * f) + 0x1.62e42ap-1f;
    p = plain(p * f) + 1.0f;
    p = p * (vf)((vi)shifted << 23);
    vi high = __builtin_convertvector(p, vi);
    vf rest = (p - __builtin_convertvector(high, vf)) * 0x1p20f;  // exact, both of it
    return {high, __builtin_convertvector(rest, vi)};
}

// The tokens that come before (logit, id) and weigh at least min_weight.
struct Filter {
    float logit = kMasked;
    int64_t id = 0;
    int64_t min_weight = 0;
    bool keeps_all() const { return logit == kMasked && min_weight <= 1; }
};

template <class T>
struct Row {
    const T* logits;
    int64_t size, num_blocks;
    Workspace& work;
    float maximum = kMasked;  // NaN if any is
    int64_t plain_total = 0;  // of all weights at temperature 1, once known
    T tail[kBlock];           // the last block, filled up with -inf

    Row(const T* logits, int64_t size, Workspace& work)
        : logits(logits), size(size), num_blocks(divide_up(size, kBlock)), work(work) {
        T masked;
        if constexpr (sizeof(T) == 4)
            masked = kMasked;
        else
            masked = 0xff80;
        int64_t start = (num_blocks - 1) * kBlock;
        for (int64_t i = 0; i < kBlock; i++) tail[i] = start + i < size ? logits[start + i] : masked;
    }

    const T* block(int64_t b) const { return b + 1 < num_blocks ? logits + b * kBlock : tail; }
    float at(int64_t id) const { return to_float(logits[id]); }

    // Fills in all maxima, in one pass.
    void scan() {
        vf all = splat(kMasked), sums[2] = {};
        for (int64_t b = 0; b < num_blocks; b++) {
            const T* p = block(b);
            Two most = load_two(p);
            for (int w = 0; w < 2; w++) sums[w] += most.v[w];
            for (int i = kChunk; i < kBlock; i += kChunk) {
                Two x = load_two(p + i);
                for (int w = 0; w < 2; w++) sums[w] += x.v[w], most.v[w] = max(x.v[w], most.v[w]);
            }
            vf both = max(most.v[0], most.v[1]);
            store(work.lane_maxima + b * kLanes, both);
            work.maxima[b] = max_lanes(both);
            all = max(both, all);
        }
        maximum = max_lanes(all);
        // NaN in a sum tells of one among the logits, or of sums that went to both infinities.
        vf sum = sums[0] + sums[1];
        bool suspect = false;
        for (int i = 0; i < kLanes; i++) suspect |= sum[i] != sum[i];
        for (int64_t i = 0; suspect && i < size; i++)
            if (at(i) != at(i)) maximum = std::numeric_limits<float>::quiet_NaN();
    }

    int64_t first_maximum() const {
        int64_t b = 0, i = 0;
        while (work.maxima[b] != maximum) b++;
        const T* p = block(b);
        while (to_float(p[i]) != maximum) i++;
        return b * kBlock + i;
    }

    // Calls body(logit, id) for each logit of at least `bound`, in no order within a block.
    template <class Body>
    void for_each_from(float bound, Body&& body) const {
        for (int64_t b = 0; b < num_blocks; b++) {
            if (!(work.maxima[b] >= bound)) continue;
            const T* p = block(b);
            for (int lane = 0; lane < kLanes; lane++) {
                if (!(work.lane_maxima[b * kLanes + lane] >= bound)) continue;
                for (int chunk = 0; chunk < kBlock; chunk += kChunk)
                    for (int which = 0; which < 2; which++) {
                        int i = chunk + place<T>(lane, which);
                        float logit = to_float(p[i]);
                        if (logit >= bound) body(logit, b * kBlock + i);
                    }
            }
        }
    }

    // Calls body(logit) for each logit with low < logit <= high.
    template <class Body>
    void for_each_between(float low, float high, Body&& body) const {
        for (int64_t b = 0; b < num_blocks; b++) {
            if (!(work.maxima[b] > low)) continue;
            const T* p = block(b);
            for (int i = 0; i < kBlock; i += kChunk) {
                Two x = load_two(p + i);
                vi found = {};
                for (int w = 0; w < 2; w++) found |= (x.v[w] > splat(low)) & (x.v[w] <= splat(high));
                if (!any_lane(found)) continue;
                for (int j = i; j < i + kChunk; j++)
                    if (float logit = to_float(p[j]); logit > low && logit <= high) body(logit);
            }
        }
    }

    int64_t count_above(float logit) const {
        int64_t count = 0;
        for (int64_t b = 0; b < num_blocks; b++) {
            if (!(work.maxima[b] > logit)) continue;
            vi found = {};
            for (int i = 0; i < kBlock; i += kChunk) {
                Two x = load_two(block(b) + i);
                found -= (x.v[0] > splat(logit)) + (x.v[1] > splat(logit));
            }
            count += sum_lanes(found);
        }
        return count;
    }
};

}  // namespace quire::QUIRE_NS::sampling
