// What JAX calls: checks the buffers of a product and spreads its panels over XLA's threads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace specjax {
namespace {

#if defined(__x86_64__)
struct Features {
  bool avx2 = false, avx512 = false;  // with all that the kernels' flags switch on
};

// Asks the processor, and whether the system saves its registers. `__builtin_cpu_supports` would do
// the same, but always answers no in zig's library.
Features features() {
  unsigned a, b, c, d, bf16, states, upper;
  Features has;
  const auto is_set = [](unsigned bits, std::initializer_list<int> wanted) {
    return std::all_of(wanted.begin(), wanted.end(), [=](int bit) { return bits >> bit & 1; });
  };
  if (!__get_cpuid(1, &a, &b, &c, &d) || !is_set(c, {12, 27})) return has;  // FMA, XGETBV
  __asm__("xgetbv" : "=a"(states), "=d"(upper) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return has;
  has.avx2 = is_set(states, {1, 2}) && is_set(b, {5});
  const unsigned subleaves = a;
  if (subleaves < 1 || !__get_cpuid_count(7, 1, &bf16, &a, &c, &d)) return has;
  has.avx512 = has.avx2 && is_set(states, {5, 6, 7}) && is_set(b, {16, 17, 30, 31}) &&
               is_set(bf16, {5});
  return has;
}
#endif

struct InstructionSet {
  const Kernels* products;
  AttentionKernel attention;
};

// The instruction sets of this machine that there are kernels for, best first.
const std::vector<InstructionSet>& supported() {
  static const std::vector<InstructionSet> sets = [] {
    std::vector<InstructionSet> found;
#if defined(__x86_64__)
    const Features has = features();
    if (has.avx512) found.push_back({&kAvx512, kAvx512Attention});
    if (has.avx2) found.push_back({&kAvx2, kAvx2Attention});
#endif
    found.push_back({&kPortable, kPortableAttention});
    return found;
  }();
  return sets;
}

ffi::Future fail(std::string message) {
  ffi::Promise promise;
  promise.SetError(ffi::Error(ffi::ErrorCode::kInvalidArgument, "specjax: " + message));
  return ffi::Future(promise);
}

bool have_type(ffi::DataType type, std::initializer_list<ffi::DataType> types) {
  return std::all_of(types.begin(), types.end(), [=](auto each) { return each == type; });
}

// XLA aligns its buffers to 16 bytes or more; the kernels read whole words.
bool are_aligned(std::initializer_list<const void*> buffers) {
  return std::all_of(buffers.begin(), buffers.end(),
                     [](auto buffer) { return reinterpret_cast<uintptr_t>(buffer) % 4 == 0; });
}

// Work that threads share by a counter. One that starts when all is done finds nothing; none waits.
struct Work {
  std::function<void(int64_t, int64_t)> run_part;
  int64_t total, chunk;
  std::atomic<int64_t> next{0}, done{0};
  ffi::Promise promise;

  void run() {
    for (int64_t first; (first = next.fetch_add(chunk)) < total;) {
      int64_t last = std::min(first + chunk, total);
      run_part(first, last);
      if (done.fetch_add(last - first) + last - first == total) promise.SetAvailable();
    }
  }
};

// Runs parts of `total` on this thread and those of the pool.
ffi::Future share(ffi::ThreadPool& pool, int64_t total, int64_t chunk,
                  std::function<void(int64_t, int64_t)> run_part) {
  auto work = std::make_shared<Work>();
  ffi::Future future(work->promise);
  work->run_part = std::move(run_part);
  work->total = total, work->chunk = chunk;
  if (total == 0) work->promise.SetAvailable();
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), (total + chunk - 1) / chunk) - 1;
  for (int64_t t = 0; t < helpers; t++) {
    auto help = [work] { work->run(); };
    pool.Schedule(std::move(help));
  }
  work->run();
  return future;
}

