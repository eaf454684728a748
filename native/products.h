// Products of rows with packed weights.
#pragma once
#include "vectors.h"

namespace specjax {
namespace {

#if defined(__aarch64__)
constexpr int kTile = 4;  // rows of a tile, at most
#else
constexpr int kTile = kBytes == 64 ? 16 : kBytes == 32 ? 4 : 2;
#endif
#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;  // products of pairs of bfloat16
#else
constexpr bool kHasPairs = false;
#endif
#if defined(__AVX512BF16__) && defined(__AMX_BF16__)
constexpr bool kHasMatrices = true;  // which take the pairs of a row side by side
#else
constexpr bool kHasMatrices = false;
#endif

// Rows as products read them: in tiles, whose rows lie side by side for each pair of inputs.
struct Rows {
  std::vector<uint32_t> words;  // [tiles, pairs, tile], of pairs of bfloat16 or of two floats
  int64_t count, pairs, tile;
  bool is_bfloat16;

  Rows(int64_t count, int64_t pairs, Type type)
      : count(count), pairs(pairs), tile(1), is_bfloat16(kHasPairs && type == Type::kBfloat16) {
    const bool is_for_matrices = kHasMatrices && is_bfloat16;
    while (tile < count && tile < kTile && !is_for_matrices) tile *= 2;
    words.resize(padded(count, is_for_matrices ? 16 : tile) * pairs * (is_bfloat16 ? 1 : 2));
  }
  int64_t place(int64_t row, int64_t pair) const {
    return (row / tile * pairs + pair) * tile + row % tile;
  }
  // Writes an even number of rounded values of a row from input `at` on.
  void put(int64_t row, int64_t at, const float* values, int64_t size) {
    size = std::min(size, 2 * pairs - at);
    uint32_t* to = words.data() + place(row, at / 2) * (is_bfloat16 ? 1 : 2);
    for (int64_t i = 0; i < size; i += 2) {
      uint32_t bits[2];
      std::memcpy(bits, values + i, 8);
      if (is_bfloat16) {
        to[i / 2 * tile] = bits[0] >> 16 | (bits[1] & 0xffff0000u);
      } else {
        to[i * tile] = bits[0];
        to[i * tile + 1] = bits[1];
      }
    }
  }
};

// Readers give the weights of a pair of inputs, for lanes [v * kLanes, ...) of a panel, and add their
// products with a pair of a row to a sum. They unroll kStep pairs.
struct Floating32 {
  static constexpr int kBytesOfPair = 128, kStep = 1;
  static EvenAndOdd read(const char* panel, int64_t pair, int, int v) {
    const char* data = panel + pair * 128 + v * kBytes;
    return {*(const Floats*)data, *(const Floats*)(data + 64)};
  }
};

struct Brain {
  static constexpr int kBytesOfPair = 64, kStep = 1;
  static EvenAndOdd read(const char* panel, int64_t pair, int, int v) {
    const Words words = *(const Words*)(panel + pair * 64 + v * kBytes);
    return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
  }
};

struct Half {
  static constexpr int kBytesOfPair = 64, kStep = 1;
  static EvenAndOdd read(const char* panel, int64_t pair, int, int v) {
    return widened_pairs(*(const Words*)(panel + pair * 64 + v * kBytes));
  }
};

struct Int8 {
  static constexpr int kBytesOfPair = 32, kStep = 1;
  static EvenAndOdd read(const char* panel, int64_t pair, int, int v) {
    const char* data = panel + pair * 32 + v * kBytes / 2;
    // Below 2^23 + 256, the last bits of a float are a whole number, here 128 more than a code.
    const auto code = [](Words bits) { return (Floats)(bits ^ 0x4b000080u) - (0x1p23f + 128); };
#if defined(__AVX2__) && !defined(__AVX512F__)  // where shifts are slow
    const __m256i codes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)data));
    const Words even = Words{0, 2, 4, 6, 8, 10, 12, 14} | 0x80808000u;
    return {code((Words)_mm256_shuffle_epi8(codes, (__m256i)even)),
            code((Words)_mm256_shuffle_epi8(codes, (__m256i)(even + 1)))};
#else
    const Words codes = widened(*(const Halves*)data);
    return {code(codes & 0xffu), code(codes >> 8)};
#endif
  }
};

struct Int4 {
  static constexpr int kBytesOfPair = 16, kStep = 4;
  static EvenAndOdd read(const char* panel, int64_t pair, int step, int v) {
    const Words words = *(const Words*)(panel + pair * 16 + v * kBytes);
    return {__builtin_convertvector((Integers)(words << (28 - 4 * step)) >> 28, Floats),
            __builtin_convertvector((Integers)(words << (12 - 4 * step)) >> 28, Floats)};
  }
};

