// The kernels of one instruction set. Compiled once for each: INSTRUCTIONS names it, and the
// compiler's flags decide the width of its vectors.
#include "vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace specjax {
namespace {

constexpr int kMaxRows = kBytes == 64 ? 8 : 4, kVectors = kPanel / kLanes;  // vectors of a panel

typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

// Each reader gives the weights of one pair of inputs, for lanes [v * kLanes, ...) of the panel.
struct Bfloat16 {
  static constexpr int64_t pair_bytes = kPanel * 4;
  static void read(const char* pair, int v, Floats& even, Floats& odd) {
    Words words = *(const Words*)(pair + v * kBytes);
    even = as_floats(words << 16);
    odd = as_floats(words & 0xffff0000u);
  }
};

struct Float16 {
  static constexpr int64_t pair_bytes = kPanel * 4;
  static Floats widened(Words half) {  // exact, denormals, infinities and NaN included
    Words magnitude = (half & 0x7fffu) << 13;
    Floats value = as_floats(magnitude) * 0x1p112f;
    Words special = (Words)(magnitude >= 0x0f800000u) & (magnitude | 0x7f800000u);
    return as_floats((Words)value | special | (half & 0x8000u) << 16);
  }
  static void read(const char* pair, int v, Floats& even, Floats& odd) {
    Words words = *(const Words*)(pair + v * kBytes);
    even = widened(words & 0xffffu);
    odd = widened(words >> 16);
  }
};

struct Float32 {
  static constexpr int64_t pair_bytes = kPanel * 8;
  static void read(const char* pair, int v, Floats& even, Floats& odd) {
    even = *(const Floats*)(pair + v * kBytes);
    odd = *(const Floats*)(pair + kPanel * 4 + v * kBytes);
  }
};

struct Int8 {
  static constexpr int64_t pair_bytes = kPanel * 2;
  static void read(const char* pair, int v, Floats& even, Floats& odd) {
    even = __builtin_convertvector(*(const Bytes*)(pair + v * kLanes), Floats);
    odd = __builtin_convertvector(*(const Bytes*)(pair + kPanel + v * kLanes), Floats);
  }
};

struct Int4 {
  static constexpr int64_t pair_bytes = kPanel;
  static void read(const char* pair, int v, Floats& even, Floats& odd) {
    Bytes both = *(const Bytes*)(pair + v * kLanes);
    even = __builtin_convertvector((Bytes)(both << 4) >> 4, Floats);
    odd = __builtin_convertvector(both >> 4, Floats);
  }
};

// Adds the inputs [from, to) to the sums of M rows and P panels.
template <class Weight, int M, int P>
inline void add_inputs(const Product& product, const float* rows, const char* panels,
                       int64_t from, int64_t to, Floats (&sums)[M][P][kVectors]) {
  const int64_t panel_bytes = product.num_inputs / 2 * Weight::pair_bytes;
  for (int64_t i = from; i < to; i += 2) {
    const char* pair = panels + i / 2 * Weight::pair_bytes;
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
      __builtin_prefetch(pair + p * panel_bytes + 1024);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        Floats even, odd;
        Weight::read(pair + p * panel_bytes, v, even, odd);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const float* row = rows + m * product.num_inputs + i;
          sums[m][p][v] += row[0] * even;
          sums[m][p][v] += row[1] * odd;
        }
      }
    }
  }
}

// Computes M rows of P panels.
template <class Weight, int M, int P>
void tile(const Product& product, int64_t row, int64_t panel) {
  const char* panels =
      (const char*)product.panels + panel * (product.num_inputs / 2) * Weight::pair_bytes;
  const float* rows = product.rows + row * product.num_inputs;
  Floats sums[M][P][kVectors] = {};
  if (!product.scales) {
    add_inputs<Weight, M, P>(product, rows, panels, 0, product.num_inputs, sums);
  } else {
    const int64_t groups = product.num_inputs / product.group;
    for (int64_t g = 0; g < groups; g++) {
      Floats part[M][P][kVectors] = {};
      add_inputs<Weight, M, P>(product, rows, panels, g * product.group, (g + 1) * product.group,
                               part);
      for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++)
          for (int v = 0; v < kVectors; v++) {
            const float* scales = product.scales + ((panel + p) * groups + g) * kPanel;
            sums[m][p][v] += part[m][p][v] * *(const Floats*)(scales + v * kLanes);
          }
    }
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) {
      float* out = product.sums + (row + m) * product.num_outputs + (panel + p) * kPanel;
      for (int v = 0; v < kVectors; v++) *(Floats*)(out + v * kLanes) = sums[m][p][v];
    }
}

