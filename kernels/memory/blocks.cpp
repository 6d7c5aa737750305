// torch's CPU allocator with a memory: a large block that a tensor gives back is kept for the next
// tensor of about its size, whatever thread it is in. The C library maps every large block anew and
// the system then clears each of its pages.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <list>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr size_t kLarge = size_t{1} << 20;  // smaller ones the C library keeps itself
constexpr size_t kPage = size_t{4} << 10;
constexpr size_t kTooLarge = size_t{1} << 46;

thread_local bool fresh = false;

struct Block {
  void* data;
  size_t bytes;
};
using Blocks = std::vector<Block>;

// Eight sizes an octave: at most an eighth is wasted.
size_t size_class(size_t bytes) {
  const size_t step = size_t{1} << (60 - __builtin_clzll(bytes - 1));
  return (bytes + step - 1) & ~(step - 1);
}

// Without huge pages: their clearing and compaction took longer than the faults that they save.
void* map(size_t bytes) {
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                            -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

void unmap(const Blocks& blocks) {
  for (const Block& block : blocks) munmap(block.data, block.bytes);
}

// Blocks in use and kept ones. Together they stay within the bound wherever that can be had by
// keeping less.
class Pool {
 public:
  struct Counts {
    int64_t bound, used, kept, hits, misses;
  };

  std::mutex mutex;

  // A block of at least `bytes`; null where nothing is to be kept or the system has none.
  void* take(size_t bytes) {
    const size_t size = size_class(bytes);
    Blocks dropped;
    {
      std::lock_guard<std::mutex> guard(mutex);
      if (counts_.bound == 0) return nullptr;
      auto found = by_size_.find(size);
      if (found != by_size_.end()) {
        const auto newest = found->second.back();
        const Block block = *newest;
        found->second.pop_back();
        if (found->second.empty()) by_size_.erase(found);
        forget(newest);
        use(block);
        ++counts_.hits;
        return block.data;
      }
      ++counts_.misses;
      dropped = drop_until(counts_.bound - static_cast<int64_t>(size));
    }
    unmap(dropped);
    void* data = map(size);
    if (!data) {
      lower(0);
      data = map(size);
    }
    if (data) {
      std::lock_guard<std::mutex> guard(mutex);
      use({data, size});
    }
    return data;
  }

  // False: not a block of ours.
  bool give_back(void* data) {
    Blocks dropped;
    {
      std::lock_guard<std::mutex> guard(mutex);
      const auto found = used_.find(data);
      if (found == used_.end()) return false;
      const Block block{data, found->second};
      used_.erase(found);
      counts_.used -= block.bytes;
      if (counts_.used + static_cast<int64_t>(block.bytes) > counts_.bound) {
        dropped.push_back(block);
      } else {
        dropped = drop_until(counts_.bound - static_cast<int64_t>(block.bytes));
        by_age_.push_back(block);
        by_size_[block.bytes].push_back(std::prev(by_age_.end()));
        counts_.kept += block.bytes;
      }
    }
    unmap(dropped);
    return true;
  }

  // Lets go of kept blocks until all blocks together have at most `bytes`.
  void lower(int64_t bytes) {
    Blocks dropped;
    {
      std::lock_guard<std::mutex> guard(mutex);
      dropped = drop_until(bytes);
    }
    unmap(dropped);
  }

  void bound(int64_t bytes) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      counts_.bound = bytes;
    }
    lower(bytes);
  }

  Counts counts() {
    std::lock_guard<std::mutex> guard(mutex);
    return counts_;
  }

 private:
  using Age = std::list<Block>;

  void use(const Block& block) {
    used_[block.data] = block.bytes;
    counts_.used += block.bytes;
  }

  void forget(Age::iterator place) {
    counts_.kept -= place->bytes;
    by_age_.erase(place);
  }

  // Takes the oldest kept blocks out until all blocks together have no more than `bytes`.
  Blocks drop_until(int64_t bytes) {
    Blocks dropped;
    while (!by_age_.empty() && counts_.used + counts_.kept > bytes) {
      const auto oldest = by_age_.begin();
      dropped.push_back(*oldest);
      const auto same = by_size_.find(oldest->bytes);
      same->second.pop_front();  // in order of age, as blocks come and go at the back
      if (same->second.empty()) by_size_.erase(same);
      forget(oldest);
    }
    return dropped;
  }

  Counts counts_{};
  std::unordered_map<void*, size_t> used_;
  Age by_age_;
  std::unordered_map<size_t, std::deque<Age::iterator>> by_size_;
};

// Never destroyed: tensors may outlive everything else.
Pool& pool() {
  static Pool* const one = new Pool;
  return *one;
}

void release(void* data) {
  if (!data) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  const bool whole_page = (reinterpret_cast<uintptr_t>(data) & (kPage - 1)) == 0;
  if (!whole_page || !pool().give_back(data)) c10::free_cpu(data);
}

struct KeepingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes >= kLarge && bytes < kTooLarge && !fresh) data = pool().take(bytes);
    if (!data) data = c10::alloc_cpu(bytes);  // fails with torch's own message
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

extern "C" {

// Makes torch take its CPU memory from here from now on. Once.
void moe_memory_install() {
  pool();
  pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); },
                 [] { pool().mutex.unlock(); });
  c10::SetCPUAllocator(new KeepingAllocator);
}

// Most bytes of blocks in use and kept ones; 0 keeps none.
void moe_memory_bound(int64_t bytes) { pool().bound(bytes); }

// Whether large tensors that this thread makes get memory that nobody has written to; what it was.
int32_t moe_memory_fresh(int32_t wanted) { return std::exchange(fresh, wanted != 0); }

// bound, bytes used, bytes kept, blocks given out again, blocks mapped.
void moe_memory_counts(int64_t* out) {
  const Pool::Counts counts = pool().counts();
  const int64_t all[] = {counts.bound, counts.used, counts.kept, counts.hits, counts.misses};
  std::copy(std::begin(all), std::end(all), out);
}

}  // extern "C"
