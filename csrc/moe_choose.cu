// The choice of experts where not just the largest of a softmax of 16-bit logits are taken (DeepSeek, GLM-4.5):
// sigmoids, a bias of the scores by which is chosen, groups of experts of which a few compete, a factor of the weights.
#include "moe.cuh"

constexpr int WARPS = 4;
constexpr float NEVER = -3.0e38f;  // of an expert that is taken or does not compete

// Bit g: the group g, of experts / groups in a row, is one of the `top_groups` with the largest sums of their best one
// or two scores. At most 32 groups, one a lane; of equal ones the first.
__device__ __forceinline__ unsigned best_groups(const float* choice, int groups, int top_groups, bool two) {
  int lane = threadIdx.x & 31, size = EXPERTS / groups, better = 0;
  float best = NEVER, second = NEVER;
  if (lane < groups)
    for (int i = lane * size; i < (lane + 1) * size; ++i) {
      second = fmaxf(second, fminf(best, choice[i]));
      best = fmaxf(best, choice[i]);
    }
  float value = two ? best + second : best;
  for (int g = 0; g < groups; ++g) {
    float other = __shfl_sync(0xffffffffu, value, g);
    better += other > value || (other == value && g < lane);
  }
  return __ballot_sync(0xffffffffu, lane < groups && better < top_groups);
}

// One warp a token: its TOP_K experts and their weights, from router_logits [tokens, EXPERTS]; or a table [tokens,
// EXPERTS] of the weights, -1 for the other experts.
extern "C" __global__ void __launch_bounds__(32 * WARPS) moe_choose(
    const float* router_logits, OPTIONAL const float* bias, int tokens, int sigmoid, int groups, int top_groups,
    int group_scores, int renormalize, float scale, OPTIONAL int* experts, OPTIONAL float* weights, OPTIONAL T* table) {
  constexpr int PER_LANE = (EXPERTS + 31) / 32;
  constexpr unsigned ALL = 0xffffffffu;
  __shared__ float scores[WARPS][EXPERTS], choices[WARPS][EXPERTS];
  wait_for_predecessor();
  start_successor();
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token = blockIdx.x * WARPS + warp;
  if (token >= tokens) return;
  float *score = scores[warp], *choice = choices[warp], x[PER_LANE], largest = NEVER, sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    int expert = i * 32 + lane;
    x[i] = expert < EXPERTS ? router_logits[(long long)token * EXPERTS + expert] : NEVER;
    largest = fmaxf(largest, x[i]);
  }
  for (int offset = 16; offset > 0; offset >>= 1) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, offset));
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    x[i] = sigmoid ? 1.f / (1.f + expf(-x[i])) : expf(x[i] - largest);
    sum += i * 32 + lane < EXPERTS ? x[i] : 0.f;
  }
  float divisor = sigmoid ? 1.f : warp_sum(sum);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    int expert = i * 32 + lane;
    if (expert >= EXPERTS) continue;
    score[expert] = x[i] / divisor;
    choice[expert] = score[expert] + (bias ? bias[expert] : 0.f);
  }
  __syncwarp();
  unsigned competing = groups > 1 ? best_groups(choice, groups, top_groups, group_scores == 2) : 1u;
  int size = EXPERTS / groups;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    int expert = i * 32 + lane;
    x[i] = expert < EXPERTS && (competing >> (expert / size) & 1u) ? choice[expert] : NEVER;
  }

  int my_expert = 0;
#pragma unroll 1
  for (int k = 0; k < TOP_K; ++k) {
    float best = NEVER;
    int expert = lane;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (x[i] > best) best = x[i], expert = i * 32 + lane;
    unsigned key = order_of(best), top = __reduce_max_sync(ALL, key);
    expert = min(__reduce_min_sync(ALL, key == top ? (unsigned)expert : ALL), EXPERTS - 1);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (i * 32 + lane == expert) x[i] = NEVER;
    if (lane == k) my_expert = expert;
  }
  float mine = lane < TOP_K ? score[my_expert] : 0.f;
  float total = renormalize ? warp_sum(mine) + 1e-20f : 1.f;
  mine = mine / total * scale;
  if (lane < TOP_K && experts) experts[token * TOP_K + lane] = my_expert, weights[token * TOP_K + lane] = mine;
  if (!table) return;
  __syncwarp();
#pragma unroll
  for (int i = lane; i < EXPERTS; i += 32) choice[i] = -1.f;
  __syncwarp();
  if (lane < TOP_K) choice[my_expert] = mine;
  __syncwarp();
#pragma unroll
  for (int i = lane; i < EXPERTS; i += 32) table[(long long)token * EXPERTS + i] = from_float<T>(choice[i]);
}
