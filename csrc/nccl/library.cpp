#include "nccl/library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <vector>

namespace weightsync::nccl {
namespace {

constexpr const char* kSoname = "libnccl.so.2";
constexpr int kOldest = 22900;
constexpr int kBeyond = 23300;

// A way to a library, and how messages name it.
struct Candidate {
  std::string name;
  int flags;
  std::string said;
};

std::vector<Candidate> candidates(const std::string& path,
                                  const std::string& fallback) {
  constexpr int kLocal = RTLD_NOW | RTLD_LOCAL;
  // Whoever names a library wants that one or none.
  if (!path.empty()) return {{path, kLocal, path}};
  const char* const named = std::getenv("WEIGHTSYNC_NCCL_LIBRARY");
  if (named != nullptr && *named != '\0') {
    return {{named, kLocal, std::string("WEIGHTSYNC_NCCL_LIBRARY=") + named}};
  }
  std::vector<Candidate> found{
      {kSoname, kLocal | RTLD_NOLOAD, "what this process has loaded"}};
  if (!fallback.empty()) found.push_back({fallback, kLocal, fallback});
  found.push_back({kSoname, kLocal, kSoname});
  return found;
}

std::string file_of(void* handle, const std::string& otherwise) {
  struct link_map* map = nullptr;
  const bool known = ::dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 &&
                     map != nullptr;
  return known && *map->l_name != '\0' ? map->l_name : otherwise;
}

std::string text_of(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
         "." + std::to_string(version % 100);
}

Code code_of(ncclResult_t result) {
  switch (result) {
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      return Code::kInvalid;
    case ncclRemoteError:
      return Code::kPeer;
    case ncclTimeout:
      return Code::kTimedOut;
    default:
      return Code::kSystem;
  }
}

}  // namespace

Result<std::shared_ptr<const Library>> Library::open(const std::string& path,
                                                     const std::string& fallback) {
  std::string tried;
  for (const Candidate& each : candidates(path, fallback)) {
    void* const handle = ::dlopen(each.name.c_str(), each.flags);
    if (handle == nullptr) {
      const char* const why = ::dlerror();
      tried += "\n  " + each.said + ": " + (why == nullptr ? "not there" : why);
      continue;
    }
    auto found = of(handle, each.name);
    if (found.ok()) return found;
    tried += "\n  " + found.status().message();
  }
  return Status{Code::kUnsupported,
                "there is no NCCL from 2.29 to 2.32 here. Tried:" + tried};
}

Result<std::shared_ptr<const Library>> Library::of(void* handle,
                                                   const std::string& said) {
  const std::shared_ptr<Library> found(new Library());
  found->path_ = file_of(handle, said);
#define WEIGHTSYNC_NCCL_FIND(name) found->name.find(handle);
  WEIGHTSYNC_NCCL_FUNCTIONS(WEIGHTSYNC_NCCL_FIND)
#undef WEIGHTSYNC_NCCL_FIND
  found->error_string_.find(handle);
  found->last_error_.find(handle);
  if (found->ncclGetVersion(&found->version_) != ncclSuccess) {
    return Status{Code::kUnsupported,
                  found->path_ + ": ncclGetVersion does not say which NCCL it is"};
  }
  if (found->version_ < kOldest || found->version_ >= kBeyond) {
    return Status{Code::kUnsupported,
                  found->path_ + ": is NCCL " + found->version_text()};
  }
  return std::shared_ptr<const Library>(found);
}

std::string Library::version_text() const { return text_of(version_); }

Status Library::check(ncclResult_t result, const char* call) const {
  if (result == ncclSuccess || result == ncclInProgress) return {};
  if (static_cast<int>(result) == kMissingFunction) {
    return {Code::kUnsupported, std::string(call) + " is not in NCCL " +
                                    version_text() + " (" + path_ +
                                    "): a newer one is needed"};
  }
  return {code_of(result), std::string(call) + " failed: " + describe(result)};
}

std::string Library::describe(ncclResult_t result) const {
  const char* const words = error_string_(result);
  std::string said = words == nullptr ? "unknown result" : words;
  said += " (" + std::to_string(static_cast<int>(result)) + ")";
  const char* const last = last_error_(nullptr);
  if (last != nullptr && *last != '\0') said += ": " + std::string(last);
  return said;
}

}  // namespace weightsync::nccl
