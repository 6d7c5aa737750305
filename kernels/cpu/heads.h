// Attention of one new token over a sequence's cache, in float32: `GROUP` queries that share keys at
// a time, a split of at most SPLIT keys at a time. The splits depend neither on the threads nor on the
// other sequences, so a row's bits do not either; `merge` joins their partial sums.
// Letters: D key size, V value size.
#pragma once
#include <algorithm>
#include <cfloat>

#include "kv.h"
#include "norms.h"

namespace decode {

constexpr long SPLIT = 512;  // keys whose scores a task holds
constexpr int GROUP = 4;     // queries that share a pass over keys

struct Partial {  // of one query and split: sum of e^(score - high) and the highest score
  float high, sum;
};

template <class T>
struct Straight {  // rows of numbers that lie `stride` apart
  const T* first;
  long stride;

  const char* at(long t) const { return reinterpret_cast<const char*>(first + t * stride); }
  void fetch(long) const {}  // the processor does
};

// Rows that lie anywhere. While row t is read, the one AHEAD is fetched, up to `end`.
struct Listed {
  const char* const* row;
  long end, bytes;

  const char* at(long t) const { return row[t]; }
  // Inlined at once: GCC removes calls of a function that only prefetches.
  __attribute__((always_inline)) void fetch(long t) const {
    constexpr long AHEAD = 32;
    if (t + AHEAD >= end) return;
    for (long line = 0; line < bytes; line += 64) __builtin_prefetch(row[t + AHEAD] + line, 0, 3);
  }
};

// score[i][t] (+)= q[i] . k[t] for N queries and `count` keys.
template <int N, class Numbers, class Keys>
static inline void scores_each(const float* const* q, const Numbers& numbers, const Keys& keys,
                               long count, long size, bool first, float* const* score) {
  const long whole = size / LANES * LANES;
  for (long t = 0; t < count; t += QUAD) {
    vf sum[N][QUAD] = {};
    const char* row[QUAD];
    UNROLL for (int j = 0; j < QUAD; ++j) {
      row[j] = keys.at(t + j < count ? t + j : count - 1);
      keys.fetch(t + j);
    }
    for (long c = 0; c < whole; c += LANES) {
      vf x[N];
      UNROLL for (int i = 0; i < N; ++i) x[i] = load<vf>(q[i] + c);
      UNROLL for (int j = 0; j < QUAD; ++j) {
        const vf y = numbers.whole(row[j], c);
        UNROLL for (int i = 0; i < N; ++i) sum[i][j] += x[i] * y;
      }
    }
    if (whole < size)
      UNROLL for (int j = 0; j < QUAD; ++j) {
        const vf y = numbers.part(row[j], whole, size - whole);
        UNROLL for (int i = 0; i < N; ++i) sum[i][j] += load_as_fp32(q[i] + whole, size - whole) * y;
      }
    const long some = count - t < QUAD ? count - t : QUAD;
    UNROLL for (int i = 0; i < N; ++i) {
      v4 s = sum_lanes(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
      float* to = score[i] + t;
      if (some == QUAD) {
        store(to, first ? s : load<v4>(to) + s);
      } else {
        for (int j = 0; j < some; ++j) to[j] = first ? s[j] : to[j] + s[j];
      }
    }
  }
}

// score[t] = q . k[t]
template <class Keys>
static inline void scores_of(const float* q, const Keys& k, long count, long size,
                             float* score) {
  scores_each<1>(&q, kv::Floats{}, k, count, size, true, &score);
}

// The same of any number of queries.
template <class Numbers, class Keys>
static inline void scores_of(const float* const* q, long queries, const Numbers& numbers,
                             const Keys& k, long count, long size, bool first,
                             float (*score)[SPLIT]) {
  constexpr int TOGETHER = LANES == 16 ? GROUP : 2;  // as many as the registers hold
  for (long i = 0; i < queries; i += TOGETHER) {
    float* to[TOGETHER];
    const int n = int(std::min<long>(queries - i, TOGETHER));
    for (int j = 0; j < n; ++j) to[j] = score[i + j];
    if (n == TOGETHER) scores_each<TOGETHER>(q + i, numbers, k, count, size, first, to);
    else if (n == 1) scores_each<1>(q + i, numbers, k, count, size, first, to);
    else if (n == 2) scores_each<2>(q + i, numbers, k, count, size, first, to);
    else scores_each<3>(q + i, numbers, k, count, size, first, to);
  }
}

// Turns scores into e^(scale * score - high), behind a soft cap (0: none).
static inline Partial exponents(float* score, long count, float scale, float softcap) {
  constexpr int TOGETHER = LANES == 16 ? 4 : 2;  // as many as the registers hold
  constexpr float LOG2_E = 1.44269504088896341f;
  vf highest = splat(-FLT_MAX);
  for (long t = count; t % LANES; ++t) score[t] = -FLT_MAX;
  for (long t = 0; t < count; t += LANES) {
    vf s = load<vf>(score + t);
    if (softcap > 0) {
      s = softcap * (1.0f - 2.0f / (exp_lanes(2.0f / softcap * scale * s) + 1.0f));
      store(score + t, s);
    }
    highest = s > highest ? s : highest;
  }
  if (softcap > 0) scale = 1;
  const float high = largest_lane(highest), factor = scale * LOG2_E;
  vf sum = {};
  long t = 0;
  const auto some = [&](auto& e) {
    constexpr int N = sizeof e / sizeof e[0];
    UNROLL for (int i = 0; i < N; ++i) e[i] = (load<vf>(score + t + i * LANES) - high) * factor;
    exp2_each(e);
    UNROLL for (int i = 0; i < N; ++i) store(score + t + i * LANES, e[i]), sum += e[i];
    t += N * LANES;
  };
  vf more[TOGETHER], one[1];
  while (t + TOGETHER * LANES <= count) some(more);
  while (t + LANES <= count) some(one);
  if (t < count) {
    const vf so_far = sum;
    some(one);
    for (; count < t; ++count) score[count] = 0;
    sum = so_far + load<vf>(score + t - LANES);
  }
  return {high * scale, total(sum)};
}

// out[g] = sum over t of weight[g][t] * v[t], for N queries; from `begin` > 0 on, added to what is
// there.
template <int N, class Numbers>
static inline void weighted(const float (*weight)[SPLIT], const Numbers& numbers, const Listed& v,
                            long begin, long count, long size, float* const* out) {
  constexpr int WIDE = LANES == 16 ? 4 : 2;  // as many as the registers hold
  long c = 0;
  for (; c + WIDE * LANES <= size; c += WIDE * LANES) {
    vf sum[N][WIDE] = {};
    if (begin)
      UNROLL for (int g = 0; g < N; ++g)
        UNROLL for (int i = 0; i < WIDE; ++i) sum[g][i] = load<vf>(out[g] + c + i * LANES);
    for (long t = begin; t < count; ++t) {
      const char* row = v.at(t);
      if (c == 0) v.fetch(t);
      UNROLL for (int i = 0; i < WIDE; ++i) {
        const vf x = numbers.whole(row, c + i * LANES);
        UNROLL for (int g = 0; g < N; ++g) sum[g][i] += weight[g][t] * x;
      }
    }
    UNROLL for (int g = 0; g < N; ++g)
      UNROLL for (int i = 0; i < WIDE; ++i) store(out[g] + c + i * LANES, sum[g][i]);
  }
  for (; c < size; c += LANES) {
    const long left = size - c;
    vf sum[N] = {};
    if (begin)
      UNROLL for (int g = 0; g < N; ++g) sum[g] = load_as_fp32(out[g] + c, left);
    for (long t = begin; t < count; ++t) {
      const vf x = left < LANES ? numbers.part(v.at(t), c, left) : numbers.whole(v.at(t), c);
      UNROLL for (int g = 0; g < N; ++g) sum[g] += weight[g][t] * x;
    }
    UNROLL for (int g = 0; g < N; ++g) store_fp32_as(out[g] + c, sum[g], left);
  }
}

// The same for any number of queries.
template <class Numbers>
static inline void weighted_all(long queries, const float (*weight)[SPLIT], const Numbers& numbers,
                                const Listed& v, long begin, long count, long size,
                                float* const* out) {
  for (long i = 0; i < queries; i += GROUP) switch (queries - i) {
      case 1: weighted<1>(weight + i, numbers, v, begin, count, size, out + i); break;
      case 2: weighted<2>(weight + i, numbers, v, begin, count, size, out + i); break;
      case 3: weighted<3>(weight + i, numbers, v, begin, count, size, out + i); break;
      default: weighted<4>(weight + i, numbers, v, begin, count, size, out + i);
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
