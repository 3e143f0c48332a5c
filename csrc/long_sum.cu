// Sum over RANKS GPUs of the parts [rows, H] of a block's output, for steps of many tokens: reduce-scatter, residual
// addition, RMSNorm and all-gather in one kernel. ROW_VECTORS vectors of 16 bytes are a row, one for each thread.
//
// Each rank *owns* an equal share of the rows. It reads them in all ranks' memory, adds them up in float32 in the order
// of the ranks, and writes the result to all ranks' memory. Each value crosses NVLink as often as in the best
// all-reduce, but only the norm, which the next block reads, is sent: the residual stays with the owner of its row
// (sequence parallelism, Korthikanti et al., 2022).
//
// A call begins when all ranks have written their parts, and ends when all ranks have sent their rows. By then all have
// read this rank's part, so the next product may overwrite it. Blocks do not wait for blocks of the same GPU, except
// that the last one to end waits for the other ranks. So a grid may be larger or smaller than what runs at a time.
#include "peers.cuh"

// Blocks that fit a multiprocessor, which bounds their registers: two of 640 threads.
constexpr int SM_BLOCKS = ROW_VECTORS < 128 ? 10 : 1280 / ROW_VECTORS;

struct Flags {              // at the beginning of each rank's memory
  unsigned written[RANKS];  // last call for which rank r has written its part
  unsigned sent[RANKS];     // last call in which rank r has sent its rows
};

struct Control {  // in the rank's own memory
  unsigned call;  // calls that have ended
  unsigned done;  // blocks that have finished this call
};

struct Peers {
  const long long* addresses;  // at which each rank's memory begins
  int rank;
  unsigned call;  // number of this call
  Status* status;
  unsigned* failed;
  unsigned long long patience;

  __device__ __forceinline__ Flags* flags(int r) const { return (Flags*)addresses[r]; }
  __device__ __forceinline__ Vec<VEC>* memory(int r, long long offset) const {
    return (Vec<VEC>*)(addresses[r] + offset);
  }

  // Thread r tells rank r that this rank has reached the call, and waits for it. All that the block, or kernels before,
  // wrote is visible to the ranks, and what they wrote to this block. False if a rank is late, or was before.
  template <unsigned (Flags::*WHICH)[RANKS]> __device__ __forceinline__ bool meet() const {
    int r = threadIdx.x;
    bool late = look(failed);
    if (r < RANKS && !late) {
      __threadfence_system();
      set((flags(r)->*WHICH) + rank, call);
      Patience bound = {status, failed, patience};
      while (!late && (int)(look((flags(rank)->*WHICH) + r) - call) < 0) late = bound.ends(r);
      __threadfence_system();
    }
    return !__syncthreads_or(late);
  }
};

// residual += sum over the ranks' parts, in the rows that this rank owns; the results of these rows, on all ranks, are
// rms_norm(residual) as in norm.cu, or without a weight the new residual itself. `parts` and `results`: bytes from the
// beginning of a rank's memory to these rows.
extern "C" __global__ void __launch_bounds__(ROW_VECTORS, SM_BLOCKS) long_sum(
    T* residual, OPTIONAL const W* weight, const long long* addresses, int* control, int* failed, int* status, int rank,
    int rows, long long parts, long long results, float eps, long long patience) {
  __shared__ float scratch[32];
  __shared__ bool is_last;
  unsigned *calls = &((Control*)control)->call, *done = &((Control*)control)->done;
  Peers peers = {addresses, rank, look(calls) + 1, (Status*)status, (unsigned*)failed, (unsigned long long)patience};
  if (!peers.meet<&Flags::written>()) return;

  int share = (rows + RANKS - 1) / RANKS, end = min((rank + 1) * share, rows);
  Vec<VEC, W> w = {};
  if (weight) w = ((const Vec<VEC, W>*)weight)[threadIdx.x];
  for (int row = rank * share + blockIdx.x; row < end; row += gridDim.x) {
    long long at = (long long)row * ROW_VECTORS + threadIdx.x;
    Vec<VEC> x[RANKS], sum = ((const Vec<VEC>*)residual)[at];
#pragma unroll
    for (int r = 0; r < RANKS; ++r) x[r] = peers.memory(r, parts)[at];
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      float total = 0.f;
#pragma unroll
      for (int r = 0; r < RANKS; ++r) total += to_float(x[r].v[j]);
      sum.v[j] = from_float<T>(rounded(total) + to_float(sum.v[j]));  // rounded as separate operations would
      squares += to_float(sum.v[j]) * to_float(sum.v[j]);
    }
    Vec<VEC> result = sum;
    if (weight) {
      ((Vec<VEC>*)residual)[at] = sum;
      float scale = rsqrtf(block_sum(squares, scratch) / (ROW_VECTORS * VEC) + eps);
#pragma unroll
      for (int j = 0; j < VEC; ++j) result.v[j] = from_float<T>(times_norm(to_float(sum.v[j]) * scale, w.v[j]));
    }
#pragma unroll
    for (int r = 0; r < RANKS; ++r) peers.memory(r, results)[at] = result;
    __syncthreads();  // scratch is used again
  }

  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    is_last = atomicAdd(done, 1) == gridDim.x - 1;
    if (is_last) __threadfence_system();  // all blocks' rows come before the flags that any thread of this block sets
  }
  __syncthreads();
  if (!is_last || !peers.meet<&Flags::sent>() || threadIdx.x) return;
  *done = 0, *calls = peers.call;
}
