// Work, watchdog and flight recorder as ProcessGroupNCCL has them; README.md names the functions of torch they follow.
#pragma once

#include "device.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FlightRecorderDetail.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/version.h>

#include <list>
#include <map>

// nccl2 needs completion hooks of backends, which torch has from 2.15 on
#define STANDIN_NCCL2 (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15)

namespace c10d {
template <>
inline float getDurationFromEvent<standin::Event>(standin::Event& start, standin::Event& end) {
  return std::chrono::duration<float, std::milli>(end.at - start.at).count();
}
}  // namespace c10d

namespace standin {

using Recorder = c10d::FlightRecorder<Event>;
using Millis = std::chrono::milliseconds;

constexpr Millis kWatchdogSleep{100}, kWatchdogSleep2{1000};  // of the old NCCL group, and of nccl2
constexpr Millis kForever{1000LL * 3600 * 24 * 30};

enum ErrorHandling { kNoHandling = 0, kTearDown = 1, kCleanUpOnly = 2, kSkipCleanUp = 3 };

using AbortHooks = std::map<int64_t, std::function<void()>>;
#if STANDIN_NCCL2
using CompletionHooks = std::map<int64_t, c10d::CompletionHook>;
#endif

// What threads and works share of one process group; outlives the Python object.
struct Group {
  bool nccl2 = false;
  int rank = 0, size = 1;
  size_t local_id = 0;
  std::string uid = "0", desc = "default_pg";
  Millis timeout{0};
  bool blocking_wait = false, timing = false;
  int error_handling = kSkipCleanUp;
  uint64_t seq_collective = 0, seq_p2p = 0, op_id = 0;
  std::shared_ptr<c10d::ProcessGroupStatus> status = std::make_shared<c10d::ProcessGroupStatus>();
  std::mutex mutex;  // of the works
  std::condition_variable wake;
  std::list<c10::intrusive_ptr<struct StreamWork>> works;  // enqueued and not seen to be complete
  std::atomic<bool> terminated{false};
  std::mutex hooks_mutex;  // never held while a hook runs
  AbortHooks abort_hooks;
#if STANDIN_NCCL2
  CompletionHooks completion_hooks;
#endif

  void run_abort_hooks() {
    AbortHooks hooks;
    {
      std::lock_guard<std::mutex> lock(hooks_mutex);
      hooks = abort_hooks;
    }
    for (auto& [id, hook] : hooks)
      hook();
  }

  std::string prefix() const {
    return c10::str("[PG ID ", local_id, " PG GUID ", uid, "(", desc, ") Rank ", rank, "] ");
  }
  std::tuple<std::string, std::string> name() const {
    return std::make_tuple(uid, desc);
  }
};
using GroupPtr = std::shared_ptr<Group>;

// What nccl2 returns for an operation that it only collects: complete, although nothing has run.
struct CompletedWork : c10d::Work {
  CompletedWork(int rank, c10d::OpType op) : Work(rank, op) {
    finish();
  }
};

void collect(Group& g);

struct StreamWork : c10d::Work {
  StreamWork(GroupPtr g, c10d::OpType op, bool p2p)
      : Work(g->rank, op),
        group(std::move(g)),
        p2p(p2p),
        seq(p2p && !group->nccl2 ? group->seq_p2p : group->seq_collective) {
    timeout = group->timeout;
  }

  GroupPtr group;
  const bool p2p;
  const uint64_t seq;
  KernelPtr kernel;
  std::vector<at::Tensor> outputs;
  Millis timeout{0};
  Clock::time_point enqueued_at = Clock::now();
  int64_t numel_in = -1, numel_out = -1;
  bool is_barrier = false;
  uint64_t key = ++keys;  // never used again
  Recorder::TraceIdentifier trace;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  static inline std::atomic<uint64_t> keys{0};

  // What the watchdog keeps: without the tensors, which are freed by the thread of the user.
  c10::intrusive_ptr<StreamWork> for_watchdog() const {
    auto w = c10::make_intrusive<StreamWork>(group, opType_, p2p);
    w->kernel = kernel;
    w->timeout = timeout;
    w->numel_in = numel_in;
    w->numel_out = numel_out;
    w->trace = trace;
    w->key = key;
    return w;
  }

  std::string describe() const {
    return c10::str("WorkNCCL(SeqNum=", seq, ", OpType=", c10d::opTypeToString(opType_), ", NumelIn=", numel_in,
                    ", NumelOut=", numel_out, ", Timeout(ms)=", timeout.count(), ")");
  }
  bool isCompleted() override {
    return exception() || kernel->end.query();
  }
  bool isSuccess() const override {
    return !exception() && kernel->end.query();
  }
  bool started() const {
    return group->timing && kernel->start.query();
  }
  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return exception_;
  }
  std::vector<at::Tensor> result() override {
    return outputs;
  }
  uint64_t getSequencenumber() const override {
    return seq;
  }
#if STANDIN_NCCL2
  uint64_t getCompletionKey() const override {
    return key;
  }
#endif
  float getDuration() const override {
    TORCH_CHECK(group->timing, "getDuration only works if timing was enabled");
    return std::chrono::duration<float, std::milli>(kernel->end.at - kernel->start.at).count();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future;
  }
  void synchronize() override {
    current_waits_for(kernel);
  }

