#include "topology.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <tuple>
#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "api.h"

namespace quire {
namespace {

constexpr int kMostNodes = 64;
constexpr double kFast = 0.7;  // of the fastest core's speed; favoured cores of one kind differ by a tenth

std::string line_of(const std::string& file) {
    std::string text;
    std::ifstream stream(file);
    std::getline(stream, text);
    return text;
}

int number_in(const std::string& file, int otherwise) {
    const std::string text = line_of(file);
    return text.empty() ? otherwise : std::atoi(text.c_str());
}

// Whether a list like 0-3,8,10-11 names the CPU.
bool names(const std::string& list, int cpu) {
    for (const char* at = list.c_str(); *at;) {
        char* end;
        const long first = std::strtol(at, &end, 10);
        if (end == at) return false;
        const long last = *end == '-' ? std::strtol(end + 1, &end, 10) : first;
        if (first <= cpu && cpu <= last) return true;
        at = *end == ',' ? end + 1 : end;
    }
    return false;
}

std::string folder_of(const std::string& root, int cpu) { return root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu); }

// The memory nodes' lists of CPUs, read once.
class Nodes {
public:
    explicit Nodes(const std::string& root) {
        for (int node = 0; node < kMostNodes; node++)
            lists_.push_back(line_of(root + "/sys/devices/system/node/node" + std::to_string(node) + "/cpulist"));
    }
    int of(int cpu) const {
        for (int node = 0; node < kMostNodes; node++)
            if (names(lists_[node], cpu)) return node;
        return 0;
    }

private:
    std::vector<std::string> lists_;
};

// How fast it is beside others of the machine, in a unit of its own. `slow`: the list of Intel's efficiency cores, which compute
// half as much in a cycle.
double speed_of(const std::string& root, const std::string& slow, int cpu) {
    const std::string folder = folder_of(root, cpu);
    if (const int capacity = number_in(folder + "/cpu_capacity", 0)) return capacity;  // Arm
    const double clock = std::max(number_in(folder + "/cpufreq/cpuinfo_max_freq", 1), 1);
    return names(slow, cpu) ? clock / 2 : clock;
}

// CPUs' worth of a limit on `time` microseconds in each `period`; 0: none.
int whole_cpus(const std::string& time, double period) {
    const double most = std::atof(time.c_str());
    return most > 0 && period > 0 ? std::max(1, int(most / period)) : 0;
}

int least(int one, int other) { return one == 0 ? other : other == 0 ? one : std::min(one, other); }

#if defined(__linux__)
constexpr int kMostCpus = 8192;
using Mask = std::vector<unsigned long>;
Mask no_cpus() { return Mask(kMostCpus / (8 * sizeof(unsigned long))); }
cpu_set_t* set_of(Mask& mask) { return reinterpret_cast<cpu_set_t*>(mask.data()); }

// What this thread may use.
std::vector<int> allowed_cpus() {
    std::vector<int> found;
    Mask mask = no_cpus();
    if (sched_getaffinity(0, kMostCpus / 8, set_of(mask)) != 0) return found;
    for (int cpu = 0; cpu < kMostCpus; cpu++)
        if (CPU_ISSET_S(cpu, kMostCpus / 8, set_of(mask))) found.push_back(cpu);
    return found;
}

void allow(const std::vector<int>& cpus) {
    Mask mask = no_cpus();
    for (int cpu : cpus) CPU_SET_S(cpu, kMostCpus / 8, set_of(mask));
    sched_setaffinity(0, kMostCpus / 8, set_of(mask));  // where it is refused, all stays as it was
}

int current_cpu() { return sched_getcpu(); }
#else
std::vector<int> allowed_cpus() { return {}; }
void allow(const std::vector<int>&) {}
int current_cpu() { return 0; }
#endif

}  // namespace

