#include "api.h"

#include <pthread.h>

#include <cstring>
#include <memory>

#include "cpu.h"

namespace quire {
namespace {

struct State {
    std::vector<const Kernels*> levels = supported_levels();
    const Kernels* level = levels.front();
    int num_threads = 1;
    std::unique_ptr<Context> context;
    std::mutex mutex;
};

// Never freed: threads may outlive static destructors. A forked child has none of the threads and makes its own.
State* g_state = new State;

// A fork waits for a running call, so that the child finds the mutex free and nothing half done.
void before_fork() { g_state->mutex.lock(); }
void after_fork() { g_state->mutex.unlock(); }
void after_fork_in_child() {
    g_state->context.release();
    g_state->mutex.unlock();
}

const bool g_fork_hook = pthread_atfork(before_fork, after_fork, after_fork_in_child) == 0;

}  // namespace

const Kernels& kernels() { return *g_state->level; }
std::mutex& call_mutex() { return g_state->mutex; }
Context& context() {
    if (!g_state->context) g_state->context = std::make_unique<Context>(g_state->num_threads);
    return *g_state->context;
}

}  // namespace quire

using namespace quire;

// Raised with every change of a function's or struct's layout; library.py refuses another.
QUIRE_API int32_t quire_abi_version() { return 1; }

// Name of the i-th level that this CPU can run, best first; null beyond the last.
QUIRE_API const char* quire_level(int32_t i) {
    return i >= 0 && size_t(i) < g_state->levels.size() ? g_state->levels[i]->name : nullptr;
}

// 0, or 1 when the CPU lacks that level.
QUIRE_API int32_t quire_set_level(const char* name) {
    std::lock_guard<std::mutex> lock(call_mutex());
    for (const Kernels* level : g_state->levels)
        if (!std::strcmp(level->name, name)) {
            g_state->level = level;
            return 0;
        }
    return 1;
}
QUIRE_API const char* quire_current_level() { return kernels().name; }

QUIRE_API void quire_set_num_threads(int32_t n) {
    std::lock_guard<std::mutex> lock(call_mutex());
    if (n < 1) n = 1;
    if (n == g_state->num_threads) return;
    g_state->num_threads = n;
    g_state->context.reset();
}
QUIRE_API int32_t quire_num_threads() { return g_state->num_threads; }
