// CUDA kernels on the CPU, for tests: fibers and their scheduler.
#include "emulation/cuda_on_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace skyrl_fast {

thread_local emulation::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 256 << 10;  // its frames are larger
#else
constexpr size_t kStackBytes = 96 << 10;
#endif

// A stack, and the state that AddressSanitizer keeps for it.
struct Stack {
  const void* bottom = nullptr;
  size_t size = 0;
  void* kept = nullptr;
};
thread_local ucontext_t scheduler;
thread_local Stack scheduler_stack;
thread_local const std::function<void()>* body = nullptr;
thread_local std::exception_ptr failure;
thread_local int64_t progress = 0;  // arrivals and ends: none in a complete round is a deadlock

// Switches from one stack to another; returns when it is switched back to. AddressSanitizer must be
// told, or it uses one stack's bounds for the other. `kept` is null where the stack is left for
// good.
void change(ucontext_t* from, ucontext_t* to, const Stack& target, void** kept) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(kept, target.bottom, target.size);
  swapcontext(from, to);
  __sanitizer_finish_switch_fiber(*kept, nullptr, nullptr);
#else
  static_cast<void>(target);
  static_cast<void>(kept);
  swapcontext(from, to);
#endif
}

void enter() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack.bottom, &scheduler_stack.size);
#endif
  try {
    (*body)();
  } catch (...) {
    failure = std::current_exception();
  }
  now.fiber->done = true;
  ++progress;
  change(&now.fiber->context, &scheduler, scheduler_stack, nullptr);
}

void yield() {
  Fiber* self = now.fiber;
  change(&self->context, &scheduler, scheduler_stack, &self->kept);
}

std::vector<size_t> order_of(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  if (settings().order == 1) std::reverse(order.begin(), order.end());
  if (settings().order > 1) {
    std::mt19937 generator(static_cast<unsigned>(settings().order));
    std::shuffle(order.begin(), order.end(), generator);
  }
  return order;
}

std::vector<Fiber>& fibers() {
  static thread_local std::vector<Fiber> all;
  return all;
}

void start(Fiber* fiber, Block* block, unsigned thread) {
  if (fiber->stack == nullptr) fiber->stack.reset(new char[kStackBytes]);
  fiber->block = block;
  fiber->thread = thread;
  fiber->done = false;
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = &scheduler;
  makecontext(&fiber->context, enter, 0);
}

void resume(Fiber* fiber) {
  now.fiber = fiber;
  threadIdx = {fiber->thread, 0, 0};
  blockIdx = fiber->block->index;
  change(&scheduler, &fiber->context, {fiber->stack.get(), kStackBytes}, &scheduler_stack.kept);
}

Block make_block(const Shape& shape, unsigned x, unsigned y, unsigned rank) {
  Block block;
  block.index = {x, y, 0};
  block.rank = rank;
  block.shared.assign(shape.shared_bytes / sizeof(uint64_t) + 2, ~uint64_t{0});
  block.all.expected = static_cast<int>(shape.threads);
  const unsigned num_warps = (shape.threads + 31) / 32;
  block.warps.resize(num_warps);
  for (unsigned w = 0; w < num_warps; ++w) {
    block.warps[w].expected = static_cast<int>(std::min(32u, shape.threads - 32 * w));
  }
  block.exchange.resize(shape.threads);
  return block;
}

void run_cluster(const Shape& shape, unsigned first_x, unsigned y) {
  Cluster cluster;
  cluster.all.expected = static_cast<int>(shape.cluster * shape.threads);
  for (unsigned rank = 0; rank < shape.cluster; ++rank) {
    cluster.blocks.push_back(make_block(shape, first_x + rank, y, rank));
  }
  now.cluster = &cluster;
  std::vector<Fiber>& all = fibers();
  const size_t count = size_t{shape.cluster} * shape.threads;
  if (all.size() < count) all.resize(count);
  for (size_t i = 0; i < count; ++i) {
    start(&all[i], &cluster.blocks[i / shape.threads], static_cast<unsigned>(i % shape.threads));
  }
  const std::vector<size_t> order = order_of(count);
  size_t num_live = count;
  while (num_live > 0) {
    const int64_t before = progress;
    for (const size_t i : order) {
      if (all[i].done) continue;
      resume(&all[i]);
      if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
      num_live -= all[i].done;
    }
    if (progress == before)
      throw std::runtime_error("emulation: threads wait at a barrier forever");
  }
}

}  // namespace

