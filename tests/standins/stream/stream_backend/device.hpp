// The "device": one thread per communicator runs its kernels in order, a current stream orders them among each other,
// and the host blocks where it touches a tensor that a kernel has not finished with.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/util/thread_name.h>
#include <dlfcn.h>
#include <pthread.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace standin {

using Clock = std::chrono::steady_clock;

// What the flight recorder asks: has it happened?
struct Event {
  std::atomic<bool> happened{false};
  Clock::time_point at;
  bool query() const {
    return happened.load(std::memory_order_acquire);
  }
  void record() {
    at = Clock::now();
    happened.store(true, std::memory_order_release);
  }
};

struct Kernel {
  std::function<void()> run;  // on the communicator's thread; returns when the transfer is complete
  std::vector<std::shared_ptr<Kernel>> after;
  std::vector<std::pair<at::Tensor, bool>> tensors;  // (alias, written); aliases have no Python object
  Event start, end;
};
using KernelPtr = std::shared_ptr<Kernel>;

// The bytes of a storage that a kernel reads or writes.
struct Use {
  KernelPtr kernel;
  bool written;
  const char *from, *to;
};

// First byte and end of what a tensor can reach through its strides.
inline std::pair<const char*, const char*> extent(const at::Tensor& t) {
  const char* from = static_cast<const char*>(t.const_data_ptr());
  int64_t elements = t.numel() == 0 ? 0 : 1;
  for (int64_t i = 0; i < t.dim() && elements; i++)
    elements += (t.size(i) - 1) * t.stride(i);
  return {from, from + elements * static_cast<int64_t>(t.element_size())};
}

struct Device {
  std::mutex mutex;
  std::condition_variable completed;
  std::atomic<int> in_flight{0};
  std::unordered_map<const void*, std::vector<Use>> uses;  // by storage
  std::vector<KernelPtr> current;  // what the current stream is behind
  std::atomic<int64_t> launched{0};  // host operations since the current stream was last empty
  int64_t run_ahead = 1024;
  std::atomic<bool> forked{false};
};

inline Device& device() {
  static Device* d = new Device();  // never destroyed: detached threads use it until the process ends
  return *d;
}

inline thread_local bool inside = false;  // the stand-in's own tensor operations are not the user's

struct Inside {
  bool before = inside;
  Inside() {
    inside = true;
  }
  ~Inside() {
    inside = before;
  }
};

// -- the host waits ---------------------------------------------------------------------------------------------

struct Wait {
  int (*done)(void*);
  void* of;
};
using Blocking = int (*)(Wait*);
struct Driver {
  Blocking synchronize = nullptr, launch = nullptr, comm_init = nullptr, comm_split = nullptr, comm_finalize = nullptr;
};
inline Driver& driver() {
  static Driver* d = new Driver();
  return *d;
}

// Calls `blocking` of the driver library until `done`, without the GIL.
template <typename F>
void host_blocks(Blocking blocking, F done) {
  Wait wait{[](void* f) { return static_cast<int>((*static_cast<F*>(f))()); }, &done};
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release release;
    blocking(&wait);
  } else {
    blocking(&wait);
  }
}

inline void wait_for(const std::vector<KernelPtr>& kernels, Blocking blocking) {
  for (const auto& k : kernels)
    if (!k->end.query())
      host_blocks(blocking, [&k] { return k->end.query() || device().forked.load(); });
}

// Kernels the current stream is behind and that still run; call with the lock held.
inline const std::vector<KernelPtr>& pending_of_current() {
  auto& c = device().current;
  c.erase(std::remove_if(c.begin(), c.end(), [](const KernelPtr& k) { return k->end.query(); }), c.end());
  return c;
}

inline std::vector<KernelPtr> current_stream() {
  std::lock_guard<std::mutex> lock(device().mutex);
  return pending_of_current();
}

// cudaStreamSynchronize(current stream)
inline void synchronize_current() {
  wait_for(current_stream(), driver().synchronize);
}

