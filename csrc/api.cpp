#include "api.h"

#include <pthread.h>

#include <cstring>
#include <map>
#include <memory>

#include "caches.h"
#include "cpu.h"
#include "topology.h"

namespace quire {
namespace {

struct State {
    std::vector<const Kernels*> levels = supported_levels();
    std::map<int, std::unique_ptr<Context>> contexts;  // by number of threads
    std::mutex mutex;                                  // of the map
};

// Never freed: threads may outlive static destructors. A forked child has none of the threads and makes its own.
State* g_state = new State;

// A fork waits for running calls, so that the child finds nothing half done.
void before_fork() {
    g_state->mutex.lock();
    for (auto& entry : g_state->contexts) entry.second->mutex.lock();
}
void after_fork() {
    for (auto& entry : g_state->contexts) entry.second->mutex.unlock();
    g_state->mutex.unlock();
}
void after_fork_in_child() {
    for (auto& entry : g_state->contexts) entry.second.release();
    g_state->contexts.clear();
    g_state->mutex.unlock();
}

const bool g_fork_hook = pthread_atfork(before_fork, after_fork, after_fork_in_child) == 0;

Context& context_of(int num_threads) {
    if (num_threads < 1) num_threads = 1;
    std::lock_guard<std::mutex> lock(g_state->mutex);
    std::unique_ptr<Context>& context = g_state->contexts[num_threads];
    if (!context) {
        const OnOneNode bound(num_threads);
        context = std::make_unique<Context>(num_threads);
    }
    return *context;
}

}  // namespace

Call::Call(int num_threads) : context(context_of(num_threads)), lock_(context.mutex) { begin_call(); }

}  // namespace quire

using namespace quire;

// Raised with every change of what a function takes, does or is told in a struct; library.py refuses another.
QUIRE_API(int32_t, quire_abi_version) { return 36; }

// Name of the i-th level that this CPU can run, best first; null beyond the last.
QUIRE_API(const char*, quire_level, int32_t i) {
    return i >= 0 && size_t(i) < g_state->levels.size() ? g_state->levels[i]->name : nullptr;
}

// The kernels of that level, for the functions that take some; null when the CPU lacks it.
QUIRE_API(const Kernels*, quire_kernels, const char* name) {
    for (const Kernels* level : g_state->levels)
        if (!std::strcmp(level->name, name)) return level;
    return nullptr;
}

// Name of the i-th operation that programs are made of; null beyond the last.
QUIRE_API(const char*, quire_operation, int32_t i) {
    return i >= 0 && i < kPortableKernels.num_operations ? kPortableKernels.operations[i].name : nullptr;
}

// Bytes of working memory that calls on so many threads have grown to.
QUIRE_API(int64_t, quire_scratch_bytes, int32_t num_threads) {
    const Call call(num_threads);
    return int64_t(call.context.scratch_bytes());
}

// Bytes that a core has of the second-level cache that a folder of Linux describes (caches.h); null asks for this machine's.
QUIRE_API(int64_t, quire_cache_of, const char* folder) { return folder ? cache_of(folder) : second_level_cache(); }
