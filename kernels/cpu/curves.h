// The activations between an expert's projections: (min(up, limit) + offset) * curve(gate), which
// covers SwiGLU, GeGLU, gpt-oss's clamped variant (and those that clamp the curve, not its argument)
// and plain curves without a gate; and SwiGLU whose
// factors are bent towards limits.
// kernels/cpu/activation.py recognises the one that a Python callable computes.
#pragma once
#include "vec.h"

enum Curve : int32_t {
  SILU = 0, GELU_TANH = 1, GELU_ERF = 2, RELU = 3, RELU_SQUARED = 4,
  BENT = 5,  // bent(gate, offset) * sigmoid(slope * gate) * bent(up, limit)
};

extern "C" struct Activation {
  int32_t curve;
  float slope;   // SILU is x * sigmoid(slope * x)
  float limit;   // gate <= limit, |up| <= limit; infinite for none
  float offset;  // added to up
  int32_t late;  // curve(gate) <= limit in place of the gate
};

static inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp_lanes(-x)); }

// x * Phi(x); Phi's tail by Abramowitz and Stegun 7.1.26, within 1e-7.
static inline vf gelu_erf(vf x) {
  const vf size = (x < 0 ? -x : x) * 0.70710678118654752f;
  const vf t = 1.0f / (1.0f + 0.3275911f * size);
  vf p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const vf tail = 0.5f * x * (p * t * exp_lanes(-size * size));
  return x < 0 ? tail : x - tail;
}

// limit * tanh(x / limit); small arguments by Cephes' polynomial, as a difference would lose digits.
static inline vf bent(vf x, float limit) {
  const vf y = x / limit, z = y * y;
  vf p = -5.70498872745e-3f * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const vf large = 1.0f - 2.0f / (exp_lanes(2.0f * y) + 1.0f);
  return limit * (z < 0.390625f ? y + y * z * p : large);
}

static inline vf curve(const Activation& a, vf x) {
  switch (a.curve) {
    case BENT:
      return bent(x, a.offset) * sigmoid(a.slope * x);
    case SILU:
      return x / (1.0f + exp_lanes(-a.slope * x));
    case GELU_TANH:  // (1 + tanh(y)) / 2 is sigmoid(2 y)
      return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    case GELU_ERF:
      return gelu_erf(x);
    default: {
      const vf positive = x < 0 ? vf{} : x;  // NaN stays
      return a.curve == RELU ? positive : positive * positive;
    }
  }
}

// N curves interleaved, where that is faster; see exp_each.
template <int N>
static inline void curve_each(const Activation& a, vf (&x)[N]) {
  if (a.curve != SILU) {
    UNROLL for (int i = 0; i < N; ++i) x[i] = curve(a, x[i]);
    return;
  }
  vf e[N];
  UNROLL for (int i = 0; i < N; ++i) e[i] = -a.slope * x[i];
  exp_each(e);
  UNROLL for (int i = 0; i < N; ++i) x[i] = x[i] / (1.0f + e[i]);
}

static inline vf at_most(float limit, vf x) { return x > limit ? splat(limit) : x; }

// The gate, and what its curve gives.
static inline vf limited(const Activation& a, vf gate) {
  return a.curve == BENT || a.late ? gate : at_most(a.limit, gate);
}
static inline vf limited_late(const Activation& a, vf made) {
  return a.late ? at_most(a.limit, made) : made;
}

// The factor of the gate's curve.
static inline vf factor(const Activation& a, vf up) {
  if (a.curve == BENT) return bent(up, a.limit);
  up = up > a.limit ? splat(a.limit) : up;
  up = up < -a.limit ? splat(-a.limit) : up;
  return up + a.offset;
}

static inline vf activate(const Activation& a, vf gate, vf up) {
  return factor(a, up) * limited_late(a, curve(a, limited(a, gate)));
}

// Applies an activation to gate and up, or (without `gated`) its curve alone.
template <int N>
static inline void activate_each(const Activation& a, bool gated, vf (&gate)[N], const vf (&up)[N]) {
  if (gated) UNROLL for (int i = 0; i < N; ++i) gate[i] = limited(a, gate[i]);
  curve_each(a, gate);
  if (gated) UNROLL for (int i = 0; i < N; ++i) gate[i] = factor(a, up[i]) * limited_late(a, gate[i]);
}
