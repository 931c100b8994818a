// A process group with NCCL's semantics towards its caller, on CPU tensors, over gloo. See ../../README.md.
#include "work.hpp"

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/control_plane/Handlers.hpp>

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>

namespace py = pybind11;
using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace standin {

// CUDA graphs: what is captured is neither run nor enqueued nor recorded, and its replay moves no counter.
struct Captured {
  std::shared_ptr<Stream> stream;
  std::function<void()> run;
  std::vector<std::pair<at::Tensor, bool>> tensors;
};
struct Graph {
  std::vector<Captured> kernels;
  void replay() const {
    Inside guard;
    for (const auto& c : kernels) {
      auto kernel = std::make_shared<Kernel>();
      kernel->run = c.run;
      kernel->tensors = c.tensors;
      c.stream->launch(kernel, true);
    }
  }
};
static std::shared_ptr<Graph> capturing;

static size_t n_groups = 0;
static int64_t eager_bytes = 4 << 20;  // of a send that completes without its receiver: NCCL_BUFFSIZE

using Waits = std::vector<std::function<void()>>;
// Starts the transfer on the gloo group; what has to be waited for is appended.
using Transfer = std::function<void(c10d::Backend&, Waits&)>;

static bool pairs_block = false;  // the host waits while the communicator of two ranks is made, as by default in NCCL

struct Comm {
  std::string key;
  int rank, size;
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Backend> inner;
  std::shared_ptr<Stream> stream = Stream::make();

  // ncclGetUniqueId goes through the store; ncclCommInitRank returns when all members have come
  void connect() {
    const std::string id = "nccl_unique_id/" + key;
    if (rank == 0)
      store->set(id, std::vector<uint8_t>{1});
    else
      store->get(id);
    py::gil_scoped_acquire gil;
    auto c10d_module = py::module_::import("torch._C._distributed_c10d");
    auto prefixed = c10d_module.attr("PrefixStore")("standin/" + key, store);
    auto group = c10d_module.attr("ProcessGroupGloo")(prefixed, rank, size, py::cast(kForever));
    group.inc_ref();  // never destroyed
    inner = group.cast<c10::intrusive_ptr<c10d::Backend>>();
  }
};

static int64_t bytes_of(const Tensors& ts) {
  int64_t n = 0;
  for (const auto& t : ts)
    n += t.numel() * static_cast<int64_t>(t.element_size());
  return n;
}

static int64_t elements_of(const Tensors& ts) {
  int64_t n = 0;
  for (const auto& t : ts)
    n += t.numel();
  return n;
}

static void check_tensors(const Tensors& ts) {
  for (const auto& t : ts)
    TORCH_CHECK_WITH(ValueError, t.is_sparse() || t.is_contiguous(), "Tensors must be contiguous");
}

// gloo aborts the process where ranks disagree; NCCL's kernels wait for each other for ever. So ranks compare first.
// False: this rank's all_reduce is smaller than another's. NCCL's kernel then gets all packets that it waits for, and ends alone.
static bool compare(c10d::Backend& inner, int64_t kind, int64_t bytes) {
  at::Tensor in = at::tensor({kind, bytes}, at::kLong);
  std::vector<Tensors> out{Tensors{}};
  for (int i = 0; i < inner.getSize(); i++)
    out[0].push_back(at::empty_like(in));
  Tensors ins{in};
  inner.allgather(out, ins)->wait();
  bool same_kind = true, same_size = true, smaller = false;
  for (const auto& t : out[0]) {
    same_kind &= t[0].item<int64_t>() == kind;
    same_size &= t[1].item<int64_t>() == bytes;
    smaller |= t[1].item<int64_t>() > bytes;
  }
  if (same_kind && smaller && kind == static_cast<int64_t>(c10d::OpType::ALLREDUCE))
    return false;
  TORCH_CHECK(same_kind && same_size, "ranks disagree on the operation");
  return true;
}

template <typename O>
static O for_inner(O opts) {
  opts.timeout = kForever;
  opts.asyncOp = true;
  return opts;
}

class StreamBackend : public c10d::Backend {
 public:
  StreamBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Millis timeout, std::vector<uint64_t> ranks,
                bool eager, bool nccl2)
      : Backend(rank, size), store_(std::move(store)), ranks_(std::move(ranks)), eager_(eager || nccl2), nccl2_(nccl2) {
    g_ = std::make_shared<Group>();
    g_->nccl2 = nccl2;
    g_->rank = rank;
    g_->size = size;
    g_->local_id = n_groups++;
    g_->timeout = timeout;
    g_->blocking_wait = c10d::getCvarBool({"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}, false);
    g_->timing = c10d::getCvarBool({"TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING"}, false);
    g_->error_handling = c10d::getCvarInt({"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"}, 3);
    start_watchdog(g_);
    init();
  }
  ~StreamBackend() override {
    g_->terminated = true;
  }

  const std::string getBackendName() const override {
    return nccl2_ ? "nccl2" : "stream";
  }
#if STANDIN_NCCL2
  bool supportsAbortHooks() const override {
    return nccl2_;
  }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    std::lock_guard<std::mutex> lock(g_->hooks_mutex);
    g_->abort_hooks[id] = std::move(hook);
  }
  void unregisterAbortHook(int64_t id) override {
    std::lock_guard<std::mutex> lock(g_->hooks_mutex);
    g_->abort_hooks.erase(id);
  }
  bool supportsCompletionHooks() const override {
    return nccl2_;
  }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    std::lock_guard<std::mutex> lock(g_->hooks_mutex);
    g_->completion_hooks[id] = std::move(hook);
  }
  void unregisterCompletionHook(int64_t id) override {
    std::lock_guard<std::mutex> lock(g_->hooks_mutex);
    g_->completion_hooks.erase(id);
  }
#endif
  bool supportsSplitting() const override {
    return nccl2_;
  }
  // Every rank of this group comes here, members of the new group and others, as in ncclCommSplit.
  void split_from_all() {
    const std::string key = c10::str("ncclCommSplit/", n_splits_++);
    auto store = store_->clone();
    std::exception_ptr failed;
    host_blocks(driver().comm_split, [&] {
      try {
        if (store->add(key, 1) == size_)
          store->set(key + "/all", std::vector<uint8_t>{1});
        store->wait({key + "/all"}, kForever);
      } catch (...) {
        failed = std::current_exception();
      }
      return 1;
    });
    if (failed)
      std::rethrow_exception(failed);
  }
#if STANDIN_NCCL2
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName(), g_->timeout);
  }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override {
    split_from_all();
    const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
    if (mine == ranks.end())
      return nullptr;
    std::vector<uint64_t> global;
    for (const int r : ranks)
      global.push_back(ranks_.at(r));
    auto child = c10::make_intrusive<StreamBackend>(store, mine - ranks.begin(), ranks.size(), opts->timeout,
                                                    std::move(global), true, true);
    child->eagerConnectSingleDevice(at::kCPU);
    return child;
  }
