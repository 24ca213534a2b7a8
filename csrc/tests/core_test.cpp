// The core without Python, against plain loops: built with sanitizers by tests/native/test_sanitizers.py.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "attention.hpp"
#include "coded_rows.hpp"
#include "draw.hpp"
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

// Small whole numbers: every sum is exact, so that scores tie exactly and all levels agree.
std::vector<float> whole_numbers(std::size_t count, std::mt19937& random) {
  std::uniform_int_distribution<int> number(-4, 4);
  std::vector<float> numbers(count);
  for (float& drawn : numbers) drawn = float(number(random));
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

// Runs of a row in random order, with a slot between each two.
std::vector<Run> shuffled_runs(std::int64_t length, std::mt19937& random) {
  const std::int64_t block = std::int64_t{1} << random() % 5;
  std::vector<Run> runs;
  std::vector<std::size_t> order;
  for (std::int64_t row = 0; row < length; row += runs.back().count) {
    runs.push_back({0, block * std::int64_t(1 + random() % 4)});
    order.push_back(order.size());
  }
  std::shuffle(order.begin(), order.end(), random);
  std::int64_t slot = 1;
  for (std::size_t i : order) {
    runs[i].first = slot;
    slot += runs[i].count + 1;
  }
  return runs;
}

// A row of a pool, in one run or many; the other slots are NaN.
struct Case {
  int heads, group, width;
  std::int64_t length, num_slots = 0;
  RowType type;
  std::vector<float> q, k, v;  // in logical order
  std::vector<Run> runs;
  SlotTable table;
  std::vector<float> k_pool, v_pool;
  std::vector<std::uint16_t> k16, v16;  // the same in bf16
  std::vector<std::int8_t> k8, v8;      // coded

  Case(std::mt19937& random, int heads_, int group_, int width_, std::int64_t length_, RowType type_)
      : heads(heads_), group(group_), width(width_), length(length_), type(type_),
        runs(random() % 2 == 0 ? shuffled_runs(length_, random) : std::vector<Run>{{0, length_ + 1}}), table(0) {
    for (const Run& run : runs) num_slots = std::max(num_slots, run.first + run.count);
    table = SlotTable(runs.data(), std::int64_t(runs.size()), num_slots, 0, length);
    q = whole_numbers(std::size_t(heads * group * width), random);
    k = whole_numbers(std::size_t(heads * length * width), random);
    v = whole_numbers(k.size(), random);
    if (type == RowType::coded) round(k), round(v);
    fill_pools();
  }
  void round(std::vector<float>& rows) const {  // to what codes say
    std::vector<std::int8_t> coded(std::size_t(heads * length * row_bytes(RowType::coded, width)));
    encode_rows(rows.data(), heads * length, width, nullptr, coded.data());
    decode_rows(coded.data(), heads * length, width, nullptr, rows.data());
  }
  void fill_pools() {
    k_pool = pool(k), v_pool = pool(v);
    k16 = bf16(k_pool), v16 = bf16(v_pool);
    k8 = coded(k_pool), v8 = coded(v_pool);
  }
  std::vector<std::int8_t> coded(const std::vector<float>& slots) const {
    std::vector<std::int8_t> rows(std::size_t(heads * num_slots * row_bytes(RowType::coded, width)));
    encode_rows(slots.data(), heads * num_slots, width, nullptr, rows.data());
    return rows;
  }
  std::vector<float> pool(const std::vector<float>& rows) const {
    std::vector<float> slots(std::size_t(heads * num_slots * width), std::numeric_limits<float>::quiet_NaN());
    for (int h = 0; h < heads; ++h) {
      std::int64_t row = 0;
      for (const Run& run : runs)
        for (std::int64_t i = 0; i < run.count && row < length; ++i, ++row)
          std::copy_n(rows.begin() + (h * length + row) * width, width,
                      slots.begin() + (h * num_slots + run.first + i) * width);
    }
    return slots;
  }
  int queries() const { return heads * group; }
  HeadRows rows(const std::vector<float>& wide, const std::vector<std::uint16_t>& narrow, const std::vector<std::int8_t>& codes) const {
    const void* data = wide.data();
    if (type == RowType::bf16) data = narrow.data();
    if (type == RowType::coded) data = codes.data();
    return {data, num_slots * row_bytes(type, width) / number_bytes(type), table, heads, width, type};
  }
  HeadRows keys() const { return rows(k_pool, k16, k8); }
  HeadRows values() const { return rows(v_pool, v16, v8); }
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
  const HeadRows keys = c.keys(), values = c.values();
  attend_units({packed, c.queries(), keys, values, scale, 0, coarse, threads, {output.data(), lse.data()}},
               {units.data(), lists, num_units + 2, unit_size}, spans);
  attend_dense({packed, c.queries(), keys, values, scale, 0, coarse, threads, {dense.data(), dense_lse.data()}});
  for (int h = 0; h < c.queries(); ++h)
    for (bool all : {true, false}) {
      std::vector<double> sums(std::size_t(c.width), 0.0);
      double total = 0;
      for (std::int64_t t = 0; t < c.length; ++t) {
        bool visible = all || t < unit_size;
        for (std::int64_t i = 0; i < num_units + 2 && !visible; ++i)
          visible = units[std::size_t((per_query ? h : 0) * (num_units + 2) + i)] == t / unit_size;
        if (!visible) continue;
        const double weight = std::exp(double(c.dot(h, t) * scale));
        total += weight;
        for (int i = 0; i < c.width; ++i)
          sums[std::size_t(i)] += weight * c.v[std::size_t((h / c.group * c.length + t) * c.width + i)];
      }
      const float log_sum = (all ? dense_lse : lse)[std::size_t(h)];
      if (total == 0) CHECK(log_sum == -std::numeric_limits<float>::infinity());
      else CHECK(std::fabs(log_sum - std::log(total)) < (c.type == RowType::coded ? 2e-3 : 1e-4));
      for (int i = 0; i < c.width; ++i) {
        const double expected = total == 0 ? 0 : sums[std::size_t(i)] / total;
        CHECK(std::fabs((all ? dense : output)[std::size_t(h * c.width + i)] - expected) < (coarse || c.type == RowType::coded ? 0.03 : 1e-3));
      }
    }
}

// Tokens attended together, which do not see the keys of those after them.
void check_verification(const Case& c, int threads) {
  const int tokens = int(std::min<std::int64_t>(7, c.length)), queries = c.queries() * tokens;
  std::vector<float> q(std::size_t(queries * c.width)), together(q.size()), one(c.q.size()), lse(q.size() / std::size_t(c.width));
  for (int i = 0; i < queries; ++i)
    for (int j = 0; j < c.width; ++j) q[std::size_t(i * c.width + j)] = c.q[std::size_t(i / tokens * c.width + (j + i) % c.width)];
  std::vector<float> shares(std::size_t(c.heads * ((c.length + 15) / 16))), alone(one.size()), alone_lse(one.size() / std::size_t(c.width));
  attend_dense({PackedQueries(q.data(), queries, c.width), queries, c.keys(), c.values(), 0.05f, 0, true, threads,
                {together.data(), lse.data(), shares.data()}, tokens});
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < c.queries(); ++h)
      std::copy_n(q.begin() + (h * tokens + t) * c.width, c.width, one.begin() + h * c.width);
    const SlotTable table(c.runs.data(), std::int64_t(c.runs.size()), c.num_slots, 0, c.length - tokens + 1 + t);
    HeadRows keys = c.keys(), values = c.values();
    attend_dense({PackedQueries(one.data(), c.queries(), c.width), c.queries(),
                  {keys.data, keys.head_stride, table, c.heads, c.width, c.type},
                  {values.data, values.head_stride, table, c.heads, c.width, c.type}, 0.05f, 0, true, threads,
                  {alone.data(), alone_lse.data()}});
    for (int h = 0; h < c.queries(); ++h) {
      CHECK(alone_lse[std::size_t(h)] == lse[std::size_t(h * tokens + t)]);
      for (int i = 0; i < c.width; ++i) CHECK(alone[std::size_t(h * c.width + i)] == together[std::size_t((h * tokens + t) * c.width + i)]);
    }
  }
}

