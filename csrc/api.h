// What the C functions of the library (api*.cpp, program.cpp) share: the contexts that calls run in.
//
// The library is plain C to the outside, loaded by quire/ops/native/library.py with ctypes: no Python or torch headers
// are needed to build it, one build serves every Python, and ctypes lets go of the GIL around each call.
#pragma once

#include <mutex>
#include <vector>

#include "kernels.h"

#define QUIRE_API extern "C" __attribute__((visibility("default")))

namespace quire {

// Something is computed; what waits for a quiet moment goes on waiting (touch.cpp).
void begin_call();
void end_call();

// One call on so many threads, while it lives. Calls on as many threads take turns; others run beside them.
class Call {
public:
    explicit Call(int num_threads);
    ~Call() { end_call(); }

    Context& context;

private:
    std::lock_guard<std::mutex> lock_;
};

}  // namespace quire
