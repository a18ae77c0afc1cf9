#include "backend/nccl/dtypes.h"

#include <c10/util/Exception.h>

#include <cstring>

#include "backend/nccl/raising.h"

namespace weightsync {
namespace {

using c10::ScalarType;
using c10d::ReduceOp;

const char* name_of(ReduceOp::RedOpType reduction) {
  switch (reduction) {
    case ReduceOp::SUM:
      return "SUM";
    case ReduceOp::AVG:
      return "AVG";
    case ReduceOp::PRODUCT:
      return "PRODUCT";
    case ReduceOp::MIN:
      return "MIN";
    case ReduceOp::MAX:
      return "MAX";
    case ReduceOp::BAND:
      return "BAND";
    case ReduceOp::BOR:
      return "BOR";
    case ReduceOp::BXOR:
      return "BXOR";
    case ReduceOp::PREMUL_SUM:
      return "PREMUL_SUM";
    default:
      return "an unknown reduction";
  }
}

bool moved_as_bytes(ScalarType dtype) {
  return dtype == ScalarType::Float8_e4m3fnuz || dtype == ScalarType::Float8_e5m2fnuz;
}

bool takes_factor(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16 ||
         dtype == ScalarType::Float || dtype == ScalarType::Double;
}

[[noreturn]] void refuse(ReduceOp::RedOpType reduction, ScalarType dtype,
                         const char* why) {
  TORCH_CHECK_TYPE(false, "weightsync-nccl2 cannot reduce ", c10::toString(dtype),
                   " tensors with ", name_of(reduction), ": ", why);
}

ncclRedOp_t builtin(ReduceOp::RedOpType reduction, ScalarType dtype) {
  const bool truth = dtype == ScalarType::Bool;
  switch (reduction) {
    case ReduceOp::SUM:
      // As bytes, true and true would be two.
      return truth ? ncclMax : ncclSum;
    case ReduceOp::PRODUCT:
      return truth ? ncclMin : ncclProd;
    case ReduceOp::MIN:
      return ncclMin;
    case ReduceOp::MAX:
      return ncclMax;
    default:
      return ncclAvg;
  }
}

c10d::PreMulSumSupplement& factor_of(const ReduceOp& reduction) {
  auto* const supplement =
      dynamic_cast<c10d::PreMulSumSupplement*>(reduction.supplement_.get());
  TORCH_CHECK_TYPE(supplement != nullptr,
                   "PREMUL_SUM without its factor: make it with "
                   "torch.distributed._make_nccl_premul_sum");
  return *supplement;
}

// The factor as the bytes of a number of this dtype.
std::uint64_t bits_of(double factor, ScalarType dtype) {
  std::uint64_t bits = 0;
  const auto store = [&bits](auto value) { std::memcpy(&bits, &value, sizeof value); };
  switch (dtype) {
    case ScalarType::Half:
      store(static_cast<at::Half>(static_cast<float>(factor)));
      break;
    case ScalarType::BFloat16:
      store(static_cast<at::BFloat16>(static_cast<float>(factor)));
      break;
    case ScalarType::Float:
      store(static_cast<float>(factor));
      break;
    default:
      store(factor);
  }
  return bits;
}

}  // namespace

Elements elements_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return {ncclFloat32, 1};
    case ScalarType::Double:
      return {ncclFloat64, 1};
    case ScalarType::Half:
      return {ncclFloat16, 1};
    case ScalarType::BFloat16:
      return {ncclBfloat16, 1};
    case ScalarType::Float8_e4m3fn:
      return {ncclFloat8e4m3, 1};
    case ScalarType::Float8_e5m2:
      return {ncclFloat8e5m2, 1};
    case ScalarType::Int:
      return {ncclInt32, 1};
    case ScalarType::Long:
      return {ncclInt64, 1};
    case ScalarType::Char:
      return {ncclInt8, 1};
    case ScalarType::Byte:
    case ScalarType::Bool:
    case ScalarType::Float8_e4m3fnuz:
    case ScalarType::Float8_e5m2fnuz:
    case ScalarType::Float4_e2m1fn_x2:
      return {ncclUint8, 1};
    case ScalarType::ComplexFloat:
      return {ncclFloat32, 2};
    case ScalarType::ComplexDouble:
      return {ncclFloat64, 2};
    default:
      TORCH_CHECK_TYPE(false, "NCCL has no type for ", c10::toString(dtype),
                       ": weightsync-nccl2 cannot take the tensor");
  }
}

void check_reduction(const ReduceOp& reduction, ScalarType dtype) {
  const ReduceOp::RedOpType op = reduction.op_;
  if (op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR) {
    refuse(op, dtype, "NCCL has no bitwise reductions");
  }
  if (moved_as_bytes(dtype) || dtype == ScalarType::Float4_e2m1fn_x2) {
    refuse(op, dtype, "NCCL has not this type, and only moves it");
  }
  if (dtype == ScalarType::Bool && op == ReduceOp::AVG) {
    refuse(op, dtype, "truth values have no average");
  }
  if (c10::isComplexType(dtype) &&
      (op == ReduceOp::PRODUCT || op == ReduceOp::MIN || op == ReduceOp::MAX)) {
    refuse(op, dtype, "NCCL sees two real numbers");
  }
  if (op == ReduceOp::PREMUL_SUM) {
    if (!takes_factor(c10::toRealValueType(dtype)))
      refuse(op, dtype, "a factor needs floating point");
    factor_of(reduction);
  }
}

Reduction::Reduction(const ReduceOp& reduction, ScalarType dtype,
                     nccl::Communicator& communicator)
    : communicator_(communicator) {
  check_reduction(reduction, dtype);
  if (reduction.op_ != ReduceOp::PREMUL_SUM) {
    op_ = builtin(reduction.op_, dtype);
    return;
  }
  auto& supplement = factor_of(reduction);
  // A real factor multiplies both parts of a complex number.
  const ScalarType real = c10::toRealValueType(dtype);
  const nccl::Library& library = communicator.library();
  std::uint64_t bits = 0;
  void* scalar = &bits;
  ncclScalarResidence_t residence = ncclScalarHostImmediate;
  if (supplement.tensor_factor.defined()) {
    factor_ = supplement.tensor_factor;
    TORCH_CHECK_TYPE(factor_.scalar_type() == real, "the factor of PREMUL_SUM is ",
                     c10::toString(factor_.scalar_type()), ", and has to be ",
                     c10::toString(real), " for tensors of ", c10::toString(dtype));
    if (factor_.is_cuda()) {
      scalar = factor_.data_ptr();
      residence = ncclScalarDevice;
    } else {
      std::memcpy(&bits, factor_.const_data_ptr(), factor_.element_size());
    }
  } else {
    bits = bits_of(supplement.double_factor, real);
  }
  raise(library.check(
      library.ncclRedOpCreatePreMulSum(&op_, scalar, elements_of(dtype).type, residence,
                                       communicator.handle()),
      "ncclRedOpCreatePreMulSum"));
  made_ = true;
}

Reduction::~Reduction() {
  if (made_) {
    (void)communicator_.library().ncclRedOpDestroy(op_, communicator_.handle());
  }
}

}  // namespace weightsync
