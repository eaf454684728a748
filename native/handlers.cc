// What JAX calls: checks the buffers of a call and runs it on XLA's threads.
#include <memory>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace specjax {
namespace {

#if defined(__x86_64__)
struct Features {
  // With all that the kernels' flags switch on.
  bool avx2 = false, avx512 = false, bf16 = false, amx = false;
  bool is_intel = false;
};

// Asks the processor, and whether the system saves its registers. `__builtin_cpu_supports` would do
// the same, but always answers no in zig's library.
Features features() {
  unsigned a, b, c, d, pairs, matrices, states, upper;
  Features has;
  const auto is_set = [](unsigned bits, std::initializer_list<int> wanted) {
    return std::all_of(wanted.begin(), wanted.end(), [=](int bit) { return bits >> bit & 1; });
  };
  has.is_intel = __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
  // FMA, XGETBV and F16C.
  if (!__get_cpuid(1, &a, &b, &c, &d) || !is_set(c, {12, 27, 29})) return has;
  __asm__("xgetbv" : "=a"(states), "=d"(upper) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &matrices)) return has;
  has.avx2 = is_set(states, {1, 2}) && is_set(b, {5});
  has.avx512 = has.avx2 && is_set(states, {5, 6, 7}) && is_set(b, {16, 17, 30, 31});
  const unsigned subleaves = a;
  if (subleaves < 1 || !__get_cpuid_count(7, 1, &pairs, &a, &c, &d)) return has;
  has.bf16 = has.avx512 && is_set(pairs, {5});
#if defined(__linux__)
  // The system saves the state of AMX only for processes that request it.
  constexpr long kRequest = 0x1023, kMatrices = 18;  // ARCH_REQ_XCOMP_PERM
  has.amx = has.bf16 && is_set(states, {17, 18}) && is_set(matrices, {22, 24}) &&
            syscall(SYS_arch_prctl, kRequest, kMatrices) == 0;
#endif
  return has;
}
#endif

// The instruction sets of this machine that there are kernels for, best first.
const std::vector<const Kernels*>& supported() {
  static const std::vector<const Kernels*> sets = [] {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    const Features has = features();
    if (has.amx) found.push_back(&kAmx);
    // Intel's cores multiply pairs of bfloat16 half as fast as they multiply floats.
    if (has.bf16 && !has.is_intel) found.push_back(&kAvx512Bf16);
    if (has.avx512) found.push_back(&kAvx512);
    if (has.bf16 && has.is_intel) found.push_back(&kAvx512Bf16);
    if (has.avx2) found.push_back(&kAvx2);
#endif
#if defined(__aarch64__)
    found.push_back(&kNeon);
#else
    found.push_back(&kPortable);
#endif
    return found;
  }();
  return sets;
}

// Takes the buffers of a call one by one, and keeps the first thing that is wrong with them.
class Buffers {
 public:
  Buffers(ffi::RemainingArgs args, ffi::RemainingRets results) : args_(args), results_(results) {}

  ffi::AnyBuffer next() {
    if (auto buffer = args_.get<ffi::AnyBuffer>(index_++); buffer.has_value()) return *buffer;
    require(false, "the call has too few operands");
    return ffi::AnyBuffer(&empty_);
  }

  ffi::AnyBuffer next_result() {
    if (auto buffer = results_.get<ffi::AnyBuffer>(result_++); buffer.has_value()) return **buffer;
    require(false, "the call has too few results");
    return ffi::AnyBuffer(&empty_);
  }

  void require(bool holds, const char* message) {
    if (!holds && error_.empty()) error_ = message;
  }

  // Returns a buffer of floats; `shape` is -1 where any size will do.
  Floating floats(ffi::AnyBuffer buffer, std::vector<int64_t> shape, const char* what) {
    Floating result;
    switch (buffer.element_type()) {
      case ffi::DataType::BF16: result.type = Type::kBfloat16; break;
      case ffi::DataType::F16: result.type = Type::kFloat16; break;
      case ffi::DataType::F32: result.type = Type::kFloat32; break;
      default: require(false, what);
    }
    check_shape(buffer, shape, what);
    result.data = static_cast<char*>(buffer.untyped_data());
    result.size = buffer.element_count();
    return result;
  }

