// A decode step of a Llama-like model, one token of each of some sequences, or several that are known: from the embedding to
// the logits in one team of threads. Its phases are what the calls of the composed path do, by the same functions and with the
// same roundings, so that each number has the same bits, and a token gets the bits that it has alone.
#pragma once

#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "attention.hpp"
#include "coded_rows.hpp"
#include "extremes.hpp"
#include "packed.hpp"
#include "pages.hpp"
#include "rotary.hpp"
#include "sketch.hpp"

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

// The pool of a layer, [num_kv_heads, pages, ...]; strides of heads in numbers, of coded rows in bytes.
struct LayerPages {
  void *keys, *values;  // [page_size, head_dim] per page
  std::int64_t stride;
  void* extremes;  // [2 * head_dim] per page; nullptr: not maintained
  std::int64_t extremes_stride;
  std::uint8_t* sketches;  // [sketch.width] per page; nullptr: not maintained
  std::int64_t sketches_stride;
  bool dense = true;  // every token is visible
};

// What a token sees in layers that are not dense: [0, sinks_stop), everything from window_start on, and for each selection
// the best units among the candidates: pages by their extremes, or tokens by their sketches.
struct SelectionRule {
  std::int64_t sinks_stop, window_start, first_candidate, num_candidates, num_units;
  int num_selections;
  bool by_sketches;
  bool rest;  // attention to the tokens that are not chosen is estimated
};

struct DecodeSequence {
  int page_size;
  bool coded;  // keys and values are coded rows
  SketchFormat sketch;  // of pages, where they have sketches
  std::vector<LayerPages> layers;
  bool selects;  // in some layer
  // Of a step:
  std::vector<std::int64_t> ids;  // of consecutive tokens; one, if the sequence selects
  std::int64_t position;          // of the first
  const void *cos, *sin;          // [tokens, head_dim]
  const Run* runs;                // pages of the sequence, with those of the tokens
  std::int64_t num_runs, num_pool_pages;
  SelectionRule rule;
  void* asked;           // queries of all layers, [layers, num_query_heads, head_dim], are copied to here; nullptr: they are not
  std::int64_t* chosen;  // units of sparse layers, [layers, num_selections, num_units], as well

  int num_tokens() const { return int(ids.size()); }
  std::int64_t stop() const { return position + num_tokens(); }
};

struct NotFinite : std::runtime_error {
  NotFinite() : std::runtime_error("queries hold NaN or infinity") {}
};

// A sequence in a step: its slots and pieces, which are the same in all layers. Its queries are those of dense_pieces.
class StepSequence {
 public:
  StepSequence(const DecodeSequence& sequence, int row, const Decoder& decoder, const Rotation& rotation)
      : sequence(sequence), row(row), num_queries(decoder.num_query_heads * sequence.num_tokens()), tokens(token_table(sequence)),
        candidates(candidate_table(sequence)), slots(sequence.ids.size()), queries(num_queries, decoder.head_dim, decoder.bf16),
        rotated(sequence.coded ? num_queries : 0, decoder.head_dim, false),
        features(by_extremes() ? num_queries : 0, 2 * decoder.head_dim, decoder.bf16), dense(all_pieces(decoder)),
        listed(listed_pieces(decoder)), dense_states(dense, num_queries, queries.stride()),
        listed_states(listed, num_queries, queries.stride()) {
    tokens.write(sequence.position, sequence.stop(), slots.data());
    if (!selects()) return;
    chosen.resize(std::size_t(sequence.rule.num_selections * sequence.rule.num_units));
    if (by_sketches()) {
      prepare_sketches(decoder, rotation);
    } else {
      order = std::make_unique<PageOrder>(HeadRows{nullptr, 0, candidates, 1, 2 * decoder.head_dim, plain(decoder.bf16)});
      scores.resize(std::size_t(decoder.num_query_heads * sequence.rule.num_candidates));
    }
  }
  StepSequence(const StepSequence&) = delete;

  bool is_dense(std::size_t layer) const { return sequence.layers[layer].dense; }
  bool selects() const { return sequence.selects && sequence.rule.num_candidates > 0; }  // or there are only spans
  bool by_sketches() const { return selects() && sequence.rule.by_sketches; }
  bool by_extremes() const { return selects() && !sequence.rule.by_sketches; }
  bool ranks(std::size_t layer) const { return !is_dense(layer) && (sequence.rule.num_units > 0 || sequence.rule.rest); }
  bool estimates(std::size_t layer) const { return !is_dense(layer) && by_sketches() && sequence.rule.rest; }
  const std::vector<Piece>& pieces(std::size_t layer) const { return is_dense(layer) ? dense : listed; }
  PieceStates& states(std::size_t layer) { return is_dense(layer) ? dense_states : listed_states; }

