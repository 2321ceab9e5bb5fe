// The sampler's C function. The struct's promises (sample_args.h) are native.py's to keep.
#include "api.h"
#include "sample_args.h"

QUIRE_API int32_t quire_sample(const quire::SampleArgs* args) {
    std::lock_guard<std::mutex> lock(quire::call_mutex());
    quire::kernels().sample(*args, quire::context());
    return 0;
}
