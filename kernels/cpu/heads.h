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

// Rows that lie `stride` apart: from the first on, or those of an index.
struct Straight {
  const float* first;
  long stride;
  const float* at(long t) const { return first + t * stride; }
  Straight from(long t) const { return {at(t), stride}; }
};
struct Chosen {
  const float* first;
  long stride;
  const int64_t* index;
  const float* at(long t) const { return first + index[t] * stride; }
  Chosen from(long t) const { return {first, stride, index + t}; }
};

// score[t] (+)= q . k[t] for `count` keys, Straight or Chosen.
template <class Keys>
static inline void scores_of(const float* q, const Keys& k, long count, long size, bool first,
                             float* score) {
  const long whole = size / LANES * LANES;
  long t = 0;
  for (; t + QUAD <= count; t += QUAD) {
    vf sum[QUAD] = {};
    const float* row[QUAD];
    UNROLL for (int j = 0; j < QUAD; ++j) row[j] = k.at(t + j);
    for (long c = 0; c < whole; c += LANES) {
      vf x = load<vf>(q + c);
      UNROLL for (int j = 0; j < QUAD; ++j) sum[j] += x * load<vf>(row[j] + c);
    }
    v4 s = sum_lanes(sum[0], sum[1], sum[2], sum[3]);
    for (int j = 0; j < QUAD; ++j) {
      float left = s[j];
      for (long c = whole; c < size; ++c) left += q[c] * row[j][c];
      score[t + j] = first ? left : score[t + j] + left;
    }
  }
  for (; t < count; ++t) {
    vf sum = {};
    const float* row = k.at(t);
    for (long c = 0; c < whole; c += LANES) sum += load<vf>(q + c) * load<vf>(row + c);
    float left = total(sum);
    for (long c = whole; c < size; ++c) left += q[c] * row[c];
    score[t] = first ? left : score[t] + left;
  }
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

// out[g] = sum over t of weight[g][t] * v[t], for N queries.
template <int N, class Values>
static inline void weighted(const float (*weight)[SPLIT], const Values& v, long count, long size,
                            float* const* out) {
  constexpr int WIDE = 4;
  long c = 0;
  for (; c + WIDE * LANES <= size; c += WIDE * LANES) {
    vf sum[N][WIDE] = {};
    for (long t = 0; t < count; ++t)
      UNROLL for (int i = 0; i < WIDE; ++i) {
        vf x = load<vf>(v.at(t) + c + i * LANES);
        UNROLL for (int g = 0; g < N; ++g) sum[g][i] += weight[g][t] * x;
      }
    for (int g = 0; g < N; ++g)
      for (int i = 0; i < WIDE; ++i) store(out[g] + c + i * LANES, sum[g][i]);
  }
  for (; c < size; c += LANES) {
    vf sum[N] = {};
    for (long t = 0; t < count; ++t) {
      vf x = load_as_fp32(v.at(t) + c, size - c);
      UNROLL for (int g = 0; g < N; ++g) sum[g] += weight[g][t] * x;
    }
    for (int g = 0; g < N; ++g) store_fp32_as(out[g] + c, sum[g], size - c);
  }
}

// One split for `queries` <= GROUP queries: partial sums of values into out[g].
template <class Values>
static inline void weighted_group(int queries, const float (*weight)[SPLIT], const Values& v,
                                  long count, long size, float* const* out) {
  switch (queries) {
    case 1: return weighted<1>(weight, v, count, size, out);
    case 2: return weighted<2>(weight, v, count, size, out);
    case 3: return weighted<3>(weight, v, count, size, out);
    default: return weighted<4>(weight, v, count, size, out);
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