  template <ffi::DataType type>
  ffi::NativeType<type>* values(ffi::AnyBuffer buffer, std::vector<int64_t> shape,
                                const char* what) {
    require(buffer.element_type() == type, what);
    check_shape(buffer, shape, what);
    return static_cast<ffi::NativeType<type>*>(buffer.untyped_data());
  }

  const float* floats32(ffi::AnyBuffer buffer, std::vector<int64_t> shape, const char* what) {
    return values<ffi::DataType::F32>(buffer, shape, what);
  }

  // Takes the panels of a weight of these outputs and inputs, -1 if any, and its scales. Floats of
  // 16 bits, which lie there as integers, are of `type`.
  Weight weight(bool has_scales, int64_t outputs, int64_t inputs, Type type) {
    Weight weight;
    const ffi::AnyBuffer panels = next();
    const auto shape = panels.dimensions();
    const auto kind = [&]() -> std::pair<Kind, std::vector<int64_t>> {
      switch (panels.element_type()) {
        case ffi::DataType::U16:
          return {type == Type::kFloat16 ? Kind::kFloat16 : Kind::kBfloat16, {-1, -1, 16, 2}};
        case ffi::DataType::F32: return {Kind::kFloat32, {-1, -1, 2, 16}};
        case ffi::DataType::S8: return {Kind::kInt8, {-1, -1, 16, 2}};
        case ffi::DataType::U32: return {Kind::kInt4, {-1, -1, 16}};
        default: require(false, "a weight has a type that has no kernel"); return {};
      }
    }();
    weight.kind = kind.first;
    check_shape(panels, kind.second, "a weight is not packed in panels of 16 outputs");
    if (!error_.empty()) return weight;
    weight.panels = static_cast<const char*>(panels.untyped_data());
    weight.num_panels = shape[0];
    weight.pairs = shape[1] * (weight.kind == Kind::kInt4 ? 4 : 1);
    require(outputs < 0 || weight.num_panels == (outputs + kPanel - 1) / kPanel,
            "a weight has another number of outputs");
    require(inputs < 0 || weight.pairs == (inputs + 1) / 2,
            "a weight has another number of inputs");
    const bool is_quantised = weight.kind == Kind::kInt8 || weight.kind == Kind::kInt4;
    require(is_quantised == has_scales, "only quantised weights have scales");
    if (has_scales && error_.empty()) {
      const ffi::AnyBuffer scales = next();
      weight.scales = floats(scales, {weight.num_panels, -1, 16}, "scales do not fit their weight");
      if (!error_.empty()) return weight;
      weight.groups = scales.dimensions()[1];
      const int64_t step = weight.kind == Kind::kInt4 ? 4 : 1;
      require(weight.pairs > 0 && weight.groups > 0 && weight.pairs % (step * weight.groups) == 0,
              "scales do not fit their weight");
    }
    return weight;
  }

  const std::string& error() const { return error_; }

 private:
  void check_shape(ffi::AnyBuffer buffer, const std::vector<int64_t>& shape, const char* what) {
    const auto found = buffer.dimensions();
    require(std::equal(found.begin(), found.end(), shape.begin(), shape.end(),
                       [](int64_t a, int64_t b) { return b < 0 || a == b; }),
            what);
    require(reinterpret_cast<uintptr_t>(buffer.untyped_data()) % 4 == 0,
            "a buffer is not aligned to 4 bytes");
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets results_;
  size_t index_ = 0, result_ = 0;
  std::string error_;
  XLA_FFI_Buffer empty_ = {};
};

ffi::Error failure(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "specjax: " + message);
}

bool fits(const Weight& weight, Type type) {
  return weight.scales.data || static_cast<int>(weight.kind) == static_cast<int>(type);
}

// Runs a call on this thread and those of the pool. This one returns when all is computed; a thread
// that comes later finds nothing to do.
ffi::Error run(ffi::ThreadPool& pool, std::shared_ptr<Call> call, int64_t parts) {
  call->team.num_threads = std::max<int64_t>(std::min(pool.num_threads(), parts), 1);
  for (int64_t t = 1; t < call->team.num_threads; t++) {
    auto help = [call] { call->run(); };
    pool.Schedule(std::move(help));
  }
  call->run();
  return ffi::Error::Success();
}

