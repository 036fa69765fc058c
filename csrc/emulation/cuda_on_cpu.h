// CUDA kernels on the CPU, for tests: the threads of a block (of a cluster, where there is one) are
// fibers of one thread, which switch at barriers and shuffles. Not part of any installed build:
// sources see it where SKYRL_FAST_EMULATE_CUDA is defined.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace skyrl_fast {
namespace emulation {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// Threads wait until `expected` of them have arrived. A thread that ends without arriving leaves
// the others waiting, which is reported as a deadlock.
struct Barrier {
  int expected = 0, arrived = 0;
  int64_t generation = 0;
};

struct Block {
  Index index;
  unsigned rank = 0;
  std::vector<uint64_t> shared;  // 8-byte words, filled with NaN
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<float> exchange;  // one value per thread, for shuffles
};

struct Cluster {
  std::vector<Block> blocks;
  Barrier all;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  void* kept = nullptr;  // AddressSanitizer's, while another fiber runs
  Block* block = nullptr;
  unsigned thread = 0;
  bool done = false;
};

// Settings of a test: the order in which threads and blocks run, and the emulated device.
struct Settings {
  int order = 0;  // 0 forward, 1 backward, else the seed of a random order
  int compute_major = 9;
  int64_t num_launches = 0;
  unsigned last_grid_x = 0, last_grid_y = 0, last_cluster = 0;
};
Settings& settings();

// The current fiber.
struct Now {
  Fiber* fiber = nullptr;
  Cluster* cluster = nullptr;
};
extern thread_local Now now;

void wait(Barrier* barrier);
int64_t arrive(Barrier* barrier);
void wait_for(const Barrier& barrier, int64_t generation);

struct Shape {
  unsigned grid_x = 1, grid_y = 1, threads = 1, shared_bytes = 0, cluster = 1;
};
void run(const Shape& shape, const std::function<void()>& thread);

// The value that a lane of the thread's warp calls it with; all of its threads call it.
float exchanged(float value, unsigned lane);

void check_aligned(const void* p, size_t bytes);

// A block's shared memory, from its first 16-byte boundary.
char* aligned_shared(Block* block);

// 2^x with the errors that the device's ex2.approx.ftz may have: 0 below the normal floats, else up
// to two units in the last place, the same for the same x.
float rough_exp2(float x);

}  // namespace emulation

// --- What kernels are written with ---------------------------------------------------------------

extern thread_local emulation::Index threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() { emulation::wait(&emulation::now.fiber->block->all); }

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

}  // namespace skyrl_fast
