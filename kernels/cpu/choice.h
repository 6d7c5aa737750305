// The choice of experts from a router's logits, one row at a time: routing/routers.py in C++.
#pragma once
#include <cfloat>

#include "norms.h"

namespace decode {

enum Score : int32_t { SOFTMAX = 0, SIGMOID = 1, MIXER = 2 };

struct Rule {
  const float* correction;  // (experts,) added to scores for the choice, or null
  int64_t experts, top_k, groups, groups_kept;
  int32_t score, best_two, renormalise;  // best_two: groups by the sum of their two best scores
  float scale, threshold;
};

// Whether a ranks before b: the larger first, NaN before all numbers.
static inline bool above(float a, float b) { return a > b || (a != a && b == b); }

// Index of the largest of n values, NaN before all numbers; of equal ones the first.
static inline long largest(const float* values, long n) {
  vf high = splat(-INFINITY);
  vi odd = {};
  long e = 0;
  for (; e + LANES <= n; e += LANES) {
    const vf x = load<vf>(values + e);
    high = x > high ? x : high;
    odd |= x != x;
  }
  float most = largest_lane(high);
  bool has_nan = fold_lanes(odd, [](auto a, auto b) { return a | b; });
  for (; e < n; ++e) {
    most = values[e] > most ? values[e] : most;
    has_nan |= values[e] != values[e];
  }
  const auto is_largest = [&](auto x) { return has_nan ? x != x : x == most; };
  for (e = 0; e + LANES <= n; e += LANES)
    if (fold_lanes(vi(is_largest(load<vf>(values + e))), [](auto a, auto b) { return a | b; })) break;
  while (!is_largest(values[e])) ++e;
  return e;
}

// The k largest of n values, which it overwrites, and their indices, the largest first; of equal ones
// the first.
static inline void largest_of(float* values, long n, long k, float* found, int64_t* ids) {
  long i = 0;
  for (; i < k; ++i) {
    const long id = largest(values, n);
    found[i] = values[id], ids[i] = id;
    if (found[i] == -INFINITY) break;  // as is what was taken before
    values[id] = -INFINITY;
  }
  const long first = i;
  for (long id = 0; i < k; ++id) {
    bool taken = false;
    for (long j = 0; j < first; ++j) taken |= ids[j] == id;
    if (!taken) found[i] = -INFINITY, ids[i++] = id;
  }
}

static inline void keep_groups(const Rule& rule, float* choice) {
  const long size = rule.experts / rule.groups;
  float best[1024];
  for (long g = 0; g < rule.groups; ++g) {
    float first = -INFINITY, second = -INFINITY;
    for (long e = g * size; e < (g + 1) * size; ++e) {
      const float c = choice[e];
      if (above(c, first)) second = first, first = c;
      else if (above(c, second)) second = c;
    }
    best[g] = rule.best_two ? first + second : first;
  }
  bool kept[1024] = {};
  for (long i = 0; i < rule.groups_kept; ++i) {
    const long g = largest(best, rule.groups);
    kept[g] = true;
    best[g] = -INFINITY;
  }
  for (long e = 0; e < rule.experts; ++e)
    if (!kept[e / size]) choice[e] = -INFINITY;
}

// SparseMixer: takes the largest logit left, top_k times, weighted by a softmax over those near it.
static inline void mix(const Rule& rule, const float* logits, float* left, int64_t* ids,
                       float* weights) {
  memcpy(left, logits, rule.experts * sizeof(float));
  for (long k = 0; k < rule.top_k; ++k) {
    const long id = largest(left, rule.experts);
    const float high = left[id];
    float sum = 0;
    for (long e = 0; e < rule.experts; ++e) {
      const float size = std::fabs(logits[e]), factor = size > high ? size : high;
      if (!((high - logits[e]) / factor > rule.threshold)) sum += std::exp(left[e] - high);
    }
    ids[k] = id;
    weights[k] = rule.scale / sum;
    left[id] = -INFINITY;
  }
}

// ids and weights (top_k,) of one row's logits (experts,); overwrites both rows of scratch.
static inline void choose_experts(const Rule& rule, float* logits, float* choice, int64_t* ids,
                                  float* weights) {
  const long E = rule.experts;
  if (rule.score == MIXER) return mix(rule, logits, choice, ids, weights);
  if (rule.score == SOFTMAX) {
    const float high = logits[largest(logits, E)];
    float sum = 0;
    for (long e = 0; e < E; e += LANES)
      store_fp32_as(logits + e, exp_lanes(load_as_fp32(logits + e, E - e) - high), E - e);
    for (long e = 0; e < E; ++e) sum += logits[e];
    for (long e = 0; e < E; ++e) logits[e] /= sum;
  } else {
    for (long e = 0; e < E; e += LANES)
      store_fp32_as(logits + e, 1.0f / (1.0f + exp_lanes(-load_as_fp32(logits + e, E - e))), E - e);
  }
  for (long e = 0; e < E; ++e) choice[e] = logits[e] + (rule.correction ? rule.correction[e] : 0);
  if (rule.groups > 1) keep_groups(rule, choice);
  float sum = 0;
  for (long k = 0; k < rule.top_k; ++k) {
    const long id = largest(choice, E);
    choice[id] = -INFINITY;
    ids[k] = id;
    sum += weights[k] = logits[id];
  }
  const float scale = rule.renormalise ? rule.scale / sum : rule.scale;
  for (long k = 0; k < rule.top_k; ++k) weights[k] *= scale;
}

// Sorts by expert: the order of a routing's slots, in which outputs are summed. Unused slots (-1)
// come last, as the largest of unsigned numbers.
static inline void sort_choice(long top_k, int64_t* ids, float* weights) {
  for (long k = 1; k < top_k; ++k) {
    const int64_t id = ids[k];
    const float weight = weights[k];
    long j = k;
    for (; j > 0 && uint64_t(ids[j - 1]) > uint64_t(id); --j) ids[j] = ids[j - 1], weights[j] = weights[j - 1];
    ids[j] = id;
    weights[j] = weight;
  }
}

}  // namespace decode
