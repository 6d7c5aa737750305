// AMX: tile registers of 16 rows of 64 bytes, where the CPU has them and the kernel grants them.
#pragma once
#include <cstdint>
#include <initializer_list>

#if defined(EMULATED_AMX)
#define USES_AMX
#include "amx_emulated.h"
#elif defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512VNNI__) && defined(__linux__)
#define USES_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace amx {

static bool ask() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

inline const bool ready = ask();

template <class Config>
static inline void configure(const Config& config) {
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
static inline void release() { __asm__ volatile("tilerelease"); }

// The compilers' intrinsics take literal registers only, and GCC 12's do not declare what they read.
template <int R>
static inline void load_tile(const void* from, long stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(R) : "memory");
}
template <int R>
static inline void store_tile(void* to, long stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(R) : "memory");
}
template <int R>
static inline void zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(R));
}
// SUM += A B: unsigned codes in B, signed ones in A.
template <int SUM, int A, int B>
static inline void multiply_codes() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}
template <int SUM, int A, int B>
static inline void multiply_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}

}  // namespace amx
#endif

#if defined(USES_AMX)
namespace amx {

constexpr int ROWS = 16, ROW_BYTES = 64;  // of a register

struct Shape {
  long rows, bytes;  // of a row
};

// Sets the shapes of the registers for its lifetime.
struct alignas(64) Shapes {
  static constexpr int REGISTERS = 8;
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};

  // The first registers get the shapes `some`, the others their full size.
  explicit Shapes(std::initializer_list<Shape> some = {}) {
    for (int i = 0; i < REGISTERS; ++i) rows[i] = ROWS, bytes[i] = ROW_BYTES;
    int i = 0;
    for (const Shape& own : some) rows[i] = uint8_t(own.rows), bytes[i++] = uint16_t(own.bytes);
    configure(*this);
  }
  ~Shapes() { release(); }
};

// `rounds` products, for limits.cpp, of numbers as they come: of zeros the processor makes a quarter more.
static inline void multiply_only(long rounds) {
  alignas(64) uint8_t numbers[2][ROWS * ROW_BYTES];
  uint32_t draw = 1;
  for (auto& own : numbers)
    for (uint8_t& number : own) number = uint8_t((draw = draw * 1664525 + 1013904223) >> 24);
  const Shapes shapes;
  load_tile<2>(numbers[0], ROW_BYTES), load_tile<3>(numbers[1], ROW_BYTES);
  for (long round = 0; round < rounds; round += 2) multiply_codes<0, 2, 3>(), multiply_codes<1, 2, 3>();
}

}  // namespace amx
#else
namespace amx {
constexpr bool ready = false;
constexpr int ROWS = 0, ROW_BYTES = 0;
static inline void multiply_only(long) {}
}  // namespace amx
#endif
