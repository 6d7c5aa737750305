// `Products` of attention.h with AMX's bf16 tiles. Where keys and values are kept in bf16 or fewer bits,
// all operands are rounded to bf16, as in attention_bf16.h. Otherwise a float is split into three bf16
// numbers of 8 bits of its 24 each. Of the nine products of two such sums, six are computed and added in
// float32; the other three are smaller than float32's rounding error.
#pragma once
#include "amx.h"
#include "attention_floats.h"

#if defined(USES_AMX)

template <int PARTS>  // bf16 numbers that add up to an operand: 1 or 3
class Tiles {
 public:
  static_assert(PARTS == 1 || PARTS == 3, "what multiply() adds up");
  static constexpr int TILE = 2 * amx::ROWS;

  // For each STEP of D the keys as columns, then for each SIDE of V the values as rows.
  static long unit_bytes(const Attend& a) { return unit_operands(a) * long(sizeof(Operand)); }
  static void pack(const Attend& a, const Lines& k, const Lines& v, long count, char* to) {
    auto* operand = reinterpret_cast<Operand*>(to);
    memset(to, 0, unit_bytes(a));
    for (long d = 0; d < a.key_size; d += STEP, ++operand)
      for (long t = 0; t < count; ++t) put_column(k.at(t) + d, a.key_size - d, t, *operand);
    for (long c = 0; c < a.value_size; c += LANES) {
      const auto row = [&](long t) {
        return t < count ? load_as_fp32(v.at(t) + c, a.value_size - c) : vf{};
      };
      for (int i = 0; i < LANES; ++i)
        put_pairs(row(first_of(i)), row(second_of(i)), c / LANES % 2, i, *operand);
      operand += c / LANES % 2;
    }
  }

  static long task_bytes(const Attend& a) {
    return ROWS_A_TASK / TILE * steps(a) * long(sizeof(Operand));
  }
  Tiles(const Attend& a, long, const char* packed, char* memory)
      : a_(a), packed_(reinterpret_cast<const Operand*>(packed)),
        queries_(reinterpret_cast<Operand*>(memory)) {}

  void take(long i, const float* row) {
    for (long step = 0; step < steps(a_); ++step)
      put_row(row + step * STEP, a_.key_size - step * STEP, i % TILE,
              queries_[i / TILE * steps(a_) + step]);
  }

  void scores(long i, long split, long count, Score* score) const {
    for (long t = 0; t < count; t += PANEL_KEYS)
      multiply(steps(a_), queries_ + i / TILE * steps(a_), unit(split + t), 1, score->key + t,
               sizeof(Score));
  }

  void weigh(long i, long count, const Score& score) {
    for (long t = 0; t < count; t += STEP) put_row(score.key + t, STEP, i, weights_[t / STEP]);
  }

  template <class Join>
  void sums(long used, long split, long count, const Score*, const Join& join) const {
    for (long c = 0; c < a_.value_size; c += SIDE) {
      alignas(64) float sum[TILE][SIDE];
      multiply((count + STEP - 1) / STEP, weights_, unit(split) + steps(a_) + c / SIDE,
               unit_operands(a_), sum[0], sizeof sum[0]);
      for (long i = 0; i < used; ++i)
        UNROLL for (int w = 0; w < SIDE; w += LANES) join(i, c + w, load<vf>(sum[i] + w));
    }
  }

 private:
  static constexpr int STEP = 2 * LANES, SIDE = 2 * LANES;
  static_assert(LANES == amx::ROWS && STEP == PANEL_KEYS && SIDE <= VALUE_STEP, "whole registers");

  // STEP numbers of TILE rows or SIDE columns, part by part, in pairs: neighbours where there is one
  // part, numbers i and i + LANES where there are three. Rows lie one after the other; columns have the
  // same pair side by side.
  static constexpr long first_of(int pair) { return PARTS == 1 ? 2 * pair : pair; }
  static constexpr long second_of(int pair) { return PARTS == 1 ? 2 * pair + 1 : pair + LANES; }
  struct alignas(64) Operand {
    uint16_t number[PARTS][2][amx::ROWS][STEP];
  };

  static long steps(const Attend& a) { return (a.key_size + STEP - 1) / STEP; }
  static long unit_operands(const Attend& a) {
    return steps(a) + (a.value_size + SIDE - 1) / SIDE;
  }
  const Operand* unit(long key) const { return packed_ + key / PANEL_KEYS * unit_operands(a_); }