  // Makes the units that were chosen for a selection its list.
  void list_chosen(std::size_t layer, std::int64_t selection) {
    const SelectionRule& rule = sequence.rule;
    const std::int64_t* units = chosen.data() + selection * rule.num_units;
    if (sequence.chosen != nullptr)
      std::copy_n(units, rule.num_units, sequence.chosen + (std::int64_t(layer) * rule.num_selections + selection) * rule.num_units);
    std::int64_t* end = lists[std::size_t(selection)].data();
    if (by_sketches()) return tokens.write_each(rule.first_candidate, units, rule.num_units, end);
    for (std::int64_t i = 0; i < rule.num_units; ++i) {
      const std::int64_t start = (units[i] + rule.first_candidate) * sequence.page_size;
      end = tokens.write(start, start + sequence.page_size, end);
    }
  }

  const DecodeSequence& sequence;
  const int row;  // of its first token
  const int num_queries;
  const SlotTable tokens, candidates;
  std::vector<std::int64_t> slots;  // of the new tokens
  PackedQueries queries, rotated, features;  // rotated: queries of coded keys
  std::unique_ptr<PageOrder> order;
  std::vector<float> scores;
  std::vector<std::int64_t> chosen;  // [num_selections, num_units]
  Slots sketched{};                  // of the pages of the candidates
  std::vector<SketchCall> sketch_calls;  // of each layer
  std::vector<SketchHead> sketch_heads;  // of the layer that selects
  std::vector<float> rest, rest_lse;     // [num_query_heads, head_dim], [num_query_heads]: attention to what is not chosen
  std::vector<float> shares;             // [layers, num_query_heads], of that

 private:
  int unit_size() const { return by_sketches() ? 1 : sequence.page_size; }

  void prepare_sketches(const Decoder& decoder, const Rotation& rotation) {
    const SelectionRule& rule = sequence.rule;
    sketched = candidates.range(0, candidates.length(), sketched_ids);
    rest.resize(std::size_t(decoder.num_query_heads * decoder.head_dim));
    rest_lse.resize(std::size_t(decoder.num_query_heads));
    shares.resize(sequence.layers.size() * rest_lse.size());
    sketch_heads.resize(std::size_t(decoder.num_kv_heads));
    for (const LayerPages& pages : sequence.layers)
      sketch_calls.push_back({queries, decoder.scale, rotation, decoder.num_query_heads,
                              {pages.sketches, pages.sketches_stride, candidates, decoder.num_kv_heads, sequence.sketch},
                              rule.first_candidate % sequence.page_size, rule.num_candidates, rule.num_units, rule.num_selections,
                              chosen.data(), rest.data(), rest_lse.data()});
  }

  static SlotTable token_table(const DecodeSequence& sequence) {
    std::vector<Run> runs(sequence.runs, sequence.runs + sequence.num_runs);
    for (Run& run : runs) run.first *= sequence.page_size, run.count *= sequence.page_size;
    return {runs.data(), sequence.num_runs, sequence.num_pool_pages * sequence.page_size, 0, sequence.stop()};
  }
  static SlotTable candidate_table(const DecodeSequence& sequence) {
    const SelectionRule& rule = sequence.rule;
    if (!sequence.selects || rule.num_candidates == 0) return SlotTable(0);
    const int per_page = rule.by_sketches ? sequence.page_size : 1;
    const std::int64_t first = rule.first_candidate / per_page, last = (rule.first_candidate + rule.num_candidates - 1) / per_page;
    return {sequence.runs, sequence.num_runs, sequence.num_pool_pages, first, last + 1 - first};
  }

  std::vector<Piece> all_pieces(const Decoder& decoder) {
    return dense_pieces(decoder.num_kv_heads, num_queries / decoder.num_kv_heads, sequence.num_tokens(),
                        tokens.range(0, tokens.length(), all_ids));
  }

