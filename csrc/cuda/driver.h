// Driver: the few functions of CUDA's driver that its runtime does not offer, and what
// is made of them.
//
// They are asked of the runtime that this process has loaded. Where there is none, each
// call fails with kMissingFunction.
#pragma once

#include <cstddef>

#include "cuda/abi.h"
#include "cuda/function.h"
#include "shm/status.h"

namespace weightsync::cuda {

struct Driver {
  Function<CUresult(CUdeviceptr*, std::size_t, std::size_t, CUdeviceptr,
                    unsigned long long)>
      reserve{"cuMemAddressReserve"};
  Function<CUresult(CUdeviceptr, std::size_t)> free_range{"cuMemAddressFree"};
  Function<CUresult(CUmemGenericAllocationHandle*, void*)> retain{
      "cuMemRetainAllocationHandle"};
  Function<CUresult(CUmemGenericAllocationHandle)> release{"cuMemRelease"};
  Function<CUresult(CUdeviceptr, std::size_t, std::size_t, CUmemGenericAllocationHandle,
                    unsigned long long)>
      map{"cuMemMap"};
  Function<CUresult(CUdeviceptr, std::size_t)> unmap{"cuMemUnmap"};
  Function<CUresult(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t)>
      set_access{"cuMemSetAccess"};

  // kUnsupported without the function, else kSystem with the number of the error.
  shm::Status check(CUresult error, const char* call) const;
};

// Of this process, found at the first call.
const Driver& driver();

// Maps a whole allocation of virtual memory at one more address, where `device` may
// read and write it too. The memory lasts until it is mapped nowhere any more.
shm::Result<void*> map_again(void* base, std::size_t bytes, int device);

// Takes such an address back, when nothing uses it any more.
shm::Status unmap(void* base, std::size_t bytes);

}  // namespace weightsync::cuda
