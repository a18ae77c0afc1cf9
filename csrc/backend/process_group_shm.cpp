#include "process_group_shm.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <functional>

#include "status_error.h"
#include "window_shm.h"
#include "work_shm.h"

namespace weightsync {
namespace {

using shm::Code;

c10::intrusive_ptr<c10d::Backend::Options> make_options(
    std::chrono::milliseconds timeout, bool enable_reconfigure) {
  auto options = c10::make_intrusive<c10d::Backend::Options>("weightsync-shm", timeout);
  options->enable_reconfigure = enable_reconfigure;
  return options;
}

void release_segment(void* context) {
  delete static_cast<std::shared_ptr<shm::Segment>*>(context);
}

std::uint64_t digest_of(std::int64_t uuid, const std::vector<std::string>& handles) {
  std::string text = std::to_string(uuid);
  for (const std::string& handle : handles) text += "\n" + handle;
  return std::hash<std::string>()(text);
}

std::vector<std::string> exchange_handles(c10d::Store& store, int rank, int size,
                                          const std::string& mine) {
  const std::string prefix = "weightsync-shm/";
  store.set(prefix + std::to_string(rank), mine);
  std::vector<std::string> handles;
  handles.reserve(static_cast<std::size_t>(size));
  for (int i = 0; i < size; ++i) {
    handles.push_back(store.get_to_str(prefix + std::to_string(i)));
  }
  return handles;
}

// A list gives ranks by position; a set leaves them to the backend, which sorts.
std::vector<std::string> ordered(const c10d::ReconfigureOptions& opts) {
  if (const auto* list = std::get_if<std::vector<std::string>>(&opts.handles)) {
    return *list;
  }
  const auto& set = std::get<0>(opts.handles);
  std::vector<std::string> handles(set.begin(), set.end());
  std::sort(handles.begin(), handles.end());
  return handles;
}

}  // namespace

std::shared_ptr<shm::Segment> segment_of(const at::Tensor& tensor) {
  using Owner = std::shared_ptr<shm::Segment>;
  const auto* owner = tensor.storage().data_ptr().cast_context<Owner>(&release_segment);
  return owner == nullptr ? nullptr : *owner;
}

ProcessGroupShm::ProcessGroupShm(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                 int size, std::chrono::milliseconds timeout,
                                 bool enable_reconfigure)
    : Backend(rank, size),
      options_(make_options(timeout, enable_reconfigure)),
      timeout_(timeout) {
  if (enable_reconfigure) return;
  const std::string mine = get_reconfigure_handle();
  const auto handles = exchange_handles(*store, rank, size, mine);
  form(handles, digest_of(0, handles), deadline(c10d::kUnsetTimeout));
}

ProcessGroupShm::~ProcessGroupShm() { end("the process group is gone"); }

void ProcessGroupShm::setTimeout(std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(mu_);
  timeout_ = timeout;
  options_->timeout = timeout;
}

shm::Deadline ProcessGroupShm::deadline(std::chrono::milliseconds timeout) const {
  const std::lock_guard<std::mutex> lock(mu_);
  return shm::after(timeout > kNoTimeout ? timeout : timeout_);
}

shm::Group& ProcessGroupShm::next() const {
  check(ended_.empty(), Code::kClosed, [&] { return ended_; });
  if (!next_) next_ = unwrap(shm::Group::create());
  return *next_;
}

c10d::ReconfigureHandle ProcessGroupShm::get_reconfigure_handle() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return next().handle();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupShm::reconfigure(
    const c10d::ReconfigureOptions& opts) {
  const std::vector<std::string> handles = ordered(opts);
  std::shared_ptr<Configuration> old;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    check(ended_.empty(), Code::kClosed, [&] { return ended_; });
    check(used_uuids_.insert(opts.uuid).second, Code::kInvalid, [&] {
      return "reconfigure: uuid " + std::to_string(opts.uuid) + " was used before";
    });
    old = std::move(current_);
  }
  if (old) old->end("the process group was reconfigured");
  const auto timeout = opts.timeout.value_or(c10d::kUnsetTimeout);
  form(handles, digest_of(opts.uuid, handles), deadline(timeout));
  auto done = std::make_shared<shm::Wait>(
      [] { return shm::Status(); }, [] { return std::string(); }, shm::Deadline::max());
  return c10::make_intrusive<WorkShm>(rank_, c10d::OpType::UNKNOWN,
                                      configuration()->group, std::move(done));
}

