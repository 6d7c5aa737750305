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

// Whether one instruction multiplies four unsigned codes by four signed ones: with AVX-512, or without
// it on Intel's desktops since Alder Lake.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define VNNI 1
#endif

// Codes are multiplied as they are, or less 128 where bytes must be signed.
constexpr int ZERO_CODE = 136;
#if defined(VNNI)
constexpr int BELOW = 0;
#else
constexpr int BELOW = 128;
#endif

// sum + the products of each lane's 4 weights with the 4 activations in `x`.
static inline vi dot(vi sum, vu codes, int32_t x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(VNNI)
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  // |w| <= 128 and |x| <= 127, so no pair of products reaches the limit where maddubs saturates.
  const __m256i w = (__m256i)(codes ^ 0x80808080u);
  const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(x), w);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), signed_x);
  sum += (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  IN_REGISTER(sum);  // or GCC computes all products of a chunk first, and has no place for them
  return sum;
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t w = (int8x16_t)(codes ^ 0x80808080u);
  return (vi)vdotq_s32((int32x4_t)sum, w, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
  const vs w = bits<vs>(codes ^ 0x80808080u), v = bits<vs>(vi{} + x);
  const vi pairs = bits<vi>(((w << 8) >> 8) * ((v << 8) >> 8) + (w >> 8) * (v >> 8));
  return sum + ((pairs << 16) >> 16) + (pairs >> 16);
#endif
}

// Half bytes are multiplied in pairs where there is no instruction for four codes: the sums of a chunk's
// products, at most 16 * 15 * 127, fit 16 bits and are widened once. Codes of 8 bits are two half bytes.
#if !defined(VNNI) && (defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)))
constexpr bool PAIRS = true;

static inline vs add_pairs(vs sum, vu codes, int32_t x) {
#if defined(__AVX512BW__)
  return sum + (vs)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(x));
#else
  sum += (vs)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(x));
  IN_REGISTER(sum);  // as in `dot`
  return sum;
#endif
}

// The sums of codes of which these half bytes are the `place`s: 16 for the high ones, or 1.
static inline vi widen_pairs(vs sum, int16_t place) {
#if defined(__AVX512BW__)
  return (vi)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(place));
#else
  return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(place));
#endif
}
#else
constexpr bool PAIRS = false;
static inline vs add_pairs(vs sum, vu, int32_t) { return sum; }
static inline vi widen_pairs(vs, int16_t) { return vi{}; }
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

// Exchanges bits of `a` at the mask (one byte, repeated) for those of `b` that lie `by` higher.
static inline void exchange(vu& a, vu& b, uint8_t mask, int by) {
#if defined(__AVX512F__)
  const vu own = a;
  a = choose(mask, b >> by, own);
  b = choose(uint8_t(mask << by), own << by, b);
#else
  const vu moved = (a ^ b >> by) & mask * 0x01010101u;
  a ^= moved;
  b ^= moved << by;
#endif
}

// Consecutive blocks of a matrix at the precision of its first PLANES planes; chunks and groups are
// numbered across blocks. Reading them prefetches DISTANCE chunks ahead, behind the last one those of the
// thread's next panel: an expert's planes are many short streams, and a core that waits for the start of
// each reads at half of memory's speed.
template <int PLANES>
struct Nested {
  static constexpr long DISTANCE = 24;     // of 12 to 64 the best on Zen 5, at 4 and 8 bits
  static constexpr int BLOCKS = 1;  // at a time: a plane is read as one stream
  static constexpr bool PREFIX = PLANES < ALL_PLANES;
  static constexpr int HALVES = !PAIRS ? 0 : PREFIX ? 1 : 2;  // half bytes of a code; 0: whole codes
  // A prefix's missing bits are corrected in the sums, not in the codes: by the middle of the range
  // that the bits stand for, and by a shift for steps 2 and 3, whose codes are LOW bits too low.
  static constexpr int CENTRE = PREFIX ? 0x40 >> PLANES : 0, LOW = PREFIX && !BELOW ? 4 : 0;
  static constexpr int zero = ZERO_CODE - CENTRE - (HALVES ? 0 : BELOW);
  // Of a slice: the first planes' vectors of both halves of a chunk, and the last plane's.
  struct Chunk {
    vu first[2], rest[2];
    const uint8_t* last;
  };
  struct Half {
    vu even, odd;  // first planes' bits of steps 0 and 2, of steps 1 and 3
    vu low[2];     // the last plane's, of steps 0 and 1, of steps 2 and 3
  };
  const uint8_t *plane[PLANES], *next[PLANES];
  const uint16_t *scales, *next_scales;
  long chunks, panel;  // how many a row has, and all blocks

