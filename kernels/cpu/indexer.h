// Which keys a new token attends to: an indexer keeps a small key of each token, and chooses the
// tokens with the largest sum over its heads of weight * relu(q . key). Some choose pools: runs of
// tokens, whose key is the mean of theirs, some by the softmax of each number's gates, and some normed
// and rotated to the pool's first position. Others choose entries: keys that stand for several tokens
// and are kept as such. A token's choice depends on its own sequence only.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "heads.h"
#include "norms.h"

namespace decode {

struct Indexer {
  int64_t cache;         // index of its rows
  int64_t heads, size;   // queries of a token, and their numbers
  int64_t top_k;         // keys that are chosen, or pools
  int64_t rate;          // tokens that a row of the cache stands for; the last of them writes it
  int64_t pool, stride;  // tokens of a pool, or 1; numbers of a row: a key, and gates behind it
  const float* bias;     // (pool, size) of a pool's gates; null: no gates, a plain mean
  Norm norm;             // of a pool's key; then its rotation
  Rotation rotation;

  // The positions that a sequence of `length` tokens chooses: of pools, and what follows the last.
  static long most(long top_k, long pool, long length) {
    return std::min(length, top_k * pool + length % pool);
  }
};

constexpr long INDEX_KEYS = 32;  // keys that stay in L1 while all heads read them

static inline void mean_key(const Indexer& x, const float* row, float* key) {
  for (long c = 0; c < x.size; c += LANES) {
    const long left = x.size - c;
    vf sum{};
    for (long j = 0; j < x.pool; ++j) sum += load_as_fp32(row + j * x.stride + c, left);
    store_fp32_as(key + c, sum / float(x.pool), left);
  }
}

static inline void gated_key(const Indexer& x, const float* row, float* key) {
  for (long c = 0; c < x.size; c += LANES) {
    const long left = x.size - c;
    const auto gate = [&](long j) {
      return load_as_fp32(row + j * x.stride + x.size + c, left) +
             load_as_fp32(x.bias + j * x.size + c, left);
    };
    vf high = gate(0), sum{}, mean{};
    for (long j = 1; j < x.pool; ++j) {
      const vf other = gate(j);
      high = other > high ? other : high;
    }
    for (long j = 0; j < x.pool; ++j) {
      const vf e = exp_lanes(gate(j) - high);
      sum += e;
      mean += e * load_as_fp32(row + j * x.stride + c, left);
    }
    store_fp32_as(key + c, mean / sum, left);
  }
}

// The key of the pool of that number, whose rows start there.
static inline void pool_key(const Indexer& x, long pool, const float* row, float* key) {
  x.bias ? gated_key(x, row, key) : mean_key(x, row, key);
  if (x.norm.weight) normalise(x.norm, key, x.size, key);
  if (x.rotation.size) rotate(x.rotation, pool * x.pool, key);
}

// score[t] = the sum over heads of weight relu(q . key t), of `count` keys or pools, whose rows
// start there and the first of which has that number. Any positive factor is left out: it does not
// change the choice.
static inline void index_scores(const Indexer& x, const float* q, const float* weights,
                                const float* rows, long first, long count, float* score) {
  alignas(64) float own[INDEX_KEYS], sum[INDEX_KEYS];
  thread_local std::vector<float> pools;
  if (x.pool > 1) pools.resize(INDEX_KEYS * x.size);
  for (long t = 0; t < count; t += INDEX_KEYS) {
    const long some = std::min(count - t, INDEX_KEYS);
    Straight<float> keys{rows + t * x.stride, x.stride};
    if (x.pool > 1) {
      for (long i = 0; i < some; ++i)
        pool_key(x, first + t + i, rows + (t + i) * x.pool * x.stride, pools.data() + i * x.size);
      keys = {pools.data(), x.size};
    }
    memset(sum, 0, sizeof sum);
    for (long h = 0; h < x.heads; ++h) {
      scores_of(q + h * x.size, keys, some, x.size, own);
      for (long i = 0; i < some; ++i) sum[i] += weights[h] * (own[i] > 0 ? own[i] : 0.0f);
    }
    memcpy(score + t, sum, some * sizeof(float));
  }
}

// The positions of the `top_k` largest of more scores, ascending. Of equal scores it takes those that
// torch's topk takes on a CPU with the same standard library: by the same two algorithms.
static inline void choose_keys(const float* score, long count, long top_k, int64_t* chosen) {
  typedef std::pair<float, int64_t> Key;
  thread_local std::vector<Key> keys;
  keys.resize(count);
  for (long t = 0; t < count; ++t) keys[t] = {score[t], t};
  const auto before = [](const Key& a, const Key& b) {
    return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
  };
  if (top_k * 64 <= count)
    std::partial_sort(keys.begin(), keys.begin() + top_k, keys.end(), before);
  else
    std::nth_element(keys.begin(), keys.begin() + top_k - 1, keys.end(), before);
  for (long i = 0; i < top_k; ++i) chosen[i] = keys[i].second;
  std::sort(chosen, chosen + top_k);
}

// The positions of a sequence of `length` tokens that an indexer chooses, ascending.
static inline void choose_positions(const Indexer& x, const float* score, long length,
                                    int64_t* chosen) {
  const long count = length / x.pool;
  if (count <= x.top_k) {
    for (long t = 0; t < length; ++t) chosen[t] = t;
    return;
  }
  choose_keys(score, count, x.top_k, chosen);
  for (long i = x.top_k - 1; i >= 0; --i) {
    const int64_t first = chosen[i] * x.pool;
    for (long j = 0; j < x.pool; ++j) chosen[i * x.pool + j] = first + j;
  }
  for (long t = count * x.pool; t < length; ++t)
    chosen[x.top_k * x.pool + t - count * x.pool] = t;
}

}  // namespace decode
