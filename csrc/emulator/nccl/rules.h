// Rows of a decision table: the conditions under which a call is refused, in the order
// in which NCCL looks at them. Plain data; every table has a test for each row.
#pragma once

#include <array>
#include <cstddef>

#include "nccl/abi.h"

namespace weightsync::emulator::nccl {

// One condition. `refuse` gives the code of the refusal, or ncclSuccess if the row does
// not apply; `found` says what is wrong then.
template <class Facts>
struct Row {
  ncclResult_t (*refuse)(const Facts& facts);
  const char* found;
};

// What a table decides: the code, and why. ncclSuccess means that no row applied.
struct Decision {
  ncclResult_t code = ncclSuccess;
  const char* found = "";
};

// The first row that applies.
template <class Facts, std::size_t n>
Decision decide(const std::array<Row<Facts>, n>& table, const Facts& facts) {
  for (const Row<Facts>& row : table) {
    if (const ncclResult_t code = row.refuse(facts); code != ncclSuccess) {
      return {code, row.found};
    }
  }
  return {};
}

// Spares each row its conditional.
constexpr ncclResult_t refuse_if(bool applies, ncclResult_t code) {
  return applies ? code : ncclSuccess;
}

}  // namespace weightsync::emulator::nccl
