// Attention of a few queries over the slots of a cache that they see. Compiled once for each
// instruction set, like kernels.cc.
//
// A query takes its visible slots in their order and sums over them by rank: where a slot lies, and
// what other queries the pass holds, does not change a bit.
#include <algorithm>
#include <vector>

#include "vectors.h"

namespace specjax {
namespace {

constexpr int kChunk = kBytes == 64 ? 4 : 2;  // vectors of a value that are summed at once

// Adds neighbours: the sums of pairs of `a`, then those of `b`.
inline Floats pair_sums(Floats a, Floats b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

// Sums the lanes of each of kLanes vectors, into one lane each.
inline Floats lane_sums(Floats (&parts)[kLanes]) {
#pragma GCC unroll 4
  for (int count = kLanes; count > 1; count /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < count / 2; i++) parts[i] = pair_sums(parts[2 * i], parts[2 * i + 1]);
  return parts[0];
}

// e^x for x <= 0, to about two units in the last place; 0 below -87, NaN for NaN.
inline Floats exponential(Floats x) {
  const Floats magic = Floats{} + 0x1.8p23f;  // adding it rounds to a whole number
  Floats shifted = x * 0x1.715476p0f + magic;
  Floats whole = shifted - magic;
  Floats rest = x - whole * 0x1.62e400p-1f;
  rest = rest - whole * 0x1.7f7d1cp-20f;
  Floats sum = Floats{} + 0x1.6850e4p-10f;
  for (float factor : {0x1.123bccp-7f, 0x1.555b98p-5f, 0x1.55548ep-3f, 0x1.fffff8p-2f, 1.0f, 1.0f})
    sum = sum * rest + factor;
  Words power = ((Words)shifted + 127) << 23;
  Words is_kept = ~(Words)(x <= -87.0f);
  return as_floats((Words)(sum * as_floats(power)) & is_kept);
}

// Writes each head's weighted sum of the values of the ranked slots to `out` [Heads, H].
template <int Heads>
void mix(const Attention& a, const float* values, const int32_t* slots, int64_t num_slots,
         const float* weights, int64_t stride, const float* scales, float* out, int64_t out_stride) {
  for (int64_t at = 0; at < a.width; at += kChunk * kLanes) {
    const int vectors = (int)std::min<int64_t>(kChunk, (a.width - at) / kLanes);
    Floats sums[Heads][kChunk] = {};
    for (int64_t r = 0; r < num_slots; r++) {
      const float* value = values + slots[r] * a.width + at;
      if (vectors == kChunk) {
#pragma GCC unroll 4
        for (int v = 0; v < kChunk; v++) {
          Floats part = *(const Floats*)(value + v * kLanes);
#pragma GCC unroll 4
          for (int h = 0; h < Heads; h++) sums[h][v] += weights[h * stride + r] * part;
        }
      } else {
        for (int v = 0; v < vectors; v++) {
          Floats part = *(const Floats*)(value + v * kLanes);
          for (int h = 0; h < Heads; h++) sums[h][v] += weights[h * stride + r] * part;
        }
      }
    }
    for (int h = 0; h < Heads; h++)
      for (int v = 0; v < vectors; v++)
        *(Floats*)(out + h * out_stride + at + v * kLanes) = sums[h][v] * scales[h];
  }
}

// Computes one query of the heads that share keys and values.
void attend_one(const Attention& a, int64_t batch, int64_t group, int64_t row) {
  thread_local std::vector<int32_t> slots;
  thread_local std::vector<float> scores;
  slots.clear();
  const bool* visible = a.visible + (batch * a.num_rows + row) * a.num_slots;
  for (int64_t s = 0; s < a.num_slots; s++)
    if (visible[s]) slots.push_back((int32_t)s);
  const int64_t count = slots.size(), padded = (count + kLanes - 1) / kLanes * kLanes;
  const int64_t heads = a.num_heads / a.num_groups, cache = (batch * a.num_groups + group);
  const float* keys = a.keys + cache * a.num_slots * a.width;
  const float* values = a.values + cache * a.num_slots * a.width;
  slots.resize(padded, count ? slots[count - 1] : 0);
  scores.resize(4 * padded);
  for (int64_t first = 0; first < heads; first += 4) {
    const int64_t some = std::min<int64_t>(4, heads - first);
    const int64_t at = ((batch * a.num_heads + group * heads + first) * a.num_rows + row) * a.width;
    const int64_t stride = a.num_rows * a.width;
    float scales[4];
    for (int64_t h = 0; h < some; h++) {
      const float* query = a.query + at + h * stride;
      float* score = scores.data() + h * padded;
      float top = -3.4e38f;
      for (int64_t r = 0; r < padded; r += kLanes) {
        Floats parts[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) {
          const float* key = keys + slots[r + i] * a.width;
          Floats sum = {};
          for (int64_t w = 0; w < a.width; w += kLanes)
            sum += *(const Floats*)(query + w) * *(const Floats*)(key + w);
          parts[i] = sum;
        }
        *(Floats*)(score + r) = lane_sums(parts) * a.scale;
      }
      if (a.softcap > 0)
        for (int64_t r = 0; r < count; r++)
          score[r] = std::tanh(score[r] / a.softcap) * a.softcap;
      for (int64_t r = 0; r < count; r++) top = std::max(top, score[r]);
      Floats total = {};
      for (int64_t r = count; r < padded; r++) score[r] = -3.4e38f;
      for (int64_t r = 0; r < padded; r += kLanes) {
        Floats weight = exponential(*(const Floats*)(score + r) - top);
        *(Floats*)(score + r) = weight;
        total += weight;
      }
      float sum = 0;
      for (int i = 0; i < kLanes; i++) sum += total[i];
      scales[h] = count ? 1 / sum : 0;
    }
    float* out = a.mixed + at;
    auto run = [&](auto heads_at_once) {
      mix<heads_at_once.value>(a, values, slots.data(), count, scores.data(), padded, scales, out,
                               stride);
    };
    if (some == 1) run(std::integral_constant<int, 1>());
    if (some == 2) run(std::integral_constant<int, 2>());
    if (some == 3) run(std::integral_constant<int, 3>());
    if (some == 4) run(std::integral_constant<int, 4>());
  }
}

void attend(const Attention& a, int64_t first, int64_t last) {
  for (; first < last; first++)
    attend_one(a, first / (a.num_groups * a.num_rows), first / a.num_rows % a.num_groups,
               first % a.num_rows);
}

}  // namespace

extern const AttentionKernel TABLE(INSTRUCTIONS, Attention) = attend;

}  // namespace specjax
