// The inner product kernels: a few activation rows times a panel of weight rows, both contiguous
// along the summed direction K ("NT"). Accumulators are vectors along K, added up at the end, so an
// output's order of sums depends on K alone: a row's bits do not depend on other rows.
// One weight element is loaded once for all rows of a tile: with few rows the kernel runs at the
// speed of memory, with many at that of the multipliers, without repacking weights.
#pragma once
#include "calls.h"
#include "vec.h"

// Dtypes of activations (X) and weights (W), and their product. A vector has STEP elements of K.
struct Fp32 {
  typedef float X, W;
  typedef vf XV, WV;
  static constexpr int STEP = LANES;
  static WV widen(vf w) { return w; }
  static WV weights(const W* p) { return load<vf>(p); }
  static WV weights_part(const W* p, long n) { return load_part<vf>(p, n); }
  static void add(vf& sum, XV x, WV w) { sum += x * w; }
};

template <vf (*WIDEN)(vh)>
struct Half {  // half-precision weights, widened in registers
  typedef float X;
  typedef uint16_t W;
  typedef vf XV, WV;
  static constexpr int STEP = LANES;
  static WV weights(const W* p) { return WIDEN(load<vh>(p)); }
  static WV weights_part(const W* p, long n) { return WIDEN(load_part<vh>(p, n)); }
  static void add(vf& sum, XV x, WV w) { sum += x * w; }
};
typedef Half<from_bf16> Bf16;
typedef Half<from_fp16> Fp16;

#if defined(__AVX512BF16__)
struct Bf16Pairs {  // bf16 activations too: the CPU's own dot product of pairs, summed in fp32
  typedef uint16_t X, W;
  typedef __m512bh XV, WV;
  static constexpr int STEP = 2 * LANES;
  static WV weights(const W* p) { return load<WV>(p); }
  static WV weights_part(const W* p, long n) { return load_part<WV>(p, n); }
  static void add(vf& sum, XV x, WV w) { sum = (vf)_mm512_dpbf16_ps((__m512)sum, x, w); }
};
#endif

// Runs `body(mode)` with the arithmetic for these dtypes: bf16 times bf16 uses the CPU's dot products
// of pairs where it has them, everything else is widened to fp32 first.
template <class Body>
static void with_mode(int32_t weight_dtype, int32_t hidden_dtype, const Body& body) {
  if (weight_dtype == FP32) return body(Fp32{});
  if (weight_dtype == FP16) return body(Fp16{});
#if defined(__AVX512BF16__)
  if (hidden_dtype == BF16) return body(Bf16Pairs{});
#endif
  body(Bf16{});
}

// As many sums as the registers hold besides the operands: 16 on plain x86, 32 elsewhere.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MAX_ROWS = 6;
#else
constexpr int MAX_ROWS = 3;
#endif
constexpr long PART_BYTES = 4 << 20;  // of input rows: so many stay in a cache for all panels
constexpr int QUAD = 4;             // weight rows a tile
constexpr int MAX_PANEL = 128;      // weight rows a task
constexpr long BLOCK_BYTES = 4096;  // of an activation row at a time: a tile's rows stay in L1
// Weights are fetched so many bytes ahead, into L1 beside these rows: of 1 to 16 KB the best on Zen 5
// where they lie in L3. Into L2 only, they come at six tenths of the speed.
constexpr long AHEAD_BYTES = 6144;

// Activation rows in place: elements [begin, end) of row i at rows[i].
template <class From>
static inline vf load_as_fp32(const From* from, long n) {
  if constexpr (sizeof(From) == sizeof(float))
    return n >= LANES ? load<vf>(from) : load_part<vf>(from, n);
  else
    return from_bf16(n >= LANES ? load<vh>(from) : load_part<vh>(from, n));
}

template <class To>
static inline void store_fp32_as(To* to, vf v, long n) {
  const auto whole = [&] {
    if constexpr (sizeof(To) == sizeof(float)) return v;
    else return to_bf16(v);
  }();
  if (n >= LANES) store(to, whole);
  else memcpy(to, &whole, n * sizeof(To));
}

// A block of ROWS activation rows side by side, STEP elements of each in turn, zero-padded.
template <class M, int ROWS, class From>
static inline void pack(const From* const* rows, long begin, long end, typename M::X* to) {
  for (long k = begin; k < end; k += M::STEP)
    for (int i = 0; i < ROWS; ++i, to += M::STEP)
      for (long c = 0; c < M::STEP; c += LANES) {
        const long n = end - k - c;
        store_fp32_as(to + c, n > 0 ? load_as_fp32(rows[i] + k + c, n) : vf{}, LANES);
      }
}

