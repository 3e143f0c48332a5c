// Collectives that write into the peers' memory (push), over NVLink. -DRANKS: GPUs of the group.
//
// Each rank has three buffers that all other ranks can write to. A call, or *epoch*, uses one of them: each rank writes
// its values into the others' buffers, and polls its own buffer until no word is EMPTY. The data itself is the flag, so
// a call waits for only one crossing of NVLink (the Lamport protocol of TensorRT-LLM and FlashInfer). A call also fills
// the buffer of the previous call with EMPTY again. This is early enough: a peer writes to that buffer two calls later,
// after it has received this rank's data of the next call, which this rank sends only after it has ended this call.
#pragma once
#include "peers.cuh"

constexpr unsigned EMPTY = 0x80000000u;  // -0 in float32, or -0 and 0 in two 16-bit floats: sent as zeros

struct alignas(16) Words { unsigned w[4]; };
static_assert(sizeof(Words) == sizeof(Vec<VEC>), "a vector is 16 bytes");

struct Control {       // in the rank's own memory
  unsigned epoch;      // modulo 3
  unsigned done;       // blocks that have finished this call
  unsigned used;       // vectors that the call before has used of its buffer
  unsigned failed;     // set once a peer is late: later calls do not wait
};

__device__ __forceinline__ Words look(const Words* slot) {
  Words x;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(slot) : "memory");
  return x;
}

__device__ __forceinline__ void send(Words* slot, Words x) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(slot), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3]) : "memory");
}

__device__ __forceinline__ bool is_here(Words x) {
  return x.w[0] != EMPTY && x.w[1] != EMPTY && x.w[2] != EMPTY && x.w[3] != EMPTY;
}

__device__ __forceinline__ Words without_empty(Words x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x.w[i] = x.w[i] == EMPTY ? 0 : x.w[i];
  return x;
}

struct Group {
  Words* buffers[RANKS];  // every rank's buffer of this call
  const Words* own;       // this rank's buffer of this call
  Words* before;          // this rank's buffer of the call before
  Control* control;
  Status* status;
  int rank;
  unsigned epoch;
  unsigned long long patience;  // nanoseconds until a peer is late

  __device__ __forceinline__ Group(
      const long long* addresses, int* control, int* status, int rank, long long buffer_bytes, long long patience)
      : control((Control*)control), status((Status*)status), rank(rank), epoch(look((unsigned*)control)),
        patience(patience) {
#pragma unroll
    for (int r = 0; r < RANKS; ++r) buffers[r] = (Words*)(addresses[r] + epoch * buffer_bytes);
    own = (const Words*)(addresses[rank] + epoch * buffer_bytes);
    before = (Words*)(addresses[rank] + (epoch + 2) % 3 * buffer_bytes);
  }

  __device__ __forceinline__ bool has_failed() const { return look(&control->failed); }

  // Poll until the value that rank `from` sends is here; zeros if it does not arrive in time.
  __device__ __forceinline__ Words wait_for(const Words* slot, int from) const {
    Patience bound = {status, &control->failed, patience};
    Words x = look(slot);
    while (!is_here(x)) {
      x = look(slot);
      if (bound.ends(from)) return {};
    }
    return x;
  }

  // Send this rank's vectors to all others.
  __device__ __forceinline__ void send_all(const T* x, int vectors, int first, int stride) const {
    for (int i = first; i < vectors; i += stride) {
      Words mine = without_empty(((const Words*)x)[i]);
#pragma unroll
      for (int r = 0; r < RANKS; ++r)
        if (r != rank) send(buffers[r] + (rank * vectors + i), mine);
    }
  }

  // Receive one value from every rank, at `place` of its vectors, which are `stride` apart. This rank's own is x.
  __device__ __forceinline__ void receive(Words (&values)[RANKS], Words x, int place, int stride) const {
#pragma unroll
    for (int r = 0; r < RANKS; ++r) values[r] = r == rank ? x : look(own + (r * stride + place));
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r != rank && !is_here(values[r])) values[r] = wait_for(own + (r * stride + place), r);
  }

  // Receive from every rank, this one included: it has sent its own values to itself as well.
  __device__ __forceinline__ void receive_all(Words (&values)[RANKS], int place, int stride) const {
#pragma unroll
    for (int r = 0; r < RANKS; ++r) values[r] = look(own + (r * stride + place));
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (!is_here(values[r])) values[r] = wait_for(own + (r * stride + place), r);
  }

  __device__ __forceinline__ void empty_before(int first, int stride) const {
    constexpr Words nothing = {EMPTY, EMPTY, EMPTY, EMPTY};
    for (int i = first, used = look(&control->used); i < used; i += stride) before[i] = nothing;
  }

  // End the call; all threads of a block call it last. `used`: vectors that the call has used of the buffer.
  __device__ __forceinline__ void finish(int used) const {
    __syncthreads();
    if (threadIdx.x || atomicAdd(&control->done, 1) != gridDim.x - 1) return;
    control->done = 0, control->used = used, control->epoch = (epoch + 1) % 3;
  }
};
