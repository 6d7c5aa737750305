// Short causal convolutions; see recurrence.h. A vector holds channels side by side.
#include "curves.h"
#include "gemm.h"
#include "recurrence.h"

namespace recurrence {
namespace {

constexpr int WIDE = 4;

#define EVEN(o) 2 * (o), 2 * (o) + 2, 2 * (o) + 4, 2 * (o) + 6
#define ODD(o) 2 * (o) + 1, 2 * (o) + 3, 2 * (o) + 5, 2 * (o) + 7
#define FIRST(o) (o) / 2, LANES + (o) / 2, (o) / 2 + 1, LANES + (o) / 2 + 1
#define SECOND(o)                                                                   \
  LANES / 2 + (o) / 2, LANES + LANES / 2 + (o) / 2, LANES / 2 + (o) / 2 + 1,        \
      LANES + LANES / 2 + (o) / 2 + 1
inline vf even(vf a, vf b) { return SHUFFLE(a, b, EACH_QUAD(EVEN)); }
inline vf odd(vf a, vf b) { return SHUFFLE(a, b, EACH_QUAD(ODD)); }
inline vf first(vf a, vf b) { return SHUFFLE(a, b, EACH_QUAD(FIRST)); }
inline vf second(vf a, vf b) { return SHUFFLE(a, b, EACH_QUAD(SECOND)); }
#undef EVEN
#undef ODD
#undef FIRST
#undef SECOND

// The columns of `channels` rows of `count` floats, a vector for each column; and back.
void load_columns(const float* from, long channels, long count, vf* to) {
  if (count == 4 && channels == LANES) {
    const vf a = load<vf>(from), b = load<vf>(from + LANES);
    const vf c = load<vf>(from + 2 * LANES), d = load<vf>(from + 3 * LANES);
    const vf low_even = even(a, b), high_even = even(c, d);
    const vf low_odd = odd(a, b), high_odd = odd(c, d);
    to[0] = even(low_even, high_even), to[2] = odd(low_even, high_even);
    to[1] = even(low_odd, high_odd), to[3] = odd(low_odd, high_odd);
    return;
  }
  alignas(64) float column[LANES] = {};
  for (long j = 0; j < count; ++j) {
    for (long i = 0; i < channels; ++i) column[i] = from[i * count + j];
    to[j] = load<vf>(column);
  }
}

void store_columns(float* to, long channels, long count, const vf* from) {
  if (count == 4 && channels == LANES) {
    const vf low_even = first(from[0], from[2]), high_even = second(from[0], from[2]);
    const vf low_odd = first(from[1], from[3]), high_odd = second(from[1], from[3]);
    store(to, first(low_even, low_odd));
    store(to + LANES, second(low_even, low_odd));
    store(to + 2 * LANES, first(high_even, high_odd));
    store(to + 3 * LANES, second(high_even, high_odd));
    return;
  }
  for (long j = 0; j < count; ++j) {
    alignas(64) float column[LANES];
    store(column, from[j]);
    for (long i = 0; i < channels; ++i) to[i * count + j] = column[i];
  }
}

// Vectors of channels side by side, the first of which is `channel`; the last may be in part.
template <int W>
void run(const Convolution& rule, const Channels& rows, long tokens, long channel, long left) {
  constexpr Activation silu{SILU, 1, 0, 0};
  const long taps = rule.taps, kept = rule.kept;
  vf weight[W][MAX_TAPS], past[W][MAX_TAPS] = {}, bias[W] = {};
  const auto of = [&](int w) { return left - w * LANES; };
  UNROLL for (int w = 0; w < W; ++w) {
    const long c = channel + w * LANES, n = of(w) < LANES ? of(w) : LANES;
    load_columns(rule.weight + c * taps, n, taps, weight[w]);
    if (rows.before) load_columns(rows.before + c * kept, n, kept, past[w]);
    if (rule.bias) bias[w] = load_as_fp32(rule.bias + c, n);
  }
  const auto input = [&](long token, int w) {  // tokens before the first are negative
    return token < 0 ? past[w][kept + token]
                     : load_as_fp32(rows.x.at(token) + channel + w * LANES, of(w));
  };
  for (long t = 0; t < tokens; ++t) {
    vf sum[W];
    UNROLL for (int w = 0; w < W; ++w) sum[w] = bias[w];
    for (long j = 0; j < taps; ++j)
      UNROLL for (int w = 0; w < W; ++w) sum[w] = fused(weight[w][j], input(t - taps + 1 + j, w), sum[w]);
    if (rule.silu) curve_each(silu, sum);
    UNROLL for (int w = 0; w < W; ++w)
      store_fp32_as(rows.out.at(t) + channel + w * LANES, sum[w], of(w));
  }
  if (!rows.after) return;
  UNROLL for (int w = 0; w < W; ++w) {
    vf last[MAX_TAPS];
    for (long i = 0; i < kept; ++i) last[i] = input(tokens - kept + i, w);
    store_columns(rows.after + (channel + w * LANES) * kept, of(w) < LANES ? of(w) : LANES, kept, last);
  }
}

}  // namespace

void convolve(const Convolution& rule, const Channels& rows, long tokens, long begin, long end) {
  long channel = begin;
  for (; channel + WIDE * LANES <= end; channel += WIDE * LANES)
    run<WIDE>(rule, rows, tokens, channel, WIDE * LANES);
  for (; channel < end; channel += LANES) run<1>(rule, rows, tokens, channel, end - channel);
}

}  // namespace recurrence
