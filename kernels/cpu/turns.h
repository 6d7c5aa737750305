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

// Hands one stage's tasks to the threads: to each a run of neighbours, so that it reads on through
// memory and counts on a cache line of its own, and then what others have left. A stage ends when its
// tasks are done, not when all threads arrive: a thread that the system has not scheduled yet delays
// nobody. Threads count what they have done in each share, and shares what is left to do: waiting
// threads watch a line that is written once a share, not once a thread.
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
    take_part(count, [&](Claim& claim) {
      for (Place at; (at = claim.take()).task < count; claim.finish(at)) task(at.task);
    });
  }

  // The same with task(i, next), where `next` is the thread's next task; >= count: none.
  template <class Task>
  void run_ahead(long count, const Task& task) {
    take_part(count, [&](Claim& claim) {
      for (Place at = claim.take(), next; at.task < count; at = next) {
        next = claim.take();
        task(at.task, next.task);
        claim.finish(at);
      }
    });
  }

 private:
  static constexpr int MOST_SHARES = 8;  // of more threads some begin in the same one

  struct alignas(64) Share {
    std::atomic<long> taken{0}, done{0};
  };

  struct Place {
    long task, share;
  };

  // What a thread takes: the tasks of its share, then those of the others.
  struct Claim {
    Turns* turns;  // null: the thread is alone, and counts by itself
    long count, shares, share, left;  // left: shares, this one included
    Place done{0, 0};                 // how many tasks of a share, not yet counted there
    long next = 0;

    long begin(long of) const { return count * of / shares; }
    long size(long of) const { return begin(of + 1) - begin(of); }

    Place take() {
      if (!turns) return {next < count ? next++ : count, 0};
      for (; left; --left, share = share + 1 < shares ? share + 1 : 0) {
        std::atomic<long>& taken = turns->share_[share].taken;
        if (taken.load(std::memory_order_relaxed) >= size(share)) continue;
        const long i = taken.fetch_add(1, std::memory_order_relaxed);
        if (i < size(share)) return {begin(share) + i, share};
      }
      return {count, 0};
    }

    void finish(const Place& at) {
      if (at.share != done.share) note();
      ++done.task, done.share = at.share;
    }

    void note() {
      const auto [tasks, of] = done;
      done.task = 0;
      if (!turns || !tasks) return;
      const long before = turns->share_[of].done.fetch_add(tasks, std::memory_order_acq_rel);
      if (before + tasks == size(of)) turns->done_.fetch_add(size(of), std::memory_order_release);
    }
  };

  // Runs work(claim) in a thread of the region, and waits for the others' tasks.
  template <class Work>
  void take_part(long count, const Work& work) {
    const long threads = omp_get_num_threads();
    const long shares = threads < MOST_SHARES ? threads : MOST_SHARES;
    const bool alone = threads == 1;
    Claim claim{alone ? nullptr : this, count, shares, omp_get_thread_num() % shares, shares};
    stages::Times* times = measured();
    const auto begun = times ? now() : 0;
    work(claim);
    claim.note();
    const auto worked = times ? now() : 0;
    if (!alone) wait(count);
    if (!times) return;
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

  void wait(long count) const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins)
      if (spins > 1 << 14) std::this_thread::yield();
  }

  Share share_[MOST_SHARES];
  alignas(64) std::atomic<long> done_{0};  // tasks of whole shares
  const stages::Name stage_;
};
