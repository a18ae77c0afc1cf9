// DumpRequest: a signal that asks for a dump, which a thread then makes.
//
// The handler does nothing but write to a descriptor. A handler that was there before
// is called as well; the default action, which would end the process, is not taken.
#pragma once

#include <functional>
#include <string>

#include "shm/status.h"

namespace weightsync::recorder {

// "SIGUSR2", "USR2" or "12"; 0 for anything else, and for what cannot be caught.
int signal_number(const std::string& name);

// From now on and until the process ends, `dump` is called on a thread of its own when
// the signal comes. Can be asked for once in a process. A forked child ignores the
// request: it has no such thread.
shm::Status dump_on_signal(int number, std::function<void()> dump);

}  // namespace weightsync::recorder
