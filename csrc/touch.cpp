// The first touch of memory, which takes the system up to 3 ms a MB where a virtual machine gives it back when it is free:
// at once on all threads, or ahead of its use by a thread that waits until nothing is computed.
#include "touch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <system_error>
#include <thread>
#if defined(__linux__)
#include <pthread.h>
#include <sys/mman.h>
#endif

#include "api.h"
#include "proc.h"

namespace quire {
namespace {

constexpr int64_t kPage = 4096, kPiece = 2 << 20;

using Clock = std::chrono::steady_clock;
std::atomic<int> g_num_calls{0};  // that run
std::atomic<int64_t> g_last_end{0};
constexpr auto kQuiet = std::chrono::milliseconds(20);

}  // namespace

void begin_call() { g_num_calls.fetch_add(1, std::memory_order_relaxed); }

void end_call() {
    g_last_end.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    g_num_calls.fetch_sub(1, std::memory_order_relaxed);
}

bool is_quiet() {
    const auto since = Clock::now().time_since_epoch() - Clock::duration(g_last_end.load(std::memory_order_relaxed));
    return g_num_calls.load(std::memory_order_relaxed) == 0 && since >= kQuiet;
}

void touch(const std::vector<Region>& regions, Context& context) {
    std::vector<Region> pieces;  // of one huge page each: two threads that touch it at once would both wait for the system
    for (Region rest : regions)
        while (rest.num_bytes > 0) {
            const int64_t left = kPiece - int64_t(reinterpret_cast<uintptr_t>(rest.begin) & (kPiece - 1));
            pieces.push_back({rest.begin, std::min(left, rest.num_bytes)});
            rest = {rest.begin + pieces.back().num_bytes, rest.num_bytes - pieces.back().num_bytes};
        }
    context.pool.run(int64_t(pieces.size()), [&](int64_t piece, int) {
        for (int64_t i = 0; i < pieces[piece].num_bytes; i += kPage)
            __atomic_fetch_or(pieces[piece].begin + i, 0, __ATOMIC_RELAXED);  // others may write there meanwhile
    });
}

TouchedCaches::TouchedCaches(const std::vector<HeadSpec>& heads) {
    for (const HeadSpec& own : heads) {
        const auto is_same = [&](const Layer& known) { return known.heads.layer == own.layer; };
        if (std::none_of(layers_.begin(), layers_.end(), is_same)) layers_.push_back({own, nullptr, 0});
    }
    std::stable_sort(layers_.begin(), layers_.end(),
                     [](const Layer& a, const Layer& b) { return a.heads.group < b.heads.group; });
}

void TouchedCaches::reach(const Operands& operands, Context& context) {
    std::vector<Region> regions;
    const StepArgs* step = nullptr;  // of the layer's group
    int64_t num_blocks = 0;          // up to the last one that it writes to
    for (Layer& layer : layers_) {
        if (layer.heads.step(operands) != step) {
            step = layer.heads.step(operands);
            num_blocks = *std::max_element(step->slots, step->slots + step->num_tokens) / step->block_size + 1;
        }
        uint8_t* cache = layer.heads.cache(operands);
        if (cache != layer.cache) layer.cache = cache, layer.num_touched = 0;
        const int64_t end = num_blocks * layer.heads.cache_shape(operands).block_bytes();
        if (end <= layer.num_touched) continue;
        regions.push_back({cache + layer.num_touched, end - layer.num_touched});
        layer.num_touched = end;
    }
    if (!regions.empty()) touch(regions, context);
}

#if defined(__linux__)
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE of Linux 5.14, which older headers lack
constexpr auto kStart = std::chrono::milliseconds(500);  // who computes at once touches by himself what he needs

// What is waiting. Never freed: the thread may outlive static destructors.
struct Waiting {
    std::mutex mutex;
    std::deque<Region> regions;  // a piece of each in turn: a layer's cache is of no use without the others'
    Clock::time_point since;     // when the last came
    bool has_thread = false;
};
Waiting* g_waiting = new Waiting;

// A forked child has no such thread, and perhaps a mutex that nobody will unlock.
const bool g_fork_hook = pthread_atfork(nullptr, nullptr, [] { g_waiting = new Waiting; }) == 0;

// Whether all of it is a process's own memory and no file's: its owner may have freed it, and another have come there since.
bool is_memory(const Region& region) {
    const unsigned long begin = reinterpret_cast<uintptr_t>(region.begin), end = begin + region.num_bytes;
    return for_lines("/proc/self/maps", [&](const char* line) {
        unsigned long first = 0, last = 0, inode = 1;
        std::sscanf(line, "%lx-%lx %*s %*s %*s %lu", &first, &last, &inode);
        return first <= begin && end <= last && inode == 0;
    });
}

// The system touches, which keeps what is there; the thread itself reads and writes nothing, as the owner may write
// meanwhile, or free it.
void touch_waiting(Waiting& waiting) {
    for (;;) {
        while (!is_quiet()) std::this_thread::sleep_for(kQuiet);
        std::unique_lock<std::mutex> lock(waiting.mutex);
        if (waiting.regions.empty()) {
            waiting.has_thread = false;
            return;
        }
        if (Clock::now() - waiting.since < kStart) {
            lock.unlock();
            std::this_thread::sleep_for(kQuiet);
            continue;
        }
        Region region = waiting.regions.front();
        waiting.regions.pop_front();
        lock.unlock();
        const int64_t num_bytes = region.num_bytes < kPiece ? region.num_bytes : kPiece;
        if (!is_memory(region) || !has_room(0) || madvise(region.begin, num_bytes, kPopulateWrite) != 0) continue;
        region = {region.begin + num_bytes, region.num_bytes - num_bytes};
        lock.lock();
        if (region.num_bytes) waiting.regions.push_back(region);
    }
}

void touch_ahead(uint8_t* memory, int64_t num_bytes) {
    const int64_t skipped = -int64_t(reinterpret_cast<uintptr_t>(memory)) & (kPage - 1);
    if (num_bytes - skipped < kPage) return;
    const std::lock_guard<std::mutex> lock(g_waiting->mutex);
    g_waiting->regions.push_back({memory + skipped, (num_bytes - skipped) / kPage * kPage});
    g_waiting->since = Clock::now();
    if (g_waiting->has_thread) return;
    try {
        std::thread([waiting = g_waiting] { touch_waiting(*waiting); }).detach();
        g_waiting->has_thread = true;
    } catch (const std::system_error&) {  // no thread to be had: a step will touch them
        g_waiting->regions.clear();
    }
}

}  // namespace
#else
namespace {
void touch_ahead(uint8_t*, int64_t) {}
}  // namespace
#endif

}  // namespace quire

using namespace quire;

// Touches every page of writable memory, on so many threads; with none, returns at once, and pages are touched by and by
// while nothing is computed and memory is left. Contents are kept.
QUIRE_API(void, quire_prefault, int32_t num_threads, uint8_t* memory, int64_t num_bytes) {
    if (num_threads == 0) return touch_ahead(memory, num_bytes);
    const Call call(num_threads);
    touch({{memory, num_bytes}}, call.context);
}
