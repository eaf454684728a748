// Attention of the queries of a pass over the slots of a cache.
//
// A query takes the slots that it sees in the order of its text: first the committed ones, then its
// scratch. Sums go by the number of a token in that text, so where scratch lies, and what other
// queries the pass holds, does not change a bit.
#pragma once
#include "products.h"

namespace specjax {
namespace {

constexpr float kLowest = -3.4e38f;

// The text of a query: the slots [0, end), and then those of `rest`. It sees all tokens but the first
// `begin`, which a window hides.
struct View {
  int64_t begin, end;
  std::vector<int32_t> rest;
  int64_t size() const { return end + (int64_t)rest.size(); }  // of the text, from slot 0
  int64_t hidden() const { return std::max<int64_t>(begin - end, 0); }  // of `rest`
};

View view_of(const Pass& pass, int64_t row, int64_t window) {
  const int64_t place = pass.place(row), batch = place / pass.num_queries;
  const int64_t length = pass.length[batch];
  const int32_t* positions = pass.slot_positions + batch * pass.num_slots;
  const int32_t oldest = window ? pass.positions[place] - (int32_t)window + 1 : INT32_MIN;
  View view;
  view.begin = std::lower_bound(positions, positions + length, oldest) - positions;
  view.end = length;
  for (int64_t c = 0; c < pass.num_scratch && length + c < pass.num_slots; c++) {
    if (!pass.visible[place * pass.num_scratch + c]) continue;
    if (positions[length + c] < oldest) {
      if (view.begin < view.size()) continue;
      view.begin++;
    }
    if (view.end == length + c)
      view.end++;
    else
      view.rest.push_back((int32_t)(length + c));
  }
  return view;
}

#if defined(__clang__)
#define SHUFFLED(first, second, ...) __builtin_shufflevector(first, second, __VA_ARGS__)
#else  // GCC has the other one from version 12 on only
#define SHUFFLED(first, second, ...) __builtin_shuffle(first, second, Four{__VA_ARGS__})
#endif
typedef uint32_t Four __attribute__((vector_size(16), aligned(4), may_alias));

constexpr int kBlocks = 4;      // of 16 slots, whose keys are packed at once
constexpr int64_t kRun = 128;  // slots whose values are summed at once

// Packs the keys of 16 slots, from slot `first` on, as a panel of a weight of type T: transposes four
// words of four slots at a time, which no processor does slowly.
template <Type T>
void pack_keys(const Floating& keys, int64_t head_dim, int64_t first, uint32_t* panel) {
  const int64_t words = head_dim * size_of(T) / 4, last = keys.size / head_dim - 1;
  for (int64_t slot = 0; slot < kPanel; slot += 4) {
    const char* key[4];
    for (int i = 0; i < 4; i++) key[i] = keys.data + std::min(first + slot + i, last) * words * 4;
    for (int64_t at = 0; at < words; at += 4) {
      const auto four = [&](int i) { return *(const Four*)(key[i] + at * 4); };
      const Four low = SHUFFLED(four(0), four(1), 0, 4, 1, 5);
      const Four high = SHUFFLED(four(0), four(1), 2, 6, 3, 7);
      const Four next_low = SHUFFLED(four(2), four(3), 0, 4, 1, 5);
      const Four next_high = SHUFFLED(four(2), four(3), 2, 6, 3, 7);
      uint32_t* to = panel + at * kPanel + slot;
      *(Four*)to = SHUFFLED(low, next_low, 0, 1, 4, 5);
      *(Four*)(to + kPanel) = SHUFFLED(low, next_low, 2, 3, 6, 7);
      *(Four*)(to + 2 * kPanel) = SHUFFLED(high, next_high, 0, 1, 4, 5);
      *(Four*)(to + 3 * kPanel) = SHUFFLED(high, next_high, 2, 3, 6, 7);
    }
  }
}

// Adds the weighted values of some slots, listed or from `first` on, to the sums of M queries.
template <Type T, int M, int V>
inline void mix_lanes(const Floating& values, int64_t head_dim, int64_t at, const int32_t* slots,
                      int64_t first, int64_t count, const float (&weights)[M][kRun], float* out,
                      int64_t stride) {
  Floats sums[M * V];  // in registers: see add_pairs
#pragma GCC unroll 64
  for (int n = 0; n < M * V; n++) sums[n] = *(Floats*)(out + n / V * stride + n % V * kLanes);
  for (int64_t r = 0; r < count; r++) {
    const int64_t slot = slots ? slots[r] : first + r;
    const char* value = values.data + (slot * head_dim + at) * size_of(T);
#pragma GCC unroll 64
    for (int n = 0; n < M * V; n++)
      sums[n] = fused(broadcast(&weights[n / V][r]),
                      load(value + n % V * kLanes * size_of(T), T), sums[n]);
  }
#pragma GCC unroll 64
  for (int n = 0; n < M * V; n++) *(Floats*)(out + n / V * stride + n % V * kLanes) = sums[n];
}

// Adds numbers [at, at + size) of the weighted values to `out` [M, size].
template <Type T, int M>
void mix(const Floating& values, int64_t head_dim, int64_t at, int64_t size, const int32_t* slots,
         int64_t first, int64_t count, const float* weights, int64_t stride, float* out) {
  constexpr int kMost = M > 8 || kBytes == 16 ? 1 : M <= 4 && kBytes == 64 ? 4 : 2;  // in registers
  for (int64_t r = 0; r < count; r += kRun) {
    float part[M][kRun];
    const int64_t run = std::min(kRun, count - r);
    const int32_t* listed = slots ? slots + r : nullptr;
    for (int m = 0; m < M; m++) std::copy_n(weights + m * stride + r, run, part[m]);
    int64_t i = 0;
    for (; i + kMost * kLanes <= size; i += kMost * kLanes)
      mix_lanes<T, M, kMost>(values, head_dim, at + i, listed, first + r, run, part, out + i, size);
    for (; i < size; i += kLanes)
      mix_lanes<T, M, 1>(values, head_dim, at + i, listed, first + r, run, part, out + i, size);
  }
}

// Turns the scores of lanes [from, size) into weights; returns their sum. The first are hidden.
float softmax(float* scores, int64_t from, int64_t begin, int64_t size, float scale, float softcap) {
  Floats top = Floats{} + kLowest, total = {};
  for (int64_t t = from; t < size; t += kLanes) {
    Floats score = *(Floats*)(scores + t) * scale;
    if (softcap > 0) score = (2 * sigmoid(2 / softcap * score) - 1) * softcap;
    *(Floats*)(scores + t) = score;
  }
  std::fill(scores + from, scores + begin, kLowest);
  std::fill(scores + size, scores + padded(size), kLowest);
  for (int64_t t = from; t < size; t += kLanes) {
    const Floats score = *(Floats*)(scores + t);
    top = (Floats)select((Words)(score > top), (Words)score, (Words)top);
  }
  float highest = kLowest;
  for (int i = 0; i < kLanes; i++) highest = std::max(highest, top[i]);
  for (int64_t t = from; t < size; t += kLanes) {
    const Floats weight = exponential(*(Floats*)(scores + t) - highest);
    *(Floats*)(scores + t) = weight;
    total += weight;
  }
  return sum_of(total);
}

constexpr int kQueries = kTile;                   // that share values, at most
constexpr int64_t kChunk = kBlocks * kPanel;      // slots whose scores are computed at once
constexpr int64_t kSplit = 2 * kPanel;            // numbers of a head that are mixed at once
static_assert(kSplit == 2 * Rows::kBlock);        // so that no two threads write to a block

// A query of one head: its row among those of the pass, and its weights, if they are tapped.
struct Query {
  int64_t row;
  float* tapped;  // [S], or null
  const View* view;
};

// Computes the scores [queries, stride] of slots [first, last), a whole number of chunks.
template <Type T>
void score(const Floating& keys, int64_t head_dim, const Rows& queries, int64_t first, int64_t last,
           float* scores, int64_t stride) {
  thread_local std::vector<uint32_t> panels;
  const int64_t panel_words = head_dim * kPanel * size_of(T) / 4;
  panels.resize(kBlocks * panel_words);
  const Weight weight = {(Kind)T, (const char*)panels.data(), kBlocks, head_dim / 2, {}, 1};
  for (int64_t slot = first; slot < last; slot += kChunk) {
    for (int64_t block = 0; block < kBlocks; block++)
      pack_keys<T>(keys, head_dim, slot + block * kPanel, panels.data() + block * panel_words);
    multiply(weight, 0, kBlocks, queries, scores + slot, stride);
  }
}

// Turns the scores of a query into weights, in the order of its text; returns their factor.
float weigh(const Pass& pass, const Query& query, float* score) {
  const View& view = *query.view;
  for (size_t i = view.hidden(); i < view.rest.size(); i++)
    score[view.end + i] = score[view.rest[i]];
  const int64_t from = view.begin / kPanel * kPanel;
  const float total = softmax(score, from, view.begin, view.size(), pass.scale, pass.softcap);
  const float factor = view.size() > view.begin ? 1 / total : 0;
  if (float* tapped = query.tapped) {
    std::fill(tapped, tapped + pass.num_slots, 0.0f);
    for (int64_t t = view.begin; t < view.end; t++) tapped[t] = score[t] * factor;
    for (size_t i = view.hidden(); i < view.rest.size(); i++)
      tapped[view.rest[i]] = score[view.end + i] * factor;
  }
  return factor;
}

// Computes numbers [at, at + size) of the outputs of some queries, up to their factors, as `out`
// [kQueries, size].
template <Type T>
void mix_queries(const Floating& values, int64_t head_dim, int64_t at, int64_t size,
                 const std::vector<Query>& queries, const float* weights, int64_t stride,
                 float* out) {
  const int64_t count = queries.size();
  int64_t cut = 0, end = INT64_MAX;  // all see these slots
  for (const Query& query : queries) {
    cut = std::max(cut, query.view->begin);
    end = std::min(end, query.view->end);
  }
  std::fill(out, out + kQueries * size, 0.0f);
  const auto mix_one = [&](int64_t m, const int32_t* slots, int64_t first, int64_t to) {
    if (first < to)
      mix<T, 1>(values, head_dim, at, size, slots, first, to - first, weights + m * stride + first,
                stride, out + m * size);
  };
  for (int64_t m = 0; m < count; m++)
    mix_one(m, nullptr, queries[m].view->begin, std::min(cut, queries[m].view->end));
  with_size(count, [&](auto tile) {
    mix<T, std::min(tile.value, kQueries)>(values, head_dim, at, size, nullptr, cut, end - cut,
                                           weights + cut, stride, out);
  });
  for (int64_t m = 0; m < count; m++) {
    const View& view = *queries[m].view;
    mix_one(m, nullptr, std::max(cut, end), view.end);
    mix_one(m, view.rest.data() + view.hidden(), view.end + view.hidden(), view.size());
  }
}

}  // namespace
}  // namespace specjax