// Multiplies rows of floats, one input after the other. Only weights from memory are fetched ahead.
template <class Reader, bool kFromMemory = true>
struct Chain : Reader {
  static constexpr bool kFetches = kFromMemory;
  static constexpr bool kWidens = Reader::kBytesOfPair < 128;  // into floats
  struct Row {
    float even, odd;
  };
  static void add(Floats& sum, const Row* row, EvenAndOdd weights) {
    sum += broadcast(&row->even) * weights.even;
    sum += broadcast(&row->odd) * weights.odd;
  }
};

#if defined(__AVX512BF16__)
// Multiply rows of bfloat16 pair by pair, with codes that bfloat16 holds exactly.
struct Dot {
  static constexpr bool kFetches = true, kWidens = false;
  using Row = uint32_t;
  static void add(Floats& sum, const Row* row, __m512bh weights) {
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(*row), weights);
  }
};

struct BrainDot : Dot {
  static constexpr int kBytesOfPair = 64, kStep = 1;
  static __m512bh read(const char* panel, int64_t pair, int, int) {
    return (__m512bh)_mm512_loadu_si512(panel + pair * 64);
  }
};

struct Int8Dot : Dot {
  static constexpr int kBytesOfPair = 32, kStep = 1;
  static __m512bh read(const char* panel, int64_t pair, int, int) {
    const __m128i* codes = (const __m128i*)(panel + pair * 32);
    const auto widened = [](const __m128i* part) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(part)));
    };
    return _mm512_cvtne2ps_pbh(widened(codes + 1), widened(codes));
  }
};

struct Int4Dot : Dot {
  static constexpr int kBytesOfPair = 16, kStep = 4;
  static __m512bh read(const char* panel, int64_t pair, int step, int) {
    // Looks the low 5 bits of each half word up, of which the highest does not matter.
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, (short)0xc100, (short)0xc0e0,
        (short)0xc0c0, (short)0xc0a0, (short)0xc080, (short)0xc040, (short)0xc000, (short)0xbf80));
    const __m512i words = _mm512_loadu_si512(panel + pair * 16);
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * step), table);
  }
};
#endif

// Adds pairs [from, to) of the inputs to the sums of M rows and P panels. It is always inlined, and
// its loop over all sums is a single one, so that compilers keep them in registers. It fetches the
// panels that follow, since sums in the order of their inputs leave memory waiting.
template <class R, int M, int P>
__attribute__((always_inline)) inline void add_pairs(const char* panels, int64_t panel_bytes,
                                                     const typename R::Row* rows, int64_t stride,
                                                     int64_t from, int64_t to,
                                                     Floats (&sums)[M][P][kVectors]) {
  constexpr int kSums = M * P * kVectors;
  Floats kept[kSums], *const given = &sums[0][0][0];
#pragma GCC unroll 64
  for (int n = 0; n < kSums; n++) kept[n] = given[n];
  for (int64_t i = from; i < to; i += R::kStep) {
#pragma GCC unroll 64
    for (int n = 0; n < kSums * R::kStep; n++) {
      const int v = n % kVectors, m = n / kVectors % M, step = n / kVectors / M % R::kStep;
      const int p = n / kVectors / M / R::kStep;
      const char* panel = panels + p * panel_bytes;
      if (R::kFetches && v + m + step == 0)
        __builtin_prefetch(panel + P * panel_bytes + i * R::kBytesOfPair, 0, 2);
      R::add(kept[(m * P + p) * kVectors + v], rows + (i + step) * stride + m,
             R::read(panel, i, step, v));
    }
  }
#pragma GCC unroll 64
  for (int n = 0; n < kSums; n++) given[n] = kept[n];
}

