// A decode step of a Llama-like model, one token of each of some sequences, or several that are known: from the embedding to
// the logits in one team of threads. Its phases are what the calls of the composed path do, by the same functions and with the
// same roundings, so that each number has the same bits, and a token gets the bits that it has alone.
#pragma once

#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "attention.hpp"
#include "coded_rows.hpp"
#include "experts.hpp"
#include "extremes.hpp"
#include "packed.hpp"
#include "pages.hpp"
#include "rotary.hpp"
#include "sketch.hpp"

namespace kvsift {

struct Matrix {
  const void *weight, *bias;  // [num_out, num_in]; [num_out] or nullptr
  std::int64_t num_out = 0;
  int num_in = 0;
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

struct Experts {
  Matrix router;
  std::vector<Matrix> gate_up, down;  // of each
  Routing routing;
};

struct LayerWeights {
  Matrix qkv, output;
  Norm before_attention, before_mlp;
  Norm after_attention = {}, after_mlp = {};  // of what is added, if it has one
  Norm of_queries = {}, of_keys = {};         // of each head, if they have one
  Matrix gate_up = {}, down = {};             // of the MLP, or of what experts share; without weights: there is none
  std::shared_ptr<const Experts> experts = nullptr;
  int rope = 0;  // which angles rotate its heads
};

struct Decoder {
  bool bf16;  // all weights that are not packed, keys and values; else float32
  int num_query_heads, num_kv_heads, head_dim, rotary_dim;
  float scale, softcap;    // of logits of attention; 0: they have no cap
  Matrix embedding;        // [vocabulary, hidden]
  float embedding_scale;   // of its rows
  Norm norm;
  Matrix head;
  bool gelu;  // gates are GELU by tanh; else silu
  std::vector<LayerWeights> layers;
};

// The pool of a layer, [num_kv_heads, pages, ...]; strides of heads in numbers, of coded rows in bytes. Of a windowed layer, the
// keys and values of its window alone, [num_kv_heads, tokens, head_dim].
struct LayerPages {
  void *keys, *values;  // [page_size, head_dim] per page
  std::int64_t stride;
  void* extremes;  // [2 * head_dim] per page; nullptr: not maintained
  std::int64_t extremes_stride;
  std::uint8_t* sketches;  // [sketch.width] per page; nullptr: not maintained
  std::int64_t sketches_stride;
  bool dense = true;  // every token is visible, or all of the window
  bool windowed = false;
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
  const void *cos, *sin;          // [ropes, tokens, rotary_dim]
  std::vector<float> query_scales;  // of each token; empty: 1
  std::int64_t window_first, window_count;  // tokens of windowed layers that are seen, the last of which is the new one
  const Run* runs;                // pages of the sequence, with those of the tokens
  std::int64_t num_runs, num_pool_pages;
  SelectionRule rule;
  void* asked;           // queries of all layers, [layers, num_query_heads, head_dim], are copied to here; nullptr: they are not
  std::int64_t* chosen;  // units of sparse layers, [layers, num_selections, num_units], as well

