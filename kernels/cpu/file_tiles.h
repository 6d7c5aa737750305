// Products with a file's own codes: 2 to 6 or 8 bits, with scales and offsets as kernels/scales.py says.
// They are compiled once, in file_tiles.cpp, for all who use panels.
#pragma once
#include "plane_tiles.h"

namespace file_codes {

// out[i * stride + n] = x[i] . w[n] for `count` rows, at most TILE_ROWS, in groups of a chunk, and the
// rows n of the first `blocks` blocks. `codes`: from `unpack`, or null. `next`: as in Panel.
void multiply(const PlaneMatrix& w, const PlaneMatrix& next, const uint8_t* codes, long blocks,
              long count, const QuantizedRows& x, float* out, long stride);

// The codes of the first blocks, a byte each.
void unpack(const PlaneMatrix& w, const PlaneMatrix& next, long blocks, uint8_t* to);

}  // namespace file_codes
