// Paged attention of bf16 queries on AMX, by the plan of attention.h: the same chunks in the same order.
//
// Keys are the A operand and 16 query rows the columns of B, so scores come as [key][query row]: maxima, sums and
// exponentials run down the keys with a lane for each row, and the weights are nearly the next product's B as they
// stand. Values lie by feature in the cache, as its A. Rows share tiles whatever token or head they belong to.
#pragma once

#include "amx.h"
#include "attention_parts.h"
#include "linear_amx.h"

namespace quire::QUIRE_NS {

// The next chunk's keys and values, to be fetched from memory while this one is computed: in four pieces, a few lines with
// every step of the softmax. All at once they would only fill the queue that loads wait in.
struct NextChunk {
    const uint8_t* pieces[4];
    int64_t piece_bytes = 0;

    // Line `i` of 64 of each piece, or several where a piece is longer.
    void fetch(int64_t i) const {
        for (int64_t at = i * 64; at < piece_bytes; at += 4096)
            for (const uint8_t* piece : pieces) _mm_prefetch(reinterpret_cast<const char*>(piece + at), _MM_HINT_T1);
    }
};

// Only where a block of 32 keys is one piece of memory for keys and one for values.
template <class Cached>
NextChunk next_chunk(const Sight& sight, int64_t chunk, int64_t high) {
    const CacheShape& shape = sight.a.cache_shape;
    NextChunk next;
    if (shape.block_size != 32 || chunk >= high) return next;
    for (int64_t i = 0; i < 2; i++) {
        const int64_t position = chunk + i * 32 < high ? chunk + i * 32 : chunk;
        next.pieces[2 * i] = sight.head(position, false), next.pieces[2 * i + 1] = sight.head(position, true);
    }
    next.piece_bytes = 32 * shape.padded_dim() * int64_t(sizeof(Cached));
    return next;
}

constexpr int64_t kTileRows = 16;   // query rows of a tile
constexpr int64_t kTaskTiles = 8;   // tiles of a task, which share each gathered chunk

// Where a task keeps what it works on. D is the padded head size.
struct AttentionScratch {
    bf16 *keys, *values;   // [64][D] and [D][64]
    float *key_scales, *value_scales;  // [64], of an i8 cache
    uint32_t* queries;     // [tile][D / 32] B tiles
    bf16* rows;            // [16][D]
    float* scores;         // [64][16]
    uint32_t* weights;     // two B tiles

    AttentionScratch(Scratch& scratch, int64_t dim) {
        uint8_t* p = scratch.get<uint8_t>(2 * kChunk * dim * 2 + 2 * kChunk * 4 + kTaskTiles * kTileRows * dim * 2 + kTileRows * dim * 2 + kChunk * 64 + 2048);
        auto take = [&p](auto*& field, int64_t bytes) { field = reinterpret_cast<std::remove_reference_t<decltype(field)>>(p), p += bytes; };
        take(keys, kChunk * dim * 2);
        take(values, kChunk * dim * 2);
        take(scores, kChunk * 64);
        take(weights, 2048);
        take(queries, kTaskTiles * kTileRows * dim * 2);
        take(rows, kTileRows * dim * 2);
        take(key_scales, kChunk * 4);
        take(value_scales, kChunk * 4);
    }
};

// Vector by vector: for pieces of this size a call of memcpy costs more than the copy.
inline void copy_bf16(bf16* out, const bf16* from, int64_t count) {
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) _mm512_storeu_si512(out + i, _mm512_loadu_si512(from + i));
    if (count - i == 16) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    } else if (i < count) {
        const __mmask32 rest = (1u << (count - i)) - 1;
        _mm512_mask_storeu_epi16(out + i, rest, _mm512_maskz_loadu_epi16(rest, from + i));
    }
}
inline void copy_bf16(bf16* out, const int8_t* from, int64_t count) {  // small integers are exact in bf16
    for (int64_t i = 0; i < count; i += kLanes) {
        int n = count - i < kLanes ? int(count - i) : kLanes;
        store_n(out + i, load_i8(from + i, n), n);
    }
}