  std::vector<Piece> listed_pieces(const Decoder& decoder) {  // as attend_units
    std::vector<Piece> pieces;
    if (!sequence.selects) return pieces;
    const SelectionRule& rule = sequence.rule;
    const int group = decoder.num_query_heads / decoder.num_kv_heads;
    const int per_list = rule.num_selections == decoder.num_query_heads ? 1 : group;
    const std::vector<Slots> always =
        slots_of_spans({{0, rule.sinks_stop}, {rule.window_start, tokens.length()}}, tokens, span_ids);
    lists.assign(std::size_t(rule.num_selections), std::vector<std::int64_t>(std::size_t(rule.num_units * unit_size())));
    for (int h = 0; h < decoder.num_kv_heads; ++h) {
      for (const Slots& span : always) cut(pieces, {h, h * group, group, span}, kUnitTokens);
      for (int q = h * group; q < (h + 1) * group; q += per_list) {
        const auto& list = lists[std::size_t(q / per_list)];
        cut(pieces, {h, q, per_list, {0, std::int64_t(list.size()), list.data()}}, kUnitTokens);
      }
    }
    return pieces;
  }

  std::vector<std::int64_t> all_ids, sketched_ids;
  std::vector<std::vector<std::int64_t>> span_ids, lists;
  const std::vector<Piece> dense, listed;
  PieceStates dense_states, listed_states;
};

template <class T>
class DecodeStep {
 public:
  DecodeStep(const Decoder& decoder, const std::vector<const DecodeSequence*>& sequences, T* logits)
      : decoder_(decoder), rows_(num_tokens(sequences)), hidden_(decoder.head.num_in), rotation_(decoder.head_dim),
        logits_(logits),
        from_x_(inputs(hidden_, [](const LayerWeights& layer) { return std::vector{&layer.qkv, &layer.gate_up}; }, &decoder.head)),
        from_heads_(inputs(decoder.num_query_heads * decoder.head_dim, [](const LayerWeights& layer) { return std::vector{&layer.output}; })),
        from_gates_(inputs(largest_gate(), [](const LayerWeights& layer) { return std::vector{&layer.down}; })), x_(std::size_t(rows_) * hidden_),
        qkv_(std::size_t(rows_) * qkv_width()), gates_(std::size_t(rows_) * largest_gate()) {
    int row = 0;
    for (const DecodeSequence* sequence : sequences) {
      sequences_.push_back(std::make_unique<StepSequence>(*sequence, row, decoder, rotation_));
      row += sequence->num_tokens();
    }
  }

  // Shares of attention that were estimated for a sequence, a mean over heads, in each of its layers that estimate.
  std::vector<double> estimated(std::size_t sequence) const {
    const StepSequence& own = *sequences_[sequence];
    std::vector<double> means;
    for (std::size_t layer = 0; layer < decoder_.layers.size(); ++layer) {
      if (!own.estimates(layer)) continue;
      const float* shares = own.shares.data() + layer * std::size_t(decoder_.num_query_heads);
      means.push_back(std::accumulate(shares, shares + decoder_.num_query_heads, 0.0) / decoder_.num_query_heads);
    }
    return means;
  }