  int num_tokens() const { return int(ids.size()); }
  std::int64_t stop() const { return position + num_tokens(); }
};

struct NotFinite : std::runtime_error {
  NotFinite() : std::runtime_error("queries or keys hold NaN or infinity") {}
};

// A sequence in a step: its slots and pieces, which are the same in all layers. Its queries are those of dense_pieces.
class StepSequence {
 public:
  StepSequence(const DecodeSequence& sequence, int row, const Decoder& decoder, const Rotation& rotation)
      : sequence(sequence), row(row), num_queries(decoder.num_query_heads * sequence.num_tokens()), tokens(token_table(sequence)),
        candidates(candidate_table(sequence)), slots(sequence.ids.size()), queries(num_queries, decoder.head_dim, decoder.bf16),
        rotated(sequence.coded ? num_queries : 0, decoder.head_dim, false),
        features(by_extremes() ? num_queries : 0, 2 * decoder.head_dim, decoder.bf16), dense(all_pieces(decoder)),
        listed(listed_pieces(decoder)), windowed(window_pieces(decoder)), dense_states(dense, num_queries, queries.stride()),
        listed_states(listed, num_queries, queries.stride()), windowed_states(windowed, num_queries, queries.stride()) {
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
  bool ranks(std::size_t layer) const { return !is_dense(layer) && selects() && (sequence.rule.num_units > 0 || sequence.rule.rest); }
  bool estimates(std::size_t layer) const { return !is_dense(layer) && by_sketches() && sequence.rule.rest; }
  // Parts that the ranking of a KV head has. It is not cut where threads take about as many heads each: what a thread has
  // written and another reads, or writes for the next layer, moves between their caches.
  std::int64_t num_parts(const Decoder& decoder, int threads) const {
    const std::int64_t rounds = (decoder.num_kv_heads + threads - 1) / threads;  // of heads, in which threads may idle
    if (3 * rounds * threads <= 4 * decoder.num_kv_heads) return 1;
    if (by_sketches()) return SketchHead::num_tasks(sketched.count, sequence.sketch);
    return (sequence.rule.num_candidates + kScoredPages - 1) / kScoredPages;
  }
  bool is_windowed(std::size_t layer) const { return sequence.layers[layer].windowed; }
  const std::vector<Piece>& pieces(std::size_t layer) const {
    return is_windowed(layer) ? windowed : is_dense(layer) ? dense : listed;
  }
  PieceStates& states(std::size_t layer) {
    return is_windowed(layer) ? windowed_states : is_dense(layer) ? dense_states : listed_states;
  }

  // Attends a piece of a layer.
  void attend(const Decoder& decoder, std::size_t layer, std::int64_t p) {
    const LayerPages& pages = sequence.layers[layer];
    const bool coded = sequence.coded && !pages.windowed;
    const auto rows = [&](const void* data) {
      const RowType type = coded ? RowType::coded : plain(decoder.bf16);
      return HeadRows{data, pages.stride, tokens, decoder.num_kv_heads, decoder.head_dim, type};
    };
    const HeadRows keys = rows(pages.keys), values = rows(pages.values);
    const Piece& piece = pieces(layer)[std::size_t(p)];
    states(layer).clear(p, piece.num_queries);
    attend_piece({coded ? rotated : queries, num_queries, keys, values, decoder.scale, decoder.softcap, decoder.bf16, 1, {},
                  sequence.num_tokens()},
                 piece, p, states(layer), nullptr);
  }

  // First pieces, of sinks and window of all heads, that are attended before tokens are chosen: votes are compared with them.
  std::int64_t num_before_choice(std::size_t layer) const {
    return ranks(layer) && by_sketches() ? std::int64_t(sketch_heads.size()) * spans_per_head : 0;
  }

  // Chooses tokens for a KV head whose ranking has one part.
  void choose_at_once(const Decoder& decoder, std::size_t layer, int head) {
    for (std::int64_t i = 0; i < spans_per_head; ++i) attend(decoder, layer, head * spans_per_head + i);
    note_past(head);
    choose_of_head(sketch_calls[layer], sketched, head, estimates(layer));
    list_tokens(layer, head);
  }

  // Chooses tokens for a KV head whose pages were weighed, and its sinks and window attended, by several threads.
  void choose_weighed(std::size_t layer, int head) {
    note_past(head);
    sketch_heads[std::size_t(head)].choose();
    list_tokens(layer, head);
  }

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
  std::vector<float> past;               // [num_query_heads], lse of sinks and window in the layer that selects
  std::vector<float> rest, rest_lse;     // [num_query_heads, head_dim], [num_query_heads]: attention to what is not chosen
  std::vector<float> shares;             // [layers, num_query_heads], of that

 private:
  int unit_size() const { return by_sketches() ? 1 : sequence.page_size; }

  // What votes of a KV head are compared with: its sinks and window, which are attended.
  void note_past(int head) {
    const int group = sketch_calls[0].group();
    for (int q = head * group; q < (head + 1) * group; ++q) {
      past[std::size_t(q)] = listed_states.lse(q, std::size_t(spans_per_head));
      if (std::isnan(past[std::size_t(q)])) throw NotFinite();
    }
  }

  void list_tokens(std::size_t layer, int head) {
    const int per_head = sequence.rule.num_selections / sketch_calls[0].rows.num_kv_heads;
    for (int selection = head * per_head; selection < (head + 1) * per_head; ++selection) list_chosen(layer, selection);
  }

  void prepare_sketches(const Decoder& decoder, const Rotation& rotation) {
    const SelectionRule& rule = sequence.rule;
    sketched = candidates.range(0, candidates.length(), sketched_ids);
    rest.resize(std::size_t(decoder.num_query_heads * decoder.head_dim));
    rest_lse.resize(std::size_t(decoder.num_query_heads));
    past.resize(rest_lse.size());
    shares.resize(sequence.layers.size() * rest_lse.size());
    sketch_heads.resize(std::size_t(decoder.num_kv_heads));
    for (const LayerPages& pages : sequence.layers)
      sketch_calls.push_back({queries, decoder.scale, rotation, decoder.num_query_heads,
                              {pages.sketches, pages.sketches_stride, candidates, decoder.num_kv_heads, sequence.sketch},
                              rule.first_candidate % sequence.page_size, rule.num_candidates, rule.num_units, rule.num_selections,
                              past.data(), chosen.data(), rest.data(), rest_lse.data()});
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

  std::vector<Piece> window_pieces(const Decoder& decoder) const {
    if (sequence.window_count == 0) return {};
    return dense_pieces(decoder.num_kv_heads, num_queries / decoder.num_kv_heads, 1,
                        {sequence.window_first, sequence.window_count, nullptr});
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
    for (int h = 0; h < decoder.num_kv_heads; ++h)
      for (const Slots& span : always) cut(pieces, {h, h * group, group, span}, kUnitTokens);
    spans_per_head = std::int64_t(pieces.size()) / decoder.num_kv_heads;
    for (int q = 0; q < decoder.num_query_heads; q += per_list) {
      const auto& list = lists[std::size_t(q / per_list)];
      cut(pieces, {q / group, q, per_list, {0, std::int64_t(list.size()), list.data()}}, kUnitTokens);
    }
    return pieces;
  }

  std::vector<std::int64_t> all_ids, sketched_ids;
  std::vector<std::vector<std::int64_t>> span_ids, lists;
  std::int64_t spans_per_head = 0;  // first pieces of those that are listed: of sinks and window of a KV head
  const std::vector<Piece> dense, listed, windowed;
  PieceStates dense_states, listed_states, windowed_states;
};

template <class T>
class DecodeStep {
 public:
  DecodeStep(const Decoder& decoder, const std::vector<const DecodeSequence*>& sequences, T* logits)
      : decoder_(decoder), rows_(num_tokens(sequences)), hidden_(decoder.head.num_in), rotation_(decoder.head_dim),
        logits_(logits), from_x_(inputs(hidden_, readers_of_x())), from_heads_(inputs(heads_width(), readers_of_heads())),
        x_(std::size_t(rows_) * hidden_), normal_(x_.size()), qkv_(std::size_t(rows_) * qkv_width()) {
    std::size_t gates = 0, added = x_.size(), routed = 0;
    for (const LayerWeights& layer : decoder.layers) {
      const int top_k = layer.experts ? layer.experts->routing.top_k : 1;
      const std::size_t of_experts = layer.experts ? std::size_t(top_k) * layer.experts->down[0].num_in : 0;
      gates = std::max(gates, rows_ * std::max(of_experts, std::size_t(layer.down.num_in)));
      added = std::max(added, x_.size() * top_k);
      if (layer.experts) routed = std::max(routed, std::size_t(rows_) * std::size_t(layer.experts->router.num_out));
      const int width = layer.down.num_in;
      if (width > 0) from_gates_.try_emplace(width, inputs(width, readers_of_gates(width)));
    }
    gates_.resize(gates), added_.resize(added), routed_.resize(routed);
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
      const Norm none;
      const Norm* after = &none;  // of what the MLP before has added
      for (std::size_t layer = 0; layer < decoder_.layers.size(); ++layer) {
        const LayerWeights& weights = decoder_.layers[layer];
        normalise(team, weights.before_attention, *after);
        multiply(team, {job(weights.qkv, from_x_, nullptr, qkv_.data())});
        append(team, layer);
        const auto started = std::chrono::steady_clock::now();
        select(team, layer);
        if (leads) select_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
        attend(team, layer);
        add(team, weights.output, from_heads_, weights.after_attention);
        normalise(team, weights.before_mlp, weights.after_attention);
        after = &weights.after_mlp;
        if (weights.experts) ask_experts(team, *weights.experts);
        if (weights.down.num_in == 0) continue;
        ProductInputs& from_gates = from_gates_.at(weights.down.num_in);
        multiply(team, {gates_job(weights.gate_up, from_x_, gates_.data(), from_gates)});
        add(team, weights.down, from_gates, *after);
      }
      normalise(team, decoder_.norm, *after);
      multiply(team, {job(decoder_.head, from_x_, nullptr, logits_)});
    });
    return select_s;
  }

