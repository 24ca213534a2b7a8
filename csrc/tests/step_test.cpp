// A decode step without Python: the same bits with any number of threads, alone and together, and of several tokens in one
// step; phases of a team. Built with sanitizers by tests/native/test_sanitizers.py.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "step.hpp"

using namespace kvsift;

namespace {

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                  \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (0)

enum class Shape { plain, packed, windowed };  // windowed: experts, norms of outputs, windows and soft caps as well

constexpr int kHeads = 6, kKvHeads = 2, kWidth = 16, kPage = 16, kPages = 64, kLayers = 2;
constexpr std::int64_t kVocabulary = 50;

// Numbers of a type, which live as long as the test.
template <class T>
class Numbers {
 public:
  T* draw(std::int64_t count) {
    all_.emplace_back(static_cast<std::size_t>(count));
    std::normal_distribution<float> normal(0.0f, 0.3f);
    for (T& number : all_.back()) store(&number, normal(random_));
    return all_.back().data();
  }
  std::uint8_t* zeros(std::int64_t count) {
    bytes_.emplace_back(static_cast<std::size_t>(count));
    return bytes_.back().data();
  }
  Matrix matrix(std::int64_t num_out, int num_in) { return {draw(num_out * num_in), draw(num_out), num_out, num_in}; }
  // Of parts of two kinds.
  Matrix packed(std::int64_t num_out, int num_in, bool gated = false) {
    const std::int64_t first = gated ? num_out / 2 : num_out - 16;
    return {nullptr, draw(num_out), num_out, num_in, {part(first, num_in, 4), part(num_out - first, num_in, gated ? 4 : 8)}};
  }
  PackedMatrix part(std::int64_t num_out, int num_in, int bits) {
    PackedMatrix made{nullptr, {}, num_out, num_in, bits, bits == 4, bits == 8};
    for (int i = 0; i < 16; ++i) made.table[i] = std::uint8_t(100 + 3 * i);
    bytes_.emplace_back(std::size_t(made.num_tiles() * made.tile_bytes()));
    const std::int64_t block_bytes = made.tile_bytes() / made.num_blocks();
    for (std::size_t i = 0; i < bytes_.back().size(); ++i) {
      const bool is_scale = std::int64_t(i) % block_bytes >= bits * 64;
      bytes_.back()[i] = is_scale ? (i % 2 == 0 ? random_() % 256 : 0x14) : random_() % 256;  // scales of 2^-10
    }
    made.data = bytes_.back().data();
    return made;
  }

 private:
  std::mt19937 random_{7};
  std::vector<std::vector<T>> all_;
  std::vector<std::vector<std::uint8_t>> bytes_;
};

const SketchFormat kSketch{1, 1, kWidth, kPage, 64, 96, 128, 144, 160};

// Sketches of all pages of a pool.
template <class T>
void write_sketches(const LayerPages& layer) {
  SketchWriter writer(kSketch);
  for (int h = 0; h < kKvHeads; ++h)
    for (std::int64_t page = 0; page < kPages; ++page) {
      const std::int64_t first = h * layer.stride + page * kPage * kWidth;
      const bool* const all = nullptr;
      writer.write(static_cast<const T*>(layer.keys) + first, static_cast<const T*>(layer.values) + first, all,
                   layer.sketches + h * layer.sketches_stride + page * kSketch.width);
    }
}

// A sequence of so many tokens in a pool of its own; the second layer is sparse if it selects.
template <class T>
DecodeSequence sequence_of(Numbers<T>& numbers, const std::vector<Run>& runs, std::int64_t position, std::int64_t num_chosen,
                           bool by_sketches = false) {
  DecodeSequence made{};
  made.sketch = kSketch;
  made.page_size = kPage, made.ids = {position % kVocabulary}, made.position = position;
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::int64_t stride = kPages * kPage * kWidth, extremes_stride = kPages * 2 * kWidth;
    made.layers.push_back({numbers.draw(kKvHeads * stride), numbers.draw(kKvHeads * stride), stride,
                           numbers.draw(kKvHeads * extremes_stride), extremes_stride,
                           numbers.zeros(kKvHeads * kPages * kSketch.width), kPages * kSketch.width, num_chosen < 0 || layer == 0});
    write_sketches<T>(made.layers.back());
  }
  made.selects = num_chosen >= 0;
  made.cos = numbers.draw(2 * kWidth), made.sin = numbers.draw(2 * kWidth);  // of two ropes
  made.runs = runs.data(), made.num_runs = std::int64_t(runs.size()), made.num_pool_pages = kPages;
  const std::int64_t window_start = (position - 20) / kPage * kPage;
  made.rule = {kPage, window_start, 1, window_start / kPage - 1, num_chosen, kKvHeads, false, false};
  if (by_sketches) made.rule = {5, position - 17, 5, position - 22, num_chosen, kKvHeads, true, true};
  return made;
}

