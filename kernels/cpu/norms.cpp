// Norms, rotary positions and choices of a prompt's rows, by the functions of a decode step (norms.h,
// choice.h), called through ctypes (which releases the GIL).
#include "choice.h"
#include "grouped.h"
#include "norms.h"

#include <cmath>

namespace {

constexpr long TASK_FLOATS = 1 << 14;

// Runs task(row) for all rows of `width` floats.
template <class Task>
void each_row(stages::Name stage, long rows, long width, int threads, const Task& task) {
  const long some = width < TASK_FLOATS ? TASK_FLOATS / width : 1;
  Turns turns{stage};
#pragma omp parallel num_threads(team(rows * width, threads))
  turns.run((rows + some - 1) / some, [&](long block) {
    const long end = (block + 1) * some < rows ? (block + 1) * some : rows;
    for (long row = block * some; row < end; ++row) task(row);
  });
}

// The id of the largest probability[i] / variate[i], the first of equal ones, where the exponential
// variate of a uniform number u is -log(1 - u), which is at least u: so few logarithms are taken.
long drawn(const float* probability, const double* uniform, long n) {
  constexpr long SOME = 64;
  constexpr float ROUNDING = 1 + 1e-6f;  // more than that of the numbers compared
  float best = -1;
  long found = 0;
  for (long begin = 0; begin < n; begin += SOME) {
    const long end = begin + SOME < n ? begin + SOME : n;
    int hits = 0;
    for (long i = begin; i < end; ++i) hits |= probability[i] * ROUNDING > best * float(uniform[i]);
    for (long i = begin; hits && i < end; ++i) {
      if (!(probability[i] * ROUNDING > best * float(uniform[i]))) continue;
      const float ratio = probability[i] / float(-std::log1p(-uniform[i]));
      if (ratio > best) best = ratio, found = i;
    }
  }
  return found;
}

}  // namespace

extern "C" {

// to (rows, width) = the norm of each row.
void moe_norm(const decode::Norm* norm, const float* from, int64_t rows, int64_t width, float* to,
              int32_t threads) {
  each_row(stages::NORMS, rows, width, threads,
           [&](long row) { normalise(*norm, from + row * width, width, to + row * width); });
}

// Norms and rotates rows (count, heads, size), each to its own position, in place.
void moe_turn(const decode::Heads* heads, float* rows, const int64_t* position, int64_t count,
              int32_t threads) {
  const long width = heads->count * heads->size;
  each_row(stages::POSITIONS, count, width, threads, [&](long row) { heads->turn(position[row], rows + row * width); });
}

// values and ids (rows, k) = the largest of each row of n, n <= 1024, as of `largest_of`.
void moe_top_k(const float* from, int64_t rows, int64_t n, int64_t k, float* values, int64_t* ids,
               int32_t threads) {
  each_row(stages::CHOICE, rows, n * k, threads, [&](long row) {
    float left[1024];
    memcpy(left, from + row * n, n * sizeof(float));
    decode::largest_of(left, n, k, values + row * k, ids + row * k);
  });
}

// ids (rows) = one of each row of n, with its probability, by uniform numbers (rows, n) in [0, 1).
void moe_draw(const float* probabilities, const double* uniform, int64_t rows, int64_t n, int64_t* ids,
              int32_t threads) {
  each_row(stages::CHOICE, rows, n, threads,
           [&](long row) { ids[row] = drawn(probabilities + row * n, uniform + row * n, n); });
}
}