 private:
  static constexpr int kTasksPerThread = 2;  // of a product

  // A matrix, rows of inputs, and where outputs go. Where a product follows at once, outputs are gated and are its inputs.
  struct Job {
    const Matrix* matrix;
    const ProductInputs* inputs;
    int rows;
    const T* residual;
    T* out;
    ProductInputs* following;
  };

  Job job(const Matrix& matrix, const ProductInputs& inputs, const T* residual, T* out) const {
    return {&matrix, &inputs, rows_, residual, out, nullptr};
  }
  Job gates_job(const Matrix& matrix, const ProductInputs& inputs, T* out, ProductInputs& following) const {
    return {&matrix, &inputs, rows_, nullptr, out, &following};
  }

  static int num_tokens(const std::vector<const DecodeSequence*>& sequences) {
    int count = 0;
    for (const DecodeSequence* sequence : sequences) count += sequence->num_tokens();
    return count;
  }

  static const T* numbers(const void* data) { return static_cast<const T*>(data); }
  int heads_width() const { return decoder_.num_query_heads * decoder_.head_dim; }
  std::int64_t qkv_width() const { return std::int64_t(decoder_.num_query_heads + 2 * decoder_.num_kv_heads) * decoder_.head_dim; }
  int group() const { return decoder_.num_query_heads / decoder_.num_kv_heads; }

