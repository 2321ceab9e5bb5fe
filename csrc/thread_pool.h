// The one pool of threads that every kernel runs on. The caller is one of them.
//
// Workers spin for some microseconds after a region, as the next one of a call comes at once, stay for the next call of a step
// where nobody else wants the core, and then sleep: beside torch's OpenMP, or on a busy machine, a spinning thread takes what another needs.
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
    // A thread's own part of the tasks: how many of them were taken, and above kTakenBits the region that they are of. It begins when
    // somebody first looks for a task in it: were one thread to begin them all, a hundred cores' lines would come to it before each region.
    struct alignas(64) Part {
        std::atomic<uint64_t> taken{0};
    };
    static constexpr int kTakenBits = 24;

public:
    // Where a thread gets tasks one by one: those of its own part, in order, and then what others have left of theirs.
    class Tasks {
    public:
        Tasks(std::vector<Part>& parts, uint64_t region, int64_t num_tasks, int thread)
            : parts_(parts), region_(region), num_tasks_(num_tasks), part_(thread) {}
        bool take(int64_t& task) {
            const int64_t count = int64_t(parts_.size());
            for (; tried_ < count; tried_++, part_ = part_ + 1 < count ? part_ + 1 : 0) {
                const int64_t begin = num_tasks_ * part_ / count, end = num_tasks_ * (part_ + 1) / count;
                std::atomic<uint64_t>& taken = parts_[part_].taken;
                uint64_t seen = taken.load(std::memory_order_relaxed);
                while (seen < region_ && !taken.compare_exchange_weak(seen, region_, std::memory_order_relaxed)) {}
                // At the end all look through all parts: reading leaves their lines where others can read them, too.
                if (begin + int64_t(seen - region_) >= end) continue;
                task = begin + int64_t(taken.fetch_add(1, std::memory_order_relaxed) - region_);
                if (task < end) return true;
            }
            return false;
        }

    private:
        std::vector<Part>& parts_;
        const uint64_t region_;
        const int64_t num_tasks_;
        int64_t part_, tried_ = 0;
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
        const uint64_t region = part_region_ += uint64_t(1) << kTakenBits;
        run(size(), [&](int64_t, int thread) {
            Tasks tasks(parts_, region, num_tasks, thread);
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
    uint64_t part_region_ = 0;
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::vector<Part> parts_;  // apart from done_, as is what those who wait look at: each who is done would take it from all others
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace quire