template <class Cached>
void gather_tiles(const Sight& sight, int64_t chunk, int64_t low, int64_t high, const AttentionScratch& s) {
    const CacheShape& shape = sight.a.cache_shape;
    const int64_t dim = shape.padded_dim(), size = shape.block_size;
    if (low > chunk || high < chunk + kChunk) {
        std::memset(s.keys, 0, kChunk * dim * 2);
        std::memset(s.values, 0, kChunk * dim * 2);
        std::memset(s.key_scales, 0, kChunk * 4);
        std::memset(s.value_scales, 0, kChunk * 4);
    }
    sight.for_blocks(low, high, [&](int64_t position, int64_t offset, int64_t count) {
        const Cached* k = reinterpret_cast<const Cached*>(sight.head(position, false));
        const Cached* v = reinterpret_cast<const Cached*>(sight.head(position, true));
        const int64_t at = position - chunk;
        copy_bf16(s.keys + at * dim, k + offset * dim, count * dim);
        for (int64_t d = 0; d < dim; d++) copy_bf16(s.values + d * kChunk + at, v + d * size + offset, count);
        if (sizeof(Cached) == 1) {
            std::memcpy(s.key_scales + at, reinterpret_cast<const float*>(k + size * dim) + offset, count * 4);
            std::memcpy(s.value_scales + at, reinterpret_cast<const float*>(v + size * dim) + offset, count * 4);
        }
    });
}

// A chunk's keys and values as A tiles: 16 keys by features, and features by 32 keys. In the cache itself where a tile
// lies in one block, else in the scratch copy.
struct ChunkTiles {
    const bf16* keys[4];
    const bf16* values[2];
    int64_t value_stride;  // bytes from feature to feature
};

template <class Cached>
ChunkTiles chunk_tiles(const Sight& sight, int64_t chunk, int64_t low, int64_t high, const AttentionScratch& s) {
    const CacheShape& shape = sight.a.cache_shape;
    const int64_t dim = shape.padded_dim();
    if (sizeof(Cached) == 2 && shape.block_size % 32 == 0 && low == chunk && high == chunk + kChunk && high <= sight.tail) {
        ChunkTiles tiles;
        for (int64_t i = 0; i < 2; i++) {
            const int64_t position = chunk + i * 32, offset = position % shape.block_size;
            tiles.keys[2 * i] = reinterpret_cast<const bf16*>(sight.head(position, false)) + offset * dim;
            tiles.keys[2 * i + 1] = tiles.keys[2 * i] + 16 * dim;
            tiles.values[i] = reinterpret_cast<const bf16*>(sight.head(position, true)) + offset;
        }
        tiles.value_stride = shape.block_size * 2;
        return tiles;
    }
    gather_tiles<Cached>(sight, chunk, low, high, s);
    return {{s.keys, s.keys + 16 * dim, s.keys + 32 * dim, s.keys + 48 * dim}, {s.values, s.values + 32}, kChunk * 2};
}

