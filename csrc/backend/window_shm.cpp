#include "window_shm.h"

#include "runs.h"
#include "status_error.h"

namespace weightsync {
namespace {

using shm::Code;

// Up to here an asynchronous copy is carried out by its caller: it takes less than the
// switch to another thread, 10 us or more.
constexpr std::size_t kInlineBytes = std::size_t{64} << 10;
// Runs that are so close have no whole page between them.
constexpr std::uint64_t kPageBytes = 4096;

std::string bytes(std::uint64_t count) { return std::to_string(count) + " bytes"; }

shm::WindowEntry entry_for(const at::Tensor& tensor) {
  shm::WindowEntry entry{};
  entry.dtype = -1;
  if (!tensor.defined()) return entry;
  check(tensor.device().is_cpu(), Code::kUnsupported, [&] {
    return "a window of weightsync-shm is CPU memory, not " + tensor.device().str();
  });
  check(tensor.is_contiguous(), Code::kInvalid, "a window must be contiguous");
  const auto segment = segment_of(tensor);
  check(segment != nullptr, Code::kUnsupported,
        "a window must be memory that peers can map: allocate it with "
        "allocate_tensor() of the process group");
  entry.memory = segment->locator();
  entry.offset = static_cast<std::uint64_t>(
      static_cast<const std::byte*>(tensor.const_data_ptr()) - segment->data());
  entry.nbytes = tensor.nbytes();
  entry.item_size = tensor.element_size();
  entry.dtype = static_cast<std::int64_t>(tensor.scalar_type());
  return entry;
}

struct Memory {
  std::byte* base;
  std::uint64_t nbytes;  // from base to the end of the storage
};

Memory memory_of(const at::Tensor& tensor, bool written) {
  check(tensor.device().is_cpu(), Code::kUnsupported, [&] {
    return "weightsync-shm moves CPU memory, not " + tensor.device().str();
  });
  check(
      !tensor.is_conj() && !tensor.is_neg(), Code::kInvalid,
      "a lazily conjugated or negated tensor has other bytes than it shows: resolve it "
      "first");
  const void* base = written ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
  const auto skipped = static_cast<std::uint64_t>(tensor.storage_offset()) *
                       static_cast<std::uint64_t>(tensor.element_size());
  const std::uint64_t total = tensor.storage().nbytes();
  return {const_cast<std::byte*>(static_cast<const std::byte*>(base)),
          total > skipped ? total - skipped : 0};
}

struct Table {
  std::vector<shm::Run> runs;
  std::uint64_t nbytes = 0;
};

// Checks every run against both sides before any byte moves.
Table resolve(const std::vector<at::Tensor>& tensors, const at::Tensor& table,
              std::byte* window, std::uint64_t window_nbytes, bool to_window) {
  check_table(table);
  std::vector<Memory> memory;
  memory.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    memory.push_back(memory_of(tensor, !to_window));
  }
  Table resolved;
  resolved.runs.reserve(static_cast<std::size_t>(table.size(0)));
  const auto* row = table.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < table.size(0); ++i, row += kRunColumns) {
    const std::size_t index = tensor_of_run(row, i, memory.size());
    const Memory& side = memory[index];
    check_run(row, i, side.nbytes, window_nbytes);
    std::byte* const at_tensor = side.base + row[1];
    std::byte* const at_window = window + row[2];
    const auto rows = static_cast<std::size_t>(row[3]);
    const auto row_bytes = static_cast<std::size_t>(row[4]);
    const auto tensor_stride = static_cast<std::size_t>(row[5]);
    const auto window_stride = static_cast<std::size_t>(row[6]);
    resolved.nbytes += rows * row_bytes;
    if (to_window) {
      resolved.runs.push_back(
          {at_tensor, at_window, rows, row_bytes, tensor_stride, window_stride});
    } else {
      resolved.runs.push_back(
          {at_window, at_tensor, rows, row_bytes, window_stride, tensor_stride});
    }
  }
  return resolved;
}

}  // namespace

WindowShm::WindowShm(c10::intrusive_ptr<ProcessGroupShm> group,
                     std::shared_ptr<Configuration> configuration)
    : pg_(std::move(group)), configuration_(std::move(configuration)) {}

void WindowShm::tensor_register(const at::Tensor& tensor, bool /*owning*/) {
  const shm::WindowEntry mine = entry_for(tensor);
  auto entries = unwrap(group().exchange(mine, pg_->deadline(c10d::kUnsetTimeout)));
  const std::lock_guard<std::mutex> lock(mu_);
  check(peers_.empty(), Code::kInvalid, "this window has a tensor registered already");
  tensor_ = tensor;
  for (const shm::WindowEntry& entry : entries) peers_.push_back({entry, nullptr});
  if (tensor.defined()) {
    peers_[static_cast<std::size_t>(group().rank())].segment = segment_of(tensor);
  }
}

void WindowShm::tensor_deregister() {
  const auto everyone = group().barrier(pg_->deadline(c10d::kUnsetTimeout));
  check(group().block(*everyone));
  // Dropped after the lock: a tensor may want the GIL, whose holder may want the lock.
  std::vector<Peer> peers;
  at::Tensor tensor;
  const std::lock_guard<std::mutex> lock(mu_);
  std::swap(peers_, peers);
  std::swap(tensor_, tensor);
}

