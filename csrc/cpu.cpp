#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {
namespace {

#if defined(QUIRE_EMULATE_AMX)
bool amx_granted() { return true; }
#elif defined(__x86_64__)
bool amx_granted() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    bool bf16 = d >> 22 & 1, tile = d >> 24 & 1;
    if (!bf16 || !tile) return false;
#if defined(__linux__)
    constexpr long kArchReqXcompPerm = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
#else
    return false;
#endif
}
#endif

}  // namespace

std::vector<const Kernels*> supported_levels() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
    const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#if defined(QUIRE_HAVE_AMX)
    if (pairs && __builtin_cpu_supports("avx512vbmi") && amx_granted())
        found.push_back(&kAmxKernels);
#endif
#if defined(QUIRE_HAVE_AVX512_BF16)
    if (pairs) found.push_back(&kAvx512Bf16Kernels);
#endif
    if (avx512) found.push_back(&kAvx512Kernels);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&kAvx2Kernels);
#endif
    found.push_back(&kPortableKernels);
    return found;
}

}  // namespace quire
