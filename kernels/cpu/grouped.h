// Grouped products of one MoE layer on rows sorted by expert, and the weighted sum per token.
// Threads are OpenMP's: the runtime that torch itself uses, so no second pool competes with it.
// Every function below runs in all threads of a parallel region; they share work through `Turns`.
//
// T tokens, H hidden, K slots a token, E experts, F expert width, G = 2F or F rows of the first
// projection, S = T*K slots, A the slots in use. "Sorted" rows are the A used slots by expert.
#pragma once
#include "curves.h"
#include "norms.h"
#include "turns.h"

struct Routing {             // views of one int32 buffer, see route()
  int32_t *slot, *position;  // (A,) sorted row -> slot; (S,) slot -> sorted row, -1 if unused
  int32_t *begin, *active;   // (E + 1,) first sorted row of each expert; experts that have rows
  int64_t rows, num_active;  // A; how many experts have rows
};

constexpr long PANEL_BYTES = 256 << 10;  // weights that stay in L2 while a task's rows use them
constexpr long MIN_PANEL = 16;
constexpr long TASKS_A_THREAD = 16;      // enough to balance, few enough to stay cheap

constexpr long routing_numbers(long slots, long experts) { return 2 * slots + 2 * experts + 1; }

// Stable counting sort of the slots by expert into `numbers`; false: an id outside [-1, E).
static inline bool route(const int64_t* ids, long slots, long experts, int32_t* numbers,
                         Routing& routing) {
  routing = {numbers, numbers + slots, numbers + 2 * slots, numbers + 2 * slots + experts + 1, 0, 0};
  int32_t* begin = routing.begin;
  memset(begin, 0, (experts + 1) * sizeof *begin);
  for (long s = 0; s < slots; ++s) {
    if (ids[s] < -1 || ids[s] >= experts) return false;
    if (ids[s] >= 0) ++begin[ids[s] + 1];
  }
  for (long e = 0; e < experts; ++e) {
    if (begin[e + 1]) routing.active[routing.num_active++] = e;
    begin[e + 1] += begin[e];
  }
  routing.rows = begin[experts];
  for (long s = 0; s < slots; ++s) {
    routing.position[s] = ids[s] < 0 ? -1 : begin[ids[s]]++;
    if (ids[s] >= 0) routing.slot[routing.position[s]] = s;
  }
  for (long e = experts; e > 0; --e) begin[e] = begin[e - 1];  // undo the advance
  begin[0] = 0;
  return true;
}

// One grouped product: for every sorted row r of expert e and every row g of its weights,
// finish(e, r, g.., sums). PARTS = 2 multiplies two equal halves of the weight rows side by side.
// Row r reads x[slot[r] / slots_a_row], or x[r] where slots_a_row is 0.
// Tasks are (expert, panel of weight rows): each weight is read from memory once a call.
template <class M, int PARTS, class From, class Finish>
void grouped(const Routing& routing, const From* x, long slots_a_row, const void* weights,
             long weight_rows, long width, int threads, Turns& turns, const Finish& finish) {
  typedef typename M::W W;
  const long rows = weight_rows / PARTS;
  const long share = rows * routing.num_active / (threads * TASKS_A_THREAD);
  long panel = PANEL_BYTES / (long(sizeof(W)) * width * PARTS);
  panel = (share < panel ? share : panel) / QUAD * QUAD;
  panel = panel < MIN_PANEL ? MIN_PANEL : panel > MAX_PANEL ? MAX_PANEL : panel;
  const long panels = (rows + panel - 1) / panel;
  alignas(64) float sums[PARTS][MAX_ROWS * MAX_PANEL];
  turns.reads([&] { return routing.num_active * weight_rows * width * int64_t(sizeof(W)); });
  const auto begin_of = [&](long task) {
    const long e = routing.active[task / panels], g = task % panels * panel;
    return static_cast<const W*>(weights) + (e * weight_rows + g) * width;
  };
  const long tasks = panels * routing.num_active;
  turns.run_ahead(tasks, [&](long task, long next) {
    const long e = routing.active[task / panels], g = task % panels * panel;
    const long count = rows - g < panel ? rows - g : panel;
    const W *w = begin_of(task), *then = next < tasks ? begin_of(next) : w;
    for (long r = routing.begin[e]; r < routing.begin[e + 1]; r += MAX_ROWS) {
      const long left = routing.begin[e + 1] - r, n = left < MAX_ROWS ? left : MAX_ROWS;
      const From* from[MAX_ROWS];
      for (long i = 0; i < n; ++i)
        from[i] = x + (slots_a_row ? routing.slot[r + i] / slots_a_row : r + i) * width;
      const bool last = r + n == routing.begin[e + 1];
      multiply_rows<M>(n, from, w, last ? then : w, PARTS, rows, count, width, sums);
      for (long i = 0; i < n; ++i)
        finish(e, r + i, g, count, sums[0] + i * MAX_PANEL, sums[PARTS - 1] + i * MAX_PANEL);
    }
  });
}