// Zeros all but the first `count` of every `of` rows.
void clear_rest(char* data, int64_t num_rows, int64_t row_bytes, int64_t count, int64_t of) {
  for (int64_t row = 0; row < num_rows && count < of; row += of)
    std::memset(data + (row + count) * row_bytes, 0, (of - count) * row_bytes);
}

// rows [M, I], the count of those to compute, panels and scales, if there are any -> sums
// [M, 16 P], float32, 0 for other rows.
ffi::Error product(ffi::ThreadPool pool, int32_t instructions, ffi::RemainingArgs args,
                   ffi::RemainingRets results) {
  const auto& sets = supported();
  if (instructions < 0 || instructions >= static_cast<int32_t>(sets.size()))
    return failure("this machine has no instruction set of that number");
  Buffers buffers(args, results);
  const ffi::AnyBuffer rows = buffers.next();
  Product product;
  product.rows = buffers.floats(rows, {-1, -1}, "rows are not a matrix of floats");
  if (!buffers.error().empty()) return failure(buffers.error());
  const int64_t num_rows = rows.dimensions()[0];
  product.num_inputs = rows.dimensions()[1];
  const int32_t* count = buffers.values<ffi::DataType::S32>(buffers.next(), {}, "wrong count");
  product.weight = buffers.weight(args.size() == 4, -1, product.num_inputs, product.rows.type);
  buffers.require(fits(product.weight, product.rows.type), "rows and weight have different types");
  product.sums = buffers.values<ffi::DataType::F32>(
      buffers.next_result(), {num_rows, product.weight.num_panels * kPanel},
      "sums do not fit rows and weight");
  if (!buffers.error().empty()) return failure(buffers.error());
  product.num_rows = std::clamp<int64_t>(*count, 0, num_rows);
  clear_rest((char*)product.sums, num_rows, product.weight.num_panels * kPanel * 4,
             product.num_rows, num_rows);
  return run(pool, std::shared_ptr<Call>(sets[instructions]->product(product)),
             product.weight.num_panels / 8);
}

// Takes the params of a layer that `fields` has, in the order of `stack.FIELDS` in Python.
Layer take_layer(Buffers& buffers, int64_t fields, Pass& pass, int64_t inputs) {
  Layer layer;
  const auto has = [&] {
    const bool is_set = fields & 1;
    fields >>= 1;
    return is_set;
  };
  const auto take_vector = [&](int64_t size) {
    if (!has()) return Floating{};
    return buffers.floats(buffers.next(), {size}, "a norm or bias has another shape");
  };
  const auto take_norm = [&](Norm& norm, int64_t size) {
    norm.weight = take_vector(size);
    norm.bias = take_vector(size);
    buffers.require(!norm.weight.data || pass.norm_kind != NormKind::kLayer || norm.bias.data,
                    "a norm has no bias");
  };
  const auto take_linear = [&](Linear& linear, int64_t outputs, int64_t from) {
    const bool is_there = has(), has_scales = has();
    if (is_there) linear.weight = buffers.weight(has_scales, outputs, from, pass.type);
    linear.bias = take_vector(outputs);
    buffers.require(!is_there || fits(linear.weight, pass.type), "a weight has another type");
    const Linear& first = pass.layers.empty() ? layer.query : pass.layers[0].query;
    buffers.require(!is_there || !linear.weight.scales.data == !first.weight.scales.data,
                    "only some weights are quantised");
  };
  const int64_t size = pass.head_dim;
  take_norm(layer.input_norm, pass.width);
  take_norm(layer.query_norm, size);
  take_norm(layer.key_norm, size);
  take_norm(layer.attention_output_norm, pass.width);
  take_norm(layer.post_attention_norm, pass.width);
  take_norm(layer.mlp_output_norm, pass.width);
  take_linear(layer.query, pass.heads * size, layer.input_norm.weight.data ? pass.width : inputs);
  take_linear(layer.key, pass.groups * size, layer.input_norm.weight.data ? pass.width : inputs);
  take_linear(layer.value, pass.groups * size, layer.input_norm.weight.data ? pass.width : inputs);
  take_linear(layer.output, pass.width, pass.heads * size);
  take_linear(layer.gate, pass.inner, pass.width);
  take_linear(layer.up, pass.inner, pass.width);
  take_linear(layer.down, pass.width, pass.inner);
  const std::vector<int64_t> cache = {pass.batch, pass.groups, pass.num_slots, size};
  layer.keys = buffers.floats(buffers.next(), cache, "keys have another shape");
  layer.values = buffers.floats(buffers.next(), cache, "values have another shape");
  const Type cached = pass.layers.empty() ? layer.keys.type : pass.layers[0].keys.type;
  buffers.require(layer.keys.type == cached && layer.values.type == cached,
                  "keys and values have different types");
  buffers.require(buffers.next_result().untyped_data() == layer.keys.data &&
                      buffers.next_result().untyped_data() == layer.values.data,
                  "keys and values are not updated in place");
  const auto is_there = [](const Linear& linear) { return linear.weight.panels != nullptr; };
  buffers.require(is_there(layer.query) && is_there(layer.key) && is_there(layer.value) &&
                      is_there(layer.output) && is_there(layer.up) && is_there(layer.down) &&
                      layer.post_attention_norm.weight.data,
                  "a layer lacks a weight");
  return layer;
}

