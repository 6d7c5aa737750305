// Keys and values of all heads, expanded from the latent rows that a sequence keeps: some tokens and one
// head at a time, so that weights, rows and what is made of them stay in a cache until it is packed. For
// many queries that costs less than attention in the latent space, whose rows are longer.
// Letters: P plain and T rotated numbers of a key, V of a value, R of a latent.
#pragma once
#include "attention.h"
#include "product.h"

struct Latents {
  decode::Matrix expansion;  // (heads * (P + V), R)
  kv::Rows rows, turned;     // the cached latents, and rotated keys, which all heads share
};

// As moe_attend, `a` being what is expanded: all heads have keys of their own. False: no memory.
bool attend_latents(const Attend& a, const Latents& latents, int threads);

// A head's keys have their rotated numbers first, so that what the product makes of a latent lies
// behind them: (T, P, V).
class Expansion {
 public:
  static constexpr long TOKENS = 4 * PANEL_KEYS;  // expanded together

  Expansion(const Attend& a, const Latents& latents)
      : a_(a), latents_(latents), matrix_(latents.expansion), size_(latents.rows.size),
        turned_size_(latents.turned.size), width_(a.key_size - turned_size_ + a.value_size),
        stride_((2 * BLOCK_ROWS + turned_size_ + width_ + LANES - 1) / LANES * LANES) {}

  // Memory for the rows of all tokens, and of a thread's own.
  size_t bytes() const { return whole_bytes() + code_bytes() + turned_bytes(); }
  size_t own_bytes() const {
    const long row = kv::whole_groups(std::max(size_, turned_size_));
    return aligned(std::max(TOKENS * stride_, row) * long(sizeof(float)));
  }

  void place(char* memory) {
    rows_.width = size_;
    rows_.x = reinterpret_cast<float*>(memory);
    if (matrix_.quantized()) rows_.place(memory + whole_bytes(), matrix_.planes.format.row_group());
    turned_ = reinterpret_cast<float*>(memory + whole_bytes() + code_bytes());
  }

  // Takes the rows of a panel's tokens from the cache.
  void read(long first, char* memory) const {
    auto* row = reinterpret_cast<float*>(memory);
    const auto taken = [&](const kv::Rows& from, long t) {
      kv::take(from.format, from.at(t), from.size, row);
      if (from.format.turned) kv::turn(row, from.size);
    };
    for (long t = first; t < std::min(first + PANEL_KEYS, a_.keys); ++t) {
      taken(latents_.turned, t);
      memcpy(turned_ + t * turned_size_, row, turned_size_ * sizeof(float));
      taken(latents_.rows, t);
      if (matrix_.quantized()) quantize_row(row, size_, codes().group_size, codes().from(t));
      else memcpy(rows_.x + t * size_, row, size_ * sizeof(float));
    }
  }

  // Expands the tokens from `first` on for a head, and packs them, `unit` bytes a panel.
  template <class Products>
  void expand(long head, long first, char* memory, long unit, char* packed) const {
    const long count = std::min(TOKENS, a_.keys - first), begin = head * width_;
    const long early = begin % BLOCK_ROWS, end = early + width_, step = panel_rows();
    // Products begin and end at whole blocks: what is too much is overwritten, or lies between rows.
    float* out = reinterpret_cast<float*>(memory) + BLOCK_ROWS;
    const decode::Rows x = rows_.from(first);
    for (long g = 0; g < end; g += step) {
      const decode::Matrix own = matrix_.from(begin - early + g);
      const decode::Product product{&own, &x, out + turned_size_ - early + g, stride_};
      decode::panel({&product, 0}, {}, {0, count}, std::min({step, end - g, own.rows()}));
    }
    for (long t = 0; t < count; ++t)
      memcpy(out + t * stride_, turned_ + (first + t) * turned_size_, turned_size_ * sizeof(float));
    for (long t = 0; t < count; t += PANEL_KEYS) {
      const float* rows = out + t * stride_;
      Products::pack(a_, {rows, stride_}, {rows + a_.key_size, stride_},
                     std::min(PANEL_KEYS, count - t), packed + (first + t) / PANEL_KEYS * unit);
    }
  }

 private:
  const QuantizedRows& codes() const { return rows_.codes(matrix_.planes); }
  size_t whole_bytes() const {
    return matrix_.quantized() ? 0 : aligned(a_.keys * size_ * long(sizeof(float)));
  }
  size_t code_bytes() const {
    if (!matrix_.quantized()) return 0;
    return aligned(rows_bytes(a_.keys, size_, matrix_.planes.format.row_group()));
  }
  size_t turned_bytes() const { return aligned(a_.keys * turned_size_ * long(sizeof(float))); }
  long panel_rows() const {  // whose codes fit the cache
    if (!matrix_.quantized()) return decode::WIDEST;
    const long fit = UNPACKED_PANEL / Panel::unpacked_bytes(matrix_.planes, 1);
    return BLOCK_ROWS * std::max(1l, std::min(fit, MAX_PANEL_BLOCKS));
  }

  const Attend& a_;
  const Latents& latents_;
  const decode::Matrix& matrix_;
  const long size_, turned_size_, width_, stride_;
  decode::Rows rows_{};
  float* turned_ = nullptr;
};
