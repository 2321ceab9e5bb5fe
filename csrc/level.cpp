// Compiled once for each level of CPU features, with QUIRE_NS naming its namespace (see CMakeLists.txt).
#include "cache_moves.h"
#include "kernels.h"
#include "limits.h"
#include "ops.h"
#include "sampler.h"
#include "tuning.h"

namespace quire {

#define QUIRE_KERNELS(name, ns) {name, ns::kOperations.data(), int32_t(ns::kOperations.size()), ns::pack, ns::unpack_row, ns::sample, ns::move_slots, ns::bare_loop, ns::kNumWays, ns::choose_way, ns::tune, ns::order_of}

#if defined(__AMX_BF16__)
const Kernels kAmxKernels = QUIRE_KERNELS("amx", amx);
#elif defined(__AVX512BF16__)
const Kernels kAvx512Bf16Kernels = QUIRE_KERNELS("avx512_bf16", avx512_bf16);
#elif defined(__AVX512F__)
const Kernels kAvx512VnniKernels = QUIRE_KERNELS("avx512_vnni", avx512_vnni);
#elif defined(__AVX2__)
const Kernels kAvx2Kernels = QUIRE_KERNELS("avx2", avx2);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
const Kernels kNeonBf16Kernels = QUIRE_KERNELS("neon_bf16", neon_bf16);
#elif defined(__ARM_FEATURE_DOTPROD)
const Kernels kNeonDotKernels = QUIRE_KERNELS("neon_dot", neon_dot);
#else
const Kernels kPortableKernels = QUIRE_KERNELS("portable", portable);
#endif

}  // namespace quire