#if defined(__AVX512BF16__)
// vdpbf16ps adds the products of a pair to each sum: the same chain, two inputs at a time.
template <int M, int P>
void pair_tile(const Product& product, int64_t row, int64_t panel) {
  const int64_t pairs = product.num_inputs / 2;
  const uint32_t* panels = (const uint32_t*)product.panels + panel * pairs * kPanel;
  const uint32_t* rows = (const uint32_t*)product.bfloat16 + row * pairs;
  __m512 sums[M][P];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) sums[m][p] = _mm512_setzero_ps();
  for (int64_t i = 0; i < pairs; i++) {
    __m512bh weights[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
      const uint32_t* pair = panels + (p * pairs + i) * kPanel;
      __builtin_prefetch(pair + 512);
      weights[p] = (__m512bh)_mm512_loadu_si512(pair);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      __m512bh both = (__m512bh)_mm512_set1_epi32(rows[m * pairs + i]);
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) sums[m][p] = _mm512_dpbf16_ps(sums[m][p], both, weights[p]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++)
      _mm512_storeu_ps(product.sums + (row + m) * product.num_outputs + (panel + p) * kPanel,
                       sums[m][p]);
}
struct Pairs {
  template <int M, int P>
  static void compute(const Product& product, int64_t row, int64_t panel) {
    pair_tile<M, P>(product, row, panel);
  }
};
#endif

template <class Weight>
struct Chains {
  template <int M, int P>
  static void compute(const Product& product, int64_t row, int64_t panel) {
    tile<Weight, M, P>(product, row, panel);
  }
};

// Computes all rows of P panels, in tiles of at most kMaxRows.
template <class Tile, int P>
void all_rows(const Product& product, int64_t panel) {
  int64_t row = 0;
  for (; row + kMaxRows <= product.num_rows; row += kMaxRows)
    Tile::template compute<kMaxRows, P>(product, row, panel);
  switch (product.num_rows - row) {
    case 1: return Tile::template compute<1, P>(product, row, panel);
    case 2: return Tile::template compute<2, P>(product, row, panel);
    case 3: return Tile::template compute<3, P>(product, row, panel);
#if defined(__AVX512F__)
    case 4: return Tile::template compute<4, P>(product, row, panel);
    case 5: return Tile::template compute<5, P>(product, row, panel);
    case 6: return Tile::template compute<6, P>(product, row, panel);
    case 7: return Tile::template compute<7, P>(product, row, panel);
#endif
  }
}

template <class Tile>
void panels(const Product& product, int64_t first, int64_t last) {
  // Two panels at once hide the latency of their chains, if the registers hold them.
  if (kVectors == 1 || product.num_rows <= 2)
    for (; first + 2 <= last; first += 2) all_rows<Tile, 2>(product, first);
  for (; first < last; first++) all_rows<Tile, 1>(product, first);
}

}  // namespace

#define STRING(name) #name
#define NAME(name) STRING(name)
#if defined(__AVX512BF16__)
using Bfloat16Tile = Pairs;
#else
using Bfloat16Tile = Chains<Bfloat16>;
#endif
extern const Kernels TABLE(INSTRUCTIONS, ) = {
    NAME(INSTRUCTIONS),
    {panels<Bfloat16Tile>, panels<Chains<Float16>>, panels<Chains<Float32>>,
     panels<Chains<Int8>>, panels<Chains<Int4>>}};

}  // namespace specjax
