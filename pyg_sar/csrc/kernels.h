// What a kernel is given and where to find it. Plain C++: torch stands in ops.cpp alone, so that the kernels can be
// compiled once for each instruction set.
#pragma once

#include <cstdint>

namespace pyg_sar {

// Rows of a matrix, each contiguous, `stride` elements apart.
template <class P>
struct Rows {
  P* data = nullptr;
  int64_t stride = 0;

  P* operator[](int64_t i) const { return data + i * stride; }
  explicit operator bool() const { return data != nullptr; }
};

// Edges sorted by row. The indices are int32 or int64, the values of `Rows<void>` of the type that was asked for.
struct Csr {
  int64_t rows, edges;
  const void* ptr;
  const void* col;
  const void* perm;    // position of each edge in the order of edge tensors, or null
  const void* number;  // of each row among those of tensors, ascending, or null if these are all: doubly compressed rows
  int64_t all;         // rows of tensors

  template <class I>
  int64_t at(int64_t row) const { return number == nullptr ? row : int64_t(static_cast<const I*>(number)[row]); }
};

// Heads lie side by side in a row, unless all of them share the same columns of x, or add to the same columns of out.
struct Sum {
  Csr csr;
  Rows<const void> x;
  Rows<const void> weight;  // accumulator type, [edges, heads], or null
  Rows<void> out;           // accumulator type; that of x if `once`
  int64_t num_cols, heads, channels;
  bool same_x, same_out;
  bool once;                // out is written, whatever it held, instead of added to
};

struct Product {
  Csr csr;
  Rows<const void> y, x;  // [all rows, heads * channels] and [num_cols, heads * channels], or channels alone
  Rows<void> out;         // accumulator type, [edges, heads]
  int64_t heads, channels;
  bool same_x;
};

struct Extremum {
  Csr csr;
  Rows<const void> x;
  Rows<void> best, count;  // in accumulator type
  int64_t width;
  bool largest;
};

struct ExtremumGrad {
  Csr csr;                           // by source
  Rows<const void> x, best, share;   // all of the type of x
  Rows<void> out;                    // accumulator type
  int64_t width;
};

// How the score of an edge comes about, see pyg_sar/reduce/softmax.py.
enum class Score : int64_t { additive = 0, gatv2 = 1, dot = 2 };

struct Attention {
  Score score;
  double parameter;  // negative slope, or the factor of the dot product
  int64_t num_src, heads, channels;
  Csr csr;                          // by destination
  Rows<const void> key, value;      // of sources: [*, heads] or [*, heads * channels], and [*, heads * channels]
  Rows<const void> query, edge;     // of destinations and edges, shaped like keys, or null
  const void* att;                  // accumulator type, [heads * channels], or null
  const int64_t* e_id;              // of edges, or null without dropout
  int64_t seed;
  double dropout;
  int64_t head;                     // number of the first head
  Rows<void> peak, total, out;      // accumulator type
};

struct AttentionGrad {
  Attention forward;                    // its last line is unused
  Csr transpose;                        // by source
  Rows<const void> peak, total, inner;  // accumulator type, [num_dst, heads]
  Rows<const void> grad;                // of the type of the values, [num_dst, heads * channels]
  Rows<void> d_key, d_value, d_query, d_edge;  // accumulator type, or null where not wanted
  void* d_att;                          // accumulator type, or null
  bool alone;                           // all edges, additive scores: no `inner`, and `d_value` are the values themselves
};

// Of the columns of x, [rows, width]: means and sums of squared deviations, both zero before.
struct Moments {
  Rows<const void> x;
  double *mean, *m2;
  int64_t rows, width;
};

// Of columns: sums of the gradient, and of its products with x - center. The centers have accumulator type.
struct ColumnProducts {
  Rows<const void> x, grad;
  const void* center;
  double *sums, *products;
  int64_t rows, width;
};

// out = (x - center) * scale + shift, and + grad * factor if there is one. Vectors have accumulator type.
struct ColumnAffine {
  Rows<const void> x, grad;
  const void *center, *scale, *shift, *factor;
  Rows<void> out;  // of the type of x
  int64_t rows, width;
};

// out = x, of which some numbers are dropped and the others scaled.
struct DropoutRows {
  Rows<const void> x;
  const int64_t* id;  // of each row
  int64_t seed;
  double p;
  Rows<void> out;  // of the type of x
  int64_t rows, width;
};

// Runs `task(unit, context)` for all units on torch's threads, in any order.
using Parallel = void (*)(int64_t units, void (*task)(int64_t, void*), void* context);

// One for each type of rows, type of indices and instruction set.
struct Kernels {
  void (*sum)(const Sum&, Parallel);
  void (*product)(const Product&, Parallel);
  void (*extremum)(const Extremum&, Parallel);
  void (*extremum_grad)(const ExtremumGrad&, Parallel);
  void (*attention)(const Attention&, Parallel);
  void (*attention_grad)(const AttentionGrad&, Parallel);
  void (*moments)(const Moments&, Parallel);
  void (*column_products)(const ColumnProducts&, Parallel);
  void (*column_affine)(const ColumnAffine&, Parallel);
  void (*dropout_rows)(const DropoutRows&, Parallel);
};

enum class Type { f32, f64, bf16, f16 };

namespace plain { const Kernels& kernels(Type type, bool wide); }
#if defined(__x86_64__)
namespace avx2 { const Kernels& kernels(Type type, bool wide); }
namespace avx512 { const Kernels& kernels(Type type, bool wide); }
#endif

}  // namespace pyg_sar
