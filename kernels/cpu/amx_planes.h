// Tiles of quantised rows times blocks of unpacked codes by AMX. The sums of a group are integers, and
// the float arithmetic after them is that of plane_tiles.h in the same order, so the bits are the same.
#pragma once
#include "amx.h"
#include "plane_tiles.h"

namespace amx {

#if defined(USES_AMX)
constexpr long MOST_GROUPS = 64;  // their scales stay in L1 while all blocks use them
static_assert(BLOCK_ROWS == LANES && BLOCK_ROWS == ROWS, "sums of a block fill a register");

enum Register { SUMS, OTHER_SUMS, ACTIVATIONS, CODES };

// A group's scales of the rows, and the zero points to subtract from their sums.
struct alignas(64) Scales {
  float scale[ROWS];
  int32_t zero[ROWS];

  void take(const QuantizedRows& x, long count, long group) {
    for (long i = 0; i < ROWS; ++i) {  // repeats the last row beyond the count
      const QuantizedRows::Scale own = x.scale(group, i < count ? i : count - 1);
      scale[i] = own.scale, zero[i] = (ZERO_CODE - BELOW) * own.sum;
    }
  }

  static void add(const Scales* x, vf weights, const int32_t (*sums)[BLOCK_ROWS], vf* total) {
    // Keeps x in one register: an address of two registers would need an instruction of its own.
    __asm__("" : "+r"(x));
    UNROLL for (int i = 0; i < ROWS; ++i) {
      const vi all = load<vi>(sums[i]) - x->zero[i];
      total[i] += (weights * x->scale[i]) * __builtin_convertvector(all, vf);
    }
  }
};

// Products of up to ROWS rows with blocks, group by group, alternating between two registers: one
// accumulates while the sums of the other are scaled.
class Products {
 public:
  Products(long count, const QuantizedRows& x, const Unpacked& w) : count_(count), x_(x), w_(w) {}

  // out[i * stride + n] = x[i] . w[n] for all rows n of the blocks.
  void run(long blocks, float* out, long stride) {
    const Shapes shapes{{count_, ROW_BYTES}, {count_, ROW_BYTES}, {count_, x_.group_size},
                        {x_.group_size / 4, ROW_BYTES}};
    for (first_ = 0; first_ < x_.groups; first_ += MOST_GROUPS) {
      end_ = first_ + MOST_GROUPS < x_.groups ? first_ + MOST_GROUPS : x_.groups;
      for (long group = first_; group < end_; ++group)
        scales_[group - first_].take(x_, count_, group);
      for (long block = 0; block < blocks; ++block) add(block, out + block * BLOCK_ROWS, stride);
    }
  }

 private:
  // out (count, BLOCK_ROWS) (+)= the sum over a block's groups from first_ to end_.
  void add(long block, float* out, long stride) {
    const uint8_t* codes = w_.codes + block * w_.chunks * CHUNK * BLOCK_ROWS;
    vf total[ROWS];
    UNROLL for (int i = 0; i < ROWS; ++i)
      total[i] = first_ && i < count_ ? load<vf>(out + i * stride) : vf{};
    multiply<SUMS>(codes, first_);
    for (long group = first_; group < end_; group += 2) {
      pass<SUMS, OTHER_SUMS>(codes, block, group, total);
      if (group + 1 < end_) pass<OTHER_SUMS, SUMS>(codes, block, group + 1, total);
    }
    UNROLL for (int i = 0; i < ROWS; ++i)
      if (i < count_) store(out + i * stride, total[i]);
  }

  template <int FROM, int NEXT>
  void pass(const uint8_t* codes, long block, long group, vf* total) {
    store_tile<FROM>(sums_[FROM], ROW_BYTES);
    if (group + 1 < end_) multiply<NEXT>(codes, group + 1);
    const vf weights = w_.load_scales(int(block), group);
    Scales::add(scales_ + group - first_, weights, sums_[FROM], total);
  }

  template <int TO>
  void multiply(const uint8_t* codes, long group) const {
    load_tile<ACTIVATIONS>(x_.codes(group), x_.stride);
    load_tile<CODES>(codes + group * x_.group_size * BLOCK_ROWS, ROW_BYTES);
    zero<TO>();
    multiply_codes<TO, ACTIVATIONS, CODES>();
  }

  const long count_;
  const QuantizedRows x_;
  const Unpacked w_;
  long first_ = 0, end_ = 0;
  Scales scales_[MOST_GROUPS];
  alignas(64) int32_t sums_[2][ROWS][BLOCK_ROWS] = {};  // of the registers of sums
};

// out[i * stride + n] = x[i] . w[n] for `count` <= ROWS rows and the rows n of some blocks.
__attribute__((noinline)) static void multiply_blocks(long count, const QuantizedRows& x,
                                                      const Unpacked& w, long blocks, float* out,
                                                      long stride) {
  Products(count, x, w).run(blocks, out, stride);
}
#else
static inline void multiply_blocks(long, const QuantizedRows&, const Unpacked&, long, float*, long) {}
#endif

}  // namespace amx