// out (A, weight_rows) = x W^T + bias, one sorted row each.
template <class M, class From>
void project(const Routing& routing, const From* x, long slots_a_row, const void* weights,
             const float* bias, long weight_rows, long width, float* out, int threads,
             Turns& turns) {
  grouped<M, 1>(routing, x, slots_a_row, weights, weight_rows, width, threads, turns,
                [=](long e, long r, long g, long n, const float* sum, const float*) {
                  float* to = out + r * weight_rows + g;
                  const float* b = bias ? bias + e * weight_rows + g : nullptr;
                  for (long j = 0; j < n; ++j) to[j] = b ? sum[j] + b[j] : sum[j];
                });
}

// How the rows of a first projection make an inner row.
enum Gating : int32_t { UNGATED, HALVES, ALTERNATING };  // no gate; gate, then up; gate and up in turn

// inner (A, F) = the activation of the first projection, (A, F) or (A, 2 F).
template <class M, class From>
void project_inner(const Routing& routing, const From* x, long slots_a_row, const void* weights,
                   const float* bias, const Activation& activation, Gating gating, long width,
                   long hidden, typename M::X* inner, int threads, Turns& turns) {
  const long rows = gating == UNGATED ? width : 2 * width;
  // `n` units from `c` on of row r, of which gate and up are given without their biases.
  const auto activated = [=](long r, long c, long n, const float* gate, const float* up,
                             const float* gate_bias, const float* up_bias) {
    for (long j = 0; j < n; j += LANES) {
      vf a[1] = {load<vf>(gate + j)}, u[1] = {load<vf>(up + j)};
      if (gate_bias) a[0] += load_as_fp32(gate_bias + j, n - j);
      if (up_bias) u[0] += load_as_fp32(up_bias + j, n - j);
      activate_each(activation, gating != UNGATED, a, u);
      store_fp32_as(inner + r * width + c + j, a[0], n - j);
    }
  };
  if (gating == HALVES)
    return grouped<M, 2>(routing, x, slots_a_row, weights, rows, hidden, threads, turns,
                         [=](long e, long r, long g, long n, const float* gate, const float* up) {
                           const float* b = bias ? bias + e * rows + g : nullptr;
                           activated(r, g, n, gate, up, b, b ? b + width : nullptr);
                         });
  grouped<M, 1>(routing, x, slots_a_row, weights, rows, hidden, threads, turns,
                [=](long e, long r, long g, long n, const float* sums, const float*) {
                  const float* b = bias ? bias + e * rows + g : nullptr;
                  if (gating == UNGATED) return activated(r, g, n, sums, sums, b, nullptr);
                  float gate[MAX_PANEL / 2 + LANES], up[MAX_PANEL / 2 + LANES];
                  for (long j = 0; j < n / 2; ++j) {  // panels have an even number of rows
                    gate[j] = sums[2 * j] + (b ? b[2 * j] : 0);
                    up[j] = sums[2 * j + 1] + (b ? b[2 * j + 1] : 0);
                  }
                  activated(r, g / 2, n / 2, gate, up, nullptr, nullptr);
                });
}

// A norm of each expert's output row; absent where its weight is null.
struct PostNorm {
  decode::Norm norm;
  const float* scale;  // (H,) of rows before the norm, or null
};

static inline void norm_rows(const PostNorm& post, const Routing& routing, long hidden, float* rows,
                             Turns& turns) {
  if (!post.norm.weight) return;
  turns.run(routing.rows, [&](long r) {
    float* row = rows + r * hidden;
    for (long c = 0; post.scale && c < hidden; c += LANES)
      store_fp32_as(row + c, load_as_fp32(row + c, hidden - c) *
                                 load_as_fp32(post.scale + c, hidden - c), hidden - c);
    decode::normalise(post.norm, row, hidden, row);
  });
}

static inline bool uses_any(const Routing& routing, long slot, long count) {
  for (long s = slot; s < slot + count; ++s)
    if (routing.position[s] >= 0) return true;
  return false;
}

// out (T, H) = sum over k, in order, of weight[t, k] * row[position[t, k]]. If so_far (T, H) is given,
// the sum is added to it in place instead. Products are rounded before they are added, so that summing
// the rows of several ranks in this order gives the same bits.
template <class X>
void combine(const Routing& routing, const float* row, const float* weights, long tokens,
             long slots, long hidden, X* out, float* so_far, Turns& turns) {
  constexpr long chunk = 8;
  turns.run((tokens + chunk - 1) / chunk, [&](long task) {
    const long first = task * chunk, last = first + chunk < tokens ? first + chunk : tokens;
    for (long t = first; t < last; ++t) {
      if (so_far && !uses_any(routing, t * slots, slots)) continue;
      for (long c = 0; c < hidden; c += LANES) {
        const long at = t * hidden + c, left = hidden - c;
        vf sum = so_far ? load_as_fp32(so_far + at, left) : vf{};
        for (long s = t * slots; s < (t + 1) * slots; ++s)
          if (routing.position[s] >= 0) {
            vf product = weights[s] * load_as_fp32(row + routing.position[s] * hidden + c, left);
            IN_REGISTER(product);  // never fused with the addition
            sum += product;
          }
        if (so_far) store_fp32_as(so_far + at, sum, left);
        else store_fp32_as(out + at, sum, left);
      }
    }
  });
}
