// All-reduce and all-gather over RANKS GPUs by writing into the peers' memory (push.cuh). Inputs and outputs are T.
//
// one_shot: every rank sends its whole input to all ranks and adds up all inputs. two_shot (reduce-scatter, then
// all-gather): each rank adds up its own part of the input and sends the result to the others, which moves 2 / RANKS of
// the data. one_shot_norm: one_shot over whole rows with a residual, followed by their RMSNorm in the same kernel.
// received: like one_shot_norm, for inputs that a GEMM has already sent to all ranks (skinny_gemm_push).
//
// Thread k of a rank receives only what thread k of its peers sent, so the blocks of a grid need not run at the same
// time or in any order. Sums are computed in float32 in the order of the ranks, so all ranks get the same bits.
#include "push.cuh"

union Values {
  Words words;
  Vec<VEC> vec;
};

__device__ __forceinline__ Words load(const T* x, int i) { return ((const Words*)x)[i]; }

__device__ __forceinline__ Words sum_of(const Words (&values)[RANKS]) {
  float sum[VEC] = {};
#pragma unroll
  for (int r = 0; r < RANKS; ++r) {
    Values one = {values[r]};
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum[j] += to_float(one.vec.v[j]);
  }
  Values whole;
#pragma unroll
  for (int j = 0; j < VEC; ++j) whole.vec.v[j] = from_float<T>(sum[j]);
  return without_empty(whole.words);
}

// The sum is rounded before the residual is added, as separate operations would.
__device__ __forceinline__ Values added(Words sum, Words residual) {
  Values values = {sum}, more = {residual};
#pragma unroll
  for (int j = 0; j < VEC; ++j)
    values.vec.v[j] = from_float<T>(to_float(values.vec.v[j]) + to_float(more.vec.v[j]));
  return values;
}

__device__ __forceinline__ void store(T* out, const T* residual, int i, Words sum) {
  ((Words*)out)[i] = residual ? added(sum, load(residual, i)).words : sum;
}

// out = sum of the ranks' x + residual; `vectors` of 16 bytes each. out may be x.
extern "C" __global__ void __launch_bounds__(THREADS) one_shot(
    const T* x, OPTIONAL const T* residual, T* out, const long long* addresses, int* control, int* status, int rank,
    int vectors, long long buffer_bytes, long long patience) {
  wait_for_predecessor();
  start_successor();
  Group group(addresses, control, status, rank, buffer_bytes, patience);
  if (group.has_failed()) return;
  int first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS;
  group.send_all(x, vectors, first, stride);
  group.empty_before(first, stride);
  for (int i = first; i < vectors; i += stride) {
    Words values[RANKS];
    group.receive(values, load(x, i), i, vectors);
    store(out, residual, i, sum_of(values));
  }
  group.finish(RANKS * vectors);
}

// out = sum of the ranks' x + residual; if there is a weight, normed = rms_norm(out) as in norm.cu. A row has
// row_vectors vectors, one for each thread of a block; row_vectors is a multiple of the warp size. SENT: x has already
// been sent to all ranks, this one included.
template <bool SENT>
__device__ __forceinline__ void add_rows(
    const Group& group, const T* x, const T* residual, T* out, const W* weight, T* normed, int rows, int row_vectors,
    float eps) {
  __shared__ float scratch[32];
  int first = blockIdx.x * row_vectors + threadIdx.x, stride = gridDim.x * row_vectors, vectors = rows * row_vectors;
  Vec<VEC, W> w = {};
  if (weight) w = ((const Vec<VEC, W>*)weight)[threadIdx.x];
  if (!SENT) group.send_all(x, vectors, first, stride);
  group.empty_before(first, stride);
  for (int i = first; i < vectors; i += stride) {
    Words values[RANKS], more = load(residual, i);
    if (SENT) group.receive_all(values, i, vectors);
    else group.receive(values, load(x, i), i, vectors);
    Values sum = added(sum_of(values), more);
    ((Words*)out)[i] = sum.words;
    if (!weight) continue;
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < VEC; ++j) squares += to_float(sum.vec.v[j]) * to_float(sum.vec.v[j]);
    float scale = rsqrtf(block_sum(squares, scratch) / (row_vectors * VEC) + eps);
    Vec<VEC> y;
#pragma unroll
    for (int j = 0; j < VEC; ++j) y.v[j] = from_float<T>(times_norm(to_float(sum.vec.v[j]) * scale, w.v[j]));
    ((Vec<VEC>*)normed)[i] = y;
    __syncthreads();  // scratch is used again
  }
}