void ProcessGroupShm::form(const std::vector<std::string>& handles,
                           std::uint64_t digest, shm::Deadline deadline) {
  auto configuration = std::make_shared<Configuration>();
  {
    const std::lock_guard<std::mutex> lock(mu_);
    check(forming_ == nullptr, Code::kInvalid, "the process group is being formed");
    next();
    configuration->group = std::move(next_);
    forming_ = configuration->group;
  }
  const shm::Status joined = configuration->group->join(handles, digest, deadline);
  std::string ended;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    forming_.reset();
    ended = ended_;
    if (joined.ok() && ended.empty()) return adopt(std::move(configuration));
  }
  configuration->end("the group was never formed: " + joined.message());
  check(joined);
  throw StatusError({Code::kClosed, ended});
}

void ProcessGroupShm::adopt(std::shared_ptr<Configuration> configuration) {
  rank_ = configuration->group->rank();
  size_ = configuration->group->size();
  current_ = std::move(configuration);
}

std::shared_ptr<Configuration> ProcessGroupShm::configuration() const {
  const std::lock_guard<std::mutex> lock(mu_);
  check(ended_.empty(), Code::kClosed, [&] { return ended_; });
  check(current_ != nullptr, Code::kClosed,
        "the process group is not formed: reconfigure() it first");
  return current_;
}

c10::intrusive_ptr<c10d::Window> ProcessGroupShm::new_window(
    const std::optional<at::Tensor>& tensor) {
  auto self = c10::intrusive_ptr<ProcessGroupShm>::unsafe_reclaim_from_nonowning(this);
  auto window = c10::make_intrusive<WindowShm>(std::move(self), configuration());
  if (tensor) window->tensor_register(*tensor);
  return window;
}

at::Tensor ProcessGroupShm::allocateTensor(long size, at::TensorOptions options) {
  check(size > 0, Code::kInvalid, [&] {
    return "cannot allocate a window of " + std::to_string(size) + " elements";
  });
  check(options.device().is_cpu(), Code::kUnsupported, [&] {
    return "weightsync-shm allocates CPU memory, not " + options.device().str();
  });
  const std::size_t nbytes =
      static_cast<std::size_t>(size) * options.dtype().itemsize();
  auto segment = unwrap(shm::Segment::create(nbytes, shm::Populate::kYes));
  void* const data = segment->data();
  auto* const owner = new std::shared_ptr<shm::Segment>(std::move(segment));
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes,
                       c10::DataPtr(data, owner, &release_segment, c10::kCPU),
                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), options.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return tensor;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupShm::barrier(
    const c10d::BarrierOptions& opts) {
  const auto formed = configuration();
  return c10::make_intrusive<WorkShm>(rank_, c10d::OpType::BARRIER, formed->group,
                                      formed->group->barrier(deadline(opts.timeout)));
}

void ProcessGroupShm::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  // Copying or dropping a hook takes the GIL: never under the lock.
  auto kept = std::make_shared<const c10d::AbortHook>(std::move(hook));
  const std::lock_guard<std::mutex> lock(mu_);
  std::swap(hooks_[id], kept);
}

void ProcessGroupShm::unregisterAbortHook(int64_t id) {
  std::shared_ptr<const c10d::AbortHook> dropped;
  const std::lock_guard<std::mutex> lock(mu_);
  const auto hook = hooks_.find(id);
  if (hook == hooks_.end()) return;
  dropped = std::move(hook->second);
  hooks_.erase(hook);
}

void ProcessGroupShm::abort() {
  Hooks hooks;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (!ended_.empty()) return;
    hooks = hooks_;
  }
  // Not under the lock: a hook takes the GIL, whose holder may be unregistering one.
  for (const auto& [id, hook] : hooks) (*hook)();
  end("the process group was aborted");
}

void ProcessGroupShm::shutdown() { end("the process group was shut down"); }

void ProcessGroupShm::end(const std::string& why) {
  std::shared_ptr<Configuration> current;
  std::shared_ptr<shm::Group> forming;
  std::shared_ptr<shm::Group> next;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (ended_.empty()) ended_ = why;
    current = std::move(current_);
    forming = forming_;
    next = std::move(next_);
  }
  if (current) current->end(why);
  if (forming) forming->close(why);
}

c10d::ErrorType ProcessGroupShm::getError() {
  std::shared_ptr<Configuration> current;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (!current_) return c10d::ErrorType::SUCCESS;
    current = current_;
  }
  for (int peer = 0; peer < current->group->size(); ++peer) {
    if (!current->group->check_peer(peer).ok()) return c10d::ErrorType::REMOTE_ERROR;
  }
  return c10d::ErrorType::SUCCESS;
}

}  // namespace weightsync
