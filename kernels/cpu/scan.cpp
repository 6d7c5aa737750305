// Selective state spaces of one head (Mamba-2) or of all channels (Mamba); see recurrence.h.
//
// The states of a channel lie side by side, so a vector holds states of one channel, and the outputs
// are sums over lanes, of four channels at a time.
#include "curves.h"
#include "gemm.h"
#include "recurrence.h"

namespace recurrence {
namespace {

constexpr long PANEL = 4096;  // floats of the state in the L1 cache
constexpr long BLOCK = 16;    // tokens that a panel reads in turn
constexpr long PADDED = (MAX_STATES + LANES - 1) / LANES * LANES;
constexpr int QUAD_ROWS = 4;

// log(1 + e^x) = max(x, 0) + log(1 + t), t = e^-|x|, and log(1 + t) = 2 atanh(t / (2 + t)): a series
// in squares of at most 1/9.
inline vf softplus(vf x) {
  const vf t = exp_lanes(x < 0 ? x : -x);
  const vf s = t / (2.0f + t), z = s * s;
  vf p = splat(1.0f / 15);
  p = p * z + 1.0f / 13;
  p = p * z + 1.0f / 11;
  p = p * z + 1.0f / 9;
  p = p * z + 1.0f / 7;
  p = p * z + 1.0f / 5;
  p = p * z + 1.0f / 3;
  p = p * z + 1.0f;
  return (x < 0 ? vf{} : x) + 2.0f * s * p;
}

vf time_step(const Scan& rule, vf dt) {
  if (rule.softplus) dt = softplus(dt);
  dt = dt < rule.least ? splat(rule.least) : dt;
  return dt > rule.most ? splat(rule.most) : dt;
}

// Rows of `states` floats as rows of `padded`, zeros behind them, and back.
void copy_in(const float* from, long rows, long states, long padded, float* to) {
  for (long r = 0; r < rows; ++r)
    for (long n = 0; n < padded; n += LANES)
      store(to + r * padded + n,
            from && n < states ? load_as_fp32(from + r * states + n, states - n) : vf{});
}

void copy_out(const float* from, long rows, long states, long padded, float* to) {
  for (long r = 0; r < rows; ++r) memcpy(to + r * states, from + r * padded, states * sizeof(float));
}

// A panel of channels: `from` is read by the first token, `to` by those after it.
struct Panel {
  const float *from, *a;
  float* to;
  long rows, width;  // channels; floats of each, whole vectors
  bool streamed;     // `to`, of a single token
};

struct Inputs {                  // of one token
  alignas(64) float b[PADDED], c[PADDED];
  float dt, decay;               // unless they are of each channel
};

// h of R channels after a token, and the sums of h c.
template <int R, bool BY_CHANNEL, bool STREAMED>
inline v4 advance(const float* from, float* to, const float* a, long width, const Inputs& now,
                  const float* dt, const float* amount) {
  vf sums[QUAD_ROWS] = {};
  for (long n = 0; n < width; n += LANES) {
    const vf b = load<vf>(now.b + n), c = load<vf>(now.c + n);
    vf decays[R];
    if constexpr (BY_CHANNEL) {
      UNROLL for (int r = 0; r < R; ++r) decays[r] = dt[r] * load<vf>(a + r * width + n);
      exp_each(decays);
    }
    UNROLL for (int r = 0; r < R; ++r) {
      const vf kept = load<vf>(from + r * width + n) * (BY_CHANNEL ? decays[r] : splat(now.decay));
      const vf state = fused(splat(amount[r]), b, kept);
      if constexpr (STREAMED) stream(to + r * width + n, state);
      else store(to + r * width + n, state);
      sums[r] = fused(state, c, sums[r]);
    }
  }
  return sum_lanes(sums[0], sums[1], sums[2], sums[3]);
}

// One token of a panel: `dt` and `amount` (dt x) of its channels; fills the sums of h c.
template <bool BY_CHANNEL, bool STREAMED>
void advance_panel(const Panel& panel, const float* from, const Inputs& now, const float* dt,
                   const float* amount, float* sums) {
  long r = 0;
  const auto run = [&](auto rows) {
    constexpr int R = decltype(rows)::value;
    const long at = r * panel.width;
    const v4 each = advance<R, BY_CHANNEL, STREAMED>(
        from + at, panel.to + at, BY_CHANNEL ? panel.a + at : nullptr, panel.width, now, dt + r,
        amount + r);
    memcpy(sums + r, &each, R * sizeof(float));
    r += R;
  };
  while (r + QUAD_ROWS <= panel.rows) run(std::integral_constant<int, QUAD_ROWS>{});
  while (r < panel.rows) run(std::integral_constant<int, 1>{});
}

void prepare(const Scan& rule, const ScanHead& head, long token, long width, Inputs& to) {
  copy_in(head.b.at(token), 1, rule.states, width, to.b);
  copy_in(head.c.at(token), 1, rule.states, width, to.c);
  if (rule.by_channel) return;
  to.dt = time_step(rule, splat(*head.dt.at(token) + (head.bias ? *head.bias : 0)))[0];
  to.decay = exp_lanes(splat(to.dt * *head.a))[0];
}

// Some tokens of a panel whose first channel is `channel`.
void run(const Scan& rule, const ScanHead& head, Panel panel, const Inputs* inputs, long token,
         long count, long channel) {
  alignas(64) float dt[PANEL / LANES], amount[PANEL / LANES], sums[PANEL / LANES];
  for (long t = 0; t < count; ++t) {
    const Inputs& now = inputs[t];
    const float *x = head.x.at(token + t) + channel;
    const float* steps = rule.by_channel ? head.dt.at(token + t) + channel : nullptr;
    for (long r = 0; r < panel.rows; r += LANES) {
      const long left = panel.rows - r;
      vf step = splat(now.dt);
      if (rule.by_channel) {
        step = load_as_fp32(steps + r, left);
        if (head.bias) step += load_as_fp32(head.bias + channel + r, left);
        step = time_step(rule, step);
      }
      store(dt + r, step);
      store(amount + r, step * load_as_fp32(x + r, left));
    }
    const auto advance = panel.streamed
                             ? (rule.by_channel ? advance_panel<true, true> : advance_panel<false, true>)
                             : (rule.by_channel ? advance_panel<true, false> : advance_panel<false, false>);
    advance(panel, t ? panel.to : panel.from, now, dt, amount, sums);
    for (long r = 0; r < panel.rows; r += LANES) {
      const long left = panel.rows - r;
      vf out = load<vf>(sums + r);
      if (head.d) {
        const vf d = rule.by_channel ? load_as_fp32(head.d + channel + r, left) : splat(*head.d);
        out = fused(d, load_as_fp32(x + r, left), out);
      }
      if (head.z) {
        const vf z = load_as_fp32(head.z.at(token + t) + channel + r, left);
        out *= z / (1.0f + exp_lanes(-z));
      }
      store_fp32_as(head.out.at(token + t) + channel + r, out, left);
    }
  }
}

}  // namespace

void scan(const Scan& rule, const ScanHead& head, long tokens, long begin, long end) {
  const long states = rule.states, width = (states + LANES - 1) / LANES * LANES;
  const long most = PANEL / width / LANES * LANES;
  const bool copies = width != states;
  alignas(64) float state[PANEL], a[PANEL];
  Inputs inputs[BLOCK];
  if (!tokens) copy_state(head.before, head.after, begin * states, end * states);
  for (long token = 0; token < tokens; token += BLOCK) {
    const long count = tokens - token < BLOCK ? tokens - token : BLOCK;
    for (long t = 0; t < count; ++t) prepare(rule, head, token + t, width, inputs[t]);
    for (long c = begin; c < end; c += most) {
      const long rows = end - c < most ? end - c : most;
      const float* before = token ? head.after : head.before;
      Panel panel{before ? before + c * states : state, head.a + c * states, head.after + c * states,
                  rows, width, head.hints.streamed && tokens == 1 && whole_vectors(head.after, states)};
      if (copies || !before) copy_in(before ? panel.from : nullptr, rows, states, width, state);
      if (copies && rule.by_channel) copy_in(panel.a, rows, states, width, a), panel.a = a;
      if (copies) panel.from = panel.to = state;
      run(rule, head, panel, inputs, token, count, c);
      if (copies) copy_out(state, rows, states, width, head.after + c * states);
    }
  }
}

}  // namespace recurrence
