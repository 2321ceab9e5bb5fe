// Linear layers of integers on both sides: x is rounded to eight bits, or to sixteen, with a scale for each row of its own, and bytes
// are multiplied. A row of sixteen bits is two rows of bytes, the high ones and the low ones: twice as much to multiply, and still half of
// what floats take where AVX512_VNNI is. Its largest magnitude is 127 * 256 then: bf16's own rounding of a product is coarser.
//
// Sums of integers are exact, so a row's bits are its own, whatever is computed beside it and in which order. Weights are
// bytes around 128 and x is signed, as VPDPBUSD (AVX512_VNNI) wants them; what 128 adds is taken off at the end. Weights of four bits
// become such bytes, or meet few rows as they are (w4a8.h).
//
// Few rows meet blocks one after the other, as they come from memory. Of many, up to twelve meet two blocks at once: 24 sums are in
// registers, and 14 loads serve 24 products, where those of one block would take 13 for 12 and CPUs load no more than they multiply.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "linear.h"
#include "w4a8.h"

namespace quire::QUIRE_NS {

constexpr int kIntRows = 12;  // rows of x that meet a block of weights at once: their sums stay in registers

constexpr int bytes_of_x(Type type) { return weight_format(type).rounds_x; }  // of a number

constexpr int64_t kIntPanels = 8;  // panels of rows that stay in L2 while all weights of a task meet them, at most

// Calls body with the places of a panel of so many rows as a constant.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int panel_places(int64_t num_rows) { return num_rows == 1 ? 1 : int(round_up(num_rows, 2)); }
template <class Body>
inline void with_panel_places(int64_t num_rows, const Body& body) {
    if (num_rows == 1) return body(std::integral_constant<int, 1>());
    with_rows<kIntRows / 2>(divide_up(num_rows, 2), [&](auto pairs) { body(std::integral_constant<int, 2 * pairs>()); });
}
#else
constexpr int panel_places(int64_t num_rows) { return int(num_rows); }
template <class Body>
inline void with_panel_places(int64_t num_rows, const Body& body) {
    with_rows<kIntRows>(num_rows, body);
}
#endif

inline int32_t sum_of(vi x) {
    int32_t sum = 0;
    for (int i = 0; i < kLanes; i++) sum += x[i];
    return sum;
}

// x in bytes, laid out for a kernel: panels of kRows rows of bytes at most, in them by kGroup columns: [columns / kGroup][places][kGroup]. Tiles,
// which take 64 columns at once, find kRows places in each panel, vectors no more than they multiply, and about as many in each. Rows of
// sixteen bits have two places, the first for the high bytes.
template <int kRows, int kGroup>
struct IntRows {
    int64_t num_rows, padded;  // rows, columns
    int bytes;                 // of a number
    int8_t* panels;            // [panels][kRows * padded]
    float* scales;             // [rows]
    int32_t* excess;           // [rows][bytes] what 128 adds to the sums of a row
    int32_t* less;             // [panels][kRows * tiles] what 8 takes from the sums of 32 columns, [tiles][places], or null

    // Room for them; `for_codes`: with what 8 takes from sums.
    IntRows(const LinearArgs& a, bool for_codes, Scratch& scratch) : num_rows(a.num_rows), padded(round_up(a.weight.num_tiles() * 32, kGroup)), bytes(bytes_of_x(a.weight.type)) {
        const int64_t room = num_panels() * kRows;
        panels = scratch.get<int8_t>(room * (padded + 8 + (for_codes ? padded / 8 : 0)));
        scales = reinterpret_cast<float*>(panels + room * padded);
        excess = reinterpret_cast<int32_t*>(scales + room);
        less = for_codes ? excess + room : nullptr;
    }
    int64_t num_panels() const { return divide_up(num_rows, kRows / bytes); }
    int8_t* panel(int64_t index) const { return panels + index * kRows * padded; }
    int32_t* panel_less(int64_t index) const { return less + index * kRows * (padded / 32); }
    RowGroup rows_of(int64_t index) const {
        RowGroup rows = RowGroups(num_rows, kRows / bytes)[index];
        if (kGroup != 4) rows.first = index * kRows, rows.count = num_rows - rows.first < kRows ? num_rows - rows.first : kRows;
        return rows;
    }

