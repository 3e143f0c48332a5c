// Latent attention (MLA) of prefill chunks on Hopper, over keys and values that were expanded from the latents: causal
// softmax(scale * q @ K^T) @ V for every head. A key has NOPE dimensions of its head and ROPE dimensions that all heads
// share; a value has VALUE dimensions. The keys and values of a row's tokens are contiguous. All are T (bf16 or f16),
// sums are float32.
//
// The work is divided as in FlashAttention 3 (Shah et al., 2024). A block has 128 queries of a head, 64 in each of two
// consumer warpgroups, and processes the keys tile by tile. One thread of a producer warpgroup loads the tiles by TMA,
// and the producer gives its registers to the consumers. While a warpgroup computes the softmax of one tile, the tensor
// cores multiply the softmax weights of the previous tile with its values. The softmax uses exp2.
//
// An Item names some queries and the keys of their row. If these keys are only a part of those that the queries see,
// one launch follows another for each part, and each result is merged with the earlier ones by its log-sum-exp (`lse`).
//
// -DRANK, -DNOPE, -DVALUE: multiples of 64. -DROPE: 64. -DTILE: keys per tile, 64 or 128.
#include "mma.cuh"
#define RIGHT_ROWS TILE
#include "shared_product.cuh"

constexpr int QUERIES = 128;
constexpr int STAGES = 2;
constexpr int CONSUMERS = 256;  // threads: two warpgroups
constexpr int WARPS = CONSUMERS / 32;
constexpr int THREADS = CONSUMERS + 128;
constexpr int KEY_BOXES = (NOPE + ROPE) / 64, VALUE_BOXES = VALUE / 64;
constexpr int Q_BOX = QUERIES * LINE, BOX = TILE * LINE;  // bytes
constexpr int K_STAGE = KEY_BOXES * BOX, V_STAGE = VALUE_BOXES * BOX;
constexpr float LOG2_E = 1.44269504f;
#define INF __int_as_float(0x7f800000)

// Query i of `queries` from `first_query` on sees the keys j <= offset + i of `keys` from `first_key` on.
struct Item {
  int first_query, queries, first_key, keys, offset, merges;
};

