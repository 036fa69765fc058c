// Threads of loops: torch's, or those of a pool, which start when a loop first needs them and sleep
// between loops.
#include "core/parallel.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#define SKYRL_POSIX 1
#endif

namespace skyrl_fast {
namespace {

// A sleeping thread takes some 25 us to wake up, so waiting threads spin before they sleep: a
// caller for its last part, a pool thread for the next loop (one op often runs two in a row).
constexpr std::chrono::microseconds kCallerSpin{100}, kThreadSpin{50};

struct Loop {
  RunPart run;
  const void* context;
  int64_t num_parts;
  int64_t begun = 1;                 // the first is the caller's; guarded by the pool's mutex
  std::atomic<int64_t> finished{0};  // the last increment is the last access to the loop
};

class ThreadPool {
 public:
  void run(Loop* loop) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start_threads(loop->num_parts - 1);
      open_.push_back(loop);
      num_open_.store(static_cast<int64_t>(open_.size()), std::memory_order_relaxed);
    }
    for (int64_t others = 1; others < loop->num_parts; ++others) work_.notify_one();
    for (int64_t part = 0; part >= 0; part = take(loop)) {
      loop->run(loop->context, part);
      loop->finished.fetch_add(1, std::memory_order_release);
    }
    wait(*loop);
  }

 private:
  // The next part of the loop, or -1 when all have begun. A loop leaves the queue with its last
  // part.
  int64_t take(Loop* loop) {
    std::lock_guard<std::mutex> lock(mutex_);
    return take_locked(loop);
  }

  int64_t take_locked(Loop* loop) {
    if (loop->begun == loop->num_parts) return -1;
    const int64_t part = loop->begun++;
    if (loop->begun == loop->num_parts) {
      open_.erase(std::find(open_.begin(), open_.end(), loop));
      num_open_.store(static_cast<int64_t>(open_.size()), std::memory_order_relaxed);
    }
    return part;
  }

  void wait(const Loop& loop) {
    const auto done = [&] {
      return loop.finished.load(std::memory_order_acquire) == loop.num_parts;
    };
    const auto until = std::chrono::steady_clock::now() + kCallerSpin;
    while (!done()) {
      if (std::chrono::steady_clock::now() < until) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      finished_.wait(lock, done);
    }
  }

  void start_threads(int64_t wanted) {
    for (; num_threads_ < wanted; ++num_threads_) {
      if (!start_thread()) return;  // no thread available: the callers do the work
    }
  }

  bool start_thread() {
#if defined(SKYRL_POSIX)
    sigset_t all, before;  // signals are left to the interpreter's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    bool started = true;
    try {
      std::thread([this] { serve(); }).detach();
    } catch (...) {
      started = false;
    }
#if defined(SKYRL_POSIX)
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
    return started;
  }

  void serve() {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "skyrl_fast");
#endif
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return !open_.empty(); });
      Loop* loop = open_.front();
      const int64_t part = take_locked(loop);
      const int64_t num_parts = loop->num_parts;
      lock.unlock();
      loop->run(loop->context, part);
      const bool last = loop->finished.fetch_add(1, std::memory_order_release) + 1 == num_parts;
      if (last) {
        lock.lock();  // by now a waiter has seen the count or sleeps
        lock.unlock();
        finished_.notify_all();
      }
      spin_for_work();
      lock.lock();
    }
  }

  void spin_for_work() const {
    const auto until = std::chrono::steady_clock::now() + kThreadSpin;
    while (num_open_.load(std::memory_order_relaxed) == 0) {
      if (std::chrono::steady_clock::now() >= until) return;
    }
  }

  std::mutex mutex_;
  std::condition_variable work_, finished_;
  std::deque<Loop*> open_;  // loops with parts that have not begun
  std::atomic<int64_t> num_open_{0};
  int64_t num_threads_ = 0;
};

// Never destroyed: its threads may still access it while the process exits.
std::atomic<ThreadPool*> pool{nullptr};

std::atomic<bool> is_forked{false};

#if defined(SKYRL_POSIX)
// A forked child has none of the threads, and its copy may be locked: it starts a new pool.
[[maybe_unused]] const int kForgetsInChildren = pthread_atfork(nullptr, nullptr, [] {
  is_forked.store(true, std::memory_order_release);
  pool.store(nullptr, std::memory_order_release);
});
#endif

ThreadPool& thread_pool() {
  ThreadPool* current = pool.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  auto* made = new ThreadPool();
  if (pool.compare_exchange_strong(current, made, std::memory_order_acq_rel)) return *made;
  delete made;  // another thread was first
  return *current;
}

// The OpenMP threads of torch's loops. They spin for a moment after each loop, so that a pool of
// ours, between two operations of torch, would share the cores with them.
class TorchThreads {
 public:
  TorchThreads() {
#if defined(SKYRL_POSIX)
    parallel_ = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    count_ = reinterpret_cast<Count>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
#endif
  }

  // Only for loops with a part for each of them: libgomp recreates threads when the size of a team
  // changes. In a forked child, which has no such threads, the loop would hang.
  bool suit(int64_t num_parts) const {
    return parallel_ != nullptr && count_ != nullptr && count_() == num_parts &&
           !is_forked.load(std::memory_order_acquire);
  }

  void run(int64_t num_parts, RunPart run, const void* context) const {
    Parts parts{run, context, num_parts};
    parallel_([](void* parts) { static_cast<Parts*>(parts)->run_some(); }, &parts, 0, 0);
  }

 private:
  using Parallel = void (*)(void (*run)(void*), void* data, unsigned num_threads, unsigned flags);
  using Count = int (*)();

  struct Parts {
    RunPart run;
    const void* context;
    int64_t count;
    std::thread::id caller = std::this_thread::get_id();
    std::atomic<int64_t> next{1};

    void run_some() {
      if (std::this_thread::get_id() == caller) run(context, 0);
      for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        run(context, part);
      }
    }
  };

  Parallel parallel_ = nullptr;
  Count count_ = nullptr;
};

}  // namespace

void run_parts(int64_t num_parts, RunPart run, const void* context) {
  if (num_parts <= 1) return num_parts == 1 ? run(context, 0) : void();
  static const TorchThreads torch_threads;
  if (torch_threads.suit(num_parts)) return torch_threads.run(num_parts, run, context);
  Loop loop{run, context, num_parts};
  thread_pool().run(&loop);
}

}  // namespace skyrl_fast