    void fill(const LinearArgs& a, int64_t index) const {
        const RowGroup rows = rows_of(index);
        for (int64_t place = 0; place < rows.count; place++) {
            const int64_t at = (rows.first + place) * a.x_stride, places = kGroup == 4 ? panel_places(rows.count * bytes) : kRows;
            auto fill = [&](auto* x) {
                if (bytes == 1) fill_row<1>(x + at, a.weight.cols, rows.first + place, index, place, places);
                else if constexpr (kGroup == 4) fill_row<2>(x + at, a.weight.cols, rows.first + place, index, place, places);
            };
            a.type == Type::bf16 ? fill(static_cast<const bf16*>(a.x)) : fill(static_cast<const float*>(a.x));
        }
    }
    void fill_all(const LinearArgs& a, ThreadPool& pool) const {
        pool.run(num_panels(), [&](int64_t index, int) { fill(a, index); });
    }

private:
    // The codes and scale of one row, as those of int8 weights are chosen (pack.h).
    template <int kBytes, class T>
    void fill_row(const T* x, int64_t cols, int64_t row, int64_t index, int64_t place, int64_t places) const {
        constexpr int64_t kStretch = 256;  // columns that are rounded before they are laid out: to take vectors apart takes longer
        constexpr float kMost = kBytes == 1 ? 127.0f : 127.0f * 256.0f;
        const float most = largest_magnitude(x, cols), inverse = most > 0 ? kMost / most : 0.0f;
        int8_t* out = panel(index) + place * kBytes * kGroup;
        vi total[kBytes] = {};
        for (int64_t begin = 0; begin < padded; begin += kStretch) {
            const int64_t end = padded - begin < kStretch ? padded : begin + kStretch;
            alignas(64) int8_t codes[kBytes][kStretch];
            for (int64_t first = begin; first < end; first += 32) {
                const T* from = x + first;
                T last[32];
                if (first + 32 > cols) {  // zeros beyond the last column
                    std::memset(last, 0, sizeof last);
                    if (first < cols) std::memcpy(last, from, (cols - first) * sizeof(T));
                    from = last;
                }
                vi tile{};
#pragma GCC unroll 4
                for (int i = 0; i < 32; i += kLanes) {
                    const vi integers = nearest(min(max(load(from + i) * inverse, splat(-kMost)), splat(kMost)));
                    const vi high = kBytes == 1 ? integers : (integers + 128) >> 8;
                    auto put = [&](int byte, vi numbers) QUIRE_ALWAYS {
                        const vb bytes = __builtin_convertvector(numbers, vb);
                        std::memcpy(codes[byte] + (first - begin) + i, &bytes, sizeof bytes);
                        total[byte] += numbers;
                    };
                    put(0, high);
                    if constexpr (kBytes == 2) put(1, integers - (high << 8));
                    tile += integers;
                }
                if (less) panel_less(index)[first / 32 * places + place] = -8 * sum_of(tile);
            }
#pragma GCC unroll 8
            for (int64_t i = 0; i < end - begin; i += kGroup, out += places * kGroup)
                for (int byte = 0; byte < kBytes; byte++) std::memcpy(out + byte * kGroup, codes[byte] + i, kGroup);
        }
        for (int byte = 0; byte < kBytes; byte++) excess[row * kBytes + byte] = 128 * sum_of(total[byte]);
        scales[row] = most / kMost;  // NaN where any of the row is: it shows
    }
};

#if defined(__ARM_FEATURE_DOTPROD)
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kSignedSums = false;
inline int32x4_t add_products(int32x4_t sum, uint8x16_t w, int8x16_t x) { return vusdotq_s32(sum, w, x); }

// Pairs of features and of rows: 2 x 8 products with 8 x 2 elements, of eight features at a time.
template <int kRows>
inline void int_pairs(const uint8_t* weights, int64_t num_quads, const int8_t* x, int32_t* sums) {
    int32x4_t acc[kRows / 2][4];
    for (auto& pair : acc)
        for (int32x4_t& sum : pair) sum = vdupq_n_s32(0);
    auto zip = [](auto a, auto b, bool upper) {
        const uint32x4_t first = vreinterpretq_u32_u8(a), second = vreinterpretq_u32_u8(b);
        return vreinterpretq_u8_u32(upper ? vzip2q_u32(first, second) : vzip1q_u32(first, second));
    };
    const uint8_t* rows = reinterpret_cast<const uint8_t*>(x);
    for (int64_t q = 0; q < num_quads; q += 2, weights += 128, rows += 2 * kRows * 4) {
        uint8x16_t w[4];
        for (int n = 0; n < 4; n++) w[n] = zip(vld1q_u8(weights + n / 2 * 16), vld1q_u8(weights + 64 + n / 2 * 16), n % 2);
        for (int m = 0; m < kRows / 2; m++) {
            const uint8x16_t pair = zip(vld1q_u8(rows + m / 2 * 16), vld1q_u8(rows + kRows * 4 + m / 2 * 16), m % 2);
            for (int n = 0; n < 4; n++) acc[m][n] = vusmmlaq_s32(acc[m][n], w[n], vreinterpretq_s8_u8(pair));
        }
    }
    for (int m = 0; m < kRows / 2; m++)
        for (int n = 0; n < 4; n++)
            for (int i = 0; i < 4; i++) sums[(2 * m + i % 2) * 16 + 2 * n + i / 2] = acc[m][n][i];
}
#else
constexpr bool kSignedSums = true;  // what 128 adds is not in them
inline int32x4_t add_products(int32x4_t sum, uint8x16_t w, int8x16_t x) {
    return vdotq_s32(sum, vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(128))), x);
}
#endif
#else
constexpr bool kSignedSums = false;
#endif