#endif
  bool supportsCoalescing() const override {
    return true;
  }
  void setGroupUid(const std::string& uid) override {
    Backend::setGroupUid(uid);
    g_->uid = uid;
  }
  void setTimeout(Millis timeout) override {
    g_->timeout = timeout;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return g_->seq_collective;
  }
  void enableCollectivesTiming() override {
    g_->timing = true;
  }
  void eagerConnectSingleDevice(at::Device) override {
    eager_ = true;
    comm("cpu", rank_, size_);
  }
  void abort() override {
    g_->terminated = true;
  }
  void shutdown() override {
    host_blocks(driver().comm_finalize, [&] {
      while (!idle() && !device().forked)
        std::this_thread::sleep_for(Millis(1));
      return 1;
    });
    g_->terminated = true;
    g_->wake.notify_all();
  }
  void waitForPendingWorks() override {
    while (!idle())
      std::this_thread::sleep_for(kWatchdogSleep);
  }

  // -- collectives --

  WorkPtr allreduce(Tensors& ts, const c10d::AllreduceOptions& o) override {
    return reduced(ts, o, "nccl:all_reduce", OpType::ALLREDUCE, o.asyncOp);
  }
  WorkPtr allreduce_coalesced(Tensors& ts, const c10d::AllreduceCoalescedOptions& o) override {
    return reduced(ts, o, "nccl:allreduce_coalesced", OpType::COALESCED, o.asyncOp);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    Tensors ts{at::zeros({1}, at::kFloat)};
    auto work = reduced(ts, c10d::AllreduceOptions(), "nccl:all_reduce_barrier", OpType::ALLREDUCE, o.asyncOp);
    if (work) {
      static_cast<StreamWork*>(work.get())->is_barrier = true;  // nccl2 returns it from a synchronous barrier, too
      return work;
    }
    synchronize_current();
    return nullptr;
  }
  WorkPtr broadcast(Tensors& ts, const c10d::BroadcastOptions& o) override {
    auto a = aliases(ts);
    return collective(OpType::BROADCAST, "nccl:broadcast", rank_ == o.rootRank ? ts : Tensors{}, ts, ts, ts, o.asyncOp,
                      bytes_of(ts), [a, o](c10d::Backend& inner, Waits&) mutable {
                        inner.broadcast(a, for_inner(o))->wait();
                      });
  }
  WorkPtr reduce(Tensors& ts, const c10d::ReduceOptions& o) override {
    auto a = aliases(ts);
    const int64_t n = size_;
    return collective(OpType::REDUCE, "nccl:reduce", ts, ts, ts, ts, o.asyncOp, bytes_of(ts),
                      [a, o, n](c10d::Backend& inner, Waits&) mutable {
                        auto i = for_inner(o);
                        const bool mean = o.reduceOp == c10d::ReduceOp::AVG;
                        if (mean)
                          i.reduceOp = c10d::ReduceOp::SUM;
                        inner.reduce(a, i)->wait();
                        if (mean && inner.getRank() == o.rootRank)
                          a[0].div_(n);
                      });
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto a = aliases(in);
    std::vector<Tensors> b{aliases(out[0])};
    return collective(OpType::ALLGATHER, "nccl:all_gather", in, out[0], in, out[0], o.asyncOp, bytes_of(in),
                      [a, b, o](c10d::Backend& inner, Waits&) mutable {
                        inner.allgather(b, a, for_inner(o))->wait();
                      });
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto a = aliases(in);
    Tensors all;
    std::vector<Tensors> b;
    for (auto& list : out) {
      b.push_back(aliases(list));
      all.insert(all.end(), list.begin(), list.end());
    }
    return collective(OpType::COALESCED, "nccl:all_gather_coalesced", in, all, in, all, o.asyncOp, bytes_of(in),
                      [a, b, o](c10d::Backend& inner, Waits&) mutable {
                        for (size_t i = 0; i < a.size(); i++) {
                          std::vector<Tensors> bi{b[i]};
                          Tensors ai{a[i]};
                          inner.allgather(bi, ai, for_inner(o))->wait();
                        }
                      });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    Tensors outs{out}, ins{in};
    return gathered(outs, ins, o, "nccl:_all_gather_base", OpType::_ALLGATHER_BASE);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return gathered(out, in, o, "nccl:all_gather_into_tensor_coalesced", OpType::COALESCED);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    Tensors outs{out}, ins{in};
    return scattered(outs, ins, o, "nccl:_reduce_scatter_base", OpType::_REDUCE_SCATTER_BASE);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return scattered(out, in, o, "nccl:reduce_scatter_tensor_coalesced", OpType::COALESCED);
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
    auto a = aliases(in[0]);
    auto b = aliases(out);
    const int rank = rank_;
    const int64_t n = size_;
    return collective(OpType::REDUCE_SCATTER, "nccl:reduce_scatter", in[0], out, in[0], out, o.asyncOp,
                      bytes_of(in[0]), [a, b, o, rank, n](c10d::Backend& inner, Waits&) mutable {
                        Tensors sum{at::stack(a)};
                        sum_or_mean(inner, sum, o.reduceOp, n);
                        b[0].copy_(sum[0][rank].view_as(b[0]));
                      });
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    auto a = aliases(in);
    std::vector<Tensors> b;
    Tensors all;
    if (!out.empty()) {
      b.push_back(aliases(out[0]));
      all = out[0];
    }
    return collective(OpType::GATHER, "nccl:gather", in, all, in, all, o.asyncOp, bytes_of(in),
                      [a, b, o](c10d::Backend& inner, Waits&) mutable { inner.gather(b, a, for_inner(o))->wait(); });
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    auto b = aliases(out);
    std::vector<Tensors> a;
    Tensors all;
    if (!in.empty()) {
      a.push_back(aliases(in[0]));
      all = in[0];
    }
    return collective(OpType::SCATTER, "nccl:scatter", all, out, all, out, o.asyncOp, bytes_of(out),
                      [a, b, o](c10d::Backend& inner, Waits&) mutable { inner.scatter(b, a, for_inner(o))->wait(); });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& o) override {
    Tensors outs{out}, ins{in};
    auto a = aliases(ins), b = aliases(outs);
    return collective(OpType::ALLTOALL_BASE, "nccl:all_to_all", ins, outs, ins, outs, o.asyncOp, 0,
                      [a, b, o, out_splits, in_splits](c10d::Backend& inner, Waits&) mutable {
                        inner.alltoall_base(b[0], a[0], out_splits, in_splits, for_inner(o))->wait();
                      });
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    auto a = aliases(in), b = aliases(out);
    return collective(OpType::ALLTOALL, "nccl:all_to_all", in, out, in, out, o.asyncOp, 0,
                      [a, b, o](c10d::Backend& inner, Waits&) mutable {
                        std::vector<int64_t> in_n, out_n;
                        Tensors flat;
                        for (auto& t : a) {
                          in_n.push_back(t.numel());
                          flat.push_back(t.reshape({-1}));
                        }
                        int64_t total = 0;
                        for (auto& t : b) {
                          out_n.push_back(t.numel());
                          total += t.numel();
                        }
                        auto from = at::cat(flat);
                        auto to = at::empty({total}, from.options());
                        inner.alltoall_base(to, from, out_n, in_n, for_inner(o))->wait();
                        int64_t at_ = 0;
                        for (auto& t : b) {
                          t.copy_(to.narrow(0, at_, t.numel()).view_as(t));
                          at_ += t.numel();
                        }
                      });
  }

  // gloo's own check, which NCCL does not have: real jobs make it on a gloo group beside
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override {
    comm("monitored", rank_, size_).inner->monitoredBarrier(o, wait_all_ranks);
  }

  // -- messages --

  WorkPtr send(Tensors& ts, int peer, int) override {
    return message(ts, peer, true);
  }
  WorkPtr recv(Tensors& ts, int peer, int) override {
    return message(ts, peer, false);
  }
  WorkPtr recvAnysource(Tensors&, int) override {
    TORCH_CHECK_WITH(NotImplementedError, false, "ProcessGroupNCCL does not support recvAnysource");
  }

  // -- coalescing --

  void startCoalescing() override {
    coalescing_ = kActive;
    coalesced_async_ = false;
    coalesced_ = {};
    last_coalesced_ = nullptr;
  }
  WorkPtr endCoalescing() override {
    auto c = std::move(coalesced_);
    const int state = coalescing_;
    coalescing_ = 0;
    if (c.transfers.empty())
      return last_coalesced_;  // of nccl2: behind the others on its stream
    const bool p2p = state & kP2P;
    auto transfers = c.transfers;
    return launch(OpType::COALESCED, "nccl:coalesced", {}, {}, c.in, c.out, p2p || coalesced_async_, p2p, "cpu",
                  [transfers](c10d::Backend& inner, Waits& waits) {
                    for (auto& t : transfers)
                      t(inner, waits);
                  });
  }

 private:
  static constexpr int kActive = 1, kColl = 2, kP2P = 4;

  static Tensors aliases(const Tensors& ts) {
    Inside guard;
    Tensors out;
    for (const auto& t : ts)
      out.push_back(t.detach());
    return out;
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(g_->mutex);
    return std::all_of(g_->works.begin(), g_->works.end(), [](const auto& w) { return w->isCompleted(); });
  }

  static void sum_or_mean(c10d::Backend& inner, Tensors& ts, const c10d::ReduceOp& op, int64_t n) {
    c10d::AllreduceOptions o;
    const bool mean = op == c10d::ReduceOp::AVG;
    o.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    o.timeout = kForever;
    for (auto& t : ts) {
      Tensors one{t};
      inner.allreduce(one, o)->wait();
      if (mean)
        t.div_(n);
    }
  }

  WorkPtr reduced(Tensors& ts, const c10d::AllreduceOptions& o, const char* title, OpType op, bool async) {
    auto a = aliases(ts);
    const int64_t n = size_;
    return collective(op, title, ts, ts, ts, ts, async, bytes_of(ts), [a, o, n](c10d::Backend& inner, Waits&) mutable {
      sum_or_mean(inner, a, o.reduceOp, n);
    });
  }

  WorkPtr gathered(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o, const char* title, OpType op) {
    auto a = aliases(in), b = aliases(out);
    return collective(op, title, in, out, in, out, o.asyncOp, bytes_of(in), [a, b, o](c10d::Backend& inner, Waits&) {
      for (size_t i = 0; i < a.size(); i++) {
        auto from = a[i], to = b[i];
        inner._allgather_base(to, from, for_inner(o))->wait();
      }
    });
  }

  WorkPtr scattered(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o, const char* title, OpType op) {
    auto a = aliases(in), b = aliases(out);
    const int64_t n = size_;
    return collective(op, title, in, out, in, out, o.asyncOp, bytes_of(in),
                      [a, b, o, n](c10d::Backend& inner, Waits&) {
                        for (size_t i = 0; i < a.size(); i++) {
                          Tensors sum{a[i].clone()};
                          sum_or_mean(inner, sum, o.reduceOp, n);
                          b[i].copy_(sum[0].reshape({n, -1})[inner.getRank()].view_as(b[i]));
                        }
                      });
  }

  // The communicator of `key`, made by the first operation that needs it. `deferred`: by the device's thread.
  Comm& comm(const std::string& key, int rank, int size, bool deferred = false) {
    std::lock_guard<std::mutex> lock(comms_mutex_);
    auto it = comms_.find(key);
    if (it != comms_.end())
      return *it->second;
    // never destroyed: the threads of gloo and of the stream use it until the process ends. Its own connection to the
    // store: the communicators of pairs are made at the same time, and a store's client serves one wait after the other
    auto* c = new Comm{key, rank, size, store_->clone()};
    if (!deferred)
      host_connects(*c);
    comms_[key] = c;
    if (!nccl2_) {  // whose recorder is FlightRecorderHook's
      Recorder::get()->record_accelerator_version("2.27.3");
      Recorder::get()->record_pg_ranks(g_->name(), ranks_);
    }
    return *c;
  }

  static void host_connects(Comm& c) {
    std::exception_ptr failed;
    host_blocks(driver().comm_init, [&] {
      try {
        c.connect();
      } catch (...) {
        failed = std::current_exception();
      }
      return 1;
    });
    if (failed)
      std::rethrow_exception(failed);
  }

  // `in`, `out`: for the flight recorder; `reads`, `writes`: what the kernel uses
  WorkPtr collective(OpType op, const char* title, const Tensors& in, const Tensors& out, const Tensors& reads,
                     const Tensors& writes, bool async, int64_t bytes, Transfer transfer) {
    g_->desc = pg_desc_;
    check_tensors(reads);
    check_tensors(writes);
    if (!(coalescing_ & kActive) || !(coalescing_ & kColl) || nccl2_)
      g_->seq_collective++;
    g_->op_id++;
    const int64_t kind = static_cast<int64_t>(op);
    Transfer checked = [transfer, kind, bytes](c10d::Backend& inner, Waits& waits) {
      if (compare(inner, kind, bytes))
        transfer(inner, waits);
    };
    if (nccl2_) {  // which groups nothing but messages
      auto work = launch(op, title, in, out, reads, writes, async, false, "cpu", checked);
      if (coalescing_ & kActive)
        last_coalesced_ = work;
      return work;
    }
    if (coalescing_ & kActive) {
      coalescing_ |= kColl;
      coalesced_async_ |= async;
      comm("cpu", rank_, size_);
      if (!capturing)
        record(g_, title, in, out, nullptr, nullptr, false);
      coalesce(reads, writes, checked);
      return nullptr;
    }
    return launch(op, title, in, out, reads, writes, async, false, "cpu", checked);
  }

  WorkPtr message(Tensors& ts, int peer, bool sends) {
    g_->desc = pg_desc_;
    check_tensors(ts);
    const bool batch = coalescing_ & kActive;
    const std::string title =
        sends ? c10::str("nccl:send ", rank_, "->", peer) : c10::str("nccl:recv ", rank_, "<-", peer);
    const std::string key =
        batch || eager_ ? "cpu" : c10::str(std::min(rank_, peer), ":", std::max(rank_, peer));
    if (key != "cpu")
      comm(key, rank_ < peer ? 0 : 1, 2, !pairs_block);
    if (!batch || !(coalescing_ & kP2P))
      g_->seq_p2p++;
    g_->op_id++;
    auto a = aliases(ts);
    const int to = key == "cpu" ? peer : (rank_ < peer ? 1 : 0);
    Transfer transfer = sends ? sending(a, to) : receiving(a, to);
    if (batch) {
      coalescing_ |= kP2P;
      comm("cpu", rank_, size_);
      if (!capturing && !nccl2_)
        record(g_, title, ts, {}, nullptr, nullptr, true);
      coalesce(sends ? ts : Tensors{}, sends ? Tensors{} : ts, transfer);
      if (nccl2_)
        return c10::make_intrusive<CompletedWork>(rank_, sends ? OpType::SEND : OpType::RECV);
      return nullptr;
    }
    return launch(sends ? OpType::SEND : OpType::RECV, title, ts, {}, sends ? ts : Tensors{}, sends ? Tensors{} : ts,
                  true, true, key, transfer);
  }

  static Transfer sending(Tensors a, int to) {
    return [a, to](c10d::Backend& inner, Waits& waits) {
      const bool buffered = bytes_of(a) <= eager_bytes;
      Tensors head{at::tensor({bytes_of(a)}, at::kLong)}, body{buffered ? a[0].clone() : a[0]};
      auto first = inner.send(head, to, 1), second = inner.send(body, to, 0);
      if (buffered) {  // the message waits in a buffer, not in the stream
        auto* kept = new std::tuple<Tensors, Tensors, WorkPtr, WorkPtr>(head, body, first, second);
        std::thread([kept] {
          inside = true;
          try {
            std::get<2>(*kept)->wait(kForever);
            std::get<3>(*kept)->wait(kForever);
            delete kept;
          } catch (const std::exception&) {  // the peer is gone
          }
        }).detach();
        return;
      }
      waits.emplace_back([head, body, first, second] {
        first->wait(kForever);
        second->wait(kForever);
      });
    };
  }

  static Transfer receiving(Tensors a, int from) {
    return [a, from](c10d::Backend& inner, Waits& waits) {
      Tensors head{at::zeros({1}, at::kLong)};
      auto first = inner.recv(head, from, 1);
      waits.emplace_back([a, from, head, first, &inner]() mutable {
        first->wait(kForever);
        TORCH_CHECK(head[0].item<int64_t>() == bytes_of(a), "the message has another size");
        inner.recv(a, from, 0)->wait(kForever);
      });
    };
  }

  void coalesce(const Tensors& reads, const Tensors& writes, Transfer t) {
    coalesced_.in.insert(coalesced_.in.end(), reads.begin(), reads.end());
    coalesced_.out.insert(coalesced_.out.end(), writes.begin(), writes.end());
    coalesced_.transfers.push_back(std::move(t));
  }

  WorkPtr launch(OpType op, const std::string& title, const Tensors& in, const Tensors& out, const Tensors& reads,
                 const Tensors& writes, bool async, bool p2p, const std::string& key, Transfer transfer) {
    auto& c = comm(key, rank_, size_);
    auto kernel = std::make_shared<Kernel>();
    for (const auto& t : aliases(reads))
      kernel->tensors.emplace_back(t, false);
    for (const auto& t : aliases(writes))
      kernel->tensors.emplace_back(t, true);
    auto* of = &c;
    kernel->run = [of, transfer] {
      at::NoGradGuard no_grad;
      if (!of->inner)
        of->connect();
      Waits waits;
      transfer(*of->inner, waits);
      for (auto& w : waits)
        w();
    };
    auto work = c10::make_intrusive<StreamWork>(g_, op, p2p);
    work->kernel = kernel;
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    work->future->markCompleted(at::IValue(writes));
    work->outputs = writes;
    if (capturing) {
      capturing->kernels.push_back({c.stream, kernel->run, kernel->tensors});
      kernel->end.record();  // not an event that may be queried; nobody waits for it
      return async || nccl2_ ? work : nullptr;
    }
    work->numel_in = elements_of(in);
    work->numel_out = elements_of(out);
    if (!nccl2_)
      work->trace = record(g_, title, in, out, g_->timing ? &kernel->start : nullptr, &kernel->end, p2p);
    if (g_->blocking_wait && !nccl2_)
      new KernelPtr(kernel);  // no watchdog retires the entry, which points to its events
    c.stream->launch(kernel, !async);
    enqueue(work);
    return async || nccl2_ ? work : nullptr;
  }

  struct Coalesced {
    std::vector<Transfer> transfers;
    Tensors in, out;
  };

  GroupPtr g_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<uint64_t> ranks_;
  bool eager_;
  const bool nccl2_;
  int n_splits_ = 0;
  std::mutex comms_mutex_;
  std::map<std::string, Comm*> comms_;
  int coalescing_ = 0;
  bool coalesced_async_ = false;
  Coalesced coalesced_;
  WorkPtr last_coalesced_;
};

