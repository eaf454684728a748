// AMX-BF16 in plain C++, for processors without it: include it before the kernels.
#pragma once
#if defined(__AVX512BF16__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define __AMX_BF16__ 1

namespace matrices {

struct Sizes {
  uint8_t palette, start, unused[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
inline thread_local Sizes sizes;  // all 0: no instruction has any effect
inline thread_local char values[8][16][64];

inline void copy(char* to, int64_t to_step, const char* from, int64_t from_step, int matrix) {
  for (int row = 0; row < sizes.rows[matrix]; row++)
    std::memcpy(to + row * to_step, from + row * from_step, sizes.row_bytes[matrix]);
}
inline void zero(int matrix) { std::memset(values[matrix], 0, sizeof values[matrix]); }
inline void load(int matrix, const void* from, int64_t step) {
  zero(matrix);
  copy(values[matrix][0], 64, (const char*)from, step, matrix);
}
inline void store(int matrix, void* to, int64_t step) {
  copy((char*)to, step, values[matrix][0], 64, matrix);
}

inline float flushed(float x) { return x < 0x1p-126f && x > -0x1p-126f ? x * 0 : x; }
inline float brain(const char* at) {  // a bfloat16
  uint16_t half;
  std::memcpy(&half, at, 2);
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return flushed(value);
}

// Adds the products of pairs to the sums, the even inputs of a pair first.
inline void multiply(int sums, int rows, int weights) {
  for (int m = 0; m < sizes.rows[sums]; m++)
    for (int n = 0; n < sizes.row_bytes[sums] / 4; n++) {
      float sum;
      std::memcpy(&sum, values[sums][m] + 4 * n, 4);
      for (int k = 0; k < sizes.row_bytes[rows] / 4; k++)
        for (int half = 0; half < 2; half++) {
          const float weight = brain(values[weights][k] + 4 * n + 2 * half);
          sum = flushed(__builtin_fmaf(brain(values[rows][m] + 4 * k + 2 * half), weight, sum));
        }
      std::memcpy(values[sums][m] + 4 * n, &sum, 4);
    }
}

}  // namespace matrices

#define _tile_loadconfig(from) std::memcpy(&matrices::sizes, from, sizeof matrices::sizes)
#define _tile_release() (matrices::sizes = {})
#define _tile_zero(matrix) matrices::zero(matrix)
#define _tile_loadd(matrix, from, step) matrices::load(matrix, from, step)
#define _tile_stored(matrix, to, step) matrices::store(matrix, to, step)
#define _tile_dpbf16ps(sums, rows, weights) matrices::multiply(sums, rows, weights)
#endif