using Integers = ffi::Span<const int32_t>;

// Operands: input [B, Q, D], normed [B, Q, E], the positions of tokens [B, Q] and of slots [B, S],
// length [B], the count of tokens to compute [], visible [B, Q, C], cosine and sine [B, 1, Q, R] of
// each rope, the final norm, and the layers, each with its keys and values [B, K, S, H]. Results:
// output [B, Q, D], the outputs of the tapped layers [T, B, Q, D], attention [A, B, Q, S], all of
// them 0 for other tokens, and the keys and values, in place.
ffi::Error layers(ffi::ThreadPool pool, int32_t instructions, Integers sizes, Integers numbers,
                  ffi::Span<const float> factors, ffi::Span<const int64_t> fields,
                  Integers layer_windows, Integers layer_ropes, Integers windows,
                  Integers tapped_layers, Integers tapped_heads, ffi::RemainingArgs args,
                  ffi::RemainingRets results) {
  const auto& sets = supported();
  if (instructions < 0 || instructions >= static_cast<int32_t>(sets.size()))
    return failure("this machine has no instruction set of that number");
  Buffers buffers(args, results);
  Pass pass;
  const size_t num_layers = fields.size();
  buffers.require(sizes.size() == 5 && numbers.size() == 4 && factors.size() == 3 &&
                      num_layers > 0 && layer_windows.size() == num_layers &&
                      layer_ropes.size() == num_layers && tapped_heads.size() % 2 == 0,
                  "attributes have other sizes");
  const ffi::AnyBuffer input = buffers.next(), normed = buffers.next();
  buffers.require(input.dimensions().size() == 3 && normed.dimensions().size() == 3,
                  "inputs have other ranks");
  if (!buffers.error().empty()) return failure(buffers.error());
  const auto shape = input.dimensions();
  pass.batch = shape[0], pass.num_queries = shape[1], pass.width = shape[2];
  pass.heads = sizes[0], pass.groups = sizes[1], pass.head_dim = sizes[2];
  pass.inner = sizes[3], pass.rotated = sizes[4];
  pass.norm_kind = static_cast<NormKind>(numbers[0]);
  pass.activation = static_cast<Activation>(numbers[1]);
  const int64_t num_ropes = numbers[2];
  const bool has_final_norm = numbers[3];
  pass.epsilon = factors[0], pass.scale = factors[1], pass.softcap = factors[2];
  buffers.require(pass.groups > 0 && pass.heads % pass.groups == 0 && pass.head_dim > 0 &&
                      pass.head_dim % kPanel == 0 && pass.rotated <= pass.head_dim &&
                      pass.rotated % 2 == 0 && numbers[0] >= 0 && numbers[0] < 3 &&
                      numbers[1] >= 0 && numbers[1] < 3,
                  "heads have sizes that have no kernel");
  if (!buffers.error().empty()) return failure(buffers.error());
  const int64_t batch = pass.batch, queries = pass.num_queries, width = pass.width;
  pass.input = buffers.floats(input, {batch, queries, width}, "the input is not of floats");
  pass.type = pass.input.type;
  const int64_t inputs = normed.dimensions()[2];
  pass.normed = buffers.floats(normed, {batch, queries, -1}, "the normed input has another shape");
  buffers.require(pass.normed.type == pass.type, "the normed input has another type");
  pass.positions =
      buffers.values<ffi::DataType::S32>(buffers.next(), {batch, queries}, "positions do not fit");
  const ffi::AnyBuffer slots = buffers.next();
  pass.slot_positions = buffers.values<ffi::DataType::S32>(slots, {batch, -1}, "slots do not fit");
  pass.length = buffers.values<ffi::DataType::S32>(buffers.next(), {batch}, "lengths do not fit");
  const int32_t* count = buffers.values<ffi::DataType::S32>(buffers.next(), {}, "wrong count");
  const ffi::AnyBuffer visible = buffers.next();
  pass.visible = buffers.values<ffi::DataType::PRED>(visible, {batch, queries, -1},
                                                     "visible slots do not fit");
  if (!buffers.error().empty()) return failure(buffers.error());
  pass.num_computed = std::clamp<int64_t>(*count, 0, queries);
  pass.num_slots = slots.dimensions()[1], pass.num_scratch = visible.dimensions()[2];
  buffers.require(pass.num_scratch >= queries && pass.num_slots >= queries,
                  "the cache has too few slots");
  for (int64_t b = 0; b < batch; b++)
    buffers.require(pass.length[b] >= 0 && pass.length[b] <= pass.num_slots, "a length is wrong");
  for (int64_t rope = 0; rope < num_ropes; rope++) {
    const std::vector<int64_t> angles = {batch, 1, queries, pass.rotated};
    pass.cosines.push_back(buffers.floats32(buffers.next(), angles, "cosines do not fit"));
    pass.sines.push_back(buffers.floats32(buffers.next(), angles, "sines do not fit"));
  }
  if (has_final_norm) {
    pass.final_norm.weight = buffers.floats(buffers.next(), {width}, "the final norm does not fit");
    if (pass.norm_kind == NormKind::kLayer)
      pass.final_norm.bias = buffers.floats(buffers.next(), {width}, "the final norm does not fit");
  }
  const int64_t num_taps = tapped_layers.size(), num_heads = tapped_heads.size() / 2;
  pass.output = buffers.floats(buffers.next_result(), {batch, queries, width}, "wrong output");
  pass.hidden = buffers.floats(buffers.next_result(), {num_taps, batch, queries, width}, "wrong taps");
  pass.attention = buffers.values<ffi::DataType::F32>(
      buffers.next_result(), {num_heads, batch, queries, pass.num_slots}, "wrong attention");
  for (size_t number = 0; number < num_layers && buffers.error().empty(); number++) {
    pass.layers.push_back(take_layer(buffers, fields[number], pass, inputs));
    Layer& layer = pass.layers.back();
    layer.window = layer_windows[number], layer.rope = layer_ropes[number];
    buffers.require(layer.window >= 0 && layer.window < static_cast<int64_t>(windows.size()) &&
                        layer.rope >= -1 && layer.rope < num_ropes,
                    "a layer has another window or rope");
    buffers.require(number == 0 || layer.input_norm.weight.data, "a later layer has no norm");
  }
  if (!buffers.error().empty()) return failure(buffers.error());
  pass.windows.assign(windows.begin(), windows.end());
  pass.tapped_layers.assign(tapped_layers.begin(), tapped_layers.end());
  for (int64_t tap = 0; tap < num_heads; tap++)
    pass.tapped_heads.emplace_back(tapped_heads[2 * tap], tapped_heads[2 * tap + 1]);
  const auto clear = [&](char* data, int64_t results, int64_t row_bytes) {
    clear_rest(data, results * batch * queries, row_bytes, pass.num_computed, queries);
  };
  clear(pass.output.data, 1, width * size_of(pass.type));
  clear(pass.hidden.data, num_taps, width * size_of(pass.type));
  clear((char*)pass.attention, num_heads, pass.num_slots * 4);
  if (pass.num_rows() == 0) return ffi::Error::Success();
  const int64_t parts = std::max(pass.layers[0].up.weight.num_panels / 2, pass.num_rows());
  return run(pool, std::shared_ptr<Call>(sets[instructions]->layers(std::move(pass))), parts);
}