// Event.block(current stream): what is launched from now on comes after `k`; the host goes on.
inline void current_waits_for(const KernelPtr& k) {
  std::lock_guard<std::mutex> lock(device().mutex);
  auto& c = device().current;
  if (!k->end.query() && std::find(c.begin(), c.end(), k) == c.end())
    c.push_back(k);
}

// Kernels in flight that `t` must come behind: those that write it, and where it `writes`, those that read it.
inline std::vector<KernelPtr> conflicting(const at::Tensor& t, bool writes, bool whole_storage = false) {
  std::vector<KernelPtr> found;
  if (!t.defined() || !t.has_storage())
    return found;
  std::lock_guard<std::mutex> lock(device().mutex);
  auto it = device().uses.find(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (it == device().uses.end())
    return found;
  const auto [from, to] = extent(t);
  for (const auto& u : it->second)
    if ((writes || u.written) && (whole_storage || (u.from < to && from < u.to)))
      found.push_back(u.kernel);
  return found;
}

// Blocks until the host may read `t` (or write it).
inline void host_needs(const at::Tensor& t, bool writes, bool whole_storage = false) {
  auto& d = device();
  if (d.in_flight.load(std::memory_order_acquire) == 0 || d.forked.load())
    return;
  Inside guard;
  wait_for(conflicting(t, writes, whole_storage), driver().synchronize);
}

// -- every operation of the host ----------------------------------------------------------------------------------

struct Effect {
  bool skip = false;  // a view, or a query of metadata: reads no element
  std::vector<bool> writes;  // by argument
};

inline Effect effect_of(const at::RecordFunction& fn) {
  Effect e;
  const std::string name = fn.name();
  const std::string op = name.substr(name.find("::") == std::string::npos ? 0 : name.find("::") + 2);
  auto starts = [&](const char* prefix) { return name.rfind(prefix, 0) == 0; };
  static const std::vector<std::string> metadata = {
      "to", "contiguous", "reshape", "resolve_conj", "resolve_neg", "flatten", "lift_fresh", "empty_like",
      "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "view_as", "reshape_as", "expand_as",
      "type_as", "record_stream", "_has_compatible_shallow_copy_type", "is_same_size", "_version", "set_data",
      "requires_grad_", "retain_grad", "data", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset"};
  if (!starts("aten::") || op.rfind("new_", 0) == 0 ||
      std::find(metadata.begin(), metadata.end(), op) != metadata.end()) {
    e.skip = starts("aten::") || starts("c10d::") || starts("_c10d_functional::");
    return e;
  }
  auto schema = c10::Dispatcher::singleton().findSchema({name, fn.overload_name()});
  if (!schema)
    return e;
  bool writes = false, aliases = false;
  for (const auto& a : schema->schema().arguments()) {
    const bool w = a.alias_info() != nullptr && a.alias_info()->isWrite();
    e.writes.push_back(w);
    writes |= w;
  }
  for (const auto& r : schema->schema().returns())
    aliases |= r.alias_info() != nullptr && !r.alias_info()->isWrite();
  e.skip = aliases && !writes;
  return e;
}

inline const Effect& cached_effect(const at::RecordFunction& fn) {
  static thread_local std::unordered_map<std::string, Effect> known;
  std::string key = std::string(fn.name()) + "." + fn.overload_name();
  auto it = known.find(key);
  if (it == known.end())
    it = known.emplace(std::move(key), effect_of(fn)).first;
  return it->second;
}

inline void tensors_of(const c10::IValue& v, std::vector<at::Tensor>& out) {
  if (v.isTensor())
    out.push_back(v.toTensor());
  else if (v.isTensorList())
    for (const at::Tensor& t : v.toTensorList())
      out.push_back(t);
  else if (v.isList())
    for (const auto& i : v.toListRef())
      if (i.isTensor())
        out.push_back(i.toTensor());
}

// gloo's own threads: they are part of the device.
inline bool of_gloo() {
  static thread_local const bool is = c10::getThreadName().rfind("pt_gloo", 0) == 0;
  return is;
}

inline std::unique_ptr<at::ObserverContext> before_operation(const at::RecordFunction& fn) {
  auto& d = device();
  if (d.in_flight.load(std::memory_order_acquire) == 0 || inside || d.forked.load() || of_gloo())
    return nullptr;
  const Effect& effect = cached_effect(fn);
  if (effect.skip)
    return nullptr;
  Inside guard;
  const auto inputs = fn.inputs();
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < inputs.size(); i++) {
    tensors.clear();
    tensors_of(inputs[i], tensors);
    const bool writes = i >= effect.writes.size() || effect.writes[i];
    for (const auto& t : tensors)
      wait_for(conflicting(t, writes), driver().synchronize);
  }
  auto behind = current_stream();
  if (behind.empty())
    d.launched = 0;
  else if (++d.launched > d.run_ahead) {
    wait_for(behind, driver().launch);  // the queue of launches is full
    d.launched = 0;
  }
  return nullptr;
}

// -- streams --------------------------------------------------------------------------------------------------------

// The queue of one communicator: NCCL runs its kernels in the order in which the host issued them.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  static std::shared_ptr<Stream> make() {
    auto s = std::make_shared<Stream>();
    std::thread([s] { s->loop(); }).detach();
    return s;
  }

  // Queues `k` behind `after`. `on_current`: a synchronous operation, which later ones of any group come behind.
  void launch(const KernelPtr& k, bool on_current) {
    auto& d = device();
    std::vector<KernelPtr> behind;
    for (auto& [t, written] : k->tensors)
      for (auto& other : conflicting(t, written))
        behind.push_back(other);
    {
      std::lock_guard<std::mutex> lock(d.mutex);
      k->after = pending_of_current();
      k->after.insert(k->after.end(), behind.begin(), behind.end());
      for (auto& [t, written] : k->tensors) {
        const auto [from, to] = extent(t);
        d.uses[t.storage().unsafeGetStorageImpl()].push_back({k, written, from, to});
      }
      d.in_flight++;
      if (on_current)
        d.current = {k};  // it is behind all the others itself
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(k);
    }
    ready_.notify_one();
  }

  std::atomic<bool> broken{false};

 private:
  void loop() {
    c10::setThreadName("standin_stream");
    inside = true;
    auto& d = device();
    while (true) {
      KernelPtr k;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        ready_.wait(lock, [&] { return !queue_.empty(); });
        k = queue_.front();
        queue_.pop_front();
      }
      {
        std::unique_lock<std::mutex> lock(d.mutex);
        d.completed.wait(lock, [&] {
          return std::all_of(k->after.begin(), k->after.end(), [](const KernelPtr& a) { return a->end.query(); });
        });
        k->after.clear();
      }
      k->start.record();
      try {
        k->run();
      } catch (const std::exception& e) {
        broken = true;
        if (getenv("STANDIN_VERBOSE"))
          fprintf(stderr, "stand-in: kernel never completes: %s\n", e.what());
        return;  // a peer is gone or calls something else: within a node NCCL notices nothing, and the kernel spins
      }
      finish(k);
    }
  }

  static void finish(const KernelPtr& k) {
    auto& d = device();
    std::vector<std::pair<at::Tensor, bool>> tensors;
    {
      std::lock_guard<std::mutex> lock(d.mutex);
      for (auto& [t, written] : k->tensors) {
        auto it = d.uses.find(t.storage().unsafeGetStorageImpl());
        if (it == d.uses.end())
          continue;
        auto& u = it->second;
        u.erase(std::remove_if(u.begin(), u.end(), [&](auto& p) { return p.kernel == k; }), u.end());
        if (u.empty())
          d.uses.erase(it);
      }
      tensors.swap(k->tensors);
      k->end.record();
      d.in_flight--;
    }
    d.completed.notify_all();
    k->run = nullptr;
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<KernelPtr> queue_;
};

}  // namespace standin
