// The edge of the library: ncclParam*. As NCCL does before it is used, it knows only
// the parameters of its log.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>

#include "emulator/nccl/entry.h"
#include "emulator/nccl/environment.h"
#include "emulator/nccl/symbols.h"

using namespace weightsync::emulator::nccl;  // NOLINT: this file is the edge

// What a handle points to.
struct ncclParamHandle {
  const char* key;
};

namespace {

ncclParamHandle parameters[] = {
    {"NCCL_DEBUG"}, {"NCCL_DEBUG_FILE"}, {"NCCL_DEBUG_SUBSYS"}};

ncclParamHandle* find(const char* key) {
  for (ncclParamHandle& parameter : parameters) {
    if (std::strcmp(parameter.key, key) == 0) return &parameter;
  }
  return nullptr;
}

bool is_known(const ncclParamHandle* handle) {
  return handle >= std::begin(parameters) && handle < std::end(parameters);
}

Outcome unknown(const char* key) {
  return invalid_argument("the emulator knows no parameter " +
                          std::string(key == nullptr ? "NULL" : key));
}

template <class Number>
ncclResult_t get_number(const char* function, ncclParamHandle_t handle, Number* out) {
  return call_alone({function, nullptr}, [=]() -> Outcome {
    if (!is_known(handle) || out == nullptr) return unknown("of this handle");
    const auto value = environment_number(handle->key);
    if (!value) return invalid_argument(std::string(handle->key) + " is no number");
    *out = static_cast<Number>(*value);
    return {};
  });
}

// Valid until the thread asks again.
const std::string& value_of(const ncclParamHandle& parameter) {
  thread_local std::string value;
  value = environment(parameter.key);
  return value;
}

}  // namespace

extern "C" {

ncclResult_t ncclParamBind(ncclParamHandle_t* out, const char* key) {
  return call_alone({__func__, nullptr}, [=]() -> Outcome {
    if (out == nullptr || key == nullptr || find(key) == nullptr) return unknown(key);
    *out = find(key);
    return {};
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamBind)

ncclResult_t ncclParamGetI8(ncclParamHandle_t h, std::int8_t* out) {
  return get_number(__func__, h, out);
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamGetI8)

ncclResult_t ncclParamGetI16(ncclParamHandle_t h, std::int16_t* out) {
  return get_number(__func__, h, out);
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamGetI16)

ncclResult_t ncclParamGetI32(ncclParamHandle_t h, std::int32_t* out) {
  return get_number(__func__, h, out);
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamGetI32)

ncclResult_t ncclParamGetI64(ncclParamHandle_t h, std::int64_t* out) {
  return get_number(__func__, h, out);
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamGetI64)

ncclResult_t ncclParamGetU8(ncclParamHandle_t h, std::uint8_t* out) {
  return get_number(__func__, h, out);
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamGetU8)

ncclResult_t ncclParamGetU16(ncclParamHandle_t h, std::uint16_t* out) {
  return get_number(__func__, h, out);
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamGetU16)

ncclResult_t ncclParamGetU32(ncclParamHandle_t h, std::uint32_t* out) {
  return get_number(__func__, h, out);
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamGetU32)

ncclResult_t ncclParamGetU64(ncclParamHandle_t h, std::uint64_t* out) {
  return get_number(__func__, h, out);
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamGetU64)

ncclResult_t ncclParamGetStr(ncclParamHandle_t h, const char** out) {
  return call_alone({__func__, nullptr}, [=]() -> Outcome {
    if (!is_known(h) || out == nullptr) return unknown("of this handle");
    *out = value_of(*h).c_str();
    return {};
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamGetStr)

ncclResult_t ncclParamGet(ncclParamHandle_t h, void* out, int maxLen, int* len) {
  return call_alone({__func__, nullptr}, [=]() -> Outcome {
    if (!is_known(h) || out == nullptr || len == nullptr)
      return unknown("of this handle");
    const std::string value = environment(h->key);
    const int needed = static_cast<int>(value.size());
    if (maxLen < needed) {
      return invalid_argument(std::to_string(needed) + " bytes do not fit into " +
                              std::to_string(maxLen));
    }
    std::memcpy(out, value.data(), value.size());
    *len = needed;
    return {};
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamGet)

ncclResult_t ncclParamGetParameter(const char* key, const char** value, int* valueLen) {
  return call_alone({__func__, nullptr}, [=]() -> Outcome {
    if (key == nullptr || value == nullptr || find(key) == nullptr) return unknown(key);
    const std::string& text = value_of(*find(key));
    *value = text.c_str();
    if (valueLen != nullptr) *valueLen = static_cast<int>(text.size());
    return {};
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamGetParameter)

ncclResult_t ncclParamGetAllParameterKeys(const char*** table, int* tableLen) {
  return call_alone({__func__, nullptr}, [=]() -> Outcome {
    if (table == nullptr || tableLen == nullptr) {
      return invalid_argument("the table or its length is NULL");
    }
    thread_local std::array<const char*, std::size(parameters)> keys;
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = parameters[i].key;
    *table = keys.data();
    *tableLen = static_cast<int>(keys.size());
    return {};
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamGetAllParameterKeys)

void ncclParamDumpAll() {
  for (const ncclParamHandle& parameter : parameters) {
    std::fprintf(stderr, "%s=%s\n", parameter.key, environment(parameter.key).c_str());
  }
}
WEIGHTSYNC_NCCL_P_NAME(ncclParamDumpAll)

}  // extern "C"
