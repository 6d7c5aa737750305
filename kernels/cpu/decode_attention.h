// The attention stages of a decode step: grouped queries, and latent attention.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

#include "decode.h"

namespace decode {

constexpr long QUERIES = 16;        // that share keys, of heads and of a sequence's rows
constexpr long HEADS_A_TASK = 8;    // of latent attention, where all heads share their keys

inline void Pass::turn_queries(long b) {
  const long D = a().head_dim, Q = a().heads;
  const Heads heads{a().q_norm, a().rotation, Q, D, a().q_norm_per_head, a().norm_after_rotation};
  heads.turn(step.position[b], q + b * Q * D);
  if (asked == q) return;
  memcpy(asked + b * Q * D, q + b * Q * D, Q * D * sizeof(float));
  for (long i = 0; i < Q; ++i) kv::turn(asked + (b * Q + i) * D, D);
}

inline void Pass::turn_keys(long b) {
  const long D = a().head_dim, V = a().value_dim, N = a().kv_heads, at = step.position[b];
  const Heads heads{a().k_norm, a().rotation, N, D, a().k_norm_per_head, a().norm_after_rotation};
  float* rows = k + b * N * D;
  heads.turn(at, rows);
  for (long n = 0; n < N; ++n) {
    kv::put(step.keys, rows + n * D, D, cached(b, 0, n, D).at(at));
    kv::put(step.values, v + (b * N + n) * V, V, cached(b, 1, n, V).at(at));
  }
  if (writes_entry(b))
    memcpy(entry_rows(b).at(at / given.rate), given.entry + b * D, D * sizeof(float));
}

// Where the keys or values of a split lie.
inline void Pass::list(const kv::Rows& rows, long b, long kv_head, long split,
                       const char** to) const {
  const long count = split_keys(b, kv_head, split);
  if (const int64_t* index = split_chosen(b, split)) {
    for (long t = 0; t < count; ++t) to[t] = rows.at(index[t]);
    return;
  }
  for (long t = 0; t < count;) {  // places follow each other within a block
    const long first = place_of(b, kv_head, split, t), bytes = rows.bytes;
    const long block = (1l << rows.shift) - (first & ((1l << rows.shift) - 1));
    const long room = std::min(block, until_gap(b, kv_head, split, t));
    const char* from = rows.at(first);
    for (const long end = std::min(count, t + room); t < end; ++t, from += bytes) to[t] = from;
  }
}

// Sets the bounds of a block that the step has filled, and chooses the blocks that a key head attends
// to: the first, the newest (of the last two, rows of the same step may still be written), and those
// with the highest bounds. A block counts by the query that is nearest to its own best bound.
inline void Pass::pick(long b, long kv_head) {
  const kv::Bounds bounds = this->bounds(b, kv_head);
  const long at = step.position[b], D = a().head_dim, group = a().heads / a().kv_heads;
  if (at % kv::TOKENS == kv::TOKENS - 1) bounds.set(at / kv::TOKENS);
  const Seen* own = seen(b, kv_head);
  if (!own || !picks_some(*own)) return;
  struct {
    const kv::Bounds& bounds;
    const int32_t* list;
    int32_t block(long i) const { return list ? list[i] : int32_t(i); }
    const char* at(long i) const { return reinterpret_cast<const char*>(bounds.at(block(1 + i))); }
    void fetch(long) const {}
  } rows{bounds, own->blocks};
  const long task = b * a().kv_heads + kv_head, some = own->count - 1 - own->newest;
  float *near = this->near + task * scored, *score = near + some, *signs = score + some;
  for (long g = 0; g < group; ++g) {
    const float* query = asked + (b * a().heads + kv_head * group + g) * D;
    for (long d = 0; d < D; ++d) {
      signs[d] = query[d] > 0 ? query[d] : 0;
      signs[D + d] = query[d] > 0 ? 0 : query[d];
    }
    scores_of(signs, rows, some, 2 * D, score);
    const float best = *std::max_element(score, score + some);
    for (long i = 0; i < some; ++i)
      near[i] = g && near[i] > score[i] - best ? near[i] : score[i] - best;
  }
  int32_t* list = picked + task * picks;
  std::vector<long> order(some);
  std::iota(order.begin(), order.end(), 0);
  const long chosen = own->most - 1 - own->newest;
  std::nth_element(order.begin(), order.begin() + chosen, order.end(), [&](long i, long j) {
    return near[i] > near[j] || (near[i] == near[j] && i < j);
  });
  std::sort(order.begin(), order.begin() + chosen);
  *list++ = rows.block(0);
  for (long i = 0; i < chosen; ++i) *list++ = rows.block(1 + order[i]);
  for (long i = own->newest; i > 0; --i) *list++ = rows.block(own->count - i);
}

inline long Pass::most_together() const { return std::max(1l, QUERIES * a().kv_heads / a().heads); }

// How many rows from b on attend together with a key head, as they are one sequence's; 0: b attends
// with one before.
inline long Pass::together(long b, long kv_head) const {
  const auto joined = [&](long row) {  // to the one before
    const auto keys = [&](long at) { return step.cache[(at * step.layers + a().cache) * 2]; };
    return row > 0 && row < B && keys(row) == keys(row - 1) && first_key(row) == first_key(row - 1) &&
           step.position[row] > step.position[row - 1] && !seen(row, kv_head) && !given.chosen &&
           !given.rate;
  };
  const long most = most_together();
  long first = b, end = b + 1;
  while (joined(first)) --first;
  if ((b - first) % most) return 0;
  while (end < b + most && joined(end)) ++end;
  return end - b;
}

// The split of one key head, for all queries of some rows that share it. The rows attend to the same
// keys, and then each to some more than the one before.
inline void Pass::attend(long b, long rows_together, long kv_head, long split) {
  for (; rows_together && split >= splits(b, kv_head); --rows_together) ++b;
  if (!rows_together) return;
  const long D = a().head_dim, V = a().value_dim, group = a().heads / a().kv_heads;
  const long last = b + rows_together - 1, shared = split_keys(b, kv_head, split);
  const long count = split_keys(last, kv_head, split);
  const bool beside = of_entries(b, kv_head, split);  // as they are: neither coded nor turned
  const kv::Rows keys = beside ? entry_rows(b) : cached(b, 0, kv_head, D);
  const kv::Rows values = beside ? keys : cached(b, 1, kv_head, V);
  const char* rows[2 * SPLIT];  // values follow the keys, so that they are fetched in time
  list(keys, last, kv_head, split, rows), list(values, last, kv_head, split, rows + count);
  const Listed all{rows, 2 * count, keys.bytes}, own{rows + count, count, values.bytes};
  alignas(64) float score[QUERIES][SPLIT];
  for (long g = 0; g < rows_together * group; g += QUERIES) {
    const long queries = std::min(rows_together * group - g, QUERIES);
    const float* query[QUERIES];
    float* to[QUERIES];
    const auto row = [&](long i) { return b + (g + i) / group; };
    const auto head = [&](long i) { return row(i) * a().heads + kv_head * group + (g + i) % group; };
    for (long i = 0; i < queries; ++i) {
      query[i] = (beside ? q : asked) + head(i) * D;
      to[i] = sums + (head(i) * longest + split) * V;
    }
    kv::with_numbers(keys.format, D, [&](auto numbers) {
      scores_of(query, queries, numbers, all, count, D, true, score);
    });
    for (long i = 0; i < queries; ++i)
      partial[head(i) * longest + split] = weights_of(row(i), head(i), split, score[i]);
    kv::with_numbers(values.format, V, [&](auto numbers) {
      weighted_all(queries, score, numbers, own, 0, shared, V, to);
      for (long i = group; i < queries; i += group)  // the rest of the rows behind the first
        weighted_all(group, score + i, numbers, own, shared, split_keys(row(i), kv_head, split), V,
                     to + i);
    });
    if (beside && step.values.turned)  // as the sums of the other splits
      for (long i = 0; i < queries; ++i) kv::turn(to[i], V);
  }
  for (long row = b; row <= last; ++row)
    if (splits(row, kv_head) == 1)
      for (long i = 0; i < group; ++i) merge_head(row, kv_head * group + i);
}

// Turns the scores of a split into weights; `row` counts the heads of all rows.
inline Partial Pass::weights_of(long b, long row, long split, float* score) const {
  const long group = a().heads / a().kv_heads, kv_head = (row - b * a().heads) / group;
  const long count = split_keys(b, kv_head, split);
  if (given.bias) {
    const float *bias = given.bias + row * given.reach, unscaled = 1.0f / a().scale;
    const int64_t* index = split_chosen(b, split);
    for (long t = 0; t < count; ++t) {
      const long place = index ? index[t] : place_of(b, kv_head, split, t);
      const long back = step.position[b] - place;
      if (back < given.reach) score[t] += bias[back] * unscaled;
    }
  }
  return exponents(score, count, a().scale, a().softcap);
}

inline void Pass::merge_head(long b, long head) {
  const long row = b * a().heads + head, at = row * longest;
  const long kv_head = head / (a().heads / a().kv_heads);
  const long size = a().expansion ? a().latent : a().value_dim;
  const float* sink = given.sinks ? given.sinks + row : a().sinks ? a().sinks + head : nullptr;
  float* to = (a().expansion ? inward : heads.x) + row * size;
  merge(partial + at, sums + at * size, splits(b, kv_head), size, size, sink, to);
  if (a().expansion ? step.keys.turned : step.values.turned) kv::turn(to, size);
}

inline void Pass::project() {
  const Product first[] = {{&a().q, &hidden, q, a().q.rows()},
                           {&a().k, &hidden, k, a().k.rows()},
                           {&a().v, &hidden, v, a().v.rows()}};
  products(first, 3, B, threads, projecting);
}

// Keys and values go to their caches.
inline void Pass::turn_all() {
  const long N = a().kv_heads;
  turning.run(2 * B, [&](long task) { task % 2 ? turn_keys(task / 2) : turn_queries(task / 2); });
  if (step.bounds && !a().window)
    picking.run(B * N, [&](long task) { pick(task / N, task % N); });
}

inline void Pass::attend_all() {
  project();
  attend_heads();
}

// Queries, keys and values are there.
inline void Pass::attend_heads() {
  const long Q = a().heads, N = a().kv_heads;
  turn_all();
  const long most = most_together(), tasks = N * longest * ((B + most - 1) / most);
  const bool joins = tasks >= omp_get_num_threads();  // else threads would idle
  attending.run(B * N * longest, [&](long task) {
    const long b = task / (N * longest);
    const long kv_head = task / longest % N;
    attend(b, joins ? together(b, kv_head) : 1, kv_head, task % longest);
  });
  if (longest > 1)
    merging.run(B * Q, [&](long task) {
      if (splits(task / Q, task % Q / (Q / N)) > 1) merge_head(task / Q, task % Q);
    });
}

inline void Pass::turn_latent(long b) {
  const long R = a().latent, T = a().rotation.size, at = step.position[b];
  float* row = k + b * (R + T);
  if (a().k_norm.weight) normalise(a().k_norm, row, R, row);
  if (a().rotation.cos) rotate(a().rotation, at, row + R);
  kv::put(step.keys, row, R, cached(b, 0, 0, R).at(at));
  kv::put(step.values, row + R, T, cached(b, 1, 0, T).at(at));
  if (!a().q_a) return;
  normalise(a().q_norm, low.x + b * low.width, low.width, low.x + b * low.width);
  low.prepare(b);
}

// Queries as prompts read them: the rotated part turned, and before the plain one, as in latents.h.
inline void Pass::turn_latent_queries(long b) {
  const long D = a().head_dim, P = a().plain_dim, T = D - P;
  float turned[MAX_ROTATED];
  for (float* query = q + b * a().heads * D; query < q + (b + 1) * a().heads * D; query += D) {
    if (a().rotation.cos) rotate(a().rotation, step.position[b], query + P);
    memcpy(turned, query + P, T * sizeof(float));
    memmove(query + T, query, P * sizeof(float));
    memcpy(query, turned, T * sizeof(float));
  }
}

// Queries of one head: the rotated part turned, the plain part taken to the latent space.
template <class Numbers>
void Pass::inward_head(const Numbers& numbers, long head) {
  constexpr long TOGETHER = 8, WIDE = 4;  // rows that are added to vectors of sums in registers
  const long D = a().head_dim, R = a().latent, P = a().plain_dim, bytes = R * Numbers::BYTES;
  const char* w = static_cast<const char*>(a().expansion) + head * (P + a().value_dim) * bytes;
  for (long b = 0; b < B; ++b) {
    float* query = q + (b * a().heads + head) * D;
    float* to = inward + (b * a().heads + head) * R;
    if (a().rotation.cos) rotate(a().rotation, step.position[b], query + P);
    memset(to, 0, R * sizeof(float));
    for (long p = 0; p < P; p += TOGETHER) {
      const long end = std::min(P, p + TOGETHER);
      long c = 0;
      for (; c + WIDE * LANES <= R; c += WIDE * LANES) {
        vf sum[WIDE];
        UNROLL for (int v = 0; v < WIDE; ++v) sum[v] = load<vf>(to + c + v * LANES);
        for (long i = p; i < end; ++i) {
          const char* row = w + i * bytes;
          for (long line = 0; line < WIDE * LANES * Numbers::BYTES; line += 64)
            __builtin_prefetch(row + TOGETHER * bytes + c * Numbers::BYTES + line, 0, 3);
          UNROLL for (int v = 0; v < WIDE; ++v) sum[v] += query[i] * numbers.whole(row, c + v * LANES);
        }
        UNROLL for (int v = 0; v < WIDE; ++v) store(to + c + v * LANES, sum[v]);
      }
      for (; c < R; c += LANES) {
        vf sum = load_as_fp32(to + c, R - c);
        for (long i = p; i < end; ++i)
          sum += query[i] * (R - c < LANES ? numbers.part(w + i * bytes, c, R - c)
                                           : numbers.whole(w + i * bytes, c));
        store_fp32_as(to + c, sum, R - c);
      }
    }
    if (step.keys.turned) kv::turn(to, R);
    if (!step.values.turned) continue;
    const long T = a().rotation.size;
    float* beside = asked_beside + (b * a().heads + head) * T;
    memcpy(beside, query + P, T * sizeof(float));
    kv::turn(beside, T);
  }
}

// A split of the latents, for the heads of a task.
inline void Pass::attend_latent(long b, long first, long split) {
  const long R = a().latent, T = a().rotation.size, count = split_keys(b, 0, split);
  const kv::Rows latents = cached(b, 0, 0, R), keys = cached(b, 1, 0, T);
  const long queries = std::min(a().heads - first, HEADS_A_TASK), head = b * a().heads + first;
  const char* rows[2 * SPLIT];
  list(latents, b, 0, split, rows), list(keys, b, 0, split, rows + count);
  const Listed plain{rows, count, latents.bytes}, beside{rows + count, count, keys.bytes};
  alignas(64) float score[HEADS_A_TASK][SPLIT];
  const float *query[HEADS_A_TASK], *turned[HEADS_A_TASK];
  for (long i = 0; i < queries; ++i) {
    query[i] = inward + (head + i) * R;
    turned[i] = asked_beside + (head + i) * beside_stride;
  }
  kv::with_numbers(latents.format, R, [&](auto numbers) {
    scores_of(query, queries, numbers, plain, count, R, true, score);
  });
  kv::with_numbers(keys.format, T, [&](auto numbers) {
    scores_of(turned, queries, numbers, beside, count, T, false, score);
  });
  float* to[HEADS_A_TASK];
  for (long i = 0; i < queries; ++i) {
    partial[(head + i) * longest + split] = weights_of(b, head + i, split, score[i]);
    to[i] = sums + ((head + i) * longest + split) * R;
  }
  kv::with_numbers(latents.format, R, [&](auto numbers) {
    weighted_all(queries, score, numbers, plain, 0, count, R, to);
  });
}

// Projects one head's sum of latents to its values.
template <class Numbers>
void Pass::outward_head(const Numbers& numbers, long head) {
  const long R = a().latent, V = a().value_dim, bytes = R * Numbers::BYTES;
  const char* w = static_cast<const char*>(a().expansion) +
                  (head * (a().plain_dim + V) + a().plain_dim) * bytes;
  for (long b = 0; b < B; ++b) {
    merge_head(b, head);
    const float* sum = inward + (b * a().heads + head) * R;
    float* to = heads.x + (b * a().heads + head) * V;
    scores_each<1>(&sum, numbers, Straight<char>{w, bytes}, V, R, true, &to);
  }
}

inline void Pass::project_latents() {
  const bool two = bool(a().q_a);
  const Product first[] = {{&a().k, &hidden, k, a().k.rows()},
                           {two ? &a().q_a : &a().q, &hidden, two ? low.x : q,
                            two ? low.width : a().q.rows()}};
  products(first, 2, B, threads, projecting);
  turning.run(B, [&](long b) { turn_latent(b); });
  const Product second[] = {{&a().q, &low, q, a().q.rows()}};
  if (two) products(second, 1, B, threads, projecting_again);
}

inline void Pass::attend_latent_all() {
  project_latents();
  attend_latent_heads();
}

// Queries and rows of latents and rotated keys are there, and the latter in the cache.
inline void Pass::attend_latent_heads() {
  const long Q = a().heads, groups = (Q + HEADS_A_TASK - 1) / HEADS_A_TASK;
  const auto with_expansion = [&](const auto& body) {
    a().half ? body(kv::Fp16s{}) : body(kv::Floats{});
  };
  const auto reads = [&] {
    return Q * (a().plain_dim + a().value_dim) * a().latent * (a().half ? 2 : 4);
  };
  inwards.reads(reads);  // and `outwards`, some of it each
  with_expansion([&](auto numbers) {
    inwards.run(Q, [&](long head) { inward_head(numbers, head); });
  });
  attending.run(B * groups * longest, [&](long task) {
    const long b = task / (groups * longest), split = task % longest;
    if (split < splits(b)) attend_latent(b, task / longest % groups * HEADS_A_TASK, split);
  });
  with_expansion([&](auto numbers) {
    outwards.run(Q, [&](long head) { outward_head(numbers, head); });
  });
}

}  // namespace decode