// The softmax of a chunk's scores [key][row]: updates maximum and total of each row, and leaves the weights as B tiles.
// Returns whether the weighted sums shrink, by `decay`.
template <bool kScaled, bool kMasked, bool kCapped>
inline bool weigh_chunk(const AttentionScratch& s, Partial partial, int64_t tile, int64_t chunk, ScoreFactors factors, __m512i first,
                        __m512i last, const NextChunk& next, __m512& decay) {
    const __m512 scale = _mm512_set1_ps(factors.outer), lowest = _mm512_set1_ps(kLowest);
    float* highest = partial.highest + tile * 16;
    const __m512 before = _mm512_load_ps(highest);
    __m512 most[4] = {before, before, before, before};
    __m512i key = _mm512_set1_epi32(int32_t(chunk));
    for (int64_t i = 0; i < kChunk; i++) {
        next.fetch(i);
        __m512 raw = _mm512_load_ps(s.scores + i * 16);
        if (kScaled) raw = _mm512_mul_ps(raw, _mm512_set1_ps(s.key_scales[i]));
        if (kCapped) raw = tanh_of(raw, factors.inner);
        __m512 v = _mm512_mul_ps(raw, scale);
        if (kMasked) {
            const __mmask16 seen = _mm512_cmple_epi32_mask(first, key) & _mm512_cmple_epi32_mask(key, last);
            raw = _mm512_mask_mov_ps(lowest, seen, raw), v = _mm512_mask_mov_ps(lowest, seen, v);
            key = _mm512_add_epi32(key, _mm512_set1_epi32(1));
        }
        if (kScaled || kMasked || kCapped) _mm512_store_ps(s.scores + i * 16, raw);
        most[i % 4] = _mm512_max_ps(most[i % 4], v);
    }
    const __m512 now = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    const __m512 base = _mm512_sub_ps(_mm512_setzero_ps(), now);
    // A row that has seen nothing yet has the lowest maximum: what it does not see must weigh 0, not 2^0.
    const __mmask16 blind = kMasked ? _mm512_cmp_ps_mask(now, lowest, _CMP_EQ_OQ) : __mmask16(0);
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t i = 0; i < kChunk; i += 2) {
        __m512 even = _mm512_load_ps(s.scores + i * 16), odd = _mm512_load_ps(s.scores + i * 16 + 16);
        // Fused by name: left to the compiler, the masked form could round otherwise than the other, and which of the two a
        // row meets depends on its neighbours.
        even = exp2_of(_mm512_fmadd_ps(even, scale, base)), odd = exp2_of(_mm512_fmadd_ps(odd, scale, base));
        if (kMasked) even = _mm512_mask_mov_ps(even, blind, _mm512_setzero_ps()), odd = _mm512_mask_mov_ps(odd, blind, _mm512_setzero_ps());
        sums[0] = _mm512_add_ps(sums[0], even);
        sums[1] = _mm512_add_ps(sums[1], odd);
        if (kScaled) {
            even = _mm512_mul_ps(even, _mm512_set1_ps(s.value_scales[i]));
            odd = _mm512_mul_ps(odd, _mm512_set1_ps(s.value_scales[i + 1]));
        }
        const __m512i low = _mm512_cvtepu16_epi32(__m256i(_mm512_cvtneps_pbh(even)));
        const __m512i high = _mm512_cvtepu16_epi32(__m256i(_mm512_cvtneps_pbh(odd)));
        _mm512_store_si512(s.weights + i / 2 * 16, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    decay = exp2_of(_mm512_sub_ps(before, now));
    _mm512_store_ps(highest, now);
    float* total = partial.total + tile * 16;
    _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_load_ps(total), decay, _mm512_add_ps(sums[0], sums[1])));
    return _mm512_cmp_ps_mask(before, now, _CMP_NEQ_UQ) != 0;
}

inline void multiply_keys(const AttentionScratch& s, const ChunkTiles& chunk, int64_t tile, int64_t dim) {
    zero_sums();
    const uint32_t* queries = s.queries + tile * dim / 32 * 256;
    for (int64_t d = 0; d < dim; d += 32) {
        _tile_loadd(5, queries + d / 32 * 256, 64);
        _tile_loadd(4, chunk.keys[0] + d, dim * 2);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, chunk.keys[1] + d, dim * 2);
        _tile_dpbf16ps(1, 6, 5);
        _tile_loadd(4, chunk.keys[2] + d, dim * 2);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, chunk.keys[3] + d, dim * 2);
        _tile_dpbf16ps(3, 6, 5);
    }
    store_sums(s.scores, true);
}

