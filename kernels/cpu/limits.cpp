// What this machine can do at most, for kernels/cpu/limits.py: loops that only read or only multiply.
#include "amx.h"
#include "calls.h"
#include "planes.h"

#include <algorithm>
#include <chrono>

namespace {

constexpr int ROUNDS = 5;

// Folds memory, as STREAMS parts side by side, each fetched `ahead` bytes ahead.
template <int STREAMS>
int32_t fold(const char* from, long bytes, long ahead) {
  const long part = bytes / STREAMS / 64 * 64;
  vu sum[STREAMS] = {}, all = {};
  for (long at = 0; at < part; at += 64)
    UNROLL for (int s = 0; s < STREAMS; ++s) {
      const char* line = from + s * part + at;
      if (ahead) __builtin_prefetch(line + ahead, 0, 3);
      UNROLL for (int i = 0; i < 64; i += sizeof(vu)) sum[s] ^= load<vu>(line + i);
    }
  UNROLL for (int s = 0; s < STREAMS; ++s) all ^= sum[s];
  return all[0];
}

// Seconds in which threads read their shares of the memory, the median of several rounds.
template <int STREAMS>
double read_seconds(const char* memory, long bytes, long ahead, int threads, int32_t* sink) {
  using clock = std::chrono::steady_clock;
  double seconds[ROUNDS];
  const long share = bytes / threads / 64 * 64;
  for (double& each : seconds) {
    const auto begun = clock::now();
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; ++t) {
      const int32_t sum = fold<STREAMS>(memory + t * share, share, ahead);
#pragma omp atomic
      *sink += sum;
    }
    each = std::chrono::duration<double>(clock::now() - begun).count();
  }
  std::sort(seconds, seconds + ROUNDS);
  return seconds[ROUNDS / 2];
}

}  // namespace

extern "C" {

// Bytes a second at which threads read `bytes` of memory in large pages, by the best of several numbers
// of streams a thread and of bytes that they are fetched ahead (0: as the processor does by itself). The
// write to `sink` keeps the compiler from removing the reads. 0: no memory.
double moe_read_speed(int64_t bytes, int32_t threads, int32_t* sink) {
  Scratch own;
  char* memory = own.reserve(bytes);
  if (!memory) return 0;
  memset(memory, 1, bytes);
  double best = 1e9;
  for (const long ahead : {0, 512, 4096}) {
    best = std::min(best, read_seconds<1>(memory, bytes, ahead, threads, sink));
    best = std::min(best, read_seconds<2>(memory, bytes, ahead, threads, sink));
    best = std::min(best, read_seconds<4>(memory, bytes, ahead, threads, sink));
    best = std::min(best, read_seconds<8>(memory, bytes, ahead, threads, sink));
  }
  return bytes / best;
}

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
    for (int64_t round = 0; round < rounds; ++round) {
      // 1 to 4 and their opposites in turn, so that no sum overflows.
      const int32_t x = static_cast<int32_t>(round % 2 ? 0x04030201u : 0xfcfdfeffu);
      UNROLL for (int i = 0; i < CHAINS; ++i) {
        IN_REGISTER(sum[i]);
        sum[i] = dot(sum[i], vu{} + 0x01020304u, x);
      }
    }
    UNROLL for (int i = 0; i < CHAINS; ++i) all += sum[i];
#pragma omp atomic
    *sink += all[0];
  }
  return rounds * threads * CHAINS * LANES * 4;
}
}
