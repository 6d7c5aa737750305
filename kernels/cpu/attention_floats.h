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

  // Keys lie side by side: number d of PANEL_KEYS keys, for each d of D. Values in blocks follow them,
  // row by row; others are read where they are.
  static long unit_floats(const Attend& a) {
    return PANEL_KEYS * (a.key_size + (a.v_table ? a.value_size : 0));
  }
  static long unit_bytes(const Attend& a) { return unit_floats(a) * long(sizeof(float)); }
  static void pack(const Attend& a, const Lines& k, const Lines& v, long count, char* to) {
    auto* panel = reinterpret_cast<float*>(to);
    for (long t = 0; t < PANEL_KEYS; ++t)
      for (long d = 0; d < a.key_size; ++d)
        panel[d * PANEL_KEYS + t] = t < count ? k.at(t)[d] : 0;
    if (!a.v_table) return;
    panel += PANEL_KEYS * a.key_size;
    for (long t = 0; t < count; ++t)
      memcpy(panel + t * a.value_size, v.at(t), a.value_size * sizeof(float));
  }

  // The queries of a tile lie side by side: a pointer for each would need too many registers.
  static long task_bytes(const Attend& a) {
    return ROWS_A_TASK * a.key_size * long(sizeof(float));
  }
  Floats(const Attend& a, long kv_head, const char* packed, char* memory)
      : a_(a), panels_(reinterpret_cast<const float*>(packed)),
        v_(a.v_table ? nullptr : a.v + kv_head * a.v_head),
        queries_(reinterpret_cast<float*>(memory)) {}

  void take(long i, const float* row) {
    float* to = queries_ + i / TILE * TILE * a_.key_size + i % TILE;
    for (long d = 0; d < a_.key_size; ++d) to[d * TILE] = row[d];
  }

  void scores(long i, long split, long count, Score* score) const {
    const float *panel = unit(split), *queries = queries_ + i * a_.key_size;
    const auto query = [&](int own, long d) { return queries[d * TILE + own]; };
    for (long t = 0; t < count; t += PANEL_KEYS, panel += unit_floats(a_))
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
    const auto join_all = [&](auto& sum, long c) {
      for (long i = 0; i < used; ++i)
        UNROLL for (int w = 0; w < int(sizeof sum[0] / sizeof(vf)); ++w)
          join(i, c + w * LANES, sum[i][w]);
    };
    long c = 0;
    for (long n; (n = a_.value_size - c) > 0; c += n < 2 * LANES ? LANES : 2 * LANES) {
      if (n >= 2 * LANES) {
        vf sum[TILE][2];
        weighted(weights, split, c, count, n, sum);
        join_all(sum, c);
      } else {
        vf sum[TILE][1];
        n < LANES ? weighted<1, true>(weights, split, c, count, n, sum)
                  : weighted(weights, split, c, count, n, sum);
        join_all(sum, c);
      }
    }
  }

 private:
  const float* unit(long key) const { return panels_ + key / PANEL_KEYS * unit_floats(a_); }

  // sum[i][c] = sum over t of row(i, t) * from[t * stride + c], `PART` of the columns being there.
  template <int COLS, bool PART = false, class Row>
  static void product(const Row& row, const float* from, long stride, long count, long columns,
                      vf (&sum)[TILE][COLS]) {
    UNROLL for (int i = 0; i < TILE; ++i) UNROLL for (int c = 0; c < COLS; ++c) sum[i][c] = vf{};
    add<COLS, PART>(row, 0, from, stride, count, columns, sum);
  }

  // The same of values from column c on, and of `count` keys of a split.
  template <int COLS, bool PART = false, class Row>
  void weighted(const Row& row, long split, long c, long count, long columns,
                vf (&sum)[TILE][COLS]) const {
    if (v_) return product<COLS, PART>(row, v_ + split * a_.v_row + c, a_.v_row, count, columns, sum);
    UNROLL for (int i = 0; i < TILE; ++i) UNROLL for (int w = 0; w < COLS; ++w) sum[i][w] = vf{};
    for (long t = 0; t < count; t += PANEL_KEYS)
      add<COLS, PART>(row, t, unit(split + t) + PANEL_KEYS * a_.key_size + c, a_.value_size,
                      count - t < PANEL_KEYS ? count - t : PANEL_KEYS, columns, sum);
  }

  // sum[i][c] += sum over t of row(i, first + t) * from[t * stride + c]
  template <int COLS, bool PART, class Row>
  static void add(const Row& row, long first, const float* from, long stride, long count,
                  long columns, vf (&sum)[TILE][COLS]) {
    for (long t = 0; t < count; ++t) {
      vf x[COLS];
      UNROLL for (int c = 0; c < COLS; ++c)
        x[c] = PART ? load_part<vf>(from + t * stride, columns)
                    : load<vf>(from + t * stride + c * LANES);
      UNROLL for (int i = 0; i < TILE; ++i)
        UNROLL for (int c = 0; c < COLS; ++c) sum[i][c] += row(i, first + t) * x[c];
    }
  }

  const Attend& a_;
  const float *const panels_, *const v_;
  float* const queries_;
};
