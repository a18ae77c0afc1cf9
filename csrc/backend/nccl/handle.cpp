#include "backend/nccl/handle.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

namespace weightsync {
namespace {

using shm::Code;
using shm::Result;
using shm::Status;

constexpr const char* kScheme = "nccl2";

template <class Number>
bool read_number(const std::string& text, Number& number) {
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && rest == end;
}

// c10d tells the store behind a prefix, and not the prefix.
struct Peek : c10d::PrefixStore {
  static const std::string& prefix_of(const c10d::PrefixStore& store) {
    return store.*(&Peek::prefix_);
  }
};

// The store that listens, with the prefixes in front of it; null if none does.
c10d::TCPStore* listening(const c10::intrusive_ptr<c10d::Store>& store,
                          std::string& prefix) {
  c10::intrusive_ptr<c10d::Store> inner = store;
  while (auto* const outer = dynamic_cast<c10d::PrefixStore*>(inner.get())) {
    if (!prefix.empty()) prefix.insert(0, "/");
    prefix.insert(0, Peek::prefix_of(*outer));
    inner = outer->getUnderlyingStore();
  }
  return dynamic_cast<c10d::TCPStore*>(inner.get());
}

// A socket that listens on this machine alone: TCPStore itself listens to everybody.
Result<int> listen_here(std::uint16_t& port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return shm::system_error("make a socket", errno);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (::bind(socket, any, size) != 0 || ::listen(socket, SOMAXCONN) != 0 ||
      ::getsockname(socket, any, &size) != 0) {
    const int error = errno;
    ::close(socket);
    return shm::system_error("listen on 127.0.0.1", error);
  }
  port = ntohs(address.sin_port);
  return socket;
}

}  // namespace

std::string hex(std::uint64_t number) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(number));
  return text;
}

Result<Address> Address::parse(const std::string& text) {
  const std::size_t slash = text.find('/');
  const std::size_t colon = text.rfind(':', slash);
  Address address;
  if (slash == std::string::npos || colon == std::string::npos || colon == 0 ||
      !read_number(text.substr(colon + 1, slash - colon - 1), address.port)) {
    return Status{Code::kInvalid, "expected <host>:<port>/<prefix>; found " + text};
  }
  address.host = text.substr(0, colon);
  address.prefix = text.substr(slash + 1);
  return address;
}

std::string Handle::text() const {
  return std::string(kScheme) + ":" + std::to_string(rank) + ":" +
         std::to_string(uuid) + ":" + instance + ":" + store;
}

Result<Handle> Handle::parse(const std::string& text) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (int i = 0; i < 4; ++i) {
    const std::size_t end = text.find(':', begin);
    if (end == std::string::npos) break;
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  Handle handle;
  const bool fits = parts.size() == 4 && parts[0] == kScheme &&
                    read_number(parts[1], handle.rank) &&
                    read_number(parts[2], handle.uuid) && !parts[3].empty() &&
                    Address::parse(text.substr(begin)).ok();
  if (!fits) {
    return Status{Code::kInvalid,
                  "expected nccl2:<rank>:<uuid>:<instance>:<store>, "
                  "as get_reconfigure_handle() gives; found \"" +
                      text + "\""};
  }
  handle.instance = parts[3];
  handle.store = text.substr(begin);
  return handle;
}

std::string new_instance() {
  std::random_device random;
  const auto half = [&random] {
    return hex((static_cast<std::uint64_t>(random()) << 32) | random());
  };
  return half() + half();
}

Result<std::string> address_of(const c10::intrusive_ptr<c10d::Store>& store,
                               c10::intrusive_ptr<c10d::Store>& server) {
  std::string prefix;
  if (auto* const found = listening(store, prefix)) {
    return found->getHost() + ":" + std::to_string(found->getPort()) + "/" + prefix;
  }
  try {
    if (!server) {
      c10d::TCPStoreOptions options;
      auto socket = listen_here(options.port);
      if (!socket.ok()) return socket.status();
      options.isServer = true;
      options.waitWorkers = false;
      options.masterListenFd = socket.value();
      server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    }
    const auto& mine = dynamic_cast<const c10d::TCPStore&>(*server);
    return mine.getHost() + ":" + std::to_string(mine.getPort()) + "/";
  } catch (const std::exception& error) {
    return Status{Code::kSystem, std::string("cannot start a store: ") + error.what()};
  }
}

}  // namespace weightsync
