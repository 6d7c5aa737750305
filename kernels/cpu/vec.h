// SIMD vectors in the compilers' portable vector extension: one source for AVX-512, AVX2, NEON and
// plain SSE. `LANES` floats a vector; every sum over lanes has one fixed order.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX__) || defined(__F16C__) || defined(__AVX512BF16__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_FMA)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#define EACH_QUAD(f) f(0), f(4), f(8), f(12)
#elif defined(__AVX__)
constexpr int LANES = 8;
#define EACH_QUAD(f) f(0), f(4)
#else
constexpr int LANES = 4;
#define EACH_QUAD(f) f(0)
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef float v4 __attribute__((vector_size(16)));

// Index lists count on into the second vector, in GCC's builtin and in Clang's.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

// Keeps a loaded vector in a register; compilers would rather load it again for every use.
#if defined(__AVX512F__)
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#elif defined(__x86_64__)
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#elif defined(__aarch64__)
#define IN_REGISTER(v) __asm__("" : "+w"(v))
#else
#define IN_REGISTER(v)
#endif
#define UNROLL _Pragma("GCC unroll 16")

constexpr long aligned(long bytes) { return (bytes + 63) / 64 * 64; }

template <class V, class T>
static inline V load(const T* p) {  // unaligned
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class V, class T>
static inline V load_part(const T* p, long n) {  // the first n elements, zeros after them
  T buffer[sizeof(V) / sizeof(T)] = {};
  memcpy(buffer, p, n * sizeof(T));
  return load<V>(buffer);
}

template <class V, class T>
static inline void store(T* p, V v) {
  memcpy(p, &v, sizeof v);
}

// As store, past the caches and without reading what is overwritten; p is aligned to a vector. Others
// may read behind end_stream.
static inline void stream(float* p, vf v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX__)
  _mm256_stream_ps(p, (__m256)v);
#else
  store(p, v);
#endif
}
static inline void end_stream() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

template <class To, class From>
static inline To bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To r;
  memcpy(&r, &v, sizeof r);
  return r;
}

static inline vf splat(float x) { return vf{} + x; }

