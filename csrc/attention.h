// Paged causal attention, for any level: an online softmax (arXiv:1805.02867) over chunks of 64 keys at absolute
// positions, in ascending order, in fp32. What a row does not see changes none of its bits, so neither the rows computed
// beside it, nor the block size, nor how the sequence was cut into steps can matter. Spans of 1024 keys, at absolute positions
// too, are summed apart and merged in order, whether one thread does them all or, of a few long sequences, many
// threads one each (split-KV): how many there are does not matter either. Nothing before the first key that a task's
// rows see is read: its blocks may belong to another.
#pragma once

#include <algorithm>
#include <utility>

#include "attention_ahead.h"
#include "softcap.h"

namespace quire::QUIRE_NS {

constexpr int64_t kMostPartials = 8 << 20;  // floats of partial results kept at a time, or one task's
constexpr float kLog2e = 1.44269504088896341f;  // scores are multiplied by it, so that powers of 2 weigh
constexpr float kLowest = -3.0e38f;   // running maximum before the first visible key: finite, so never NaN

inline vf load_i8(const int8_t* p, int n) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // GCC 12 makes two halves of the conversion below
    if (n == kLanes) return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
    int8_t padded[kLanes] = {};
    std::memcpy(padded, p, n);
    vb bytes;
    std::memcpy(&bytes, padded, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, vi), vf);
}

// Keys [low, high) of a chunk, as keys[feature][key of the chunk] and values[key of the chunk][feature]; the rest zeros.
template <class T>
void gather(const Sight& sight, int64_t chunk, int64_t low, int64_t high, CacheAhead<T>& ahead, float* keys, float* values) {
    const CacheShape& shape = sight.a.cache_shape;
    const int64_t dim = shape.padded_dim(), size = shape.block_size;
    if (low > chunk || high < chunk + kChunk) {
        std::memset(keys, 0, dim * kChunk * sizeof(float));
        std::memset(values, 0, dim * kChunk * sizeof(float));
    }
    sight.for_blocks(low, high, [&](int64_t position, int64_t offset, int64_t count) {
        const T* k = reinterpret_cast<const T*>(sight.head(position, false));
        const T* v = reinterpret_cast<const T*>(sight.head(position, true));
        const float* k_scales = reinterpret_cast<const float*>(k + size * dim);
        const float* v_scales = reinterpret_cast<const float*>(v + size * dim);
        const int64_t at = position - chunk;
        for (int64_t d = 0; d < dim; d++)
            for_vectors(count, [&](int64_t i, int n) {
                const T* from = k + d * size + offset + i;
                if constexpr (sizeof(T) == 1)
                    store_n(keys + d * kChunk + at + i, load_i8(from, n) * load_n(k_scales + offset + i, n), n);
                else
                    store_n(keys + d * kChunk + at + i, load_n(from, n), n);
            });
        for (int64_t i = 0; i < count; i++) {
            ahead.fetch(2 * dim * int64_t(sizeof(T)));
            for (int64_t d = 0; d < dim; d += kLanes) {
                const T* from = v + (offset + i) * dim + d;
                if constexpr (sizeof(T) == 1)
                    store(values + (at + i) * dim + d, load_i8(from, kLanes) * v_scales[offset + i]);
                else
                    store(values + (at + i) * dim + d, load(from));
            }
        }
    });
}

constexpr int64_t kRowsInPlace = 24;  // that meet keys and values as they lie in the cache
constexpr int kRowsAtOnce = 6;  // of queries, that share what is read of a chunk
constexpr int vectors_at_once(int rows) { return rows > 4 ? 2 : 8 / rows; }  // sums in registers then: enough to hide what adding takes

constexpr int64_t kFetched = 8;  // features of keys, or values, for which is fetched at a time

// Whether the sums of so many rows take all registers there are. Where they do on AVX2, GCC moves sums about, and through memory, if it is left to
// it; and the loop around each feature, or key, takes a third as long as its products do, so some are met in one go.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool takes_registers(int rows) { return rows > 4; }
#else
constexpr bool takes_registers(int) { return false; }
#endif
constexpr int met_together(int rows) { return takes_registers(rows) ? 4 : 1; }

