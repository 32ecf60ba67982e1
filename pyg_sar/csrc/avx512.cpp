// The kernels for x86-64 processors with AVX512.
#if defined(__x86_64__)
#include "includes.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#define ISA avx512
#define VECTOR_BYTES 64
#include "kernels.inl"

const pyg_sar::Kernels& pyg_sar::avx512::kernels(Type type, bool wide) {
  return wide ? plain::kernels(type, wide) : of_type<int32_t>(type);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