Settings& settings() {
  static Settings chosen;
  return chosen;
}

thread_local Now now;

int64_t arrive(Barrier* barrier) {
  const int64_t generation = barrier->generation;
  ++progress;
  if (++barrier->arrived == barrier->expected) {
    barrier->arrived = 0;
    ++barrier->generation;
  }
  return generation;
}

void wait_for(const Barrier& barrier, int64_t generation) {
  while (barrier.generation == generation) yield();
}

void wait(Barrier* barrier) { wait_for(*barrier, arrive(barrier)); }

void run(const Shape& shape, const std::function<void()>& thread) {
  constexpr unsigned kMaxGridY = 65535, kMaxThreads = 1024, kMaxCluster = 8;
  constexpr unsigned kMaxShared = 48 << 10;  // without asking for more
  if (shape.grid_x == 0 || shape.grid_x > 0x7fffffffu || shape.grid_y == 0 ||
      shape.grid_y > kMaxGridY || shape.threads == 0 || shape.threads > kMaxThreads ||
      shape.shared_bytes > kMaxShared || shape.cluster == 0 || shape.cluster > kMaxCluster ||
      shape.grid_x % shape.cluster != 0 || (shape.cluster > 1 && settings().compute_major < 9)) {
    throw std::runtime_error("emulation: a device would refuse this launch");
  }
  settings().num_launches += 1;
  settings().last_grid_x = shape.grid_x;
  settings().last_grid_y = shape.grid_y;
  settings().last_cluster = shape.cluster;
  blockDim = {shape.threads, 1, 1};
  gridDim = {shape.grid_x, shape.grid_y, 1};
  body = &thread;
  const size_t clusters_x = shape.grid_x / shape.cluster;
  for (const size_t i : order_of(clusters_x * shape.grid_y)) {
    run_cluster(shape, static_cast<unsigned>(i % clusters_x) * shape.cluster,
                static_cast<unsigned>(i / clusters_x));
  }
}

float exchanged(float value, unsigned lane) {
  constexpr unsigned kWarp = 32;
  Block* block = now.fiber->block;
  const unsigned thread = now.fiber->thread;
  Barrier* warp = &block->warps[thread / kWarp];
  block->exchange[thread] = value;
  wait(warp);
  const float other = block->exchange[thread / kWarp * kWarp + lane];
  wait(warp);
  return other;
}

void check_aligned(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
    throw std::runtime_error("emulation: a misaligned access of " + std::to_string(bytes) +
                             " bytes");
  }
}

char* aligned_shared(Block* block) {
  constexpr uintptr_t kBytes = 16;
  const uintptr_t first = reinterpret_cast<uintptr_t>(block->shared.data());
  return reinterpret_cast<char*>((first + kBytes - 1) / kBytes * kBytes);
}

float rough_exp2(float x) {
  const float exact = std::exp2(x);
  if (exact < std::numeric_limits<float>::min()) return 0.0f;
  if (x == 0.0f || !std::isfinite(exact)) return exact;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t hash = bits * 2654435761u >> 16;  // Knuth's multiplier; its high bits are mixed
  std::memcpy(&bits, &exact, sizeof(bits));
  bits += hash % 5;  // -2 to 2 units in the last place
  bits -= 2;
  float rough;
  std::memcpy(&rough, &bits, sizeof(rough));
  return rough;
}

}  // namespace emulation
}  // namespace skyrl_fast
