// A disk of known speed, for benchmarks/offload_plan.py: preloaded into a process, it delays reads past the
// page cache (O_DIRECT) as a disk of SLOW_DISK=GB/s,microseconds would that serves one read after another,
// and ends each so much later. The real disk must be faster.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

struct Disk {
  double bytes_s = 0, latency_s = 0;
  std::mutex mutex;
  Clock::time_point idle_from;

  Disk() {
    double rate, latency;
    const char* text = getenv("SLOW_DISK");
    if (text && sscanf(text, "%lf,%lf", &rate, &latency) == 2)
      bytes_s = rate * 1e9, latency_s = latency * 1e-6;
  }

  Clock::time_point end_of(ssize_t bytes, Clock::time_point begun) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto after = [](double seconds) {
      return std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
    };
    idle_from = std::max(idle_from, begun) + after(bytes / bytes_s);
    return idle_from + after(latency_s);
  }
};

template <class Call>
ssize_t slowly(int fd, const Call& call) {
  static Disk disk;
  if (!disk.bytes_s || !(fcntl(fd, F_GETFL) & O_DIRECT)) return call();
  static thread_local const int exact = prctl(PR_SET_TIMERSLACK, 1);
  (void)exact;
  const auto begun = Clock::now();
  const ssize_t got = call();
  if (got > 0) std::this_thread::sleep_until(disk.end_of(got, begun));
  return got;
}

template <class Function>
Function next_of(Function, const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define READS(name, Place, Count, Offset)                            \
  extern "C" ssize_t name(int fd, Place to, Count count, Offset at) { \
    static const auto next = next_of(&name, #name);                  \
    return slowly(fd, [&] { return next(fd, to, count, at); });      \
  }
READS(pread, void*, size_t, off_t)
READS(pread64, void*, size_t, off64_t)
READS(preadv, const iovec*, int, off_t)
READS(preadv64, const iovec*, int, off64_t)
