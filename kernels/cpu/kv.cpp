// Writes rows of keys and values to a sequence's blocks, and reads them back, see kv.h.
#include "kv.h"

#include <cfloat>

#include "calls.h"
#include "layouts.h"

namespace kv {

namespace {

float nearest(float x) {  // ties to even, of a small number
  constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23
  return (x + to_integer) - to_integer;
}

// A scale as bf16, away from zero: no code gets larger than it may.
uint16_t scale_bits(float scale) {
  const auto all = bits<uint32_t>(scale);
  return uint16_t((all + 0xffff) >> 16);
}

float of_bits(uint16_t scale) { return bits<float>(uint32_t(scale) << 16); }

// Codes of one group, padded with zeros: sets `code` and returns the scale.
uint16_t code_8(const float* x, float* code) {
  float most = 0;
  for (long c = 0; c < GROUP; ++c) most = std::max(most, std::fabs(x[c]));
  const uint16_t scale = scale_bits(most / 127);
  const float inverse = scale ? 1 / of_bits(scale) : 0;
  for (long c = 0; c < GROUP; ++c) code[c] = nearest(x[c] * inverse);
  return scale;
}

// The number that lies farthest from zero gets a code near -8, the one code without a counterpart; of
// some such scales the one with the least error is taken.
uint16_t code_4(const float* x, float* code) {
  float most = 0;
  for (long c = 0; c < GROUP; ++c) most = std::fabs(x[c]) > std::fabs(most) ? x[c] : most;
  uint16_t best = 0;
  float least = FLT_MAX;
  memset(code, 0, GROUP * sizeof(float));
  if (most == 0) return 0;
  for (const float steps : {6.8f, 7.2f, 7.6f, 8.0f, 8.5f, 9.0f}) {
    const uint16_t scale = scale_bits(-most / steps);
    const float step = of_bits(scale), inverse = 1 / step;
    float tried[GROUP], error[8] = {};
    if (!std::isfinite(inverse)) continue;
    for (long c = 0; c < GROUP; ++c)
      tried[c] = std::min(std::max(nearest(x[c] * inverse), -8.0f), 7.0f);
    for (long c = 0; c < GROUP; c += 8)
      for (long i = 0; i < 8; ++i) {
        const float off = tried[c + i] * step - x[c + i];
        error[i] += off * off;
      }
    const float sum = ((error[0] + error[4]) + (error[1] + error[5])) +
                      ((error[2] + error[6]) + (error[3] + error[7]));
    if (sum < least) least = sum, best = scale, memcpy(code, tried, sizeof tried);
  }
  return best;
}

void put_group(int32_t bits, const float* x, char* scale, char* codes) {
  float code[GROUP], whole = 0;
  for (long c = 0; c < GROUP; ++c) whole += x[c] * 0;
  uint16_t own = bits == 8 ? code_8(x, code) : code_4(x, code);
  if (!(whole == 0)) {  // what is not finite stays so
    own = 0x7fc0;
    for (long c = 0; c < GROUP; ++c) code[c] = 1;
  }
  memcpy(scale, &own, 2);
  if (bits == 8)
    for (long c = 0; c < GROUP; ++c) codes[c] = char(int(code[c]));
  else
    for (long c = 0; c < GROUP / 2; ++c)
      codes[c] = char((int(code[c]) + 8) | (int(code[c + GROUP / 2]) + 8) << 4);
}

}  // namespace

void turn(float* row, long size) {
  const long part = size & -size;
  const float scale = 1 / std::sqrt(float(part));
  for (float* x = row; x < row + size; x += part) {
    for (long half = 1; half < part; half *= 2)
      for (long i = 0; i < part; i += 2 * half)
        for (long j = i; j < i + half; ++j) {
          const float a = x[j], b = x[j + half];
          x[j] = a + b, x[j + half] = a - b;
        }
    for (long i = 0; i < part; ++i) x[i] *= scale;
  }
}

void Bounds::set(long block) const {
  thread_local std::unique_ptr<float[]> memory;
  thread_local long room = 0;
  const long size = keys.size, whole = whole_groups(size);
  if (room < whole) memory.reset(new float[room = whole]);
  float *row = memory.get(), *most = at(block), *least = most + size;
  for (long t = 0; t < TOKENS; ++t) {
    take(keys.format, keys.at((block << SHIFT) + t), size, row);
    for (long c = 0; c < size; ++c) {
      most[c] = t && most[c] > row[c] ? most[c] : row[c];
      least[c] = t && least[c] < row[c] ? least[c] : row[c];
    }
  }
}

void put(Format format, const float* row, long size, char* to) {
  if (format.bits == 32) {
    memcpy(to, row, size * sizeof(float));
    return;
  }
  if (format.bits == 16) {
    for (long c = 0; c < size; c += LANES)
      store_fp32_as(reinterpret_cast<uint16_t*>(to) + c, load_as_fp32(row + c, size - c), size - c);
    return;
  }
  const long groups = format.groups(size);
  thread_local std::unique_ptr<float[]> memory;
  thread_local long room = 0;
  if (room < groups * GROUP) memory.reset(new float[room = groups * GROUP]);
  float* x = memory.get();
  memcpy(x, row, size * sizeof(float));
  memset(x + size, 0, (groups * GROUP - size) * sizeof(float));
  if (format.turned) turn(x, size);
  for (long g = 0; g < groups; ++g)
    put_group(format.bits, x + g * GROUP, to + 2 * g,
              to + 2 * groups + g * GROUP * format.bits / 8);
}

}  // namespace kv

