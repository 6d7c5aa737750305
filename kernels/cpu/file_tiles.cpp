// See file_tiles.h. A tile goes superblock by superblock (256 columns): the scales and offsets of its
// groups become floats first, whatever their kind, so that the loop over the codes knows only where the
// planes are and whether a group is half a chunk. A row's sums have one order in every tile.
#include "file_tiles.h"

namespace file_codes {

namespace {

constexpr int UNITS = 2 * SUPER_CHUNKS;  // groups of a superblock, at most

// sum + the products of codes below 128 with activations. No pair of products saturates maddubs.
static inline vi dot_small(vi sum, vu codes, int32_t x) {
#if defined(VNNI)
  return dot(sum, codes, x);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(x));
  return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  return dot(sum, codes ^ 0x80808080u, x);
#endif
}

// The planes of a prefix of BITS bits, as codes of so many bits.
template <int BITS>
struct Planes {
  static constexpr bool WIDE = BITS == 8;  // codes from 128 on
  static constexpr int FIRST = BITS < 4 ? 2 : 4, REST = BITS - FIRST;
  const uint8_t *plane[2], *next[2];

  static vu masked(vu v, int mask) { return v & uint32_t(mask * 0x01010101u); }

  vu vector(int p, int bits, long chunk, int v, int lane) const {
    return load<vu>(plane[p] + (chunk * bits + v) * STEP_BYTES + lane);
  }

  // Codes of the steps of half a chunk, of the rows of a slice.
  void load_steps(int slice, long chunk, int half, vu* code) const {
    const int lane = slice * LANES * 4;
    if (lane == 0 && half == 0) {
      UNROLL for (int v = 0; v < FIRST; ++v)
        __builtin_prefetch(next[0] + (chunk * FIRST + v) * STEP_BYTES, 0, 2);
      UNROLL for (int v = 0; v < REST; ++v)
        __builtin_prefetch(next[1] + (chunk * REST + v) * STEP_BYTES, 0, 2);
    }
    constexpr int MASK = (1 << FIRST) - 1;
    if constexpr (FIRST == 2) {
      const vu v = vector(0, 2, chunk, half, lane);
      UNROLL for (int j = 0; j < STEPS; ++j) code[j] = moved(v, 6 - 2 * j, REST);
    } else {
      UNROLL for (int j = 0; j < STEPS; j += 2) {
        const vu v = vector(0, 4, chunk, 2 * half + j / 2, lane);
        code[j] = moved(v, 0, REST), code[j + 1] = moved(v, 4, REST);
      }
    }
    if constexpr (REST == 0) {
      UNROLL for (int j = 0; j < STEPS; ++j) code[j] = masked(code[j], MASK);
    } else if constexpr (REST == 4) {
      UNROLL for (int j = 0; j < STEPS; j += 2) {
        const vu v = vector(1, 4, chunk, 2 * half + j / 2, lane);
        code[j] = choose(0xF0, code[j], v), code[j + 1] = choose(0xF0, code[j + 1], v >> 4);
      }
    } else {
      const vu v = vector(1, REST, chunk, REST == 2 ? half : 0, lane);
      UNROLL for (int j = 0; j < STEPS; ++j) {
        const int place = REST == 2 ? 6 - 2 * j : 7 - 2 * j - half;
        code[j] = masked(choose(MASK << REST, code[j], moved(v, place, 0)), (1 << BITS) - 1);
      }
    }
  }

  // The bits that are at `from`, at `to`, and others around them.
  static vu moved(vu v, int from, int to) { return from > to ? v >> (from - to) : v << (to - from); }
};

// Unpacked codes, one byte each.
template <bool MANY_BITS>
struct Bytes {
  static constexpr bool WIDE = MANY_BITS;
  const uint8_t* codes;

  void load_steps(int slice, long chunk, int half, vu* code) const {
    const uint8_t* p = codes + (chunk * 2 + half) * STEPS * STEP_BYTES + slice * LANES * 4;
    UNROLL for (int j = 0; j < STEPS; ++j) code[j] = load<vu>(p + j * STEP_BYTES);
  }
};

// What the codes of a superblock are multiplied by, for the rows of a slice: a group's products with
// codes as the kernel has them times `scale`, and its activations' sum times `offset`.
struct Floats {
  alignas(64) float scale[UNITS][LANES], offset[UNITS][LANES];
};

// Of a matrix: how the codes that a kernel has, c, stand for those of the file, 2^missing c + shift.
struct Codes {
  float factor, shift;