  // Matrices that an input is multiplied with.
  std::vector<const Matrix*> readers_of_x() const {
    std::vector<const Matrix*> readers{&decoder_.head};
    for (const LayerWeights& layer : decoder_.layers) {
      readers.push_back(&layer.qkv);
      if (layer.experts) readers.push_back(&layer.experts->router);
      if (layer.down.num_in > 0) readers.push_back(&layer.gate_up);
    }
    return readers;
  }
  std::vector<const Matrix*> readers_of_heads() const {
    std::vector<const Matrix*> readers;
    for (const LayerWeights& layer : decoder_.layers) readers.push_back(&layer.output);
    return readers;
  }
  std::vector<const Matrix*> readers_of_gates(int width) const {
    std::vector<const Matrix*> readers;
    for (const LayerWeights& layer : decoder_.layers)
      if (layer.down.num_in == width) readers.push_back(&layer.down);
    return readers;
  }

  ProductInputs inputs(int num_in, const std::vector<const Matrix*>& readers) const {
    const auto is_packed = [](const Matrix* matrix) { return matrix->is_packed(); };
    return {rows_, num_in, decoder_.bf16, !std::all_of(readers.begin(), readers.end(), is_packed),
            std::any_of(readers.begin(), readers.end(), is_packed)};
  }

  void embed(std::int64_t token, T* x) const {
    const Matrix& embedding = decoder_.embedding;
    std::vector<float> row(static_cast<std::size_t>(hidden_));
    if (embedding.is_packed())
      embedding.parts[0].unpack(token, row.data());
    else
      for (int i = 0; i < hidden_; ++i) row[std::size_t(i)] = load(numbers(embedding.weight) + token * hidden_ + i);
    for (int i = 0; i < hidden_; ++i) store(x + i, rounded<T>(row[std::size_t(i)]) * decoder_.embedding_scale);
  }

