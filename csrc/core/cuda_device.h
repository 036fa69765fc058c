// Device code for kernels: launches, 16-byte accesses, shuffles, shared memory, clusters of blocks.
// Included only by the sources of kernels, compiled by nvcc, or by a C++ compiler in tests.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/tensor.h"
#if !defined(SKYRL_FAST_EMULATE_CUDA)
#include <cuda_runtime.h>

#include <atomic>
#endif

namespace skyrl_fast {

constexpr int kWarp = 32;
constexpr int kVectorBytes = 16;
constexpr int64_t kMaxGridX = 0x7fffffff;

struct alignas(kVectorBytes) Vector {
  uint32_t word[4];
};

struct Launch {
  int64_t grid_x = 1, grid_y = 1;
  int threads = 1;
  int shared_bytes = 0;
  // Adjacent blocks of x that share memory; above 1 only on compute capability 9 or higher.
  int cluster = 1;
  cudaStream_t stream = nullptr;
};

inline void check_grid(const char* op, const Launch& l) {
  constexpr int64_t kMaxGridY = 65535;
  if (l.grid_x > kMaxGridX || l.grid_y > kMaxGridY) {
    throw std::invalid_argument(std::string(op) + ": too many rows for one launch, got a grid of " +
                                std::to_string(l.grid_x) + " x " + std::to_string(l.grid_y));
  }
}

// The major compute capability of the code that runs `kernel` on the current device. Where the
// driver compiled it from PTX of an older architecture, it is lower than the device's: such code
// has no clusters.
#if defined(SKYRL_FAST_EMULATE_CUDA)

template <typename... P>
int code_major(void (*)(P...)) {
  return emulation::settings().compute_major;
}

template <typename... P, typename... A>
void launch(const char* op, const Launch& l, void (*kernel)(P...), A... arguments) {
  check_grid(op, l);
  emulation::Shape shape;
  shape.grid_x = static_cast<unsigned>(l.grid_x);
  shape.grid_y = static_cast<unsigned>(l.grid_y);
  shape.threads = static_cast<unsigned>(l.threads);
  shape.shared_bytes = static_cast<unsigned>(l.shared_bytes);
  shape.cluster = static_cast<unsigned>(l.cluster);
  emulation::run(shape, [&] { kernel(arguments...); });
}

inline Vector load_vector(const void* p) {
  emulation::check_aligned(p, kVectorBytes);
  Vector v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline Vector load_vector_once(const void* p) { return load_vector(p); }
inline void store_vector(void* p, const Vector& v) {
  emulation::check_aligned(p, kVectorBytes);
  std::memcpy(p, &v, sizeof(v));
}

inline float shuffle_xor(float value, int lane_mask) {
  const unsigned lane = emulation::now.fiber->thread % kWarp;
  return emulation::exchanged(value, lane ^ static_cast<unsigned>(lane_mask));
}

inline double shuffle_xor(double value, int lane_mask) {
  float halves[2];
  std::memcpy(halves, &value, sizeof(halves));
  for (float& half : halves) half = shuffle_xor(half, lane_mask);
  std::memcpy(&value, halves, sizeof(halves));
  return value;
}

inline double shuffle(double value, int lane) {
  float halves[2];
  std::memcpy(halves, &value, sizeof(halves));
  for (float& half : halves) half = emulation::exchanged(half, static_cast<unsigned>(lane));
  std::memcpy(&value, halves, sizeof(halves));
  return value;
}

inline int count_in_warp(bool value) {
  float count = value ? 1.0f : 0.0f;
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) count += shuffle_xor(count, lanes);
  return static_cast<int>(count);
}

inline int first_in_warp(bool value) {
  float first = value ? static_cast<float>(threadIdx.x % kWarp) : static_cast<float>(kWarp);
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const float other = shuffle_xor(first, lanes);
    first = other < first ? other : first;
  }
  return static_cast<int>(first);
}

template <typename T>
T* block_shared() {
  return reinterpret_cast<T*>(emulation::aligned_shared(emulation::now.fiber->block));
}

inline int cluster_rank() { return static_cast<int>(emulation::now.fiber->block->rank); }
inline int cluster_size() { return static_cast<int>(emulation::now.cluster->blocks.size()); }
// Of the cluster in x; sizes are powers of two.
inline int cluster_index() { return static_cast<int>(blockIdx.x) / cluster_size(); }
struct ClusterTicket {
  int64_t generation;
};
inline ClusterTicket cluster_arrive() { return {emulation::arrive(&emulation::now.cluster->all)}; }
inline void cluster_wait(const ClusterTicket& ticket) {
  emulation::wait_for(emulation::now.cluster->all, ticket.generation);
}
inline void cluster_publish() {}
// The first vector of block `rank`'s shared memory.
inline Vector cluster_read(int rank) {
  return load_vector(emulation::aligned_shared(&emulation::now.cluster->blocks[rank]));
}

