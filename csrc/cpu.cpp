#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(QUIRE_HAVE_NEON) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(QUIRE_HAVE_NEON) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace quire {
namespace {

#if defined(__x86_64__)
// Which older compilers' __builtin_cpu_supports does not know.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

#if defined(QUIRE_EMULATE_AMX)
bool amx_granted() { return true; }
#elif defined(__x86_64__)
[[maybe_unused]] bool amx_granted() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    bool bf16 = d >> 22 & 1, tile = d >> 24 & 1, int8 = d >> 25 & 1;
    if (!bf16 || !tile || !int8) return false;
#if defined(__linux__)
    constexpr long kArchReqXcompPerm = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
#else
    return false;
#endif
}
#elif defined(QUIRE_HAVE_NEON) && defined(__linux__)
// By the numbers of the kernel's interface, as older headers lack the names: HWCAP_ASIMDDP, HWCAP2_I8MM and HWCAP2_BF16.
bool has_dot() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool has_bf16() { return (getauxval(AT_HWCAP2) >> 13 & 3) == 3; }
#elif defined(QUIRE_HAVE_NEON) && defined(__APPLE__)
bool has_feature(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
bool has_dot() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_bf16() { return has_feature("hw.optional.arm.FEAT_BF16") && has_feature("hw.optional.arm.FEAT_I8MM"); }
#elif defined(QUIRE_HAVE_NEON)
bool has_dot() { return false; }
bool has_bf16() { return false; }
#endif

}  // namespace

std::vector<const Kernels*> supported_levels() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
#if defined(QUIRE_EMULATE_AVX512)
    const bool avx512 = true;
    [[maybe_unused]] const bool pairs = true, bytes = true;
#else
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
                  __builtin_cpu_supports("fma") && has_f16c();  // without VNNI, pairs of integers in 256 bits are faster than floats in 512
    [[maybe_unused]] const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16"), bytes = __builtin_cpu_supports("avx512vbmi");
#endif
#if defined(QUIRE_HAVE_AMX)
    if (pairs && bytes && amx_granted()) found.push_back(&kAmxKernels);
#endif
#if defined(QUIRE_HAVE_AVX512_BF16)
    if (pairs) found.push_back(&kAvx512Bf16Kernels);
#endif
#if defined(QUIRE_HAVE_AVX512_VNNI)
    if (avx512) found.push_back(&kAvx512VnniKernels);
#endif
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) found.push_back(&kAvx2Kernels);
#elif defined(QUIRE_HAVE_NEON)
    if (has_dot() && has_bf16()) found.push_back(&kNeonBf16Kernels);
    if (has_dot()) found.push_back(&kNeonDotKernels);
#endif
    found.push_back(&kPortableKernels);
    return found;
}

}  // namespace quire