OnOneNode::OnOneNode(int num_threads) {
    if (num_threads < 2) return;
    const std::vector<int> allowed = allowed_cpus(), cpus = computing_cpus("", allowed, current_cpu());
    const Nodes nodes("");
    const auto is_far = [&](int cpu) { return nodes.of(cpu) != nodes.of(cpus.front()); };
    if (size_t(num_threads) > cpus.size() || std::none_of(allowed.begin(), allowed.end(), is_far)) return;
    before_ = allowed;
    allow(cpus);
}

OnOneNode::~OnOneNode() {
    if (!before_.empty()) allow(before_);
}

std::vector<int> computing_cpus(const std::string& root, const std::vector<int>& allowed, int here) {
    const Nodes nodes(root);
    const std::string slow = line_of(root + "/sys/devices/cpu_atom/cpus");
    std::vector<double> speeds;
    for (int cpu : allowed) speeds.push_back(speed_of(root, slow, cpu));
    const double fastest = speeds.empty() ? 0 : *std::max_element(speeds.begin(), speeds.end());
    std::map<int, std::map<std::pair<int, int>, int>> cores_of;  // node -> core -> the first of its CPUs
    for (size_t i = 0; i < allowed.size(); i++) {
        const int cpu = allowed[i];
        if (speeds[i] < kFast * fastest) continue;
        const std::string topology = folder_of(root, cpu) + "/topology/";
        const std::pair<int, int> core(number_in(topology + "physical_package_id", 0), number_in(topology + "core_id", cpu));
        cores_of[nodes.of(cpu)].emplace(core, cpu);
    }
    std::vector<int> found;
    const int own = nodes.of(here);
    for (const auto& [node, cores] : cores_of) {
        if (cores.size() < found.size() || (cores.size() == found.size() && node != own)) continue;
        found.clear();
        for (const auto& [core, cpu] : cores) found.push_back(cpu);
    }
    std::sort(found.begin(), found.end());
    return found;
}

int granted_cpus(const std::string& root) {
    int found = 0;
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // hierarchy:controllers:path
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const bool is_first_version = controllers.find(",cpu,") != std::string::npos;
        if (!is_first_version && controllers != ",,") continue;
        const std::string mount = root + (is_first_version ? "/sys/fs/cgroup/cpu" : "/sys/fs/cgroup");
        // A limit of any group above counts, too. In a container the path may be the host's: only the mount is there then.
        for (std::string path = line.substr(second + 1);; path.erase(path.find_last_of('/'))) {
            if (path == "/") path.clear();
            const std::string group = mount + path + "/";
            if (is_first_version) {
                found = least(found, whole_cpus(line_of(group + "cpu.cfs_quota_us"), number_in(group + "cpu.cfs_period_us", 0)));
            } else {
                const std::string limit = line_of(group + "cpu.max");  // "max 100000", or the time and the period
                const size_t space = limit.find(' ');
                if (space != std::string::npos) found = least(found, whole_cpus(limit, std::atof(limit.c_str() + space)));
            }
            if (path.find('/') == std::string::npos) break;
        }
    }
    return found;
}

}  // namespace quire

using namespace quire;

namespace {

int num_cores(const std::string& root, const std::vector<int>& allowed, int here) {
    return least(int(computing_cpus(root, allowed, here).size()), granted_cpus(root));
}

int own_num_cores() {
#if defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname("hw.perflevel0.physicalcpu", &found, &size, nullptr, 0) == 0 ? found : 0;
#else
    return num_cores("", allowed_cpus(), current_cpu());
#endif
}

}  // namespace

// How many threads compute by default, on the machine whose files lie below `root`, where this process may use these CPUs and
// runs on the first of them; null asks for this one's, as it was when that was asked first. 0 where the system does not say.
QUIRE_API(int32_t, quire_num_cores, const char* root, const int32_t* cpus, int32_t num_cpus) {
    static const int own = own_num_cores();
    return root ? num_cores(root, std::vector<int>(cpus, cpus + num_cpus), num_cpus ? cpus[0] : 0) : own;
}
