#include "caches.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace quire {
namespace {

std::string word(const std::string& file) {
    std::string text;
    std::getline(std::ifstream(file), text);
    return text;
}

// How many CPUs a list like 0-3,8,10-11 names.
int64_t count_cpus(const std::string& list) {
    int64_t count = 0;
    for (const char* at = list.c_str(); *at;) {
        char* end;
        const long first = std::strtol(at, &end, 10);
        if (end == at) break;
        long last = first;
        if (*end == '-') last = std::strtol(end + 1, &end, 10);
        count += last - first + 1;
        at = *end == ',' ? end + 1 : end;
    }
    return std::max<int64_t>(count, 1);
}

int64_t clamped(int64_t bytes) { return bytes <= 0 ? kUsualCache : std::clamp<int64_t>(bytes, 256 << 10, 4 << 20); }

}  // namespace

int64_t cache_of(const std::string& folder) {
    int64_t siblings = 1;  // those that share the first level are one core
    for (int i = 0; i < 8; i++) {
        const std::string index = folder + "/index" + std::to_string(i) + "/";
        const std::string level = word(index + "level");
        if (level == "1") siblings = count_cpus(word(index + "shared_cpu_list"));
        if (level != "2" || word(index + "type") == "Instruction") continue;
        const std::string size = word(index + "size");
        char* unit;
        int64_t bytes = std::strtoll(size.c_str(), &unit, 10);
        bytes <<= *unit == 'K' ? 10 : *unit == 'M' ? 20 : 0;
        return bytes / std::max<int64_t>(count_cpus(word(index + "shared_cpu_list")) / siblings, 1);
    }
    return 0;
}

int64_t second_level_cache() {
    if (const char* told = std::getenv("QUIRE_L2_CACHE")) return clamped(std::atoll(told));
    int64_t least = 0;
#if defined(__APPLE__)
    int64_t bytes = 0, cores = 1;
    size_t size = sizeof bytes;
    if (sysctlbyname("hw.perflevel0.l2cachesize", &bytes, &size, nullptr, 0) == 0) {
        int32_t sharing = 1;
        size = sizeof sharing;
        if (sysctlbyname("hw.perflevel0.cpusperl2", &sharing, &size, nullptr, 0) == 0 && sharing > 0) cores = sharing;
        least = bytes / cores;
    }
#else
    for (int cpu = 0; cpu < 1024; cpu++) {
        const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache";
        const int64_t bytes = cache_of(folder);
        if (bytes == 0 && !std::ifstream(folder + "/index0/level").good()) break;
        if (bytes > 0 && (least == 0 || bytes < least)) least = bytes;
    }
#endif
    return clamped(least);
}

}  // namespace quire