// a * b + c, rounded once wherever the target can. Compilers fuse the plain expression in some loops
// and not in others; for results that two loops must share.
static inline vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The lane sums of four vectors, side by side.
static inline v4 sum_lanes(vf a, vf b, vf c, vf d) {
#define LOW(o) o, LANES + o, o + 1, LANES + o + 1
#define HIGH(o) o + 2, LANES + o + 2, o + 3, LANES + o + 3
#define PAIR_LOW(o) o, o + 1, LANES + o, LANES + o + 1
#define PAIR_HIGH(o) o + 2, o + 3, LANES + o + 2, LANES + o + 3
  vf ab = SHUFFLE(a, b, EACH_QUAD(LOW)) + SHUFFLE(a, b, EACH_QUAD(HIGH));
  vf cd = SHUFFLE(c, d, EACH_QUAD(LOW)) + SHUFFLE(c, d, EACH_QUAD(HIGH));
  vf s = SHUFFLE(ab, cd, EACH_QUAD(PAIR_LOW)) + SHUFFLE(ab, cd, EACH_QUAD(PAIR_HIGH));
#if defined(__AVX512F__)
  s += SHUFFLE(s, s, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  s += SHUFFLE(s, s, 4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX__)
  s += SHUFFLE(s, s, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
  v4 r;
  memcpy(&r, &s, sizeof r);
  return r;
#undef LOW
#undef HIGH
#undef PAIR_LOW
#undef PAIR_HIGH
}

// op of all lanes of a vector of floats or integers, where their order makes no difference.
template <class V, class Op>
static inline auto fold_lanes(V v, const Op& op) {
#if defined(__AVX512F__)
  v = op(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = op(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15));
#elif defined(__AVX__)
  v = op(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
#endif
  return op(op(v[0], v[1]), op(v[2], v[3]));
}

static const auto larger = [](auto a, auto b) { return b > a ? b : a; };

static inline float largest_lane(vf v) { return fold_lanes(v, larger); }

static inline vf from_bf16(vh h) {
#if defined(__AVX512F__)  // GCC widens the halves of a vector apart
  return bits<vf>((vu)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#else
  return bits<vf>(__builtin_convertvector(h, vu) << 16);
#endif
}

static inline vh to_bf16(vf x) {  // round to nearest, ties to even; NaN stays NaN
  vu u = bits<vu>(x);
  vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  vu nan = (u >> 16) | 0x40;
  return __builtin_convertvector(x == x ? rounded : nan, vh);
}

static inline vf from_fp16(vh h) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps((__m128i)h);
#else
  // Exponent and mantissa land in place when shifted by 13; the exponent bias differs by 112.
  vu u = __builtin_convertvector(h, vu);
  vu magnitude = (u & 0x7fff) << 13;
  vf finite = bits<vf>(magnitude) * 0x1p112f;
  vf special = bits<vf>(magnitude | 0x7f800000);  // infinity and NaN
  vf value = (u & 0x7c00) == 0x7c00 ? special : finite;
  return bits<vf>(bits<vu>(value) | (u & 0x8000) << 16);
#endif
}

// e^x to about 1 ulp: x = n ln2 + r, a polynomial in r (Cephes' expf), scaled by 2^n. Each step waits
// for the one before it, so N vectors take it side by side.
template <int N>
static inline void exp_each(vf (&x)[N]) {
  const float to_int = 12582912.0f;  // 1.5 * 2^23
  vf high = splat(88.0f), low = splat(-87.0f);
  IN_REGISTER(high);  // constants would take a comparison and a move
  IN_REGISTER(low);
  vf shifted[N], r[N], p[N];
#define EACH UNROLL for (int i = 0; i < N; ++i)
  EACH x[i] = high < x[i] ? high : x[i];
  EACH x[i] = low > x[i] ? low : x[i];
  EACH shifted[i] = x[i] * 1.44269504088896341f + to_int;
  EACH r[i] = shifted[i] - to_int;
  EACH x[i] = x[i] - r[i] * 0.693359375f;
  EACH r[i] = x[i] + r[i] * 2.12194440e-4f;
  EACH p[i] = 1.9875691500e-4f * r[i] + 1.3981999507e-3f;
  EACH p[i] = p[i] * r[i] + 8.3334519073e-3f;
  EACH p[i] = p[i] * r[i] + 4.1665795894e-2f;
  EACH p[i] = p[i] * r[i] + 1.6666665459e-1f;
  EACH p[i] = p[i] * r[i] + 5.0000001201e-1f;
  EACH p[i] = p[i] * r[i];
  EACH p[i] = p[i] * r[i] + r[i];
  EACH p[i] = p[i] + 1.0f;
  EACH x[i] = p[i] * bits<vf>((bits<vi>(shifted[i]) - 0x4b400000 + 127) << 23);
#undef EACH
}

// 2^x for x of at most 127, of which 2^-126 stands for all that is smaller: x = n + r, a polynomial in
// r (minimax, 1.6e-7) whose exponent grows by n.
template <int N>
static inline void exp2_each(vf (&x)[N]) {
  const float to_int = 12582912.0f;  // 1.5 * 2^23
  vf low = splat(-126.0f);
  IN_REGISTER(low);
  vf shifted[N], r[N], p[N];
#define EACH UNROLL for (int i = 0; i < N; ++i)
  EACH x[i] = low > x[i] ? low : x[i];
  EACH shifted[i] = x[i] + to_int;
  EACH r[i] = x[i] - (shifted[i] - to_int);
  EACH p[i] = 1.3264727e-3f * r[i] + 9.671513e-3f;
  EACH p[i] = p[i] * r[i] + 5.5507336e-2f;
  EACH p[i] = p[i] * r[i] + 2.4022242e-1f;
  EACH p[i] = p[i] * r[i] + 6.9314700e-1f;
  EACH p[i] = p[i] * r[i] + 1.0f;
  EACH x[i] = bits<vf>(bits<vi>(p[i]) + (bits<vi>(shifted[i]) << 23));
#undef EACH
}

static inline vf exp_lanes(vf x) {
  vf each[1] = {x};
  exp_each(each);
  return each[0];
}
