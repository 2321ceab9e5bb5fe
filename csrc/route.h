// Which experts of a mixture each row goes to, and how much of what they answer it gets.
#pragma once

#include <limits>

#include "operation.h"
#include "rows.h"

namespace quire::QUIRE_NS {

constexpr float kLeastSum = 1e-20f;  // of weights that others are divided by: all sigmoids may be 0

struct RouteSpec {
    int64_t count, top_k;
    int32_t renormalize;  // weights are divided by the sum of those chosen
    int32_t by_sigmoid;   // weights are sigmoids of scores, and not their softmax
    float factor;         // on weights
    const float* bias;    // [count], which is added where experts are chosen, and not to what they weigh; or null
};

// Weights of all scores, in their place; returns what they are still to be divided by.
inline float weigh_scores(const RouteSpec& s, float* scores) {
    const int64_t size = round_up(s.count, kLanes);
    if (s.by_sigmoid) {
        for (int64_t i = 0; i < size; i += kLanes) store(scores + i, 1.0f / (1.0f + exp(-load(scores + i))));
        return 1;
    }
    vf most = load(scores);
    for (int64_t i = kLanes; i < size; i += kLanes) most = max(load(scores + i), most);
    most = splat(hmax(most));
    vf sums{};
    for (int64_t i = 0; i < size; i += kLanes) {
        const vf share = exp_below_0(load(scores + i) - most);
        sums += share;
        store(scores + i, share);
    }
    return hsum(sums);
}

// A row's experts, in the order of their numbers, and their weights. Of equals the first is chosen. `scores` are [count], and then room up
// to whole vectors, and as much again where there is a bias; they are written to.
inline void choose_experts(const RouteSpec& s, float* scores, float* weights, int32_t* chosen) {
    const int64_t size = round_up(s.count, kLanes), top_k = s.top_k;
    for (int64_t i = s.count; i < size; i++) scores[i] = -std::numeric_limits<float>::infinity();
    float sum = weigh_scores(s, scores);
    const float* keys = scores;
    if (s.bias) {
        for (int64_t e = 0; e < s.count; e++) scores[size + e] = plain(scores[e] / sum) + s.bias[e];
        keys = scores + size;
    }
    // Best first. Nothing is greater than NaN, nor NaN than anything: it is chosen or not, and what is chosen an expert all the same.
    int64_t num = 0;
    for (int64_t e = 0; e < s.count; e++) {
        if (num == top_k && !(keys[e] > keys[chosen[num - 1]])) continue;
        int64_t place = num < top_k ? num++ : num - 1;
        for (; place && keys[e] > keys[chosen[place - 1]]; place--) chosen[place] = chosen[place - 1];
        chosen[place] = int32_t(e);
    }
    for (int64_t i = 0; i < top_k; i++) weights[i] = scores[chosen[i]];
    if (s.renormalize) {
        sum = kLeastSum;
        for (int64_t i = 0; i < top_k; i++) sum += weights[i];
    }
    for (int64_t i = 0; i < top_k; i++) {  // by their numbers
        const int32_t expert = chosen[i];
        const float weight = plain(weights[i] / sum) * s.factor;
        int64_t place = i;
        for (; place && chosen[place - 1] > expert; place--) chosen[place] = chosen[place - 1], weights[place] = weights[place - 1];
        chosen[place] = expert, weights[place] = weight;
    }
}

// x: scores of all experts. Of each row its weights, float32 [top_k], and then its experts, int32 [top_k].
inline void route(const RouteSpec& s, const Operands& o, Context& context) {
    context.pool.run(divide_up(o.num_rows, kRowsPerTask), [&](int64_t task, int thread) {
        float* scores = context.thread_scratch[thread].get<float>(2 * round_up(s.count, kLanes));
        for (int64_t row = task * kRowsPerTask; row < std::min(o.num_rows, (task + 1) * kRowsPerTask); row++) {
            for_vectors(s.count, [&](int64_t i, int n) {
                store_n(scores + i, o.x.type == Type::f32 ? load_n(o.x.row<const float>(row) + i, n) : load_n(o.x.row<const bf16>(row) + i, n), n);
            });
            choose_experts(s, scores, o.out.row<float>(row), o.out.row<int32_t>(row) + s.top_k);
        }
    });
}

QUIRE_OPERATION(route, RouteSpec, QUIRE_FIELD(count), QUIRE_FIELD(top_k), QUIRE_FIELD(renormalize), QUIRE_FIELD(by_sigmoid),
                QUIRE_FIELD(factor), QUIRE_FIELD(bias));

}  // namespace quire::QUIRE_NS
