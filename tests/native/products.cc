// Products of one instruction set beside true ones, for processors that Python does not run on here.
#include "../../native/kernels.cc"

#include <cmath>
#include <cstdio>
#include <random>

using namespace specjax;

namespace {

std::mt19937 numbers(0);

float drawn() { return std::uniform_real_distribution<float>(-1, 1)(numbers); }

// Returns packed weights of float32 or bfloat16, and fills `exact` [outputs, inputs].
std::vector<char> packed(Kind kind, int64_t outputs, int64_t inputs, std::vector<float>& exact) {
  const int64_t pairs = (inputs + 1) / 2, size = kind == Kind::kFloat32 ? 4 : 2;
  std::vector<char> panels(padded(outputs) * pairs * 2 * size);
  for (int64_t o = 0; o < outputs; o++)
    for (int64_t i = 0; i < inputs; i++) {
      const float value = rounded(Floats{} + drawn(), (Type)kind)[0];
      const int64_t pair = (o / kPanel * pairs + i / 2) * 2 * kPanel, lane = o % kPanel;
      const int64_t at = size == 4 ? pair + i % 2 * kPanel + lane : pair + 2 * lane + i % 2;
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      const uint32_t stored = kind == Kind::kBfloat16 ? bits >> 16 : bits;
      std::memcpy(&panels[at * size], &stored, size);
      exact[o * inputs + i] = value;
    }
  return panels;
}

// Returns how many sums of some shape are wrong, or differ from those of fewer rows.
int num_wrong(Kind kind, int64_t count, int64_t outputs, int64_t inputs) {
  std::vector<float> exact(outputs * inputs), rows(count * inputs);
  const std::vector<char> panels = packed(kind, outputs, inputs, exact);
  const int64_t stride = padded(outputs);
  const Weight weight = {kind, panels.data(), stride / kPanel, (inputs + 1) / 2, {}, 1};
  std::vector<char> stored(count * inputs * size_of((Type)kind));
  for (int64_t i = 0; i < count * inputs; i++) {
    rows[i] = rounded(Floats{} + drawn(), (Type)kind)[0];
    uint32_t bits;
    std::memcpy(&bits, &rows[i], 4);
    const int64_t size = size_of((Type)kind);
    if (size == 2) bits >>= 16;
    std::memcpy(&stored[i * size], &bits, size);
  }
  const auto product = [&](int64_t first) {
    std::vector<float> sums((count - first) * stride);
    Floating left{stored.data(), (Type)kind, count * inputs};
    left = left.from(first * inputs);
    Call* call = TABLE(INSTRUCTIONS).product({left, count - first, inputs, weight, sums.data()});
    call->run();
    delete call;
    return sums;
  };
  const std::vector<float> all = product(0);
  int wrong = 0;
  for (int64_t row = 0; row < count; row++) {
    const std::vector<float> fewer = product(row);
    for (int64_t o = 0; o < outputs; o++) {
      double sum = 0;
      for (int64_t i = 0; i < inputs; i++) sum += (double)rows[row * inputs + i] * exact[o * inputs + i];
      wrong += !(std::abs(all[row * stride + o] - sum) < 1e-4);
      wrong += std::memcmp(&all[row * stride + o], &fewer[o], 4) != 0;
    }
  }
  return wrong;
}

}  // namespace

int main() {
  int wrong = 0;
  for (Kind kind : {Kind::kBfloat16, Kind::kFloat32})
    for (int64_t count : {1, 3, 9, 18})
      for (int64_t inputs : {1, 31, 130}) wrong += num_wrong(kind, count, 35, inputs);
  std::printf("%s: %d sums are wrong\n", TABLE(INSTRUCTIONS).name, wrong);
  return wrong != 0;
}