// c [64, 128] += a [64, 16] @ b [16, 128]; a is in registers, laid out as for `mma`, b in shared memory row by row.
__device__ __forceinline__ void multiply_values(float (*c)[4], const unsigned (&a)[4], unsigned long long b) {
  asm volatile(INSTRUCTION("128") " {" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5)
               "%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Matrix descriptor of swizzled rows of 128 bytes, whose 64 columns are columns of the result; the next 64 columns are
// BOX bytes further.
__device__ __forceinline__ unsigned long long columns_descriptor(unsigned address) {
  return (address & 0x3ffff) >> 4 | (unsigned long long)(BOX >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// Wait for all groups of wgmma but the last LEFT; c, one of their results, may be read only afterwards.
template <int LEFT, int N> __device__ __forceinline__ void await_products(float (&c)[N][4]) {
  wait_products<LEFT>();
#pragma unroll
  for (int n = 0; n < N; ++n)
    asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}

// Inputs: q_nope [tokens, num_heads, NOPE] and q_rope [tokens, num_heads, ROPE], whose tokens are q_stride elements
// apart; expanded_map: [keys, num_heads, NOPE + VALUE] and rows_map: [keys, RANK + ROPE], in boxes of [TILE, 64].
// Outputs: out [tokens, num_heads, VALUE], and lse [tokens, num_heads] to base 2. Grid: (heads, items).
extern "C" __global__ void __launch_bounds__(THREADS, 1) latent_prefill(
    const __grid_constant__ TensorMap expanded_map, const __grid_constant__ TensorMap rows_map, const T* q_nope,
    const T* q_rope, long long q_stride, const Item* items, T* out, OPTIONAL float* lse, int num_heads,
    float softmax_scale) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ Barrier k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  unsigned char *k_stages = memory + KEY_BOXES * Q_BOX, *v_stages = k_stages + STAGES * K_STAGE;
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, head = blockIdx.x;
  if (thread == CONSUMERS) {
    for (int s = 0; s < STAGES; ++s) {
      init(&k_full[s], 1), init(&v_full[s], 1);
      init(&k_empty[s], WARPS), init(&v_empty[s], WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  wait_for_predecessor();
  start_successor();
  Item item = items[blockIdx.y];
  int tiles = (item.keys + TILE - 1) / TILE;
  __syncthreads();

  if (warp >= WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (thread != CONSUMERS) return;
    for (int tile = 0; tile < tiles; ++tile) {
      int s = tile % STAGES, turn = tile / STAGES, key = item.first_key + tile * TILE, column = head * (NOPE + VALUE);
      if (turn) wait(&k_empty[s], (turn - 1) & 1);
      expect(&k_full[s], K_STAGE);
#pragma unroll
      for (int i = 0; i < NOPE / 64; ++i)
        copy_box(k_stages + s * K_STAGE + i * BOX, expanded_map, column + i * 64, key, &k_full[s]);
      copy_box(k_stages + s * K_STAGE + NOPE / 64 * BOX, rows_map, RANK, key, &k_full[s]);
      if (turn) wait(&v_empty[s], (turn - 1) & 1);
      expect(&v_full[s], V_STAGE);
#pragma unroll
      for (int i = 0; i < VALUE_BOXES; ++i)
        copy_box(v_stages + s * V_STAGE + i * BOX, expanded_map, column + NOPE + i * 64, key, &v_full[s]);
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  // Store a warpgroup's queries with the 128-byte swizzle of TMA.
  int group = warp >> 2, first_row = group * 64;
  for (int i = thread & 127; i < 64 * KEY_BOXES * 8; i += 128) {
    int row = first_row + i / (KEY_BOXES * 8), part = i / 8 % KEY_BOXES, chunk = i % 8;
    long long token = item.first_query + min(row, item.queries - 1);
    const T* from = part < NOPE / 64 ? q_nope + token * q_stride + head * NOPE + part * 64
                                     : q_rope + token * q_stride + head * ROPE + (part - NOPE / 64) * 64;
    *(uint4*)(memory + part * Q_BOX + row * LINE + (chunk ^ row & 7) * 16) = *(const uint4*)(from + chunk * 8);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (group) asm volatile("bar.sync 2, 128;" ::: "memory");
  else asm volatile("bar.sync 1, 128;" ::: "memory");

  int g = lane >> 2, p = lane & 3, row = first_row + (warp & 3) * 16 + g;  // row is that of h 0
  float s[TILE / 8][4], o[VALUE / 8][4] = {}, largest[2] = {-INF, -INF}, sum[2] = {}, scale = softmax_scale * LOG2_E;
  unsigned shares[TILE / 16][4], q = shared_address(memory) + first_row * LINE;

  auto multiply_queries = [&](int tile) {
    wait(&k_full[tile % STAGES], tile / STAGES & 1);
    unsigned k = shared_address(k_stages + tile % STAGES * K_STAGE);
#pragma unroll
    for (int t = 0; t < TILE / 8; ++t) s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0.f;
    fence_products();
#pragma unroll
    for (int i = 0; i < KEY_BOXES * 4; ++i)
      multiply_add<true>(s, descriptor(q + i / 4 * Q_BOX + i % 4 * 32), descriptor(k + i / 4 * BOX + i % 4 * 32));
    commit_products();
  };
  auto multiply_shares = [&](int tile) {
    wait(&v_full[tile % STAGES], tile / STAGES & 1);
    unsigned v = shared_address(v_stages + tile % STAGES * V_STAGE);
    fence_products();
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i)
#pragma unroll
      for (int part = 0; part < VALUE_BOXES; part += 2)
        multiply_values(o + part * 8, shares[i], columns_descriptor(v + part * BOX + i * 16 * LINE));
    commit_products();
  };
  // Turn scores into softmax weights; the caller must multiply the sums so far by `rescale`.
  auto weigh = [&](int tile, float (&rescale)[2]) {
    int key = tile * TILE;
    bool masked = key + TILE - 1 > min(item.offset + first_row, item.keys - 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int last = min(item.offset + row + 8 * h, item.keys - 1) - key - 2 * p;
      float most = largest[h];
#pragma unroll
      for (int t = 0; t < TILE / 8; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (masked && t * 8 + i > last) s[t][2 * h + i] = -INF;
          most = fmaxf(most, s[t][2 * h + i]);
        }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      float base = most == -INF ? 0.f : most * scale;  // a query may see nothing of this part
      rescale[h] = exp2f(largest[h] * scale - base);
      largest[h] = most, sum[h] *= rescale[h];
#pragma unroll
      for (int t = 0; t < TILE / 8; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[h] += s[t][2 * h + i] = exp2f(s[t][2 * h + i] * scale - base);
    }
  };
  auto pack_shares = [&] {
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) shares[i][j] = pack(s[2 * i + j / 2][j % 2 * 2], s[2 * i + j / 2][j % 2 * 2 + 1]);
  };

  float rescale[2];
  multiply_queries(0);
  await_products<0>(s);
  if (lane == 0) arrive(&k_empty[0]);
  weigh(0, rescale);
  pack_shares();
  for (int tile = 1; tile < tiles; ++tile) {
    multiply_queries(tile);
    multiply_shares(tile - 1);
    await_products<1>(s);
    if (lane == 0) arrive(&k_empty[tile % STAGES]);
    weigh(tile, rescale);
    await_products<0>(o);
    if (lane == 0) arrive(&v_empty[(tile - 1) % STAGES]);
#pragma unroll
    for (int n = 0; n < VALUE / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i >> 1];
    pack_shares();
  }
  multiply_shares(tiles - 1);
  await_products<0>(o);

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = quad_sum(sum[h]), factor = total > 0.f ? 1.f / total : 0.f, before = 0.f, earlier = -INF;
    int query = row + 8 * h;
    long long at = (long long)(item.first_query + min(query, item.queries - 1)) * num_heads + head;
    if (item.merges) earlier = lse[at];
    __syncwarp();  // a quad has read it before one of its lanes writes
    if (query >= item.queries) continue;
    if (lse) {
      float own = total > 0.f ? largest[h] * scale + log2f(total) : -INF;
      float most = fmaxf(earlier, own);  // finite: every query sees at least one key of its row's first part
      float all = most + log2f(exp2f(earlier - most) + exp2f(own - most));
      before = exp2f(earlier - all), factor *= exp2f(own - all);
      if (p == 0) lse[at] = all;
    }
#pragma unroll
    for (int n = 0; n < VALUE / 8; ++n) {
      unsigned* to = (unsigned*)(out + at * VALUE + n * 8 + 2 * p);
      float low = o[n][2 * h] * factor, high = o[n][2 * h + 1] * factor;
      if (item.merges) low += before * low_of(*to), high += before * high_of(*to);
      *to = pack(low, high);
    }
  }
}
