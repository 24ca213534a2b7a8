// The choice of tokens by sketches without Python, against plain loops: built with sanitizers by
// tests/native/test_sanitizers.py.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>

#include "sketch.hpp"

using namespace kvsift;

namespace {

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

int round_up(int number, int multiple) { return (number + multiple - 1) / multiple * multiple; }

SketchFormat format_of(int bits, int head_dim, int page_size) {
  SketchFormat format{bits, (head_dim + 31) / 32, head_dim, page_size, 0, 0, 0, 0, 0};
  format.factors = 4 * bits * format.words * page_size;
  format.key_mean = format.factors + 2 * page_size;
  format.scales = format.key_mean + 16 * format.words;
  format.value_mean = round_up(format.scales + 4, 32);
  format.width = round_up(format.value_mean + (head_dim + 1) / 2, 32);
  return format;
}

int mean_of(const std::uint8_t* mean, int channel) { return (mean[channel / 2] >> (channel % 2 * 4) & 15) - 8; }

// Random rows of pages, in exactly their memory: a read behind the last one is an error.
struct Case {
  SketchFormat format;
  int heads, group;
  std::int64_t num_pages, first, count;
  std::vector<std::uint8_t> rows;
  std::vector<float> queries, turned, past;

  Case(std::mt19937& random, int bits, int group_, int head_dim, int page_size, std::int64_t num_pages_)
      : format(format_of(bits, head_dim, page_size)), heads(2), group(group_), num_pages(num_pages_),
        first(std::int64_t(random() % std::uint32_t(page_size))) {
    count = num_pages * page_size - first - std::int64_t(num_pages > 1 ? random() % std::uint32_t(page_size) : 0);
    rows.resize(std::size_t(heads * num_pages * format.width));
    for (auto& byte : rows) byte = std::uint8_t(random());
    for (std::int64_t page = 0; page < heads * num_pages; ++page) set_numbers(rows.data() + page * format.width, random);
    std::uniform_real_distribution<float> number(-0.03f, 0.03f);
    queries.resize(std::size_t(heads * group * head_dim));
    for (float& query : queries) query = number(random);
    past.resize(std::size_t(heads * group), -std::numeric_limits<float>::infinity());
    std::uniform_real_distribution<float> lse(-3.0f, 3.0f);
    for (std::size_t q = 1; q < past.size(); ++q) past[q] = lse(random);
    turned = queries;
    for (int q = 0; q < heads * group; ++q) Rotation(head_dim).turn(&turned[std::size_t(q * head_dim)], 1);
  }
  // Factors from 1 to 2, small scales, no bits behind the last channel.
  void set_numbers(std::uint8_t* row, std::mt19937& random) const {
    for (int i = 0; i < format.page_size; ++i) put(row + format.factors + 2 * i, std::uint16_t(0x3c00 + random() % 1024));
    put(row + format.scales, 0x1c00);
    put(row + format.scales + 2, 0x1c00);
    for (int i = format.head_dim; i < 32 * format.words; ++i) {
      row[format.key_mean + i / 2] &= std::uint8_t(i % 2 == 0 ? 0 : 15);
      for (int token = 0; token < format.bits * format.page_size; ++token)
        row[code_byte(token / format.page_size, i, token % format.page_size)] &= std::uint8_t(~(1u << i % 8));
    }
  }
  static void put(std::uint8_t* at, std::uint16_t half) { std::memcpy(at, &half, 2); }
  int code_byte(int plane, int channel, int token) const {
    return ((plane * format.words + channel / 32) * format.page_size + token) * 4 + channel % 32 / 8;
  }

