// Vectors of one instruction set. The compiler's flags decide their width.
#pragma once
#include <cmath>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

namespace specjax {
namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kLanes = kBytes / 4;
constexpr int kVectors = kPanel / kLanes;  // of a panel

typedef float Floats __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kBytes / 2), aligned(2), may_alias));
typedef int16_t Shorts __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef int8_t Bytes __attribute__((vector_size(kBytes / 2), aligned(1), may_alias));

inline Words select(Words is_first, Words first, Words second) {
  return (is_first & first) | (~is_first & second);
}

// Rounds to the nearest number of the type, ties to even.
inline Floats rounded(Floats x, Type type) {
  if (type == Type::kFloat32) return x;
  const Words bits = (Words)x, magnitude = bits & 0x7fffffffu;
  const Words is_nan = (Words)(magnitude > 0x7f800000u);
  if (type == Type::kBfloat16)
    return (Floats)(select(is_nan, bits | 0x400000u, bits + 0x7fffu + (bits >> 16 & 1u)) &
                    0xffff0000u);
  Words normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u)) & ~0x1fffu;
  Words small = (Words)((Floats)magnitude + 0.5f - 0.5f);  // whole multiples of 2^-24
  Words value = select((Words)(magnitude < 0x38800000u), small, normal);
  value = select((Words)(value >= 0x47800000u), Words{} + 0x7f800000u, value);
  return (Floats)(select(is_nan, Words{} + 0x7fc00000u, value) | (bits & 0x80000000u));
}

inline Words half_bits(Floats x) {  // of what `rounded` returned
  const Words bits = (Words)x, magnitude = bits & 0x7fffffffu;
  Words small = (Words)__builtin_convertvector((Floats)magnitude * 0x1p24f, Integers);
  Words value = select((Words)(magnitude < 0x38800000u), small, (magnitude - 0x38000000u) >> 13);
  value = select((Words)(magnitude >= 0x7f800000u), 0x7c00u | (magnitude >> 13 & 0x3ffu), value);
  return value | (bits >> 16 & 0x8000u);
}

inline Words widened(Halves halves) {
#if defined(__AVX512F__)  // which compilers split in two
  return (Words)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)halves);
#else
  return __builtin_convertvector(halves, Words);
#endif
}

inline Shorts widened(Bytes bytes) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_cvtepi8_epi16((__m256i)bytes);
#elif defined(__AVX2__)
  return (Shorts)_mm256_cvtepi8_epi16((__m128i)bytes);
#else
  return __builtin_convertvector(bytes, Shorts);
#endif
}

#if defined(__SSE2__)
// Returns the sum of the products of each pair of numbers.
inline Integers products_of_pairs(Shorts first, Shorts second) {
#if defined(__AVX512BW__)
  return (Integers)_mm512_madd_epi16((__m512i)first, (__m512i)second);
#elif defined(__AVX2__)
  return (Integers)_mm256_madd_epi16((__m256i)first, (__m256i)second);
#else
  return (Integers)_mm_madd_epi16((__m128i)first, (__m128i)second);
#endif
}
#endif

inline Floats widened_half(Halves half) {  // exact, denormals, infinities and NaN included
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)half);
#elif defined(__AVX2__) && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)half);
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16((float16x4_t)half);
#else
  const Words bits = widened(half), magnitude = (bits & 0x7fffu) << 13;
  // XLA's threads take a denormal float for 0, so the numbers here are 2^-14 larger.
  const Words small = (Words)((Floats)(magnitude + 0x38800000u) - 0x1p-14f);
  const Words value = select((Words)(magnitude < 0x00800000u), small, magnitude + 0x38000000u);
  const Words special = (Words)(magnitude >= 0x0f800000u) & 0x7f800000u;
  return (Floats)(value | special | (bits & 0x8000u) << 16);
#endif
}

struct EvenAndOdd {
  Floats even, odd;
};

// Widens the float16 numbers in words: the even ones are their low halves.
inline EvenAndOdd widened_pairs(Words words) {
#if defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
  const __m256i halves = _mm256_permute4x64_epi64((__m256i)words, 0xd8);
  const __m256 first = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  const __m256 last = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  return {(Floats)_mm256_shuffle_ps(first, last, 0x88),
          (Floats)_mm256_shuffle_ps(first, last, 0xdd)};
#else
  return {widened_half(__builtin_convertvector(words, Halves)),
          widened_half(__builtin_convertvector(words >> 16, Halves))};
#endif
}

// Copies a number from memory to all lanes. For AVX2, GCC would shuffle it there in a unit that
// multiplies.
inline Floats broadcast(const float* number) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Floats)_mm256_broadcast_ss(number);
#else
  return *number - Floats{};  // unlike an addition of 0, compilers drop this
#endif
}

// Returns a * b + sum. Whether compilers fuse an expression can depend on what stands beside it.
inline Floats fused(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + sum;
#endif
}

inline Floats load(const char* data, Type type) {
  if (type == Type::kFloat32) return *(const Floats*)data;
  const Halves halves = *(const Halves*)data;
  return type == Type::kBfloat16 ? (Floats)(widened(halves) << 16) : widened_half(halves);
}

// Reads lanes [at, at + kLanes); those beyond the end are 0.
inline Floats load(const Floating& floats, int64_t at) {
  const char* data = floats.data + at * size_of(floats.type);
  if (at + kLanes <= floats.size) return load(data, floats.type);
  char part[kBytes] = {};
  if (at < floats.size) std::memcpy(part, data, (floats.size - at) * size_of(floats.type));
  return load(part, floats.type);
}

inline void store(char* data, Type type, Floats x) {
  if (type == Type::kFloat32) {
    *(Floats*)data = x;
    return;
  }
  x = rounded(x, type);
  const Words bits = type == Type::kBfloat16 ? (Words)x >> 16 : half_bits(x);
  *(Halves*)data = __builtin_convertvector(bits, Halves);
}

// Writes and rounds lanes [at, at + kLanes), as far as there are any.
inline void store(const Floating& floats, int64_t at, Floats x) {
  char* data = floats.data + at * size_of(floats.type);
  if (at + kLanes <= floats.size) return store(data, floats.type, x);
  char part[kBytes];
  store(part, floats.type, x);
  if (at < floats.size) std::memcpy(data, part, (floats.size - at) * size_of(floats.type));
}

inline float sum_of(Floats x) {
  float sum = 0;
  for (int i = 0; i < kLanes; i++) sum += x[i];
  return sum;
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
  return (Floats)((Words)(sum * (Floats)power) & is_kept);
}

inline Floats sigmoid(Floats x) {
  const Words sign = (Words)x & 0x80000000u;
  const Floats fading = exponential((Floats)((Words)x | 0x80000000u));
  return (Floats)select((Words)((Integers)sign < 0), (Words)fading, (Words)(Floats{} + 1.0f)) /
         (1.0f + fading);
}

inline Floats activated(Floats x, Activation activation) {
  if (activation == Activation::kSilu) return x * sigmoid(x);
  if (activation == Activation::kGeluTanh)
    return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
  for (int i = 0; i < kLanes; i++) x[i] *= 0.5f + 0.5f * std::erf(x[i] * 0.70710678f);
  return x;
}

}  // namespace
}  // namespace specjax