float widened(uint16_t bfloat16) {
  uint32_t bits = uint32_t{bfloat16} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// IEEE half to float, exactly.
float widened_half(uint16_t half) {
  uint32_t magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (magnitude >= 0x0f800000u) bits = magnitude | 0x7f800000u;
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A product and the rows that had to be copied for it.
struct Operands {
  Product product;
  std::vector<float> rows;
  std::vector<uint16_t> bfloat16;
};

// Reads rows [M, I] of any float type, padded to whole pairs.
bool read_rows(const ffi::AnyBuffer& rows, int64_t count, int64_t inputs, int64_t padded,
               Operands& work, bool wants_bfloat16) {
  const auto type = rows.element_type();
  if (wants_bfloat16 && type != ffi::DataType::BF16) return false;
  if (type == ffi::DataType::BF16 && wants_bfloat16 && inputs == padded) {
    work.product.bfloat16 = static_cast<const uint16_t*>(rows.untyped_data());
    return true;
  }
  if (type == ffi::DataType::F32 && inputs == padded) {
    work.product.rows = static_cast<const float*>(rows.untyped_data());
    return true;
  }
  if (wants_bfloat16) {
    work.bfloat16.assign(count * padded, 0);
    const auto* data = static_cast<const uint16_t*>(rows.untyped_data());
    for (int64_t m = 0; m < count; m++)
      std::copy_n(data + m * inputs, inputs, work.bfloat16.data() + m * padded);
    work.product.bfloat16 = work.bfloat16.data();
    return true;
  }
  work.rows.assign(count * padded, 0);
  for (int64_t m = 0; m < count; m++) {
    float* row = work.rows.data() + m * padded;
    if (type == ffi::DataType::F32) {
      std::copy_n(static_cast<const float*>(rows.untyped_data()) + m * inputs, inputs, row);
    } else {
      const auto* data = static_cast<const uint16_t*>(rows.untyped_data()) + m * inputs;
      if (type == ffi::DataType::BF16)
        std::transform(data, data + inputs, row, widened);
      else if (type == ffi::DataType::F16)
        std::transform(data, data + inputs, row, widened_half);
      else
        return false;
    }
  }
  work.product.rows = work.rows.data();
  return true;
}

// rows [M, I] x panels [P, ...] -> sums [M, 16 P], float32. `scales` is [P, G, 16], empty for floats.
ffi::Future product(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::AnyBuffer panels,
                    ffi::AnyBuffer scales, ffi::Result<ffi::AnyBuffer> sums,
                    int32_t instructions) {
  const auto& sets = supported();
  if (instructions < 0 || instructions >= static_cast<int32_t>(sets.size()))
    return fail("this machine has no instruction set of that number");
  const auto x = rows.dimensions(), w = panels.dimensions(), y = sums->dimensions(),
             s = scales.dimensions();
  if (x.size() != 2 || y.size() != 2 || w.size() < 3) return fail("operands have other ranks");
  Kind kind;
  int64_t pairs = w[1];
  switch (panels.element_type()) {
    case ffi::DataType::BF16: kind = Kind::kBfloat16; break;
    case ffi::DataType::F16: kind = Kind::kFloat16; break;
    case ffi::DataType::F32: kind = Kind::kFloat32; break;
    case ffi::DataType::S8: kind = Kind::kInt8; break;
    case ffi::DataType::U8: kind = Kind::kInt4; break;
    default: return fail("weights have a type that has no kernel");
  }
  const bool is_int4 = kind == Kind::kInt4;
  const bool is_paired = kind == Kind::kBfloat16 || kind == Kind::kFloat16;
  const bool fits = is_int4 ? w.size() == 3 && w[2] == kPanel
                            : w.size() == 4 && w[2] == (is_paired ? kPanel : 2) &&
                                  w[3] == (is_paired ? 2 : kPanel);
  if (!fits) return fail("weights are not packed in panels of 16 outputs");
  const bool has_scales = is_int4 || kind == Kind::kInt8;
  if (has_scales && (s.size() != 3 || s[0] != w[0] || s[1] < 1 || s[2] != kPanel || pairs < 1 ||
                     pairs % s[1] != 0))
    return fail("scales do not fit the weights");
  if ((x[1] + 1) / 2 != pairs || y[0] != x[0] || y[1] != w[0] * kPanel)
    return fail("shapes of rows, weights and sums do not fit together");
  if (!have_type(ffi::DataType::F32, {scales.element_type(), sums->element_type()}))
    return fail("scales and sums must be float32");
  if (!are_aligned({rows.untyped_data(), panels.untyped_data(), scales.untyped_data(),
                    sums->untyped_data()}))
    return fail("a buffer is not aligned to 4 bytes");

  auto work = std::make_shared<Operands>();
  Product& product = work->product;
  product = {nullptr, nullptr, panels.untyped_data(), has_scales ? scales.typed_data<float>() : nullptr,
             sums->typed_data<float>(), x[0], 2 * pairs, y[1], has_scales ? 2 * pairs / s[1] : 0};
  const Kernels& set = *sets[instructions].products;
  const bool wants_bfloat16 =
      kind == Kind::kBfloat16 && std::string(set.name) == "Avx512";
  if (!read_rows(rows, x[0], x[1], 2 * pairs, *work, wants_bfloat16))
    return fail("rows have a type that does not fit the weights");
  const Kernel kernel = set.by_kind[static_cast<int>(kind)];
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t chunk = std::max<int64_t>(2, w[0] / (threads * 4) / 2 * 2);
  return share(pool, x[0] ? w[0] : 0, chunk, [work, kernel](int64_t first, int64_t last) {
    kernel(work->product, first, last);
  });
}

// query [B, A, Q, H], keys and values [B, K, S, H], visible [B, Q, S] -> mixed [B, A, Q, H].
ffi::Future attention(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer keys,
                      ffi::AnyBuffer values, ffi::AnyBuffer visible,
                      ffi::Result<ffi::AnyBuffer> mixed,
                      int32_t instructions, float scale, float softcap) {
  const auto& sets = supported();
  if (instructions < 0 || instructions >= static_cast<int32_t>(sets.size()))
    return fail("this machine has no instruction set of that number");
  const auto q = query.dimensions(), k = keys.dimensions(), v = values.dimensions(),
             m = visible.dimensions(), out = mixed->dimensions();
  const auto is_equal = [](auto a, auto b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); };
  if (q.size() != 4 || k.size() != 4 || m.size() != 3 || !is_equal(k, v) || !is_equal(q, out))
    return fail("operands of attention have other ranks");
  if (k[0] != q[0] || k[3] != q[3] || m[0] != q[0] || m[1] != q[2] || m[2] != k[2] || k[1] < 1 ||
      q[1] % k[1] != 0 || q[3] % kPanel != 0)
    return fail("shapes of queries, keys and visible slots do not fit together");
  if (!have_type(ffi::DataType::F32, {query.element_type(), keys.element_type(),
                                      values.element_type(), mixed->element_type()}) ||
      visible.element_type() != ffi::DataType::PRED)
    return fail("queries, keys and values must be float32, and visible slots boolean");
  const Attention whole = {query.typed_data<float>(), keys.typed_data<float>(),
                           values.typed_data<float>(), visible.typed_data<bool>(),
                           mixed->typed_data<float>(), q[1], k[1], q[2], k[2], q[3], scale,
                           softcap};
  if (!are_aligned({whole.query, whole.keys, whole.values, whole.mixed}))
    return fail("a buffer is not aligned to 4 bytes");
  const AttentionKernel kernel = sets[instructions].attention;
  return share(pool, q[0] * k[1] * q[2], 1,
               [whole, kernel](int64_t first, int64_t last) { kernel(whole, first, last); });
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_product, specjax::product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("instructions"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_attention, specjax::attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("instructions")
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"));

// The version of this interface, also in specjax/models/native.py.
extern "C" int specjax_version() { return 1; }

// The names of the instruction sets that products can use here, best first, by commas.
extern "C" const char* specjax_instructions() {
  static const std::string names = [] {
    std::string joined;
    for (const auto& set : specjax::supported())
      joined += (joined.empty() ? "" : ",") + std::string(set.products->name);
    return joined;
  }();
  return names.c_str();
}
