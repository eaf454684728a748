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
    if (i + kLanes <= size) return part;
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

constexpr int64_t kMostScores = 1 << 20;  // that threads share, which their caches hold

struct Layers : Call {
  Pass pass;
  int64_t rows, wide;              // wide: the hidden size, padded
  std::vector<float> x, mixed;     // [R, wide]
  Rows given, normed, merged, inner;  // inputs of products; `given`: of a layer without its norm
  std::vector<std::vector<View>> views;  // by window and row
  // Attention. A block of queries are some of a group: of heads that share keys and values.
  int64_t per_group, most;     // queries: of a group, and of a block
  int64_t stride;              // of scores: slots, in whole chunks
  std::vector<Rows> asked;     // the queries of each block
  std::vector<float> scores;   // [queries, stride], if all threads work on all blocks
  std::vector<float> factors;  // of all queries

  explicit Layers(Pass all)
      : Call(1 + 9 * all.layers.size()),
        pass(std::move(all)),
        rows(pass.num_rows()),
        wide(padded(pass.width)),
        x(rows * wide),
        mixed(rows * wide),
        given(rows_for(pass.layers[0].query)),
        normed(rows_for(pass.layers[0].up)),
        merged(rows_for(pass.layers[0].output, Rows::kBlock / (pass.head_dim % kSplit ? 2 : 1))),
        inner(rows_for(pass.layers[0].down)),
        views(pass.windows.size(), std::vector<View>(rows)),
        per_group(pass.heads / pass.groups * pass.num_computed),
        most(per_group),
        stride(0),
        factors(rows * pass.heads) {
    for (int64_t b = 0; b < pass.batch; b++)
      stride = std::max(stride, padded(pass.length[b] + pass.num_scratch, kChunk));
    // Threads that compute whole groups finish together if there are many.
    const bool is_long = pass.batch * pass.groups < 8 && stride >= 4 * kChunk;
    if ((per_group > kQueries || is_long) && rows * pass.heads * stride <= kMostScores)
      scores.resize((rows * pass.heads + kQueries) * stride);
    else
      most = kQueries;  // of which a thread computes all steps
    const Type type = pass.layers[0].keys.type == Type::kBfloat16 ? pass.type : Type::kFloat32;
    for (int64_t block = 0; block < num_blocks(); block++)
      asked.emplace_back(size_of_block(block), pass.head_dim / 2, type);
  }

  Rows rows_for(const Linear& linear, int64_t block = Rows::kBlock) const {
    return {rows, linear.weight.pairs, pass.type, linear.weight.scales.data != nullptr, block};
  }

  int64_t blocks_of_group() const { return (per_group + most - 1) / most; }
  int64_t num_blocks() const { return pass.batch * pass.groups * blocks_of_group(); }
  int64_t start_of_block(int64_t block) const { return block % blocks_of_group() * most; }
  int64_t size_of_block(int64_t block) const {
    return std::min(most, per_group - start_of_block(block));
  }

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

  // Returns the numbers of a row of an input.
  Floating taken(const Floating& input, int64_t row, int64_t size) const {
    return input.from(pass.place(row) * size).first(size);
  }

  void begin(int64_t row) {
    for (int64_t i = 0; i < pass.width; i += kLanes)
      *(Floats*)&x[row * wide + i] = load(taken(pass.input, row, pass.width), i);
    for (size_t w = 0; w < views.size(); w++) views[w][row] = view_of(pass, row, pass.windows[w]);
    if (pass.layers[0].input_norm.weight.data) return start_layer(pass.layers[0].input_norm, row);
    const int64_t size = pass.normed.size / (pass.batch * pass.num_queries);
    float* out = buffer(padded(size));
    for (int64_t i = 0; i < size; i += kLanes)
      *(Floats*)(out + i) = load(taken(pass.normed, row, size), i);
    given.put(row, 0, out, padded(size));
  }

