// `Products` of attention.h with AVX-512's bf16 products, for keys and values that are kept in bf16 or
// in codes of fewer bits: twice the numbers of float32 an instruction. All operands are rounded to
// bf16, and sums are float32, as in FlashAttention on GPUs (Dao 2023).
#pragma once
#include "attention_floats.h"

#if defined(__AVX512BF16__)

class Bf16Products {
 public:
  static constexpr int TILE = 8;

  // For each pair of D numbers those of PANEL_KEYS keys side by side; then for each pair of keys those
  // of all columns of the values, which are filled up to whole steps.
  static long unit_bytes(const Attend& a) { return unit_pairs(a) * long(sizeof(uint32_t)); }
  static void pack(const Attend& a, const Lines& k, const Lines& v, long count, char* to) {
    memset(to, 0, unit_bytes(a));
    auto* pairs = reinterpret_cast<uint32_t*>(to);
    for (long first = 0; first < count; first += LANES)
      for (long d = 0; d < a.key_size; d += 2 * LANES) {
        __m512i row[LANES];
        UNROLL for (long i = 0; i < LANES; ++i)
          row[i] = first + i < count ? rounded(part(k.at(first + i), d, a.key_size),
                                               part(k.at(first + i), d + LANES, a.key_size))
                                     : __m512i{};
        turn_over(row);
        for (long i = 0; i < LANES && d / 2 + i < key_pairs(a); ++i)
          store(pairs + (d / 2 + i) * PANEL_KEYS + first, row[i]);
      }
    pairs += key_pairs(a) * PANEL_KEYS;
    for (long t = 0; t < count; t += 2, pairs += columns(a))
      for (long c = 0; c < a.value_size; c += LANES) {
        const vf next = t + 1 < count ? part(v.at(t + 1), c, a.value_size) : vf{};
        const __m512i both = rounded(part(v.at(t), c, a.value_size), next);
        store(pairs + c, _mm512_permutexvar_epi16(load<__m512i>(SIDE_BY_SIDE), both));
      }
  }

  static long task_bytes(const Attend& a) {
    return ROWS_A_TASK * key_pairs(a) * long(sizeof(uint32_t));
  }
  Bf16Products(const Attend& a, long, const char* packed, char* memory)
      : a_(a), packed_(reinterpret_cast<const uint32_t*>(packed)),
        queries_(reinterpret_cast<uint32_t*>(memory)) {}

  // The queries of a tile lie side by side, pair by pair.
  void take(long i, const float* row) {
    uint32_t* to = queries_ + i / TILE * TILE * key_pairs(a_) + i % TILE;
    for (long d = 0; d < a_.key_size; d += 2)
      to[d / 2 * TILE] = pair(row[d], d + 1 < a_.key_size ? row[d + 1] : 0);
  }

  void scores(long i, long split, long count, Score* score) const {
    const uint32_t *panel = unit(split), *queries = queries_ + i * key_pairs(a_);
    const auto query = [&](int own, long d) { return queries[d * TILE + own]; };
    for (long t = 0; t < count; t += PANEL_KEYS, panel += unit_pairs(a_)) {
      vf sum[TILE][2] = {};
      add(query, panel, PANEL_KEYS, key_pairs(a_), sum);
      UNROLL for (int own = 0; own < TILE; ++own)
        UNROLL for (int c = 0; c < 2; ++c) store(score[own].key + t + c * LANES, sum[own][c]);
    }
  }

  void weigh(long i, long count, const Score& score) {  // zeros fill the last panel
    for (long t = 0; t < count; t += PANEL_KEYS)
      store(weights_[i] + t / 2, _mm512_cvtne2ps_pbh((__m512)load<vf>(score.key + t + LANES),
                                                     (__m512)load<vf>(score.key + t)));
  }

  template <class Join>
  void sums(long used, long split, long count, const Score*, const Join& join) const {
    for (long c = 0; c < a_.value_size; c += VALUE_STEP) {
      vf sum[TILE][2] = {};
      for (long t = 0; t < count; t += PANEL_KEYS) {
        const auto weights = [&](int own, long pair) { return weights_[own][t / 2 + pair]; };
        add(weights, unit(split + t) + key_pairs(a_) * PANEL_KEYS + c, columns(a_), PANEL_KEYS / 2,
            sum);
      }
      for (long i = 0; i < used; ++i)
        UNROLL for (int w = 0; w < 2; ++w) join(i, c + w * LANES, sum[i][w]);
    }
  }

 private:
  static_assert(PANEL_KEYS == 2 * LANES && VALUE_STEP == 2 * LANES, "two vectors of pairs");

  static long key_pairs(const Attend& a) { return (a.key_size + 1) / 2; }
  static long columns(const Attend& a) {
    return (a.value_size + VALUE_STEP - 1) / VALUE_STEP * VALUE_STEP;
  }
  static long unit_pairs(const Attend& a) {
    return key_pairs(a) * PANEL_KEYS + columns(a) * (PANEL_KEYS / 2);
  }
  const uint32_t* unit(long key) const { return packed_ + key / PANEL_KEYS * unit_pairs(a_); }

  // LANES numbers of a row from c on, zeros behind its end.
  static vf part(const float* row, long c, long size) {
    return c < size ? load_as_fp32(row + c, size - c) : vf{};
  }
  static __m512i rounded(vf low, vf high) {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  }
  // Turns a square of pairs over: number j of row i becomes number i of row j.
  static void turn_over(__m512i (&row)[LANES]) {
    alignas(64) static constexpr auto places = [] {
      struct { int32_t at[4][2][LANES]; } all{};
      for (int step = 0; step < 4; ++step)
        for (int j = 0; j < LANES; ++j) {
          const int half = 1 << step, other = j ^ half;
          all.at[step][0][j] = j & half ? LANES + other : j;
          all.at[step][1][j] = j & half ? LANES + j : other;
        }
      return all;
    }();
    UNROLL for (int step = 0; step < 4; ++step)
      UNROLL for (int i = 0; i < LANES; ++i)
        if (const int half = 1 << step; !(i & half)) {
          const __m512i a = row[i], b = row[i + half];
          row[i] = _mm512_permutex2var_epi32(a, load<__m512i>(places.at[step][0]), b);
          row[i + half] = _mm512_permutex2var_epi32(a, load<__m512i>(places.at[step][1]), b);
        }
  }
  // The first halves of a vector between its second ones.
  alignas(64) static constexpr uint16_t SIDE_BY_SIDE[2 * LANES] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  static uint32_t pair(float low, float high) {
    const __m128bh both = _mm_cvtneps_pbh(_mm_setr_ps(low, high, 0, 0));
    return load<uint32_t>(&both);
  }

  // sum[i][c] += sum over p of row(i, p) . from[p * stride + c], pairs of numbers.
  template <class Row>
  static void add(const Row& row, const uint32_t* from, long stride, long count,
                  vf (&sum)[TILE][2]) {
    for (long p = 0; p < count; ++p) {
      const auto x = load<__m512bh>(from + p * stride), y = load<__m512bh>(from + p * stride + LANES);
      UNROLL for (int i = 0; i < TILE; ++i) {
        const auto w = (__m512bh)_mm512_set1_epi32(int(row(i, p)));
        sum[i][0] = (vf)_mm512_dpbf16_ps((__m512)sum[i][0], w, x);
        sum[i][1] = (vf)_mm512_dpbf16_ps((__m512)sum[i][1], w, y);
      }
    }
  }

  const Attend& a_;
  const uint32_t* const packed_;
  uint32_t* const queries_;
  alignas(64) uint32_t weights_[TILE][KEYS_A_SPLIT / 2];
};

#endif
