#include "nccl/library.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace weightsync::nccl {
namespace {

// The functions of the emulator's NCCL are in this program.
std::shared_ptr<const Library> own() {
  auto found = Library::of(::dlopen(nullptr, RTLD_NOW), "this program");
  EXPECT_TRUE(found.ok()) << found.status().message();
  return found.take();
}

// Sets a variable for as long as it lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    ::setenv(name, value, 1);
  }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* const name_;
};

bool says(const Status& status, const std::string& words) {
  return status.message().find(words) != std::string::npos;
}

TEST(LibraryTest, ItKnowsItsVersionAndItsFile) {
  const auto library = own();

  EXPECT_EQ(23007, library->version());
  EXPECT_EQ("2.30.7", library->version_text());
  EXPECT_FALSE(library->path().empty());
}

TEST(LibraryTest, AllFunctionsThatWeCallAreThere) {
  const auto library = own();

#define WEIGHTSYNC_NCCL_EXISTS(name) EXPECT_TRUE(library->name.exists()) << #name;
  WEIGHTSYNC_NCCL_FUNCTIONS(WEIGHTSYNC_NCCL_EXISTS)
#undef WEIGHTSYNC_NCCL_EXISTS
}

TEST(LibraryTest, AResultNamesTheCallAndWhatNcclSays) {
  const auto library = own();
  const Status failed = library->check(ncclSystemError, "ncclSend");

  EXPECT_TRUE(library->check(ncclSuccess, "ncclSend").ok());
  EXPECT_TRUE(library->check(ncclInProgress, "ncclSend").ok());
  EXPECT_EQ(Code::kSystem, failed.code());
  EXPECT_TRUE(says(failed, "ncclSend failed: unhandled system error"))
      << failed.message();
}

TEST(LibraryTest, AResultIsOfTheKindOfItsFault) {
  const auto library = own();

  EXPECT_EQ(Code::kInvalid, library->check(ncclInvalidArgument, "it").code());
  EXPECT_EQ(Code::kInvalid, library->check(ncclInvalidUsage, "it").code());
  EXPECT_EQ(Code::kPeer, library->check(ncclRemoteError, "it").code());
  EXPECT_EQ(Code::kTimedOut, library->check(ncclTimeout, "it").code());
  EXPECT_EQ(Code::kSystem, library->check(ncclInternalError, "it").code());
}

TEST(LibraryTest, AFunctionThatIsMissingIsAnErrorWhenItIsCalled) {
  const auto library = own();
  Function<ncclResult_t(int)> missing("ncclOfTomorrow");
  missing.find(::dlopen(nullptr, RTLD_NOW));
  const Status failed = library->check(missing(1), missing.name());

  EXPECT_FALSE(missing.exists());
  EXPECT_EQ(Code::kUnsupported, failed.code());
  EXPECT_TRUE(says(failed, "ncclOfTomorrow is not in NCCL 2.30.7")) << failed.message();
}

TEST(LibraryTest, ALibraryThatIsNamedIsThatOneOrNone) {
  const auto found = Library::open("/nowhere/libnccl.so", "/elsewhere.so");

  EXPECT_EQ(Code::kUnsupported, found.status().code());
  EXPECT_TRUE(says(found.status(), "/nowhere/libnccl.so"));
  EXPECT_FALSE(says(found.status(), "/elsewhere.so"));
}

TEST(LibraryTest, SoIsOneThatTheEnvironmentNames) {
  const Variable named("WEIGHTSYNC_NCCL_LIBRARY", "/nowhere/libnccl.so");
  const auto found = Library::open("", "/elsewhere.so");

  EXPECT_TRUE(says(found.status(), "WEIGHTSYNC_NCCL_LIBRARY=/nowhere/libnccl.so"));
  EXPECT_FALSE(says(found.status(), "/elsewhere.so"));
}

TEST(LibraryTest, EverythingThatWasTriedIsNamed) {
  const auto found = Library::open("", "/elsewhere.so");

  // A machine may have one.
  EXPECT_TRUE(found.ok() || says(found.status(), "what this process has loaded"));
  EXPECT_TRUE(found.ok() || says(found.status(), "/elsewhere.so"));
  EXPECT_TRUE(found.ok() || says(found.status(), "libnccl.so.2"));
}

TEST(LibraryTest, ALibraryThatIsNoNcclSaysSo) {
  const auto found = Library::open("libm.so.6", "");

  EXPECT_EQ(Code::kUnsupported, found.status().code());
  EXPECT_TRUE(says(found.status(), "does not say which NCCL it is"));
}

}  // namespace
}  // namespace weightsync::nccl
