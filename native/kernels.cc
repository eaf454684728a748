// The kernels of one instruction set. Compiled once for each: INSTRUCTIONS names it, and the
// compiler's flags decide the width of its vectors.
#include "attention.h"

namespace specjax {
namespace {

// Writes the norm of `row` [size], padded with zeros, to `out`, rounded. May be in place.
void normalise(const Norm& norm, NormKind kind, float epsilon, Type type, int64_t size,
               const float* row, float* out) {
  Floats mean = {}, squares = {};
  if (kind == NormKind::kLayer) {
    for (int64_t i = 0; i < size; i += kLanes) mean += *(const Floats*)(row + i);
    mean = Floats{} + sum_of(mean) / (float)size;
  }
  const auto centred = [&](int64_t i) {
    Floats part = *(const Floats*)(row + i) - mean;
    for (int64_t lane = size - i; lane < kLanes; lane++) part[lane] = 0;
    return part;
  };
  for (int64_t i = 0; i < size; i += kLanes) squares += centred(i) * centred(i);
  const float factor = 1 / std::sqrt(sum_of(squares) / (float)size + epsilon);
  for (int64_t i = 0; i < size; i += kLanes) {
    Floats value = centred(i) * factor, weight = load(norm.weight, i);
    if (kind == NormKind::kRms) value = weight * rounded(value, type);
    if (kind == NormKind::kRmsPlusOne) value = (1.0f + weight) * value;
    if (kind == NormKind::kLayer) value = weight * value + load(norm.bias, i);
    *(Floats*)(out + i) = rounded(value, type);
  }
}

// Adds the bias of outputs from `at` on to sums, rounding as a Linear does.
void add_bias(const Linear& linear, int64_t at, int64_t size, Type type, float* sums) {
  for (int64_t i = 0; i < size; i += kLanes) {
    Floats value = rounded(*(Floats*)(sums + i), type);
    if (linear.bias.data) value = rounded(value + load(linear.bias, at + i), type);
    *(Floats*)(sums + i) = value;
  }
}

struct Layers : Call {
  Pass pass;
  int64_t rows, wide;              // wide: the hidden size, padded
  std::vector<float> x, mixed;     // [R, wide]
  std::vector<float> query;        // [A, R, H]
  Rows given, normed, merged, inner;  // inputs of products; `given`: of a layer without its norm
  std::vector<std::vector<View>> views;  // by window and row

  explicit Layers(Pass all)
      : Call(1 + 7 * all.layers.size()),
        pass(std::move(all)),
        rows(pass.num_rows()),
        wide(padded(pass.width)),
        x(rows * wide),
        mixed(rows * wide),
        query(pass.heads * rows * pass.head_dim),
        given(rows, pass.layers[0].query.weight.pairs, pass.type),
        normed(rows, pass.layers[0].up.weight.pairs, pass.type),
        merged(rows, pass.layers[0].output.weight.pairs, pass.type),
        inner(rows, pass.layers[0].down.weight.pairs, pass.type),
        views(pass.windows.size(), std::vector<View>(rows)) {}

  float* buffer(size_t size) {
    thread_local std::vector<float> floats;
    if (floats.size() < size) floats.resize(size);
    return floats.data();
  }

  void normalise_row(const Norm& norm, float* row, float* out) const {
    normalise(norm, pass.norm_kind, pass.epsilon, pass.type, pass.width, row, out);
  }

  // Writes what the first layer of those left reads: the norm of a row of x.
  void start_layer(const Norm& norm, int64_t row) {
    float* out = buffer(wide);
    normalise_row(norm, &x[row * wide], out);
    normed.put(row, 0, out, wide);
  }

  void begin(int64_t row) {
    for (int64_t i = 0; i < pass.width; i += kLanes)
      *(Floats*)&x[row * wide + i] = load(pass.input.from(row * pass.width).first(pass.width), i);
    for (size_t w = 0; w < views.size(); w++) views[w][row] = view_of(pass, row, pass.windows[w]);
    if (pass.layers[0].input_norm.weight.data) return start_layer(pass.layers[0].input_norm, row);
    const int64_t size = pass.normed.size / rows;
    float* out = buffer(padded(size));
    for (int64_t i = 0; i < size; i += kLanes)
      *(Floats*)(out + i) = load(pass.normed.from(row * size).first(size), i);
    given.put(row, 0, out, padded(size));
  }