  Chunk load_chunk(int slice, long chunk) const {
    const int lane = slice % SLICES * LANES * 4;
    const auto vector_of = [](const uint8_t* const* planes, int p, long chunk, int vector) {
      return planes[p] + (chunk * PLANE_BITS[p] + vector) * STEP_BYTES;
    };
    if (lane == 0) {
      const long ahead = chunk + DISTANCE;
      const bool inside = ahead < panel;
      UNROLL for (int p = 0; p < PLANES; ++p)
        UNROLL for (int v = 0; v < PLANE_BITS[p]; ++v)
          __builtin_prefetch(vector_of(inside ? plane : next, p, inside ? ahead : ahead - panel, v), 0, 3);
    }
    const auto at = [&](int p, int vector) { return vector_of(plane, p, chunk, vector) + lane; };
    Chunk own{};
    UNROLL for (int half = 0; half < 2; ++half) own.first[half] = load<vu>(at(0, half));
    if constexpr (PLANES > 1) {
      // The second half's bits lie below the first half's: bit 7 of step 0, bit 6 of step 4, ...
      own.rest[0] = load<vu>(at(1, 0));
      own.rest[1] = own.rest[0] << 1;
    }
    if constexpr (PLANES > 2) {
      own.rest[1] = load<vu>(at(2, 0));
      exchange(own.rest[0], own.rest[1], 0x55, 1);
    }
    if constexpr (PLANES > 3) own.last = at(3, 0);
    return own;
  }
  static Half load_half(const Chunk& chunk, int half) {
    Half own{chunk.first[half], chunk.first[half] << 2, {}};
    if constexpr (PLANES > 1) {
      own.odd = chunk.rest[half];
      exchange(own.even, own.odd, 0x33, 2);
    }
    if constexpr (PLANES > 3)
      UNROLL for (int v = 0; v < 2; ++v)
        own.low[v] = load<vu>(chunk.last + (2 * half + v) * STEP_BYTES);
    return own;
  }
  // The code of a step, or a half byte of it, the high one first.
  static vu code(const Half& half, int step, int part = 0) {
    constexpr uint32_t known = 0x01010101u * uint8_t(-2 * CENTRE);
    const vu first = step % 2 ? half.odd : half.even, low = half.low[step / 2];
    if constexpr (HALVES) {
      constexpr uint32_t bits = 0x0F0F0F0Fu;
      if (part) return (step % 2 ? low >> 4 : low) & bits;
      return (step < 2 ? first >> 4 : first) & (PREFIX ? known >> 4 & bits : bits);
    }
    if constexpr (PREFIX)
      return step < 2 ? first & known : LOW ? first & known >> LOW : first << 4 & known;
    return choose(0xF0, step < 2 ? first : first << 4, step % 2 ? low >> 4 : low);
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

// Consecutive blocks of unpacked codes, one byte each; with HALF, of which the low half is in use.
template <bool HALF>
struct UnpackedCodes {
  static constexpr int BLOCKS = LANES == BLOCK_ROWS ? 2 : 1;  // an activation serves both
  static constexpr int HALVES = HALF ? 1 : 0, LOW = 0;
  struct Chunk {
    const uint8_t* codes;
    Ahead ahead;
    bool fetches;
  };
  using Half = const uint8_t*;
  const uint8_t* codes;
  const uint16_t* scales;
  long chunks, groups;  // of a row
  Ahead ahead;
  int zero;

  Chunk load_chunk(int slice, long chunk) const {
    chunk += slice / SLICES * chunks;
    const uint8_t* from = codes + chunk * CHUNK * BLOCK_ROWS + slice % SLICES * LANES * 4;
    return {from, {{ahead.vector[0] + chunk * ahead.step[0], ahead.vector[1] + chunk * ahead.step[1]},
                   {}, nullptr}, slice % SLICES == 0};
  }
  static Half load_half(const Chunk& chunk, int half) {
    if (chunk.fetches) __builtin_prefetch(chunk.ahead.vector[half], 0, 3);
    return chunk.codes + half * STEPS * STEP_BYTES;
  }
  static vu code(Half half, int step, int = 0) { return load<vu>(half + step * STEP_BYTES); }
  vf load_scales(int slice, long group) const {
    const long at = (slice / SLICES * groups + group) * BLOCK_ROWS;
    if (slice % SLICES == 0) __builtin_prefetch(ahead.scales + at, 0, 2);
    return from_fp16(load<vh>(scales + at + slice % SLICES * LANES));
  }
};

using Unpacked = UnpackedCodes<false>;

template <class Source>
__attribute__((noinline)) static void unpack(const Source& source, long blocks, uint8_t* to) {
  for (long chunk = 0; chunk < blocks * source.chunks; ++chunk, to += CHUNK * BLOCK_ROWS)
    for (int s = 0; s < SLICES; ++s) {
      const auto own = source.load_chunk(s, chunk);
      UNROLL for (int half = 0; half < 2; ++half) {
        const auto steps = source.load_half(own, half);
        UNROLL for (int j = 0; j < STEPS; ++j) {
          vu code = source.code(steps, j);
          if constexpr (Source::HALVES == 2) code = code << 4 | source.code(steps, j, 1);
          if constexpr (!Source::HALVES)
            code = code << (j < 2 ? 0 : Source::LOW) | Source::CENTRE * 0x01010101u;
          store(to + (half * STEPS + j) * STEP_BYTES + s * LANES * 4, code);
        }
      }
    }
}
