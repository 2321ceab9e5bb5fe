// What Linux says of memory in /proc.
#pragma once

#include <cstdint>
#include <cstdio>

namespace quire {

// Calls body(line) for each line of a file until it returns true; whether it did.
template <class Body>
bool for_lines(const char* path, const Body& body) {
    std::FILE* file = std::fopen(path, "r");
    bool found = false;
    char line[512];
    while (file && !found && std::fgets(line, sizeof line, file)) found = body(line);
    if (file) std::fclose(file);
    return found;
}

// Whether more than an eighth of the machine's memory could still be had, and so many bytes.
inline bool has_room(int64_t besides) {
    long long total = 0, available = 0;
    return for_lines("/proc/meminfo", [&](const char* line) {
        std::sscanf(line, "MemTotal: %lld", &total);
        return std::sscanf(line, "MemAvailable: %lld", &available) == 1 && available > total / 8 + besides / 1024;
    });
}

}  // namespace quire
