// What the C functions of the library (api*.cpp) share: the level in use and its threads.
//
// The library is plain C to the outside, loaded by quire/ops/native/library.py with ctypes: no Python or torch headers
// are needed to build it, one build serves every Python, and ctypes lets go of the GIL around each call.
#pragma once

#include <mutex>

#include "kernels.h"

#define QUIRE_API extern "C" __attribute__((visibility("default")))

namespace quire {

const Kernels& kernels();  // of the level in use
Context& context();        // threads and scratch memory; one step, pack or draw at a time
std::mutex& call_mutex();  // held by every call that uses the context

}  // namespace quire
