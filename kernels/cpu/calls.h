// What the C interfaces share: element types, teams of threads, and scratch memory.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "oversubscription.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

enum Dtype : int32_t { FP32 = 0, BF16 = 1, FP16 = 2 };

constexpr long THREAD_WORK = 1 << 17;  // fewer products a thread do not pay for waking it

// How many of `threads` threads have enough work, and processors.
static inline int32_t team(long products, int32_t threads) {
  const long useful = 1 + products / THREAD_WORK;
  return oversubscription.threads(useful < threads ? useful : threads);
}

// Runs `body(pointer)` with the activations' own element type.
template <class Void, class Body>
static inline void with_rows(Void* rows, int32_t dtype, const Body& body) {
  constexpr bool is_const = std::is_const<Void>::value;
  if (dtype == FP32)
    body(static_cast<std::conditional_t<is_const, const float, float>*>(rows));
  else
    body(static_cast<std::conditional_t<is_const, const uint16_t, uint16_t>*>(rows));
}

// Memory that outlives a call, to avoid page faults in the next one; `trim` frees a huge one.
class Scratch {
 public:
  char* reserve(size_t bytes) {  // aligned, contents unspecified; null where there is none
    constexpr size_t page = 2 << 20;
    if (memory_ && bytes <= size_) return memory_.get();
    memory_.reset();
    size_ = (bytes ? (bytes + page - 1) / page : 1) * page;
    void* p = nullptr;
    if (posix_memalign(&p, page, size_)) p = nullptr, size_ = 0;
#if defined(__linux__)
    if (p) madvise(p, size_, MADV_HUGEPAGE);
#endif
    memory_.reset(static_cast<char*>(p));
    return memory_.get();
  }
  void trim() {
    if (size_ > size_t{128} << 20) memory_.reset(), size_ = 0;
  }

 private:
  std::unique_ptr<char, void (*)(void*)> memory_{nullptr, free};
  size_t size_ = 0;
};

inline thread_local Scratch scratch;
