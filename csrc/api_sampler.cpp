// The sampler's C function. The struct's promises (sample_args.h) are native.py's to keep.
#include "api.h"
#include "sample_args.h"

QUIRE_API int32_t quire_sample(const quire::Kernels* level, int32_t num_threads, const quire::SampleArgs* args) {
    const quire::Call call(num_threads);
    level->sample(*args, call.context);
    return 0;
}