inline void multiply_values(const AttentionScratch& s, const ChunkTiles& chunk, float* weighted, int64_t dim) {
    _tile_loadd(6, s.weights, 64);
    _tile_loadd(7, s.weights + 256, 64);
    for (int64_t d = 0; d < dim; d += 32) {
        float *c0 = weighted + d * 16, *c1 = c0 + 256;
        const int64_t row = chunk.value_stride / 2, first = d * row, second = (d + 16) * row;
        _tile_loadd(0, c0, 64);
        _tile_loadd(1, c1, 64);
        _tile_loadd(2, chunk.values[0] + first, chunk.value_stride);
        _tile_dpbf16ps(0, 2, 6);
        _tile_loadd(3, chunk.values[0] + second, chunk.value_stride);
        _tile_dpbf16ps(1, 3, 6);
        _tile_loadd(4, chunk.values[1] + first, chunk.value_stride);
        _tile_dpbf16ps(0, 4, 7);
        _tile_loadd(5, chunk.values[1] + second, chunk.value_stride);
        _tile_dpbf16ps(1, 5, 7);
        _tile_stored(0, c0, 64);
        _tile_stored(1, c1, 64);
    }
}

// The last keys that rows see, for those in [first, end); the others see none.
inline __m512i only_rows(__m512i last, int64_t first, int64_t end) {
    const uint32_t below_end = end < 16 ? (1u << end) - 1 : 0xffff, below_first = first > 0 ? (1u << first) - 1 : 0;
    return _mm512_mask_mov_epi32(_mm512_set1_epi32(-1), __mmask16(below_end & ~below_first), last);
}

// A partial holds tiles of 16 rows: weighted [tile][feature][row], highest and total [tile][row].
template <class Cached, bool kCapped>
struct TileKernel {
    const AttentionArgs& a;
    Context& context;

    QUIRE_ONE_COPY void compute(RowRange range, int64_t low, int64_t high, Partial partial, int thread, const RowRange*) const {
        constexpr bool kScaled = sizeof(Cached) == 1;
        const Tiles configured;
        Sight sight(a, range);
        const int64_t dim = a.cache_shape.padded_dim(), num_tiles = divide_up(range.num_rows(), kTileRows);
        const AttentionScratch s(context.thread_scratch[thread], dim);
        __m512i first[kTaskTiles], last[kTaskTiles];  // keys that each row sees
        int64_t earliest[kTaskTiles][2], latest[kTaskTiles][2];  // the lowest and the highest of a tile's rows
        for (int64_t t = 0; t < num_tiles; t++) {
            alignas(64) int32_t from[16], to[16];
            for (int64_t i = 0; i < kTileRows; i++) {
                int64_t row = range.begin + t * kTileRows + i;
                const bool there = row < range.end;
                row = there ? row : range.end - 1;  // one that isn't there sees what the last one does, with a query of zeros
                from[i] = int32_t(sight.lowest_key(row)), to[i] = int32_t(sight.position(row));
                const bf16* query = static_cast<const bf16*>(a.query) + sight.query_offset(row, a.query_stride);
                std::memset(s.rows + i * dim, 0, dim * 2);
                if (there) std::memcpy(s.rows + i * dim, query, a.cache_shape.head_dim * 2);
            }
            first[t] = _mm512_load_si512(from), last[t] = _mm512_load_si512(to);
            earliest[t][0] = from[0], earliest[t][1] = from[15];
            latest[t][0] = _mm512_reduce_min_epi32(last[t]), latest[t][1] = _mm512_reduce_max_epi32(last[t]);
            pack_columns(s.rows, dim, kTileRows, dim, s.queries + t * dim / 32 * 256);
            std::memset(partial.weighted + t * dim * 16, 0, dim * 64);
            store(partial.highest + t * 16, splat(kLowest));
            store(partial.total + t * 16, vf{});
        }
        const ScoreFactors factors(a);
        for (int64_t chunk = low / kChunk * kChunk; chunk < high; chunk += kChunk)
            for_views(sight, chunk, high, [&](int64_t end, int64_t first_row, int64_t end_row) {
                const ChunkTiles tiles = chunk_tiles<Cached>(sight, chunk, low > chunk ? low : chunk, end, s);
                NextChunk next = next_chunk<Cached>(sight, chunk + kChunk, high);
                const bool part = end_row - first_row < range.num_rows();  // the others see nothing of this
                for (int64_t t = first_row / kTileRows; t * kTileRows < end_row; t++) {
                    if (earliest[t][0] >= chunk + kChunk || latest[t][1] < chunk) continue;
                    const bool masked = part || earliest[t][1] > chunk || latest[t][0] < chunk + kChunk - 1;
                    const __m512i to = part ? only_rows(last[t], first_row - t * kTileRows, end_row - t * kTileRows) : last[t];
                    multiply_keys(s, tiles, t, dim);
                    __m512 decay;
                    const bool shrink =
                        masked ? weigh_chunk<kScaled, true, kCapped>(s, partial, t, chunk, factors, first[t], to, next, decay)
                               : weigh_chunk<kScaled, false, kCapped>(s, partial, t, chunk, factors, first[t], to, next, decay);
                    next.piece_bytes = 0;  // once is enough
                    float* weighted = partial.weighted + t * dim * 16;
                    for (int64_t d = 0; shrink && d < dim; d++)
                        _mm512_store_ps(weighted + d * 16, _mm512_mul_ps(_mm512_load_ps(weighted + d * 16), decay));
                    multiply_values(s, tiles, weighted, dim);
                }
            });
    }

