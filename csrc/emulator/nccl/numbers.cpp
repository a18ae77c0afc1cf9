#include "emulator/nccl/numbers.h"

namespace weightsync::emulator::nccl {

std::size_t size_of(DataType type) {
  return with_type(type, [](auto value) { return sizeof value; });
}

const char* name_of(DataType type) {
  switch (type) {
    case DataType::kInt8:
      return "int8";
    case DataType::kUint8:
      return "uint8";
    case DataType::kInt32:
      return "int32";
    case DataType::kUint32:
      return "uint32";
    case DataType::kInt64:
      return "int64";
    case DataType::kUint64:
      return "uint64";
    case DataType::kFloat16:
      return "float16";
    case DataType::kFloat32:
      return "float32";
    case DataType::kFloat64:
      return "float64";
    case DataType::kBfloat16:
      return "bfloat16";
    case DataType::kFloat8E4M3:
      return "float8e4m3";
    case DataType::kFloat8E5M2:
      return "float8e5m2";
  }
  return "unknown";
}

}  // namespace weightsync::emulator::nccl
