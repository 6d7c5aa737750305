// Stages of a parallel region: `Turns` hands one stage's tasks to the threads, and measures it where
// somebody wants to know (turns.cpp, kernels/cpu/stages.py).
#pragma once
#include <omp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace stages {

// What a stage computes; `Stage` of kernels/cpu/stages.py has the same order.
enum Name : int32_t {
  NORMS, PROJECTIONS, POSITIONS, ATTENTION, OUTPUT, ROUTER, CHOICE, SHARED, EXPERT_INPUT,
  EXPERT_FIRST, EXPERT_SECOND, EXPERT_SUM, RECURRENCE, INDEXER, ROWS, LINEAR, HEAD,
};

// Sums over the runs of a stage and its threads.
struct Times {
  std::atomic<int64_t> runs, busy_ns, waiting_ns, bytes;
};

inline std::atomic<Times*> times{nullptr};  // of each name; null: nobody measures

}  // namespace stages

// Hands one stage's tasks to the threads. A stage ends when its tasks are done, not when all threads
// arrive: a thread that the system has not scheduled yet delays nobody.
class Turns {
 public:
  explicit Turns(stages::Name stage = stages::ROWS) : stage_(stage) {}

  // Notes the bytes of weights that the stage reads, if somebody measures.
  template <class Bytes>
  void reads(const Bytes& bytes) {
    if (stages::Times* times = measured(); times && omp_get_thread_num() == 0)
      times->bytes += bytes();
  }

  template <class Task>
  void run(long count, const Task& task) {
    measure(count, [&] {
      for (long i; (i = take()) < count;) {
        task(i);
        done.fetch_add(1, std::memory_order_release);
      }
    });
  }

  // The same with task(i, next), where `next` is the thread's next task; >= count: none.
  template <class Task>
  void run_ahead(long count, const Task& task) {
    measure(count, [&] {
      for (long i = take(), next; i < count; i = next) {
        next = take();
        task(i, next);
        done.fetch_add(1, std::memory_order_release);
      }
    });
  }

 private:
  template <class Work>
  void measure(long count, const Work& work) {
    stages::Times* times = measured();
    if (!times) return work(), wait(count);
    const auto begun = now();
    work();
    const auto worked = now();
    wait(count);
    times->busy_ns += worked - begun;
    times->waiting_ns += now() - worked;
    times->runs += omp_get_thread_num() == 0;
  }

  stages::Times* measured() const {
    stages::Times* times = stages::times.load(std::memory_order_relaxed);
    return times ? times + stage_ : nullptr;
  }

  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  long take() { return taken.fetch_add(1, std::memory_order_relaxed); }
  void wait(long count) const {
    for (int spins = 0; done.load(std::memory_order_acquire) < count; ++spins)
      if (spins > 1 << 14) std::this_thread::yield();
  }

  std::atomic<long> taken{0}, done{0};
  const stages::Name stage_;
};
