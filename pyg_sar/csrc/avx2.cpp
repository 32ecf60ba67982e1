// The kernels for x86-64 processors with AVX2.
#if defined(__x86_64__)
#include "includes.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define ISA avx2
#define VECTOR_BYTES 32
#include "kernels.inl"

const pyg_sar::Kernels& pyg_sar::avx2::kernels(Type type, bool wide) {
  return wide ? plain::kernels(type, wide) : of_type<int32_t>(type);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
