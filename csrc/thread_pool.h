// The one pool of threads that every kernel runs on. The caller is one of them.
//
// Workers spin for some microseconds after a region, as the next one of a step comes at once, and then sleep: beside
// torch's OpenMP, or on a busy machine, a spinning thread takes the core that another needs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

// While it lives, this thread takes denormal numbers for 0, as AMX does anyway: each would cost over a hundred cycles.
class FlushDenormals {
public:
#if defined(__x86_64__)
    FlushDenormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
    ~FlushDenormals() { __builtin_ia32_ldmxcsr(before_); }

private:
    unsigned before_;
#elif defined(__aarch64__)
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(before_ | 1 << 24));
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

private:
    uint64_t before_;
#else
    ~FlushDenormals() {}  // or compilers take it for unused
#endif
};

class ThreadPool {
public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return int(workers_.size()) + 1; }

    // Calls body(task, thread) once for each task in [0, num_tasks), in any order, on any thread; returns when all are
    // done. Tasks are handed out one by one, so that a thread that the machine holds up keeps the others from nothing.
    template <class Body>
    void run(int64_t num_tasks, const Body& body) {
        if (num_tasks <= 0) return;
        const FlushDenormals flushed;
        if (num_tasks == 1 || workers_.empty() || num_tasks >= 1 << 20) {
            for (int64_t task = 0; task < num_tasks; task++) body(task, 0);
            return;
        }
        run_tasks(num_tasks, [](const void* b, int64_t task, int thread) { (*static_cast<const Body*>(b))(task, thread); },
                  &body);
    }

private:
    using Call = void (*)(const void* body, int64_t task, int thread);

    void run_tasks(int64_t num_tasks, Call call, const void* body);
    void work(int thread);
    void drain(int thread);

    // One word says which region it is, how many tasks it has and which is next, so that taking a task tells all three
    // at once: a thread that comes late finds nothing to do and touches nothing, and nobody waits for it.
    //   bits 40..63 region, 20..39 tasks, 0..19 next task
    std::atomic<uint64_t> state_{0};
    Call call_ = nullptr;
    const void* body_ = nullptr;
    alignas(64) std::atomic<int64_t> done_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace quire