// Rows (heads, count, size) of tokens `begin` to begin + count.
extern "C" struct KvRows {
  float* rows;
  const void* table;  // of blocks
  int64_t head_stride, row_stride, heads, size, begin, count, room;
  int64_t bounds;  // of keys, where their bounds begin in a block; 0: there are none
  int32_t bits, turned;
};
LAYOUT(KvRows, rows, table, head_stride, row_stride, heads, size, begin, count, room, bounds,
       bits, turned)

namespace {

// Calls body(row, place) for all rows.
template <class Body>
void each_row(const KvRows& k, int32_t threads, const Body& body) {
  threads = team(k.heads * k.count * k.size * 16, threads);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < k.heads * k.count; ++i) {
    const long head = i / k.count, t = i % k.count;
    const kv::Rows own{k.table, {k.bits, k.turned}, k.size, k.room, head};
    body(k.rows + head * k.head_stride + t * k.row_stride, own.at(k.begin + t));
  }
}

}  // namespace

extern "C" {

void moe_kv_write(const KvRows* k, int32_t threads) {
  const kv::Format format{k->bits, k->turned};
  each_row(*k, threads, [&](float* row, char* place) { kv::put(format, row, k->size, place); });
  const long first = k->begin / k->room, end = (k->begin + k->count) / k->room;
  if (!k->bounds || first >= end) return;
  threads = team(k->heads * k->count * k->size * 4, threads);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < k->heads * (end - first); ++i) {
    const long head = i / (end - first), block = first + i % (end - first);
    const kv::Rows own{k->table, format, k->size, k->room, head};
    kv::Bounds{own, k->bounds, head}.set(block);
  }
}

// Gives rows as floats, turned back.
void moe_kv_read(const KvRows* k, int32_t threads) {
  const kv::Format format{k->bits, k->turned};
  each_row(*k, threads, [&](float* row, char* place) {
    if (format.bits == 32) {
      memcpy(row, place, k->size * sizeof(float));
      return;
    }
    thread_local std::unique_ptr<float[]> memory;
    thread_local long room = 0;
    const long whole = kv::whole_groups(k->size);
    if (room < whole) memory.reset(new float[room = whole]);
    kv::take(format, place, k->size, memory.get());
    if (format.turned) kv::turn(memory.get(), k->size);
    memcpy(row, memory.get(), k->size * sizeof(float));
  });
}
}
