// Measures the stages of all calls, for kernels/cpu/stages.py.
#include "layouts.h"
#include "turns.h"

LAYOUT(stages::Times, runs, busy_ns, waiting_ns, bytes)

// From now on all calls add to `times`, of each of `stages::Name`; null: no longer.
extern "C" void moe_measure_stages(stages::Times* times) {
  stages::times.store(times, std::memory_order_relaxed);
}
