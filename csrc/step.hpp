// A decode step of a Llama-like model, one token of each of some sequences: from the embedding to the logits in one team of
// threads. Its phases are what the calls of the composed path do, by the same functions and with the same roundings, so that
// each number has the same bits, and a sequence gets the bits that it has alone.
#pragma once

#include <chrono>
#include <cmath>
#include <memory>
#include <stdexcept>

#include "attention.hpp"
#include "extremes.hpp"
#include "packed.hpp"
#include "pages.hpp"
#include "rotary.hpp"

namespace kvsift {

struct Matrix {
  const void *weight, *bias;  // [num_out, num_in]; [num_out] or nullptr
  std::int64_t num_out;
  int num_in;
  std::vector<PackedMatrix> parts = {};  // of packed weights; then there is no weight

  bool is_packed() const { return !parts.empty(); }
};

// Inputs of products, as plain and as packed matrices read them.
struct ProductInputs {
  const bool some_plain, some_packed;
  PackedQueries plain;
  PackedInputs packed;

  ProductInputs(int num_rows, int num_in, bool is_bf16, bool some_plain, bool some_packed)
      : some_plain(some_plain), some_packed(some_packed), plain(some_plain ? num_rows : 0, num_in, is_bf16),
        packed(some_packed ? num_rows : 0, num_in) {}

  void set(int row, int first, const float* numbers, int count) {
    if (some_plain) plain.set(row, first, numbers, count);
    if (some_packed) packed.set(row, first, numbers, count);
  }
};

struct LayerWeights {
  Matrix qkv, output, gate_up, down;
  const void *attention_norm, *mlp_norm;  // of RMS norms
  const void *query_norm, *key_norm;      // of each head; or nullptr
  float attention_eps, mlp_eps, head_eps;
};

struct Decoder {
  bool bf16;  // all weights that are not packed, keys and values; else float32
  int num_query_heads, num_kv_heads, head_dim;
  float scale;            // of logits of attention
  Matrix embedding;       // [vocabulary, hidden]
  const void* norm;
  float norm_eps;
  Matrix head;
  std::vector<LayerWeights> layers;
};

// The pool of a layer, [num_kv_heads, pages, ...]; strides of heads in numbers.
struct LayerPages {
  void *keys, *values;  // [page_size, head_dim] per page
  std::int64_t stride;
  void* extremes;  // [2 * head_dim] per page; nullptr: not maintained
  std::int64_t extremes_stride;
  bool dense;  // every token is visible
};

// What a token sees in layers that are not dense: [0, sinks_stop), everything from window_start on, and for each selection
// the best pages among the candidates.
struct PageRule {
  std::int64_t sinks_stop, window_start, first_candidate, num_candidates, num_pages;
  int num_selections;
};

struct DecodeSequence {
  int page_size;
  std::vector<LayerPages> layers;
  bool selects;  // in some layer
  // Of a step:
  std::int64_t token, position;
  const void *cos, *sin;  // [head_dim] of the position
  const Run* runs;        // pages of the sequence, with that of the token
  std::int64_t num_runs, num_pool_pages;
  PageRule rule;
};

struct NotFinite : std::runtime_error {
  NotFinite() : std::runtime_error("queries hold NaN or infinity") {}
};

// A sequence in a step: its slots and pieces, which are the same in all layers.
class StepSequence {
 public:
  StepSequence(const DecodeSequence& sequence, int row, const Decoder& decoder)
      : sequence(sequence), row(row), tokens(token_table(sequence)), candidates(candidate_table(sequence)),
        queries(decoder.num_query_heads, decoder.head_dim, decoder.bf16),
        features(sequence.selects ? decoder.num_query_heads : 0, 2 * decoder.head_dim, decoder.bf16),
        dense(dense_pieces(decoder)), listed(listed_pieces(decoder)),
        dense_states(dense, decoder.num_query_heads, queries.stride()),
        listed_states(listed, decoder.num_query_heads, queries.stride()) {
    std::vector<std::int64_t> ids;
    slot = tokens.range(sequence.position, sequence.position + 1, ids).start;
    if (!sequence.selects) return;
    order = std::make_unique<PageOrder>(HeadRows{nullptr, 0, candidates, 1, 2 * decoder.head_dim, decoder.bf16});
    scores.resize(std::size_t(decoder.num_query_heads * sequence.rule.num_candidates));
    chosen.resize(std::size_t(sequence.rule.num_selections * sequence.rule.num_pages));
  }
  StepSequence(const StepSequence&) = delete;

