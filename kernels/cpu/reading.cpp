// Background reads of files, urgent ones first, by threads that never wait for Python's lock: the
// compiled version of `offload/readers/threads.py`.
#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "layouts.h"
#include "reading.h"

LAYOUT(files::Job, piece, waiting, taken, failed, urgent, reading, error, refused, done)
static_assert(sizeof(files::Piece) == 7 * sizeof(int64_t), "Python writes pieces as numbers");

namespace {

using namespace files;

constexpr double REMEMBERED_S = 1;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Reader {
 public:
  explicit Reader(int64_t most) : most(most) {}

  void start(int32_t count) {
    const std::lock_guard<std::mutex> lock(mutex);
    threads += count;
    for (; alive < threads; ++alive) std::thread([this] { serve(); }).detach();
  }

  void ask(Job* job) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (closed) return fail(job, CLOSED);
    if (!job->waiting) return finish(job);
    queue_of(job).push_back(job);
    wake();
  }

  bool cancel(Job* job) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (job->taken || job->done) return false;
    fail(job, CANCELLED);
    return true;
  }

  void hasten(Job* job) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!job->urgent && job->waiting && !job->done) {
      take_out(job);
      urgent.push_back(job);
      wake();
    }
    job->urgent = true;
  }

  bool wait(Job* job, double seconds) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto patience = std::chrono::duration<double>(seconds);
    return ended.wait_for(lock, patience, [&] { return bool(job->done); });
  }

  // Waits up to `seconds`; true: no thread uses this reader any more.
  bool close(double seconds) {
    std::unique_lock<std::mutex> lock(mutex);
    closed = true;
    for (auto* queue : {&urgent, &prefetch})
      while (!queue->empty()) fail(queue->front(), CLOSED);
    changed.notify_all();
    const auto patience = std::chrono::duration<double>(seconds);
    return ended.wait_for(lock, patience, [&] { return !alive; });
  }

  double throughput() {
    const std::lock_guard<std::mutex> lock(mutex);
    return bytes ? bytes / busy : 0;
  }

 private:
  std::deque<Job*>& queue_of(const Job* job) { return job->urgent ? urgent : prefetch; }

  void take_out(const Job* job) {
    auto& queue = queue_of(job);
    const auto at = std::find(queue.begin(), queue.end(), job);
    if (at != queue.end()) queue.erase(at);
  }

  // Drops the pieces of a job that have not begun.
  void fail(Job* job, int32_t error) {
    if (!job->error) job->error = error;
    if (job->waiting) take_out(job);
    job->waiting = 0;
    if (!job->reading) finish(job);
  }

  void finish(Job* job) {
    job->done = 1;
    ended.notify_all();
  }

  std::deque<Job*>* next_queue() {
    if (in_flight >= most) return nullptr;
    if (!urgent.empty()) return &urgent;
    return prefetching < std::max(1, threads / 2) && !prefetch.empty() ? &prefetch : nullptr;
  }

  void wake() {
    if (!idle || woken || !next_queue()) return;
    woken = true;
    changed.notify_one();
  }

  void serve() {
    void* bounce = mmap(nullptr, BOUNCE_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    std::vector<iovec> rest;
    std::unique_lock<std::mutex> lock(mutex);
    while (std::deque<Job*>* queue = await(lock)) {
      Job* job = queue->front();
      const Piece& piece = *job->piece;
      const bool is_prefetch = queue == &prefetch;
      const int64_t number = job->taken++;
      job->piece = piece.next();
      if (!--job->waiting) queue->pop_front();
      ++job->reading;
      begin(piece.bytes);
      prefetching += is_prefetch;
      wake();
      lock.unlock();
      const bool direct = piece.direct >= 0 && bounce != MAP_FAILED;
      int32_t error = read_all(piece, rest, direct ? static_cast<char*>(bounce) : nullptr);
      const bool refused = direct && error == EINVAL;
      if (refused) error = read_all(piece, rest, nullptr);
      if (error <= 0 && is_changed(piece)) error = CHANGED;
      lock.lock();
      prefetching -= is_prefetch;
      job->refused |= refused;
      --job->reading;
      end(piece.bytes);
      if (error && !job->error) job->failed = number;
      if (error) fail(job, error);
      else if (!job->waiting && !job->reading) finish(job);
    }
    lock.unlock();
    if (bounce != MAP_FAILED) munmap(bounce, BOUNCE_BYTES);
    lock.lock();
    --alive;
    ended.notify_all();
  }

  // Waits for work; the queue of the next piece, or null once the reader is closed.
  std::deque<Job*>* await(std::unique_lock<std::mutex>& lock) {
    for (;;) {
      if (auto* queue = next_queue()) return queue;
      if (closed) return nullptr;
      ++idle;
      changed.wait(lock);
      --idle;
      woken = false;
    }
  }

  void begin(int64_t more) {
    if (!in_flight) since = now();
    in_flight += more;
  }

  void end(int64_t less) {
    const double until = now();
    in_flight -= less;
    busy += until - since;
    bytes += less;
    since = until;
    if (busy > 2 * REMEMBERED_S) busy /= 2, bytes /= 2;
  }

  std::mutex mutex;
  std::condition_variable changed, ended;
  std::deque<Job*> urgent, prefetch;
  int32_t threads = 0, alive = 0, prefetching = 0, idle = 0;
  const int64_t most;
  bool woken = false, closed = false;
  int64_t in_flight = 0;
  double since = 0, busy = 0, bytes = 0;
};

}  // namespace

extern "C" {

// Begins no further read while `most` bytes are in flight. Lives as long as the process: a caller may
// look at one of its jobs at any time.
void* moe_reader(int64_t most) { return new Reader(most); }
void moe_reader_start(void* reader, int32_t threads) {
  static_cast<Reader*>(reader)->start(threads);
}
void moe_read(void* reader, void* job) { static_cast<Reader*>(reader)->ask(static_cast<Job*>(job)); }
int32_t moe_read_wait(void* reader, void* job, double seconds) {
  return static_cast<Reader*>(reader)->wait(static_cast<Job*>(job), seconds);
}
int32_t moe_read_cancel(void* reader, void* job) {
  return static_cast<Reader*>(reader)->cancel(static_cast<Job*>(job));
}
void moe_read_hasten(void* reader, void* job) {
  static_cast<Reader*>(reader)->hasten(static_cast<Job*>(job));
}
double moe_read_throughput(void* reader) { return static_cast<Reader*>(reader)->throughput(); }

// Waits up to `seconds`; true: all threads have ended.
int32_t moe_reader_close(void* reader, double seconds) {
  return static_cast<Reader*>(reader)->close(seconds);
}
}
