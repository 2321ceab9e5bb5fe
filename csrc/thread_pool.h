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
    struct alignas(64) Part {  // of tasks, a thread's own
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

public:
    // Where a thread gets tasks one by one: those of its own part, in order, and then what others have left of theirs.
    class Tasks {
    public:
        Tasks(std::vector<Part>& parts, int thread) : parts_(parts), part_(thread) {}
        bool take(int64_t& task) {
            for (; tried_ < parts_.size(); tried_++, part_ = (part_ + 1) % parts_.size()) {
                task = parts_[part_].next.fetch_add(1, std::memory_order_relaxed);
                if (task < parts_[part_].end) return true;
            }
            return false;
        }

    private:
        std::vector<Part>& parts_;
        size_t part_, tried_ = 0;
    };

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

    // Likewise for tasks that lie in memory one after the other: calls body(tasks, thread) once a thread, or again where another one comes
    // late. A thread's tasks follow each other, so that what one makes the CPU fetch is the next one's; and threads tell each other
    // nothing but at the start and the end, which takes half a microsecond each time where cores are far apart.
    template <class Body>
    void run_parts(int64_t num_tasks, const Body& body) {
        const int64_t count = size();
        for (int64_t i = 0; i < count; i++) parts_[i].next = num_tasks * i / count, parts_[i].end = num_tasks * (i + 1) / count;
        run(count, [&](int64_t, int thread) {
            Tasks tasks(parts_, thread);
            body(tasks, thread);
        });
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
    std::vector<Part> parts_;
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace quire
