// How many threads a parallel region may have while other processes want the processors, too.
//
//   threads = oversubscription.threads(threads);  // of this calling thread; before each region
//
// A region ends with its last thread. One whose processor another process has comes a time slice late,
// and a step has hundreds of regions: with one busy process it can take twenty times as long as by a
// thread alone. So threads are left out for a while when they wait for processors, which the system
// counts for each (run_delay: the second number of /proc/<thread>/schedstat, in nanoseconds). After
// that all are tried again: soon at first, then ever less often.
#pragma once
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#if defined(__linux__)
#include <fcntl.h>
#include <unistd.h>
#endif

class Oversubscription {
 public:
  Oversubscription() = default;
  Oversubscription(const Oversubscription&) = delete;
  ~Oversubscription() { close_all(); }

  // `wanted` threads, or fewer where they would wait for each other; 1 at least.
  int32_t threads(int32_t wanted) {
    if (wanted < 2) return wanted;
    const int64_t now = clock_ns();
    if (now < until_) return std::min(wanted, most_);
    const int64_t passed = now - since_;
    if (passed < WINDOW_NS && long(files_.size()) >= wanted) return wanted;
    const int64_t before = waited_, waited = read_all(wanted);
    waited_ = waited, since_ = now;
    if (waited < 0 || before < 0 || passed > 10 * WINDOW_NS) return wanted;  // a window begins
    const double waiting = double(waited - before) / double(passed);        // threads, on average
    if (waiting < WORTH / wanted) {
      hold_ = std::max(hold_ / 2, LEAST_HOLD_NS);
      return wanted;
    }
    most_ = std::max<int32_t>(1, wanted - int32_t(std::ceil(waiting)));
    until_ = now + hold_, hold_ = std::min(2 * hold_, MOST_HOLD_NS);
    return most_;
  }

 private:
  static constexpr int64_t WINDOW_NS = 12'000'000,  // a few time slices: one of them is no reason
      LEAST_HOLD_NS = 20'000'000, MOST_HOLD_NS = 1'600'000'000;
  // A region stands still while one of its threads waits, and is slower by 1 / wanted without it; a
  // little less than break even, as the others' time slices cost more than they last.
  static constexpr double WORTH = 0.8;

  static int64_t clock_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  // Nanoseconds for which the team's threads have waited so far; -1 if it was another team before, or
  // the system does not say.
  int64_t read_all(int32_t wanted) {
#if defined(__linux__)
    if (absent_) return -1;
    int64_t sum = 0;
    for (const int file : files_) {
      char text[96];
      const ssize_t size = pread(file, text, sizeof text - 1, 0);
      if (size <= 0) {  // the thread has ended
        close_all();
        break;
      }
      text[size] = 0;
      char* end;
      strtoll(text, &end, 10);
      sum += strtoll(end, nullptr, 10);
    }
    if (long(files_.size()) >= wanted) return sum;
    close_all();
    files_.resize(wanted, -1);
#pragma omp parallel num_threads(wanted)
    files_[omp_get_thread_num()] = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    absent_ = std::count(files_.begin(), files_.end(), -1) > 0;
#endif
    return -1;
  }

  void close_all() {
#if defined(__linux__)
    for (const int file : files_)
      if (file >= 0) close(file);
#endif
    files_.clear();
  }

  std::vector<int> files_;  // of each thread
  bool absent_ = false;     // the system does not count
  int32_t most_ = 1;
  int64_t since_ = 0, waited_ = -1, until_ = 0, hold_ = LEAST_HOLD_NS;
};

inline thread_local Oversubscription oversubscription;