  bool is_dense(std::size_t layer) const { return sequence.layers[layer].dense; }
  bool ranks(std::size_t layer) const { return !is_dense(layer) && sequence.rule.num_pages > 0; }
  const std::vector<Piece>& pieces(std::size_t layer) const { return is_dense(layer) ? dense : listed; }
  PieceStates& states(std::size_t layer) { return is_dense(layer) ? dense_states : listed_states; }

  // Makes the pages that were chosen for a selection its list.
  void list_chosen(std::int64_t selection) {
    const PageRule& rule = sequence.rule;
    std::int64_t* end = lists[std::size_t(selection)].data();
    for (std::int64_t i = 0; i < rule.num_pages; ++i) {
      const std::int64_t start = (chosen[std::size_t(selection * rule.num_pages + i)] + rule.first_candidate) * sequence.page_size;
      end = tokens.write(start, start + sequence.page_size, end);
    }
  }

  const DecodeSequence& sequence;
  const int row;
  const SlotTable tokens, candidates;
  std::int64_t slot;  // of the new token
  PackedQueries queries, features;
  std::unique_ptr<PageOrder> order;
  std::vector<float> scores;
  std::vector<std::int64_t> chosen;  // [num_selections, num_pages]

 private:
  static SlotTable token_table(const DecodeSequence& sequence) {
    std::vector<Run> runs(sequence.runs, sequence.runs + sequence.num_runs);
    for (Run& run : runs) run.first *= sequence.page_size, run.count *= sequence.page_size;
    return {runs.data(), sequence.num_runs, sequence.num_pool_pages * sequence.page_size, 0, sequence.position + 1};
  }
  static SlotTable candidate_table(const DecodeSequence& sequence) {
    if (!sequence.selects) return SlotTable(0);
    return {sequence.runs, sequence.num_runs, sequence.num_pool_pages, sequence.rule.first_candidate,
            sequence.rule.num_candidates};
  }

  std::vector<Piece> dense_pieces(const Decoder& decoder) {  // as attend_dense
    const int group = decoder.num_query_heads / decoder.num_kv_heads;
    const Slots slots = tokens.range(0, tokens.length(), all_ids);
    std::vector<Piece> pieces;
    for (int h = 0; h < decoder.num_kv_heads; ++h)
      cut(pieces, {h, h * group, group, slots}, piece_length(slots.count * decoder.num_kv_heads));
    return pieces;
  }

  std::vector<Piece> listed_pieces(const Decoder& decoder) {  // as attend_units
    std::vector<Piece> pieces;
    if (!sequence.selects) return pieces;
    const PageRule& rule = sequence.rule;
    const int group = decoder.num_query_heads / decoder.num_kv_heads;
    const int per_list = rule.num_selections == decoder.num_query_heads ? 1 : group;
    const std::vector<Slots> always =
        slots_of_spans({{0, rule.sinks_stop}, {rule.window_start, tokens.length()}}, tokens, span_ids);
    lists.assign(std::size_t(rule.num_selections), std::vector<std::int64_t>(std::size_t(rule.num_pages * sequence.page_size)));
    for (int h = 0; h < decoder.num_kv_heads; ++h) {
      for (const Slots& span : always) cut(pieces, {h, h * group, group, span}, kUnitTokens);
      for (int q = h * group; q < (h + 1) * group; q += per_list) {
        const auto& list = lists[std::size_t(q / per_list)];
        cut(pieces, {h, q, per_list, {0, std::int64_t(list.size()), list.data()}}, kUnitTokens);
      }
    }
    return pieces;
  }