// Sums of kRows rows of a panel and the sixteen features of a block, over all columns.
template <int kRows>
inline void int_tile(const uint8_t* weights, int64_t num_tiles, const int8_t* x, int32_t* sums) {
#if defined(__AVX512VNNI__)
    constexpr int kApart = kRows < 4 ? (kRows + 3) / kRows : 1;  // sums of a row, added at the end: one product would wait for another
    __m512i acc[kApart][kRows];
    for (auto& apart : acc)
        for (__m512i& sum : apart) sum = _mm512_setzero_si512();
    for (int64_t t = 0; t < num_tiles; t++, weights += 512, x += 8 * kRows * 4) {
        fetch_ahead<kRows>(weights, 512);
#pragma GCC unroll 8
        for (int q = 0; q < 8; q++) {
            const __m512i w = _mm512_loadu_si512(weights + q * 64);
#pragma GCC unroll 12
            for (int m = 0; m < kRows; m++) {
                __m512i& sum = acc[q % kApart][m];
                sum = _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(four_of(x, q * kRows + m)));
            }
        }
    }
    for (int m = 0; m < kRows; m++) {
        for (int i = 1; i < kApart; i++) acc[0][m] = _mm512_add_epi32(acc[0][m], acc[i][m]);
        _mm512_storeu_si512(sums + m * 16, acc[0][m]);
    }
#elif defined(__AVX2__)
    for (int m = 0; m < kRows; m++) {
        __m256i acc[4] = {};  // two lanes a feature
        for (int64_t q = 0; q < num_tiles * 8; q++) {
            const __m256i v = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four_of(x, q * kRows + m))));
            for (int i = 0; i < 4; i++) {
                const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + q * 64 + i * 16)));
                acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(w, v));
            }
        }
        for (int i = 0; i < 4; i++) {
            alignas(32) int32_t lanes[8];
            std::memcpy(lanes, &acc[i], sizeof lanes);
            for (int feature = 0; feature < 4; feature++) sums[m * 16 + i * 4 + feature] = lanes[2 * feature] + lanes[2 * feature + 1];
        }
    }
#elif defined(__ARM_FEATURE_DOTPROD)
    for (int first = 0; first < 16; first += 8) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
        if constexpr (kRows > 1) {
            int_pairs<kRows>(weights + first * 4, num_tiles * 8, x, sums + first);
            continue;
        }
#endif
        int32x4_t acc[kRows][2];
        for (auto& row : acc) row[0] = row[1] = vdupq_n_s32(0);
        for (int64_t q = 0; q < num_tiles * 8; q++) {
            const uint8_t* from = weights + q * 64 + first * 4;
            const uint8x16_t w[2] = {vld1q_u8(from), vld1q_u8(from + 16)};
            for (int m = 0; m < kRows; m++) {
                const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(four_of(x, q * kRows + m)));
                for (int i = 0; i < 2; i++) acc[m][i] = add_products(acc[m][i], w[i], v);
            }
        }
        for (int m = 0; m < kRows; m++)
            for (int i = 0; i < 2; i++) vst1q_s32(sums + m * 16 + first + 4 * i, acc[m][i]);
    }
