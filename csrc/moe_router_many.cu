// RMSNorm before a mixture of experts, and the logits of its router, in one launch, for more tokens than moe_router.cu
// is made for. The SPLIT blocks of a cluster share TOKENS tokens and divide the H columns (split-K). They exchange the
// sums of squares for the norm, and then the partial sums of the logits. Each block adds up the logits of TOKENS /
// SPLIT tokens, and may also choose their experts. A block loads all of its weights into registers before it waits for
// its predecessor. T is the type of the activations and of the router.
//
// A warp has TILES times eight experts and every KPARTS-th unit of 32 of the block's columns. In a unit, lane 4g + p
// has columns 8p to 8p + 7 of expert g and of tokens g and g + 8. The first four columns are for one `mma` (mma.cuh),
// the next four for another. This permutes the columns in the same way in both operands, so the sums over them are the
// same. -DEXPERTS: a multiple of 8. -DTILES, -DKPARTS: as above. -DUNITS: the most units that a block has. -DTOP_K: see
// moe.cuh.
#include "cluster.cuh"
#include "mma.cuh"
#include "moe.cuh"

constexpr int SPLIT = 8, TOKENS = 16;
constexpr int OWN_TOKENS = TOKENS / SPLIT;  // tokens whose logits a block adds up
constexpr int WARPS = EXPERTS / 8 / TILES * KPARTS, THREADS = WARPS * 32;
constexpr int OWN_UNITS = (UNITS + KPARTS - 1) / KPARTS;  // units per warp
constexpr int PITCH = UNITS * 64 + (UNITS % 2 ? 0 : 64);  // bytes of a token, without bank conflicts
constexpr int LANES = THREADS / TOKENS;                   // threads that norm a token
constexpr int CHUNKS = (UNITS * 4 + LANES - 1) / LANES;   // 16-byte chunks of each of these threads
static_assert(EXPERTS % (8 * TILES) == 0 && LANES >= 8 && LANES <= 32 && 32 % LANES == 0);

// Write normed [tokens, H] = x / sqrt(mean(x^2) + eps) * norm, rounded like rms_norm, and call use(n, expert, logit)
// with the logits, normed @ weight^T + bias, of the block's n-th own token. The first axis of the grid is the cluster,
// the second one its tokens. H is a multiple of 32.
template <typename Use> __device__ __forceinline__ void norm_and_score(
    const T* x, const W* norm, float eps, const T* weight, const T* bias, T* normed, int tokens, int H, Use use) {
  __shared__ __align__(16) unsigned char rows[TOKENS * PITCH];
  __shared__ float squares[SPLIT][TOKENS];
  __shared__ __align__(8) float parts[SPLIT * KPARTS][OWN_TOKENS][EXPERTS];
  int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int rank = blockIdx.x, first_token = blockIdx.y * TOKENS;
  int units = H / 32, begin = units * rank / SPLIT, count = units * (rank + 1) / SPLIT - begin;
  int kpart = warp % KPARTS, first_expert = warp / KPARTS * TILES * 8;

  uint4 w[TILES][OWN_UNITS];
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int u = 0; u < OWN_UNITS; ++u) {
      int unit = u * KPARTS + kpart;
      const T* row = weight + (long long)(first_expert + t * 8 + (lane >> 2)) * H;
      int column = (begin + unit) * 32 + (lane & 3) * 8;
      w[t][u] = unit < count ? *(const uint4*)(row + column) : make_uint4(0, 0, 0, 0);
    }
  int token = thread / LANES, first = thread % LANES;
  Vec<8, W> factor[CHUNKS] = {};
  Vec<8> v[CHUNKS] = {};
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    int chunk = first + i * LANES;
    if (chunk < count * 4) factor[i] = *(const Vec<8, W>*)(norm + begin * 32 + chunk * 8);
  }
  wait_for_predecessor();
  start_successor();
  arrive_at_cluster();
  bool real = first_token + token < tokens;
  long long at = (long long)(first_token + token) * H + begin * 32;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    int chunk = first + i * LANES;
    if (real && chunk < count * 4) v[i] = *(const Vec<8>*)(x + at + chunk * 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += to_float(v[i].v[j]) * to_float(v[i].v[j]);
  }
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  wait_for_cluster();  // all blocks have begun
  if (first < SPLIT) store_at(address_in(first, &squares[rank][token]), sum);
  arrive_at_cluster(), wait_for_cluster();
  sum = 0.f;
