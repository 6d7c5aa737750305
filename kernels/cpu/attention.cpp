// Attention of a sequence's new rows over its keys and values, called through ctypes (which releases
// the GIL). A task takes some rows of the query heads that share keys through all splits of the keys.
// Sums are float32, and so are products, unless keys and values are bf16 and the CPU multiplies it.
#include <omp.h>

#include "attention_bf16.h"
#include "attention_floats.h"
#include "attention_parts.h"
#include "calls.h"
#include "layouts.h"

LAYOUT(kv::Format, bits, turned)
LAYOUT(Attend, q, k, v, out, begin, sinks, k_table, v_table, q_head, q_row, k_head, k_row, v_head, v_row,
       heads, kv_heads, key_size, value_size, queries, keys, scale, softcap, k_format, v_format)

namespace {

// Packs PANEL_KEYS keys and values of a head, or as many as there are.
template <class Products>
void pack(const Attend& a, long kv_head, long first, float* memory, char* to) {
  const long count = a.keys - first < PANEL_KEYS ? a.keys - first : PANEL_KEYS;
  const auto lines = [&](const void* table, kv::Format format, const float* rows, long head_stride,
                         long stride, long size, float* to) {
    if (!table) return Lines{rows + kv_head * head_stride + first * stride, stride};
    const kv::Rows own{table, format, size, kv::TOKENS, kv_head};
    const float* found = own.floats(first, count, to, stride);
    return Lines{found, stride};
  };
  float* beside = memory + PANEL_KEYS * kv::whole_groups(a.key_size);
  const Lines k = lines(a.k_table, a.k_format, a.k, a.k_head, a.k_row, a.key_size, memory);
  const Lines v = lines(a.v_table, a.v_format, a.v, a.v_head, a.v_row, a.value_size, beside);
  Products::pack(a, k, v, count, to);
}

// False: no memory.
template <class Products>
bool attend(const Attend& a, int threads) {
  const long panels = (a.keys + PANEL_KEYS - 1) / PANEL_KEYS, unit = Products::unit_bytes(a);
  const long rows = a.queries * (a.heads / a.kv_heads);
  const long blocks = (rows + ROWS_A_TASK - 1) / ROWS_A_TASK;
  const long lines = PANEL_KEYS * (kv::whole_groups(a.key_size) + kv::whole_groups(a.value_size));
  const long own_bytes = aligned(Rows<Products>::task_bytes(a)) + lines * long(sizeof(float));
  char* packed = scratch.reserve(a.kv_heads * panels * unit + threads * own_bytes);
  if (!packed) return false;
  char* memory = packed + a.kv_heads * panels * unit;
  Turns packing{stages::ATTENTION}, attending{stages::ATTENTION};
#pragma omp parallel num_threads(threads)
  {
    char* own = memory + omp_get_thread_num() * own_bytes;
    auto* floats = reinterpret_cast<float*>(own + own_bytes) - lines;
    packing.run(a.kv_heads * panels, [&](long task) {
      pack<Products>(a, task / panels, task % panels * PANEL_KEYS, floats, packed + task * unit);
    });
    attending.run(a.kv_heads * blocks, [&](long task) {  // the longest first
      const long head = task / blocks, first = (blocks - 1 - task % blocks) * ROWS_A_TASK;
      const long end = first + ROWS_A_TASK < rows ? first + ROWS_A_TASK : rows;
      Rows<Products>(a, packed + head * panels * unit, own, head, first, end).run();
    });
  }
  scratch.trim();
  return true;
}

// The attention that blocks get from the queries of one key head, see `moe_received`.
class Received {
 public:
  static long bytes(const Attend& a) {
    const long row = decode::SPLIT + a.key_size + blocks(a);
    return rows(a) * (row * long(sizeof(float)) + splits(a) * long(sizeof(decode::Partial)));
  }
  static long blocks(const Attend& a) { return (a.keys + kv::TOKENS - 1) / kv::TOKENS; }

  Received(const Attend& a, long kv_head, char* memory)
      : a_(a), kv_head_(kv_head), scores_(reinterpret_cast<float(*)[decode::SPLIT]>(memory)),
        queries_(scores_[rows(a)]), parts_(queries_ + rows(a) * a.key_size),
        partial_(reinterpret_cast<decode::Partial*>(parts_ + rows(a) * blocks(a))) {
    for (long m = 0; m < rows(a); ++m) {
      float* query = queries_ + m * a.key_size;
      memcpy(query, a.q + head(m) * a.q_head + m / group() * a.q_row, a.key_size * sizeof(float));
      if (a.k_format.turned) kv::turn(query, a.key_size);
    }
  }

