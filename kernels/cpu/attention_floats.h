// `Products` of attention.h in float32, for any CPU.
#pragma once
#include "attention.h"

class Floats {
 public:
#if defined(__AVX512F__) || defined(__aarch64__)
  static constexpr int TILE = 8;  // rows whose sums the registers hold beside the operands
#else
  static constexpr int TILE = 4;
#endif

  // Keys lie side by side: number d of PANEL_KEYS keys, for each d of D.
  static long unit_bytes(const Attend& a) { return PANEL_KEYS * a.key_size * long(sizeof(float)); }
  static void pack(const Attend& a, long kv_head, long first, char* to) {
    const float* from = a.k + kv_head * a.k_head + first * a.k_row;
    for (long t = 0; t < PANEL_KEYS; ++t)
      for (long d = 0; d < a.key_size; ++d)
        reinterpret_cast<float*>(to)[d * PANEL_KEYS + t] =
            first + t < a.keys ? from[t * a.k_row + d] : 0;
  }

  // The queries of a tile lie side by side: a pointer for each would need too many registers.
  static long task_bytes(const Attend& a) {
    return ROWS_A_TASK * a.key_size * long(sizeof(float));
  }
  Floats(const Attend& a, long kv_head, const char* packed, char* memory)
      : a_(a), panels_(reinterpret_cast<const float*>(packed)), v_(a.v + kv_head * a.v_head),
        queries_(reinterpret_cast<float*>(memory)) {}

  void take(long i, const float* row) {
    float* to = queries_ + i / TILE * TILE * a_.key_size + i % TILE;
    for (long d = 0; d < a_.key_size; ++d) to[d * TILE] = row[d];
  }

  void scores(long i, long split, long count, Score* score) const {
    const float *panel = panels_ + split * a_.key_size, *queries = queries_ + i * a_.key_size;
    const auto query = [&](int own, long d) { return queries[d * TILE + own]; };
    for (long t = 0; t < count; t += PANEL_KEYS, panel += PANEL_KEYS * a_.key_size)
      for (long key = 0; key < PANEL_KEYS; key += 2 * LANES) {
        vf sum[TILE][2];
        product(query, panel + key, PANEL_KEYS, a_.key_size, 2 * LANES, sum);
        UNROLL for (int own = 0; own < TILE; ++own)
          UNROLL for (int c = 0; c < 2; ++c)
            store(score[own].key + t + key + c * LANES, sum[own][c]);
      }
  }

  void weigh(long, long, const Score&) const {}

  template <class Join>
  void sums(long used, long split, long count, const Score* score, const Join& join) const {
    const auto weights = [&](int own, long t) { return score[own].key[t]; };
    const float* v = v_ + split * a_.v_row;
    const auto join_all = [&](auto& sum, long c) {
      for (long i = 0; i < used; ++i)
        UNROLL for (int w = 0; w < int(sizeof sum[0] / sizeof(vf)); ++w)
          join(i, c + w * LANES, sum[i][w]);
    };
    long c = 0;
    for (long n; (n = a_.value_size - c) > 0; c += n < 2 * LANES ? LANES : 2 * LANES) {
      if (n >= 2 * LANES) {
        vf sum[TILE][2];
        product(weights, v + c, a_.v_row, count, n, sum);
        join_all(sum, c);
      } else {
        vf sum[TILE][1];
        n < LANES ? product<1, true>(weights, v + c, a_.v_row, count, n, sum)
                  : product(weights, v + c, a_.v_row, count, n, sum);
        join_all(sum, c);
      }
    }
  }

 private:
  // sum[i][c] = sum over t of row(i, t) * from[t * stride + c], `PART` of the columns being there.
  template <int COLS, bool PART = false, class Row>
  static void product(const Row& row, const float* from, long stride, long count, long columns,
                      vf (&sum)[TILE][COLS]) {
    UNROLL for (int i = 0; i < TILE; ++i) UNROLL for (int c = 0; c < COLS; ++c) sum[i][c] = vf{};
    for (long t = 0; t < count; ++t) {
      vf x[COLS];
      UNROLL for (int c = 0; c < COLS; ++c)
        x[c] = PART ? load_part<vf>(from + t * stride, columns)
                    : load<vf>(from + t * stride + c * LANES);
      UNROLL for (int i = 0; i < TILE; ++i)
        UNROLL for (int c = 0; c < COLS; ++c) sum[i][c] += row(i, t) * x[c];
    }
  }

  const Attend& a_;
  const float *const panels_, *const v_;
  float* const queries_;
};
