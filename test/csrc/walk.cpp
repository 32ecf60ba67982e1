// Checks that a walk visits every edge exactly once, whatever the rows and however many edges. Its body only notes the
// ranges that it is given, so that a matrix of 2^31 - 1 edges costs no more than its row pointer.
#include "../../pyg_sar/csrc/includes.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#define VECTOR_BYTES 16
namespace pyg_sar::walk {
#include "../../pyg_sar/csrc/rows.inl"
}

namespace {

using pyg_sar::Csr;

struct Range {
  int64_t row, begin, end, unit;
  bool piece;
};

struct State {
  double* edges;
  bool piece;
};

// Sums the number of edges, as if each were one.
struct Body {
  using State = ::State;

  std::vector<double> count;
  std::vector<Range> ranges{};
  std::vector<int64_t> merged{};

  State home(int64_t row) { return {&count[row], false}; }
  int64_t size() const { return 1; }
  State part(double* p) { return {p, true}; }
  void clear(State s) { *s.edges = 0; }
  void merge(int64_t row, State into, State s) {
    merged.push_back(row);
    *into.edges += *s.edges;
  }
  void run(int64_t row, int64_t begin, int64_t end, State s, int64_t unit) {
    ranges.push_back({row, begin, end, unit, s.piece});
    *s.edges += double(end - begin);
  }
};

// Is given the sums instead.
struct Emitting : Body {
  std::vector<int> emitted{};

  void emit(int64_t row, State s) {
    ++emitted[row];
    count[row] = *s.edges;
  }
};

void expect(bool truth, const char* what, int64_t at) {
  if (truth) return;
  std::fprintf(stderr, "%s (at %lld)\n", what, static_cast<long long>(at));
  std::exit(1);
}

// Units in an order that no thread guarantees: backwards.
void backwards(int64_t units, void (*task)(int64_t, void*), void* context) {
  for (int64_t u = units - 1; u >= 0; --u) task(u, context);
}

template <class I>
void check(const std::vector<int64_t>& degrees) {
  std::vector<I> ptr{0};
  int64_t edges = 0;
  for (const int64_t degree : degrees) ptr.push_back(I(edges += degree));
  const Csr csr{int64_t(degrees.size()), edges, ptr.data(), nullptr, nullptr};
  Body body{std::vector<double>(degrees.size())};
  pyg_sar::walk::Walk<I, double, Body> walk(csr, body);
  walk.run(backwards);

  std::vector<Range>& ranges = body.ranges;
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  int64_t at = 0;
  for (const Range& r : ranges) {
    expect(r.begin == at && r.end > r.begin, "a range does not begin where the last one ends", r.begin);
    expect(int64_t(ptr[r.row]) <= r.begin && r.end <= int64_t(ptr[r.row + 1]), "a range leaves its row", r.row);
    expect(r.piece || r.end - r.begin == degrees[r.row], "a part of a row that is not cut", r.row);
    expect(0 <= r.unit && r.unit < walk.units(), "a unit out of range", r.unit);
    at = r.end;
  }
  expect(at == edges, "edges are missing", at);
  for (size_t row = 0; row < degrees.size(); ++row)
    expect(body.count[row] == double(degrees[row]), "wrong number of edges in a row", int64_t(row));
  const int64_t unit = std::max<int64_t>(edges / 512, 1024);
  for (const Range& r : ranges) expect(r.end - r.begin <= unit, "a piece longer than a unit", r.row);
  expect(std::is_sorted(body.merged.begin(), body.merged.end()), "pieces are not merged in their order", 0);
  expect(walk.units() <= 2 * 513 + int64_t(degrees.size()), "too many units", walk.units());

  Emitting other{{std::vector<double>(degrees.size(), -1)}, std::vector<int>(degrees.size())};
  pyg_sar::walk::Walk<I, double, Emitting>(csr, other).run(backwards);
  for (size_t row = 0; row < degrees.size(); ++row)
    expect(other.emitted[row] == 1 && other.count[row] == double(degrees[row]), "wrong sum of a row", int64_t(row));
}

}  // namespace

int main() {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  std::vector<std::vector<int64_t>> problems{
      {}, {0}, {0, 0, 0}, {1}, {0, 1, 0}, {1023}, {1024}, {1025}, {2048}, {2049}, {1024, 1024}, {1, 1024, 1}, {1023, 1025},
      {0, 3000, 0, 0, 5, 1025, 0}, {1, 1, 1, 4096}, {4096, 1, 1, 1}, {0, 2048, 0}, {1024, 0, 1024, 0, 1024},
  };
  std::mt19937_64 random(0);
  for (int n = 0; n < 2000; ++n) {
    std::vector<int64_t> degrees(random() % 40);
    for (int64_t& degree : degrees) {
      const int64_t around[] = {0, 0, 1, int64_t(random() % 50), 1022 + int64_t(random() % 5), 2046 + int64_t(random() % 5), int64_t(random() % 5000)};
      degree = around[random() % std::size(around)];
    }
    problems.push_back(degrees);
  }
  for (const auto& degrees : problems) check<int32_t>(degrees), check<int64_t>(degrees);

  // As many edges as int32 can count, in a few rows or in one.
  check<int32_t>({most});
  check<int32_t>({0, most, 0});
  check<int32_t>({most - 1, 1});
  check<int32_t>({1, most - 1});
  for (int n = 0; n < 200; ++n) {
    std::vector<int64_t> degrees(2 + random() % 200);
    int64_t rest = most;
    for (int64_t& degree : degrees) {
      degree = random() % 3 == 0 ? 0 : std::min<int64_t>(rest, int64_t(random() % (random() % 2 ? 10'000 : 2 * most / int64_t(degrees.size()))));
      rest -= degree;
    }
    degrees[random() % degrees.size()] += rest;
    check<int32_t>(degrees), check<int64_t>(degrees);
  }
  check<int64_t>({most, most, 0, 7, 5 * most});
  std::puts("ok");
}
