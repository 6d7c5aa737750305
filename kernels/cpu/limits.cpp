// The most products a second that this CPU can compute: the yardstick of the benchmarks.
#include "amx.h"
#include "planes.h"

extern "C" {

int32_t moe_uses_amx() { return amx::ready; }

// Number of 8-bit products that `threads` threads compute in `rounds` rounds, on registers alone; the
// write to `sink` keeps the compiler from removing them.
int64_t moe_dot_products(int64_t rounds, int32_t threads, int32_t* sink) {
  constexpr int CHAINS = 8;  // more than an instruction's latency
  if (amx::ready) {
#pragma omp parallel num_threads(threads)
    amx::multiply_only(rounds);
    return rounds * threads * amx::ROWS * amx::ROWS * amx::ROW_BYTES;
  }
#pragma omp parallel num_threads(threads)
  {
    vi sum[CHAINS], all = {};
    UNROLL for (int i = 0; i < CHAINS; ++i) sum[i] = vi{} + i;
    for (int64_t round = 0; round < rounds; ++round)
      UNROLL for (int i = 0; i < CHAINS; ++i) {
        IN_REGISTER(sum[i]);
        sum[i] = dot(sum[i], vu{} + 0x01020304u, 0x04030201);
      }
    UNROLL for (int i = 0; i < CHAINS; ++i) all += sum[i];
#pragma omp atomic
    *sink += all[0];
  }
  return rounds * threads * CHAINS * LANES * 4;
}
}
