#pragma once

// nccl.h, without what it includes and does not use: CUDA's headers of floats of 8 and 16 bits need
// others (nv/target, of the package nvidia-cuda-cccl) that neither torch nor NCCL brings along.
//
//   #include "libddp/cuda/nccl_header.h"  // in the place of <nccl.h>

#ifdef __CUDA_FP16_H__  // they are there already
#include <nccl.h>
#else
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#undef __CUDA_FP16_H__
#undef __CUDA_BF16_H__
#undef __CUDA_FP8_H__
#endif
