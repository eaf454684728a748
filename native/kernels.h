// What the kernels of all instruction sets share: the layout of weights, and the threads of a call.
//
// Weights [O, I] are packed into panels of 16 outputs whose inputs stand in pairs: 16-bit floats and
// int8 as [O/16, I/2, 16, 2], float32 as [O/16, I/2, 2, 16], and int4 as [O/16, I/8, 16] words of 32
// bits: each half of a word has the even or the odd inputs of four pairs, lowest bits first. Outputs
// and inputs are padded with zeros. Every output is one chain of sums over its inputs, or over blocks of
// them, in their order, so its bits do not depend on how many rows a product has.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace specjax {

constexpr int64_t kPanel = 16;  // outputs of a panel

enum class Type : int32_t { kBfloat16, kFloat16, kFloat32 };
enum class Kind : int32_t { kBfloat16, kFloat16, kFloat32, kInt8, kInt4 };  // types, then codes

inline int64_t size_of(Type type) { return type == Type::kFloat32 ? 4 : 2; }
inline int64_t padded(int64_t count, int64_t to = kPanel) { return (count + to - 1) / to * to; }

// Floats of some type; null: absent.
struct Floating {
  char* data = nullptr;
  Type type = Type::kFloat32;
  int64_t size = 0;
  Floating from(int64_t at) const { return {data + at * size_of(type), type, size - at}; }
  Floating first(int64_t count) const { return {data, type, std::min(size, count)}; }
};

struct Weight {
  Kind kind;
  const char* panels = nullptr;  // null: absent
  int64_t num_panels, pairs;     // pairs of inputs
  Floating scales;               // [O/16, groups, 16], of quantised weights
  int64_t groups = 1;
};

struct Linear {
  Weight weight;
  Floating bias;
};

struct Norm {
  Floating weight, bias;
};

enum class NormKind : int32_t { kRms, kRmsPlusOne, kLayer };
enum class Activation : int32_t { kSilu, kGelu, kGeluTanh };

struct Layer {
  Norm input_norm, query_norm, key_norm, attention_output_norm, post_attention_norm,
      mlp_output_norm;
  Linear query, key, value, output, gate, up, down;
  Floating keys, values;  // [B, K, S, H]
  int64_t window, rope;   // numbers of lists below; no rotary embedding: -1
};

// A pass over B sequences of Q tokens each, R = B * Q, with S slots and C scratch slots. Its rows
// are the first `num_computed` tokens of each sequence; others are not computed. Arrays hold all R.
struct Pass {
  std::vector<Layer> layers;
  Norm final_norm;
  NormKind norm_kind;
  Activation activation;
  float epsilon, scale, softcap;  // no cap: 0
  Type type;                      // in which results are rounded
  int64_t batch, num_queries, num_computed, num_slots, num_scratch;
  int64_t width, inner, heads, groups, head_dim, rotated;
  Floating input, normed;                         // [R, D] and [R, E]
  std::vector<const float*> cosines, sines;       // [R, rotated], by rope
  const int32_t *positions, *slot_positions, *length;  // [R], [B, S], [B]
  const bool* visible;                            // [R, C]
  std::vector<int64_t> windows;                   // no window: 0
  std::vector<int64_t> tapped_layers;             // their outputs
  std::vector<std::pair<int64_t, int64_t>> tapped_heads;  // layer and head
  Floating output, hidden;                        // [R, D] and [taps, R, D]
  float* attention;                               // [tapped heads, R, S]
  int64_t num_rows() const { return batch * num_computed; }
  // Returns where a row lies in arrays.
  int64_t place(int64_t row) const { return row / num_computed * num_queries + row % num_computed; }
};

// A product of the first `num_rows` of rows [R, I] with a weight: sums [R, O], float32.
struct Product {
  Floating rows;
  int64_t num_rows, num_inputs;
  Weight weight;
  float* sums;
};

// The threads of one call. All of them run the same phases, whose parts go to whoever is free. A
// thread waits only for parts that a running thread has taken: one of them can finish the call.
class Team {
 public:
  explicit Team(int64_t num_phases) : phases_(num_phases) {}
  int64_t num_threads = 1;
  struct alignas(64) Phase {
    std::atomic<int64_t> next{0}, done{0};
  };

  class Thread {
   public:
    explicit Thread(Team& team) : team_(team) {}
    // Computes part(first, last) for all of [0, total), with the other threads.
    // The first parts are long, since memory is read best in long streams.
    template <class Part>
    void share(int64_t total, int64_t least, Part part) {
      Phase& phase = team_.phases_[number_++];
      for (int64_t first = phase.next.load(); first < total;) {
        const int64_t size = std::max(least, (total - first) / (2 * team_.num_threads));
        const int64_t last = std::min(first + size, total);
        if (!phase.next.compare_exchange_weak(first, last)) continue;
        part(first, last);
        phase.done.fetch_add(last - first);
        first = phase.next.load();
      }
      for (int64_t spins = 0; phase.done.load() < total; spins++)
        spins < 2000 ? pause() : std::this_thread::yield();
    }

   private:
    static void pause() {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    Team& team_;
    int64_t number_ = 0;
  };

 private:
  std::vector<Phase> phases_;
};

// One call: `run` is what each of its threads does. It owns all that late threads may read.
struct Call {
  Team team;
  explicit Call(int64_t num_phases) : team(num_phases) {}
  virtual ~Call() = default;
  virtual void run() = 0;
};

struct Kernels {
  const char* name;
  Call* (*product)(const Product&);
  Call* (*layers)(Pass);
};

extern const Kernels kPortable, kNeon, kAvx2, kAvx512, kAvx512Bf16, kAmx;  // if they are compiled

}  // namespace specjax
