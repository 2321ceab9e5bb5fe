// What attention reads of the cache, fetched before it is read: blocks lie anywhere, and CPUs foresee nothing beyond a page.
#pragma once

#include <unistd.h>

#include <optional>

#include "attention_sight.h"

namespace quire::QUIRE_NS {

// Bytes that are fetched before they are read, where that goes on at any time. On AVX2 a thread reads no more than 15 GB/s, and has but 256 or 512 KB of L2.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int64_t kLead = 8192;
#else
constexpr int64_t kLead = 16384;
#endif

// Whether what comes from memory is best fetched into L1 at once: into L1 of 32 KB, and on Intel's cores, it comes at half the rate of L2.
inline bool fetches_into_first() {
#if defined(__x86_64__)
    static const bool fetches = __builtin_cpu_is("amd") && sysconf(_SC_LEVEL1_DCACHE_SIZE) > 32 << 10;
    return fetches;
#else
    return false;
#endif
}

// What a thread reads of the cache from now on, fetched in the order of reading: chunk by chunk of a range, and then of the range after
// it, the keys of a chunk's blocks, head by head of those in turn, and then their values.
template <class Cached>
class CacheAhead {
public:
    // From the chunk of key `low` on, up to `high`. What comes first, somebody fetched already. `after` may be null. `whole`: so early that a
    // chunk is there, in L2, as a whole.
    CacheAhead(const Sight& sight, int64_t low, int64_t high, const RowRange* after, bool whole)
        : sight_(sight), chunk_(low / kChunk * kChunk), high_(high), after_(after), block_size_(sight.a.cache_shape.block_size),
          near_(!whole && fetches_into_first()) {
        if (kChunk % block_size_) high_ = 0, after_ = nullptr, value_ = true, stretch_ = num_stretches();  // a chunk's keys are no stretch of memory
        first_view();
        const int64_t lead = whole ? 2 * kChunk * sight.a.cache_shape.padded_dim() * int64_t(sizeof(Cached)) : kLead;
        for (int64_t left = lead; left > 0 && next_stretch();) {
            const int64_t size = std::min<int64_t>(left, end_ - from_);
            from_ += size, left -= size;
        }
    }
    // As much as is about to be read.
    QUIRE_INLINE void fetch(int64_t size) {
        if (end_ - from_ < size) return fetch_on(size);
        for (int64_t i = 0; i < size; i += 64) fetch_line(from_ + i);
        from_ += size;
    }

private:
    QUIRE_INLINE void fetch_line(const char* line) const { near_ ? __builtin_prefetch(line, 0, 3) : __builtin_prefetch(line, 0, 2); }
    int64_t num_stretches() const { return kChunk / block_size_; }
    // To the end of a stretch, and from the next one the rest. Seldom, so out of the way of products.
    __attribute__((noinline)) void fetch_on(int64_t size) {
        for (; size > 0; from_ += 64, size -= 64) {
            if (from_ >= end_ && !next_stretch()) return;
            fetch_line(from_);
        }
    }
    // To the next head in turn; false after the last one.
    bool next_head() {
        Sight& sight = *sight_;
        if (++head_ < sight.range.num_heads) return sight.range.kv_head++, true;
        sight.range.kv_head -= head_ - 1, head_ = 0;
        return false;
    }
    // The next keys or values of a block and head; false where nobody knows.
    bool next_stretch() {
        const CacheShape& shape = sight_->a.cache_shape;
        for (;;) {
            if (stretch_ == num_stretches()) {
                if (!next_head()) {
                    if (value_ && !next_view()) return false;
                    value_ = !value_;
                }
                stretch_ = 0;
            }
            const int64_t position = chunk_ + stretch_++ * block_size_, count = std::min(block_size_, end_key_ - position);
            if (count <= 0) continue;
            const int64_t row_bytes = shape.padded_dim() * int64_t(sizeof(Cached));
            from_ = reinterpret_cast<const char*>(sight_->head(position, value_));
            end_ = from_ + (value_ ? count : block_size_) * row_bytes;
            // An i8 cache's scales, which weights are made with, come along with the keys: who reads counts keys and values alone.
            const char* values = reinterpret_cast<const char*>(sight_->head(position, true));
            for (int64_t i = block_size_ * row_bytes; !value_ && i < shape.head_bytes(); i += 64) fetch_line(from_ + i), fetch_line(values + i);
            return true;
        }
    }
    // In the order of for_views.
    bool next_view() {
        if (!is_whole() && (sight_->node + 1) * sight_->group < sight_->range.end) {
            sight_->node++, end_view();
            return true;
        }
        chunk_ += kChunk;
        if (chunk_ >= high_) {
            if (!after_) return false;
            sight_.emplace(sight_->a, *after_);
            chunk_ = sight_->lowest_key(after_->begin) / kChunk * kChunk, high_ = sight_->end_key(), after_ = nullptr;
        }
        first_view();
        return true;
    }
    bool is_whole() const { return std::min(high_, chunk_ + kChunk) <= sight_->range.shared; }
    void first_view() {
        sight_->node = is_whole() ? 0 : sight_->range.begin / sight_->group;
        end_view();
    }
    void end_view() { end_key_ = is_whole() ? high_ : std::min(high_, sight_->position(sight_->node * sight_->group) + 1); }

    std::optional<Sight> sight_;
    int64_t chunk_, high_, end_key_ = 0;  // of the keys that are seen
    const RowRange* after_;
    const int64_t block_size_;
    const bool near_;
    int64_t head_ = 0;     // of those in turn
    bool value_ = false;
    int64_t stretch_ = 0;  // of the chunk, the one after this one:
    const char *from_ = nullptr, *end_ = nullptr;
};

}  // namespace quire::QUIRE_NS