template <int kRows>
QUIRE_INLINE void add_product(vf& sum, vf a, vf b) {
    if constexpr (takes_registers(kRows)) asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));  // in this one, and in this order
    else sum += a * b;
}

// Where a vector's keys of a chunk lie, a feature after the other so far apart, and of i8 their scales.
template <class T>
struct ChunkKeys {
    const T* vectors[kChunk / kLanes];
    const float* scales[kChunk / kLanes];
    int64_t stride;
};

// As gathered; `scale` is of i8.
template <class T, class Scale>
QUIRE_INLINE vf load_scaled(const T* p, const Scale& scale) {
    if constexpr (sizeof(T) == 1) return load_i8(p, kLanes) * scale;
    else return load(p);
}

// What some rows, `query` scaled, make of keys [begin, end) of a chunk and others that are at hand: scores [row][key of the chunk]. `ahead`
// is null where keys are gathered.
template <int kRows, class T>
QUIRE_ONE_COPY void score_keys(const float* query, const ChunkKeys<T>& keys, int64_t dim, int64_t begin, int64_t end, CacheAhead<T>* ahead, float* scores) {
    constexpr int kWide = std::min<int>(vectors_at_once(kRows), kChunk / kLanes), kTogether = met_together(kRows);
    for (int64_t first = begin / (kWide * kLanes) * kWide; first * kLanes < end; first += kWide) {
        vf acc[kRows][kWide] = {};
        const T* from[kWide];
        vf scales[kWide] = {};
        for (int j = 0; j < kWide; j++) {
            from[j] = keys.vectors[first + j];
            if (sizeof(T) == 1) scales[j] = load(keys.scales[first + j]);
        }
        for (int64_t d = 0, stride = keys.stride; d < dim; d += kTogether) {
            if (ahead && d % kFetched == 0) ahead->fetch(kFetched * kWide * kLanes * int64_t(sizeof(T)));
#pragma GCC unroll 4
            for (int next = 0; next < kTogether; next++) {
                vf key[kWide];
#pragma GCC unroll 8
                for (int j = 0; j < kWide; j++) key[j] = load_scaled(from[j], scales[j]), from[j] += stride;
#pragma GCC unroll 8
                for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
                    for (int j = 0; j < kWide; j++) add_product<kRows>(acc[r][j], splat(query[r * dim + d + next]), key[j]);
            }
        }
        for (int r = 0; r < kRows; r++)
            for (int j = 0; j < kWide; j++) store(scores + r * kChunk + (first + j) * kLanes, acc[r][j]);
    }
}

// A row's scores, in units of which 2^x is the weight, as `softcap` is, become weights, of the keys that it sees; updates its maximum, its total, and to them its
// sum of values.
QUIRE_ONE_COPY inline void weigh_keys(float* scores, int64_t dim, int64_t first_key, int64_t end_key, float softcap, float& highest,
                                      float& total, float* weighted) {
    for (int64_t i = 0; i < kChunk && softcap > 0; i += kLanes) store(scores + i, capped(load(scores + i), softcap));
    for (int64_t i = 0; i < first_key; i++) scores[i] = -__builtin_inff();
    for (int64_t i = end_key; i < kChunk; i++) scores[i] = -__builtin_inff();
    vf most = splat(highest);
    for (int64_t i = 0; i < kChunk; i += kLanes) most = max(most, load(scores + i));
    const float new_highest = hmax(most);
    vf sum = vf{};
    for (int64_t i = 0; i < kChunk; i += kLanes) {
        const vf p = exp2_below_0(load(scores + i) - new_highest);
        store(scores + i, p);
        sum += p;
    }
    if (new_highest == highest) {  // mostly, and what is below would change no bit
        total += hsum(sum);
        return;
    }
    const float decay = exp2_below_0(splat(highest - new_highest))[0];
    highest = new_highest;
    total = total * decay + hsum(sum);
    for (int64_t d = 0; d < dim; d += kLanes) store(weighted + d, load(weighted + d) * decay);
}

