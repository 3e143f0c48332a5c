// Routing rules beyond the top-k of a softmax (DeepSeek, GLM-4.5): scores by sigmoid, a bias that is added to the
// scores for the choice but not for the weights, groups of experts of which only the best groups are eligible, and a
// factor of the weights. Logits are float32. One warp routes one token.
#include "moe.cuh"

constexpr int WARPS = 4;
constexpr float NEVER = -3.0e38f;  // score of an expert that is already chosen or not eligible

// Find the `top_groups` groups with the largest scores, and return them as a bit mask. A group's score is its best
// expert's or, if `two`, the sum of its best two; equal groups are taken in ascending order. Group g has the contiguous
// experts from g * EXPERTS / groups on. There are at most 32 groups, one per lane.
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

// Choose each token's TOP_K experts from router_logits [tokens, EXPERTS], by one warp a token. Writes experts and
// weights [tokens, TOP_K], or a table [tokens, EXPERTS] of the weights with -1 for the other experts (CHOSEN, moe.cuh).
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