void check_search(const Case& c, std::int64_t k, int threads) {
  std::vector<std::int64_t> ids(std::size_t(c.queries() * k));
  std::vector<float> scores(ids.size());
  scan(PackedQueries(c.q.data(), c.queries(), c.width), c.queries(), c.keys(), k, threads, {ids.data(), scores.data()});

  std::vector<float> all(std::size_t(c.queries() * c.length));
  all_scores(PackedQueries(c.q.data(), c.queries(), c.width), c.queries(), c.keys(), threads, all.data());
  for (int h = 0; h < c.queries(); ++h)
    for (std::int64_t t = 0; t < c.length; ++t) CHECK(all[std::size_t(h * c.length + t)] == c.dot(h, t));

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

// Against every token's number, of which the largest wins; which tokens may win at all is tested in Python.
void check_draw(std::mt19937& random, std::size_t count) {
  std::normal_distribution<float> number(0, 3);
  std::vector<float> logits(count);
  for (float& logit : logits) logit = number(random);
  std::vector<std::uint32_t> may((count + 31) / 32);
  for (std::uint32_t& word : may) word = random();
  may[0] |= 1;
  kernels().exclude(logits.data(), std::int64_t(count), may.data());
  const float best = *std::max_element(logits.begin(), logits.end());
  const std::uint64_t noise = random();
  const auto [first, its] = likeliest(logits.data(), std::int64_t(count));
  CHECK(its == best && first == std::max_element(logits.begin(), logits.end()) - logits.begin());
  const std::vector<std::uint16_t> shorts = bf16(logits);
  CHECK(shorts[std::size_t(likeliest(shorts.data(), std::int64_t(count)).first)] == bf16({best})[0]);
  for (const Sampler& sampler : {Sampler{0.7, noise, 1, 1 << 20, 0}, Sampler{0.7, noise, 0.9, 1 << 20, 0}, Sampler{0.7, noise, 1, 3, 0.1}}) {
    const auto [token, largest] = Draw(logits.data(), std::int64_t(count), sampler).run();
    CHECK(largest == best && token >= 0 && token < std::int64_t(count) && std::isfinite(logits[std::size_t(token)]));
    if (sampler.top_p < 1 || sampler.min_p > 0) continue;
    double most = -std::numeric_limits<double>::infinity();
    std::size_t winner = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const double u = (double(mixed_noise(noise, i) >> 11) + 0.5) / 0x1p53;
      const double it = (double(logits[i]) - best) / sampler.temperature - std::log(-std::log(u));
      if (it > most) most = it, winner = i;
    }
    CHECK(token == std::int64_t(winner));
  }
  logits.back() = std::numeric_limits<float>::quiet_NaN();
  CHECK(std::isnan(Draw(logits.data(), std::int64_t(count), {1, noise, 1, 5, 0}).run().second));
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
          const Case c(random, 2, group, width, length, RowType(random() % 3));
          const int threads = 1 + int(random() % 3);
          check_attention(c, random, threads);
          if (length > 0) check_verification(c, threads);
          if (c.type == RowType::coded) continue;  // whose scores are rounded
          check_search(c, 1 + std::int64_t(random() % 40), threads);
          check_pages(c, threads);
        }
    for (std::size_t count : {1, 7, 31, 32, 33, 255, 256, 257, 700, 5000}) check_draw(random, count);
    const Case longer(random, 1, 2, 16, 9000, RowType::bf16);  // several parts per head
    check_search(longer, 300, 3);
    check_attention(longer, random, 3);
    check_verification(longer, 3);
    check_search(longer, 2000, 3);  // estimates bars from a sample
    Case late(random, 1, 2, 16, 9000, RowType::bf16);  // the estimate is too high: only sampled rows are large
    for (std::int64_t row = 0; row < 9000; ++row)
      for (int i = 0; i < 16; ++i) late.k[std::size_t(row * 16 + i)] = row % 512 < 16 ? 3.0f : float(row % 7) - 6.0f;
    late.q.assign(late.q.size(), 1.0f);
    late.fill_pools();
    check_search(late, 1200, 3);
  }
  std::vector<char> memory(3 << 20, 1);
  CHECK(read_seconds(memory.data(), std::int64_t(memory.size()), 2) > 0);
  advise_huge(memory.data(), std::int64_t(memory.size()));
  const Run two[] = {{10, 5}, {3, 4}};
  std::vector<std::int64_t> ids;
  CHECK(SlotTable(two, 2, 32, 6, 3).range(0, 3, ids).start == 4);
  const Slots both = SlotTable(two, 2, 32, 4, 5).range(0, 5, ids);
  CHECK((std::vector<std::int64_t>{both[0], both[1], both[2], both[3], both[4]} == std::vector<std::int64_t>{14, 3, 4, 5, 6}));
  for (const Run& outside : {Run{30, 3}, Run{-1, 2}, Run{0, 0}, Run{31, std::int64_t{1} << 62}, Run{0, 8}}) {
    bool refused = false;
    try {
      SlotTable(&outside, 1, 32, 0, 9);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
  bool thrown = false;
  try {
    parallel_for(100, 3, [](std::int64_t task, int) {
      if (task == 7) throw std::bad_alloc();
    });
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  CHECK(thrown);
  std::puts("all tests passed");
}