  bool wait(Millis limit = kNoTimeout) override {
    current_waits_for(kernel);
    if (group->blocking_wait || limit != kNoTimeout) {
      const auto began = Clock::now();
      while (!isCompleted()) {
        const bool late = limit == kNoTimeout ? check_timeout(enqueued_at, timeout) : check_timeout(began, limit);
        if (late)
          break;
        std::this_thread::sleep_for(Millis(1));
      }
      if (exception())
        handle(kTearDown);
    } else if (is_barrier) {
      wait_for({kernel}, driver().synchronize);
      synchronize_current();
    }
    if (group->nccl2 && (group->blocking_wait || is_barrier))
      collect(*group);
    return true;
  }

  bool check_timeout(Clock::time_point since, Millis limit) {
    const auto ran = std::chrono::duration_cast<Millis>(Clock::now() - since);
    if (ran < limit)
      return false;
    if (exception())
      return true;
    const std::string message = c10::str("[Rank ", group->rank, "] Watchdog caught collective operation timeout: ",
                                         describe(), " ran for ", ran.count(), " milliseconds before timing out.");
    if (!group->nccl2)
      LOG(ERROR) << message;
    std::lock_guard<std::mutex> lock(mutex_);
    exception_ = std::make_exception_ptr(C10_BUILD_ERROR(
        DistBackendError,
        group->nccl2 ? "Watchdog caught collective operation timeout: NCCL operation timed out" : message));
    return true;
  }

  void handle(int mode) {
    LOG(ERROR) << "[Rank " << group->rank << "] Some NCCL operations have failed or timed out. Due to the "
               << "asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.";
    if (mode == kTearDown || mode == kSkipCleanUp) {
      LOG(ERROR) << "[Rank " << group->rank
                 << "] To avoid data inconsistency, we are taking the entire process down.";
      std::rethrow_exception(exception());
    }
  }
};

// -- flight recorder ------------------------------------------------------------------------------------------------

inline Recorder::TraceIdentifier record(const GroupPtr& g, const std::string& title, const std::vector<at::Tensor>& in,
                                        const std::vector<at::Tensor>& out, Event* start, Event* end, bool p2p) {
  Inside guard;
  return Recorder::get()->recordWithResetEnabled(g->local_id, g->name(), g->seq_collective, g->seq_p2p, g->op_id,
                                                 title, in, out, start, end, g->timeout, g->status, p2p);
}

using CommStates = std::unordered_map<std::string, std::unordered_map<std::string, std::string>>;

inline std::string dump_json(bool collectives, bool only_active) {
  return Recorder::get()->dump_json(CommStates(), collectives, only_active);
}

inline std::string dump_pickle(bool collectives, bool stacks, bool only_active) {
  return Recorder::get()->dump(CommStates(), collectives, stacks, only_active);
}