int WindowShm::checked(int64_t peer) const {
  const int rank = static_cast<int>(std::clamp<int64_t>(peer, -1, shm::kMaxRanks));
  check(group().check_peer(rank));
  return rank;
}

const shm::WindowEntry& WindowShm::entry_of(int peer) {
  check(!peers_.empty(), Code::kInvalid, "no tensor is registered with this window");
  return peers_[static_cast<std::size_t>(peer)].entry;
}

WindowShm::Mapped WindowShm::mapped(int peer) {
  const std::lock_guard<std::mutex> lock(mu_);
  const shm::WindowEntry& entry = entry_of(peer);
  check(entry.dtype >= 0, Code::kInvalid,
        [&] { return "rank " + std::to_string(peer) + " exposes no window"; });
  check(entry.offset <= entry.memory.nbytes &&
            entry.nbytes <= entry.memory.nbytes - entry.offset,
        Code::kPeer, [&] {
          return "rank " + std::to_string(peer) + " told of an impossible window";
        });
  Peer& other = peers_[static_cast<std::size_t>(peer)];
  if (!other.segment) {
    other.segment = unwrap(shm::Segment::open(entry.memory, shm::Populate::kNo));
  }
  return {other.segment->data() + entry.offset, entry, other.segment};
}

void WindowShm::connect(const std::vector<int64_t>& peers) {
  for (const int64_t peer : peers) mapped(checked(peer));
}

void WindowShm::prepare(const at::Tensor& runs, int64_t dst) {
  const Mapped window = mapped(checked(dst));
  check_table(runs);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> extents;
  const auto* row = runs.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < runs.size(0); ++i, row += kRunColumns) {
    check(fits(row[2], row[3], row[4], row[6], window.entry.nbytes), Code::kInvalid,
          [&] { return "run " + std::to_string(i) + " leaves the window"; });
    const auto start = static_cast<std::uint64_t>(row[2]);
    const auto length = static_cast<std::uint64_t>((row[3] - 1) * row[6] + row[4]);
    if (row[3] > 0 && row[4] > 0) extents.emplace_back(start, start + length);
  }
  std::sort(extents.begin(), extents.end());
  for (std::size_t i = 0; i < extents.size();) {
    auto [start, stop] = extents[i];
    while (++i < extents.size() && extents[i].first <= stop + kPageBytes) {
      stop = std::max(stop, extents[i].second);
    }
    window.segment->populate(window.entry.offset + start, stop - start);
  }
}

int64_t WindowShm::peer_nbytes(int64_t peer) {
  const int rank = checked(peer);
  const std::lock_guard<std::mutex> lock(mu_);
  return static_cast<int64_t>(entry_of(rank).nbytes);
}

c10::intrusive_ptr<c10d::Work> WindowShm::put(const at::Tensor& tensor, int64_t dst,
                                              int64_t offset, bool async_op,
                                              const c10d::PutOptions& /*opts*/) {
  const int peer = checked(dst);
  Mapped window = mapped(peer);
  const shm::WindowEntry& entry = window.entry;
  check(static_cast<std::int64_t>(tensor.scalar_type()) == entry.dtype, Code::kInvalid,
        [&] {
          return std::string("put of ") + c10::toString(tensor.scalar_type()) +
                 " into a window of " +
                 c10::toString(static_cast<at::ScalarType>(entry.dtype)) + " of rank " +
                 std::to_string(peer);
        });
  check(tensor.is_contiguous(), Code::kInvalid, "put needs a contiguous tensor");
  const auto item = static_cast<std::int64_t>(entry.item_size);
  std::int64_t at = 0;
  const bool inside =
      !__builtin_mul_overflow(offset, item, &at) &&
      fits(at, 1, static_cast<std::int64_t>(tensor.nbytes()), 0, entry.nbytes);
  check(inside && offset >= 0, Code::kInvalid, [&] {
    return "put of " + bytes(tensor.nbytes()) + " at element " +
           std::to_string(offset) + " leaves the window of rank " +
           std::to_string(peer) + ", which has " + bytes(entry.nbytes);
  });
  const Memory source = memory_of(tensor, false);
  std::vector<shm::Run> runs{{source.base, window.base + at, 1, tensor.nbytes(), 0, 0}};
  return submit(
      std::move(runs), {tensor}, std::move(window.segment),
      [this, peer] { return group().signal(peer, 1); }, async_op);
}

c10::intrusive_ptr<WorkShm> WindowShm::put_many(std::vector<at::Tensor> tensors,
                                                const at::Tensor& runs, int64_t dst,
                                                int64_t signals, bool async_op) {
  const int peer = checked(dst);
  Mapped window = mapped(peer);
  check(signals >= 0, Code::kInvalid, "a number of signals cannot be negative");
  Table table = resolve(tensors, runs, window.base, window.entry.nbytes,
                        /*to_window=*/true);
  const auto count = static_cast<std::uint64_t>(signals);
  return submit(
      std::move(table.runs), std::move(tensors), std::move(window.segment),
      [this, peer, count] { return group().signal(peer, count); }, async_op);
}

