// Notice: what a rank lets the others know that may be inside of a call of NCCL.
//
// They hear it through the store of their group, while they wait for that call; without
// a store in common nobody hears anything. A store that fails is not asked again.
// Blocking, without the GIL: a store of Python takes it.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

#include "shm/futex.h"
#include "shm/status.h"

namespace weightsync {

class Notice {
 public:
  // How long the call may still take once somebody has left a notice: it comes to an
  // end, if that rank took part in it.
  static constexpr std::chrono::seconds kGrace{3};

  // `key`: of this call alone, and the same on all ranks. The store may be null.
  Notice(c10::intrusive_ptr<c10d::Store> store, std::string key);

  void leave(const std::string& text);
  // kPeer, with the text, when the grace is over since a notice was found.
  shm::Status look();
  // Once nobody needs it any more.
  void remove();

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  const std::string key_;
  std::string text_;
  shm::Deadline until_ = shm::Deadline::max();
};

}  // namespace weightsync
