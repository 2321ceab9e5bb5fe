#include "thread_pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr auto kSpin = std::chrono::microseconds(60);  // longer than the gap between two regions of a call
constexpr auto kStay = std::chrono::microseconds(300);  // longer than that between two calls of a step: who sleeps, is up late for the next one

constexpr int kCountBits = 20;
constexpr uint64_t kCountMask = (1u << kCountBits) - 1;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // `yield` takes no time on most
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : parts_(num_threads) {
    for (int i = 1; i < num_threads; i++) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void ThreadPool::drain(int thread) {
    for (;;) {
        uint64_t taken = state_.fetch_add(1, std::memory_order_acq_rel);
        uint64_t task = taken & kCountMask, num_tasks = taken >> kCountBits & kCountMask;
        if (task >= num_tasks) return;
        call_(body_, int64_t(task), thread);
        done_.fetch_add(1, std::memory_order_release);
    }
}

void ThreadPool::run_tasks(int64_t num_tasks, Call call, const void* body) {
    // A late thread may still count one too many into the old word; the new one replaces it whole.
    call_ = call;
    body_ = body;
    done_.store(0, std::memory_order_relaxed);
    uint64_t region = (state_.load(std::memory_order_relaxed) >> 2 * kCountBits) + 1;
    state_.store(region << 2 * kCountBits | uint64_t(num_tasks) << kCountBits);
    if (sleeping_.load()) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    drain(0);
    for (int spins = 0; done_.load(std::memory_order_acquire) < num_tasks; spins++) {
        if (spins < 4096)
            relax();
        else
            std::this_thread::yield();
    }
}

void ThreadPool::work(int thread) {
    const FlushDenormals flushed;
    uint64_t seen = 0;
    auto region = [this] { return state_.load() >> 2 * kCountBits; };
    for (;;) {
        const auto start = std::chrono::steady_clock::now();
        bool yields = false;  // to whoever wants this core
        for (int spins = 1; region() == seen && !stop_; spins++) {
            if (yields)
                std::this_thread::yield();
            else
                relax();
            if (!yields && spins % 64) continue;
            const auto time = std::chrono::steady_clock::now() - start;
            yields = time > kSpin;
            if (time > kStay) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_.fetch_add(1);
                wake_.wait(lock, [&] { return region() != seen || stop_; });
                sleeping_.fetch_sub(1);
            }
        }
        if (stop_) return;
        seen = region();
        drain(thread);
    }
}

}  // namespace quire
