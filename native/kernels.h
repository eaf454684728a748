// One product of a few rows with packed weights, and the table of its kernels.
//
// Weights [O, I] are packed into panels of 16 outputs whose inputs stand in pairs:
// 16-bit floats as [O/16, I/2, 16, 2], float32 and int8 as [O/16, I/2, 2, 16], int4 as
// [O/16, I/2, 16] bytes with the even input in the low half. Outputs and inputs are padded with
// zeros. Every output is one chain of sums over its inputs in their order, so its bits do not
// depend on how many rows a product has.
#pragma once
#include <cstdint>

namespace specjax {

constexpr int64_t kPanel = 16;  // outputs of a panel

enum class Kind : int32_t { kBfloat16, kFloat16, kFloat32, kInt8, kInt4 };

struct Product {
  const float* rows;         // [num_rows, num_inputs], float32; inputs padded to pairs
  const uint16_t* bfloat16;  // the same rows in bfloat16, if the weights are; else null
  const void* panels;
  const float* scales;  // [O/16, groups, 16], or null
  float* sums;          // [num_rows, num_outputs]
  int64_t num_rows, num_inputs, num_outputs;
  int64_t group;  // inputs that share a scale; all of them for int8
};

// Computes the outputs of panels first to last - 1.
using Kernel = void (*)(const Product&, int64_t first, int64_t last);

struct Kernels {
  const char* name;
  Kernel by_kind[5];
};

// Attention of queries [B, A, Q, H] over keys and values [B, K, S, H], all float32.
struct Attention {
  const float *query, *keys, *values;
  const bool* visible;  // [B, Q, S]
  float* mixed;         // [B, A, Q, H]
  int64_t num_heads, num_groups, num_rows, num_slots, width;
  float scale, softcap;  // no cap: 0
};

// Computes the queries numbered first to last - 1; their numbers count [B, K, Q].
using AttentionKernel = void (*)(const Attention&, int64_t first, int64_t last);

extern const Kernels kPortable;
extern const AttentionKernel kPortableAttention;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512;
extern const AttentionKernel kAvx2Attention, kAvx512Attention;
#endif

}  // namespace specjax