#else
    int32_t acc[kRows][16] = {};
    for (int64_t q = 0; q < num_tiles * 8; q++)
        for (int m = 0; m < kRows; m++)
            for (int feature = 0; feature < 16; feature++)
                for (int c = 0; c < 4; c++) acc[m][feature] += int32_t(weights[q * 64 + feature * 4 + c]) * x[(q * kRows + m) * 4 + c];
    std::memcpy(sums, acc, sizeof acc);
#endif
}

// Of each block of the pair that comes next so many bytes with every tile, to fetch meanwhile.
struct PairFetch {
    const uint8_t* blocks[2];
    int64_t step;
};

// A pair of blocks that lie in L2, and the rows of a panel: four columns of a row are read once for both.
template <int kRows>
inline void int_pair(const uint8_t* const (&weights)[2], int64_t num_tiles, const int8_t* x, [[maybe_unused]] PairFetch fetch, int32_t (&sums)[2][kIntRows * 16]) {
#if defined(__AVX512VNNI__)
    const uint8_t *first = weights[0], *second = weights[1];
    __m512i acc[2][kRows];
#pragma GCC unroll 12
    for (int m = 0; m < kRows; m++) acc[0][m] = acc[1][m] = _mm512_setzero_si512();
    for (int64_t t = 0; t < num_tiles; t++, first += 512, second += 512, x += 8 * kRows * 4) {
        for (int64_t i = 0; i < fetch.step; i += 64)
            for (const uint8_t* block : fetch.blocks) fetch_soon(block + i);
        for (const uint8_t*& block : fetch.blocks) block += fetch.step;
#pragma GCC unroll 8
        for (int q = 0; q < 8; q++) {
            const __m512i w[2] = {_mm512_loadu_si512(first + q * 64), _mm512_loadu_si512(second + q * 64)};
#pragma GCC unroll 12
            for (int m = 0; m < kRows; m++) {
                __m512i four = _mm512_set1_epi32(four_of(x, q * kRows + m));
#if !defined(QUIRE_EMULATE_AVX512)
                asm("" : "+v"(four));  // in a register: a load for each product is more than the CPU does
#endif
                for (int b = 0; b < 2; b++) acc[b][m] = _mm512_dpbusd_epi32(acc[b][m], w[b], four);
            }
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < kRows; m++)
        for (int b = 0; b < 2; b++) _mm512_storeu_si512(sums[b] + m * 16, acc[b][m]);
#else
    for (int b = 0; b < 2; b++) int_tile<kRows>(weights[b], num_tiles, x, sums[b]);
#endif
}

// A pair of blocks of weights, as they come or, in bytes, where they lie in L2, and the rows of a panel: to where their sums belong.
inline void multiply_pair(const LinearArgs& a, BlockPair pair, const uint8_t* const (&weights)[2], bool codes, const IntRows<kIntRows, 4>& rows, int64_t panel,
                          PairFetch fetch) {
    alignas(64) int32_t sums[2][kIntRows * 16];
    alignas(64) float values[kIntRows * 32];
    const int64_t tiles = a.weight.num_tiles();
    const int8_t* x = rows.panel(panel);
    const RowGroup group = rows.rows_of(panel);
    with_panel_places(group.count * rows.bytes, [&](auto places) {
        if constexpr (2 * places >= kIntRows)  // as many as there are in each of several panels
            if (!codes && rows.num_panels() > 1) return int_pair<places>(weights, tiles, x, fetch, sums);
        for (int b = 0; b < 1 + pair.has_second; b++)
            codes ? code_tile<places>(weights[b], tiles, x, rows.panel_less(panel), sums[b]) : int_tile<places>(weights[b], tiles, x, sums[b]);
    });
    for (int64_t m = 0; m < group.count; m++)
        for (int i = 0; i < 16 * (1 + pair.has_second); i += kLanes) {
            auto sum_of_byte = [&](int byte) QUIRE_ALWAYS {
                vi sum;
                std::memcpy(&sum, sums[i / 16] + (m * rows.bytes + byte) * 16 + i % 16, sizeof sum);
                return __builtin_convertvector(sum - (kSignedSums || codes ? 0 : rows.excess[(group.first + m) * rows.bytes + byte]), vf);
            };
            const vf sum = rows.bytes == 1 ? sum_of_byte(0) : sum_of_byte(0) * 256.0f + sum_of_byte(1);
            store(values + m * 32 + i, sum * rows.scales[group.first + m]);
        }
    finish_pair(a, pair, values, group.first, group.count);
}

inline void linear_int8(const LinearArgs& a, Context& context) {
    if (a.num_rows == 0) return;
    const Matrix& w = a.weight;
    const bool codes = w.type == Type::w4a8 && a.num_rows <= kCodeRows, expands = w.type == Type::w4a8 && !codes;
    // One panel each thread makes for itself: to wait for one that does, and to get it from there, takes longer.
    const bool few = a.num_rows * bytes_of_x(w.type) <= kIntRows, own = few && a.out != a.x;
    const IntRows<kIntRows, 4> all_rows(a, codes, context.shared);
    if (!own) all_rows.fill_all(a, context.pool);
    const BlockPairs pairs(a);
    const int64_t tiles = w.num_tiles(), read_bytes = tiles * w.tile_bytes(), block_bytes = codes ? read_bytes : tiles * 512;
    int64_t panels = context.cache / 4 / (kIntRows * all_rows.padded);  // that meet a pair of blocks in turn: they have a quarter of L2,
    panels = panels > kIntPanels ? kIntPanels : panels < 1 ? 1 : panels;
    int64_t group = divide_up(kTaskBytes, 2 * block_bytes), places = 1;
    if (all_rows.num_panels() > panels) {  // and another one a task's pairs, for other panels
        const int64_t fair = pairs.count / (4 * context.pool.size());  // no thread waits long for another
        group = context.cache / 4 / (2 * block_bytes);
        group = group < fair ? group : fair;
        places = group = group < 1 ? 1 : group;
    }
    const EvenTasks all_tasks(pairs.count, group, context.pool.size());
    context.pool.run_parts(all_tasks.count, [&](ThreadPool::Tasks& tasks, int thread) {
        int64_t task;
        if (!tasks.take(task)) return;  // before x is rounded: there may be more threads than blocks
        const auto rows = own ? IntRows<kIntRows, 4>(a, codes, context.thread_scratch2[thread]) : all_rows;
        if (own) rows.fill(a, 0);
        uint8_t* expanded = expands ? context.thread_scratch[thread].get<uint8_t>(2 * places * block_bytes) : nullptr;
        do {
            const int64_t begin = all_tasks.begin(task), end = all_tasks.end(task);
            for (int64_t first = 0; first < rows.num_panels(); first += panels)
                for (int64_t i = begin; i < end; i++) {
                    const BlockPair pair = pairs[i], next = pairs[i + 1 < pairs.count ? i + 1 : i];
                    const uint8_t* weights[2] = {w.tile(pair.first, 0), w.tile(pair.second, 0)};
                    for (int b = 0; expands && b < 1 + pair.has_second; b++) {
                        uint8_t* bytes = expanded + (2 * ((i - begin) % places) + b) * block_bytes;
                        if (first == 0) expand_w4a8(weights[b], tiles, bytes);
                        weights[b] = bytes;
                    }
                    if (!pair.has_second) weights[1] = weights[0];
                    const int64_t last = rows.num_panels() - first < panels ? rows.num_panels() : first + panels;
                    const int64_t step = round_up(divide_up(w.tile_bytes(), last - first), 64);
                    PairFetch fetch{{w.tile(next.first, 0), w.tile(next.second, 0)}, 0};
                    for (int64_t panel = first, fetched = first == 0 ? 0 : read_bytes; panel < last; panel++) {
                        fetch.step = fetched < read_bytes ? step : 0;
                        multiply_pair(a, pair, weights, codes, rows, panel, fetch);
                        for (const uint8_t*& block : fetch.blocks) block += tiles * fetch.step;
                        fetched += tiles * fetch.step;
                    }
                }
        } while (tasks.take(task));
    });
}

}  // namespace quire::QUIRE_NS
