// Tiles of quantised activation rows times blocks of bit planes; planes.h unpacks them.
#pragma once
#include "planes.h"

// Activation rows of a tile: as many sums as the registers hold beside the codes.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_ROWS = 8;
#else
constexpr int TILE_ROWS = 4;
#endif

// Quantised activation rows, each group with its scale and with what its sums start from.
struct QuantizedRows {
  int8_t* codes;   // (rows, stride)
  float* scale;    // (rows, groups)
  int32_t* start;  // (rows, groups): -FROM_ZERO * the sum of the group's codes
  long stride, groups;

  QuantizedRows from(long row) const {
    return {codes + row * stride, scale + row * groups, start + row * groups, stride, groups};
  }
};

// out[i * stride + n] = x[i] . w[n] for ROWS activation rows and the rows n of BLOCKS blocks. The
// order of all sums depends on the columns alone: a row gets the same bits in any tile.
template <int ROWS, int BLOCKS, class Source>
static inline void plane_tile(const QuantizedRows& x, const Source& source, long block, float* out,
                              long stride) {
  constexpr int WIDE = BLOCKS * SLICES;
  constexpr int CHAINS = ROWS * WIDE == 1 ? 2 : 1;  // a single sum would wait for itself
  const long chunks = source.chunks / x.groups;
  const int8_t* p = x.codes;
  vf total[ROWS][WIDE] = {};
  for (long group = 0; group < x.groups; ++group) {
    vi sum[CHAINS][ROWS][WIDE] = {};
    UNROLL for (int i = 0; i < ROWS; ++i)
      UNROLL for (int s = 0; s < WIDE; ++s) sum[0][i][s] = vi{} + x.start[i * x.groups + group];
    for (long chunk = group * chunks; chunk < (group + 1) * chunks; ++chunk)
      UNROLL for (int half = 0; half < 2; ++half, p += CHUNK / 2) {
        vu code[WIDE][STEPS];
        UNROLL for (int s = 0; s < WIDE; ++s)
          source.load_steps(block * SLICES + s, chunk, half, code[s]);
        UNROLL for (int j = 0; j < STEPS; ++j)
          UNROLL for (int i = 0; i < ROWS; ++i) {
            int32_t v;
            memcpy(&v, p + i * x.stride + j * 4, sizeof v);
            UNROLL for (int s = 0; s < WIDE; ++s) {
              vi& to = sum[j % CHAINS][i][s];
              to = dot(to, code[s][j], v);
            }
          }
      }
    UNROLL for (int s = 0; s < WIDE; ++s) {
      const vf w = source.load_scales(block * SLICES + s, x.groups, group);
      UNROLL for (int i = 0; i < ROWS; ++i) {
        if constexpr (CHAINS > 1) sum[0][i][s] += sum[1][i][s];
        const vf dot = __builtin_convertvector(sum[0][i][s], vf);
        total[i][s] += (w * x.scale[i * x.groups + group]) * dot;
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
    plane_tile<ROWS, WIDE>(x, source, block, out + block * BLOCK_ROWS, stride);
  if constexpr (WIDE > 1)
    for (; block < blocks; ++block)
      plane_tile<ROWS, 1>(x, source, block, out + block * BLOCK_ROWS, stride);
}
