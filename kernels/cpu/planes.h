// The inner kernels on nested bit planes; kernels/planes.py says how the codes lie and
// kernels/reference.py what is computed. A vector of a plane holds a few steps of 4 columns of 16
// rows: shifted and masked it is the operand of a dot product that adds 4 columns of each row, so
// no sum ever crosses lanes. Planes are unpacked in registers, and an unpacked vector serves all
// activation rows of a tile; for many rows the codes are unpacked to memory first.
//
// A chunk is 32 columns: 8 steps, a vector of a 1-bit plane. Codes are unpacked half a chunk at a
// time. A slice is the rows of a block that fill a vector: all with AVX-512.
#pragma once
#include "gemm.h"
#include "plane_matrix.h"

constexpr int SLICES = BLOCK_ROWS / LANES;

typedef int16_t vs __attribute__((vector_size(LANES * 4)));

// Codes are multiplied as they are, or less 128 where bytes must be signed.
constexpr int ZERO_CODE = 136;
#if defined(__AVX512VNNI__)
constexpr int BELOW = 0;
#else
constexpr int BELOW = 128;
#endif

// sum + the products of each lane's 4 weights with the 4 activations in `x`.
static inline vi dot(vi sum, vu codes, int32_t x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  // |w| <= 128 and |x| <= 127, so no pair of products reaches the limit where maddubs saturates.
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

// Codes of up to 4 bits, of half a byte each, are multiplied in pairs where there is no instruction for
// four: the sums of a chunk's products, at most 16 * 15 * 127, fit 16 bits and are widened once.
#if !defined(__AVX512VNNI__) && (defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)))
constexpr bool PAIRS = true;

static inline vs add_pairs(vs sum, vu codes, int32_t x) {
#if defined(__AVX512BW__)
  return sum + (vs)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(x));
#else
  return sum + (vs)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(x));
#endif
}

// The sums of codes whose half byte is the high one.
static inline vi widen_pairs(vs sum) {
#if defined(__AVX512BW__)
  return (vi)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(16));
#else
  return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(16));
#endif
}
#else
constexpr bool PAIRS = false;
static inline vs add_pairs(vs sum, vu, int32_t) { return sum; }
static inline vi widen_pairs(vs) { return vi{}; }
#endif

// Bits of `a` where the mask (one byte, repeated) has ones, and bits of `b` elsewhere.
static inline vu choose(uint8_t mask, vu a, vu b) {
  const uint32_t wide = mask * 0x01010101u;
#if defined(__AVX512F__)
  return (vu)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, _mm512_set1_epi32(wide), 0xE4);
#else
  return (a & wide) | (b & ~wide);
#endif
}

// Consecutive blocks of a matrix at the precision of its first PLANES planes; chunks and groups are
// numbered across blocks. Reading them prefetches the thread's next blocks into L2: an expert's planes
// are many short streams, and a core that waits for the start of each reads at half of memory's speed.
template <int PLANES>
struct Nested {
  static constexpr int BLOCKS = 1;  // at a time: a plane is read as one stream
  static constexpr bool PREFIX = PLANES < ALL_PLANES;
  static constexpr bool HALVES = PREFIX && PAIRS;  // codes are half bytes
  // A prefix's missing bits are corrected in the sums, not in the codes: by the middle of the range
  // that the bits stand for, and by a shift for steps 2 and 3, whose codes are LOW bits too low.
  static constexpr int CENTRE = PREFIX ? 0x40 >> PLANES : 0, LOW = PREFIX && !BELOW ? 4 : 0;
  static constexpr int zero = ZERO_CODE - CENTRE - (HALVES ? 0 : BELOW);
  const uint8_t *plane[PLANES], *next[PLANES];
  const uint16_t *scales, *next_scales;
  long chunks;  // of a row

