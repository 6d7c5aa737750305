// The inner kernels on nested bit planes; kernels/planes.py says how the codes lie and
// kernels/quantized.py what is computed. A vector of a plane holds a few steps of 4 columns of 16
// rows: shifted and masked it is the operand of a dot product that adds 4 columns of each row, so
// no sum ever crosses lanes. Planes are unpacked in registers, and an unpacked vector serves all
// activation rows of a tile; for many rows the codes are unpacked to memory first.
//
// A chunk is 16 columns, 4 steps. A slice is the rows of a block that fill a vector: all with AVX-512.
#pragma once
#include "gemm.h"

constexpr int BLOCK_ROWS = 16, CHUNK = 16, STEPS = 4, STEP_BYTES = 64;
constexpr int SLICES = BLOCK_ROWS / LANES;

typedef int16_t vs __attribute__((vector_size(LANES * 4)));

// A code stands for 0. Codes are multiplied as they are, or less 128 where bytes must be signed; the
// sums start lower instead.
constexpr int ZERO_CODE = 136;
#if defined(__AVX512VNNI__)
constexpr int FROM_ZERO = ZERO_CODE;
#else
constexpr int FROM_ZERO = ZERO_CODE - 128;
#endif

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

// sum + the products of each lane's 4 weights with the 4 activations in `x`.
static inline vi dot(vi sum, vu codes, int32_t x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  // |w| <= 128 and |x| <= 127: no pair of products reaches the limit at which maddubs saturates.
  const __m256i w = (__m256i)(codes ^ 0x80808080u);
  const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(x), w);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), signed_x);
  return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  const vs w = bits<vs>(codes ^ 0x80808080u), v = bits<vs>(vi{} + x);
  const vi pairs = bits<vi>(((w << 8) >> 8) * ((v << 8) >> 8) + (w >> 8) * (v >> 8));
  return sum + ((pairs << 16) >> 16) + (pairs >> 16);
#endif
}

// Bits of `a` where the mask, the same for each byte, has ones, and bits of `b` elsewhere.
static inline vu choose(uint8_t mask, vu a, vu b) {
  const uint32_t wide = mask * 0x01010101u;
#if defined(__AVX512F__)
  return (vu)_mm512_ternarylogic_epi32(_mm512_set1_epi32(wide), (__m512i)a, (__m512i)b, 0xCA);
#else
  return (a & wide) | (b & ~wide);
#endif
}

// Scales of a slice's rows in one of their groups.
static inline vf slice_scales(const uint16_t* scales, long slice, long groups, long group) {
  const long place = (slice / SLICES * groups + group) * BLOCK_ROWS + slice % SLICES * LANES;
  return from_fp16(load<vh>(scales + place));
}

// Consecutive blocks of a matrix at the precision of its first PLANES planes. While they are read,
// those that the same thread needs next are fetched into L2: an expert's planes are many short
// streams, and a core that waits for each one's beginning reads at half of memory's speed.
template <int PLANES>
struct Nested {
  static constexpr int BLOCKS = 1;  // at a time: a plane is read as one stream
  const uint8_t *plane[PLANES], *next[PLANES];
  const uint16_t *scales, *next_scales;
  long chunks;  // of a row

