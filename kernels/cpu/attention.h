// Query rows of one key head over all splits of its keys, with a running softmax. The matrix products
// are those of a class `Products` (attention_floats.h, attention_bf16.h, attention_amx.h):
//
//   TILE                             rows that share every load
//   unit_bytes(a)                    bytes of PANEL_KEYS packed keys and values
//   pack(a, k, v, count, to)         packs `count` of them, with zeros beyond the last
//   task_bytes(a)                    memory for the rows of a task
//   take(i, row)                     sets row i of the task
//   scores(i, split, count, score)   q . k of the tile that begins at row i, for `count` keys
//   weigh(i, count, score)           sets the softmax weights of row i of the tile
//   sums(used, split, count, score, join)   join(row, column, sum) for all columns of the values
//
// Splits begin at multiples of KEYS_A_SPLIT in the sequence, so a row's bits depend neither on which
// other rows are read with it nor on the number of threads. Letters: D key size, V value size.
#pragma once
#include "grouped.h"
#include "heads.h"
#include "kv.h"

extern "C" struct Attend {
  const float *q, *k, *v;
  float* out;            // (queries, heads, V)
  const int64_t* begin;  // (queries,) the first key that each query sees
  const float* sinks;    // (heads,) or null
  const void *k_table, *v_table;  // of the blocks that keys and values are in; null: in k and v
  int64_t q_head, q_row, k_head, k_row, v_head, v_row;  // elements from one to the next
  int64_t heads, kv_heads, key_size, value_size, queries, keys;
  float scale, softcap;  // softcap 0: none
  kv::Format k_format, v_format;  // of blocks
};

// Query i is at position keys - queries + i and sees the keys from begin[i] to its own.
// 0: no memory.
extern "C" int32_t moe_attend(const Attend* a, int32_t threads);

// Whether keys and values are kept in bf16 or in codes of fewer bits: kernels may round what they
// multiply them by to bf16.
static inline bool in_halves(const Attend& a) {
  return a.k_table && a.v_table && a.k_format.bits <= 16 && a.v_format.bits <= 16;
}

// Some rows in float32, one after the other `stride` apart.
struct Lines {
  const float* first;
  long stride;
  const float* at(long t) const { return first + t * stride; }
};

constexpr long KEYS_A_SPLIT = 256, ROWS_A_TASK = 64, PANEL_KEYS = 32;
constexpr long VALUE_STEP = 32;  // columns of values that may be written at once

struct alignas(64) Score {  // of a row: exponents fill their last vector
  float key[KEYS_A_SPLIT + LANES];
};

// Query rows `first` to `end` of a key head; row m is head m % group of query m / group.
template <class Products>
class Rows {
 public:
  static long task_bytes(const Attend& a) {
    return Products::task_bytes(a) + (ROWS_A_TASK * wide(a) + a.key_size) * long(sizeof(float));
  }

  Rows(const Attend& a, const char* packed, char* memory, long kv_head, long first, long end)
      : a_(a), kv_head_(kv_head), first_(first), end_(end),
        sums_(reinterpret_cast<float*>(memory + Products::task_bytes(a))),
        turned_(sums_ + ROWS_A_TASK * wide(a)),
        products_(a, kv_head, packed, memory) {
    for (long m = first; m < end; ++m) {
      high_[m - first] = a.sinks ? a.sinks[head(m)] : -FLT_MAX;
      total_[m - first] = a.sinks ? 1 : 0;
      const float* row = a.q + head(m) * a.q_head + m / group() * a.q_row;
      if (a.k_format.turned) {
        memcpy(turned_, row, a.key_size * sizeof(float));
        kv::turn(turned_, a.key_size);
        row = turned_;
      }
      products_.take(m - first, row);
    }
    memset(sums_, 0, (end - first) * wide(a) * sizeof(float));
  }