  // Logarithm of the estimated weight of a token of the rows, to the base of e.
  double log_weight(int query, std::int64_t token) const {
    const float* q = &turned[std::size_t(query * format.head_dim)];
    const std::uint8_t* row = &rows[std::size_t((query / group * num_pages + token / format.page_size) * format.width)];
    const int in_page = int(token % format.page_size);
    double product = 0, mean = 0, squares = 0;
    for (int i = 0; i < format.head_dim; ++i) {
      int code = 1 - (1 << format.bits);
      for (int plane = 0; plane < format.bits; ++plane)
        code += (row[code_byte(plane, i, in_page)] >> i % 8 & 1) << (plane + 1);
      product += double(q[i]) * code;
      mean += double(q[i]) * mean_of(row + format.key_mean, i);
      squares += double(q[i]) * q[i];
    }
    const double factor = from_float16(row + format.factors + 2 * in_page);
    const double variance = squares * factor * factor * (format.bits == 1 ? 0.36338 : 0.4126);
    return factor * product + mean * from_float16(row + format.scales) - variance / 2;
  }
};

struct Chosen {
  std::vector<std::int64_t> ids;
  std::vector<float> output, lse;
};

Chosen choose(const Case& c, std::int64_t k, int num_selections, int threads) {
  const SlotTable table(c.num_pages);
  const SketchRows rows{c.rows.data(), c.num_pages * c.format.width, table, c.heads, c.format};
  Chosen out;
  out.ids.resize(std::size_t(num_selections * k));
  out.output.resize(c.queries.size());
  out.lse.resize(std::size_t(c.heads * c.group));
  const PackedQueries queries(c.queries.data(), c.heads * c.group, c.format.head_dim);
  const Rotation rotation(c.format.head_dim);
  choose_sketched({queries, 1.0f, rotation, c.heads * c.group, rows, c.first, c.count, k, num_selections, c.past.data(), out.ids.data(),
                   out.output.data(), out.lse.data()},
                  threads);
  return out;
}

void check_rest(const Case& c, const Chosen& chosen, std::int64_t k, int num_selections) {
  for (int query = 0; query < c.heads * c.group; ++query) {
    const std::int64_t* ids = chosen.ids.data() + query * num_selections / (c.heads * c.group) * k;
    double total = 0;
    std::vector<double> values(std::size_t(c.format.head_dim), 0.0);
    for (std::int64_t token = 0; token < c.count; ++token) {
      if (std::binary_search(ids, ids + k, token)) continue;
      const std::int64_t page = (c.first + token) / c.format.page_size;
      const std::uint8_t* row = &c.rows[std::size_t((query / c.group * c.num_pages + page) * c.format.width)];
      const double weight = std::exp(c.log_weight(query, c.first + token)), scale = from_float16(row + c.format.scales + 2);
      total += weight;
      for (int i = 0; i < c.format.head_dim; ++i)
        values[std::size_t(i)] += weight * mean_of(row + c.format.value_mean, i) * scale;
    }
    if (k == c.count) CHECK(chosen.lse[std::size_t(query)] == -std::numeric_limits<float>::infinity());
    else CHECK(std::fabs(chosen.lse[std::size_t(query)] - std::log(total)) < 0.06);
    for (int i = 0; i < c.format.head_dim; ++i) {
      const double expected = total == 0 ? 0 : values[std::size_t(i)] / total;
      CHECK(std::fabs(chosen.output[std::size_t(query * c.format.head_dim + i)] - expected) < 0.03);
    }
  }
}

// The votes of what is chosen are about as many as there can be.
void check_votes(const Case& c, const Chosen& chosen, std::int64_t k, int num_selections) {
  const int sharing = c.heads * c.group / num_selections;
  for (int s = 0; s < num_selections; ++s) {
    std::vector<double> votes(std::size_t(c.count), 0.0);
    for (int query = s * sharing; query < (s + 1) * sharing; ++query) {
      const double past = std::isinf(c.past[std::size_t(query)]) ? 0.0 : c.past[std::size_t(query)];
      for (std::int64_t token = 0; token < c.count; ++token)
        votes[std::size_t(token)] += std::exp(c.log_weight(query, c.first + token) - past);
    }
    double found = 0, most = 0;
    for (std::int64_t i = 0; i < k; ++i) found += votes[std::size_t(chosen.ids[std::size_t(s * k + i)])];
    std::sort(votes.begin(), votes.end(), std::greater<>());
    for (std::int64_t i = 0; i < k; ++i) most += votes[std::size_t(i)];
    CHECK(found >= 0.94 * most);
  }
}

void check(const Case& c, std::int64_t k, int num_selections, int threads) {
  const Chosen chosen = choose(c, k, num_selections, threads), alone = choose(c, k, num_selections, 1);
  CHECK(chosen.ids == alone.ids);
  CHECK(chosen.output == alone.output);
  CHECK(chosen.lse == alone.lse);
  for (int s = 0; s < num_selections; ++s)
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t id = chosen.ids[std::size_t(s * k + i)];
      CHECK(id >= 0 && id < c.count && (i == 0 || id > chosen.ids[std::size_t(s * k + i - 1)]));
    }
  check_votes(c, chosen, k, num_selections);
  check_rest(c, chosen, k, num_selections);
}

}  // namespace

int main() {
  std::mt19937 random(5);
  for (auto level = usable_levels(); *level != nullptr; ++level) {
    use_level(**level);
    for (int bits : {1, 2})
      for (int group : {1, 4, 7})
        for (int head_dim : {64, 80, 256})
          for (const auto& [page_size, num_pages] : {std::pair{16, 1}, {16, 70}, {48, 23}, {1024, 1}}) {
            const Case c(random, bits, group, head_dim, page_size, num_pages);
            const std::int64_t k = random() % 4 == 0 ? c.count : std::min<std::int64_t>(c.count, random() % 60);
            check(c, k, random() % 2 == 0 ? 2 : 2 * group, 1 + int(random() % 4));
          }
  }
  std::puts("all tests passed");
}
