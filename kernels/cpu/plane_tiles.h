// Tiles of quantised activation rows times blocks of bit planes; planes.h unpacks them.
#pragma once
#include "planes.h"

// Activation rows of a tile: as many sums as the registers hold besides the codes. With fewer registers
// or wider steps, sums lie in memory between chunks.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 8;
constexpr bool SUMS_IN_MEMORY = false;
#elif defined(__aarch64__)
constexpr int TILE_ROWS = 8;
constexpr bool SUMS_IN_MEMORY = true;
#elif defined(VNNI)
constexpr int TILE_ROWS = 6;
constexpr bool SUMS_IN_MEMORY = false;
#else
constexpr int TILE_ROWS = 4;
constexpr bool SUMS_IN_MEMORY = true;
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
  long digits = 1;                  // rows that add up to one; see quantize_digits

  int8_t* codes(long group) const { return memory + group * group_size; }
  int8_t* scale_at(long group) const {
    return memory + groups * group_size + group * long(sizeof(Scale));
  }
  Scale scale(long group, long row) const { return load<Scale>(scale_at(group) + row * stride); }
  QuantizedRows from(long row) const { return digit(row * digits); }
  QuantizedRows digit(long d) const {
    return {memory + d * stride, stride, groups, group_size, digits};
  }
};

// Keeps an array in memory, where the registers are for something else.
template <bool KEPT, class T>
static inline T* in_memory(T* array) {
  if constexpr (KEPT) __asm__("" : "+r"(array) : : "memory");
  return array;
}

// out[i * stride + n] = x[i] . w[n] for ROWS activation rows and the rows n of BLOCKS blocks, which
// begin at group `first` of the source. The order of all sums depends on the columns alone: a row
// gets the same bits in any tile.
template <int ROWS, int BLOCKS, class Source>
static inline void plane_tile(const QuantizedRows& x, const Source& source, long first, float* out,
                              long stride) {
  constexpr int WIDE = BLOCKS * SLICES, HALVES = Source::HALVES;
  constexpr int CHAINS = Source::LOW || (ROWS * WIDE == 1 && !HALVES) ? 2 : 1;
  constexpr int PARTS = HALVES ? HALVES : 1;
  // Slices at a time: an activation serves them all, if a chunk's sums fit the registers.
  constexpr int SOME = LANES < 16 && PARTS == 2 ? 1 : WIDE;
  constexpr bool KEPT = SUMS_IN_MEMORY && ROWS > 1;
  const long row = x.stride, chunks = x.group_size / CHUNK;
  const int8_t* p = x.memory;
  vf totals[ROWS][WIDE] = {};
  vi sums[CHAINS][ROWS][WIDE];
  auto* total = in_memory<KEPT>(totals);
  auto* sum = in_memory<KEPT>(sums);
  for (long group = first; group < first + x.groups; ++group) {
    UNROLL for (int c = 0; c < CHAINS; ++c)
      UNROLL for (int i = 0; i < ROWS; ++i)
        UNROLL for (int s = 0; s < WIDE; ++s) sum[c][i][s] = vi{};
    // Not unrolled: bursts of prefetches delay the reads between them.
    _Pragma("GCC unroll 1") for (long chunk = 0; chunk < chunks; ++chunk, p += CHUNK) {
      UNROLL for (int first_slice = 0; first_slice < WIDE; first_slice += SOME) {
        vs pairs[PARTS][ROWS][SOME] = {};
        vi own[CHAINS][ROWS][SOME];
        typename Source::Chunk codes[SOME];
        UNROLL for (int s = 0; s < SOME; ++s)
          codes[s] = source.load_chunk(first_slice + s, group * chunks + chunk);
        if constexpr (!HALVES)
          UNROLL for (int c = 0; c < CHAINS; ++c)
            UNROLL for (int i = 0; i < ROWS; ++i)
              UNROLL for (int s = 0; s < SOME; ++s) own[c][i][s] = sum[c][i][first_slice + s];
        UNROLL for (int half = 0; half < 2; ++half) {
          typename Source::Half steps[SOME];
          UNROLL for (int s = 0; s < SOME; ++s) steps[s] = source.load_half(codes[s], half);
          UNROLL for (int j = 0; j < STEPS; ++j) {
            vu code[PARTS][SOME];
            UNROLL for (int part = 0; part < PARTS; ++part)
              UNROLL for (int s = 0; s < SOME; ++s) code[part][s] = source.code(steps[s], j, part);
            UNROLL for (int i = 0; i < ROWS; ++i) {
              int32_t v;
              memcpy(&v, p + i * row + (half * STEPS + j) * 4, sizeof v);
              UNROLL for (int part = 0; part < PARTS; ++part)
                UNROLL for (int s = 0; s < SOME; ++s) {
                  vi& to = own[j * CHAINS / STEPS][i][s];
                  vs& pair = pairs[part][i][s];
                  if constexpr (HALVES) pair = add_pairs(pair, code[part][s], v);
                  else to = dot(to, code[part][s], v);
                }
            }
          }
        }
        UNROLL for (int i = 0; i < ROWS; ++i)
          UNROLL for (int s = 0; s < SOME; ++s) {
            vi& to = sum[0][i][first_slice + s];
            if constexpr (HALVES) to += widen_pairs(pairs[0][i][s], 16);
            if constexpr (HALVES == 2) to += widen_pairs(pairs[1][i][s], 1);
            if constexpr (!HALVES)
              UNROLL for (int c = 0; c < CHAINS; ++c) sum[c][i][first_slice + s] = own[c][i][s];
          }
      }
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