#pragma unroll
  for (int r = 0; r < SPLIT; ++r) sum += squares[r][token];
  float scale = rsqrtf(sum / H + eps);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    int chunk = first + i * LANES;
    if (chunk >= UNITS * 4) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) v[i].v[j] = from_float<T>(times_norm(to_float(v[i].v[j]) * scale, factor[i].v[j]));
    *(Vec<8>*)(rows + token * PITCH + chunk * 16) = v[i];
    if (real && chunk < count * 4) *(Vec<8>*)(normed + at + chunk * 8) = v[i];
  }
  __syncthreads();
  float sums[TILES][4] = {};
#pragma unroll
  for (int u = 0; u < OWN_UNITS; ++u) {
    int unit = u * KPARTS + kpart;
    if (unit >= UNITS) break;
    const unsigned char* from = rows + (lane >> 2) * PITCH + unit * 64 + (lane & 3) * 16;
    uint4 low = *(const uint4*)from, high = *(const uint4*)(from + 8 * PITCH);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      mma(sums[t], low.x, high.x, low.y, high.y, w[t][u].x, w[t][u].y);
      mma(sums[t], low.z, high.z, low.w, high.w, w[t][u].z, w[t][u].w);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {  // the tokens g and g + 8
    int of = (lane >> 2) + h * 8;
    float* mine = &parts[rank * KPARTS + kpart][of % OWN_TOKENS][first_expert + (lane & 3) * 2];
    unsigned to = address_in(of / OWN_TOKENS, mine);
#pragma unroll
    for (int t = 0; t < TILES; ++t) store_at(to + t * 32, sums[t][h * 2], sums[t][h * 2 + 1]);
  }
  arrive_at_cluster(), wait_for_cluster();
  for (int i = thread; i < OWN_TOKENS * EXPERTS; i += THREADS) {
    int own = i / EXPERTS, expert = i % EXPERTS;
    float result = bias ? to_float(bias[expert]) : 0.f;
#pragma unroll
    for (int p = 0; p < SPLIT * KPARTS; ++p) result += parts[p][own][expert];
    use(own, expert, from_float<T>(result));
  }
}

// logits [tokens, EXPERTS].
extern "C" __global__ void __launch_bounds__(THREADS) moe_router_many(
    const T* x, const W* norm, float eps, const T* weight, OPTIONAL const T* bias, T* normed, T* logits, int tokens,
    int H) {
  int first_token = blockIdx.y * TOKENS + blockIdx.x * OWN_TOKENS;
  norm_and_score(x, norm, eps, weight, bias, normed, tokens, H, [&](int own, int expert, T logit) {
    if (first_token + own < tokens) logits[(long long)(first_token + own) * EXPERTS + expert] = logit;
  });
}

#ifdef TOP_K
// Choose experts and weights [tokens, TAKEN] by the logits, as moe_route (moe.cu) does.
extern "C" __global__ void __launch_bounds__(THREADS) moe_router_choose(
    const T* x, const W* norm, float eps, const T* weight, OPTIONAL const T* bias, T* normed, int tokens, int H,
    int weighting, int first_expert, int held, OPTIONAL const float* expert_scale, int* experts, float* weights) {
  __shared__ T logits[OWN_TOKENS][EXPERTS];
  int own = threadIdx.x >> 5, token = blockIdx.y * TOKENS + blockIdx.x * OWN_TOKENS + own;
  norm_and_score(x, norm, eps, weight, bias, normed, tokens, H, [&](int own, int expert, T logit) {
    logits[own][expert] = logit;
  });
  __syncthreads();
  if (own >= OWN_TOKENS || token >= tokens) return;
  int first = token * TAKEN;
  route(logits[own], weighting, first_expert, held, expert_scale, experts + first, weights + first);
}
#endif
