// Tiles of quantised rows times blocks of unpacked codes by AMX, where the CPU has it and the system
// lends its registers. The sums of a group are whole numbers, and what follows them is the arithmetic
// of plane_tiles.h in its order, so the bits are those of plane_tiles.h.
#pragma once
#include "plane_tiles.h"

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

namespace amx {

constexpr int ROWS = 16, MOST_COLUMNS = 64;  // of a register
constexpr long MOST_GROUPS = 64;  // whose scales lie in L1 while the blocks pass
static_assert(BLOCK_ROWS == LANES && BLOCK_ROWS == ROWS, "sums of a block fill a register");

static bool ask() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

inline const bool ready = ask();

enum Register { SUMS, OTHER_SUMS, ACTIVATIONS, CODES };

// The registers' shapes, while it lives.
struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};

  Shapes(long count, long group_size)
      : bytes{BLOCK_ROWS * 4, BLOCK_ROWS * 4, uint16_t(group_size), BLOCK_ROWS * 4},
        rows{uint8_t(count), uint8_t(count), uint8_t(count), uint8_t(group_size / 4)} {
    __asm__ volatile("ldtilecfg %0" : : "m"(*this));
  }
  ~Shapes() { __asm__ volatile("tilerelease"); }
};

// Compilers' own intrinsics take literal registers only, and GCC 12's do not say what they read.
template <Register R>
static inline void load_tile(const void* from, long stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(R) : "memory");
}
template <Register TO>
static inline void multiply_tiles() {
  __asm__ volatile("tilezero %%tmm%c0\n\ttdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0"
                   : : "i"(TO), "i"(ACTIVATIONS), "i"(CODES));
}
template <Register R>
static inline void store_tile(int32_t (*to)[BLOCK_ROWS]) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                   : : "r"(to), "r"(BLOCK_ROWS * 4L), "i"(R) : "memory");
}

// Of a group: the rows' scales, and what their sums are to be lessened by.
struct alignas(64) Scales {
  float scale[ROWS];
  int32_t zero[ROWS];

  void take(const QuantizedRows& x, long count, long group) {
    for (long i = 0; i < ROWS; ++i) {  // what is not there is the last one again
      const QuantizedRows::Scale own = x.scale(group, i < count ? i : count - 1);
      scale[i] = own.scale, zero[i] = Unpacked::ZERO * own.sum;
    }
  }

  static void add(const Scales* x, vf weights, const int32_t (*sums)[BLOCK_ROWS], vf* total) {
    // In one register: an operand whose address is a sum of two is no longer part of its instruction.
    __asm__("" : "+r"(x));
    UNROLL for (int i = 0; i < ROWS; ++i) {
      const vi all = load<vi>(sums[i]) - x->zero[i];
      total[i] += (weights * x->scale[i]) * __builtin_convertvector(all, vf);
    }
  }
};

// Products of up to ROWS rows with blocks, group by group in two registers in turn: the sums of one
// are made while those of the other are scaled.
class Products {
 public:
  Products(long count, const QuantizedRows& x, const Unpacked& w) : count_(count), x_(x), w_(w) {}

  // out[i * stride + n] = x[i] . w[n] for all rows n of the blocks.
  void run(long blocks, float* out, long stride) {
    const Shapes shapes(count_, x_.group_size);
    for (first_ = 0; first_ < x_.groups; first_ += MOST_GROUPS) {
      end_ = first_ + MOST_GROUPS < x_.groups ? first_ + MOST_GROUPS : x_.groups;
      for (long group = first_; group < end_; ++group)
        scales_[group - first_].take(x_, count_, group);
      for (long block = 0; block < blocks; ++block) add(block, out + block * BLOCK_ROWS, stride);
    }
  }

 private:
  // out (count, BLOCK_ROWS) (+)= what a block's groups from first_ to end_ come to.
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

  template <Register FROM, Register NEXT>
  void pass(const uint8_t* codes, long block, long group, vf* total) {
    store_tile<FROM>(sums_[FROM]);
    if (group + 1 < end_) multiply<NEXT>(codes, group + 1);
    const vf weights = w_.load_scales(int(block), group);
    Scales::add(scales_ + group - first_, weights, sums_[FROM], total);
  }

  template <Register TO>
  void multiply(const uint8_t* codes, long group) const {
    load_tile<ACTIVATIONS>(x_.codes(group), x_.stride);
    load_tile<CODES>(codes + group * x_.group_size * BLOCK_ROWS, BLOCK_ROWS * 4);
    multiply_tiles<TO>();
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

// As many products as the registers make of what they hold.
static inline void multiply_only(long rounds) {
  const Shapes shapes(ROWS, MOST_COLUMNS);
  for (long round = 0; round < rounds; round += 2) multiply_tiles<SUMS>(), multiply_tiles<OTHER_SUMS>();
}

}  // namespace amx
#else
namespace amx {
constexpr bool ready = false;
constexpr int ROWS = TILE_ROWS, MOST_COLUMNS = 0;
static inline void multiply_blocks(long, const QuantizedRows&, const Unpacked&, long, float*, long) {}
static inline void multiply_only(long) {}
}  // namespace amx
#endif