  // Codes of the steps of half a chunk.
  void load_steps(int slice, long chunk, int half, vu* code) const {
    const int lane = slice % SLICES * LANES * 4;
    const auto at = [&](const uint8_t* const* planes, int p, int vector) {
      return planes[p] + (chunk * PLANE_BITS[p] + vector) * STEP_BYTES;
    };
    if (lane == 0 && half == 0)
      UNROLL for (int p = 0; p < PLANES; ++p)
        UNROLL for (int v = 0; v < PLANE_BITS[p]; ++v) __builtin_prefetch(at(next, p, v), 0, 2);
    const vu first = load<vu>(at(plane, 0, half) + lane);
    vu even = first, odd = first << 2;  // bits of steps 0 and 2, of steps 1 and 3
    if constexpr (PLANES > 1) {
      // The second half's bits lie below the first half's: bit 7 of step 0, bit 6 of step 4, ...
      vu rest = load<vu>(at(plane, 1, 0) + lane);
      if (half) rest <<= 1;
      if constexpr (PLANES > 2) {
        const vu fourth = load<vu>(at(plane, 2, 0) + lane);
        rest = choose(0xAA, rest, half ? fourth : fourth >> 1);
      }
      even = choose(0xCC, first, rest >> 2);
      odd = choose(0xCC, odd, rest);
    }
    constexpr uint32_t known = 0x01010101u * uint8_t(-2 * CENTRE);
    if constexpr (HALVES) {
      constexpr uint32_t low = known >> 4 & 0x0F0F0F0Fu;
      code[0] = even >> 4 & low;
      code[1] = odd >> 4 & low;
      code[2] = even & low;
      code[3] = odd & low;
    } else if constexpr (PREFIX) {
      code[0] = even & known;
      code[1] = odd & known;
      code[2] = LOW ? even & known >> LOW : even << 4 & known;
      code[3] = LOW ? odd & known >> LOW : odd << 4 & known;
    } else {
      const vu low = load<vu>(at(plane, 3, 2 * half) + lane);
      const vu high = load<vu>(at(plane, 3, 2 * half + 1) + lane);
      code[0] = choose(0xF0, even, low);
      code[1] = choose(0xF0, odd, low >> 4);
      code[2] = choose(0xF0, even << 4, high);
      code[3] = choose(0xF0, odd << 4, high >> 4);
    }
  }
  vf load_scales(int slice, long group) const {
    if (slice == 0) __builtin_prefetch(next_scales + group * BLOCK_ROWS, 0, 2);
    return from_fp16(load<vh>(scales + group * BLOCK_ROWS + slice * LANES));
  }
};

// Prefetches the thread's next planes while codes are multiplied: two vectors of each chunk, one at a
// time, because some CPUs drop prefetches that come in a burst (Zen 4 most of them).
struct Ahead {
  const uint8_t* vector[2];
  long step[2];  // bytes to that of the next chunk
  const uint16_t* scales;
};

// Consecutive blocks of unpacked codes, one byte each; with HALVES_, of which the low half is in use.
template <bool HALVES_>
struct UnpackedCodes {
  static constexpr int BLOCKS = LANES == BLOCK_ROWS ? 2 : 1;  // an activation serves both
  static constexpr bool HALVES = HALVES_;
  static constexpr int LOW = 0;
  const uint8_t* codes;
  const uint16_t* scales;
  long chunks, groups;  // of a row
  Ahead ahead;
  int zero;

  void load_steps(int slice, long chunk, int half, vu* code) const {
    chunk += slice / SLICES * chunks;
    if (slice % SLICES == 0)
      __builtin_prefetch(ahead.vector[half] + chunk * ahead.step[half], 0, 3);
    const uint8_t* p = codes + (chunk * 2 + half) * STEPS * STEP_BYTES;
    for (int j = 0; j < STEPS; ++j)
      code[j] = load<vu>(p + j * STEP_BYTES + slice % SLICES * LANES * 4);
  }
  vf load_scales(int slice, long group) const {
    const long at = (slice / SLICES * groups + group) * BLOCK_ROWS;
    if (slice % SLICES == 0) __builtin_prefetch(ahead.scales + at, 0, 2);
    return from_fp16(load<vh>(scales + at + slice % SLICES * LANES));
  }
};

using Unpacked = UnpackedCodes<false>;

template <class Source>
__attribute__((noinline)) static void unpack(const Source& source, long blocks, uint8_t* to) {
  for (long chunk = 0; chunk < blocks * source.chunks; ++chunk)
    UNROLL for (int half = 0; half < 2; ++half, to += STEPS * STEP_BYTES)
      for (int s = 0; s < SLICES; ++s) {
        vu code[STEPS];
        source.load_steps(s, chunk, half, code);
        for (int j = 0; j < STEPS; ++j) {
          const vu whole = code[j] << (j < 2 ? 0 : Source::LOW) | Source::CENTRE * 0x01010101u;
          store(to + j * STEP_BYTES + s * LANES * 4, Source::HALVES ? code[j] : whole);
        }
      }
}