  // Seconds that were spent on selections.
  double run(int threads) {
    T* x = x_.data();
    for (const auto& own : sequences_)
      for (std::int64_t id : own->sequence.ids) embed(id, x), x += hidden_;
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

  static int num_tokens(const std::vector<const DecodeSequence*>& sequences) {
    int count = 0;
    for (const DecodeSequence* sequence : sequences) count += sequence->num_tokens();
    return count;
  }

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
        const Rows rows{call.weight + first * call.num_in, nullptr, count, call.num_in, plain(sizeof(T) == 2)};
        kernels().dots(inputs.plain.heads(0, rows_), rows, to, count);
      };
      multiply_rows(start, products.data());
      if (call.gated) multiply_rows(width + start, factors);
      write_outputs(call, start, count, products.data(), factors, count);
      pass_on(start, count);
    });
  }

  // Rotates queries and keys, and stores keys and values, with the summaries of pages that are full now.
  void append(Team& team, std::size_t layer) {
    each_of(team, [&](const StepSequence&) { return std::int64_t(decoder_.num_kv_heads); },
            [&](StepSequence& own, std::int64_t head) {
              for (int token = 0; token < own.sequence.num_tokens(); ++token) append_token(own, layer, int(head), token);
              const DecodeSequence& sequence = own.sequence;
              if (!sequence.layers[layer].dense && own.by_sketches())
                own.sketch_heads[std::size_t(head)].start(own.sketch_calls[layer], own.sketched, int(head));
            });
  }

  void append_token(StepSequence& own, std::size_t layer, int h, int token) {
    const LayerWeights& weights = decoder_.layers[layer];
    const DecodeSequence& sequence = own.sequence;
    const LayerPages& pages = sequence.layers[layer];
    const int width = decoder_.head_dim, num_kv_heads = decoder_.num_kv_heads, first = h * group();
    T* const heads = qkv_.data() + (own.row + token) * qkv_width();
    T* const key = heads + (decoder_.num_query_heads + h) * width;
    const T *cos = numbers(sequence.cos) + token * width, *sin = numbers(sequence.sin) + token * width;
    rotate(heads + first * width, group(), width, cos, sin, numbers(weights.query_norm), weights.head_eps);
    rotate(key, 1, width, cos, sin, numbers(weights.key_norm), weights.head_eps);
    if (sequence.asked != nullptr)
      std::memcpy(static_cast<T*>(sequence.asked) + (std::int64_t(layer) * decoder_.num_query_heads + first) * width,
                  heads + first * width, std::size_t(group() * width) * sizeof(T));
    const T* const value = key + num_kv_heads * width;
    const std::int64_t slot = own.slots[std::size_t(token)];
    const bool full = (sequence.position + token + 1) % sequence.page_size == 0;
    const std::int64_t page = slot / sequence.page_size, page_start = page * sequence.page_size;
    if (sequence.coded) {
      const int bytes = row_bytes(RowType::coded, width), count = sequence.page_size;
      auto *const keys = static_cast<std::int8_t*>(pages.keys) + h * pages.stride;
      auto *const values = static_cast<std::int8_t*>(pages.values) + h * pages.stride;
      encode_rows(key, 1, width, &rotation_, keys + slot * bytes);
      encode_rows(value, 1, width, nullptr, values + slot * bytes);
      if (full) {  // what is ranked is what is stored
        std::vector<T> decoded(std::size_t(2 * count) * width);
        decode_rows(keys + page_start * bytes, count, width, &rotation_, decoded.data());
        decode_rows(values + page_start * bytes, count, width, nullptr, &decoded[std::size_t(count) * width]);
        summarise(sequence, pages, h, page, decoded.data(), &decoded[std::size_t(count) * width]);
      }
    } else {
      T *const keys = static_cast<T*>(pages.keys) + h * pages.stride, *const values = static_cast<T*>(pages.values) + h * pages.stride;
      std::memcpy(keys + slot * width, key, width * sizeof(T));
      std::memcpy(values + slot * width, value, width * sizeof(T));
      if (full) summarise(sequence, pages, h, page, keys + page_start * width, values + page_start * width);
    }
    float query[kMaxHeadDim];
    for (int q = first; q < first + group(); ++q) {
      for (int i = 0; i < width; ++i) query[i] = load(heads + q * width + i);
      own.queries.set(q * sequence.num_tokens() + token, 0, query, width);
      if (sequence.coded) {
        float rotated[kMaxHeadDim];
        std::copy_n(query, width, rotated);
        rotation_.turn_rows(rotated, 1);
        own.rotated.set(q * sequence.num_tokens() + token, 0, rotated, width);
      }
      if (pages.dense || !own.selects()) continue;
      for (int i = 0; i < width; ++i)
        if (!std::isfinite(query[i])) throw NotFinite();
      if (own.by_extremes()) own.features.set(q, 0, page_features(query, 1, width, decoder_.scale).data(), 2 * width);
    }
  }

  // Of a page that is full, with its keys and values.
  void summarise(const DecodeSequence& sequence, const LayerPages& pages, int h, std::int64_t page, const T* keys, const T* values) {
    const bool* const all = nullptr;  // tokens are valid
    const int width = decoder_.head_dim;
    if (pages.extremes != nullptr)
      page_extremes(keys, all, 1, sequence.page_size, width,
                    static_cast<T*>(pages.extremes) + h * pages.extremes_stride + page * 2 * width);
    if (pages.sketches != nullptr)
      SketchWriter(sequence.sketch)
          .write(keys, values, all, pages.sketches + h * pages.sketches_stride + page * sequence.sketch.width);
  }

  void select(Team& team, std::size_t layer) {
    const auto parts = [](const StepSequence& own) {  // of a KV head, that are ranked by themselves
      const std::int64_t candidates = own.sequence.rule.num_candidates;
      return own.by_sketches() ? own.sketch_heads[0].num_tasks() : (candidates + kScoredPages - 1) / kScoredPages;
    };
    const auto at_once = [&](const StepSequence& own) { return own.by_sketches() && parts(own) == 1; };  // ranked and chosen
    each_of(team, [&](const StepSequence& own) { return own.ranks(layer) ? parts(own) * decoder_.num_kv_heads : 0; },
            [&](StepSequence& own, std::int64_t task) {
              const int head = int(task / parts(own));
              const std::int64_t part = task % parts(own);
              own.by_sketches() ? own.sketch_heads[std::size_t(head)].weigh_some(part) : score_pages(own, layer, head, part);
              if (at_once(own)) choose_tokens(own, layer, head);
            });
    each_of(team,
            [&](const StepSequence& own) {
              if (!own.ranks(layer) || at_once(own)) return 0;
              return own.by_sketches() ? decoder_.num_kv_heads : own.sequence.rule.num_selections;
            },
            [&](StepSequence& own, std::int64_t task) {
              own.by_sketches() ? choose_tokens(own, layer, int(task)) : choose_pages(own, layer, task);
            });
  }

  void score_pages(StepSequence& own, std::size_t layer, int head, std::int64_t part) {
    const LayerPages& pages = own.sequence.layers[layer];
    const HeadRows rows{pages.extremes, pages.extremes_stride, own.candidates, decoder_.num_kv_heads,
                        2 * decoder_.head_dim, plain(decoder_.bf16)};
    score_some(own.features, group(), rows, *own.order, head, part * kScoredPages, std::fabs(decoder_.scale), own.scores.data());
  }

  void choose_pages(StepSequence& own, std::size_t layer, std::int64_t selection) {
    const SelectionRule& rule = own.sequence.rule;
    const int sharing = decoder_.num_query_heads / rule.num_selections;
    choose_shared(own.scores.data() + selection * sharing * rule.num_candidates, sharing, rule.num_candidates, *own.order,
                  rule.num_units, own.chosen.data() + selection * rule.num_units);
    own.list_chosen(layer, selection);
  }

  void choose_tokens(StepSequence& own, std::size_t layer, int head) {
    own.sketch_heads[std::size_t(head)].choose();
    const int per_head = own.sequence.rule.num_selections / decoder_.num_kv_heads;
    for (int selection = head * per_head; selection < (head + 1) * per_head; ++selection) own.list_chosen(layer, selection);
  }

  // Attends pieces, and estimates attention to the others.
  void attend(Team& team, std::size_t layer) {
    const auto estimates = [&](const StepSequence& own) { return own.estimates(layer) ? decoder_.num_kv_heads : 0; };
    each_of(team, [&](const StepSequence& own) { return estimates(own) + std::int64_t(own.pieces(layer).size()); },
            [&](StepSequence& own, std::int64_t task) {
              if (task < estimates(own)) return own.sketch_heads[std::size_t(task)].estimate_rest();
              const std::int64_t p = task - estimates(own);
              const LayerPages& pages = own.sequence.layers[layer];
              const auto rows = [&](const void* data) {
                const RowType type = own.sequence.coded ? RowType::coded : plain(decoder_.bf16);
                return HeadRows{data, pages.stride, own.tokens, decoder_.num_kv_heads, decoder_.head_dim, type};
              };
              const HeadRows keys = rows(pages.keys), values = rows(pages.values);
              const Piece& piece = own.pieces(layer)[std::size_t(p)];
              own.states(layer).clear(p, piece.num_queries);
              attend_piece({own.sequence.coded ? own.rotated : own.queries, own.num_queries, keys, values, decoder_.scale, 0.0f, decoder_.bf16, 1, {},
                            own.sequence.num_tokens()},
                           piece, p, own.states(layer), nullptr);
            });
    each_of(team, [&](const StepSequence& own) { return std::int64_t(own.num_queries); },
            [&](StepSequence& own, std::int64_t query) {
              const int width = decoder_.head_dim, num_tokens = own.sequence.num_tokens();
              const int head = int(query) / num_tokens, row = own.row + int(query) % num_tokens;
              float numbers[kMaxHeadDim];
              T output[kMaxHeadDim];
              float lse = own.states(layer).merge(int(query), width, numbers);
              for (int i = 0; i < width; ++i) store(output + i, numbers[i]);
              if (own.estimates(layer))
                own.shares[layer * std::size_t(decoder_.num_query_heads) + std::size_t(head)] =
                    merge_estimate(output, lse, own.rest.data() + head * width, own.rest_lse[std::size_t(head)], width);
              for (int i = 0; i < width; ++i) numbers[i] = load(output + i);
              from_heads_.set(row, head * width, numbers, width);
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
  const Rotation rotation_;  // for sketches, and coded keys
  T* const logits_;                                     // [rows, vocabulary]
  ProductInputs from_x_, from_heads_, from_gates_;
  std::vector<T> x_, qkv_, gates_;                      // of all rows
  std::vector<std::unique_ptr<StepSequence>> sequences_;
};

}  // namespace kvsift
