// How the functions of prototypes.h are exported: each under its name and, as in NCCL,
// with a "p" before it. This header is the only place that knows.
#pragma once

#include "nccl/prototypes.h"

// After the definition of each function, in the same file.
#define WEIGHTSYNC_NCCL_P_NAME(name) \
  extern "C"                         \
      __attribute__((alias(#name), visibility("default"))) decltype(name) p##name;