  std::vector<std::int64_t> all_ids;
  std::vector<std::vector<std::int64_t>> span_ids, lists;
  const std::vector<Piece> dense, listed;
  PieceStates dense_states, listed_states;
};

template <class T>
class DecodeStep {
 public:
  DecodeStep(const Decoder& decoder, const std::vector<const DecodeSequence*>& sequences, T* logits)
      : decoder_(decoder), rows_(int(sequences.size())), hidden_(decoder.head.num_in), logits_(logits),
        from_x_(inputs(hidden_, [](const LayerWeights& layer) { return std::vector{&layer.qkv, &layer.gate_up}; }, &decoder.head)),
        from_heads_(inputs(decoder.num_query_heads * decoder.head_dim, [](const LayerWeights& layer) { return std::vector{&layer.output}; })),
        from_gates_(inputs(largest_gate(), [](const LayerWeights& layer) { return std::vector{&layer.down}; })), x_(std::size_t(rows_) * hidden_),
        qkv_(std::size_t(rows_) * qkv_width()), gates_(std::size_t(rows_) * largest_gate()) {
    for (int row = 0; row < rows_; ++row)
      sequences_.push_back(std::make_unique<StepSequence>(*sequences[std::size_t(row)], row, decoder));
  }

  // Seconds that were spent on selections.
  double run(int threads) {
    for (const auto& each : sequences_) embed(each->sequence.token, &x_[std::size_t(each->row) * hidden_]);
    double select_s = 0;
    Team::run(threads, [&](Team& team, bool leads) {
      for (std::size_t layer = 0; layer < decoder_.layers.size(); ++layer) {
        const LayerWeights& weights = decoder_.layers[layer];
        normalise(team, weights.attention_norm, weights.attention_eps);
        multiply(team, weights.qkv, from_x_, nullptr, qkv_.data());
        append(team, layer);
        const auto started = std::chrono::steady_clock::now();
        select(team, layer);
        if (leads) select_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
        attend(team, layer);
        multiply(team, weights.output, from_heads_, x_.data(), x_.data());
        normalise(team, weights.mlp_norm, weights.mlp_eps);
        multiply(team, weights.gate_up, from_x_, nullptr, gates_.data(), &from_gates_);
        multiply(team, weights.down, from_gates_, x_.data(), x_.data());
      }
      normalise(team, decoder_.norm, decoder_.norm_eps);
      multiply(team, decoder_.head, from_x_, nullptr, logits_);
    });
    return select_s;
  }

 private:
  static constexpr int kTasksPerThread = 2;  // of a product

  static const T* numbers(const void* data) { return static_cast<const T*>(data); }
  std::int64_t qkv_width() const { return std::int64_t(decoder_.num_query_heads + 2 * decoder_.num_kv_heads) * decoder_.head_dim; }
  int largest_gate() const { return decoder_.layers.empty() ? 0 : decoder_.layers[0].down.num_in; }
  int group() const { return decoder_.num_query_heads / decoder_.num_kv_heads; }

  // Of the matrices that an input is multiplied with: matrices(layer) in each layer, and perhaps another.
  template <class Matrices>
  ProductInputs inputs(int num_in, Matrices&& matrices, const Matrix* other = nullptr) const {
    bool some_packed = other != nullptr && other->is_packed(), some_plain = other != nullptr && !other->is_packed();
    for (const LayerWeights& layer : decoder_.layers)
      for (const Matrix* matrix : matrices(layer)) (matrix->is_packed() ? some_packed : some_plain) = true;
    return {rows_, num_in, decoder_.bf16, some_plain, some_packed};
  }

  void embed(std::int64_t token, T* x) const {
    if (!decoder_.embedding.is_packed()) {
      std::memcpy(x, numbers(decoder_.embedding.weight) + token * hidden_, hidden_ * sizeof(T));
      return;
    }
    std::vector<float> row(static_cast<std::size_t>(hidden_));
    decoder_.embedding.parts[0].unpack(token, row.data());
    for (int i = 0; i < hidden_; ++i) store(x + i, row[std::size_t(i)]);
  }

  void normalise(Team& team, const void* norm, float eps) {
    team.each(rows_, [&](std::int64_t row) {
      std::vector<float> normal(static_cast<std::size_t>(hidden_));
      rms_norm(&x_[std::size_t(row) * hidden_], numbers(norm), hidden_, eps, normal.data());
      from_x_.set(int(row), 0, normal.data(), hidden_);
    });
  }