// Computes M rows of P panels, and writes the first `count` of the rows.
template <class R, int M, int P>
void compute_tile(const Weight& weight, int64_t panel, const Rows& rows, int64_t row, int64_t count,
                  float* out, int64_t stride) {
  const int64_t panel_bytes = weight.pairs * R::kBytesOfPair;
  const char* panels = weight.panels + panel * panel_bytes;
  const auto* values = (const typename R::Row*)rows.words.data() + rows.place(row, 0);
  Floats sums[M][P][kVectors] = {};
  if (weight.scales.data == nullptr) {
    add_pairs<R, M, P>(panels, panel_bytes, values, rows.tile, 0, weight.pairs, sums);
  } else {
    const int64_t group = weight.pairs / weight.groups;
    for (int64_t g = 0; g < weight.groups; g++) {
      Floats part[M][P][kVectors] = {};
      add_pairs<R, M, P>(panels, panel_bytes, values, rows.tile, g * group, (g + 1) * group,
                         part);
      for (int p = 0; p < P; p++)
        for (int v = 0; v < kVectors; v++) {
          const int64_t at = ((panel + p) * weight.groups + g) * kPanel + v * kLanes;
          const Floats scale = load(weight.scales, at);
          for (int m = 0; m < M; m++) sums[m][p][v] += part[m][p][v] * scale;
        }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
    if (m < count)
#pragma GCC unroll 4
      for (int p = 0; p < P; p++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++)
          *(Floats*)(out + (row + m) * stride + p * kPanel + v * kLanes) = sums[m][p][v];
}

// Calls `run` with the least power of two that is at least `count`, as a constant.
template <class Run>
inline void with_size(int64_t count, Run run) {
  if (count == 1) return run(std::integral_constant<int, 1>());
  if (count == 2) return run(std::integral_constant<int, 2>());
  if (count <= 4) return run(std::integral_constant<int, 4>());
  if (count <= 8) return run(std::integral_constant<int, 8>());
  run(std::integral_constant<int, 16>());
}

// Computes all rows of a panel, in tiles.
template <class R>
void compute_rows(const Weight& weight, int64_t panel, const Rows& rows, float* out, int64_t stride) {
  for (int64_t row = 0; row < rows.count; row += rows.tile) {
    const int64_t count = std::min(rows.tile, rows.count - row);
    with_size(count, [&](auto size) {
      compute_tile<R, std::min(size.value, kTile), 1>(weight, panel, rows, row, count, out, stride);
    });
  }
}

// Returns one panel as floats, which it writes to `space`.
template <class R>
Weight widened_panel(const Weight& weight, int64_t panel, float* space) {
  const char* data = weight.panels + panel * weight.pairs * R::kBytesOfPair;
  for (int64_t i = 0; i < weight.pairs; i += R::kStep) {
    __builtin_prefetch(data + (weight.pairs + i) * R::kBytesOfPair, 0, 2);
#pragma GCC unroll 16
    for (int n = 0; n < R::kStep * kVectors; n++) {
      const EvenAndOdd values = R::read(data, i, n / kVectors, n % kVectors);
      float* to = space + (i + n / kVectors) * 2 * kPanel + n % kVectors * kLanes;
      *(Floats*)to = values.even;
      *(Floats*)(to + kPanel) = values.odd;
    }
  }
  Weight wide = weight;
  wide.panels = (const char*)space;
  if (wide.scales.data) wide.scales = wide.scales.from(panel * weight.groups * kPanel);
  return wide;
}

// Computes panels [first, last) of all rows; `out` points to the first row's sums of the first one.
template <class R>
void compute_panels(const Weight& weight, int64_t first, int64_t last, const Rows& rows, float* out,
                    int64_t stride) {
  int64_t panel = first;
  // Reading one stream is fastest. Only a single row of int8 is bound by the latency of its sums, which
  // a second panel hides.
  if constexpr (kBytes > 16 && R::kBytesOfPair == 32)
    for (; rows.count == 1 && panel + 2 <= last; panel += 2)
      compute_tile<R, 1, 2>(weight, panel, rows, 0, 1, out + (panel - first) * kPanel, stride);
  // With many tiles it is faster to widen a panel once than in each of them.
  if constexpr (R::kWidens)
    if (rows.count > 4 * rows.tile) {
      thread_local std::vector<float> space;
      space.resize(std::max<size_t>(space.size(), weight.pairs * 2 * kPanel));
      for (; panel < last; panel++)
        compute_rows<Chain<Floating32, false>>(widened_panel<R>(weight, panel, space.data()), 0,
                                               rows, out + (panel - first) * kPanel, stride);
    }
  for (; panel < last; panel++)
    compute_rows<R>(weight, panel, rows, out + (panel - first) * kPanel, stride);
}

#if defined(__AVX512BF16__) && defined(__AMX_BF16__)
// Matrices 0 to 3 are sums of panels; 4 and 5 are rows and weights, 6 and 7 those of the last pairs.
struct alignas(64) MatrixSizes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  explicit MatrixSizes(int rest) {
    if (rest) row_bytes[6] = 4 * rest, rows[7] = rest;
  }
};

// Compilers do not know what matrices read.
inline void finish_memory() { __asm__ volatile("" ::: "memory"); }

// Returns `count` pairs of a panel as bfloat16, by way of `space` if they are codes.
template <class R>
const void* brain_pairs(const char* panel, int64_t pair, int64_t count, __m512i* space) {
  if (R::kBytesOfPair == 64) return panel + pair * 64;
  finish_memory();
  for (int64_t i = 0; i < count; i++) {
    const int64_t step = i % R::kStep;
    space[i] = (__m512i)R::read(panel, pair + i - step, step, 0);
  }
  finish_memory();
  return space;
}

#define ADD_MATRICES(sums, rows, weights)                                        \
  if (P > sums) {                                                                \
    _tile_loadd(weights, brain_pairs<R>(panels + sums * bytes, i, left, space), 64); \
    _tile_dpbf16ps(sums, rows, weights);                                         \
  }

// Computes 16 rows of P panels, and writes the first `count` of the rows.
template <class R, int P>
void compute_matrices(const Weight& weight, int64_t panel, const Rows& rows, int64_t row,
                      int64_t count, float* out, int64_t stride) {
  const int64_t bytes = weight.pairs * R::kBytesOfPair, group = weight.pairs / weight.groups;
  const char* panels = weight.panels + panel * bytes;
  __m512i space[16];
  Floats part[4][16], sums[P][16] = {};
  for (int64_t g = 0; g < weight.groups; g++) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = g * group; i < (g + 1) * group; i += 16) {
      const int64_t left = std::min<int64_t>((g + 1) * group - i, 16);
      const uint32_t* from = rows.words.data() + rows.place(row, i);
      if (left == 16) {
        _tile_loadd(4, from, 4 * weight.pairs);
        ADD_MATRICES(0, 4, 5) ADD_MATRICES(1, 4, 5) ADD_MATRICES(2, 4, 5) ADD_MATRICES(3, 4, 5)
      } else {
        _tile_loadd(6, from, 4 * weight.pairs);
        ADD_MATRICES(0, 6, 7) ADD_MATRICES(1, 6, 7) ADD_MATRICES(2, 6, 7) ADD_MATRICES(3, 6, 7)
      }
    }
    _tile_stored(0, part[0], 64);
    _tile_stored(1, part[1], 64);
    _tile_stored(2, part[2], 64);
    _tile_stored(3, part[3], 64);
    finish_memory();
    for (int p = 0; p < P; p++) {
      const int64_t at = ((panel + p) * weight.groups + g) * kPanel;
      const Floats scale = weight.scales.data ? load(weight.scales, at) : Floats{} + 1.0f;
      for (int m = 0; m < 16; m++) sums[p][m] += part[p][m] * scale;
    }
  }
  for (int64_t m = 0; m < count; m++)
    for (int p = 0; p < P; p++) *(Floats*)(out + (row + m) * stride + p * kPanel) = sums[p][m];
}

