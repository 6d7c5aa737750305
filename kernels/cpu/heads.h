// Attention of one new token over a sequence's cache, in float32: `GROUP` queries that share keys at
// a time, a split of at most SPLIT keys at a time. The splits depend neither on the threads nor on the
// other sequences, so a row's bits do not either; `merge` joins their partial sums.
// Letters: D key size, V value size.
#pragma once
#include <cfloat>

#include "norms.h"

namespace decode {

constexpr long SPLIT = 512;  // keys whose scores a task holds
constexpr int GROUP = 4;     // queries that share a pass over keys

struct Partial {  // of one query and split: sum of e^(score - high) and the highest score
  float high, sum;
};

struct Straight {  // rows that lie `stride` apart
  const float* first;
  long stride;
  const float* at(long t) const { return first + t * stride; }
};

// score[i][t] (+)= q[i] . k[t] for N queries and `count` keys.
template <int N, class K>
static inline void scores_each(const float* const* q, const K& k, long count, long size,
                               bool first, float* const* score) {
  const long whole = size / LANES * LANES;
  const auto put = [&](int i, long t, float sum) {
    score[i][t] = first ? sum : score[i][t] + sum;
  };
  long t = 0;
  for (; t + QUAD <= count; t += QUAD) {
    vf sum[N][QUAD] = {};
    const float* row[QUAD];
    UNROLL for (int j = 0; j < QUAD; ++j) row[j] = k.at(t + j);
    for (long c = 0; c < whole; c += LANES) {
      vf x[N];
      UNROLL for (int i = 0; i < N; ++i) x[i] = load<vf>(q[i] + c);
      UNROLL for (int j = 0; j < QUAD; ++j) {
        const vf y = load<vf>(row[j] + c);
        UNROLL for (int i = 0; i < N; ++i) sum[i][j] += x[i] * y;
      }
    }
    for (int i = 0; i < N; ++i) {
      v4 s = sum_lanes(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
      for (int j = 0; j < QUAD; ++j) {
        float left = s[j];
        for (long c = whole; c < size; ++c) left += q[i][c] * row[j][c];
        put(i, t + j, left);
      }
    }
  }
  for (; t < count; ++t)
    for (int i = 0; i < N; ++i) {
      vf sum = {};
      const float* row = k.at(t);
      for (long c = 0; c < whole; c += LANES) sum += load<vf>(q[i] + c) * load<vf>(row + c);
      float left = total(sum);
      for (long c = whole; c < size; ++c) left += q[i][c] * row[c];
      put(i, t, left);
    }
}

// score[t] (+)= q . k[t]
template <class K>
static inline void scores_of(const float* q, const K& k, long count, long size, bool first,
                             float* score) {
  scores_each<1>(&q, k, count, size, first, &score);
}

// The same of queries that lie `stride` apart, two at a time, into score[i] from `at` on.
static inline void scores_of(const float* q, long stride, long queries, const Straight& k,
                             long count, long size, bool first, float (*score)[SPLIT], long at) {
  long i = 0;
  for (; i + 2 <= queries; i += 2) {
    const float* const two[] = {q + i * stride, q + (i + 1) * stride};
    float* const to[] = {score[i] + at, score[i + 1] + at};
    scores_each<2>(two, k, count, size, first, to);
  }
  if (i < queries) scores_of(q + i * stride, k, count, size, first, score[i] + at);
}

// Turns scores into e^(score - high), after scale and soft cap (0: none).
static inline Partial exponents(float* score, long count, float scale, float softcap) {
  constexpr int TOGETHER = LANES == 16 ? 4 : 2;  // as many as the registers hold
  vf highest = splat(-FLT_MAX);
  for (long t = count; t % LANES; ++t) score[t] = -FLT_MAX / scale;
  for (long t = 0; t < count; t += LANES) {
    vf s = load<vf>(score + t) * scale;
    if (softcap > 0) s = softcap * (1.0f - 2.0f / (exp_lanes(2.0f / softcap * s) + 1.0f));
    highest = s > highest ? s : highest;
    store(score + t, s);
  }
  const float high = largest_lane(highest);
  vf sum = {};
  long t = 0;
  for (; t + TOGETHER * LANES <= count; t += TOGETHER * LANES) {
    vf e[TOGETHER];
    UNROLL for (int i = 0; i < TOGETHER; ++i) e[i] = load<vf>(score + t + i * LANES) - high;
    exp_each(e);
    UNROLL for (int i = 0; i < TOGETHER; ++i) store(score + t + i * LANES, e[i]), sum += e[i];
  }
  for (; t + LANES <= count; t += LANES) {
    const vf e = exp_lanes(load<vf>(score + t) - high);
    store(score + t, e);
    sum += e;
  }
  if (t < count) {
    store(score + t, exp_lanes(load<vf>(score + t) - high));
    for (long end = (count + LANES - 1) / LANES * LANES; count < end; ++count) score[count] = 0;
    sum += load<vf>(score + t);
  }
  return {high, total(sum)};
}

// out[g] (+)= sum over t of weight[g][first + t] * v[t], for N queries; = where `first` is 0.
template <int N>
static inline void weighted(const float (*weight)[SPLIT], long first, const Straight& v, long count,
                            long size, float* const* out) {
  constexpr int WIDE = LANES == 16 ? 4 : 2;  // as many as the registers hold
  long c = 0;
  for (; c + WIDE * LANES <= size; c += WIDE * LANES) {
    vf sum[N][WIDE] = {};
    if (first)
      for (int g = 0; g < N; ++g)
        for (int i = 0; i < WIDE; ++i) sum[g][i] = load<vf>(out[g] + c + i * LANES);
    for (long t = 0; t < count; ++t)
      UNROLL for (int i = 0; i < WIDE; ++i) {
        vf x = load<vf>(v.at(t) + c + i * LANES);
        UNROLL for (int g = 0; g < N; ++g) sum[g][i] += weight[g][first + t] * x;
      }
    for (int g = 0; g < N; ++g)
      for (int i = 0; i < WIDE; ++i) store(out[g] + c + i * LANES, sum[g][i]);
  }
  for (; c < size; c += LANES) {
    vf sum[N] = {};
    if (first)
      for (int g = 0; g < N; ++g) sum[g] = load_as_fp32(out[g] + c, size - c);
    for (long t = 0; t < count; ++t) {
      vf x = load_as_fp32(v.at(t) + c, size - c);
      UNROLL for (int g = 0; g < N; ++g) sum[g] += weight[g][first + t] * x;
    }
    for (int g = 0; g < N; ++g) store_fp32_as(out[g] + c, sum[g], size - c);
  }
}

// Some keys of a split for `queries` <= GROUP queries: partial sums of values into out[g].
static inline void weighted_group(int queries, const float (*weight)[SPLIT], long first,
                                  const Straight& v, long count, long size, float* const* out) {
  switch (queries) {
    case 1: return weighted<1>(weight, first, v, count, size, out);
    case 2: return weighted<2>(weight, first, v, count, size, out);
    case 3: return weighted<3>(weight, first, v, count, size, out);
    default: return weighted<4>(weight, first, v, count, size, out);
  }
}

// Merges the splits of one query, whose sums are `stride` floats apart, into its output; a sink is
// the score of a key without a value.
static inline void merge(const Partial* partial, const float* sums, long splits, long stride,
                         long size, const float* sink, float* out) {
  float high = sink ? *sink : -FLT_MAX;
  for (long s = 0; s < splits; ++s) high = partial[s].high > high ? partial[s].high : high;
  float sum = sink ? std::exp(*sink - high) : 0;
  for (long s = 0; s < splits; ++s) sum += partial[s].sum * std::exp(partial[s].high - high);
  for (long c = 0; c < size; c += LANES) {
    vf x = {};
    for (long s = 0; s < splits; ++s)
      x += std::exp(partial[s].high - high) * load_as_fp32(sums + s * stride + c, size - c);
    store_fp32_as(out + c, x / sum, size - c);
  }
}

}  // namespace decode
