// Recurrent layers, token by token: gated delta rules, selective state spaces, short convolutions.
//
//   gated({128, 128, scale, 1, 0, 1}, head, tokens, 0, 128);   // one head of one sequence
//   call.run(item, 0, call.width());                           // the same of a batch, once for each item
//
// A column of a gated rule's state, a row of a scan's state and a channel of a convolution evolve
// independently of the others, and so callers divide them among threads. Each token is computed by
// the same operations in the same order, however its prompt is cut and whatever is beside it: no
// chunked form is needed where a panel of the state stays in the L1 cache.
//
// States, inputs and outputs are float32. `before` is the state before the tokens (null: zeros) and
// `after` the one after them, which may be the same memory. With no tokens it is a copy. Outputs share
// no memory with inputs. T tokens, K keys, V
// values, P channels, N states of each, C channels of a convolution.
#pragma once
#include <cstdint>
#include <cstring>

#include "vec.h"

namespace recurrence {

constexpr long MAX_KEYS = 256, MAX_STATES = 256, MAX_TAPS = 8;

// One row of floats for each token, `stride` floats apart; null where there is none.
struct Tokens {
  const float* first;
  int64_t stride;

  const float* at(long token) const { return first + token * stride; }
  explicit operator bool() const { return first; }
};

struct Outputs {
  float* first;
  int64_t stride;

  float* at(long token) const { return first + token * stride; }
};

// How a single token's state goes through the caches; results do not depend on it.
struct Hints {
  bool streamed = false;        // `after` may bypass them: streaming stores
  const float* next = nullptr;  // the state that the thread reads next, fetched on the way
};

// Whether vectors of `after` are whole and aligned: streaming stores take no others.
static inline bool whole_vectors(const float* after, long width) {
  return width % LANES == 0 && reinterpret_cast<uintptr_t>(after) % sizeof(vf) == 0;
}

// The floats [begin, end) of a state that no tokens change.
static inline void copy_state(const float* before, float* after, long begin, long end) {
  if (!before) memset(after + begin, 0, (end - begin) * sizeof(float));
  else memmove(after + begin, before + begin, (end - begin) * sizeof(float));
}

// S = exp(decay) S; S += k v'^T; out = scale S^T q, with v' = beta (v - S^T k) (Gated DeltaNet, Yang
// et al. 2024; KDA, Kimi Linear 2025), or without correction v' = beta v (gated linear attention).
struct Gated {
  int64_t keys, values;  // K <= MAX_KEYS, V
  float scale;
  int32_t corrected;     // the delta rule
  int32_t by_key;        // a decay for each key; else one for the head
  int32_t normalised;    // q and k are divided by sqrt(sum of squares + 1e-6), as FLA does
};

struct GatedHead {
  Tokens q, k, v, decay, beta;  // K, K, V; logs of decays, K or 1; 1, or null for ones
  const float* before;          // (K, V)
  float* after;
  Outputs out;                  // V
  Hints hints{};
};

// The columns [begin, end) of the state and of the outputs.
void gated(const Gated& rule, const GatedHead& head, long tokens, long begin, long end);

// h = exp(dt a) h + dt x b^T; out = h c + d x, times silu(z) where it is given (Mamba, Gu and Dao
// 2023; Mamba-2, Dao and Gu 2024); dt is dt + bias, its softplus, and within its limits.
struct Scan {
  int64_t channels, states;  // P, N <= MAX_STATES
  int32_t by_channel;        // dt, bias and d are of each channel, a is (P, N); else one of each
  int32_t softplus;
  float least, most;         // of dt
};

struct ScanHead {
  Tokens x, dt, b, c, z;         // P, 1 or P, N, N, P or null
  const float *a, *d, *bias;     // d and bias may be null
  const float* before;           // (P, N)
  float* after;
  Outputs out;                   // P
  Hints hints{};
};

// The channels [begin, end).
void scan(const Scan& rule, const ScanHead& head, long tokens, long begin, long end);

// out[t] = bias + sum over j of weight[j] x[t - taps + 1 + j] in each channel, then silu if it says
// so. The state is the last `kept` inputs of each channel, kept >= taps - 1.
struct Convolution {
  const float *weight, *bias;  // (C, taps); (C,) or null
  int64_t channels, taps, kept;
  int32_t silu;
};

struct Channels {
  Tokens x;             // C
  const float* before;  // (C, kept)
  float* after;         // null: not wanted
  Outputs out;
};

// The channels [begin, end).
void convolve(const Convolution& rule, const Channels& rows, long tokens, long begin, long end);

// (sequences, tokens, heads, width) floats: `width` of them lie side by side.
struct Floats {
  const float* data;
  int64_t sequence, token, head;  // floats from one to the next

