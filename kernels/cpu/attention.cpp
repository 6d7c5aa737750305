// Attention of a sequence's new rows over its keys and values, in float32, called through ctypes
// (which releases the GIL). A task takes some rows of the query heads that share keys through all
// splits of the keys.
#include <omp.h>

#include "attention_floats.h"
#include "attention_parts.h"
#include "calls.h"
#include "layouts.h"

LAYOUT(Attend, q, k, v, out, begin, sinks, q_head, q_row, k_head, k_row, v_head, v_row, heads, kv_heads,
       key_size, value_size, queries, keys, scale, softcap)

namespace {

// False: no memory.
template <class Products>
bool attend(const Attend& a, int threads) {
  const long panels = (a.keys + PANEL_KEYS - 1) / PANEL_KEYS, unit = Products::unit_bytes(a);
  const long rows = a.queries * (a.heads / a.kv_heads);
  const long blocks = (rows + ROWS_A_TASK - 1) / ROWS_A_TASK;
  char* packed = scratch.reserve(a.kv_heads * panels * unit + threads * Rows<Products>::task_bytes(a));
  if (!packed) return false;
  char* memory = packed + a.kv_heads * panels * unit;
  Turns packing{stages::ATTENTION}, attending{stages::ATTENTION};
#pragma omp parallel num_threads(threads)
  {
    packing.run(a.kv_heads * panels, [&](long task) {
      Products::pack(a, task / panels, task % panels * PANEL_KEYS, packed + task * unit);
    });
    char* own = memory + omp_get_thread_num() * Rows<Products>::task_bytes(a);
    attending.run(a.kv_heads * blocks, [&](long task) {  // the longest first
      const long head = task / blocks, first = (blocks - 1 - task % blocks) * ROWS_A_TASK;
      const long end = first + ROWS_A_TASK < rows ? first + ROWS_A_TASK : rows;
      Rows<Products>(a, packed + head * panels * unit, own, head, first, end).run();
    });
  }
  scratch.trim();
  return true;
}

}  // namespace

extern "C" {

// Query i is at position keys - queries + i and sees the keys from begin[i] to its own.
// 0: no memory.
int32_t moe_attend(const Attend* a, int32_t threads) {
  threads = team(a->queries * a->heads * a->keys * a->key_size, threads);
  return amx::ready ? attend<Parts>(*a, threads) : attend<Floats>(*a, threads);
}
}
