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
#if defined(__SSE2__)
constexpr bool kHasWhole = true;  // products of pairs of whole numbers
#else
constexpr bool kHasWhole = false;
#endif

// What products read of a pair of inputs: two floats, two bfloat16, or two whole numbers of 16 bits.
enum class Form { kFloats, kBrains, kWhole };

inline Form form_of(Type type, bool is_quantised) {
  if (kHasPairs && type == Type::kBfloat16 && (kHasMatrices || !is_quantised)) return Form::kBrains;
  return kHasWhole && is_quantised && type != Type::kFloat32 ? Form::kWhole : Form::kFloats;
}

// Rows as products read them: in tiles, whose rows lie side by side for each pair of inputs. Each
// block of whole numbers has a step, a power of two that is at most 2^-14 of the largest. So numbers of
// bfloat16 that are at least 1/128 of the largest are exact.
struct Rows {
  static constexpr int64_t kBlock = 16;  // pairs of a block
  std::vector<uint32_t> words;           // [tiles, pairs, tile], of a pair or half of it
  std::vector<float> steps;              // [tiles, blocks, tile], of whole numbers
  int64_t count, pairs, tile, block;
  Form form;

  Rows(int64_t count, int64_t pairs, Type type, bool is_quantised = false, int64_t block = kBlock)
      : count(count), pairs(pairs), tile(1), block(block), form(form_of(type, is_quantised)) {
    const bool is_for_matrices = kHasMatrices && form == Form::kBrains;
    while (tile < count && tile < kTile && !is_for_matrices) tile *= 2;
    const int64_t size = padded(count, is_for_matrices ? 16 : tile);
    words.resize(size * pairs * (form == Form::kFloats ? 2 : 1));
    if (form == Form::kWhole) steps.resize(size * num_blocks());
  }
  int64_t num_blocks() const { return (pairs + block - 1) / block; }
  int64_t place(int64_t row, int64_t at, int64_t of) const {
    return (row / tile * of + at) * tile + row % tile;
  }
  int64_t place(int64_t row, int64_t pair) const { return place(row, pair, pairs); }
  // Writes an even number of rounded values of a row from input `at` on: as whole numbers, some
  // blocks or all that are left.
  void put(int64_t row, int64_t at, const float* values, int64_t size) {
    size = std::min(size, 2 * pairs - at);
    uint32_t* to = words.data() + place(row, at / 2) * (form == Form::kFloats ? 2 : 1);
    if (form == Form::kWhole) return put_whole(row, at, values, size, to);
    for (int64_t i = 0; i < size; i += 2) {
      uint32_t bits[2];
      std::memcpy(bits, values + i, 8);
      if (form == Form::kBrains) {
        to[i / 2 * tile] = bits[0] >> 16 | (bits[1] & 0xffff0000u);
      } else {
        to[i * tile] = bits[0];
        to[i * tile + 1] = bits[1];
      }
    }
  }
  void put_whole(int64_t row, int64_t at, const float* values, int64_t size, uint32_t* to) {
    for (int64_t from = 0; from < size; from += 2 * block) {
      const int64_t part = std::min(2 * block, size - from);
      uint32_t bits[2 * kBlock] = {}, top = 64u << 23;  // an exponent; all below 2^-78 is 0
      std::memcpy(bits, values + from, part * 4);
      for (const uint32_t number : bits) top = std::max(top, number & 0x7f800000u);
      const uint32_t numbers[2] = {top - (14u << 23), (268u << 23) - top};
      float step[2];  // and 1 / step
      std::memcpy(step, numbers, 8);
      steps[place(row, (at + from) / 2 / block, num_blocks())] = top < 0x7f800000u ? step[0] : NAN;
      float shifted[2 * kBlock];  // whose last bits are whole numbers
      std::memcpy(shifted, bits, sizeof bits);
      for (float& number : shifted) number = number * step[1] + 0x1.8p23f;
      std::memcpy(bits, shifted, sizeof bits);
      for (int64_t i = 0; i < part; i += 2)
        to[(from + i) / 2 * tile] = (bits[i] & 0xffffu) | bits[i + 1] << 16;
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
    const Words codes = widened(*(const Halves*)data);
    return {code(codes & 0xffu), code(codes >> 8)};
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
  using Wide = Chain<Floating32, false>;
  static constexpr bool kFetches = kFromMemory, kIsWhole = false;
  using Sum = Floats;
  static constexpr bool kWidens = Reader::kBytesOfPair < 128;  // into floats
  struct Row {
    float even, odd;
  };
  static void add(Floats& sum, const Row* row, EvenAndOdd weights) {
    sum += broadcast(&row->even) * weights.even;
    sum += broadcast(&row->odd) * weights.odd;
  }
};

#if defined(__SSE2__)
// Multiply rows of whole numbers with codes; their sums over a block are exact.
template <bool kFromMemory>
struct Whole {
  static constexpr bool kFetches = kFromMemory, kIsWhole = true, kWidens = kFromMemory;
  using Row = uint32_t;
  using Sum = Integers;
  static void add(Integers& sum, const Row* row, Shorts weights) {
    sum += products_of_pairs((Shorts)(Words{} + *row), weights);
  }
};

struct Int16Whole : Whole<false> {
  static constexpr int kBytesOfPair = 64, kStep = 1;
  static Shorts read(const char* panel, int64_t pair, int, int v) {
    return *(const Shorts*)(panel + pair * 64 + v * kBytes);
  }
};

struct Int8Whole : Whole<true> {
  using Wide = Int16Whole;
  static constexpr int kBytesOfPair = 32, kStep = 1;
  static Shorts read(const char* panel, int64_t pair, int, int v) {
    return widened(*(const Bytes*)(panel + pair * 32 + v * kBytes / 2));
  }
};

struct Int4Whole : Whole<true> {
  using Wide = Int16Whole;
  static constexpr int kBytesOfPair = 16, kStep = 4;
  static Shorts read(const char* panel, int64_t pair, int step, int v) {
    const Shorts words = *(const Shorts*)(panel + pair * 16 + v * kBytes);
    return (words << (12 - 4 * step)) >> 12;
  }
  static void add(Integers& sum, const Row* row, Shorts weights) {
    Whole::add(sum, row, weights);
    __asm__("" : "+x"(sum));  // compilers would reorder sums, and run out of registers
  }
};

#endif

#if defined(__AVX512BF16__)
// Multiply rows of bfloat16 pair by pair, with codes that bfloat16 holds exactly.
struct Dot {
  static constexpr bool kFetches = true, kIsWhole = false, kWidens = false;
  using Row = uint32_t;
  using Sum = Floats;
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

#if defined(__AMX_BF16__)
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
#endif

// Adds pairs [from, to) of the inputs to the sums of M rows. It is always inlined, and its loop over
// all sums is a single one, so that compilers keep them in registers. It fetches the panel that
// follows, since sums in the order of their inputs leave memory waiting.
template <class R, int M>
__attribute__((always_inline)) inline void add_pairs(const char* panel, int64_t panel_bytes,
                                                     const typename R::Row* rows, int64_t stride,
                                                     int64_t from, int64_t to,
                                                     typename R::Sum (&sums)[M * kVectors]) {
  typename R::Sum kept[M * kVectors];
#pragma GCC unroll 64
  for (int n = 0; n < M * kVectors; n++) kept[n] = sums[n];
  for (int64_t i = from; i < to; i += R::kStep) {
#pragma GCC unroll 64
    for (int n = 0; n < M * kVectors * R::kStep; n++) {
      const int v = n % kVectors, m = n / kVectors % M, step = n / kVectors / M;
      if (R::kFetches && v + m + step == 0)
        __builtin_prefetch(panel + panel_bytes + i * R::kBytesOfPair, 0, 2);
      R::add(kept[m * kVectors + v], rows + (i + step) * stride + m, R::read(panel, i, step, v));
    }
  }
#pragma GCC unroll 64
  for (int n = 0; n < M * kVectors; n++) sums[n] = kept[n];
}

// Computes M rows of a panel, and writes the first `count` of them. Inlined it is slower: GCC would
// copy sums between registers.
template <class R, int M>
__attribute__((noinline)) void compute_tile(const Weight& weight, int64_t panel, const Rows& rows,
                                            int64_t row, int64_t count, float* out,
                                            int64_t stride) {
  const int64_t bytes = weight.pairs * R::kBytesOfPair, group = weight.pairs / weight.groups;
  const char* data = weight.panels + panel * bytes;
  const auto* values = (const typename R::Row*)rows.words.data() + rows.place(row, 0);
  const auto scale = [&](int64_t g, int v) {
    const int64_t at = (panel * weight.groups + g) * kPanel + v * kLanes;
    return load(weight.scales.from(at).data, weight.scales.type);
  };
  Floats sums[M * kVectors] = {};
  if constexpr (R::kIsWhole) {
    const float* steps = &rows.steps[rows.place(row, 0, rows.num_blocks())];
    for (int64_t i = 0, block = 0, g = 0, end; i < weight.pairs; i = end) {
      end = std::min((block + 1) * rows.block, (g + 1) * group);
      Integers whole[M * kVectors] = {};
      if (end - i == Rows::kBlock)  // compilers unroll it
        add_pairs<R, M>(data, bytes, values, rows.tile, i, i + Rows::kBlock, whole);
      else
        add_pairs<R, M>(data, bytes, values, rows.tile, i, end, whole);
      Floats factors[kVectors];
      for (int v = 0; v < kVectors; v++) factors[v] = scale(g, v);
#pragma GCC unroll 64
      for (int n = 0; n < M * kVectors; n++) {
        const Floats step = broadcast(steps + block * rows.tile + n / kVectors);
        const Floats part = __builtin_convertvector(whole[n], Floats) * step;
        sums[n] = fused(part, factors[n % kVectors], sums[n]);
      }
      block += end == (block + 1) * rows.block, g += end == (g + 1) * group;
    }
  } else if (weight.scales.data == nullptr) {
    add_pairs<R, M>(data, bytes, values, rows.tile, 0, weight.pairs, sums);
  } else {
    for (int64_t g = 0; g < weight.groups; g++) {
      Floats part[M * kVectors] = {};
      add_pairs<R, M>(data, bytes, values, rows.tile, g * group, (g + 1) * group, part);
      for (int n = 0; n < M * kVectors; n++)
        sums[n] = fused(part[n], scale(g, n % kVectors), sums[n]);
    }
  }
#pragma GCC unroll 64
  for (int n = 0; n < M * kVectors; n++)
    if (n / kVectors < count)
      *(Floats*)(out + (row + n / kVectors) * stride + n % kVectors * kLanes) = sums[n];
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
      compute_tile<R, std::min(size.value, kTile)>(weight, panel, rows, row, count, out, stride);
    });
  }
}