// out may be x.
extern "C" __global__ void __launch_bounds__(1024) one_shot_norm(
    const T* x, const T* residual, T* out, const W* weight, T* normed, const long long* addresses, int* control,
    int* status, int rank, int rows, int row_vectors, float eps, long long buffer_bytes, long long patience) {
  wait_for_predecessor();
  start_successor();
  Group group(addresses, control, status, rank, buffer_bytes, patience);
  if (group.has_failed()) return;
  add_rows<false>(group, x, residual, out, weight, normed, rows, row_vectors, eps);
  group.finish(RANKS * rows * row_vectors);
}

// The predecessor, skinny_gemm_push, sends this rank's x. This kernel does not wait for the predecessor's end before it
// writes: once all vectors have arrived, the predecessor has read all its inputs. out may be residual.
extern "C" __global__ void __launch_bounds__(1024) received(
    const T* residual, T* out, OPTIONAL const W* weight, OPTIONAL T* normed, const long long* addresses, int* control,
    int* status, int rank, int rows, int row_vectors, float eps, long long buffer_bytes, long long patience) {
  start_successor();
  Group group(addresses, control, status, rank, buffer_bytes, patience);
  if (group.has_failed()) return;
  add_rows<true>(group, nullptr, residual, out, weight, normed, rows, row_vectors, eps);
  wait_for_predecessor();
  group.finish(RANKS * rows * row_vectors);
}

extern "C" __global__ void __launch_bounds__(THREADS) two_shot(
    const T* x, OPTIONAL const T* residual, T* out, const long long* addresses, int* control, int* status, int rank,
    int vectors, long long buffer_bytes, long long patience) {
  wait_for_predecessor();
  start_successor();
  Group group(addresses, control, status, rank, buffer_bytes, patience);
  if (group.has_failed()) return;
  int first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS;
  int part = (vectors + RANKS - 1) / RANKS, sums = RANKS * part;  // where sums begin: after the parts
  for (int k = first; k < part; k += stride) {
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      int i = r * part + k;
      if (r != rank && i < vectors) send(group.buffers[r] + (rank * part + k), without_empty(load(x, i)));
    }
  }
  group.empty_before(first, stride);
  for (int k = first, i = rank * part + k; k < part && i < vectors; k += stride, i += stride) {
    Words values[RANKS];
    group.receive(values, load(x, i), k, part);
    Words whole = sum_of(values);
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r != rank) send(group.buffers[r] + (sums + i), whole);
    store(out, residual, i, whole);
  }
  for (int k = first; k < part; k += stride) {
    Words values[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r != rank && r * part + k < vectors) values[r] = look(group.own + (sums + r * part + k));
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      int i = r * part + k;
      if (r == rank || i >= vectors) continue;
      if (!is_here(values[r])) values[r] = group.wait_for(group.own + (sums + i), r);
      store(out, residual, i, values[r]);
    }
  }
  group.finish(sums + vectors);
}

// All-gather: concatenate the ranks' x [rows, row_vectors] along the columns; out [rows, out_vectors] gets the first
// out_vectors of them.
extern "C" __global__ void __launch_bounds__(THREADS) gather(
    const T* x, T* out, const long long* addresses, int* control, int* status, int rank, int rows, int row_vectors,
    int out_vectors, long long buffer_bytes, long long patience) {
  wait_for_predecessor();
  start_successor();
  Group group(addresses, control, status, rank, buffer_bytes, patience);
  if (group.has_failed()) return;
  int first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS, vectors = rows * row_vectors;
  group.send_all(x, vectors, first, stride);
  group.empty_before(first, stride);
  for (int i = first; i < vectors; i += stride) {
    Words values[RANKS];
    group.receive(values, without_empty(load(x, i)), i, vectors);
    int row = i / row_vectors, column = i % row_vectors;
#pragma unroll
    for (int r = 0; r < RANKS; ++r, column += row_vectors)
      if (column < out_vectors) ((Words*)out)[(long long)row * out_vectors + column] = values[r];
  }
  group.finish(RANKS * vectors);
}
