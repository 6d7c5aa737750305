// Attention of a sequence's new rows over its keys and values, called through ctypes (which releases
// the GIL). A task takes some rows of the query heads that share keys through all splits of the keys.
// Sums are float32, and so are products, unless keys and values are bf16 and the CPU multiplies it.
#include <omp.h>

#include <algorithm>
#include <optional>

#include "attention_amx.h"
#include "attention_bf16.h"
#include "attention_floats.h"
#include "calls.h"
#include "latents.h"
#include "layouts.h"

LAYOUT(kv::Format, bits, turned)
LAYOUT(Attend, q, k, v, out, begin, sinks, k_table, v_table, q_head, q_row, k_head, k_row, v_head, v_row,
       heads, kv_heads, key_size, value_size, queries, keys, scale, softcap, k_format, v_format)

namespace {

thread_local Scratch packed_rows;  // of its own: a pass that attends holds the other

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

constexpr long PACKED_BYTES = 64 << 20;  // of heads at a time, unless `least` take more

// Heads whose keys and values are packed at a time: as many as fit, in parts of nearly equal sizes.
long heads_together(const Attend& a, long least, long head_bytes) {
  const long fit = std::max(least, PACKED_BYTES / head_bytes), times = (a.kv_heads + fit - 1) / fit;
  return (a.kv_heads + times - 1) / times;
}

// `latents`: of keys and values that have to be expanded, or null. False: no memory.
template <class Products>
bool attend(const Attend& a, const Latents* latents, int threads) {
  // No query sees a key before the first split; latents are read from the first key on.
  const long seen = latents ? 0 : *std::min_element(a.begin, a.begin + a.queries);
  const long first_key = seen / KEYS_A_SPLIT * KEYS_A_SPLIT;
  const long panels = (a.keys - first_key + PANEL_KEYS - 1) / PANEL_KEYS;
  const long unit = Products::unit_bytes(a);
  const long rows = a.queries * (a.heads / a.kv_heads);
  const long blocks = (rows + ROWS_A_TASK - 1) / ROWS_A_TASK;
  // Each thread gets a task, but of latents, which expand to many times their size.
  const long least = latents ? 1 : (threads + blocks - 1) / blocks;
  const long heads = heads_together(a, least, panels * unit);
  const long lines = PANEL_KEYS * (kv::whole_groups(a.key_size) + kv::whole_groups(a.value_size));
  std::optional<Expansion> expansion;
  if (latents) expansion.emplace(a, *latents);
  const long packing_bytes = expansion ? expansion->own_bytes() : lines * long(sizeof(float));
  const long own_bytes = aligned(std::max(Rows<Products>::task_bytes(a), packing_bytes));
  const long packed_bytes = aligned(heads * panels * unit);
  char* packed = packed_rows.reserve(packed_bytes + threads * own_bytes +
                                     (expansion ? expansion->bytes() : 0));
  if (!packed) return false;
  char* memory = packed + packed_bytes;
  if (expansion) expansion->place(memory + threads * own_bytes);
  for (long from = 0; from < a.kv_heads; from += heads) {
    const long some = std::min(heads, a.kv_heads - from);
    Turns reading{stages::ATTENTION}, expanding{stages::PROJECTIONS}, packing{stages::ATTENTION};
    Turns attending{stages::ATTENTION};
#pragma omp parallel num_threads(threads)
    {
      char* own = memory + omp_get_thread_num() * own_bytes;
      if (expansion) {
        const long parts = (a.keys + Expansion::TOKENS - 1) / Expansion::TOKENS;
        if (!from) reading.run(panels, [&](long i) { expansion->read(i * PANEL_KEYS, own); });
        expanding.run(some * parts, [&](long task) {
          const long head = task / parts, first = task % parts * Expansion::TOKENS;
          expansion->expand<Products>(from + head, first, own, unit, packed + head * panels * unit);
        });
      } else {
        packing.run(some * panels, [&](long task) {
          pack<Products>(a, from + task / panels, first_key + task % panels * PANEL_KEYS,
                         reinterpret_cast<float*>(own), packed + task * unit);
        });
      }
      attending.run(some * blocks, [&](long task) {  // the longest first
        const long head = task / blocks, first = (blocks - 1 - task % blocks) * ROWS_A_TASK;
        const long end = first + ROWS_A_TASK < rows ? first + ROWS_A_TASK : rows;
        const char* key_0 = packed + (head * panels - first_key / PANEL_KEYS) * unit;
        Rows<Products>(a, key_0, own, from + head, first, end).run();
      });
    }
  }
  packed_rows.trim();
  return true;
}

bool attend(const Attend& a, const Latents* latents, int threads) {
  threads = team(a.queries * a.heads * a.keys * a.key_size, threads);
  if (amx::ready)
    return in_halves(a) ? attend<Tiles<1>>(a, latents, threads) : attend<Tiles<3>>(a, latents, threads);
#if defined(__AVX512BF16__)
  if (in_halves(a)) return attend<Bf16Products>(a, latents, threads);
#endif
  return attend<Floats>(a, latents, threads);
}

}  // namespace

bool attend_latents(const Attend& a, const Latents& latents, int threads) {
  return attend(a, &latents, threads);
}

extern "C" int32_t moe_attend(const Attend* a, int32_t threads) {
  return attend(*a, nullptr, threads);
}