// Moves scratch slot path[b, i] of each cache [B, K, S, H] to scratch slot i, for i < count[b], in
// place. Operands: path [B, P], in ascending order, the committed length [B], count [B], the caches.
ffi::Error keep(ffi::RemainingArgs args, ffi::RemainingRets results) {
  Buffers buffers(args, results);
  const ffi::AnyBuffer paths = buffers.next();
  const int32_t* path = buffers.values<ffi::DataType::S32>(paths, {-1, -1}, "paths do not fit");
  if (!buffers.error().empty()) return failure(buffers.error());
  const int64_t batch = paths.dimensions()[0], longest = paths.dimensions()[1];
  const auto* length = buffers.values<ffi::DataType::S32>(buffers.next(), {batch}, "wrong lengths");
  const auto* count = buffers.values<ffi::DataType::S32>(buffers.next(), {batch}, "wrong counts");
  for (size_t number = 0; number < results.size() && buffers.error().empty(); number++) {
    const ffi::AnyBuffer buffer = buffers.next();
    const Floating cache = buffers.floats(buffer, {batch, -1, -1, -1}, "a cache has another shape");
    buffers.require(buffers.next_result().untyped_data() == cache.data, "a cache is not in place");
    if (!buffers.error().empty()) break;
    const int64_t heads = buffer.dimensions()[1], slots = buffer.dimensions()[2];
    const int64_t bytes = buffer.dimensions()[3] * size_of(cache.type);
    for (int64_t b = 0; b < batch; b++) {
      const int32_t* from = path + b * longest;
      const int64_t kept = std::min<int64_t>(count[b], longest);
      for (int64_t i = 0; i < kept; i++)
        buffers.require(length[b] >= 0 && from[i] >= i && length[b] + from[i] < slots,
                        "a path leaves the scratch or does not ascend");
      if (!buffers.error().empty()) break;
      for (int64_t head = b * heads; head < (b + 1) * heads; head++) {
        char* scratch = cache.data + (head * slots + length[b]) * bytes;
        for (int64_t i = 0; i < kept; i++)
          if (from[i] != i) std::memcpy(scratch + i * bytes, scratch + from[i] * bytes, bytes);
      }
    }
  }
  return buffers.error().empty() ? ffi::Error::Success() : failure(buffers.error());
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_keep, specjax::keep,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_product, specjax::product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int32_t>("instructions")
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_layers, specjax::layers,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int32_t>("instructions")
                                  .Attr<specjax::Integers>("sizes")
                                  .Attr<specjax::Integers>("numbers")
                                  .Attr<ffi::Span<const float>>("factors")
                                  .Attr<ffi::Span<const int64_t>>("fields")
                                  .Attr<specjax::Integers>("layer_windows")
                                  .Attr<specjax::Integers>("layer_ropes")
                                  .Attr<specjax::Integers>("windows")
                                  .Attr<specjax::Integers>("tapped_layers")
                                  .Attr<specjax::Integers>("tapped_heads")
                                  .RemainingArgs()
                                  .RemainingRets());

// The version of this interface, also in specjax/models/native.py.
extern "C" int specjax_version() { return 5; }

// The names of the instruction sets that products can use here, best first, by commas.
extern "C" const char* specjax_instructions() {
  static const std::string names = [] {
    std::string joined;
    for (const auto* set : specjax::supported())
      joined += (joined.empty() ? "" : ",") + std::string(set->name);
    return joined;
  }();
  return names.c_str();
}