#else

template <typename... P>
int code_major(void (*kernel)(P...)) {
  constexpr int kMostDevices = 64;
  static std::atomic<int> known[kMostDevices] = {};  // 0: not asked yet
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  if (device < kMostDevices && known[device] != 0) return known[device];
  cudaFuncAttributes attributes = {};
  cuda_check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  const int major = attributes.ptxVersion / 10;  // 90 for sm_90a, with and without its PTX
  if (device < kMostDevices) known[device] = major;
  return major;
}

template <typename... P, typename... A>
void launch(const char* op, const Launch& l, void (*kernel)(P...), A... arguments) {
  check_grid(op, l);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(l.grid_x), static_cast<unsigned>(l.grid_y), 1);
  config.blockDim = dim3(static_cast<unsigned>(l.threads), 1, 1);
  config.dynamicSmemBytes = static_cast<size_t>(l.shared_bytes);
  config.stream = l.stream;
  cudaLaunchAttribute cluster[1];
  cluster[0].id = cudaLaunchAttributeClusterDimension;
  cluster[0].val.clusterDim.x = static_cast<unsigned>(l.cluster);
  cluster[0].val.clusterDim.y = 1;
  cluster[0].val.clusterDim.z = 1;
  config.attrs = cluster;
  config.numAttrs = l.cluster > 1 ? 1 : 0;
  cuda_check(cudaLaunchKernelEx(&config, kernel, P(arguments)...), op);
}

__device__ __forceinline__ Vector of_uint4(const uint4& v) { return {{v.x, v.y, v.z, v.w}}; }
__device__ __forceinline__ Vector load_vector(const void* p) {
  return of_uint4(*static_cast<const uint4*>(p));
}
// For bytes that are not read again soon.
__device__ __forceinline__ Vector load_vector_once(const void* p) {
  return of_uint4(__ldcs(static_cast<const uint4*>(p)));
}
// To global memory. An assignment through the pointer may be compiled to four stores.
__device__ __forceinline__ void store_vector(void* p, const Vector& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
               "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

__device__ __forceinline__ float shuffle_xor(float value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

__device__ __forceinline__ double shuffle_xor(double value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

// The value of one of the warp's lanes; called by all of them.
__device__ __forceinline__ double shuffle(double value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

// In how many of the warp's threads the value is true; called by all of them.
__device__ __forceinline__ int count_in_warp(bool value) {
  return __popc(__ballot_sync(0xffffffffu, value));
}

// The first of the warp's threads in which the value is true, or kWarp; called by all of them.
__device__ __forceinline__ int first_in_warp(bool value) {
  const int first = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, value)));
  return first == 0 ? kWarp : first - 1;
}

// The block's dynamic shared memory.
template <typename T>
__device__ __forceinline__ T* block_shared() {
  extern __shared__ uint4 skyrl_fast_shared[];
  return reinterpret_cast<T*>(skyrl_fast_shared);
}

struct ClusterTicket {};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ int cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
}
// Sizes are powers of two. (%clusterid is computed in float32: wrong from 2^24 blocks on.)
__device__ __forceinline__ int cluster_index() {
  return static_cast<int>(blockIdx.x >> (__ffs(cluster_size()) - 1));
}
// Makes the calling thread's earlier writes visible to all threads that wait after its arrival.
__device__ __forceinline__ void cluster_publish() {
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
}
// All threads of the cluster's blocks arrive. Only what a thread has published is visible after the
// wait: a release by every thread would cost each a fence.
__device__ __forceinline__ ClusterTicket cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  return {};
}
__device__ __forceinline__ void cluster_wait(const ClusterTicket&) {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// The first vector of block `rank`'s shared memory.
__device__ __forceinline__ Vector cluster_read(int rank) {
  const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(block_shared<uint4>()));
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  Vector v;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "r"(remote)
               : "memory");
  return v;
}
#else  // every block is a cluster
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ int cluster_index() { return static_cast<int>(blockIdx.x); }
__device__ __forceinline__ ClusterTicket cluster_arrive() {
  __syncthreads();
  return {};
}
__device__ __forceinline__ void cluster_wait(const ClusterTicket&) {}
__device__ __forceinline__ void cluster_publish() {}
__device__ __forceinline__ Vector cluster_read(int) { return *block_shared<Vector>(); }
#endif

#endif  // SKYRL_FAST_EMULATE_CUDA

}  // namespace skyrl_fast