  // Multiplies inputs with a matrix. Where a product follows at once, outputs are gated and are its inputs.
  void multiply(Team& team, const Matrix& matrix, const ProductInputs& inputs, const T* residual, T* out,
                ProductInputs* following = nullptr) {
    const Product<T> call{nullptr, numbers(matrix.weight), nullptr, numbers(matrix.bias), residual, out, matrix.num_out, rows_,
                          matrix.num_in, 0.0f, following != nullptr};
    const std::int64_t width = call.gated ? call.num_out / 2 : call.num_out;
    const auto pass_on = [&](std::int64_t start, std::int64_t count) {
      if (following == nullptr) return;
      std::vector<float> outputs(static_cast<std::size_t>(count));
      for (int row = 0; row < rows_; ++row) {
        for (std::int64_t i = 0; i < count; ++i) outputs[std::size_t(i)] = load(out + row * width + start + i);
        following->set(row, int(start), outputs.data(), int(count));
      }
    };
    if (matrix.is_packed()) {
      const PackedProduct<T> product(call, matrix.parts, inputs.packed, team.size());
      team.each(product.num_tasks(), [&](std::int64_t task) { product.run(task, pass_on); });
      return;
    }
    // Rows are read fastest forwards, and a thread that falls behind leaves tasks to the others.
    const std::int64_t even = width / (kTasksPerThread * team.size());
    const int together = following != nullptr && following->some_packed ? PackedMatrix::kBlock : 4;
    const std::int64_t per_task = (std::max(rows_per_task<T>(call.num_in), even) + together - 1) / together * together;
    team.each((width + per_task - 1) / per_task, [&](std::int64_t task) {
      const std::int64_t start = task * per_task, count = std::min(per_task, width - start);
      std::vector<float> products(std::size_t(call.gated ? 2 : 1) * std::size_t(rows_ * count));
      float* const factors = products.data() + (call.gated ? rows_ * count : 0);
      const auto multiply_rows = [&](std::int64_t first, float* to) {
        const Rows rows{call.weight + first * call.num_in, nullptr, count, call.num_in, sizeof(T) == 2};
        kernels().dots(inputs.plain.heads(0, rows_), rows, to, count);
      };
      multiply_rows(start, products.data());
      if (call.gated) multiply_rows(width + start, factors);
      write_outputs(call, start, count, products.data(), factors, count);
      pass_on(start, count);
    });
  }

  // Rotates queries and keys, and stores keys and values, with the summary of a page that is full now.
  void append(Team& team, std::size_t layer) {
    const LayerWeights& weights = decoder_.layers[layer];
    const int width = decoder_.head_dim, num_kv_heads = decoder_.num_kv_heads;
    team.each(std::int64_t(rows_) * num_kv_heads, [&](std::int64_t task) {
      StepSequence& own = *sequences_[std::size_t(task / num_kv_heads)];
      const DecodeSequence& sequence = own.sequence;
      const LayerPages& pages = sequence.layers[layer];
      const int h = int(task % num_kv_heads), first = h * group();
      T* const heads = qkv_.data() + own.row * qkv_width();
      T* const key = heads + (decoder_.num_query_heads + h) * width;
      const T *cos = numbers(sequence.cos), *sin = numbers(sequence.sin);
      rotate(heads + first * width, group(), width, cos, sin, numbers(weights.query_norm), weights.head_eps);
      rotate(key, 1, width, cos, sin, numbers(weights.key_norm), weights.head_eps);
      T* const keys = static_cast<T*>(pages.keys) + h * pages.stride;
      std::memcpy(keys + own.slot * width, key, width * sizeof(T));
      std::memcpy(static_cast<T*>(pages.values) + h * pages.stride + own.slot * width, key + num_kv_heads * width, width * sizeof(T));
      if (pages.extremes != nullptr && (sequence.position + 1) % sequence.page_size == 0) {
        const std::int64_t page = own.slot / sequence.page_size;
        page_extremes(keys + page * sequence.page_size * width, static_cast<const bool*>(nullptr), 1, sequence.page_size, width,
                      static_cast<T*>(pages.extremes) + h * pages.extremes_stride + page * 2 * width);
      }
      float query[kMaxHeadDim];
      for (int q = first; q < first + group(); ++q) {
        for (int i = 0; i < width; ++i) query[i] = load(heads + q * width + i);
        own.queries.set(q, 0, query, width);
        if (pages.dense) continue;
        for (int i = 0; i < width; ++i)
          if (!std::isfinite(query[i])) throw NotFinite();
        own.features.set(q, 0, page_features(query, 1, width, decoder_.scale).data(), 2 * width);
      }
    });
  }

