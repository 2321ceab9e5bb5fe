// Which of a machine's CPUs compute by default: one of each fast core, of one memory node, and no more than a container may use.
#pragma once

#include <string>
#include <vector>

namespace quire {

// Of the CPUs that a process may use, by the kernel's numbers, one of each core that is about as fast as the fastest, all of the memory node that has most of them; where
// several have as many, of the one that CPU `here` is of. Threads of one core share what computes. A slow core (an efficiency core, a little one) that takes the last task of a
// region keeps all others waiting, and the next region begins after it.
// `root`: of the file system whose /sys is read.
std::vector<int> computing_cpus(const std::string& root, const std::vector<int>& allowed, int here);

// CPUs' worth of time that the process's control groups (version 2 or 1) grant it, rounded down, 1 at least; 0: no limit.
// A thread more would be stopped for the rest of each period, and all others would wait for it.
int granted_cpus(const std::string& root);

// While it lives, threads that this one makes are bound to one memory node, where it has cores for so many of them: what one
// of them touches first lies near to all. Nothing on machines with one node.
class OnOneNode {
public:
    explicit OnOneNode(int num_threads);
    ~OnOneNode();
    OnOneNode(const OnOneNode&) = delete;
    OnOneNode& operator=(const OnOneNode&) = delete;

private:
    std::vector<int> before_;  // what this thread may use, if that was changed
};

}  // namespace quire