  void run() {
    long split = begin(first_);
    for (long m = first_; m < end_; ++m) split = begin(m) < split ? begin(m) : split;
    split = split / KEYS_A_SPLIT * KEYS_A_SPLIT;
    for (; split < length(end_ - 1); split += KEYS_A_SPLIT)
      for (long m = first_; m < end_; m += Products::TILE) tile(m, split);
    for (long m = first_; m < end_; ++m) {
      float* out = a_.out + (m / group() * a_.heads + head(m)) * a_.value_size;
      for (long c = 0; c < a_.value_size; c += LANES)
        store_fp32_as(out + c, load<vf>(sum(m - first_) + c) / total_[m - first_],
                      a_.value_size - c);
      if (a_.v_format.turned) kv::turn(out, a_.value_size);
    }
  }

 private:
  static long wide(const Attend& a) {
    return (a.value_size + VALUE_STEP - 1) / VALUE_STEP * VALUE_STEP;
  }
  long group() const { return a_.heads / a_.kv_heads; }
  long head(long m) const { return kv_head_ * group() + m % group(); }
  long length(long m) const { return a_.keys - a_.queries + m / group() + 1; }
  long begin(long m) const { return a_.begin[m / group()]; }
  float* sum(long i) const { return sums_ + i * wide(a_); }

  // The rows of a tile from m on, and one split of the keys.
  void tile(long m, long split) {
    constexpr int TILE = Products::TILE;
    const long used = end_ - m < TILE ? end_ - m : TILE, first = m - first_;
    const long left = length(m + used - 1) - split;
    const long count = left < KEYS_A_SPLIT ? left : KEYS_A_SPLIT;
    if (count <= 0) return;
    products_.scores(first, split, count, score_);
    alignas(64) float high[WHOLE] = {}, total[WHOLE] = {}, keep[WHOLE], add[WHOLE];
    for (long i = 0; i < used; ++i) {
      const decode::Partial part = exponents(m + i, split, count, score_[i].key);
      high[i] = part.high, total[i] = part.sum;
      products_.weigh(i, count, score_[i]);
    }
    for (long i = 0; i < WHOLE; i += LANES) {  // rescales the sums so far and the new ones
      const vf so_far = load<vf>(high_ + first + i), own = load<vf>(high + i);
      const vf both = own > so_far ? own : so_far;
      const vf k = exp_lanes(so_far - both), a = exp_lanes(own - both);
      store(keep + i, k), store(add + i, a), store(high + i, both);
      store(total + i, load<vf>(total_ + first + i) * k + load<vf>(total + i) * a);
    }
    memcpy(high_ + first, high, used * sizeof(float));
    memcpy(total_ + first, total, used * sizeof(float));
    products_.sums(used, split, count, score_, [&](long i, long c, vf own) {
      float* to = sum(first + i) + c;
      store(to, load<vf>(to) * keep[i] + own * add[i]);
    });
  }

  // Turns a row's scores into weights; 0 for keys that it does not see.
  decode::Partial exponents(long m, long split, long count, float* score) const {
    const long first = begin(m) > split ? begin(m) - split : 0;
    const long end = length(m) - split < count ? length(m) - split : count;
    const long whole = (count + PANEL_KEYS - 1) / PANEL_KEYS * PANEL_KEYS;
    if (first >= end) {
      memset(score, 0, whole * sizeof(float));
      return {-FLT_MAX, 0};
    }
    const decode::Partial part =
        decode::exponents(score + first, end - first, a_.scale, a_.softcap);
    if (first) memset(score, 0, first * sizeof(float));
    if (whole > end) memset(score + end, 0, (whole - end) * sizeof(float));
    return part;
  }

  static constexpr long WHOLE = (Products::TILE + LANES - 1) / LANES * LANES;
  const Attend& a_;
  const long kv_head_, first_, end_;
  float* const sums_;  // of the weighted values so far, for each row
  float* const turned_;  // a query
  Products products_;
  float high_[ROWS_A_TASK + LANES] = {}, total_[ROWS_A_TASK + LANES] = {};
  Score score_[Products::TILE];
};