// Returns one panel as floats, or whole numbers of 16 bits, which it writes to `space`.
template <class R>
Weight widened_panel(const Weight& weight, int64_t panel, float* space) {
  const char* data = weight.panels + panel * weight.pairs * R::kBytesOfPair;
  for (int64_t i = 0; i < weight.pairs; i += R::kStep) {
    __builtin_prefetch(data + (weight.pairs + i) * R::kBytesOfPair, 0, 2);
#pragma GCC unroll 16
    for (int n = 0; n < R::kStep * kVectors; n++) {
      const auto values = R::read(data, i, n / kVectors, n % kVectors);
      if constexpr (R::kIsWhole) {
        *(Shorts*)(space + (i + n / kVectors) * kPanel + n % kVectors * kLanes) = values;
      } else {
        float* to = space + (i + n / kVectors) * 2 * kPanel + n % kVectors * kLanes;
        *(Floats*)to = values.even;
        *(Floats*)(to + kPanel) = values.odd;
      }
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
  // With many tiles it is faster to widen a panel once than in each of them.
  if constexpr (R::kWidens)
    if (rows.count > 4 * rows.tile) {
      thread_local std::vector<float> space;
      space.resize(std::max<size_t>(space.size(), weight.pairs * 2 * kPanel));
      for (; panel < last; panel++)
        compute_rows<typename R::Wide>(widened_panel<R>(weight, panel, space.data()), 0, rows,
                                       out + (panel - first) * kPanel, stride);
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
  if (rows.form == Form::kBrains) {
    if (weight.kind == Kind::kBfloat16) run_pairs(BrainDot());
#if defined(__AMX_BF16__)
    if (weight.kind == Kind::kInt8) run_pairs(Int8Dot());
    if (weight.kind == Kind::kInt4) run_pairs(Int4Dot());
#endif
    return;
  }
#endif
#if defined(__SSE2__)
  if (rows.form == Form::kWhole) {
    if (weight.kind == Kind::kInt8) run(Int8Whole());
    if (weight.kind == Kind::kInt4) run(Int4Whole());
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
