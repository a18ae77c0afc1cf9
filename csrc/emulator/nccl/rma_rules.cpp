#include "emulator/nccl/rma_rules.h"

#include <algorithm>

namespace weightsync::emulator::nccl {
namespace {

constexpr int kDatatypes = 12;

bool outside(int value, int count) { return value < 0 || value >= count; }

// Rows 1 to 3 of every call.
template <class Call>
constexpr Row<Call> kCommunicator{[](const Call& call) {
                                    return refuse_if(!call.common.comm_valid,
                                                     ncclInvalidArgument);
                                  },
                                  "the communicator is NULL or not one"};
template <class Call>
constexpr Row<Call> kRevoked{
    [](const Call& call) { return refuse_if(call.common.revoked, ncclInvalidUsage); },
    "the communicator has been revoked"};
template <class Call>
constexpr Row<Call> kReady{
    [](const Call& call) { return call.common.readiness; },
    "an earlier operation of the communicator is unfinished, or failed"};
template <class Call>
constexpr Row<Call> kSupport{
    [](const Call& call) {
      return refuse_if(!call.common.host_rma_support, ncclInvalidArgument);
    },
    "the communicator has no host RMA (numRmaCtx is 0, or symmetric memory is "
    "unsupported)"};
template <class Call>
constexpr Row<Call> kDriver{[](const Call& call) {
                              return refuse_if(!call.common.driver_recent,
                                               ncclInvalidUsage);
                            },
                            "host RMA needs a driver of CUDA 12.5 or newer"};

constexpr std::array<Row<PutCall>, 14> kPut{{
    kCommunicator<PutCall>,
    kRevoked<PutCall>,
    kReady<PutCall>,
    {[](const PutCall& call) {
       return refuse_if(outside(call.peer, call.common.ranks), ncclInvalidArgument);
     },
     "the peer is no rank of the communicator"},
    {[](const PutCall& call) {
       return refuse_if(outside(call.datatype, kDatatypes), ncclInvalidArgument);
     },
     "the datatype is none of the 12"},
    kSupport<PutCall>,
    kDriver<PutCall>,
    {[](const PutCall& call) {
       return refuse_if(outside(call.ctx, call.common.contexts), ncclInvalidArgument);
     },
     "ctx must be 0 (from 2.31 on: below numRmaCtx)"},
    {[](const PutCall& call) {
       return refuse_if(outside(call.sig_idx, call.common.signals),
                        ncclInvalidArgument);
     },
     "sigIdx must be 0 (from 2.31 on: below numRmaSig)"},
    {[](const PutCall& call) {
       return refuse_if(call.flags != 0, ncclInvalidArgument);
     },
     "flags must be 0"},
    {[](const PutCall& call) {
       if (!call.is_put) return ncclSuccess;
       if (call.window == HandleState::kUnknown) return ncclInternalError;
       return refuse_if(call.window == HandleState::kNull, ncclInvalidArgument);
     },
     "peerWin is NULL, or no live window of this communicator on this rank"},
    {[](const PutCall& call) {
       return refuse_if(call.is_put && call.source == SourceState::kNull,
                        ncclInvalidArgument);
     },
     "localbuff is NULL"},
    {[](const PutCall& call) {
       return refuse_if(call.is_put && (call.source == SourceState::kOutside ||
                                        call.source == SourceState::kNotSymmetric),
                        ncclInvalidArgument);
     },
     "localbuff does not lie in a window of this communicator that was registered "
     "with NCCL_WIN_COLL_SYMMETRIC"},
    {[](const PutCall& call) {
       return refuse_if(call.is_put && (call.window == HandleState::kNotPutable ||
                                        call.source == SourceState::kNotPutable),
                        ncclInvalidArgument);
     },
     "a window is in host memory, or spans several allocations"},
}};

template <class Predicate>
bool any_of(const WaitCall& call, Predicate holds) {
  return std::any_of(call.list, call.list + std::max(call.descriptors, 0), holds);
}

constexpr std::array<Row<WaitCall>, 10> kWait{{
    kCommunicator<WaitCall>,
    kRevoked<WaitCall>,
    kReady<WaitCall>,
    kSupport<WaitCall>,
    kDriver<WaitCall>,
    {[](const WaitCall& call) {
       // A negative number is not refused in 2.30.7: it is a list of nothing.
       return refuse_if(call.descriptors == 0 || call.list == nullptr,
                        ncclInvalidArgument);
     },
     "there are no descriptors"},
    {[](const WaitCall& call) {
       const auto bad = [](const ncclWaitSignalDesc_t& each) {
         return each.opCnt <= 0;
       };
       return refuse_if(any_of(call, bad), ncclInvalidArgument);
     },
     "the opCnt of a descriptor is not positive"},
    {[](const WaitCall& call) {
       const auto bad = [&](const ncclWaitSignalDesc_t& each) {
         return outside(each.sigIdx, call.common.signals);
       };
       return refuse_if(any_of(call, bad), ncclInvalidArgument);
     },
     "the sigIdx of a descriptor must be 0 (from 2.31 on: below numRmaSig)"},
    {[](const WaitCall& call) {
       const auto bad = [&](const ncclWaitSignalDesc_t& each) {
         return outside(each.ctx, call.common.contexts);
       };
       return refuse_if(any_of(call, bad), ncclInvalidArgument);
     },
     "the ctx of a descriptor must be 0 (from 2.31 on: below numRmaCtx)"},
    {[](const WaitCall& call) {
       return refuse_if(!call.common.signals_exist, ncclInvalidUsage);
     },
     "no window of the communicator has been registered: from 2.31 on there are no "
     "signals before"},
}};

}  // namespace

Decision decide_put(const PutCall& call) {
  if (const Decision refused = decide(kPut, call); refused.code != ncclSuccess) {
    return refused;
  }
  if (!call.common.signals_exist) {
    return {ncclInvalidUsage, kWait.back().found};
  }
  return {};
}

Decision decide_wait(const WaitCall& call) { return decide(kWait, call); }

}  // namespace weightsync::emulator::nccl