// -- Python -----------------------------------------------------------------------------------------------------

static void load_driver(const std::string& folder) {
  auto open = [&](const char* name) {
    void* library = dlopen((folder + "/" + name).c_str(), RTLD_NOW | RTLD_GLOBAL);
    TORCH_CHECK(library, "cannot load ", name, ": ", dlerror());
    return library;
  };
  open("libcuda.so.1");
  void* runtime = open("libcudart.so.12");
  void* nccl = open("libnccl.so.2");
  driver().synchronize = reinterpret_cast<Blocking>(dlsym(runtime, "cudaStreamSynchronize"));
  driver().launch = reinterpret_cast<Blocking>(dlsym(runtime, "cudaLaunchKernel"));
  driver().comm_init = reinterpret_cast<Blocking>(dlsym(nccl, "ncclCommInitRankConfig"));
  driver().comm_split = reinterpret_cast<Blocking>(dlsym(nccl, "ncclCommSplit"));
  driver().comm_finalize = reinterpret_cast<Blocking>(dlsym(nccl, "ncclCommFinalize"));
}

// Methods that read memory past the dispatcher; replaced in C++, so that no Python frame of ours is seen.
static void replace_reads(const py::object& tensor_class) {
  const std::vector<std::pair<const char*, bool>> methods = {
      {"numpy", false}, {"tolist", false}, {"cpu", false}, {"untyped_storage", true}, {"__dlpack__", false}};
  for (const auto& [name, storage] : methods) {
    py::object original = tensor_class.attr(name);
    const bool whole = storage;
    tensor_class.attr(name) = py::cpp_function(
        [original, whole](const py::object& self, const py::args& args, const py::kwargs& kwargs) {
          host_needs(self.cast<at::Tensor>(), whole, whole);
          return original(self, *args, **kwargs);
        },
        py::is_method(tensor_class), py::name(name));
  }
}