  // The inputs of the next products; after what was added has had its norm, if it has one.
  void normalise(Team& team, const Norm& norm, const Norm& after) {
    team.each(rows_, [&](std::int64_t row) {
      T* const x = &x_[std::size_t(row) * hidden_];
      float* const normal = &normal_[std::size_t(row) * hidden_];
      if (after.weight != nullptr) add_normalised(&added_[std::size_t(row) * hidden_], after, hidden_, x, normal, x);
      rms_norm(x, norm, hidden_, normal);
      from_x_.set(int(row), 0, normal, hidden_);
    });
  }

  // Adds outputs, or leaves them to normalise.
  void add(Team& team, const Matrix& matrix, const ProductInputs& inputs, const Norm& after) {
    const bool at_once = after.weight == nullptr;
    multiply(team, {job(matrix, inputs, at_once ? x_.data() : nullptr, at_once ? x_.data() : added_.data())});
  }

  // The product of a job, whose tasks are any thread's.
  class Multiplication {
   public:
    Multiplication(const Job& job, bool gelu, int threads)
        : job_(job), call_{nullptr, numbers(job.matrix->weight), {}, numbers(job.matrix->bias), job.residual, job.out,
                           job.matrix->num_out, job.rows, job.matrix->num_in, job.following != nullptr, gelu},
          width_(call_.gated ? call_.num_out / 2 : call_.num_out) {
      if (job.matrix->is_packed()) {
        packed_ = std::make_unique<PackedProduct<T>>(call_, job.matrix->parts, job.inputs->packed, threads);
        num_tasks_ = packed_->num_tasks();
        return;
      }
      // Rows are read fastest forwards, and a thread that falls behind leaves tasks to the others.
      const std::int64_t even = width_ / (kTasksPerThread * threads);
      const int together = job.following != nullptr && job.following->some_packed ? PackedMatrix::kBlock : 4;
      per_task_ = (std::max(rows_per_task<T>(call_.num_in), even) + together - 1) / together * together;
      num_tasks_ = (width_ + per_task_ - 1) / per_task_;
    }

    std::int64_t num_tasks() const { return num_tasks_; }

    void run(std::int64_t task) const {
      if (packed_ != nullptr)
        return packed_->run(task, [&](std::int64_t start, std::int64_t count) { pass_on(start, count); });
      const std::int64_t start = task * per_task_, count = std::min(per_task_, width_ - start);
      std::vector<float> products(std::size_t(call_.gated ? 2 : 1) * std::size_t(job_.rows * count));
      float* const factors = products.data() + (call_.gated ? job_.rows * count : 0);
      const auto multiply_rows = [&](std::int64_t first, float* to) {
        const Rows rows{call_.weight + first * call_.num_in, nullptr, count, call_.num_in, plain(sizeof(T) == 2)};
        kernels().dots(job_.inputs->plain.heads(0, job_.rows), rows, to, count);
      };
      multiply_rows(start, products.data());
      if (call_.gated) multiply_rows(width_ + start, factors);
      write_outputs(call_, start, count, products.data(), factors, count);
      pass_on(start, count);
    }

   private:
    void pass_on(std::int64_t start, std::int64_t count) const {
      if (job_.following == nullptr) return;
      std::vector<float> outputs(static_cast<std::size_t>(count));
      for (int row = 0; row < job_.rows; ++row) {
        for (std::int64_t i = 0; i < count; ++i) outputs[std::size_t(i)] = load(job_.out + row * width_ + start + i);
        job_.following->set(row, int(start), outputs.data(), int(count));
      }
    }

    const Job job_;
    const Product<T> call_;
    const std::int64_t width_;
    std::unique_ptr<PackedProduct<T>> packed_;
    std::int64_t per_task_ = 0, num_tasks_;
  };

  // A phase of products that do not wait for one another.
  void multiply(Team& team, const std::vector<Job>& jobs) {
    std::vector<Multiplication> all;
    all.reserve(jobs.size());
    std::int64_t total = 0;
    for (const Job& job : jobs) all.emplace_back(job, decoder_.gelu, team.size()), total += all.back().num_tasks();
    team.each(total, [&](std::int64_t task) {
      for (const Multiplication& each : all) {
        if (task < each.num_tasks()) return each.run(task);
        task -= each.num_tasks();
      }
    });
  }

