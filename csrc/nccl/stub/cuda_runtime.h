// What nccl.h wants of CUDA, for the tests that compare with it.
#pragma once

typedef struct CUstream_st* cudaStream_t;
