// Common parts of a mixture of experts' launches: a tile of (token, expert) pairs, and the choice of experts.
// Pair n is the n % TAKEN-th expert of token n / TAKEN. EXPERTS and TOP_K are macros; -DSHARED: of a block that every
// token goes to, in as many parts as large as an expert, which are the experts from EXPERTS on and stand behind the
// TOP_K that are chosen. -DGATED_SHARED: behind the logits of the experts is one whose sigmoid is the weight of these
// parts, else 1.
// A rank may hold only some of the EXPERTS, `held` from `first_expert` on, which are then counted from 0: a pair of
// another one has the expert -1 and the weight ELSEWHERE.
#pragma once
#include "common.cuh"

#ifndef LOGIT_SCALAR
#define LOGIT_SCALAR SCALAR
#endif
#ifndef SHARED
#define SHARED 0
#define GATED_SHARED 0
#endif
using L = LOGIT_SCALAR;  // of a router's logits

struct Tile {  // of the pairs sorted by expert: all of one
  int expert, start, count, pad;
};

#ifdef TOP_K
constexpr int TAKEN = TOP_K + SHARED;  // at most 32
constexpr int ALL_EXPERTS = EXPERTS + SHARED;
constexpr int LOGITS = EXPERTS + GATED_SHARED;  // of a token
// Larger numbers have larger orders; none has 0.
__device__ __forceinline__ unsigned order_of(float x) {
  unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float of_order(unsigned order) {
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// A logit's order and behind it its expert, so that a token's keys differ, and of equal logits the first has the
// largest one. 0 is no key. The order of a logit of 16 bits leaves room for the expert in its low bits.
template <int BYTES> struct KeyOf { using Type = unsigned long long; };
template <> struct KeyOf<2> { using Type = unsigned; };
using Key = KeyOf<sizeof(L)>::Type;
constexpr bool WIDE = sizeof(Key) == 8;
constexpr unsigned LAST_EXPERT = 0x1fff;

__device__ __forceinline__ Key key_of(float logit, int expert) {
  unsigned order = order_of(logit), behind = LAST_EXPERT - expert;
  return WIDE ? (unsigned long long)order << 32 | behind : order & ~LAST_EXPERT | behind;
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

// A token's experts are weighed by their probabilities, by these divided by their sum, or as the logits say: they are
// the weights of experts that were chosen before, and -1 for the others.
enum Weighting { PROBABILITIES, RENORMALIZED, CHOSEN };

constexpr float ELSEWHERE = -3.0e38f;

// One warp: the TOP_K most likely experts of softmax(logits [LOGITS]), the first of equals, then the shared ones, and
// their weights: those of chosen ones times `expert_scale` [EXPERTS], if there is one.
__device__ __forceinline__ void route(
    const L* logits, int weighting, int first_expert, int held, const float* expert_scale, int* experts,
    float* weights) {
  constexpr int PER_LANE = (EXPERTS + 31) / 32;
  constexpr unsigned ALL = 0xffffffffu;
  int lane = threadIdx.x & 31;
  // Keys of this lane's logits, of the expert that was chosen last, and of the one that this lane writes.
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