  // Adds what the experts of each row give.
  void ask_experts(Team& team, const Experts& experts) {
    const int top_k = experts.routing.top_k;
    multiply(team, {job(experts.router, from_x_, nullptr, routed_.data())});
    team.each(1, [&](std::int64_t) { assign(experts); });
    multiply(team, expert_gates_);
    multiply(team, expert_outputs_);
    team.each(rows_, [&](std::int64_t row) {
      std::vector<const T*> outputs(static_cast<std::size_t>(top_k));
      for (int k = 0; k < top_k; ++k) outputs[std::size_t(k)] = &added_[places_[std::size_t(row * top_k + k)] * hidden_];
      T* const x = &x_[std::size_t(row) * hidden_];
      mix(outputs.data(), &shares_[std::size_t(row * top_k)], top_k, hidden_, x, x);
    });
  }

  // Finds the experts of each row, and for each expert its rows, whose outputs follow one another.
  void assign(const Experts& experts) {
    const int top_k = experts.routing.top_k;
    std::vector<std::int64_t> chosen(std::size_t(rows_ * top_k));
    places_.resize(chosen.size()), shares_.resize(chosen.size());
    for (int row = 0; row < rows_; ++row)
      route(&routed_[std::size_t(row * experts.router.num_out)], int(experts.router.num_out), experts.routing, &chosen[std::size_t(row * top_k)],
            &shares_[std::size_t(row * top_k)]);
    std::map<std::int64_t, std::vector<int>> pairs;  // of each expert
    for (int pair = 0; pair < rows_ * top_k; ++pair) pairs[chosen[std::size_t(pair)]].push_back(pair);
    expert_gates_.clear(), expert_outputs_.clear(), expert_inputs_.clear();
    std::size_t place = 0;
    for (const auto& [expert, own] : pairs) {
      const Matrix &gate_up = experts.gate_up[std::size_t(expert)], &down = experts.down[std::size_t(expert)];
      const int count = int(own.size());
      const auto new_inputs = [&](const Matrix& reader) {
        expert_inputs_.push_back(std::make_unique<ProductInputs>(count, reader.num_in, decoder_.bf16, !reader.is_packed(), reader.is_packed()));
        return expert_inputs_.back().get();
      };
      ProductInputs *const own_inputs = new_inputs(gate_up), *const gates = new_inputs(down);
      expert_gates_.push_back({&gate_up, own_inputs, count, nullptr, &gates_[place * down.num_in], gates});
      expert_outputs_.push_back({&down, gates, count, nullptr, &added_[place * hidden_], nullptr});
      for (int i = 0; i < count; ++i) {
        own_inputs->set(i, 0, &normal_[std::size_t(own[std::size_t(i)] / top_k) * hidden_], hidden_);
        places_[std::size_t(own[std::size_t(i)])] = place++;
      }
    }
  }

