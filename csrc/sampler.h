// From logits to tokens: the twin of quire/sampling/{processing,select,logprobs}.py, with the same bits in all results.
//
// The order of tokens is: larger logit first, then lower id. A row is read once for the maxima of its parts; later
// passes leave out the parts that can't matter. Rows are the tasks: a row's result depends on nothing else.
#pragma once

#include "sample_args.h"
#include "sampler_row.h"

namespace quire::QUIRE_NS::sampling {

// ---- the order of tokens

// The k-th largest logit, 1 <= k <= size, without a sort: counts narrow it down between two neighbours in a sample.
template <class T>
float kth_largest(const Row<T>& row, int64_t k) {
    constexpr int64_t kSample = 2048, kMargin = 100;  // over 4 standard deviations of a rank in the sample
    Key* keys = row.work.keys;
    float low = kMasked, high = std::numeric_limits<float>::infinity();  // it is above low, and at most high
    if (row.size > 4 * kSample) {
        for (int64_t i = 0; i < kSample; i++) keys[i] = Key(row.at(i * row.size / kSample), 0);
        std::sort(keys, keys + kSample);
        int64_t rank = k * kSample / row.size;
        int64_t first = rank < kMargin ? 0 : rank - kMargin, last = rank + kMargin < kSample ? rank + kMargin : kSample;
        while (first < last) {  // keys[first - 1] is known to be at least the one sought, keys[last] to be less
            int64_t middle = (first + last) / 2;
            float logit = keys[middle].logit();
            if (row.count_above(logit) < k)
                high = logit, first = middle + 1;
            else
                low = logit, last = middle;
        }
    }
    int64_t left = k - row.count_above(high), count = 0;
    row.for_each_between(low, high, [&](float logit) { keys[count++] = Key(logit, 0); });
    if (count < left) return kMasked;
    std::nth_element(keys, keys + (left - 1), keys + count);
    return keys[left - 1].logit();
}

// A number that the first k tokens reach and few others: the k-th largest of the maxima of parts is at most the k-th
// largest logit.
template <class T>
float leading_bound(const Row<T>& row, int64_t k) {
    const float lowest = std::numeric_limits<float>::lowest();  // -inf is masked
    if (k >= row.size) return lowest;
    const float* maxima = row.num_blocks >= 2 * k ? row.work.maxima : row.work.lane_maxima;
    int64_t count = row.num_blocks >= 2 * k ? row.num_blocks : row.num_blocks * kLanes;
    float bound;
    if (count >= 2 * k) {
        Key* keys = row.work.keys;
        for (int64_t i = 0; i < count; i++) keys[i] = Key(maxima[i], 0);
        std::nth_element(keys, keys + (k - 1), keys + count);
        bound = keys[k - 1].logit();
    } else {
        bound = kth_largest(row, k);
    }
    return bound > lowest ? bound : lowest;
}

// Leaves the first k tokens that are not masked in work.keys, in order; returns how many there are.
template <class T>
int64_t list_leading(const Row<T>& row, int64_t k) {
    if (!k) return 0;
    Key* keys = row.work.keys;
    float bound = leading_bound(row, k);
    int64_t count = 0;
    row.for_each_from(bound, [&](float logit, int64_t id) { keys[count++] = Key(logit, id); });
    if (count > k) {
        std::nth_element(keys, keys + k, keys + count);
        count = k;
    }
    std::sort(keys, keys + count);
    return count;
}

// Keeps the first k tokens.
template <class T>
Filter leading_filter(const Row<T>& row, int64_t k) {
    Filter filter;
    if (k >= row.size) return filter;
    filter.logit = kth_largest(row, k);
    int64_t num_ties = k - row.count_above(filter.logit);
    for (int64_t b = 0; filter.logit > kMasked && b < row.num_blocks; b++) {
        if (!(row.work.maxima[b] >= filter.logit)) continue;
        const T* p = row.block(b);
        vi found = {};
        for (int i = 0; i < kBlock; i += kChunk) {
            Two x = load_two(p + i);
            found -= (x.v[0] == splat(filter.logit)) + (x.v[1] == splat(filter.logit));
        }
        int64_t here = sum_lanes(found);
        if (here < num_ties) {
            num_ties -= here;
            continue;
        }
        for (filter.id = b * kBlock; num_ties; filter.id++) num_ties -= row.at(filter.id) == filter.logit;
        break;
    }
    return filter;
}

// ---- weights of a row, and the draw

inline int64_t share(int64_t total, double top_p) {  // the mass that top_p asks for
    int64_t mass = int64_t(std::ceil(top_p * double(total)));
    return mass < total ? mass : total;
}

// ---- the race: who of some numbered weights comes first, as select.py says

inline vu mix(vu x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

inline vf race_times(vu numbers, uint64_t bits) {
    vu words = mix(mix(numbers * 0x9E3779B9u + uint32_t(bits)) + uint32_t(bits >> 32));
    vf u = plain(__builtin_convertvector((vi)(words >> 1), vf) + 0.5f) * 0x1p-32f;
    vf z = u / (2.0f - u);
    vf square = plain(z * z);
    vf times = plain(square * 0x1.0c9a84p-2f) + 0x1.484b14p-2f;
    times = plain(times * square) + 0x1.a61762p-2f;
    times = plain(times * square) + 0x1.2776c6p-1f;
    times = plain(times * square) + 0x1.ec709ep-1f;
    times = plain(times * square) + 0x1.715476p+1f;
    vf coins = __builtin_convertvector((vi)(mix(words + 0x9E3779B9u) >> 8 | 1u), vf);
    return plain(times * z) + __builtin_convertvector(23 + 127 - ((vi)coins >> 23), vf);
}

// The first of those that are first in the goal; number(i) and weight(i) of each. Not all weigh nothing.
template <class Number, class Weight>
int64_t race(int64_t count, uint64_t bits, Number&& number, Weight&& weight) {
    float best = std::numeric_limits<float>::infinity();
    int64_t winner = 0;
    for (int64_t start = 0; start < count; start += kLanes) {
        const int num = int(std::min<int64_t>(kLanes, count - start));
        vu numbers = {};
        vf weights = {};
        bool any = false;
        for (int i = 0; i < num; i++) {
            const int64_t w = weight(start + i);
            any |= w > 0;
            numbers[i] = uint32_t(number(start + i)), weights[i] = float(w);
        }
        if (!any) continue;
        const vf times = race_times(numbers, bits) / weights;
        for (int i = 0; i < num; i++)
            if (times[i] < best) best = times[i], winner = start + i;
    }
    return winner;
}

constexpr uint32_t kIsPart = 1u << 31;  // in a part's number: no token has it

template <class T>
struct Distribution {
    const Row<T>& row;
    vf maximum, scale;
    vi places[2];

    Distribution(const Row<T>& row, float scale) : row(row), maximum(splat(row.maximum)), scale(splat(scale)) {
        for (int which = 0; which < 2; which++)
            for (int lane = 0; lane < kLanes; lane++) places[which][lane] = place<T>(lane, which);
    }

    // Calls body(weights, first id of the chunk within the block, which) for each vector of block b.
    template <bool kFilters, class Body>
    void for_block(int64_t b, const Filter& filter, Body&& body) const {
        const T* p = row.block(b);
        const vf logit = splat(filter.logit);
        const int64_t id = std::clamp<int64_t>(filter.id - b * kBlock, 0, kBlock);
        const vi min_high = splat_int(int32_t(filter.min_weight >> 20));
        const vi min_low = splat_int(int32_t(filter.min_weight & 0xfffff));
        for (int i = 0; i < kBlock; i += kChunk) {
            Two x = load_two(p + i);
            for (int which = 0; which < 2; which++) {
                vf v = x.v[which];
                Weights w = weigh(v, maximum, scale);
                if constexpr (kFilters) {
                    vi kept = (v > logit) | ((v == logit) & (places[which] < splat_int(int32_t(id) - i)));
                    kept &= (w.high > min_high) | ((w.high == min_high) & (w.low >= min_low));
                    w.high &= kept, w.low &= kept;
                }
                body(w, i, which);
            }
        }
    }

    template <bool kFilters>
    int64_t sum_block(int64_t b, const Filter& filter) const {
        Weights sum = {};
        for_block<kFilters>(b, filter, [&](const Weights& w, int, int) { sum.high += w.high, sum.low += w.low; });
        return (sum_lanes(sum.high) << 20) + sum_lanes(sum.low);
    }

    // Fills in the blocks' sums of the tokens that the filter keeps; returns the total.
    int64_t sum(const Filter& filter, int64_t* sums) const {
        // Below this power of 2 no weight can reach min_weight, or 1.
        float lowest = std::log2(float(filter.min_weight > 1 ? filter.min_weight : 1)) - (kWeightBits + 0.01f);
        int64_t total = 0;
        for (int64_t b = 0; b < row.num_blocks; b++) {
            float largest = row.work.maxima[b];
            sums[b] = 0;
            if (largest < filter.logit || !((largest - row.maximum) * scale[0] >= lowest)) continue;
            total += sums[b] = filter.keeps_all() ? sum_block<false>(b, filter) : sum_block<true>(b, filter);
        }
        return total;
    }

    // The kept token that wins.
    int64_t pick(const Filter& filter, const int64_t* sums, uint64_t bits) const {
        const int64_t b = race(row.num_blocks, bits, [](int64_t i) { return kIsPart | i; }, [&](int64_t i) { return sums[i]; });
        int64_t weights[kBlock];
        for_block<true>(b, filter, [&](const Weights& w, int first, int which) {
            for (int lane = 0; lane < kLanes; lane++)
                weights[first + place<T>(lane, which)] = (int64_t(w.high[lane]) << 20) + w.low[lane];
        });
        const int64_t first = b * kBlock;
        return first + race(kBlock, bits, [&](int64_t i) { return first + i; }, [&](int64_t i) { return weights[i]; });
    }
};

struct Samples {  // of a row
    int64_t* token_ids;
    int64_t num, position;
};

// Writes draw(bits_of) for each of a row's samples; bits_of(attempt) gives random bits.
template <class Draw>
inline void draw_each(const SampleRow& row, const Samples& samples, Draw&& draw) {
    for (int64_t j = 0; j < samples.num; j++)
        samples.token_ids[j] = draw([&](uint32_t attempt) {
            return random_bits(row.seed, row.sequence_index + j, samples.position, attempt);
        });
}

// For a top_k of at most kMaxListed: the tokens left are listed. (Where it is off, that would change nothing but time.)
template <class T>
void draw_listed(const Row<T>& row, const SampleRow& p, const Samples& samples) {
    Token* tokens = row.work.tokens;
    int64_t count = list_leading(row, p.top_k < row.size ? p.top_k : row.size), num_kept = 0, total = 0;
    for (int64_t start = 0; start < count; start += kLanes) {
        int num = int(std::min<int64_t>(kLanes, count - start));
        vf logits = splat(kMasked);
        for (int i = 0; i < num; i++) logits[i] = row.work.keys[start + i].logit();
        Weights w = weigh(logits, splat(row.maximum), splat(p.scale));
        for (int i = 0; i < num; i++) {
            int64_t weight = (int64_t(w.high[i]) << 20) + w.low[i];
            tokens[start + i] = {row.work.keys[start + i].id(), weight};
            num_kept += weight >= p.min_weight;
        }
    }
    for (int64_t i = 0; i < num_kept; i++) total += tokens[i].weight;
    if (p.top_p < 1.0) {
        int64_t mass = share(total, p.top_p);
        total = num_kept = 0;
        while (total < mass) total += tokens[num_kept++].weight;
    }
    std::sort(tokens, tokens + num_kept);
    int64_t* starts = row.work.sums_before;  // of the parts among the tokens, and what each weighs
    int64_t* sums = row.work.sums;
    int64_t num_parts = 0;
    for (int64_t i = 0; i < num_kept; i++) {
        if (!i || tokens[i].id / kBlock != tokens[i - 1].id / kBlock) starts[num_parts] = i, sums[num_parts++] = 0;
        sums[num_parts - 1] += tokens[i].weight;
    }
    draw_each(p, samples, [&](auto&& bits_of) {
        const uint64_t bits = bits_of(0);
        auto part = [&](int64_t i) { return kIsPart | (tokens[starts[i]].id / kBlock); };
        const int64_t which = race(num_parts, bits, part, [&](int64_t i) { return sums[i]; });
        const Token* of_part = tokens + starts[which];
        const int64_t count = (which + 1 < num_parts ? starts[which + 1] : num_kept) - starts[which];
        return of_part[race(count, bits, [&](int64_t i) { return of_part[i].id; }, [&](int64_t i) { return of_part[i].weight; })].id;
    });
}

// Else a token is drawn from all that top_k and min_p leave, and then looked at: it is one of top_p's if those before
// it have less than the mass. If not, the next is drawn from those before it. See select.py.
template <class T>
void draw_unlisted(Row<T>& row, const SampleRow& p, const Samples& samples) {
    Distribution<T> distribution(row, p.scale);
    Filter all = leading_filter(row, p.top_k);
    all.min_weight = p.min_weight;
    int64_t whole = distribution.sum(all, row.work.sums);
    int64_t mass = p.top_p < 1.0 ? share(whole, p.top_p) : 0;
    if (p.scale == kPlainScale && all.keeps_all()) row.plain_total = whole;
    draw_each(p, samples, [&](auto&& bits_of) {
        Filter filter = all;
        int64_t* sums = row.work.sums;
        for (uint32_t attempt = 0;; attempt++) {
            int64_t id = distribution.pick(filter, sums, bits_of(attempt));
            if (!mass) return id;
            filter.logit = row.at(id), filter.id = id;
            sums = row.work.sums_before;
            if (distribution.sum(filter, sums) < mass) return id;
        }
    });
}

template <class T>
SampleError choose(Row<T>& row, const SampleRow& p, const Samples& samples) {
    row.scan();
    if (row.maximum != row.maximum) return kSampleNaN;
    if (std::isinf(row.maximum)) return row.maximum > 0 ? kSampleInfinite : kSampleNothingLeft;
    if (p.mode == SampleMode::greedy)
        for (int64_t j = 0, id = row.first_maximum(); j < samples.num; j++) samples.token_ids[j] = id;
    else if (p.top_k <= kMaxListed && (p.top_k < row.size || p.top_p < 1.0))
        draw_listed(row, p, samples);
    else
        draw_unlisted(row, p, samples);
    return kSampleOk;
}

// ---- what changes the logits before the choice (processing.py)

inline bool processes(const SampleRow& p, const uint32_t* mask) {
    return mask || p.allowed.ids || p.forbidden.num || p.completing.num || p.stop.num || p.biased.num || p.seen.num;
}

// Copies the logits that a mask allows, and masks the others; `out` may be where they come from.
template <class T>
void copy_allowed(const T* logits, const uint32_t* mask, float* out, int64_t size) {
    static_assert(32 % kLanes == 0);
    vi bits;
    for (int lane = 0; lane < kLanes; lane++) bits[lane] = int32_t(1u << lane);
    for_vectors(size, [&](int64_t i, int n) {
        const vi allowed = (splat_int(int32_t(mask[i / 32] >> (i % 32))) & bits) != 0;
        store_n(out + i, select(allowed, load_n(logits + i, n), splat(kMasked)), n);
    });
}

// Copies a row into work.processed and changes it there. False where an id is outside the vocabulary.
template <class T>
bool process(const Row<T>& row, const SampleRow& p, const uint32_t* mask) {
    float* out = row.work.processed;
    bool inside = true;
    auto for_each = [&](const IdList& list, auto&& body) {
        for (int64_t i = 0; i < list.num; i++) {
            int64_t id = list.ids[i];
            if (uint64_t(id) < uint64_t(row.size))
                body(id, i);
            else
                inside = false;
        }
    };
    if (p.allowed.ids) {
        for_vectors(row.size, [&](int64_t i, int n) { store_n(out + i, splat(kMasked), n); });
        for_each(p.allowed, [&](int64_t id, int64_t) { out[id] = row.at(id); });
        if (mask) copy_allowed(out, mask, out, row.size);
    } else if (mask) {
        copy_allowed(row.logits, mask, out, row.size);
    } else {
        for_vectors(row.size, [&](int64_t i, int n) { store_n(out + i, load_n(row.logits + i, n), n); });
    }
    for (const IdList* list : {&p.forbidden, &p.completing, &p.stop})
        for_each(*list, [&](int64_t id, int64_t) { out[id] = kMasked; });
    for_each(p.biased, [&](int64_t id, int64_t i) { out[id] += p.biases[i]; });
    for_each(p.seen, [&](int64_t id, int64_t i) {
        float logit = out[id], count = p.counts[i];
        logit = plain(logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty);
        logit = plain(logit - plain(p.frequency_penalty * count));
        out[id] = count > 0 ? logit - p.presence_penalty : logit;
    });
    return inside;
}

// ---- log-probabilities (logprobs.py)

// Of a scanned row of raw logits, for its samples [first, first + num_samples).
template <class T>
bool write_logprobs(const Row<T>& row, const SampleArgs& a, int64_t k, int64_t first, int64_t num_samples) {
    const bool usable = std::isfinite(row.maximum);  // else: as if all were masked
    double normaliser = 0.0;
    if (usable) {
        int64_t total = row.plain_total;
        if (!total) total = Distribution<T>(row, kPlainScale).sum(Filter(), row.work.sums);
        normaliser = double(row.maximum) + (std::log(double(total)) - kWeightBits * 0.69314718055994530942);
    }
    auto logprob = [&](float logit) { return float(double(logit) - normaliser); };
    const int64_t num_listed = usable ? list_leading(row, k) : 0;
    for (int64_t n = first; n < first + num_samples; n++) {
        int64_t* ids = a.listed_ids + n * a.width;
        float* logprobs = a.logprobs + n * a.width;
        int64_t* ranks = a.ranks + n * a.width;
        ids[0] = a.token_ids[n];
        if (uint64_t(ids[0]) >= uint64_t(row.size)) return false;
        logprobs[0] = logprob(usable ? row.at(ids[0]) : kMasked);
        ranks[0] = usable ? 1 + row.count_above(row.at(ids[0])) : 1;
        for (int64_t i = 1; i <= num_listed; i++) {
            Key key = row.work.keys[i - 1];
            ids[i] = key.id();
            logprobs[i] = logprob(key.logit());
            ranks[i] = i > 1 && key.logit() == row.work.keys[i - 2].logit() ? ranks[i - 1] : i;
        }
        for (int64_t i = num_listed + 1, id = 0; i <= k; id++) {  // the masked ones, by id
            if (usable && row.at(id) != kMasked) continue;
            ids[i] = id;
            logprobs[i] = kMasked;
            ranks[i++] = num_listed + 1;
        }
    }
    return true;
}

// Samples [first, first + num_samples) of row r, all from one row of logits.
template <class T>
SampleError draw_samples(
    const SampleArgs& a, int64_t r, int64_t ahead, int64_t first, int64_t num_samples, const uint32_t* mask,
    Scratch& scratch
) {
    const SampleRow& p = a.rows[r];
    Workspace work(scratch, divide_up(a.vocab_size, kBlock));
    Row<T> raw(static_cast<const T*>(a.logits) + (a.logits_rows[r] + ahead) * a.stride, a.vocab_size, work);
    const Samples samples = {a.token_ids + first, num_samples, a.positions[r] + ahead};
    bool scanned = false;
    if (p.mode != SampleMode::given) {
        SampleError error;
        if (processes(p, mask)) {
            if (!process(raw, p, mask)) return kSampleBadId;
            Row<float> processed(work.processed, a.vocab_size, work);
            error = choose(processed, p, samples);
        } else {
            error = choose(raw, p, samples);
            scanned = true;
        }
        if (error) return error;
    }
    if (p.num_logprobs < 0 || !num_samples) return kSampleOk;
    if (!scanned) raw.scan();
    const int64_t k = p.num_logprobs < a.vocab_size ? p.num_logprobs : a.vocab_size;
    return write_logprobs(raw, a, k, first, num_samples) ? kSampleOk : kSampleBadId;
}

template <class T>
SampleError sample_row(const SampleArgs& a, int64_t r, Scratch& scratch) {
    const int64_t first = a.first_sample[r], stop = a.first_sample[r + 1];
    if (!a.drawn) return draw_samples<T>(a, r, 0, first, stop - first, a.masks ? a.masks[r] : nullptr, scratch);
    for (int64_t n = first; n < stop; n++) {
        const int64_t draft = a.token_ids[n];
        a.drawn[r] = n - first;
        SampleError error = draw_samples<T>(a, r, n - first, n, 1, a.masks ? a.masks[n] : nullptr, scratch);
        if (error) return error;
        a.drawn[r]++;
        if (a.token_ids[n] != draft) break;
    }
    return kSampleOk;
}

// While it lives, denormal numbers are numbers, as numpy has them: the pool's threads take them for 0 (thread_pool.h).
class KeepDenormals {
public:
#if defined(__x86_64__)
    KeepDenormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ & ~0x8040u); }
    ~KeepDenormals() { __builtin_ia32_ldmxcsr(before_); }

private:
    unsigned before_;
#else
    KeepDenormals() {}
#endif
};

}  // namespace quire::QUIRE_NS::sampling

namespace quire::QUIRE_NS {

inline void sample(const SampleArgs& a, Context& context) {
    context.pool.run(a.num_rows, [&](int64_t r, int thread) {
        const sampling::KeepDenormals kept;
        Scratch& scratch = context.thread_scratch[thread];
        a.errors[r] = Type(a.type) == Type::bf16 ? sampling::sample_row<bf16>(a, r, scratch)
                                                 : sampling::sample_row<float>(a, r, scratch);
    });
}

}  // namespace quire::QUIRE_NS
