// Gated delta rules and gated linear attention of one head; see recurrence.h.
//
// The products of token t read the state before it, S~ = S^T (exp(decay) k) and the same with q, and
// out = S~ q + (k . q) v'. So the state is read once a token: the pass that reads it for token t
// advances it by token t - 1 on the way.
#include <cmath>

#include "gemm.h"
#include "recurrence.h"

namespace recurrence {
namespace {

constexpr int WIDE = 2;                    // vectors of columns in a panel
// Vectors of columns that a single token takes at a time, as many as the registers hold: memory is read
// fastest in whole rows of a state.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int WIDEST = 8;
#else
constexpr int WIDEST = 4;
#endif
constexpr long PANEL = WIDE * LANES;       // columns; MAX_KEYS rows of them fit the L1 cache
constexpr long BLOCK = 16;                 // tokens prepared at a time
constexpr long PADDED = (MAX_KEYS + LANES - 1) / LANES * LANES;

struct Prepared {  // of one token
  alignas(64) float key[PADDED], decayed_key[PADDED], decayed_query[PADDED], decays[PADDED];
  float decay, meets, beta;  // meets: k . q
};

void prepare(const Gated& rule, const GatedHead& head, long token, Prepared& to) {
  const float *q = head.q.at(token), *k = head.k.at(token), *decay = head.decay.at(token);
  vf squares_q = {}, squares_k = {}, both = {};
  for (long c = 0; c < rule.keys; c += LANES) {
    const vf a = load_as_fp32(q + c, rule.keys - c), b = load_as_fp32(k + c, rule.keys - c);
    squares_q = fused(a, a, squares_q);
    squares_k = fused(b, b, squares_k);
    both = fused(a, b, both);
  }
  const v4 sums = sum_lanes(squares_q, squares_k, both, vf{});
  const float of_q = rule.scale * (rule.normalised ? 1.0f / std::sqrt(sums[0] + 1e-6f) : 1.0f);
  const float of_k = rule.normalised ? 1.0f / std::sqrt(sums[1] + 1e-6f) : 1.0f;
  to.decay = rule.by_key ? 0 : exp_lanes(splat(*decay))[0];
  to.meets = sums[2] * of_q * of_k;
  to.beta = head.beta ? *head.beta.at(token) : 1.0f;
  for (long c = 0; c < rule.keys; c += LANES) {
    const long left = rule.keys - c;
    const vf kept = rule.by_key ? exp_lanes(load_as_fp32(decay + c, left)) : splat(to.decay);
    const vf key = load_as_fp32(k + c, left) * of_k;
    store(to.key + c, key);
    store(to.decayed_key + c, key * kept);
    store(to.decayed_query + c, load_as_fp32(q + c, left) * of_q * kept);
    if (rule.by_key) store(to.decays + c, kept);
  }
}

// A vector of the state after a token: the one expression for it, rounded the same way everywhere.
template <bool BY_KEY>
inline vf advanced(vf state, const Prepared& by, long key, vf v) {
  const vf kept = state * (BY_KEY ? by.decays[key] : by.decay);
  return fused(splat(by.key[key]), v, kept);
}

// A panel of W vectors of columns of the state, in memory that callers give.
template <int W, bool CORRECTED, bool BY_KEY>
struct Columns {
  long keys;
  vf v[W];  // v' of the last token read

  // Reads the state for a token. With `past`, it first advances it by that token, of v'.
  template <bool ADVANCES>
  void read(const float* state, float* to, long stride, const Prepared* past, const Prepared& now,
            const vf (&value)[W], vf (&out)[W]) {
    vf known[W] = {}, sum[W] = {};
    for (long k = 0; k < keys; ++k) {
      UNROLL for (int w = 0; w < W; ++w) {
        vf s = load<vf>(state + k * stride + w * LANES);
        if constexpr (ADVANCES) {
          s = advanced<BY_KEY>(s, *past, k, v[w]);
          store(to + k * stride + w * LANES, s);
        }
        if constexpr (CORRECTED) known[w] = fused(splat(now.decayed_key[k]), s, known[w]);
        sum[w] = fused(splat(now.decayed_query[k]), s, sum[w]);
      }
    }
    UNROLL for (int w = 0; w < W; ++w) {
      v[w] = now.beta * (CORRECTED ? value[w] - known[w] : value[w]);
      out[w] = fused(splat(now.meets), v[w], sum[w]);
    }
  }

