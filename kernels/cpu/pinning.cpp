// Threads of parallel regions, each on a CPU of its own (kernels/cpu/pinning.py).
#include <omp.h>

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <sched.h>
#endif

// Keeps the calling thread and its team's others on `cpus`, one each. 0: the system refuses.
extern "C" int32_t moe_pin_threads(const int64_t* cpus, int32_t count) {
  std::atomic<int32_t> pinned{0};
#if defined(__linux__)
#pragma omp parallel num_threads(count)
  {
    const int64_t cpu = cpus[omp_get_thread_num()];
    cpu_set_t set;
    CPU_ZERO(&set);
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    pinned += !sched_setaffinity(0, sizeof set, &set);
  }
#endif
  return pinned == count;
}