    QUIRE_ONE_COPY void merge(Partial into, Partial from, int64_t num_rows) const {
        const int64_t dim = a.cache_shape.padded_dim();
        for (int64_t t = 0; t < divide_up(num_rows, kTileRows); t++) {
            const __m512 before = _mm512_load_ps(into.highest + t * 16), other = _mm512_load_ps(from.highest + t * 16);
            const __m512 highest = _mm512_max_ps(before, other);
            const __m512 keep = exp2_of(_mm512_sub_ps(before, highest)), take = exp2_of(_mm512_sub_ps(other, highest));
            auto merged = [&](float* to, const float* x) {
                _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), keep, _mm512_mul_ps(_mm512_load_ps(x), take)));
            };
            for (int64_t i = t * dim; i < (t + 1) * dim; i++) merged(into.weighted + i * 16, from.weighted + i * 16);
            merged(into.total + t * 16, from.total + t * 16);
            _mm512_store_ps(into.highest + t * 16, highest);
        }
    }

    void write(RowRange range, Partial partial, int) const {
        const Sight sight(a, range);
        const int64_t dim = a.cache_shape.padded_dim(), head_dim = a.cache_shape.head_dim;
        for (int64_t t = 0; t * kTileRows < range.num_rows(); t++) {
            const int64_t begin = range.begin + t * kTileRows;
            const int64_t count = range.end - begin < kTileRows ? range.end - begin : kTileRows;
            vf factor = 1.0f / load(partial.total + t * 16);
            for (int r = 0; a.sinks && r < count; r++) {
                const WithSink sum(a.sinks, sight.query_head(begin + r), kLog2e, partial.highest[t * 16 + r],
                                   partial.total[t * 16 + r], [](float x) { return _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(x))); });
                factor[r] = sum.keep / sum.total;
            }
            alignas(64) float in[256], out[256];
            for (int64_t d = 0; d < head_dim; d += 16) {
                for (int64_t i = 0; i < 16; i++) store(in + i * 16, load(partial.weighted + (t * dim + d + i) * 16) * factor);
                transpose_to(in, out, 16, count);
                const int n = head_dim - d < 16 ? int(head_dim - d) : 16;
                for (int64_t r = 0; r < count; r++)
                    store_n(static_cast<bf16*>(a.out) + sight.query_offset(begin + r, a.out_stride) + d, load(out + r * 16), n);
            }
        }
    }
};

inline void attention_amx(const AttentionArgs& a, Context& context) {
    if (a.type != Type::bf16) return attention(a, context);
    constexpr int64_t kRows = kTaskTiles * kTileRows;
    auto run = [&](auto kernel) { run_attention(a, context, kRows, kernel); };
    const bool i8 = a.cache_shape.type == Type::i8;
    if (a.softcap > 0)
        i8 ? run(TileKernel<int8_t, true>{a, context}) : run(TileKernel<bf16, true>{a, context});
    else
        i8 ? run(TileKernel<int8_t, false>{a, context}) : run(TileKernel<bf16, false>{a, context});
}

}  // namespace quire::QUIRE_NS