  // Computes query, key or value of one head: rotates them and writes keys and values to the cache.
  void project_head(const Layer& layer, int64_t number) {
    const int64_t size = pass.head_dim, panels = size / kPanel, kept = pass.heads + pass.groups;
    const bool is_query = number < pass.heads, is_value = number >= kept;
    const int64_t head = is_query ? number : (number - pass.heads) % pass.groups;
    const Linear& linear = is_query ? layer.query : is_value ? layer.value : layer.key;
    const Norm& norm = is_query ? layer.query_norm : layer.key_norm;
    float* out = is_query ? &query[head * rows * size] : buffer(rows * size);
    multiply(linear.weight, head * panels, (head + 1) * panels,
             layer.input_norm.weight.data ? normed : given, out, size);
    for (int64_t row = 0; row < rows; row++) {
      float* values = out + row * size;
      add_bias(linear, head * size, size, pass.type, values);
      if (!is_value && norm.weight.data)
        normalise(norm, pass.norm_kind, pass.epsilon, pass.type, size, values, values);
      if (!is_value && layer.rope >= 0) rotate(layer.rope, row, values);
      if (is_query) continue;
      const int64_t batch = row / pass.num_queries, q = row % pass.num_queries;
      const int64_t most = pass.num_slots - pass.num_queries;
      const int64_t start = pass.length[batch] + pass.num_scratch - pass.num_queries;
      const int64_t slot = std::clamp<int64_t>(start, 0, most) + q;
      const Floating& cache = is_value ? layer.values : layer.keys;
      const int64_t at = ((batch * pass.groups + head) * pass.num_slots + slot) * size;
      for (int64_t i = 0; i < size; i += kLanes) store(cache, at + i, *(Floats*)(values + i));
    }
  }

  void rotate(int64_t rope, int64_t row, float* values) const {
    const int64_t half = pass.rotated / 2;
    const auto part = [=](const float* data) { return Floating{(char*)data, Type::kFloat32, half}; };
    const Floating cosine = part(pass.cosines[rope] + row * pass.rotated), low = part(values);
    const Floating sine = part(pass.sines[rope] + row * pass.rotated), high = part(values + half);
    for (int64_t i = 0; i < half; i += kLanes) {
      const Floats c = rounded(load(cosine, i), pass.type), s = rounded(load(sine, i), pass.type);
      const Floats first = load(low, i), second = load(high, i);
      store(low, i, rounded(first * c - second * s, pass.type));
      store(high, i, rounded(second * c + first * s, pass.type));
    }
  }

  // Tiles of the queries of a group: of all heads that share keys and values.
  int64_t num_tiles() const {
    return (pass.heads / pass.groups * pass.num_queries + kQueries - 1) / kQueries;
  }

  void attend_tile(size_t number, int64_t part) {
    const Layer& layer = pass.layers[number];
    const int64_t size = pass.head_dim, all = pass.heads / pass.groups * pass.num_queries;
    const int64_t group = part / num_tiles(), first = part % num_tiles() * kQueries;
    const int64_t batch = group / pass.groups, head = group % pass.groups * pass.heads / pass.groups;
    std::vector<Query> queries;
    std::vector<int64_t> columns;
    for (int64_t n = first; n < std::min(first + kQueries, all); n++) {
      const int64_t a = head + n / pass.num_queries;
      const int64_t row = batch * pass.num_queries + n % pass.num_queries;
      float* tapped = nullptr;
      for (size_t tap = 0; tap < pass.tapped_heads.size(); tap++)
        if (pass.tapped_heads[tap] == std::make_pair((int64_t)number, a))
          tapped = pass.attention + (tap * rows + row) * pass.num_slots;
      queries.push_back({row, &query[(a * rows + row) * size], tapped, &views[layer.window][row]});
      columns.push_back(a * size);
    }
    const auto of_group = [&](const Floating& cache) {
      const int64_t part = pass.num_slots * size;
      return cache.from(group * part).first(part);
    };
    const Floating keys = of_group(layer.keys), values = of_group(layer.values);
    float* out = buffer(kQueries * size);
    if (keys.type == Type::kBfloat16) attend<Type::kBfloat16>(pass, keys, values, queries, out);
    if (keys.type == Type::kFloat16) attend<Type::kFloat16>(pass, keys, values, queries, out);
    if (keys.type == Type::kFloat32) attend<Type::kFloat32>(pass, keys, values, queries, out);
    for (size_t m = 0; m < queries.size(); m++, out += size) {
      for (int64_t i = 0; i < size; i += kLanes)
        *(Floats*)(out + i) = rounded(*(Floats*)(out + i), pass.type);
      merged.put(queries[m].row, columns[m], out, size);
    }
  }

  // Computes panels of a product that is added to x.
  void project_back(const Linear& linear, const Rows& inputs, int64_t first, int64_t last) {
    float* out = &mixed[first * kPanel];
    multiply(linear.weight, first, last, inputs, out, wide);
    for (int64_t row = 0; row < rows; row++)
      add_bias(linear, first * kPanel, (last - first) * kPanel, pass.type, out + row * wide);
  }

  // Adds what a product left to a row of x.
  void add_residual(const Norm& norm, int64_t row) {
    if (norm.weight.data) normalise_row(norm, &mixed[row * wide], &mixed[row * wide]);
    for (int64_t i = 0; i < pass.width; i += kLanes) {
      Floats* to = (Floats*)&x[row * wide + i];
      *to = rounded(*to + *(Floats*)&mixed[row * wide + i], pass.type);
    }
  }