  // The leading bf16 part of x in the upper halves, rounded to nearest; x keeps the rest.
  static vu next_part(vf& x) {
    const vu part = (bits<vu>(x) + 0x8000) & 0xffff0000;
    x -= bits<vf>(part);
    return part;
  }

  // The numbers of `low`, then those of `high`, rounded to nearest.
  static vu halves(vf low, vf high) {
#if defined(__AVX512BF16__)
    return (vu)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    const vh both[2] = {to_bf16(low), to_bf16(high)};
    return load<vu>(both);
#endif
  }

  // The pairs of the first STEP of `n` numbers, with zeros after them.
  static void pairs(const float* from, long n, vu (&pair)[PARTS]) {
    vf low = n > 0 ? load_as_fp32(from, n) : vf{};
    vf high = n > LANES ? load_as_fp32(from + LANES, n - LANES) : vf{};
    if constexpr (PARTS == 1) pair[0] = halves(low, high);
    else UNROLL for (int p = 0; p < PARTS; ++p) pair[p] = next_part(low) >> 16 | next_part(high);
  }

  static void put_row(const float* from, long n, long row, Operand& to) {
    vu pair[PARTS];
    pairs(from, n, pair);
    UNROLL for (int p = 0; p < PARTS; ++p)
      store(to.number[p][row / amx::ROWS][row % amx::ROWS], pair[p]);
  }

  static void put_column(const float* from, long n, long column, Operand& to) {
    vu pair[PARTS];
    pairs(from, n, pair);
    for (int p = 0; p < PARTS; ++p)
      for (int i = 0; i < LANES; ++i)
        store(to.number[p][column / LANES][i] + column % LANES * 2, uint32_t(pair[p][i]));
  }

  // The pairs `i` of half of the columns, whose first and second numbers are given.
  static void put_pairs(vf first, vf second, long half, int i, Operand& to) {
    vu pair[PARTS];
    const auto wide = [](vf x) { return __builtin_convertvector(to_bf16(x), vu); };
    if constexpr (PARTS == 1) pair[0] = wide(first) | wide(second) << 16;
    else UNROLL for (int p = 0; p < PARTS; ++p) pair[p] = next_part(first) >> 16 | next_part(second);
    UNROLL for (int p = 0; p < PARTS; ++p) store(to.number[p][half][i], pair[p]);
  }

  // out (TILE, SIDE) = the sum of `steps` products; the smallest parts are added first.
  __attribute__((noinline)) static void multiply(long steps, const Operand* left,
                                                 const Operand* right, long right_stride,
                                                 float* out, long stride) {
    amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
    for (; steps; --steps, ++left, right += right_stride) {
      if constexpr (PARTS == 3) {
        load_left(*left, 0), load_right(*right, 2), add();
        load_right(*right, 1), add();
        load_left(*left, 1), add();
        load_right(*right, 0), add();
        load_left(*left, 2), add();
        load_left(*left, 0), add();
      } else {
        load_left(*left, 0), load_right(*right, 0), add();
      }
    }
    amx::store_tile<0>(out, stride), amx::store_tile<1>(out + LANES, stride);
    out += amx::ROWS * stride / long(sizeof(float));
    amx::store_tile<2>(out, stride), amx::store_tile<3>(out + LANES, stride);
  }

  // Registers 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns.
  static void load_left(const Operand& from, int part) {
    amx::load_tile<4>(from.number[part][0], amx::ROW_BYTES);
    amx::load_tile<5>(from.number[part][1], amx::ROW_BYTES);
  }
  static void load_right(const Operand& from, int part) {
    amx::load_tile<6>(from.number[part][0], amx::ROW_BYTES);
    amx::load_tile<7>(from.number[part][1], amx::ROW_BYTES);
  }
  static void add() {
    amx::multiply_bf16<0, 4, 6>(), amx::multiply_bf16<1, 4, 7>();
    amx::multiply_bf16<2, 5, 6>(), amx::multiply_bf16<3, 5, 7>();
  }

  const amx::Shapes shapes_;
  const Attend& a_;
  const Operand* const packed_;
  Operand* const queries_;
  Operand weights_[KEYS_A_SPLIT / STEP];
};

#else
template <int PARTS>
using Tiles = Floats;
#endif