// A kernel of the user's that takes its time, on the current stream.
static void busy(const at::Tensor& t, int64_t ms) {
  static auto* compute = new std::shared_ptr<Stream>(Stream::make());
  Inside guard;
  auto kernel = std::make_shared<Kernel>();
  kernel->run = [ms] { std::this_thread::sleep_for(Millis(ms)); };
  kernel->tensors.emplace_back(t.detach(), true);
  (*compute)->launch(kernel, true);
}

// Makes libtorch_cuda, where it is loaded, call `to` for this function: its handlers read NCCL's recorder, which has no
// entry here, and a handler cannot be replaced. Returns the number of places.
static int redirect(const char* symbol, const void* to) {
  std::pair<const char*, const void*> wanted{symbol, to};
  return dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* of) {
        if (!info->dlpi_name || !strstr(info->dlpi_name, "libtorch_cuda.so"))
          return 0;
        auto [symbol, to] = *static_cast<std::pair<const char*, const void*>*>(of);
        const ElfW(Dyn)* dynamic = nullptr;
        for (int i = 0; i < info->dlpi_phnum; i++)
          if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        std::map<ElfW(Sxword), ElfW(Addr)> at;
        for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++)
          at[dynamic->d_tag] = dynamic->d_un.d_ptr;
        const auto* relocations = reinterpret_cast<const ElfW(Rela)*>(at[DT_JMPREL]);
        const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(at[DT_SYMTAB]);
        int found = 0;
        for (size_t i = 0; i < at[DT_PLTRELSZ] / sizeof(ElfW(Rela)); i++) {
          const auto& r = relocations[i];
          if (strcmp(reinterpret_cast<const char*>(at[DT_STRTAB]) + symbols[ELF64_R_SYM(r.r_info)].st_name, symbol))
            continue;
          auto* slot = reinterpret_cast<const void**>(info->dlpi_addr + r.r_offset);
          const uintptr_t page = reinterpret_cast<uintptr_t>(slot) & -sysconf(_SC_PAGESIZE);
          if (mprotect(reinterpret_cast<void*>(page), sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE) == 0)
            *slot = to, found++;
        }
        return found;
      },
      &wanted);
}

