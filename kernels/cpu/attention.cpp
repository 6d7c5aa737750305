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

// False: no memory.
template <class Products>
bool attend(const Attend& a, int threads) {
  const long panels = (a.keys + PANEL_KEYS - 1) / PANEL_KEYS, unit = Products::unit_bytes(a);
  const long rows = a.queries * (a.heads / a.kv_heads);
  const long blocks = (rows + ROWS_A_TASK - 1) / ROWS_A_TASK;
  const long lines = PANEL_KEYS * (kv::whole_groups(a.key_size) + kv::whole_groups(a.value_size));
  const long own_bytes = aligned(Rows<Products>::task_bytes(a)) + lines * long(sizeof(float));
  char* packed = packed_rows.reserve(a.kv_heads * panels * unit + threads * own_bytes);
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
  packed_rows.trim();
  return true;
}

}  // namespace

extern "C" {

int32_t moe_attend(const Attend* a, int32_t threads) {
  threads = team(a->queries * a->heads * a->keys * a->key_size, threads);
  if (amx::ready) return attend<Parts>(*a, threads);
#if defined(__AVX512BF16__)
  if (Bf16Products::fits(*a)) return attend<Bf16Products>(*a, threads);
#endif
  return attend<Floats>(*a, threads);
}
}
