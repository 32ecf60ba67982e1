// The kernels for any processor, and for graphs whose indices exceed int32.
#include "includes.h"

#define ISA plain
#define VECTOR_BYTES 16
#include "kernels.inl"

const pyg_sar::Kernels& pyg_sar::plain::kernels(Type type, bool wide) {
  return wide ? of_type<int64_t>(type) : of_type<int32_t>(type);
}
