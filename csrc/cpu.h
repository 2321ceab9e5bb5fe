// Which levels of kernels this CPU can run.
#pragma once

#include <vector>

#include "kernels.h"

namespace quire {

// Best first; never empty. Asks the kernel for leave to use AMX tiles, which holds for threads started afterwards.
std::vector<const Kernels*> supported_levels();

}  // namespace quire
