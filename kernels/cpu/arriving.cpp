// A layer whose experts are still being read: an expert runs as soon as it and all before it are in
// memory. Experts run in order, so the bits are those of one call. Letters as in grouped.h.
#include <chrono>

#include "calls.h"
#include "curves.h"
#include "layouts.h"
#include "reading.h"

extern "C" {

struct Coming {  // an expert that the call needs
  int64_t expert, slot;
  files::Job* job;  // reads it; null: it is in memory
};

struct ArrivingCall {  // filled by arriving.py
  int32_t (*forward)(const void* layer, const Activation*, const void* hidden, int32_t dtype,
                     const int64_t* ids, const float* weights, int64_t tokens, int64_t slots,
                     void* out, float* so_far, int32_t threads);
  const void* layer;
  const Activation* activation;
  const float* hidden;   // (T, H)
  const int64_t* ids;    // (T, K) experts, -1 where a slot is not used
  const float* weights;  // (T, K)
  float* out;            // (T, H)
  int64_t tokens, slots, width;  // T, K, H
  const Coming* coming;  // (count,) all experts among the ids, ascending
  int64_t count;
  void* reader;
  double patience, waited;  // seconds: longest wait for one expert, and sum of all waits
  int64_t begun, calls;     // experts that ran so far, and in how many calls of `forward`
  int32_t threads;
};

static_assert(sizeof(Coming) == 3 * sizeof(int64_t), "Python writes them as numbers");

enum : int32_t { FAILED = 2, LATER = 3 };  // expert `begun` failed or is late; else as `forward`

// Runs the experts from `begun` on.
int32_t moe_forward_arriving(ArrivingCall* call) {
  thread_local std::vector<int64_t> places;
  const Coming* const all = call->coming;
  const int64_t size = call->tokens * call->slots;
  const auto there = [&](int64_t i) {
    return !all[i].job || (all[i].job->done && !all[i].job->error);
  };
  places.resize(size);
  if (!call->begun) std::fill(call->out, call->out + call->tokens * call->width, 0.0f);
  while (call->begun < call->count) {
    const int64_t first = call->begun;
    if (!there(first)) {
      const auto start = std::chrono::steady_clock::now();
      const bool done = moe_read_wait(call->reader, all[first].job, call->patience);
      call->waited +=
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      if (!done) return LATER;
      if (all[first].job->error) return FAILED;
    }
    int64_t end = first + 1;
    while (end < call->count && there(end)) ++end;
    const auto before = [](const Coming& one, int64_t id) { return one.expert < id; };
    for (int64_t i = 0; i < size; ++i) {
      const Coming* own = std::lower_bound(all + first, all + end, call->ids[i], before);
      places[i] = own < all + end && own->expert == call->ids[i] ? own->slot : -1;
    }
    const int32_t said = call->forward(call->layer, call->activation, call->hidden, FP32,
                                       places.data(), call->weights, call->tokens, call->slots,
                                       call->out, call->out, call->threads);
    if (said != 1) return said;
    call->begun = end;
    ++call->calls;
  }
  return 1;
}
}

LAYOUT(ArrivingCall, forward, layer, activation, hidden, ids, weights, out, tokens, slots, width, coming,
       count, reader, patience, waited, begun, calls, threads)