static void register_handlers() {
  redirect("_ZN4c10d20dump_nccl_trace_jsonB5cxx11Ebb", reinterpret_cast<const void*>(&dump_json));
  redirect("_ZN4c10d15dump_nccl_traceB5cxx11Ebbb", reinterpret_cast<const void*>(&dump_pickle));
  using namespace c10d::control_plane;
  auto flag = [](const Request& r, const char* name, bool otherwise) {
    const auto v = r.getParam(name);
    return v.empty() ? otherwise : v == "true";
  };
  const auto known = getHandlerNames();
  auto add = [&](const char* name, HandlerFunc f) {
    if (std::find(known.begin(), known.end(), name) == known.end())
      registerHandler(name, std::move(f));
  };
  add("dump_nccl_trace_json", [flag](const Request& q, Response& r) {
    r.setContent(dump_json(flag(q, "includecollectives", true), flag(q, "onlyactive", false)), "application/json");
    r.setStatus(200);
  });
  add("dump_nccl_trace_pickle", [flag](const Request& q, Response& r) {
    r.setContent(dump_pickle(flag(q, "includecollectives", true), flag(q, "includestacktraces", true),
                             flag(q, "onlyactive", false)),
                 "application/octet-stream");
    r.setStatus(200);
  });
}

}  // namespace standin