  void feed_forward(const Layer& layer, int64_t first, int64_t last) {
    const int64_t size = (last - first) * kPanel, at = first * kPanel;
    float *up = buffer(2 * rows * size), *gate = up + rows * size;
    multiply(layer.up.weight, first, last, normed, up, size);
    if (layer.gate.weight.panels) multiply(layer.gate.weight, first, last, normed, gate, size);
    for (int64_t row = 0; row < rows; row++, up += size, gate += size) {
      add_bias(layer.up, at, size, pass.type, up);
      if (layer.gate.weight.panels) add_bias(layer.gate, at, size, pass.type, gate);
      for (int64_t i = 0; i < size; i += kLanes) {
        const Floats value = *(Floats*)(up + i);
        const Floats active = activated(
            layer.gate.weight.panels ? *(Floats*)(gate + i) : value, pass.activation);
        *(Floats*)(up + i) =
            layer.gate.weight.panels
                ? rounded(rounded(active, pass.type) * value, pass.type)
                : rounded(active, pass.type);
      }
      inner.put(row, at, up, size);
    }
  }

  void write(const Floating& to, int64_t row, const float* values) const {
    for (int64_t i = 0; i < pass.width; i += kLanes)
      store(to.from(row * pass.width).first(pass.width), i, *(const Floats*)(values + i));
  }

  // Ends layer `number` for a row: adds the residual, writes taps, and starts the next layer.
  void end_layer(size_t number, int64_t row) {
    const Layer& layer = pass.layers[number];
    float* values = &x[row * wide];
    add_residual(layer.mlp_output_norm, row);
    for (size_t tap = 0; tap < pass.tapped_layers.size(); tap++)
      if (pass.tapped_layers[tap] == (int64_t)number)
        write(pass.hidden, tap * rows + row, values);
    if (number + 1 < pass.layers.size())
      return start_layer(pass.layers[number + 1].input_norm, row);
    if (pass.final_norm.weight.data) normalise_row(pass.final_norm, values, values);
    write(pass.output, row, values);
  }

  void run() override {
    Team::Thread thread(team);
    const auto each = [](auto part) {
      return [part](int64_t first, int64_t last) {
        for (; first < last; first++) part(first);
      };
    };
    thread.share(rows, 1, each([&](int64_t row) { begin(row); }));
    for (size_t number = 0; number < pass.layers.size(); number++) {
      const Layer& layer = pass.layers[number];
      const auto add_and_norm = [&](int64_t row) {
        add_residual(layer.attention_output_norm, row);
        start_layer(layer.post_attention_norm, row);
      };
      thread.share(pass.heads + 2 * pass.groups, 1,
                   each([&](int64_t head) { project_head(layer, head); }));
      thread.share(pass.batch * pass.groups * num_tiles(), 1,
                   each([&](int64_t part) { attend_tile(number, part); }));
      thread.share(wide / kPanel, 2, [&](int64_t first, int64_t last) {
        project_back(layer.output, merged, first, last);
      });
      thread.share(rows, 1, each(add_and_norm));
      thread.share(layer.up.weight.num_panels, 2, [&](int64_t first, int64_t last) {
        const int64_t most = std::max<int64_t>(2, 4096 / rows);  // panels, which bounds its buffer
        for (; first < last; first += most) feed_forward(layer, first, std::min(first + most, last));
      });
      thread.share(wide / kPanel, 2, [&](int64_t first, int64_t last) {
        project_back(layer.down, inner, first, last);
      });
      thread.share(rows, 1, each([&](int64_t row) { end_layer(number, row); }));
    }
  }
};

struct Multiplication : Call {
  Product product;
  Rows rows;

  explicit Multiplication(const Product& given)
      : Call(2), product(given), rows(given.num_rows, given.weight.pairs, given.rows.type) {}

  void run() override {
    Team::Thread thread(team);
    thread.share(product.num_rows, 16, [&](int64_t row, int64_t last) {
      thread_local std::vector<float> values;
      values.resize(padded(product.num_inputs));
      for (; row < last; row++) {
        for (int64_t i = 0; i < product.num_inputs; i += kLanes)
          *(Floats*)&values[i] =
              load(product.rows.from(row * product.num_inputs).first(product.num_inputs), i);
        rows.put(row, 0, values.data(), values.size());
      }
    });
    const int64_t panels = product.num_rows ? product.weight.num_panels : 0;
    thread.share(panels, 8, [&](int64_t first, int64_t last) {
      multiply(product.weight, first, last, rows, product.sums + first * kPanel,
               product.weight.num_panels * kPanel);
    });
  }
};

}  // namespace

#define JOIN(a, b) a##b
#define TABLE(name) JOIN(k, name)
#define STRING(name) #name
#define NAME(name) STRING(name)
extern const Kernels TABLE(INSTRUCTIONS) = {
    NAME(INSTRUCTIONS),
    [](const Product& product) -> Call* { return new Multiplication(product); },
    [](Pass pass) -> Call* { return new Layers(std::move(pass)); }};

}  // namespace specjax
