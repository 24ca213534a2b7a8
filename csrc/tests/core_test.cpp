// The core without Python, against plain loops: built with sanitizers by tests/native/test_sanitizers.py.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "attention.hpp"
#include "memory.hpp"
#include "pages.hpp"
#include "scan.hpp"

using namespace kvsift;

namespace {

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                  \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (0)

// Small whole numbers: every sum is exact, so that ties are ties and all levels agree.
std::vector<float> whole_numbers(std::size_t count, std::mt19937& random) {
  std::uniform_int_distribution<int> number(-4, 4);
  std::vector<float> numbers(count);
  for (float& each : numbers) each = float(number(random));
  return numbers;
}

std::vector<std::uint16_t> bf16(const std::vector<float>& numbers) {
  std::vector<std::uint16_t> halves(numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &numbers[i], 4);
    halves[i] = std::uint16_t(bits >> 16);
  }
  return halves;
}

struct Case {
  int heads, group, width;
  std::int64_t length;
  bool is_bf16;
  std::vector<float> q, k, v;
  std::vector<std::uint16_t> k16, v16;

  Case(std::mt19937& random, int heads_, int group_, int width_, std::int64_t length_, bool is_bf16_)
      : heads(heads_), group(group_), width(width_), length(length_), is_bf16(is_bf16_) {
    q = whole_numbers(std::size_t(heads * group * width), random);
    k = whole_numbers(std::size_t(heads * length * width), random);
    v = whole_numbers(k.size(), random);
    k16 = bf16(k), v16 = bf16(v);
  }
  int queries() const { return heads * group; }
  HeadRows rows(const std::vector<float>& wide, const std::vector<std::uint16_t>& narrow) const {
    return {is_bf16 ? static_cast<const void*>(narrow.data()) : wide.data(), length * width, length, heads, width, is_bf16};
  }
  HeadRows keys() const { return rows(k, k16); }
  HeadRows values() const { return rows(v, v16); }
  float dot(int query, std::int64_t row) const {
    float total = 0;
    for (int i = 0; i < width; ++i)
      total += q[std::size_t(query * width + i)] * k[std::size_t((query / group * length + row) * width + i)];
    return total;
  }
};