inline void dump_to_file(int rank) {
  const bool wanted = c10d::getCvarBool({"TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"}, true);
  // torch's default file is in /tmp; a stand-in writes only where it was asked to
  if (wanted && (getenv("TORCH_FR_DUMP_TEMP_FILE") || getenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")) &&
      Recorder::get()->enabled_)
    c10d::DebugInfoWriter::getWriter(rank).write(dump_pickle(true, true, false));
}

// -- watchdog -------------------------------------------------------------------------------------------------------

inline void enqueue(const c10::intrusive_ptr<StreamWork>& w) {
  auto& g = *w->group;
  if (g.terminated || (g.blocking_wait && !g.nccl2))
    return;  // no watchdog: nothing is enqueued, and the counters stay
  std::lock_guard<std::mutex> lock(g.mutex);
  g.works.push_back(w->for_watchdog());
  g.status->lastEnqueuedSeq = static_cast<int64_t>(w->seq);
  g.status->lastEnqueuedWorkName = c10d::opTypeToString(w->retrieveOpType());
  g.status->lastEnqueuedNumelIn = w->numel_in;
  g.status->lastEnqueuedNumelOut = w->numel_out;
}

inline int wait_for_dump_ms() {
  return c10d::getCvarInt({"TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"}, 1000);
}

// abort hooks write the dump and set the sticky health state
inline void abort_process(Group& g) {
  if (!getenv("TORCH_FR_DUMP_TEMP_FILE") && !getenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE"))
    setenv("TORCH_FR_DUMP_ON_TIMEOUT", "0", 1);  // torch's default file is in /tmp
  LOG(ERROR) << "[TC] " << g.prefix() << "Aborting process on rank " << g.rank
             << " due to timeout - timeout watchdog detected operation timeout";
  g.run_abort_hooks();
  LOG(ERROR) << "Waiting " << wait_for_dump_ms() << "ms for health check and flight recorder dump before aborting";
  std::this_thread::sleep_for(Millis(wait_for_dump_ms()));
  std::abort();
}

inline void report_failure(Group& g, StreamWork& w) {
  LOG(ERROR) << g.prefix() << " failure detected by watchdog at work sequence id: " << w.seq
             << " PG status: last enqueued work: " << g.status->lastEnqueuedSeq
             << ", last completed work: " << g.status->lastCompletedSeq;
  LOG(ERROR) << g.prefix() << "Timeout at NCCL work: " << w.seq
             << ", last enqueued NCCL work: " << g.status->lastEnqueuedSeq
             << ", last completed NCCL work: " << g.status->lastCompletedSeq << ".";
  dump_to_file(g.rank);
}

inline std::atomic<bool> watchdogs_frozen{false};  // as where a watchdog hangs in a call of CUDA

using Works = std::list<c10::intrusive_ptr<StreamWork>>;

// Tells who listens that these operations are complete, as nccl2 does; those that failed were removed before.
inline void run_completion_hooks(Group& g, const Works& done) {
#if STANDIN_NCCL2
  CompletionHooks hooks;
  {
    std::lock_guard<std::mutex> lock(g.hooks_mutex);
    hooks = g.completion_hooks;
  }
  for (const auto& w : done) {
    c10d::CompletionHookArgs args;
    args.completionKey = w->key;
    if (g.timing)
      args.duration_ms = w->getDuration();
    for (auto& [id, hook] : hooks)
      if (w->isSuccess())
        hook(args);
  }
#endif
}

// Removes the operations of nccl2 that have completed.
inline void collect(Group& g) {
  Works done;  // destroyed after the lock is given back
  {
    std::lock_guard<std::mutex> lock(g.mutex);
    if (watchdogs_frozen)
      return;
    for (auto it = g.works.begin(); it != g.works.end();) {
      auto next = std::next(it);
      auto& w = **it;
      if (!w.kernel->end.query() && !g.blocking_wait && !device().forked)
        w.check_timeout(w.enqueued_at, w.timeout);
      if (w.exception() && (g.error_handling == kTearDown || g.error_handling == kSkipCleanUp))
        abort_process(g);
      if (w.isCompleted())
        done.splice(done.end(), g.works, it);
      it = next;
    }
  }
  run_completion_hooks(g, done);
}

inline void watchdog_pass(Group& g) {
  Works done;  // destroyed after the lock is given back
  std::unique_lock<std::mutex> lock(g.mutex);
  g.wake.wait_for(lock, g.nccl2 ? kWatchdogSleep2 : kWatchdogSleep, [&] { return g.terminated.load(); });
  if (g.nccl2) {
    lock.unlock();
    return collect(g);
  }
  if (watchdogs_frozen)
    return;
  for (auto it = g.works.begin(); it != g.works.end();) {
    auto& w = **it;
    if (!w.kernel->end.query() && !device().forked)
      w.check_timeout(w.enqueued_at, w.timeout);
    if (w.exception() && g.error_handling != kNoHandling) {
      report_failure(g, w);
      w.handle(g.error_handling);
    }
    if (g.status->lastStartedSeq < static_cast<int64_t>(w.seq) && w.started()) {
      g.status->lastStartedSeq = static_cast<int64_t>(w.seq);
      g.status->lastStartedWorkName = c10d::opTypeToString(w.retrieveOpType());
    }
    if (!w.isCompleted()) {
      ++it;
      continue;
    }
    g.status->lastCompletedSeq = static_cast<int64_t>(w.seq);
    g.status->lastCompletedWorkName = c10d::opTypeToString(w.retrieveOpType());
    g.status->lastCompletedNumelIn = w.numel_in;
    g.status->lastCompletedNumelOut = w.numel_out;
    Recorder::get()->retire_id(w.trace.id, w.trace.reset_epoch, true);
    auto next = std::next(it);
    done.splice(done.end(), g.works, it);
    it = next;
  }
}

inline void start_watchdog(const GroupPtr& g) {
  if (g->blocking_wait)
    return;
  std::thread([g] {
    if (!g->nccl2)  // nccl2's keeps the name of the thread that made the group
      c10::setThreadName("pt_nccl_watchdg");
    inside = true;
    while (true) {
      try {
        watchdog_pass(*g);
      } catch (const std::exception& e) {
        const std::string message =
            c10::str(g->prefix(), "Process group watchdog thread terminated with exception: ", e.what());
        LOG(ERROR) << message;
        throw C10_BUILD_ERROR(DistBackendError, message);  // nobody catches it: SIGABRT
      }
      std::lock_guard<std::mutex> lock(g->mutex);
      if (g->terminated && g->works.empty())
        return;
    }
  }).detach();
}

}  // namespace standin