  template <bool STREAMED = false>
  void advance(const float* state, float* to, long stride, const Prepared& past,
               const float* next = nullptr) const {
    for (long k = 0; k < keys; ++k) {
      if (next)
        UNROLL for (int w = 0; w < W; ++w) __builtin_prefetch(next + k * stride + w * LANES, 0, 2);
      UNROLL for (int w = 0; w < W; ++w) {
        const long at = k * stride + w * LANES;
        const vf s = advanced<BY_KEY>(load<vf>(state + at), past, k, v[w]);
        if constexpr (STREAMED) stream(to + at, s);
        else store(to + at, s);
      }
    }
  }
};

template <int W>
inline void load_each(const float* from, long left, vf (&to)[W]) {
  UNROLL for (int w = 0; w < W; ++w)
    to[w] = left > w * LANES ? load_as_fp32(from + w * LANES, left - w * LANES) : vf{};
}

template <int W>
inline void store_each(float* to, long left, const vf (&from)[W]) {
  UNROLL for (int w = 0; w < W; ++w)
    if (left > w * LANES) store_fp32_as(to + w * LANES, from[w], left - w * LANES);
}

// One token of whole vectors of columns, in the states' own memory.
template <int W, bool CORRECTED, bool BY_KEY>
void step(const Gated& rule, const GatedHead& head, const float* before, long token,
          const Prepared& now, long column) {
  Columns<W, CORRECTED, BY_KEY> columns{rule.keys, {}};
  vf value[W], out[W];
  load_each(head.v.at(token) + column, W * LANES, value);
  columns.template read<false>(before + column, nullptr, rule.values, nullptr, now, value, out);
  float* after = head.after + column;
  const float* next = head.hints.next ? head.hints.next + column : nullptr;
  if (head.hints.streamed && whole_vectors(after, rule.values))
    columns.template advance<true>(before + column, after, rule.values, now, next);
  else columns.advance(before + column, after, rule.values, now, next);
  store_each(head.out.at(token) + column, W * LANES, out);
}

// Some tokens of a panel of columns, in a copy whose rows are side by side.
template <bool CORRECTED, bool BY_KEY>
void panel(const Gated& rule, const GatedHead& head, const float* before, long token, long count,
           const Prepared* prepared, long column, long left) {
  alignas(64) float state[MAX_KEYS * PANEL];
  vf row[WIDE], out[WIDE];
  for (long k = 0; k < rule.keys; ++k) {
    if (before) load_each(before + k * rule.values + column, left, row);
    else UNROLL for (int w = 0; w < WIDE; ++w) row[w] = vf{};
    store_each(state + k * PANEL, PANEL, row);
  }
  Columns<WIDE, CORRECTED, BY_KEY> columns{rule.keys, {}};
  for (long t = 0; t < count; ++t) {
    load_each(head.v.at(token + t) + column, left, row);
    if (t)
      columns.template read<true>(state, state, PANEL, prepared + t - 1, prepared[t], row, out);
    else
      columns.template read<false>(state, state, PANEL, nullptr, prepared[t], row, out);
    store_each(head.out.at(token + t) + column, left, out);
  }
  columns.advance(state, state, PANEL, prepared[count - 1]);
  for (long k = 0; k < rule.keys; ++k) {
    load_each(state + k * PANEL, PANEL, row);
    store_each(head.after + k * rule.values + column, left, row);
  }
}

template <bool CORRECTED, bool BY_KEY>
void run(const Gated& rule, const GatedHead& head, long tokens, long begin, long end) {
  Prepared prepared[BLOCK];
  for (long token = 0; token < tokens; token += BLOCK) {
    const long count = tokens - token < BLOCK ? tokens - token : BLOCK;
    const float* before = token ? head.after : head.before;
    for (long t = 0; t < count; ++t) prepare(rule, head, token + t, prepared[t]);
    long column = begin;
    if (count == 1 && before) {
      for (; column + WIDEST * LANES <= end; column += WIDEST * LANES)
        step<WIDEST, CORRECTED, BY_KEY>(rule, head, before, token, *prepared, column);
      for (; column + 4 * LANES <= end; column += 4 * LANES)
        step<4, CORRECTED, BY_KEY>(rule, head, before, token, *prepared, column);
      for (; column + LANES <= end; column += LANES)
        step<1, CORRECTED, BY_KEY>(rule, head, before, token, *prepared, column);
    }
    for (; column < end; column += PANEL)
      panel<CORRECTED, BY_KEY>(rule, head, before, token, count, prepared, column, end - column);
  }
}

}  // namespace

void gated(const Gated& rule, const GatedHead& head, long tokens, long begin, long end) {
  if (!tokens) {
    for (long k = 0; k < rule.keys; ++k)
      copy_state(head.before, head.after, k * rule.values + begin, k * rule.values + end);
  } else if (rule.corrected) {
    (rule.by_key ? run<true, true> : run<true, false>)(rule, head, tokens, begin, end);
  } else {
    (rule.by_key ? run<false, true> : run<false, false>)(rule, head, tokens, begin, end);
  }
}

}  // namespace recurrence