// out[i][j] (+)= x[i] . w[j] for ROWS packed activation rows and COLS weight rows, `length` long
// and `stride` apart; fetches as many weights at `later`.
template <class M, int ROWS, int COLS>
static inline void tile(const typename M::X* x, const typename M::W* w, const typename M::W* later,
                        long stride, long length, bool first, float* out) {
  typedef typename M::XV XV;
  vf sum[ROWS][COLS] = {};
  long k = 0;
  for (; k + M::STEP <= length; k += M::STEP, x += ROWS * M::STEP) {
    XV xv[ROWS];
    UNROLL for (int i = 0; i < ROWS; ++i) {
      xv[i] = load<XV>(x + i * M::STEP);
      IN_REGISTER(xv[i]);
    }
    UNROLL for (int j = 0; j < COLS; ++j) {
      const typename M::W* p = w + j * stride + k;
      __builtin_prefetch(later + j * stride + k, 0, 3);
      typename M::WV wv = M::weights(p);
      if constexpr (ROWS > 1) IN_REGISTER(wv);
      UNROLL for (int i = 0; i < ROWS; ++i) M::add(sum[i][j], xv[i], wv);
    }
  }
  if (k < length) {
    UNROLL for (int j = 0; j < COLS; ++j) {
      typename M::WV wv = M::weights_part(w + j * stride + k, length - k);
      UNROLL for (int i = 0; i < ROWS; ++i) M::add(sum[i][j], load<XV>(x + i * M::STEP), wv);
    }
  }
  UNROLL for (int i = 0; i < ROWS; ++i) {
    // One tree of additions, for a full quad and for the weight rows left over.
    v4 total = sum_lanes(sum[i][0], sum[i][1 % COLS], sum[i][2 % COLS], sum[i][3 % COLS]);
    float* to = out + i * MAX_PANEL;
    if (!first) total += load_part<v4>(to, COLS);
    memcpy(to, &total, COLS * sizeof(float));
  }
}

// sums[p][i][g] = rows[i] . w[p * part + g] for `panel` weight rows of each of `parts` parts. Fetches
// weights ahead, at the end those of `next`: where the thread goes on, or `w` if that is unknown.
template <class M, int ROWS, class From>
__attribute__((noinline)) static void multiply(const From* const* rows, const typename M::W* w,
                                               const typename M::W* next, int parts, long part,
                                               long panel, long width,
                                               float (*sums)[MAX_ROWS * MAX_PANEL]) {
  constexpr long block = BLOCK_BYTES / sizeof(typename M::X);
  const long quad_bytes = QUAD * width * long(sizeof(typename M::W));
  const long ahead = (AHEAD_BYTES + quad_bytes - 1) / quad_bytes * QUAD;  // weight rows
  alignas(64) typename M::X x[ROWS * block];
  for (long begin = 0; begin < width; begin += block) {
    const long length = width - begin < block ? width - begin : block;
    pack<M, ROWS>(rows, begin, begin + length, x);
    for (int p = 0; p < parts; ++p) {
      const typename M::W* from = w + p * part * width + begin;
      const typename M::W* then = p + 1 < parts             ? from + part * width
                                  : begin + block < width ? w + begin + block
                                                          : next;
      const auto later = [&](long g) {
        return g + ahead < panel ? from + (g + ahead) * width : then + (g + ahead - panel) * width;
      };
      long g = 0;
      for (; g + QUAD <= panel; g += QUAD)
        tile<M, ROWS, QUAD>(x, from + g * width, later(g), width, length, begin == 0, sums[p] + g);
      for (; g < panel; ++g)
        tile<M, ROWS, 1>(x, from + g * width, later(g), width, length, begin == 0, sums[p] + g);
    }
  }
}

template <class M, int ROWS = MAX_ROWS, class From>
static void multiply_rows(int count, const From* const* rows, const typename M::W* w,
                          const typename M::W* next, int parts, long part, long panel, long width,
                          float (*sums)[MAX_ROWS * MAX_PANEL]) {
  if (count == ROWS) return multiply<M, ROWS>(rows, w, next, parts, part, panel, width, sums);
  if constexpr (ROWS > 1)
    multiply_rows<M, ROWS - 1>(count, rows, w, next, parts, part, panel, width, sums);
}