// Adds the values of keys [begin, end), kKeys at a time, to so many vectors of the sums of some rows, all of which see them.
template <int kRows, int kWide, int kKeys, class T>
QUIRE_ONE_COPY void add_features(const float* weights, const T* values, const float* scales, int64_t dim, int64_t begin, int64_t end, CacheAhead<T>* ahead, float* weighted) {
    vf acc[kRows][kWide];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < kWide; j++) acc[r][j] = load(weighted + r * dim + j * kLanes);
    const T* from = values + begin * dim;
    for (int64_t i = begin; i < end; i += kKeys) {
        if (ahead && i % kFetched == 0) ahead->fetch(kFetched * kWide * kLanes * int64_t(sizeof(T)));
#pragma GCC unroll 4
        for (int next = 0; next < kKeys; next++, from += dim) {
            vf value[kWide];
#pragma GCC unroll 8
            for (int j = 0; j < kWide; j++) value[j] = load_scaled(from + j * kLanes, sizeof(T) == 1 ? scales[i + next] : 1.0f);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
                for (int j = 0; j < kWide; j++) add_product<kRows>(acc[r][j], splat(weights[r * kChunk + i + next]), value[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < kWide; j++) store(weighted + r * dim + j * kLanes, acc[r][j]);
}

template <int kRows, class T>
void add_values(const float* weights, const T* values, const float* scales, int64_t dim, int64_t begin, int64_t end, CacheAhead<T>* ahead, float* weighted) {
    constexpr int kWide = vectors_at_once(kRows), kTogether = met_together(kRows);
    const int64_t first = std::min(end, round_up(begin, kTogether)), last = std::max(first, end / kTogether * kTogether);
    for (int64_t d = 0; d < dim; d += kWide * kLanes)
        with_rows<kWide>((dim - d) / kLanes, [&](auto n) {
            if (begin < first) add_features<kRows, n, 1>(weights, values + d, scales, dim, begin, first, ahead, weighted + d);
            if (first < last) add_features<kRows, n, kTogether>(weights, values + d, scales, dim, first, last, ahead, weighted + d);
            if (last < end) add_features<kRows, n, 1>(weights, values + d, scales, dim, last, end, ahead, weighted + d);
        });
}

// What a span of keys comes to, for `rows` rows: sums of values weighted by 2^(score - highest), and of the weights.
struct Partial {
    float *weighted, *highest, *total;  // [rows * dim], [rows], [rows]; how rows lie is the kernel's business

    static int64_t floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }
    Partial(float* memory, int64_t rows, int64_t dim) : weighted(memory), highest(memory + rows * dim), total(highest + rows) {}
    // That of the rows from `row` on.
    Partial from(int64_t row, int64_t dim) const {
        Partial rest = *this;
        rest.weighted += row * dim, rest.highest += row, rest.total += row;
        return rest;
    }
};

// A row's sum of weights once its head's sink has been added; scores are in units of which 2^x is the weight.
struct WithSink {
    float keep, total;  // what the row's own sums are to be multiplied with, and the total after that

    template <class Exp>
    WithSink(const float* sinks, int64_t head, float unit, float highest, float before, const Exp& exp_of) : keep(1), total(before) {
        if (!sinks) return;
        const float sink = sinks[head] * unit, most = sink > highest ? sink : highest;
        keep = exp_of(highest - most), total = plain(before * keep) + exp_of(sink - most);
    }
};

// The tasks of a step, spans and all, on the pool. A Kernel knows how to compute a range's partial for keys [low, high), to
// merge a partial into the one before it, and to write out the last:
//   kernel.compute(range, low, high, partial, thread, after), kernel.merge(into, from, num_rows), kernel.write(range, partial)
// `after` is the range that the thread is likely to compute next, or null. Rows of a range of several heads follow each other, head by head.
template <class Kernel>
void run_attention(const AttentionArgs& a, Context& context, int64_t rows_per_task, const Kernel& kernel, int64_t rows_in_turn = 0) {
    const AttentionTasks tasks(a, rows_per_task, rows_in_turn, context.pool.size());
    const int64_t dim = a.cache_shape.padded_dim();
    const int64_t rows = round_up(tasks.most_rows(), 16), state = round_up(Partial::floats(rows, dim), 16);
    auto seen = [&](RowRange range) {  // keys that any row of it sees
        const Sight sight(a, range);
        return std::pair<int64_t, int64_t>{sight.lowest_key(range.begin), sight.end_key()};
    };
    auto span_of = [&](RowRange range, int64_t span, Partial partial, int thread, const RowRange* after) {
        auto [low, high] = seen(range);
        const int64_t begin = span * kSpan, end = begin + kSpan;
        kernel.compute(range, low > begin ? low : begin, high < end ? high : end, partial, thread, after);
    };
    auto write = [&](RowRange range, Partial partial, int thread) {
        const RowRange all = range;
        for (range.num_heads = 1; range.kv_head < all.kv_head + all.num_heads; range.kv_head++)
            kernel.write(range, partial.from((range.kv_head - all.kv_head) * all.num_rows(), dim), thread);
    };
    if (!tasks.cut_by_keys()) {
        context.pool.run(tasks.count(), [&](int64_t task, int thread) {
            float* memory = context.thread_scratch2[thread].get<float>(2 * state);
            const Partial whole(memory, rows, dim), next(memory + state, rows, dim);
            const RowRange range = tasks[task], after = tasks[std::min(task + context.pool.size(), tasks.count() - 1)];
            auto [low, high] = seen(range);
            for (int64_t span = low / kSpan; span * kSpan < high; span++) {
                const bool first = span == low / kSpan, last = (span + 1) * kSpan >= high;
                span_of(range, span, first ? whole : next, thread, last ? &after : nullptr);
                if (!first) kernel.merge(whole, next, range.num_rows() * range.num_heads);
            }
            write(range, whole, thread);
        });
        return;
    }
    // In waves of tasks, so that what the partials take is bounded however many threads and tokens there are.
    const int64_t most_spans = tasks.most_spans(), wave = std::max<int64_t>(1, kMostPartials / (most_spans * state));
    float* memory = context.shared.get<float>(std::min(wave, tasks.count()) * most_spans * state);
    for (int64_t first = 0; first < tasks.count(); first += wave) {
        const int64_t count = std::min(wave, tasks.count() - first);
        auto partial = [&](int64_t task, int64_t span) { return Partial(memory + (task * most_spans + span) * state, rows, dim); };
        context.pool.run(count * most_spans, [&](int64_t i, int thread) {
            const RowRange range = tasks[first + i / most_spans];
            auto [low, high] = seen(range);
            const int64_t span = i % most_spans;
            if ((span + 1) * kSpan > low && span * kSpan < high) span_of(range, span, partial(i / most_spans, span), thread, nullptr);
        });
        context.pool.run(count, [&](int64_t task, int thread) {
            const RowRange range = tasks[first + task];
            auto [low, high] = seen(range);
            const Partial whole = partial(task, low / kSpan);
            for (int64_t span = low / kSpan + 1; span * kSpan < high; span++)
                kernel.merge(whole, partial(task, span), range.num_rows() * range.num_heads);
            write(range, whole, thread);
        });
    }
}

// Partials by row; scores are in units of which exp_of(x) is the weight.
template <class Exp>
QUIRE_ONE_COPY void merge_rows(Partial into, Partial from, int64_t num_rows, int64_t dim, const Exp& exp_of) {
    for (int64_t r = 0; r < num_rows; r++) {
        const float highest = into.highest[r] > from.highest[r] ? into.highest[r] : from.highest[r];
        const vf keep = exp_of(splat(into.highest[r] - highest)), take = exp_of(splat(from.highest[r] - highest));
        // Each product is rounded by itself: of two to add, the compiler could fuse either one.
        auto sum = [](auto x, auto keep, auto y, auto take) { return plain(x * keep) + plain(y * take); };
        for (int64_t i = r * dim; i < (r + 1) * dim; i += kLanes)
            store(into.weighted + i, sum(load(into.weighted + i), keep, load(from.weighted + i), take));
        into.total[r] = sum(into.total[r], keep[0], from.total[r], take[0]);
        into.highest[r] = highest;
    }
}

// `unit`: of a sink, to be a score.
template <class T, class Exp>
void write_rows(const AttentionArgs& a, RowRange range, Partial partial, float unit, const Exp& exp_of) {
    const Sight sight(a, range);
    const int64_t dim = a.cache_shape.padded_dim();
    for (int64_t r = 0; r < range.num_rows(); r++) {
        T* out = static_cast<T*>(a.out) + sight.query_offset(range.begin + r, a.out_stride);
        const WithSink sum(a.sinks, sight.query_head(range.begin + r), unit, partial.highest[r], partial.total[r],
                           [&](float x) { return exp_of(splat(x))[0]; });
        const float factor = sum.keep / sum.total;
        // + 0, as whether a sum is -0 depends on keys that weigh nothing.
        for_vectors(a.cache_shape.head_dim,
                    [&](int64_t i, int n) { store_n(out + i, load_n(partial.weighted + r * dim + i, n) * factor + 0.0f, n); });
    }
}

template <class T, class Cached>
struct RowKernel {
    const AttentionArgs& a;
    Context& context;

    QUIRE_ONE_COPY void compute(RowRange range, int64_t low, int64_t high, Partial partial, int thread, const RowRange* after) const {
        Sight sight(a, range);
        const int64_t dim = a.cache_shape.padded_dim(), size = a.cache_shape.block_size, num_rows = range.num_rows();
        float* keys = context.thread_scratch[thread].get<float>(2 * kChunk * dim + num_rows * dim);
        float *values = keys + kChunk * dim, *query = values + kChunk * dim;
        const float scale = a.scale * kLog2e;
        for (int64_t r = 0; r < num_rows; r++) {
            const T* from = static_cast<const T*>(a.query) + sight.query_offset(range.begin + r, a.query_stride);
            for_vectors(a.cache_shape.head_dim, [&](int64_t i, int n) { store_n(query + r * dim + i, load_n(from + i, n) * scale, n); });
            for (int64_t i = a.cache_shape.head_dim; i < dim; i++) query[r * dim + i] = 0;
            for (int64_t i = 0; i < dim; i++) partial.weighted[r * dim + i] = 0;
            partial.highest[r] = kLowest, partial.total[r] = 0;
        }
        CacheAhead<Cached> ahead(sight, low, high, after, false);
        for (int64_t chunk = low / kChunk * kChunk; chunk < high; chunk += kChunk)
            for_views(sight, chunk, high, [&](int64_t stop, int64_t first_row, int64_t end_row) {
                const int64_t start = low > chunk ? low : chunk;
                auto attend = [&](const auto& lie, auto* ahead, const auto& for_values) {
                    for (int64_t r = first_row; r < end_row; r += kRowsAtOnce, ahead = nullptr)  // the first ones bring near what all read
                        with_rows<kRowsAtOnce>(end_row - r, [&](auto rows) { attend_chunk<rows>(sight, chunk, r, query, lie, ahead, for_values, partial); });
                };
                if (end_row - first_row <= kRowsInPlace && size % kLanes == 0 && stop <= sight.tail)
                    return attend(cached_keys(sight, chunk, start, stop), &ahead, [&](int64_t begin, int64_t end, const auto& body) {
                        sight.for_blocks(chunk + begin, chunk + end, [&](int64_t position, int64_t offset, int64_t count) {
                            const int64_t at = position - chunk;
                            const Cached* values = reinterpret_cast<const Cached*>(sight.head(position, true));
                            body(values + (offset - at) * dim, reinterpret_cast<const float*>(values + size * dim) + offset - at, at, at + count);
                        });
                    });
                gather<Cached>(sight, chunk, start, stop, ahead, keys, values);
                ChunkKeys<float> gathered{{}, {}, kChunk};
                for (int64_t i = 0; i < kChunk; i += kLanes) gathered.vectors[i / kLanes] = keys + i;
                attend(gathered, static_cast<CacheAhead<float>*>(nullptr), [&](int64_t begin, int64_t end, const auto& body) { body(values, nullptr, begin, end); });
            });
    }

    // Few rows read keys where they lie in the cache; those that none of them sees anywhere.
    static ChunkKeys<Cached> cached_keys(const Sight& sight, int64_t chunk, int64_t low, int64_t high) {
        const int64_t size = sight.a.cache_shape.block_size;
        ChunkKeys<Cached> keys{{}, {}, size};
        for (int64_t i = 0; i < kChunk; i += kLanes) {
            const int64_t position = chunk + i + kLanes > low && chunk + i < high ? chunk + i : low / kLanes * kLanes;
            const Cached* block = reinterpret_cast<const Cached*>(sight.head(position, false));
            keys.vectors[i / kLanes] = block + position % size;
            keys.scales[i / kLanes] = reinterpret_cast<const float*>(block + size * sight.a.cache_shape.padded_dim()) + position % size;
        }
        return keys;
    }

    // Rows of the task from `first` on meet a chunk. `for_values` calls body(values, scales, begin, end) for stretches of keys, whose values lie
    // one after the other, the chunk's first one's at `values`.
    template <int kRows, class K, class Values>
    void attend_chunk(const Sight& sight, int64_t chunk, int64_t first, const float* query, const ChunkKeys<K>& keys, CacheAhead<K>* ahead, const Values& for_values, Partial partial) const {
        const int64_t dim = a.cache_shape.padded_dim();
        alignas(64) float scores[kRows * kChunk];
        int64_t begin[kRows], end[kRows], common_begin = 0, common_end = kChunk, any_begin = kChunk, any_end = 0;
        for (int r = 0; r < kRows; r++) {
            const int64_t row = sight.range.begin + first + r;
            begin[r] = std::max<int64_t>(0, sight.lowest_key(row) - chunk), end[r] = std::min(kChunk, sight.position(row) + 1 - chunk);
            common_begin = std::max(common_begin, begin[r]), common_end = std::min(common_end, end[r]);
            any_begin = std::min(any_begin, begin[r]), any_end = std::max(any_end, end[r]);
        }
        score_keys<kRows>(query + first * dim, keys, dim, any_begin, any_end, ahead, scores);
        float* weighted = partial.weighted + first * dim;
        auto add = [&](auto rows, int64_t r, int64_t begin, int64_t end) {
            if (begin < end) for_values(begin, end, [&](const auto* values, const float* scales, int64_t from, int64_t to) {
                add_values<rows>(scores + r * kChunk, values, scales, dim, from, to, ahead, weighted + r * dim);
            });
        };
        const std::integral_constant<int, 1> one;
        // In the order of keys: what a row sees by itself, what all see, what it sees by itself.
        if (common_begin >= common_end) common_begin = common_end = kChunk;
        for (int r = 0; r < kRows; r++) {
            if (begin[r] >= end[r]) continue;
            weigh_keys(scores + r * kChunk, dim, begin[r], end[r], a.softcap * kLog2e, partial.highest[first + r], partial.total[first + r], weighted + r * dim);
            add(one, r, begin[r], std::min(end[r], common_begin));
        }
        add(std::integral_constant<int, kRows>(), 0, common_begin, common_end);
        for (int r = 0; r < kRows; r++)
            add(one, r, std::max(begin[r], common_end), end[r]);
    }

    void merge(Partial into, Partial from, int64_t num_rows) const {
        merge_rows(into, from, num_rows, a.cache_shape.padded_dim(), [](vf x) { return exp2_below_0(x); });
    }
    void write(RowRange range, Partial partial, int) const {
        write_rows<T>(a, range, partial, kLog2e, [](vf x) { return exp2_below_0(x); });
    }
};

inline void attention(const AttentionArgs& a, Context& context) {
    // Of a task, which share each gathered chunk: as many as stay in L2 with it.
    const int64_t rows = context.cache < (512 << 10) ? 96 : 192;
    const bool i8 = a.cache_shape.type == Type::i8;
    if (a.type == Type::f32)
        i8 ? run_attention(a, context, rows, RowKernel<float, int8_t>{a, context})
           : run_attention(a, context, rows, RowKernel<float, float>{a, context});
    else
        i8 ? run_attention(a, context, rows, RowKernel<bf16, int8_t>{a, context})
           : run_attention(a, context, rows, RowKernel<bf16, bf16>{a, context});
}

}  // namespace quire::QUIRE_NS