  // Codes of the steps of a chunk. The middle of a code's range stands for its missing bits.
  void load_steps(long slice, long chunk, vu* code) const {
    const long vector = (slice / SLICES * chunks + chunk) * STEP_BYTES;
    const long lane = slice % SLICES * LANES * 4;
    if (lane == 0)
      for (int p = 0; p < PLANES; ++p)
        for (int j = 0; j < (p == 2 ? 2 : 1); ++j)
          __builtin_prefetch(next[p] + vector * (p == 2 ? 2 : 1) + j * STEP_BYTES, 0, 2);
    const vu first = load<vu>(plane[0] + vector + lane);
    if constexpr (PLANES == 1) {
      for (int j = 0; j < STEPS; ++j) code[j] = choose(0xC0, first << 2 * j, vu{} + 0x20202020u);
    } else {
      const vu second = load<vu>(plane[1] + vector + lane);
      const vu even = choose(0xCC, first, second >> 2);  // 4 bits of step 0, 4 bits of step 2
      const vu odd = choose(0xCC, first << 2, second);   // 4 bits of step 1, 4 bits of step 3
      if constexpr (PLANES == 2) {
        const vu half = vu{} + 0x08080808u;
        code[0] = choose(0xF0, even, half);
        code[1] = choose(0xF0, odd, half);
        code[2] = choose(0xF0, even << 4, half);
        code[3] = choose(0xF0, odd << 4, half);
      } else {
        const vu low = load<vu>(plane[2] + 2 * vector + lane);
        const vu high = load<vu>(plane[2] + 2 * vector + STEP_BYTES + lane);
        code[0] = choose(0xF0, even, low);
        code[1] = choose(0xF0, odd, low >> 4);
        code[2] = choose(0xF0, even << 4, high);
        code[3] = choose(0xF0, odd << 4, high >> 4);
      }
    }
  }
  vf load_scales(long slice, long groups, long group) const {
    if (slice % SLICES == 0)
      __builtin_prefetch(next_scales + (slice / SLICES * groups + group) * BLOCK_ROWS, 0, 2);
    return slice_scales(scales, slice, groups, group);
  }
};

// Consecutive blocks of codes unpacked before, a byte each.
struct Unpacked {
  static constexpr int BLOCKS = LANES == BLOCK_ROWS ? 2 : 1;  // an activation serves both
  const uint8_t* codes;
  const uint16_t* scales;
  long chunks;

  void load_steps(long slice, long chunk, vu* code) const {
    const uint8_t* p = codes + (slice / SLICES * chunks + chunk) * STEPS * STEP_BYTES;
    for (int j = 0; j < STEPS; ++j)
      code[j] = load<vu>(p + j * STEP_BYTES + slice % SLICES * LANES * 4);
  }
  vf load_scales(long slice, long groups, long group) const {
    return slice_scales(scales, slice, groups, group);
  }
};

template <class Source>
static void unpack(const Source& source, long blocks, uint8_t* to) {
  for (long block = 0; block < blocks; ++block)
    for (long chunk = 0; chunk < source.chunks; ++chunk, to += STEPS * STEP_BYTES)
      for (int s = 0; s < SLICES; ++s) {
        vu code[STEPS];
        source.load_steps(block * SLICES + s, chunk, code);
        for (int j = 0; j < STEPS; ++j) store(to + j * STEP_BYTES + s * LANES * 4, code[j]);
      }
}

// out[i * stride + n] = x[i] . w[n] for ROWS activation rows and the rows n of BLOCKS blocks. The
// order of all sums depends on the columns alone: a row gets the same bits in any tile.
template <int ROWS, int BLOCKS, class Source>
static inline void plane_tile(const QuantizedRows& x, const Source& source, long block, float* out,
                              long stride) {
  constexpr int WIDE = BLOCKS * SLICES;
  const long chunks = source.chunks / x.groups;
  const int8_t* p = x.codes;
  vf total[ROWS][WIDE] = {};
  for (long group = 0; group < x.groups; ++group) {
    vi sum[ROWS][WIDE];
    UNROLL for (int i = 0; i < ROWS; ++i)
      UNROLL for (int s = 0; s < WIDE; ++s) sum[i][s] = vi{} + x.start[i * x.groups + group];
    for (long chunk = group * chunks; chunk < (group + 1) * chunks; ++chunk, p += CHUNK) {
      vu code[WIDE][STEPS];
      UNROLL for (int s = 0; s < WIDE; ++s)
        source.load_steps(block * SLICES + s, chunk, code[s]);
      UNROLL for (int j = 0; j < STEPS; ++j)
        UNROLL for (int i = 0; i < ROWS; ++i) {
          int32_t v;
          memcpy(&v, p + i * x.stride + j * 4, sizeof v);
          UNROLL for (int s = 0; s < WIDE; ++s) sum[i][s] = dot(sum[i][s], code[s][j], v);
        }
    }
    UNROLL for (int s = 0; s < WIDE; ++s) {
      const vf w = source.load_scales(block * SLICES + s, x.groups, group);
      UNROLL for (int i = 0; i < ROWS; ++i)
        total[i][s] += (w * x.scale[i * x.groups + group]) * __builtin_convertvector(sum[i][s], vf);
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