  Codes(const PlaneMatrix& w, bool wide) {
    const int first = w.format.first_bits();
    const int missing = w.planes < w.format.most_planes() ? w.format.bits - first : 0;
    factor = float(1 << missing);
    shift = (factor - 1) / 2 - (w.format.centred() ? float(1 << (w.format.bits - 1)) : 0.0f) +
            (wide ? BELOW : 0.0f);  // `dot` subtracts BELOW from wide codes
  }
};

// LANES bytes as integers; compilers take many steps for __builtin_convertvector here.
static inline vi widen(const uint8_t* p, bool is_signed) {
#if defined(__AVX512F__)
  const __m128i bytes = load<__m128i>(p);
  return (vi)(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return (vi)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  typedef uint8_t unsigned_bytes __attribute__((vector_size(LANES)));
  typedef int8_t signed_bytes __attribute__((vector_size(LANES)));
  return is_signed ? __builtin_convertvector(load<signed_bytes>(p), vi)
                   : __builtin_convertvector(load<unsigned_bytes>(p), vi);
#endif
}

static inline vf to_float(vi v) { return __builtin_convertvector(v, vf); }

// The numbers of `count` groups from `from` on, which is where a superblock's begin.
static inline void read_scales(const PlaneFormat& format, const Codes& codes, const uint8_t* from,
                               int slice, long count, Floats& to) {
  const long row = slice * LANES;
  const auto half = [&](const uint8_t* p) { return from_fp16(load<vh>(p + 2 * row)); };
  const auto put = [&](long group, vf scale, vf offset) {
    store(to.scale[group], scale), store(to.offset[group], offset);
  };
  const vf factor = splat(codes.factor), shift = splat(codes.shift);
  switch (format.scales) {
    case CENTRED:
      for (long g = 0; g < count; ++g, from += 32) {
        const vf scale = half(from);
        put(g, scale * factor, scale * shift);
      }
      return;
    case OFFSET:
      for (long g = 0; g < count; ++g, from += 64) {
        const vf scale = half(from);
        put(g, scale * factor, fused(scale, shift, half(from + 32)));
      }
      return;
    case SUPER: {
      const vf scale = half(from), a = scale * factor, b = scale * shift;
      for (long g = 0; g < count; ++g) {
        const vf own = to_float(widen(from + 32 + g * 16 + row, true));
        put(g, own * a, own * b);
      }
      return;
    }
    default: {
      const vf scale = half(from), minimum = -half(from + 32);
      const vf a = scale * factor, b = scale * shift;
      from += 64;
      if (format.scales == SUPER_OFFSET) {
        for (long g = 0; g < count; ++g, from += 32) {
          const vf own = to_float(widen(from + row, false));
          const vf least = to_float(widen(from + 16 + row, false));
          put(g, own * a, fused(own, b, minimum * least));
        }
        return;
      }
      for (long g = 0; g < count; ++g, from += 16) {
        const vi both = widen(from + row, false);
        const vf own = to_float(both & 15), least = to_float(both >> 4);
        put(g, own * a, fused(own, b, minimum * least));
      }
    }
  }
}

// Of an activation row: the scales of a superblock's chunks twice, and those times the sums of the two
// halves of a chunk; or of all of it, twice.
struct RowFloats {
  alignas(64) float scale[UNITS], sum[UNITS];

  void take(const QuantizedRows& x, long first, long row, bool halves) {
    const int8_t* from = x.scale_at(first) + row * x.stride;
    UNROLL for (int u = 0; u < UNITS; u += LANES) {
#define TWICE(o) o, o, o + 2, o + 2
#define OTHER(o) o + 1, o + 1, o + 3, o + 3
      const vi pairs = load<vi>(from + u * 4), own = SHUFFLE(pairs, pairs, EACH_QUAD(OTHER));
      const vi scales = SHUFFLE(pairs, pairs, EACH_QUAD(TWICE));
#undef TWICE
#undef OTHER
      const vi all = (own << 16) >> 16, half = own >> 16;
      vi second = {};
      for (int l = 1; l < LANES; l += 2) second[l] = -1;
      const vi sums = halves ? (second & (all - half)) | (~second & half) : all;
      store(scale + u, bits<vf>(scales));
      store(sum + u, bits<vf>(scales) * __builtin_convertvector(sums, vf));
    }
  }
};

// Sums of up to ROWS rows with one block; `numbers` are its scales. HALVES: a group is half a chunk.
template <int ROWS, bool HALVES, class Source>
static inline void tile(long count, const QuantizedRows& x, const PlaneMatrix& w,
                        const Source& source, const uint8_t* numbers, const uint8_t* next_numbers,
                        float* out, long stride) {
  constexpr int GROUPS = HALVES ? 2 : 1;  // of a chunk
  const Codes codes(w, Source::WIDE);
  const long chunks = w.chunks(), super = w.format.super_bytes();
  const long a_group = HALVES ? 1 : w.format.group_size / CHUNK;
  vf total[SLICES][ROWS] = {};
  RowFloats rows[ROWS];
  Floats floats;
  for (long first = 0; first < chunks; first += SUPER_CHUNKS) {
    const long here = chunks - first < SUPER_CHUNKS ? chunks - first : SUPER_CHUNKS;
    UNROLL for (int i = 0; i < ROWS; ++i) rows[i].take(x, first, i < count ? i : count - 1, HALVES);
    for (long line = 0; line < super; line += 64) __builtin_prefetch(next_numbers + line, 0, 2);
    UNROLL for (int s = 0; s < SLICES; ++s) {
      const long groups = (here * GROUPS + a_group - 1) / a_group;
      read_scales(w.format, codes, numbers, s, groups, floats);
      const int8_t* p = x.codes(first);
      for (long c = 0; c < here; ++c, p += CHUNK) {
        vi sum[ROWS] = {};
        UNROLL for (int half = 0; half < 2; ++half) {
          vu code[STEPS];
          source.load_steps(s, first + c, half, code);
          UNROLL for (int j = 0; j < STEPS; ++j)
            UNROLL for (int i = 0; i < ROWS; ++i) {
              int32_t v;
              memcpy(&v, p + (i < count ? i : count - 1) * x.stride + (half * STEPS + j) * 4,
                     sizeof v);
              sum[i] = Source::WIDE ? dot(sum[i], code[j], v) : dot_small(sum[i], code[j], v);
            }
          if (!HALVES && half == 0) continue;
          const vf scale = load<vf>(floats.scale[HALVES ? 2 * c + half : c / a_group]);
          UNROLL for (int i = 0; i < ROWS; ++i) {
            total[s][i] = fused(scale * rows[i].scale[2 * c],
                                __builtin_convertvector(sum[i], vf), total[s][i]);
            sum[i] = vi{};
          }
        }
      }
      for (long u = 0; u < here * GROUPS; ++u) {
        const vf offset = load<vf>(floats.offset[u / a_group]);
        UNROLL for (int i = 0; i < ROWS; ++i)
          total[s][i] =
              fused(offset, splat(rows[i].sum[HALVES ? u : 2 * u]), total[s][i]);
      }
    }
    numbers += super, next_numbers += super;
  }
  UNROLL for (int s = 0; s < SLICES; ++s)
    UNROLL for (int i = 0; i < ROWS; ++i)
      if (i < count) store(out + i * stride + s * LANES, total[s][i]);
}

template <int ROWS, bool HALVES, class Source, class Advance>
static void each_block(long count, const QuantizedRows& x, const PlaneMatrix& w,
                       const PlaneMatrix& next, Source source, const Advance& advance, long blocks,
                       float* out, long stride) {
  const uint8_t* numbers = reinterpret_cast<const uint8_t*>(w.scales);
  const uint8_t* next_numbers = reinterpret_cast<const uint8_t*>(next.scales);
  for (long block = 0; block < blocks; ++block, advance(source)) {
    tile<ROWS, HALVES>(count, x, w, source, numbers, next_numbers, out + block * BLOCK_ROWS, stride);
    numbers += 2 * w.scale_stride(), next_numbers += 2 * w.scale_stride();
  }
}

// Tiles of 1, 2, 4 and 8 rows: one of fewer repeats its last row.
template <class Source, class Advance>
static void choose_tile(long count, const QuantizedRows& x, const PlaneMatrix& w,
                        const PlaneMatrix& next, const Source& source, const Advance& advance,
                        long blocks, float* out, long stride) {
  const auto run = [&](auto rows) {
    if (w.format.group_size < CHUNK)
      each_block<rows.value, true>(count, x, w, next, source, advance, blocks, out, stride);
    else
      each_block<rows.value, false>(count, x, w, next, source, advance, blocks, out, stride);
  };
  if (count == 1) return run(std::integral_constant<int, 1>{});
  if (count == 2) return run(std::integral_constant<int, 2>{});
  if (count <= 4) return run(std::integral_constant<int, 4>{});
  if constexpr (TILE_ROWS > 4) run(std::integral_constant<int, TILE_ROWS>{});
}

template <class Run>
static void with_planes(const PlaneMatrix& w, const PlaneMatrix& next, const Run& run) {
  const auto source = [&](auto bits) {
    Planes<bits.value> made{{}, {}};
    for (int p = 0; p < w.planes; ++p) {
      made.plane[p] = w.plane[p];
      made.next[p] = p < next.planes ? next.plane[p] : w.plane[p];
    }
    const long strides[] = {w.plane_stride(0), w.plane_stride(1)};
    run(made, [=](Planes<bits.value>& moving) {
      for (int p = 0; p < 2; ++p) moving.plane[p] += strides[p], moving.next[p] += strides[p];
    });
  };
  const int bits = w.planes < w.format.most_planes() ? w.format.first_bits() : w.format.bits;
  switch (bits) {
    case 2: return source(std::integral_constant<int, 2>{});
    case 3: return source(std::integral_constant<int, 3>{});
    case 4: return source(std::integral_constant<int, 4>{});
    case 5: return source(std::integral_constant<int, 5>{});
    case 6: return source(std::integral_constant<int, 6>{});
    default: return source(std::integral_constant<int, 8>{});
  }
}

}  // namespace

void multiply(const PlaneMatrix& w, const PlaneMatrix& next, const uint8_t* codes, long blocks,
              long count, const QuantizedRows& x, float* out, long stride) {
  const auto run = [&](const auto& source, const auto& advance) {
    choose_tile(count, x, w, next, source, advance, blocks, out, stride);
  };
  if (!codes) return with_planes(w, next, run);
  const long a_block = w.chunks() * CHUNK * BLOCK_ROWS;
  const bool wide = w.format.bits == 8 && w.planes == w.format.most_planes();
  const auto advance = [=](auto& bytes) { bytes.codes += a_block; };
  wide ? run(Bytes<true>{codes}, advance) : run(Bytes<false>{codes}, advance);
}

void unpack(const PlaneMatrix& w, const PlaneMatrix& next, long blocks, uint8_t* to) {
  with_planes(w, next, [&](const auto& source, const auto&) {
    for (long chunk = 0; chunk < blocks * w.chunks(); ++chunk)
      UNROLL for (int half = 0; half < 2; ++half, to += STEPS * STEP_BYTES)
        for (int s = 0; s < SLICES; ++s) {
          vu code[STEPS];
          source.load_steps(s, chunk, half, code);
          for (int j = 0; j < STEPS; ++j) store(to + j * STEP_BYTES + s * LANES * 4, code[j]);
        }
  });
}

// The weights of row `row` of the first block.
static void read_row(const PlaneMatrix& w, int row, float* out) {
  with_planes(w, w, [&](const auto& source, const auto&) {
    const Codes codes(w, false);
    const int slice = row / LANES, lane = row % LANES;
    const uint8_t* numbers = reinterpret_cast<const uint8_t*>(w.scales);
    Floats floats;
    for (long first = 0; first < w.columns; first += SUPERBLOCK, numbers += w.format.super_bytes()) {
      const long here = w.columns - first < SUPERBLOCK ? w.columns - first : SUPERBLOCK;
      const long group = w.format.group_size;
      read_scales(w.format, codes, numbers, slice, (here + group - 1) / group, floats);
      for (long c = 0; c < here; c += CHUNK / 2) {
        vu code[STEPS];
        uint8_t own[STEPS][4];
        source.load_steps(slice, (first + c) / CHUNK, c % CHUNK != 0, code);
        for (int j = 0; j < STEPS; ++j)
          memcpy(own[j], reinterpret_cast<const char*>(code + j) + 4 * lane, 4);
        const float scale = floats.scale[c / group][lane], offset = floats.offset[c / group][lane];
        for (long k = c; k < here && k < c + CHUNK / 2; ++k)
          out[first + k] = scale * own[(k - c) / 4][k % 4] + offset;
      }
    }
  });
}

}  // namespace file_codes

// out (count, K) fp32 = rows of a matrix with a file's own codes, by their numbers.
extern "C" void moe_file_rows(const PlaneMatrix* w, const int64_t* rows, int64_t count, float* out) {
  for (long i = 0; i < count; ++i)
    file_codes::read_row(w->from(rows[i] / BLOCK_ROWS), int(rows[i] % BLOCK_ROWS),
                         out + i * w->columns);
}