// The same with a window in place of the first layer, which holds so many tokens behind some that are seen no more.
template <class T>
DecodeSequence windowed_sequence(Numbers<T>& numbers, const std::vector<Run>& runs, std::int64_t position, std::int64_t num_chosen,
                                 std::int64_t window_count) {
  DecodeSequence made = sequence_of(numbers, runs, position, num_chosen);
  made.window_first = 3, made.window_count = window_count, made.query_scales = {1.5f};
  const std::int64_t stride = (3 + window_count) * kWidth;
  made.layers[0] = {numbers.draw(kKvHeads * stride), numbers.draw(kKvHeads * stride), stride, nullptr, 0, nullptr, 0, true, true};
  return made;
}

// Tokens in one step, beside another sequence, have the logits, keys, values and extremes of as many steps.
template <class T>
void check_several_tokens(const Decoder& decoder, Numbers<T>& numbers, const std::vector<Run>& runs, std::int64_t position, int count) {
  DecodeSequence own = sequence_of(numbers, runs, position, -1), other = sequence_of(numbers, runs, 37, -1);
  const T *const cos = numbers.draw(count * kWidth), *const sin = numbers.draw(count * kWidth);
  const auto stored = [&] {
    std::vector<T> copy;
    for (const LayerPages& layer : own.layers)
      for (const void* pool : {layer.keys, layer.values, static_cast<void*>(layer.extremes)}) {
        const T* const first = static_cast<const T*>(pool);
        copy.insert(copy.end(), first, first + kKvHeads * (pool == layer.extremes ? layer.extremes_stride : layer.stride));
      }
    return copy;
  };
  const auto begin = [&](int first, int tokens) {
    own.ids.resize(std::size_t(tokens));
    std::iota(own.ids.begin(), own.ids.end(), first + 3);
    own.position = position + first, own.cos = cos + first * kWidth, own.sin = sin + first * kWidth;
  };
  std::vector<T> expected(std::size_t(count * kVocabulary)), found(std::size_t((count + 1) * kVocabulary));
  for (int token = 0; token < count; ++token) {
    begin(token, 1);
    DecodeStep<T>(decoder, {&own}, expected.data() + token * kVocabulary).run(2);
  }
  const std::vector<T> before = stored();
  begin(0, count);
  for (int threads : {1, 3}) {
    for (LayerPages& layer : own.layers)  // of the page that becomes full, to be written anew
      std::fill_n(static_cast<T*>(layer.extremes) + (runs[0].first + position / kPage) * 2 * kWidth, 2 * kWidth, T{});
    DecodeStep<T>(decoder, {&other, &own}, found.data()).run(threads);
    CHECK(std::equal(expected.begin(), expected.end(), found.begin() + kVocabulary));
    CHECK(stored() == before);
  }
}

