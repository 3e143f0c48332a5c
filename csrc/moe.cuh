// Common parts of the kernels of a mixture of experts: tiles of (token, expert) pairs, and top-k routing.
//
// Pair n is token n / TAKEN with its (n % TAKEN)-th expert. -DEXPERTS: routed experts, of which each token takes
// -DTOP_K. -DSHARED: the shared expert, which every token takes, is processed as this many experts of the size of a
// routed one. Their ids begin at EXPERTS, and in a token's list of experts they follow the TOP_K routed ones.
// -DGATED_SHARED: 1 if their weight is the sigmoid of a logit, which follows the experts' logits in the router's
// output; 0 if it is 1. With expert parallelism a rank has only `held` of the EXPERTS, from `first_expert` on, and
// numbers these from 0. A pair whose expert is on another rank has expert -1 and weight ELSEWHERE.
#pragma once
#include "common.cuh"

#ifndef LOGIT_SCALAR
#define LOGIT_SCALAR SCALAR
#endif
#ifndef SHARED
#define SHARED 0
#define GATED_SHARED 0
#endif
using L = LOGIT_SCALAR;  // type of the router's logits

struct Tile {  // `count` pairs of one expert: the sorted pairs from `start` on
  int expert, start, count, pad;
};

#ifdef TOP_K
constexpr int TAKEN = TOP_K + SHARED;  // at most 32
constexpr int ALL_EXPERTS = EXPERTS + SHARED;
constexpr int LOGITS = EXPERTS + GATED_SHARED;  // per token

// A float's bits as an unsigned integer with the same order; never 0.
__device__ __forceinline__ unsigned order_of(float x) {
  unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float of_order(unsigned order) {
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// Sort key of a logit: its order in the high bits, and the expert's index, counted backwards, in the low bits. All keys
// of a token are therefore distinct, and among equal logits the first expert has the largest key. No key is 0. The
// order of a 16-bit logit leaves low bits unused; the expert is stored in them.
template <int BYTES> struct KeyOf { using Type = unsigned long long; };
template <> struct KeyOf<2> { using Type = unsigned; };
using Key = KeyOf<sizeof(L)>::Type;
constexpr bool WIDE = sizeof(Key) == 8;
constexpr unsigned LAST_EXPERT = 0x1fff;

__device__ __forceinline__ Key key_of(float logit, int expert) {
  unsigned order = order_of(logit), reversed = LAST_EXPERT - expert;
  return WIDE ? (unsigned long long)order << 32 | reversed : order & ~LAST_EXPERT | reversed;
}
__device__ __forceinline__ float logit_of(unsigned long long key) { return of_order(key >> 32); }
__device__ __forceinline__ float logit_of(unsigned key) {
  return of_order(key & 0x80000000u ? key & ~LAST_EXPERT : key | LAST_EXPERT);
}
__device__ __forceinline__ unsigned warp_max(unsigned key) { return __reduce_max_sync(0xffffffffu, key); }
__device__ __forceinline__ unsigned long long warp_max(unsigned long long key) {
  unsigned high = key >> 32, top = warp_max(high);
  return (unsigned long long)top << 32 | warp_max(high == top ? (unsigned)key : 0u);
}

// Weights of a token's experts. PROBABILITIES: the softmax probabilities. RENORMALIZED: these divided by their sum.
// CHOSEN: another kernel has chosen the experts; the "logits" are then the weights, and -1 for experts not chosen.
enum Weighting { PROBABILITIES, RENORMALIZED, CHOSEN };

constexpr float ELSEWHERE = -3.0e38f;

// Write the TAKEN experts of a token and their weights, by one warp. The first TOP_K are the most likely experts by
// softmax(logits [EXPERTS]); among equal ones the first is chosen. Their weights are multiplied by `expert_scale`
// [EXPERTS], if it is given. The shared experts follow.
__device__ __forceinline__ void route(
    const L* logits, int weighting, int first_expert, int held, const float* expert_scale, int* experts,
    float* weights) {
  constexpr int PER_LANE = (EXPERTS + 31) / 32;
  constexpr unsigned ALL = 0xffffffffu;
  int lane = threadIdx.x & 31;
  // Keys of this lane's logits, of the expert that was chosen last, and of the expert that this lane writes.
  Key key[PER_LANE], top = ~(Key)0, mine = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    int expert = i * 32 + lane;
    key[i] = expert < EXPERTS ? key_of(to_float(logits[expert]), expert) : 0;
  }
#pragma unroll
  for (int k = 0; k < TOP_K; ++k) {
    Key best = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) best = max(best, key[i] < top ? key[i] : 0);
    top = warp_max(best);
    if (lane == k) mine = top;
  }
  int my_expert = min((int)(LAST_EXPERT - (unsigned)mine & LAST_EXPERT), EXPERTS - 1);
  float weight = logit_of(mine);
  if (weighting != CHOSEN) {
    float largest = __shfl_sync(ALL, weight, 0), sum = weight = lane < TOP_K ? __expf(weight - largest) : 0.f;
    if (weighting == PROBABILITIES)
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        if (key[i] && key[i] < top) sum += __expf(logit_of(key[i]) - largest);
    sum = warp_sum(sum);
    weight = rounded(weight / sum);
  }
  if (lane < TOP_K) {
    bool here = my_expert >= first_expert && my_expert < first_expert + held;
    if (expert_scale) weight *= expert_scale[my_expert];
    experts[lane] = here ? my_expert - first_expert : -1;
    weights[lane] = here ? weight : ELSEWHERE;
  } else if (lane < TAKEN) {
    experts[lane] = EXPERTS + lane - TOP_K;
    weights[lane] = GATED_SHARED ? 1.f / (1.f + __expf(-to_float(logits[EXPERTS]))) : 1.f;
  }
}
#endif