  void run(float* out) {
    for (long split = 0; split < splits(a_); ++split) read(split);
    for (long m = 0; m < rows(a_); ++m) {
      const decode::Partial* partial = partial_ + m * splits(a_);
      float high = a_.sinks ? a_.sinks[head(m)] : -FLT_MAX;
      for (long s = 0; s < splits(a_); ++s) high = std::max(high, partial[s].high);
      float sum = a_.sinks ? std::exp(a_.sinks[head(m)] - high) : 0;
      for (long s = 0; s < splits(a_); ++s) sum += partial[s].sum * std::exp(partial[s].high - high);
      float* to = out + m / group() * blocks(a_);
      for (long block = 0; block < blocks(a_); ++block) {
        const float scale = std::exp(partial[block * kv::TOKENS / decode::SPLIT].high - high) / sum;
        to[block] += parts_[m * blocks(a_) + block] * scale;
      }
    }
  }

 private:
  static long rows(const Attend& a) { return a.queries * (a.heads / a.kv_heads); }
  static long splits(const Attend& a) { return (a.keys + decode::SPLIT - 1) / decode::SPLIT; }
  long group() const { return a_.heads / a_.kv_heads; }
  long head(long m) const { return kv_head_ * group() + m % group(); }

  void read(long split) {
    const long begin = split * decode::SPLIT, D = a_.key_size;
    const long count = std::min(a_.keys - begin, decode::SPLIT);
    const kv::Rows keys{a_.k_table, a_.k_format, D, kv::TOKENS, kv_head_};
    const char* row[decode::SPLIT];
    for (long t = 0; t < count; ++t) row[t] = keys.at(begin + t);
    kv::with_numbers(keys.format, D, [&](auto numbers) {
      const decode::Listed listed{row, count, keys.bytes};
      decode::scores_of(queries_, D, rows(a_), numbers, listed, count, D, true, scores_);
    });
    for (long m = 0; m < rows(a_); ++m) {
      const long own = a_.keys - a_.queries + m / group() + 1 - begin;  // keys up to its own
      const long seen = std::max(std::min(own, count), 0l);
      float* score = scores_[m];
      decode::Partial& partial = partial_[m * splits(a_) + split];
      partial = seen ? decode::exponents(score, seen, a_.scale, a_.softcap)
                     : decode::Partial{-FLT_MAX, 0};
      for (long t = 0; t < count; t += kv::TOKENS) {
        float sum = 0;
        for (long i = t; i < std::min(t + kv::TOKENS, seen); ++i) sum += score[i];
        parts_[m * blocks(a_) + (begin + t) / kv::TOKENS] = sum;
      }
    }
  }

  const Attend& a_;
  const long kv_head_;
  float (*const scores_)[decode::SPLIT];
  float *const queries_, *const parts_;  // (rows, D); (rows, blocks)
  decode::Partial* const partial_;       // (rows, splits)
};

}  // namespace

extern "C" {

// out (kv_heads, queries, blocks) += the attention that each query of each key head pays to each block
// of keys, summed over the heads that share them; queries see all keys up to their own. A query's
// sums do not depend on the others. 0: no memory.
int32_t moe_received(const Attend* a, float* out, int32_t threads) {
  threads = team(a->queries * a->heads * a->keys * a->key_size, threads);
  const long own = aligned(Received::bytes(*a));
  char* memory = scratch.reserve(threads * own);
  if (!memory) return false;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (long head = 0; head < a->kv_heads; ++head)
    Received(*a, head, memory + omp_get_thread_num() * own)
        .run(out + head * a->queries * Received::blocks(*a));
  scratch.trim();
  return true;
}

// Query i is at position keys - queries + i and sees the keys from begin[i] to its own.
// 0: no memory.
int32_t moe_attend(const Attend* a, int32_t threads) {
  threads = team(a->queries * a->heads * a->keys * a->key_size, threads);
  if (amx::ready) return attend<Parts>(*a, threads);
#if defined(__AVX512BF16__)
  if (Bf16Products::fits(*a)) return attend<Bf16Products>(*a, threads);
#endif
  return attend<Floats>(*a, threads);
}
}