  // Rotates queries and keys, and stores keys and values, with the summaries of pages that are full now.
  void append(Team& team, std::size_t layer) {
    each_of(team, [&](const StepSequence&) { return std::int64_t(decoder_.num_kv_heads); },
            [&](StepSequence& own, std::int64_t head) {
              for (int token = 0; token < own.sequence.num_tokens(); ++token) append_token(own, layer, int(head), token);
              if (own.ranks(layer) && own.by_sketches() && own.num_parts(decoder_, team.size()) > 1)
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
    const std::int64_t angles = (std::int64_t(weights.rope) * sequence.num_tokens() + token) * decoder_.rotary_dim;
    const float scale = sequence.query_scales.empty() ? 1.0f : sequence.query_scales[std::size_t(token)];
    const T *cos = numbers(sequence.cos) + angles, *sin = numbers(sequence.sin) + angles;
    rotate(heads + first * width, group(), width, decoder_.rotary_dim, cos, sin, weights.of_queries, scale);
    rotate(key, 1, width, decoder_.rotary_dim, cos, sin, weights.of_keys);
    if (sequence.asked != nullptr)
      std::memcpy(static_cast<T*>(sequence.asked) + (std::int64_t(layer) * decoder_.num_query_heads + first) * width,
                  heads + first * width, std::size_t(group() * width) * sizeof(T));
    const T* const value = key + num_kv_heads * width;
    const std::int64_t slot = pages.windowed ? sequence.window_first + sequence.window_count - 1 : own.slots[std::size_t(token)];
    const bool full = !pages.windowed && (sequence.position + token + 1) % sequence.page_size == 0;
    const std::int64_t page = slot / sequence.page_size, page_start = page * sequence.page_size;
    const bool coded = sequence.coded && !pages.windowed;
    if (coded) {
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
      if (coded) {
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

  // A KV head of one part is ranked and chosen at once.
  void select(Team& team, std::size_t layer) {
    const auto parts = [&](const StepSequence& own) { return own.ranks(layer) ? own.num_parts(decoder_, team.size()) : 0; };
    each_of(team,
            [&](const StepSequence& own) {
              const std::int64_t spans = parts(own) > 1 ? own.num_before_choice(layer) : 0;
              return parts(own) * decoder_.num_kv_heads + spans;
            },
            [&](StepSequence& own, std::int64_t task) {
              const int head = int(task / parts(own));
              if (head >= decoder_.num_kv_heads) return own.attend(decoder_, layer, task - parts(own) * decoder_.num_kv_heads);
              if (parts(own) == 1) return choose_at_once(own, layer, head);
              own.by_sketches() ? own.sketch_heads[std::size_t(head)].weigh_some(task % parts(own))
                                : score_pages(own, layer, head, task % parts(own));
            });
    each_of(team,
            [&](const StepSequence& own) {
              if (parts(own) <= 1) return 0;
              return own.by_sketches() ? decoder_.num_kv_heads : own.sequence.rule.num_selections;
            },
            [&](StepSequence& own, std::int64_t task) {
              if (!own.by_sketches()) return choose_pages(own, layer, task);
              own.choose_weighed(layer, int(task));
            });
  }

  void choose_at_once(StepSequence& own, std::size_t layer, int head) {
    if (own.by_sketches()) return own.choose_at_once(decoder_, layer, head);
    const std::int64_t per_head = own.sequence.rule.num_selections / decoder_.num_kv_heads;
    for (std::int64_t part = 0; part * kScoredPages < own.sequence.rule.num_candidates; ++part) score_pages(own, layer, head, part);
    for (std::int64_t i = 0; i < per_head; ++i) choose_pages(own, layer, head * per_head + i);
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

  // Attends the pieces that are left, and estimates attention to the others where that was not done at once.
  void attend(Team& team, std::size_t layer) {
    const auto estimates = [&](const StepSequence& own) {
      return own.estimates(layer) && own.num_parts(decoder_, team.size()) > 1 ? decoder_.num_kv_heads : 0;
    };
    const auto first = [&](const StepSequence& own) { return own.num_before_choice(layer); };
    each_of(team,
            [&](const StepSequence& own) { return estimates(own) + std::int64_t(own.pieces(layer).size()) - first(own); },
            [&](StepSequence& own, std::int64_t task) {
              if (task < estimates(own)) return own.sketch_heads[std::size_t(task)].estimate_rest();
              own.attend(decoder_, layer, first(own) + task - estimates(own));
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
  ProductInputs from_x_, from_heads_;
  std::map<int, ProductInputs> from_gates_;             // by their width
  std::vector<T> x_;                                    // of all rows, as those that follow
  std::vector<float> normal_;                           // x after a norm
  std::vector<T> qkv_, gates_;
  std::vector<T> added_;                                // outputs that are not added yet: to be normalised, or of experts
  std::vector<std::unique_ptr<StepSequence>> sequences_;
  // Of a layer of experts: logits [rows, experts]; of each of [rows, top_k] its place in added_ and its weight.
  std::vector<T> routed_;
  std::vector<std::size_t> places_;
  std::vector<float> shares_;
  std::vector<Job> expert_gates_, expert_outputs_;
  std::vector<std::unique_ptr<ProductInputs>> expert_inputs_;
};

}  // namespace kvsift
