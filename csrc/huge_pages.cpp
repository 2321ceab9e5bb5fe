// Weights that are a mapped file's, moved into huge pages while the engine runs. Most systems keep files in pages of 4 KB, and then
// decoding is up to 15% slower: where those lie has to be looked up, too.
#include "api.h"

#if defined(__linux__)
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <system_error>
#include <thread>

#include "proc.h"

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kPiece = 2 << 20;  // a huge page
constexpr int kTurns = 32;           // of which a piece takes one where something is computed: it may keep a thread of that from its core

struct Mapping {
    uint8_t* begin;
    int64_t num_bytes;
    bool stays = false;  // from now on
};

// Those that threads are at. Never freed: these may outlive static destructors.
struct Moving {
    std::mutex mutex;
    std::condition_variable changed;
    std::list<Mapping> mappings;
};
Moving* g_moving = new Moving;

// A forked child has no such thread, and perhaps a mutex that nobody will unlock.
const bool g_fork_hook = pthread_atfork(nullptr, nullptr, [] { g_moving = new Moving; }) == 0;

// Whether a mapping is in small pages, an eighth of it at least, and the system has huge ones of a piece.
bool is_slow(const Mapping& mapping) {
    if (sysconf(_SC_PAGESIZE) != 4096) return false;
    const unsigned long at = reinterpret_cast<uintptr_t>(mapping.begin);
    bool is_here = false;
    long long huge = 0;  // KB
    for_lines("/proc/self/smaps", [&](const char* line) {
        unsigned long first = 0, last = 0;
        if (std::sscanf(line, "%lx-%lx ", &first, &last) == 2) is_here = first <= at && at < last;
        return is_here && std::sscanf(line, "FilePmdMapped: %lld", &huge) == 1;
    });
    return huge < mapping.num_bytes / 1024 / 8 * 7 &&
           for_lines("/sys/kernel/mm/transparent_hugepage/enabled", [](const char* line) { return !std::strstr(line, "[never]"); });
}

// The first piece that begins there or later.
uint8_t* first_piece(uint8_t* memory) { return memory + (-int64_t(reinterpret_cast<uintptr_t>(memory)) & (kPiece - 1)); }

// Piece by piece: a copy takes the place of each at once, and who reads there meanwhile waits in the system for a moment.
void move_pieces(Moving& moving, const Mapping& mapping) {
    uint8_t* to = first_piece(mapping.begin);
    const int64_t whole = (mapping.begin + mapping.num_bytes - to) / kPiece * kPiece;
    if (whole <= 0 || !is_slow(mapping)) return;
    uint8_t* taken = static_cast<uint8_t*>(mmap(nullptr, whole + kPiece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (taken == MAP_FAILED) return;
    uint8_t* from = first_piece(taken);
    madvise(from, whole, MADV_HUGEPAGE);
    int64_t moved = 0;
    auto wait = Clock::duration::zero();
    std::unique_lock<std::mutex> lock(moving.mutex);
    // With room for the mapping as it was: the next start is to find the file's own pages in memory.
    while (moved < whole && !moving.changed.wait_for(lock, wait, [&] { return mapping.stays; }) && has_room(mapping.num_bytes)) {
        lock.unlock();
        const auto start = Clock::now();
        std::memcpy(from + moved, to + moved, kPiece);
        const bool done = mremap(from + moved, kPiece, kPiece, MREMAP_MAYMOVE | MREMAP_FIXED, to + moved) != MAP_FAILED;
        wait = is_quiet() ? Clock::duration::zero() : (kTurns - 1) * (Clock::now() - start);
        lock.lock();
        if (!done) break;
        moved += kPiece;
    }
    lock.unlock();
    if (from > taken) munmap(taken, from - taken);
    munmap(from + moved, taken + whole + kPiece - from - moved);  // what was moved is not there any more, and others may be
}

void move_ahead(uint8_t* memory, int64_t num_bytes) {
    Moving& moving = *g_moving;
    const std::lock_guard<std::mutex> lock(moving.mutex);
    const auto mapping = moving.mappings.insert(moving.mappings.end(), {memory, num_bytes});
    try {
        std::thread([&moving, mapping] {
            move_pieces(moving, *mapping);
            const std::lock_guard<std::mutex> lock(moving.mutex);
            moving.mappings.erase(mapping);
            moving.changed.notify_all();
        }).detach();
    } catch (const std::system_error&) {  // no thread to be had
        moving.mappings.erase(mapping);
    }
}

// Returns once no thread is at it any more.
void leave(const uint8_t* memory) {
    Moving& moving = *g_moving;
    std::unique_lock<std::mutex> lock(moving.mutex);
    const auto is_it = [&](const Mapping& mapping) { return mapping.begin == memory; };
    for (Mapping& mapping : moving.mappings) mapping.stays |= is_it(mapping);
    moving.changed.notify_all();
    moving.changed.wait(lock, [&] { return std::none_of(moving.mappings.begin(), moving.mappings.end(), is_it); });
}

}  // namespace
}  // namespace quire
#else
namespace quire {
namespace {
void move_ahead(uint8_t*, int64_t) {}
void leave(const uint8_t*) {}
}  // namespace
}  // namespace quire
#endif

// Has a file's private mapping moved to huge pages of the process's own by and by, if it is in small ones and there is as much memory to
// spare. Contents and addresses stay; until it is told of again, with no bytes, nobody may write there or unmap it.
QUIRE_API(void, quire_huge_pages, uint8_t* memory, int64_t num_bytes) { num_bytes ? quire::move_ahead(memory, num_bytes) : quire::leave(memory); }