c10::intrusive_ptr<WorkShm> WindowShm::copy_local(std::vector<at::Tensor> tensors,
                                                  const at::Tensor& runs,
                                                  bool to_window, bool async_op) {
  check(group().closed());
  Mapped window = mapped(group().rank());
  Table table = resolve(tensors, runs, window.base, window.entry.nbytes, to_window);
  return submit(std::move(table.runs), std::move(tensors), std::move(window.segment),
                nullptr, async_op);
}

c10::intrusive_ptr<c10d::Work> WindowShm::signal(int64_t peer, bool async_op,
                                                 const c10d::SignalOptions& /*opts*/) {
  const int rank = checked(peer);
  return submit(
      {}, {}, nullptr, [this, rank] { return group().signal(rank, 1); }, async_op);
}

c10::intrusive_ptr<c10d::Work> WindowShm::wait_signal(
    int64_t peer, bool async_op, const c10d::WaitSignalOptions& opts) {
  return wait_signals({peer}, {1}, opts.timeout, async_op);
}

c10::intrusive_ptr<WorkShm> WindowShm::wait_signals(const std::vector<int64_t>& peers,
                                                    const std::vector<int64_t>& counts,
                                                    std::chrono::milliseconds timeout,
                                                    bool async_op) {
  check(peers.size() == counts.size(), Code::kInvalid,
        "wait_signals needs one count for each peer");
  check(group().closed());
  std::vector<shm::Expect> expected;
  for (std::size_t i = 0; i < peers.size(); ++i) {
    check(peers[i] >= 0 && peers[i] < group().size() && counts[i] >= 0, Code::kInvalid,
          [&] {
            return "cannot wait for " + std::to_string(counts[i]) +
                   " signals of rank " + std::to_string(peers[i]) + " in a group of " +
                   std::to_string(group().size());
          });
    expected.push_back(
        {static_cast<int>(peers[i]), static_cast<std::uint64_t>(counts[i])});
  }
  auto wait = group().signals(std::move(expected), pg_->deadline(timeout));
  return finish(c10::make_intrusive<WorkShm>(group().rank(), c10d::OpType::UNKNOWN,
                                             configuration_->group, std::move(wait)),
                async_op);
}

int64_t WindowShm::available_signals(int64_t peer) {
  check(peer >= 0 && peer < group().size(), Code::kInvalid,
        [&] { return "no rank " + std::to_string(peer) + " in this group"; });
  return static_cast<int64_t>(group().available(static_cast<int>(peer)));
}

at::Tensor WindowShm::map_remote_tensor(int64_t rank) {
  check(rank == group().rank(), Code::kUnsupported, [&] {
    return "windows are in SEPARATE mode: the memory of rank " + std::to_string(rank) +
           " cannot be read by rank " + std::to_string(group().rank());
  });
  const std::lock_guard<std::mutex> lock(mu_);
  check(tensor_.defined(), Code::kInvalid, "no tensor is registered with this window");
  return tensor_;
}

c10d::WindowAttr WindowShm::get_attr(int64_t peer) {
  check(peer >= 0 && peer < group().size(), Code::kInvalid,
        [&] { return "no rank " + std::to_string(peer) + " in this group"; });
  return {c10d::WindowAccessType::SEPARATE};
}

c10::intrusive_ptr<WorkShm> WindowShm::submit(std::vector<shm::Run> runs,
                                              std::vector<at::Tensor> kept,
                                              std::shared_ptr<shm::Segment> segment,
                                              std::function<shm::Status()> after,
                                              bool async_op) {
  std::size_t nbytes = 0;
  for (const shm::Run& run : runs) nbytes += run.rows * run.row_bytes;
  auto wait = std::make_shared<shm::Wait>([] { return std::nullopt; },
                                          [] { return std::string("put timed out"); },
                                          shm::Deadline::max());
  // The job holds what it touches: the window may be deregistered before it runs.
  auto self = c10::intrusive_ptr<WindowShm>::unsafe_reclaim_from_nonowning(this);
  auto job =
      std::make_shared<shm::Job>(std::move(runs), nbytes, std::move(after),
                                 [wait, self, kept = std::move(kept),
                                  segment = std::move(segment)](shm::Status outcome) {
                                   wait->complete(std::move(outcome));
                                   self->group().wake();
                                 });
  auto work = c10::make_intrusive<WorkShm>(group().rank(), c10d::OpType::UNKNOWN,
                                           configuration_->group, wait, job);
  if (async_op && nbytes > kInlineBytes) {
    configuration_->executor.submit(job, configuration_);
  } else {
    configuration_->executor.run_or_submit(job);
  }
  return finish(std::move(work), async_op);
}

c10::intrusive_ptr<WorkShm> WindowShm::finish(c10::intrusive_ptr<WorkShm> work,
                                              bool async_op) {
  if (!async_op) work->wait();
  return work;
}

}  // namespace weightsync