PYBIND11_MODULE(_stream, m) {
  using namespace standin;
  m.def("install", [](const std::string& folder, int64_t run_ahead, int64_t eager, bool pairs, bool nccl2) {
    load_driver(folder);
    pairs_block = pairs;
    device().run_ahead = run_ahead;
    eager_bytes = eager;
    pthread_atfork(nullptr, nullptr, [] { device().forked = true; });
    at::addGlobalCallback(
        at::RecordFunctionCallback(before_operation).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    if (!nccl2)
      register_handlers();
  });
  m.def("replace_reads", &replace_reads);
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<>())
      .def("replay", &Graph::replay, py::call_guard<py::gil_scoped_release>());
  m.def("busy", &busy);
  m.def("freeze_watchdogs", [](bool frozen) { watchdogs_frozen = frozen; });
  m.def("capture", [](std::shared_ptr<Graph> graph) { capturing = std::move(graph); }, py::arg("graph").none(true));
  py::module_::import("torch._C._distributed_c10d");
  py::class_<StreamBackend, c10d::Backend, c10::intrusive_ptr<StreamBackend>>(m, "StreamBackend")
      .def("perform_nocolor_split", [](StreamBackend& parent, const py::object&) { parent.split_from_all(); })
      .def("split_from_all", &StreamBackend::split_from_all);
  m.def(
      "create",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Millis timeout, std::vector<uint64_t> ranks,
         bool eager, bool nccl2) {
        return c10::make_intrusive<StreamBackend>(store, rank, size, timeout, std::move(ranks), eager, nccl2);
      });
  m.attr("HAS_NCCL2") = bool(STANDIN_NCCL2);
  m.def(
      "drain",
      [](int64_t limit_ms) {
        const auto until = Clock::now() + Millis(limit_ms);
        while (device().in_flight > 0 && Clock::now() < until && !device().forked)
          std::this_thread::sleep_for(Millis(1));
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("dump_json", [](std::optional<bool> collectives, std::optional<bool> only_active) {
    return py::bytes(dump_json(collectives.value_or(true), only_active.value_or(false)));
  }, py::arg("includeCollectives") = py::none(), py::arg("onlyActive") = py::none());
  m.def("dump", [](std::optional<bool> collectives, std::optional<bool> stacks, std::optional<bool> only_active) {
    return py::bytes(dump_pickle(collectives.value_or(true), stacks.value_or(true), only_active.value_or(false)));
  }, py::arg("includeCollectives") = py::none(), py::arg("includeStackTraces") = py::none(),
     py::arg("onlyActive") = py::none());
}