template <class R>
void multiply_matrices(const Weight& weight, int64_t first, int64_t last, const Rows& rows,
                       float* out, int64_t stride) {
  const MatrixSizes sizes(weight.pairs / weight.groups % 16);
  finish_memory();
  _tile_loadconfig(&sizes);
  for (int64_t row = 0; row < rows.count; row += 16) {
    const int64_t count = std::min<int64_t>(rows.count - row, 16);
    int64_t panel = first;
    for (; panel + 4 <= last; panel += 4)
      compute_matrices<R, 4>(weight, panel, rows, row, count, out + (panel - first) * kPanel, stride);
    for (; panel < last; panel++)
      compute_matrices<R, 1>(weight, panel, rows, row, count, out + (panel - first) * kPanel, stride);
  }
  _tile_release();
}
#endif

void multiply(const Weight& weight, int64_t first, int64_t last, const Rows& rows, float* out,
              int64_t stride) {
  const auto run = [&](auto reader) {
    compute_panels<decltype(reader)>(weight, first, last, rows, out, stride);
  };
#if defined(__AVX512BF16__)
  const auto run_pairs = [&](auto reader) {
#if defined(__AMX_BF16__)
    multiply_matrices<decltype(reader)>(weight, first, last, rows, out, stride);
#else
    run(reader);
#endif
  };
  if (rows.is_bfloat16) {
    if (weight.kind == Kind::kBfloat16) run_pairs(BrainDot());
    if (weight.kind == Kind::kInt8) run_pairs(Int8Dot());
    if (weight.kind == Kind::kInt4) run_pairs(Int4Dot());
    return;
  }
#endif
  if (weight.kind == Kind::kBfloat16) run(Chain<Brain>());
  if (weight.kind == Kind::kFloat16) run(Chain<Half>());
  if (weight.kind == Kind::kFloat32) run(Chain<Floating32>());
  if (weight.kind == Kind::kInt8) run(Chain<Int8>());
  if (weight.kind == Kind::kInt4) run(Chain<Int4>());
}

}  // namespace
}  // namespace specjax