void check_attention(const Case& c, std::mt19937& random, int threads) {
  const float scale = 0.05f;
  const PackedQueries packed(c.q.data(), c.queries(), c.width);
  const std::int64_t unit_size = 5, num_units = (c.length + unit_size - 1) / unit_size;
  const bool per_query = random() % 2 == 0;
  const int lists = per_query ? c.queries() : 1;
  std::vector<std::int64_t> units(std::size_t(lists * (num_units + 2)), -1);
  for (std::size_t i = 0; i < units.size(); ++i) {
    const std::int64_t unit = std::int64_t(i) % (num_units + 2);
    if (unit >= 1 && random() % 2 == 0) units[i] = unit;  // the last one or two are beyond the keys
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> spans{{0, unit_size}};
  std::vector<float> output(c.q.size()), lse(std::size_t(c.queries())), dense(c.q.size()), dense_lse(lse.size());
  const bool coarse = random() % 2 == 0;
  attend_units(packed, c.queries(), c.keys(), c.values(), {units.data(), lists, num_units + 2, unit_size}, spans, scale, 0,
               coarse, threads, {output.data(), lse.data()});
  attend_dense(packed, c.queries(), c.keys(), c.values(), scale, 0, coarse, threads, {dense.data(), dense_lse.data()});
  for (int h = 0; h < c.queries(); ++h)
    for (bool all : {true, false}) {
      std::vector<double> sums(std::size_t(c.width), 0.0);
      double total = 0;
      for (std::int64_t t = 0; t < c.length; ++t) {
        bool seen = all || t < unit_size;
        for (std::int64_t i = 0; i < num_units + 2 && !seen; ++i)
          seen = units[std::size_t((per_query ? h : 0) * (num_units + 2) + i)] == t / unit_size;
        if (!seen) continue;
        const double weight = std::exp(double(c.dot(h, t) * scale));
        total += weight;
        for (int i = 0; i < c.width; ++i)
          sums[std::size_t(i)] += weight * c.v[std::size_t((h / c.group * c.length + t) * c.width + i)];
      }
      const float found = (all ? dense_lse : lse)[std::size_t(h)];
      if (total == 0) CHECK(found == -std::numeric_limits<float>::infinity());
      else CHECK(std::fabs(found - std::log(total)) < 1e-4);
      for (int i = 0; i < c.width; ++i) {
        const double expected = total == 0 ? 0 : sums[std::size_t(i)] / total;
        CHECK(std::fabs((all ? dense : output)[std::size_t(h * c.width + i)] - expected) < (coarse ? 0.03 : 1e-3));
      }
    }
}

void check_search(const Case& c, std::int64_t k, int threads) {
  std::vector<std::int64_t> ids(std::size_t(c.queries() * k));
  std::vector<float> scores(ids.size());
  scan(PackedQueries(c.q.data(), c.queries(), c.width), c.queries(), c.keys(), k, threads, {ids.data(), scores.data()});

  // codes that are the numbers themselves
  const std::int64_t blocks = (c.length + 15) / 16;
  std::vector<std::uint8_t> codes(std::size_t(c.heads * blocks * 16 * c.width));
  for (int h = 0; h < c.heads; ++h)
    for (std::int64_t t = 0; t < c.length; ++t)
      for (int i = 0; i < c.width; ++i)
        codes[std::size_t(((h * blocks + t / 16) * (c.width / 4) + i / 4) * 64 + t % 16 * 4 + i % 4)] =
            std::uint8_t(int(c.k[std::size_t((h * c.length + t) * c.width + i)]) + 128);
  const std::vector<float> ones(std::size_t(c.heads * c.width), 1.0f);
  std::vector<std::int64_t> code_ids(ids.size());
  std::vector<float> code_scores(ids.size());
  scan_codes(c.q.data(), c.queries(), c.keys(), {codes.data(), blocks * 16 * c.width, ones.data()}, k, 2 * k, threads,
             {code_ids.data(), code_scores.data()});

  for (int h = 0; h < c.queries(); ++h) {
    std::vector<std::pair<float, std::int64_t>> order;
    for (std::int64_t t = 0; t < c.length; ++t) order.push_back({-c.dot(h, t), t});
    std::sort(order.begin(), order.end());
    for (std::int64_t i = 0; i < k; ++i) {
      const std::size_t at = std::size_t(h * k + i);
      CHECK(ids[at] == (i < c.length ? order[std::size_t(i)].second : -1));
      if (i < c.length) CHECK(scores[at] == -order[std::size_t(i)].first);
      CHECK((code_ids[at] < 0) == (i >= c.length));
      if (i < c.length) CHECK(code_scores[at] == c.dot(h, code_ids[at]));
    }
  }
}

void check_pages(const Case& c, int threads) {
  const int head_dim = c.width / 2;
  std::vector<float> rows = c.k;
  const std::vector<float> queries(c.q.begin(), c.q.begin() + c.queries() * head_dim);
  HeadRows pages = c.keys();
  std::vector<float> scores(std::size_t(c.queries() * c.length));
  page_scores(queries.data(), c.queries(), pages, 0.5f, threads, scores.data());
  for (int h = 0; h < c.queries(); ++h)
    for (std::int64_t p = 0; p < c.length; ++p) {
      float expected = 0;
      for (int i = 0; i < head_dim; ++i) {
        const float q = queries[std::size_t(h * head_dim + i)];
        expected += q * rows[std::size_t((h / c.group * c.length + p) * c.width + i + (q > 0 ? 0 : head_dim))];
      }
      CHECK(scores[std::size_t(h * c.length + p)] == 0.5f * expected);
    }
  const std::int64_t k = std::min<std::int64_t>(7, c.length);
  std::vector<std::int64_t> chosen(std::size_t(c.heads * k));
  choose_pages(queries.data(), c.queries(), pages, 0.5f, k, c.heads, threads, chosen.data());
  for (int h = 0; h < c.heads; ++h) {
    std::vector<std::pair<float, std::int64_t>> order;
    for (std::int64_t p = 0; p < c.length; ++p) {
      float best = -1e30f;
      for (int g = 0; g < c.group; ++g) best = std::max(best, scores[std::size_t((h * c.group + g) * c.length + p)]);
      order.push_back({-best, p});
    }
    std::sort(order.begin(), order.end());
    std::vector<std::int64_t> expected;
    for (std::int64_t i = 0; i < k; ++i) expected.push_back(order[std::size_t(i)].second);
    std::sort(expected.begin(), expected.end());
    CHECK(std::equal(expected.begin(), expected.end(), chosen.begin() + h * k));
  }
}

}  // namespace

int main() {
  std::mt19937 random(5);
  for (auto level = usable_levels(); *level != nullptr; ++level) {
    use_level(**level);
    for (int group : {1, 4, 5})
      for (int width : {16, 80, 128, 256})
        for (std::int64_t length : {0, 1, 3, 17, 70, 700}) {
          if (length == 700 && width != 80) continue;
          const Case c(random, 2, group, width, length, random() % 2 == 0);
          const int threads = 1 + int(random() % 3);
          check_attention(c, random, threads);
          check_search(c, 1 + std::int64_t(random() % 40), threads);
          check_pages(c, threads);
        }
    const Case longer(random, 1, 2, 16, 9000, true);  // several parts per head
    check_search(longer, 300, 3);
    check_attention(longer, random, 3);
    check_search(longer, 2000, 3);  // goes by a sample
    Case late(random, 1, 2, 16, 9000, true);  // whose sample promises too much: only sampled rows are large
    for (std::int64_t row = 0; row < 9000; ++row)
      for (int i = 0; i < 16; ++i) late.k[std::size_t(row * 16 + i)] = row % 512 < 16 ? 3.0f : float(row % 7) - 6.0f;
    late.q.assign(late.q.size(), 1.0f);
    late.k16 = bf16(late.k);
    check_search(late, 1200, 3);
  }
  std::vector<char> memory(3 << 20, 1);
  CHECK(read_seconds(memory.data(), std::int64_t(memory.size()), 2) > 0);
  advise_huge(memory.data(), std::int64_t(memory.size()));
  bool thrown = false;
  try {
    parallel_for(100, 3, [](std::int64_t task, int) {
      if (task == 7) throw std::bad_alloc();
    });
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  CHECK(thrown);
  std::puts("all right");
}
