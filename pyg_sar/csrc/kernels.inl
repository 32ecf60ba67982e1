// All kernels in the namespace ISA, compiled for whatever instructions the including file has switched on.

namespace pyg_sar::ISA {

#include "rows.inl"
#include "sum.inl"
#include "extremum.inl"
#include "dropout.inl"
#include "attention.inl"
#include "norm.inl"

template <class T, class I>
constexpr Kernels table{sum<T, I>,       product<T, I>,        extremum<T, I>, extremum_grad<T, I>,
                        attention<T, I>, attention_grad<T, I>, moments<T>,     column_products<T>,
                        column_affine<T>, dropout_rows<T>};

template <class I>
const Kernels& of_type(Type type) {
  switch (type) {
    case Type::f64: return table<double, I>;
    case Type::bf16: return table<bf16, I>;
    case Type::f16: return table<f16, I>;
    default: return table<float, I>;
  }
}

}  // namespace pyg_sar::ISA
