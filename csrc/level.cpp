// Compiled once for each level of CPU features, with QUIRE_NS naming its namespace (see CMakeLists.txt).
#include "add.h"
#include "attention.h"
#include "embedding.h"
#include "kernels.h"
#include "linear.h"
#include "sampler.h"
#include "scale.h"

#if defined(__AMX_BF16__)
#include "attention_amx.h"
#include "linear_amx.h"
#endif

namespace quire {

#define QUIRE_KERNELS(name, ns, linear_kernel, attention_kernel)                                                            \
    {                                                                                                                     \
        name, ns::linear_kernel, ns::norm, ns::embedding, ns::add_rows, ns::activation, ns::scale, ns::softcap, ns::prepare,        \
            ns::attention_kernel, ns::pack, ns::unpack_row, ns::sample                                                      \
    }

#if defined(__AMX_BF16__)
const Kernels kAmxKernels = QUIRE_KERNELS("amx", amx, linear_amx, attention_amx);
#elif defined(__AVX512F__)
const Kernels kAvx512Kernels = QUIRE_KERNELS("avx512", avx512, linear, attention);
#elif defined(__AVX2__)
const Kernels kAvx2Kernels = QUIRE_KERNELS("avx2", avx2, linear, attention);
#else
const Kernels kPortableKernels = QUIRE_KERNELS("portable", portable, linear, attention);
#endif

}  // namespace quire
