// A decode step without Python: the same bits with any number of threads, alone and together; phases of a team. Built with
// sanitizers by tests/native/test_sanitizers.py.
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

constexpr int kHeads = 6, kKvHeads = 2, kWidth = 16, kHidden = 40, kInter = 56, kPage = 16, kPages = 64, kLayers = 2;
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
  made.page_size = kPage, made.token = position % kVocabulary, made.position = position;
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::int64_t stride = kPages * kPage * kWidth, extremes_stride = kPages * 2 * kWidth;
    made.layers.push_back({numbers.draw(kKvHeads * stride), numbers.draw(kKvHeads * stride), stride,
                           numbers.draw(kKvHeads * extremes_stride), extremes_stride,
                           numbers.zeros(kKvHeads * kPages * kSketch.width), kPages * kSketch.width, num_chosen < 0 || layer == 0});
    write_sketches<T>(made.layers.back());
  }
  made.selects = num_chosen >= 0;
  made.cos = numbers.draw(kWidth), made.sin = numbers.draw(kWidth);
  made.runs = runs.data(), made.num_runs = std::int64_t(runs.size()), made.num_pool_pages = kPages;
  const std::int64_t window_start = (position - 20) / kPage * kPage;
  made.rule = {kPage, window_start, 1, window_start / kPage - 1, num_chosen, kKvHeads, false, false};
  if (by_sketches) made.rule = {5, position - 17, 5, position - 22, num_chosen, kKvHeads, true, true};
  return made;
}

template <class T>
void check_step() {
  Numbers<T> numbers;
  Decoder decoder{sizeof(T) == 2, kHeads, kKvHeads, kWidth, 0.25f, numbers.draw(kVocabulary * kHidden), numbers.draw(kHidden),
                  1e-5f, numbers.matrix(kVocabulary, kHidden), {}};
  for (int layer = 0; layer < kLayers; ++layer)
    decoder.layers.push_back({numbers.matrix((kHeads + 2 * kKvHeads) * kWidth, kHidden), numbers.matrix(kHidden, kHeads * kWidth),
                              numbers.matrix(2 * kInter, kHidden), numbers.matrix(kHidden, kInter), numbers.draw(kHidden),
                              numbers.draw(kHidden), numbers.draw(kWidth), numbers.draw(kWidth), 1e-5f, 1e-5f, 1e-6f});
  const std::vector<Run> one{{0, kPages}}, several{{40, 20}, {3, 30}}, first{{5, 1}};
  const std::vector<DecodeSequence> sequences{sequence_of(numbers, one, 777, -1), sequence_of(numbers, several, 591, 7),
                                              sequence_of(numbers, one, 400, 0), sequence_of(numbers, first, 0, -1),
                                              sequence_of(numbers, several, 655, 40, true), sequence_of(numbers, one, 400, 0, true)};
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
  for (int i = 0; i < kHidden; ++i) store(const_cast<T*>(static_cast<const T*>(decoder.layers[1].attention_norm)) + i, NAN);
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
    check_step<float>();
    check_step<std::uint16_t>();
  }
  std::puts("all tests passed");
}