  void select(Team& team, std::size_t layer) {
    const auto parts = [](const StepSequence& own) {
      return (own.sequence.rule.num_candidates + kScoredPages - 1) / kScoredPages;
    };
    each_of(team, [&](const StepSequence& own) { return own.ranks(layer) ? parts(own) * decoder_.num_kv_heads : 0; },
            [&](StepSequence& own, std::int64_t task) {
              const LayerPages& pages = own.sequence.layers[layer];
              const HeadRows rows{pages.extremes, pages.extremes_stride, own.candidates, decoder_.num_kv_heads,
                                  2 * decoder_.head_dim, decoder_.bf16};
              score_some(own.features, group(), rows, *own.order, int(task / parts(own)), task % parts(own) * kScoredPages,
                         std::fabs(decoder_.scale), own.scores.data());
            });
    each_of(team, [&](const StepSequence& own) { return own.ranks(layer) ? own.sequence.rule.num_selections : 0; },
            [&](StepSequence& own, std::int64_t selection) {
              const PageRule& rule = own.sequence.rule;
              const int sharing = decoder_.num_query_heads / rule.num_selections;
              choose_shared(own.scores.data() + selection * sharing * rule.num_candidates, sharing, rule.num_candidates, *own.order,
                            rule.num_pages, own.chosen.data() + selection * rule.num_pages);
              own.list_chosen(selection);
            });
  }

  void attend(Team& team, std::size_t layer) {
    each_of(team, [&](const StepSequence& own) { return std::int64_t(own.pieces(layer).size()); },
            [&](StepSequence& own, std::int64_t p) {
              const LayerPages& pages = own.sequence.layers[layer];
              const auto rows = [&](const void* data) {
                return HeadRows{data, pages.stride, own.tokens, decoder_.num_kv_heads, decoder_.head_dim, decoder_.bf16};
              };
              const HeadRows keys = rows(pages.keys), values = rows(pages.values);
              const Piece& piece = own.pieces(layer)[std::size_t(p)];
              own.states(layer).clear(p, piece.num_queries);
              attend_piece({own.queries, decoder_.num_query_heads, keys, values, decoder_.scale, 0.0f, decoder_.bf16, 1, {}}, piece, p,
                           own.states(layer), nullptr);
            });
    each_of(team, [&](const StepSequence&) { return std::int64_t(decoder_.num_query_heads); },
            [&](StepSequence& own, std::int64_t head) {
              float output[kMaxHeadDim];
              own.states(layer).merge(int(head), decoder_.head_dim, output);
              for (int i = 0; i < decoder_.head_dim; ++i) output[i] = rounded<T>(output[i]);
              from_heads_.set(own.row, int(head) * decoder_.head_dim, output, decoder_.head_dim);
            });
  }

  // A phase of the tasks of all sequences, count(sequence) of each: fn(sequence, task).
  template <class Count, class Fn>
  void each_of(Team& team, Count&& count, Fn&& fn) {
    std::int64_t total = 0;
    for (const auto& own : sequences_) total += count(*own);
    if (total == 0) return;
    team.each(total, [&](std::int64_t task) {
      for (const auto& own : sequences_) {
        const std::int64_t tasks = count(*own);
        if (task < tasks) return fn(*own, task);
        task -= tasks;
      }
    });
  }

  const Decoder& decoder_;
  const int rows_, hidden_;
  T* const logits_;                                     // [rows, vocabulary]
  ProductInputs from_x_, from_heads_, from_gates_;
  std::vector<T> x_, qkv_, gates_;                      // of all rows
  std::vector<std::unique_ptr<StepSequence>> sequences_;
};

}  // namespace kvsift
