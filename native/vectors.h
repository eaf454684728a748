// Vectors of one instruction set. The compiler's flags decide their width.
#pragma once
#include <cmath>
#include <initializer_list>
#include <type_traits>

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

typedef float Floats __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kBytes), aligned(4), may_alias));

inline Floats as_floats(Words bits) { return (Floats)bits; }

}  // namespace
}  // namespace specjax

#define JOIN(a, b, c) a##b##c
#define TABLE(name, kind) JOIN(k, name, kind)
