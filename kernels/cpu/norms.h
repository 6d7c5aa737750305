// Norms and rotary positions of single rows, in float32. Every sum over a row has one fixed order.
#pragma once
#include <cmath>

#include "gemm.h"

namespace decode {

struct Norm {  // x / sqrt(mean(x^2) + eps) * weight (+ bias); absent where weight is null
  const float *weight, *bias;
  float eps;
  int32_t centered;  // subtract the mean first
};

struct Rotation {
  const float *cos, *sin;  // (positions, size / 2)
  int64_t begin, size;     // dimensions of a head that are rotated; size 0: none
  int32_t pairs_in;        // pairs are (2i, 2i + 1), not (i, i + size / 2)
  int32_t pairs_out;       // and are written side by side again
};

constexpr long MAX_ROTATED = 1024;

static inline float total(vf v) { return sum_lanes(v, vf{}, vf{}, vf{})[0]; }

// to = norm(from), which may be the same row.
static inline void normalise(const Norm& norm, const float* from, long n, float* to) {
  const long whole = n / LANES * LANES;
  float mean = 0, square = 0;
  if (norm.centered) {
    vf sum = {};
    for (long c = 0; c < n; c += LANES) sum += load_as_fp32(from + c, n - c);
    mean = total(sum) / n;
  }
  vf squares[2] = {};
  for (long c = 0; c < whole; c += LANES) {
    vf x = load<vf>(from + c) - mean;
    squares[c / LANES % 2] += x * x;
  }
  square = total(squares[0] + squares[1]);
  for (long c = whole; c < n; ++c) square += (from[c] - mean) * (from[c] - mean);
  const float scale = 1.0f / std::sqrt(square / n + norm.eps);
  for (long c = 0; c < n; c += LANES) {
    vf x = (load_as_fp32(from + c, n - c) - mean) * scale * load_as_fp32(norm.weight + c, n - c);
    if (norm.bias) x += load_as_fp32(norm.bias + c, n - c);
    store_fp32_as(to + c, x, n - c);
  }
}

// to += scale * from
static inline void add_scaled(const float* from, float scale, long n, float* to) {
  for (long c = 0; c < n; c += LANES)
    store_fp32_as(to + c, load_as_fp32(to + c, n - c) + scale * load_as_fp32(from + c, n - c),
                  n - c);
}

// Rotates one head to a position, in place.
static inline void rotate(const Rotation& r, long position, float* head) {
  const long half = r.size / 2;
  const float *cos = r.cos + position * half, *sin = r.sin + position * half;
  float* x = head + r.begin;
  if (!r.pairs_in) {
    for (long i = 0; i < half; i += LANES) {
      const long n = half - i;
      const vf a = load_as_fp32(x + i, n), b = load_as_fp32(x + half + i, n);
      const vf c = load_as_fp32(cos + i, n), s = load_as_fp32(sin + i, n);
      store_fp32_as(x + i, a * c - b * s, n);
      store_fp32_as(x + half + i, b * c + a * s, n);
    }
    return;
  }
  float turned[MAX_ROTATED];
  for (long i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    turned[r.pairs_out ? 2 * i : i] = a * cos[i] - b * sin[i];
    turned[r.pairs_out ? 2 * i + 1 : half + i] = b * cos[i] + a * sin[i];
  }
  memcpy(x, turned, r.size * sizeof(float));
}

// Norm (of the whole row or head by head) and rotation of a row of queries or keys.
struct Heads {
  Norm norm;
  Rotation rotation;
  int64_t count, size;
  int32_t per_head, after_rotation;  // the norm is of each head; it follows the rotation

  void turn(long position, float* row) const {
    const bool each = norm.weight && per_head;
    if (norm.weight && !per_head) normalise(norm, row, count * size, row);
    for (float *head = row, *end = row + count * size; head < end; head += size) {
      if (each && !after_rotation) normalise(norm, head, size, head);
      if (rotation.size) rotate(rotation, position, head);
      if (each && after_rotation) normalise(norm, head, size, head);
    }
  }
};

}  // namespace decode