  // Computes query, key or value of one head: rotates them and writes keys and values to the cache.
  void project_head(const Layer& layer, int64_t number) {
    const int64_t size = pass.head_dim, panels = size / kPanel, kept = pass.heads + pass.groups;
    const bool is_query = number < pass.heads, is_value = number >= kept;
    const int64_t head = is_query ? number : (number - pass.heads) % pass.groups;
    const Linear& linear = is_query ? layer.query : is_value ? layer.value : layer.key;
    const Norm& norm = is_query ? layer.query_norm : layer.key_norm;
    float* out = buffer(rows * size);
    multiply(linear.weight, head * panels, (head + 1) * panels,
             layer.input_norm.weight.data ? normed : given, out, size);
    for (int64_t row = 0; row < rows; row++) {
      float* values = out + row * size;
      add_bias(linear, head * size, size, pass.type, values);
      if (!is_value && norm.weight.data)
        normalise(norm, pass.norm_kind, pass.epsilon, pass.type, size, values, values);
      if (!is_value && layer.rope >= 0) rotate(layer.rope, row, values);
      const int64_t batch = row / pass.num_computed, q = row % pass.num_computed;
      if (is_query) {
        const int64_t share = pass.heads / pass.groups, n = head % share * pass.num_computed + q;
        const int64_t group = batch * pass.groups + head / share;
        asked[group * blocks_of_group() + n / most].put(n % most, 0, values, size);
        continue;
      }
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
    const Floating low = part(values), high = part(values + half);
    const int64_t place = pass.place(row) * pass.rotated;
    const Floating cosine = part(pass.cosines[rope] + place), sine = part(pass.sines[rope] + place);
    for (int64_t i = 0; i < half; i += kLanes) {
      const Floats c = rounded(load(cosine, i), pass.type), s = rounded(load(sine, i), pass.type);
      const Floats first = load(low, i), second = load(high, i);
      store(low, i, rounded(first * c - second * s, pass.type));
      store(high, i, rounded(second * c + first * s, pass.type));
    }
  }

  // Returns query `n` of a group.
  Query query_of(size_t number, int64_t group, int64_t n) {
    const int64_t head = group % pass.groups * (pass.heads / pass.groups) + n / pass.num_computed;
    const int64_t row = group / pass.groups * pass.num_computed + n % pass.num_computed;
    float* tapped = nullptr;
    for (size_t tap = 0; tap < pass.tapped_heads.size(); tap++)
      if (pass.tapped_heads[tap] == std::make_pair((int64_t)number, head))
        tapped = pass.attention + place_of_tap(tap, row) * pass.num_slots;
    return {row, tapped, &views[pass.layers[number].window][row]};
  }

  // Computes the scores of a block's queries in those of chunks [first, last) that one of them sees.
  template <Type T>
  void score_block(size_t number, int64_t block, int64_t first, int64_t last, float* to) {
    const int64_t group = block / blocks_of_group(), start = start_of_block(block);
    int64_t from = INT64_MAX, end = 0;
    const int64_t stop = start + std::min(size_of_block(block), pass.num_computed);
    for (int64_t n = start; n < stop; n++) {
      const View& view = *query_of(number, group, n).view;
      from = std::min(from, view.begin / kChunk);
      end = std::max(end, view.rest.empty() ? view.end : view.rest.back() + 1);
    }
    from = std::max(from, first), end = std::min(padded(end, kChunk) / kChunk, last);
    score<T>(of_group(pass.layers[number].keys, group), pass.head_dim, asked[block], from * kChunk,
             end * kChunk, to, stride);
  }

  Floating of_group(const Floating& cache, int64_t group) const {
    const int64_t part = pass.num_slots * pass.head_dim;
    return cache.from(group * part).first(part);
  }

  void weigh_query(size_t number, int64_t at, float* score) {
    factors[at] = weigh(pass, query_of(number, at / per_group, at % per_group), score);
  }

  // Computes numbers [from, from + size) of the outputs of queries from `first` of all on, of a group.
  template <Type T>
  void mix_tile(size_t number, int64_t first, int64_t last, int64_t from, int64_t size,
                const float* weights) {
    const int64_t group = first / per_group;
    std::vector<Query> queries;
    for (int64_t at = first; at < last; at++)
      queries.push_back(query_of(number, group, at % per_group));
    float* out = buffer(kQueries * size);
    mix_queries<T>(of_group(pass.layers[number].values, group), pass.head_dim, from, size, queries,
                   weights, stride, out);
    for (int64_t at = first; at < last; at++, out += size) {
      for (int64_t i = 0; i < size; i += kLanes)
        *(Floats*)(out + i) = rounded(*(Floats*)(out + i) * factors[at], pass.type);
      const int64_t head =
          group % pass.groups * (pass.heads / pass.groups) + at % per_group / pass.num_computed;
      merged.put(queries[at - first].row, head * pass.head_dim + from, out, size);
    }
  }

  // Some tiles of queries, or few groups: all threads share each step. Else a thread computes all
  // steps of a block, whose scores stay in its caches.
  template <Type T>
  void attend(Team::Thread& thread, size_t number) {
    const int64_t chunks = stride / kChunk, size = pass.head_dim, blocks = num_blocks();
    if (scores.empty())
      return thread.share(blocks, 1, [&](int64_t block, int64_t to) {
        thread_local std::vector<float> local;
        local.resize(std::max<size_t>(local.size(), kQueries * stride));
        for (; block < to; block++) {
          const int64_t count = size_of_block(block);
          const int64_t first = block / blocks_of_group() * per_group + start_of_block(block);
          score_block<T>(number, block, 0, chunks, local.data());
          for (int64_t m = 0; m < count; m++) weigh_query(number, first + m, &local[m * stride]);
          mix_tile<T>(number, first, first + count, 0, size, local.data());
        }
      });
    thread.share(blocks * chunks, 1, [&](int64_t part, int64_t to) {
      for (; part < to; part++) {
        const int64_t block = part / chunks, chunk = part % chunks;
        score_block<T>(number, block, chunk, chunk + 1, &scores[block * per_group * stride]);
      }
    });
    thread.share(rows * pass.heads, 1, [&](int64_t at, int64_t to) {
      for (; at < to; at++) weigh_query(number, at, &scores[at * stride]);
    });
    const int64_t tiles = (per_group + kQueries - 1) / kQueries;
    const int64_t splits = (size + kSplit - 1) / kSplit;
    thread.share(blocks * tiles * splits, 1, [&](int64_t part, int64_t to) {
      for (; part < to; part++) {
        const int64_t group = part / splits / tiles, from = part % splits * kSplit;
        const int64_t first = group * per_group + part / splits % tiles * kQueries;
        mix_tile<T>(number, first, std::min<int64_t>(first + kQueries, (group + 1) * per_group),
                    from, std::min(kSplit, size - from), &scores[first * stride]);
      }
    });
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

  // Returns where a row of a tap's results lies.
  int64_t place_of_tap(int64_t tap, int64_t row) const {
    return tap * pass.batch * pass.num_queries + pass.place(row);
  }

  void write(const Floating& to, int64_t place, const float* values) const {
    for (int64_t i = 0; i < pass.width; i += kLanes)
      store(to.from(place * pass.width).first(pass.width), i, *(const Floats*)(values + i));
  }

  // Ends layer `number` for a row: adds the residual, writes taps, and starts the next layer.
  void end_layer(size_t number, int64_t row) {
    const Layer& layer = pass.layers[number];
    float* values = &x[row * wide];
    add_residual(layer.mlp_output_norm, row);
    for (size_t tap = 0; tap < pass.tapped_layers.size(); tap++)
      if (pass.tapped_layers[tap] == (int64_t)number)
        write(pass.hidden, place_of_tap(tap, row), values);
    if (number + 1 < pass.layers.size())
      return start_layer(pass.layers[number + 1].input_norm, row);
    if (pass.final_norm.weight.data) normalise_row(pass.final_norm, values, values);
    write(pass.output, pass.place(row), values);
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
      if (layer.keys.type == Type::kBfloat16) attend<Type::kBfloat16>(thread, number);
      if (layer.keys.type == Type::kFloat16) attend<Type::kFloat16>(thread, number);
      if (layer.keys.type == Type::kFloat32) attend<Type::kFloat32>(thread, number);
      thread.share(wide / kPanel, 2, [&](int64_t first, int64_t last) {
        project_back(layer.output, merged, first, last);
      });
      thread.share(rows, 1, each(add_and_norm));
      // Two panels are a block of the inputs of `down`.
      const int64_t panels = layer.up.weight.num_panels;
      thread.share((panels + 1) / 2, 1, [&](int64_t first, int64_t last) {
        const int64_t most = std::max<int64_t>(1, 2048 / rows);  // of two, which bounds its buffer
        for (; first < last; first += most)
          feed_forward(layer, 2 * first, std::min(2 * std::min(first + most, last), panels));
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
      : Call(2),
        product(given),
        rows(given.num_rows, given.weight.pairs, given.rows.type, given.weight.scales.data) {}

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
