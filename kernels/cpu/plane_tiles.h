// Tiles of quantised activation rows times blocks of bit planes; planes.h unpacks them.
#pragma once
#include "planes.h"

// Activation rows of a tile: as many sums as the registers hold besides the codes.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_ROWS = 8;
#else
constexpr int TILE_ROWS = 4;
#endif

// Quantised activation rows, each aligned to a cache line: the codes of all groups, then their scales
// and sums.
struct QuantizedRows {
  struct Scale {
    float scale;
    int16_t sum, first;  // of the group's codes, and of the first half of them
  };
  int8_t* memory;
  long stride, groups, group_size;  // stride: bytes between rows

  int8_t* codes(long group) const { return memory + group * group_size; }
  int8_t* scale_at(long group) const {
    return memory + groups * group_size + group * long(sizeof(Scale));
  }
  Scale scale(long group, long row) const { return load<Scale>(scale_at(group) + row * stride); }
  QuantizedRows from(long row) const { return {memory + row * stride, stride, groups, group_size}; }
};

// out[i * stride + n] = x[i] . w[n] for ROWS activation rows and the rows n of BLOCKS blocks, which
// begin at group `first` of the source. The order of all sums depends on the columns alone: a row
// gets the same bits in any tile.
template <int ROWS, int BLOCKS, class Source>
static inline void plane_tile(const QuantizedRows& x, const Source& source, long first, float* out,
                              long stride) {
  constexpr int WIDE = BLOCKS * SLICES;
  constexpr int CHAINS = Source::LOW || (ROWS * WIDE == 1 && !Source::HALVES) ? 2 : 1;
  const long row = x.stride, chunks = x.group_size / CHUNK;
  const int8_t* p = x.memory;
  vf total[ROWS][WIDE] = {};
  for (long group = first; group < first + x.groups; ++group) {
    vi sum[CHAINS][ROWS][WIDE] = {};
    // Not unrolled: bursts of prefetches delay the reads between them.
    _Pragma("GCC unroll 1") for (long chunk = 0; chunk < chunks; ++chunk, p += CHUNK) {
      vs pairs[ROWS][WIDE] = {};
      UNROLL for (int half = 0; half < 2; ++half) {
        vu code[WIDE][STEPS];
        UNROLL for (int s = 0; s < WIDE; ++s)
          source.load_steps(s, group * chunks + chunk, half, code[s]);
        UNROLL for (int j = 0; j < STEPS; ++j)
          UNROLL for (int i = 0; i < ROWS; ++i) {
            int32_t v;
            memcpy(&v, p + i * row + (half * STEPS + j) * 4, sizeof v);
            UNROLL for (int s = 0; s < WIDE; ++s) {
              vi& to = sum[j * CHAINS / STEPS][i][s];
              if constexpr (Source::HALVES) pairs[i][s] = add_pairs(pairs[i][s], code[s][j], v);
              else to = dot(to, code[s][j], v);
            }
          }
      }
      if constexpr (Source::HALVES)
        UNROLL for (int i = 0; i < ROWS; ++i)
          UNROLL for (int s = 0; s < WIDE; ++s) sum[0][i][s] += widen_pairs(pairs[i][s]);
    }
    UNROLL for (int s = 0; s < WIDE; ++s) {
      const vf w = source.load_scales(s, group);
      UNROLL for (int i = 0; i < ROWS; ++i) {
        const QuantizedRows::Scale own = x.scale(group - first, i);
        vi all = sum[0][i][s] - source.zero * own.sum;
        if constexpr (CHAINS > 1) all += sum[1][i][s] << Source::LOW;
        total[i][s] += (w * own.scale) * __builtin_convertvector(all, vf);
      }
    }
  }
  UNROLL for (int i = 0; i < ROWS; ++i)
    UNROLL for (int s = 0; s < WIDE; ++s) store(out + i * stride + s * LANES, total[i][s]);
}

// The same for `count` rows, at most TILE_ROWS, and any number of blocks.
template <int ROWS = TILE_ROWS, class Source>
__attribute__((noinline)) static void multiply_blocks(long count, const QuantizedRows& x,
                                                      const Source& source, long blocks,
                                                      float* out, long stride) {
  if constexpr (ROWS > 1)
    if (count < ROWS)
      return multiply_blocks<ROWS - 1>(count, x, source, blocks, out, stride);
  constexpr int WIDE = Source::BLOCKS;
  long block = 0;
  for (; block + WIDE <= blocks; block += WIDE)
    plane_tile<ROWS, WIDE>(x, source, block * x.groups, out + block * BLOCK_ROWS, stride);
  if constexpr (WIDE > 1)
    for (; block < blocks; ++block)
      plane_tile<ROWS, 1>(x, source, block * x.groups, out + block * BLOCK_ROWS, stride);
}