  const float* of(long s, long h) const { return data ? data + s * sequence + h * head : nullptr; }
  Tokens tokens(long s, long h) const { return {of(s, h), token}; }
};

// Calls for all heads of a batch. An item is a head of a sequence, a convolution's a sequence; `width`
// is divided in multiples of UNIT.
struct GatedCall {
  static constexpr long UNIT = 64;
  Gated rule;
  Floats q, k, v, decay, beta;            // q and k have fewer heads than v: each serves `group` in turn
  const float* before;                    // (sequences, heads, K, V), as `after`
  float *after, *out;                     // out: (sequences, tokens, heads, V)
  int64_t sequences, tokens, heads, group;

  Floats* inputs() { return &q; }
  long items() const { return sequences * heads; }
  long width() const { return rule.values; }
  long state() const { return rule.keys * rule.values; }
  long products() const { return items() * tokens * state(); }
  void run(long item, long begin, long end, const Hints& hints = {}) const;
};

struct ScanCall {
  static constexpr long UNIT = 16;
  Scan rule;
  Floats x, dt, b, c, z;                  // each head of b and c serves `group` of x in turn
  const float *a, *d, *bias;              // of each head, one after the other
  const float* before;                    // (sequences, heads, P, N), as `after`
  float *after, *out;                     // out: (sequences, tokens, heads, P)
  int64_t sequences, tokens, heads, group;

  Floats* inputs() { return &x; }
  long items() const { return sequences * heads; }
  long width() const { return rule.channels; }
  long state() const { return rule.channels * rule.states; }
  long products() const { return items() * tokens * state(); }
  void run(long item, long begin, long end, const Hints& hints = {}) const;
};

struct ConvolutionCall {
  static constexpr long UNIT = 64;
  Convolution rule;
  Floats x;                               // of one head
  const float* before;                    // (sequences, C, kept), as `after`
  float *after, *out;                     // out: (sequences, tokens, C)
  int64_t sequences, tokens;

  Floats* inputs() { return &x; }
  long items() const { return sequences; }
  long width() const { return rule.channels; }
  long state() const { return rule.channels * rule.kept; }
  long products() const { return sequences * tokens * rule.channels * 8; }
  void run(long sequence, long begin, long end, const Hints& hints = {}) const;
};

// How the items of a call and parts of its width are divided among threads.
struct Division {
  long items, width, part, parts;

  template <class Call>
  Division(const Call& call, long items, int threads) : items(items), width(call.width()) {
    constexpr long TASKS = 4;  // a thread
    const long wanted = threads == 1 ? 1 : 1 + TASKS * threads / (items ? items : 1);
    part = ((width + wanted - 1) / wanted + Call::UNIT - 1) / Call::UNIT * Call::UNIT;
    parts = part ? (width + part - 1) / part : 0;
  }
  long tasks() const { return items * parts; }
  long item(long task) const { return task / parts; }
  long begin(long task) const { return task % parts * part; }
  long end(long task) const { return begin(task) + part < width ? begin(task) + part : width; }
};

}  // namespace recurrence