// Packed weights: in some of the matrices, so that inputs are read in both ways.
template <class T, Shape kShape>
void check_step() {
  constexpr bool kPacked = kShape != Shape::plain, kWindowed = kShape == Shape::windowed;
  constexpr int kHidden = kPacked ? 64 : 40, kInter = kPacked ? 96 : 56, kQkv = (kHeads + 2 * kKvHeads) * kWidth;
  Numbers<T> numbers;
  const Matrix embedding = numbers.matrix(kVocabulary, kHidden), head = numbers.matrix(kVocabulary, kHidden);
  const auto norm = [&](int width) { return Norm{numbers.draw(width), 1e-5f, kWindowed ? 1.0f : 0.0f}; };
  Decoder decoder{sizeof(T) == 2, kHeads, kKvHeads, kWidth, kWindowed ? 12 : kWidth, 0.25f, kWindowed ? 3.0f : 0.0f, embedding, kWindowed ? 8.0f : 1.0f,
                  norm(kHidden), head, kWindowed, {}};
  if (kPacked) decoder.embedding = {nullptr, nullptr, kVocabulary, kHidden, {numbers.part(kVocabulary, kHidden, 8)}};
  if (kPacked) decoder.head = {nullptr, nullptr, kVocabulary, kHidden, decoder.embedding.parts};
  for (int layer = 0; layer < kLayers; ++layer) {
    const bool packs = kPacked && layer == 1, packs_down = kPacked && layer == 0;
    LayerWeights made{packs ? numbers.packed(kQkv, kHidden) : numbers.matrix(kQkv, kHidden), numbers.matrix(kHidden, kHeads * kWidth),
                      norm(kHidden), norm(kHidden), {}, {}, norm(kWidth), norm(kWidth)};
    made.gate_up = packs ? numbers.packed(2 * kInter, kHidden, true) : numbers.matrix(2 * kInter, kHidden);
    made.down = packs_down ? numbers.packed(kHidden, kInter) : numbers.matrix(kHidden, kInter);
    if (kWindowed && layer == 0) made.after_attention = norm(kHidden), made.after_mlp = norm(kHidden);
    if (kWindowed && layer == 1) {
      Experts experts{numbers.matrix(5, kHidden), {}, {}, {3, false, true, 1.0f, nullptr}};
      for (int expert = 0; expert < 5; ++expert) {
        experts.gate_up.push_back(expert % 2 ? numbers.packed(64, kHidden, true) : numbers.matrix(64, kHidden));
        experts.down.push_back(expert % 3 ? numbers.packed(kHidden, 32) : numbers.matrix(kHidden, 32));
      }
      made.experts = std::make_shared<const Experts>(std::move(experts)), made.rope = 1;
      made.gate_up = numbers.matrix(2 * 48, kHidden), made.down = numbers.matrix(kHidden, 48);
    }
    decoder.layers.push_back(std::move(made));
  }
  const std::vector<Run> one{{0, kPages}}, several{{40, 20}, {3, 30}}, first{{5, 1}};
  std::vector<DecodeSequence> sequences;
  if (kWindowed) {
    for (std::int64_t count : {1, 700, 90, 1300, 2, 16, 90})
      sequences.push_back(windowed_sequence(numbers, sequences.size() % 2 ? several : one, 591, sequences.size() % 3 ? 7 : -1, count));
  } else {
    sequences = {sequence_of(numbers, one, 777, -1), sequence_of(numbers, several, 591, 7), sequence_of(numbers, one, 400, 0),
                 sequence_of(numbers, first, 0, -1), sequence_of(numbers, several, 655, 40, true),
                 sequence_of(numbers, one, 400, 0, true)};
  }
  std::vector<const DecodeSequence*> all;
  for (const DecodeSequence& each : sequences) all.push_back(&each);
  const auto logits = [&](const std::vector<const DecodeSequence*>& some, int threads) {
    std::vector<T> out(some.size() * kVocabulary);
    DecodeStep<T>(decoder, some, out.data()).run(threads);
    return out;
  };
  const std::vector<T> together = logits(all, 1);
  for (const T& logit : together) CHECK(std::isfinite(load(&logit)));
  for (int threads : {2, 3, 5}) CHECK(logits(all, threads) == together);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::vector<T> alone = logits({all[i]}, 2);
    CHECK(std::equal(alone.begin(), alone.end(), together.begin() + std::ptrdiff_t(i) * kVocabulary));
  }
  if (!kWindowed) check_several_tokens<T>(decoder, numbers, several, 28, 5);  // which make a page full
  if (!kWindowed) check_several_tokens<T>(decoder, numbers, one, 1020, 4);
  for (int i = 0; i < kHidden; ++i) store(const_cast<T*>(static_cast<const T*>(decoder.layers[1].before_attention.weight)) + i, NAN);
  bool refused = false;
  try {
    logits({all[0]}, 2);  // ranks nothing
    logits(all, 3);
  } catch (const NotFinite&) {
    refused = true;
  }
  CHECK(refused);
}

void check_team() {
  std::vector<int> done(1000);
  Team::run(4, [&](Team& team, bool) {
    for (int phase = 0; phase < 50; ++phase)
      team.each(phase * 20, [&](std::int64_t task) {
        ++done[std::size_t(task)];  // by another thread in each phase: the sanitizer sees whether they wait
      });
  });
  for (int task = 0; task < 980; ++task) CHECK(done[std::size_t(task)] == 49 - task / 20);
  std::atomic<int> after{0};
  bool thrown = false;
  try {
    Team::run(3, [&](Team& team, bool) {
      team.each(100, [](std::int64_t task) {
        if (task == 7) throw std::bad_alloc();
      });
      team.each(100, [&](std::int64_t) { ++after; });
    });
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  CHECK(thrown && after == 0);
}

}  // namespace

int main() {
  check_team();
  for (auto level = usable_levels(); *level != nullptr; ++level) {
    use_level(**level);
    check_step<float, Shape::plain>();
    check_step<std::uint16_t, Shape::plain>();
    check_step<float, Shape::packed>();
    check_step<std::uint16_t, Shape::packed>();
    check_step<float, Shape::windowed>();
    check_step<std::uint16_t, Shape::windowed>();
  }
  std::puts("all tests passed");
}
