// Attention of a decode step in one launch (flash-decoding: Dao et al., 2023). For each row, which has one query token,
// the kernel norms and rotates q and k of the fused QKV product, stores the new K and V in the paged cache, and
// computes softmax(scale * q @ K^T) @ V over the row's tokens for every query head. q, k and v are T (bf16 or f16), the
// cache is T or e4m3, sums and softmax are float32.
//
// A cluster of blocks serves one KV head of one row. The cluster's warps take tiles of 16 cached tokens in turn. Each
// warp loads its tiles from global memory directly into the registers of `mma`, without shared memory, and keeps an
// online softmax of its own. The new token's K and V are not read back from the cache: their score and value are one
// more partial result. Finally the partial results are combined by an LSE merge: those of a block's warps through
// shared memory, and those of a cluster's blocks through distributed shared memory.
//
// A long row is cut into splits of equal size (split-KV). Their number depends on the row's length alone, not on the
// other rows. The row's own cluster takes the first split, or, with FAIR, the first few (`own_splits`). The grid has
// spare clusters in addition to one per row, and these take the other splits. The cluster that finishes last merges all
// splits of the row. A split has the same bits whichever cluster computes it.
//
// The tensor cores compute the scores as K [16 tokens, dims] @ q^T [dims, 8 heads] and the output as V^T [dims, 16
// tokens] @ p^T [16 tokens, 8 heads], where p are the softmax weights. A product sums over its inner axis, so the order
// of dimensions and tokens on that axis is free as long as both operands use the same one. The order is chosen so that
// each thread loads 16 contiguous bytes. If K and V are e4m3, they are converted to f16 in registers, and so are q and
// p, because f16 has more mantissa bits than bf16. Values of q beyond f16's range saturate.
//
// Example: lane 5 of warp 1 of the cluster's first block, with HEAD_DIM 128, 16-bit K and V, WARPS 4 and CLUSTER 2. The
// warp takes tiles 1, 9, 17, ... of its split (STEP is 8). With g = lane / 4 = 1 and p = lane % 4 = 1, the lane loads
// from a tile's K tokens 1 and 9, dimensions 8 to 15, 40 to 47, 72 to 79 and 104 to 111; and from its V tokens 2, 3, 10
// and 11, dimensions 8 to 15 and 72 to 79. It has the scores of query heads 2 and 3 with tokens 1 and 9.
//
// A KV head of 512 dimensions has two clusters. Each reads all of K, in two pieces, and one half of V. With STORES 0
// the layer has no K and V of its own: it attends to the cache of an earlier layer, which already contains the new
// token, and qkv has queries only.
//
// -DHEAD_DIM: 64, 128, 256 or 512. -DSTORES: 0 or 1. -DGROUP: query heads per KV head, at most 8. -DPAGE_SIZE: a power
// of two. -DCLUSTER: blocks per cluster. -DWARPS: warps per block, at least 2. -DBLOCKS_OF_SM: resident blocks per SM
// that the registers must allow. -DSPARES_FIRST=1: spare clusters come before those of the rows in the grid, so they
// begin first. -DFAIR=1: a row's own cluster takes its fair part of the row's splits; there must be as many spare
// clusters as run at a time. -DROUNDED=1: the output is rounded to FP8 as in quantize_groups.cu, with one scale per
// head of 128 dimensions; a block must then merge whole heads of 128 dimensions. -DCACHE: see fp8.cuh.
#include "cluster.cuh"
#include "mma.cuh"
#include "rounding.cuh"

#define INF __int_as_float(0x7f800000)
constexpr float LOG2_E = 1.44269504f;  // factor of scores: the softmax uses exp2
constexpr int THREADS = WARPS * 32;
constexpr int TILE = 16;
constexpr int VALUE_DIM = HEAD_DIM < 256 ? HEAD_DIM : 256;  // dimensions of V that a cluster has
constexpr int VALUE_SPLIT = HEAD_DIM / VALUE_DIM;           // clusters of a KV head, and pieces of its K
constexpr int STRIPS = HEAD_DIM / 32 / VALUE_SPLIT;  // strips of 32 dimensions of a piece of K, 8 of them in a thread
constexpr int HALVES = VALUE_DIM / 64;         // strips of 64 dimensions of V, 8 of them in a thread
constexpr int K_VALUES = 16 / sizeof(C);       // values of a load of K; four threads load a token
constexpr int K_LOADS = HEAD_DIM / 4 / K_VALUES / VALUE_SPLIT;  // loads of a thread for a piece of a token's K
// Number of values that one load of V returns; eight threads load a token.
constexpr int V_VALUES = K_VALUES < VALUE_DIM / 8 ? K_VALUES : VALUE_DIM / 8;
constexpr int V_LOADS = VALUE_DIM / 8 / V_VALUES;
constexpr int HALF = HEAD_DIM / 2;
constexpr int PAIRS = HALF / 32;      // pairs (i, i + HALF) of dimensions, which are rotated together, in a lane
constexpr int HEADS_AT_ONCE = HEAD_DIM > 128 ? 1 : (8 + WARPS - 1) / WARPS;  // query heads that a warp loads at once
constexpr int STRIDE = HEAD_DIM + 8;  // padded row of a head in shared memory: avoids bank conflicts
constexpr int PARTIALS = WARPS + 1;   // the last is the new token's
constexpr int VALUES = GROUP * VALUE_DIM;
constexpr int STEP = CLUSTER * WARPS;      // distance between successive tiles of a warp
constexpr int OWN_VALUES = VALUES / CLUSTER;    // contiguous values of the output that a block merges
constexpr int RECORD = OWN_VALUES + 2 * GROUP;  // floats of a block's partial result of a split: values, maxima, sums
using M = Either<FP8, f16, T>::type;       // type of the tensor cores' operands
// Registers per thread: as many as BLOCKS_OF_SM resident blocks allow. The configuration for few rows (CLUSTER 8, WARPS
// 6) has at most 160, so that a block of quantized_gemv.cu can be resident on the same SM: each of the SM's four
// partitions has 16,384 registers, which must suffice for two warps of each kernel.
constexpr int LEFT = 65536 / (THREADS * BLOCKS_OF_SM) / 8 * 8;
constexpr int REGISTERS = LEFT > 255 ? 255 : CLUSTER == 8 && WARPS == 6 ? 160 : LEFT;
constexpr bool KEEP_Q = VALUE_SPLIT == 1 && WARPS * BLOCKS_OF_SM <= 12;  // true: registers suffice to keep q in them

// Rule for splitting long rows. A row of more than 2 * `min_tiles` tiles gets `num_kv_splits` splits; the number is
// reduced or increased until a split has between `min_tiles` and `max_tiles` tiles, but never exceeds `max_splits`. The
// splits of a row are equal, so that clusters that take the same number of them end at the same time.
struct Cutting {
  int num_kv_splits, min_tiles, max_tiles, max_splits;
};

// Number of tiles with cached tokens that the query of a row of `length` tokens sees.
__device__ __forceinline__ int tiles_seen(int length, int window) {
  int end = STORES ? length - 1 : length, first = window ? max(0, length - window) : 0;
  return first < end ? (end + TILE - 1) / TILE - first / TILE : 0;
}

// Work of a cluster: one split of a row, for one part of a KV head.
struct Unit {
  int row, part, split, splits;
  int size;         // tiles of every split except the last, which may have fewer
  int tile, tiles;  // first tile of the split, and the end of its tiles
  int position;     // position of the query
  int first, end;   // range of the cached positions that the query sees

  // Set everything that follows from the row's length; row, part and split are set.
  __device__ __forceinline__ void set_length(int length, int window, const Cutting& cutting) {
    position = length - 1, end = STORES ? position : length, first = window ? max(0, position - window + 1) : 0;
    int from = first / TILE, count = tiles_seen(length, window);
    splits = 1, size = count;
    if (count > 2 * cutting.min_tiles) {
      size =
          min(max((count + cutting.num_kv_splits - 1) / cutting.num_kv_splits, cutting.min_tiles), cutting.max_tiles);
      size = (max(size, (count + cutting.max_splits - 1) / cutting.max_splits) + STEP - 1) / STEP * STEP;
      splits = (count + size - 1) / size;
      size = ((count + splits - 1) / splits + STEP - 1) / STEP * STEP;
    }
    tile = from + split * size, tiles = min(tile + size, from + count);
  }

  // Number of splits that the row's own cluster takes, one after another. With FAIR it takes as many as have `fair`
  // tiles: so spare clusters share long rows among short ones, but not rows of equal length, which keep the GPU busy by
  // themselves. The number is rounded up, because it is faster to read on in a row than to begin another.
  __device__ __forceinline__ int own_splits(int fair) const {
    return min(FAIR ? max((fair + size - 1) / max(size, 1), 1) : 1, splits);
  }
};

// Number of tiles that each of `clusters` would have if they shared the step's tiles equally. Called by a whole warp.
__device__ __forceinline__ int fair_tiles(const int* lengths, int rows, int window, int clusters) {
  if (!FAIR) return 0;
  int tiles = 0;
#pragma unroll 4
  for (int row = threadIdx.x & 31; row < rows; row += 32) tiles += tiles_seen(lengths[row], window);
  return __reduce_add_sync(0xffffffffu, tiles) / clusters;
}

struct Cache {
  const C* k;  // K of the KV head
  const C* v;
  const int* pages;  // pages of the row
  long long token_stride;
};

// Offset of a position's K or V in the pool, in values.
__device__ __forceinline__ long long place(const Cache& cache, int position) {
  int page = cache.pages[position / PAGE_SIZE];
  return ((long long)page * PAGE_SIZE + position % PAGE_SIZE) * cache.token_stride;
}

// Offset of position `i` of a tile that begins at offset `start`. If a tile spans several pages, each position looks up
// its own page.
__device__ __forceinline__ long long place_in_tile(const Cache& cache, long long start, int tile, int i) {
  return PAGE_SIZE >= TILE ? start + i * cache.token_stride : place(cache, tile * TILE + i);
}

// Load a lane's part of a tile of K. Positions at or after `end` load the last valid position in their place, so that
// their scores are finite; they are masked later.
__device__ __forceinline__ void load_k(
    uint4 (&k)[2][K_LOADS], const Cache& cache, long long start, int tile, int end, int piece = 0) {
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    int i = min(n * 8 + (lane >> 2), end - 1 - tile * TILE);
    const C* from = cache.k + place_in_tile(cache, start, tile, i) + (lane & 3) * K_VALUES;
#pragma unroll
    for (int j = 0; j < K_LOADS; ++j) k[n][j] = load_once(from + (piece * K_LOADS + j) * 4 * K_VALUES);
  }
}

__device__ __forceinline__ void load_v(uint4 (&v)[4][V_LOADS], const Cache& cache, long long start, int tile, int end) {
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // positions 2p, 2p + 1, 2p + 8, 2p + 9 of the tile
    int position = min((lane & 3) * 2 + (i & 1) + (i >> 1) * 8, end - 1 - tile * TILE);
    const C* from = cache.v + place_in_tile(cache, start, tile, position) + (lane >> 2) * V_VALUES;
#pragma unroll
    for (int h = 0; h < V_LOADS; ++h) {
      if constexpr (V_VALUES * sizeof(C) == 16) {
        v[i][h] = load_once(from + h * 8 * V_VALUES);
      } else {
        uint2 half = load_once_8(from + h * 8 * V_VALUES);
        v[i][h] = make_uint4(half.x, half.y, 0, 0);
      }
    }
  }
}

// Load a lane's part of q: for head lane / 4, the dimensions of K that the lane holds. The loads are volatile so that
// the compiler keeps them in the loop: hoisted out of it, their results would need more registers than there are.
__device__ __forceinline__ void load_q(uint4 (&b)[STRIPS], const M (&q)[8][STRIDE], int piece = 0) {
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < STRIPS; ++j) {
    int at = (piece * STRIPS + j) * 8 / K_VALUES * 4 * K_VALUES + (lane & 3) * K_VALUES + j * 8 % K_VALUES;
    unsigned from = (unsigned)__cvta_generic_to_shared(q[lane >> 2] + at);
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[j].x), "=r"(b[j].y), "=r"(b[j].z), "=r"(b[j].w)
                 : "r"(from));
  }
}

__device__ __forceinline__ unsigned word(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Get the i-th pair of the dimensions of a token's K that a lane holds.
__device__ __forceinline__ unsigned two_of_k(const uint4 (&k)[K_LOADS], int i) {
  if constexpr (FP8)
    return upcast(word(k[i / 8], i / 2 % 4), i & 1);
  else
    return word(k[i / 4], i % 4);
}

// Build the left operand V^T for the i-th pair of a lane's dimensions: a[0] has the pair's first dimension at the
// lane's positions 0 and 1, a[1] the second dimension at the same positions; a[2] and a[3] have them at positions 2 and
// 3.
__device__ __forceinline__ void two_of_v(unsigned (&a)[4], const uint4 (&v)[4][V_LOADS], int i) {
  unsigned w[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) w[n] = FP8 ? word(v[n][i / 8], i / 2 % 4) : word(v[n][i / 4], i % 4);
#pragma unroll
  for (int n = 0; n < 4; n += 2) {
    if constexpr (FP8) {
      unsigned both = __byte_perm(w[n], w[n + 1], i & 1 ? 0x7362 : 0x5140);
      a[n] = upcast(both, false), a[n + 1] = upcast(both, true);
    } else {
      a[n] = __byte_perm(w[n], w[n + 1], 0x5410), a[n + 1] = __byte_perm(w[n], w[n + 1], 0x7632);
    }
  }
}

// Convert q to the type of the tensor cores' operands.
template <int N> __device__ __forceinline__ Vec<N, M> operand(const Vec<N>& x) {
  if constexpr (Same<M, T>::value) {
    return x;
  } else {
    Vec<N, M> y;
#pragma unroll
    for (int i = 0; i < N; ++i)
      asm("cvt.rn.satfinite.f16.f32 %0, %1;" : "=h"(y.v[i].bits) : "f"(to_float(x.v[i])));
    return y;
  }
}

// A lane's part of a head: PAIRS dimensions of its first half, and the dimensions of the second half that are rotated
// with them.
struct Head {
  Vec<PAIRS> low = {}, high = {};
  __device__ __forceinline__ void load(const T* in) {
    int at = (threadIdx.x & 31) * PAIRS;
    low = *(const Vec<PAIRS>*)(in + at), high = *(const Vec<PAIRS>*)(in + HALF + at);
  }
};

// Apply RMSNorm to a head, if there is a weight, and then the rotary embedding.
__device__ __forceinline__ void norm_rotate(Head& head, const W* norm, float eps, const float* angle) {
  int at = (threadIdx.x & 31) * PAIRS;
  Vec<PAIRS>&low = head.low, &high = head.high;
  float a[PAIRS], b[PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) a[j] = to_float(low.v[j]), b[j] = to_float(high.v[j]);
  if (norm) {
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) squares += a[j] * a[j] + b[j] * b[j];
    float scale = rsqrtf(warp_sum(squares) / HEAD_DIM + eps);
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      a[j] = rounded(times_norm(a[j] * scale, norm[at + j]));
      b[j] = rounded(times_norm(b[j] * scale, norm[HALF + at + j]));
    }
  }
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    float c = angle[at + j], s = angle[HALF + at + j];
    low.v[j] = from_float<T>(a[j] * c - b[j] * s);
    high.v[j] = from_float<T>(b[j] * c + a[j] * s);
  }
}

// Transpose an 8 x 8 matrix of 16-bit values across a warp: a thread passes (row g; columns 2p, 2p + 1) and gets (rows
// 2p, 2p + 1; column g).
__device__ __forceinline__ unsigned transpose(unsigned pair) {
  unsigned out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// Maximum, or sum, over the eight lanes that share lane % 4.
__device__ __forceinline__ float column_max(float x) {
  for (int offset = 4; offset < 32; offset *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}
__device__ __forceinline__ float column_sum(float x) {
  for (int offset = 4; offset < 32; offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Prefetch up to 4 KiB into L2; each lane prefetches one line of 128 bytes.
__device__ __forceinline__ void prefetch(const void* from, int bytes) {
  int at = (threadIdx.x & 31) * 128;
  if (at < bytes) asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)from + at));
}

// Swizzle of partial results in shared memory: values d and d + 1 of a head (d even) are stored at d ^ swap(head), so
// that lanes that store different heads at the same time use different banks.
__device__ __forceinline__ int swap(int head) { return head & 6; }

// Load a value that another block wrote, bypassing L1.
__device__ __forceinline__ float load_fresh(const float* from) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from));
  return x;
}

// Offset of a cluster's i-th output value, relative to its first one.
__device__ __forceinline__ int place_of_value(int i) {
  return VALUE_SPLIT == 1 ? i : i / VALUE_DIM * HEAD_DIM + i % VALUE_DIM;
}

// Output of a row's KV head.
struct Output {
  T* values;
  e4m3* codes;    // ROUNDED: in place of `values`
  float* scales;  // scales of the query heads, `stride` floats apart
  int stride;

  // Store y / sum: N contiguous values from the cluster's i-th on. If ROUNDED, a warp has a head and a lane four
  // values.
  template <int N> __device__ __forceinline__ void store(int i, const float (&y)[N], float sum) const {
    Vec<N> value;
#pragma unroll
    for (int j = 0; j < N; ++j) value.v[j] = from_float<T>(y[j] / sum);
    if constexpr (ROUNDED) {
      float scale = fp8_scale(largest_of<32>(value));
      if ((threadIdx.x & 31) == 0) scales[i / HEAD_DIM * stride] = scale;
      store_rounded(codes + i, value, scale, __frcp_rn(scale));
    } else {
      *(Vec<N>*)(values + place_of_value(i)) = value;
    }
  }
};
constexpr int RUN = ROUNDED ? 4 : 1;  // contiguous values that a thread merges

// Merge the records of a row's splits into this block's share of the output.
__device__ __forceinline__ void merge_splits(const Output& to, const float* records, int splits) {
  for (int j = threadIdx.x * RUN; j < OWN_VALUES; j += THREADS * RUN) {
    int i = blockIdx.x * OWN_VALUES + j, head = i / VALUE_DIM;
    float highest = -INF, sum = 0.f, y[RUN] = {};
#pragma unroll 4
    for (int c = 0; c < splits; ++c) {
      const float* record = records + c * RECORD;
      float split_max = load_fresh(record + OWN_VALUES + head);
      float split_sum = load_fresh(record + OWN_VALUES + GROUP + head);
      float value[RUN];
#pragma unroll
      for (int n = 0; n < RUN; ++n) value[n] = load_fresh(record + j + n);
      float higher = fmaxf(highest, split_max), fade = exp2f(highest - higher), weight = exp2f(split_max - higher);
      highest = higher, sum = sum * fade + split_sum * weight;
#pragma unroll
      for (int n = 0; n < RUN; ++n) y[n] = y[n] * fade + value[n] * weight;
    }
    to.store(i, y, sum);
  }
}

// Find the index-th split among all splits that the rows' own clusters do not take; false if there are fewer. Called by
// a whole warp.
__device__ __forceinline__ bool find_split(
    Unit& unit, int index, const int* lengths, int rows, int window, const Cutting& cutting, int spares) {
  int left = index, lane = threadIdx.x & 31, longest = 0;
#pragma unroll 8
  // Fast path: check the longest row first, because usually no row is split.
  for (int row = lane; row < rows; row += 32) longest = max(longest, lengths[row]);
  if (!__any_sync(0xffffffffu, longest / TILE >= 2 * cutting.min_tiles)) return false;
  int fair = fair_tiles(lengths, rows, window, spares);
  for (int base = 0; base < rows; base += 32) {
    Unit at = {};
    if (base + lane < rows) at.set_length(lengths[base + lane], window, cutting);
    int own = at.own_splits(fair), more = at.splits - own, until = more;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      int below = __shfl_up_sync(0xffffffffu, until, offset);
      if (lane >= offset) until += below;
    }
    unsigned beyond = __ballot_sync(0xffffffffu, until > left);
    if (beyond) {
      int there = __ffs(beyond) - 1;
      unit.row = base + there;
      unit.split = left - __shfl_sync(0xffffffffu, until - more - own, there);
      return true;
    }
    left -= __shfl_sync(0xffffffffu, until, 31);
  }
  return false;
}

// Grid: (CLUSTER, KV heads * VALUE_SPLIT, rows + spare clusters per part). `lengths` [rows] include the new token.
// `window`: number of positions that a query sees, its own included; 0 means all. `sinks` [heads]: attention sinks, one
// extra score per query head whose value is 0; only with STORES. `v_eps`: each head of v is divided by its root mean
// square with this eps; a negative value turns this off. `records` [rows * gridDim.y, CLUSTER, max_splits, RECORD] hold
// the partial results of splits. `counters` [rows * gridDim.y, CLUSTER] count finished splits; they are zero before and
// after the launch. `scales` [heads, scales_stride] are the scales of a ROUNDED output, one column per row.
extern "C" __global__ void __maxnreg__(REGISTERS) decode_attention(
    const T* qkv, const long long* slots, const int* lengths, const int* page_table, long long table_stride, int rows,
    const float* cos_sin, OPTIONAL const W* q_norm, OPTIONAL const W* k_norm, float eps, float v_eps, C* k_cache,
    C* v_cache, OPTIONAL const T* sinks, OPTIONAL T* out, OPTIONAL e4m3* codes, OPTIONAL float* scales,
    int scales_stride, float softmax_scale, int window, int num_kv_splits, int min_tiles, int max_tiles, int max_splits,
    float* records, int* counters) {
  __shared__ alignas(16) M q[8][STRIDE];
  __shared__ alignas(16) T new_k[HEAD_DIM], new_v[VALUE_DIM];
  __shared__ float partial_max[PARTIALS][8], partial_sum[PARTIALS][8];
  __shared__ alignas(16) float partial[WARPS][GROUP][VALUE_DIM];
  __shared__ float new_share[8];  // weight of the new token's value in the last partial
  __shared__ float block_max[CLUSTER][GROUP], block_sum[CLUSTER][GROUP];
  __shared__ alignas(16) float block[CLUSTER][OWN_VALUES];
  __shared__ bool is_last;
  __shared__ volatile int kept_until, kept_size;  // FAIR: values between splits, for which the loop has no registers
  Cutting cutting = {num_kv_splits, min_tiles, max_tiles, max_splits};
  int rank = blockIdx.x, parts = gridDim.y, kv_heads = parts / VALUE_SPLIT;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = rank * WARPS + warp;
  int spares = gridDim.z - rows, first_row = SPARES_FIRST ? spares : 0;
  Unit unit = {(int)blockIdx.z - first_row, (int)blockIdx.y};
  Cache cache;
  cache.token_stride = (long long)kv_heads * HEAD_DIM;
  const float scale = softmax_scale * LOG2_E;

  bool is_spare = SPARES_FIRST ? (int)blockIdx.z < spares : (int)blockIdx.z >= rows;
  int index = SPARES_FIRST ? blockIdx.z : blockIdx.z - rows;  // split that a spare cluster takes
  do {
    if (is_spare) {
      if (!find_split(unit, index, lengths, rows, window, cutting, spares)) return;
      index += spares;
    }
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // this block has begun
    long long slot = slots[unit.row];
    int kv_head = unit.part / VALUE_SPLIT, first_value = unit.part % VALUE_SPLIT * VALUE_DIM;
    cache.k = k_cache + kv_head * HEAD_DIM, cache.v = v_cache + kv_head * HEAD_DIM + first_value;
    cache.pages = page_table + slot * table_stride;
    unit.set_length(lengths[unit.row], window, cutting);
    int tile = unit.tile + part;
    uint4 k[2][K_LOADS], v[4][V_LOADS];
    long long start = 0;  // offset of the tile
    if (tile < unit.tiles) {
      start = place(cache, tile * TILE);
      load_k(k, cache, start, tile, unit.end), load_v(v, cache, start, tile, unit.end);
    }
    // With few short rows, memory bandwidth is unused, so the successor may load its weights now. With more work, its
    // loads would delay the loads below.
    bool starts_early = CLUSTER == 8 && unit.splits == 1;
    if (starts_early) start_successor();
    // The cluster takes the splits from unit.split to before `until`, and their tiles end at `tiles`.
    int until = unit.split + 1, tiles = unit.tiles;
    if (FAIR && !is_spare && unit.splits > 1) {
      until = unit.own_splits(fair_tiles(lengths, rows, window, spares));
      tiles = min(unit.tile + until * unit.size, (unit.end + TILE - 1) / TILE);
    }
    int ahead = max(min(tile + STEP, tiles - 1), 0);
    long long next_start = place(cache, ahead * TILE);  // a page's index is read one tile early
    // Prefetch constants: the weights read since the previous layer have evicted them from L2.
    const float* angle = cos_sin + (long long)unit.position * HEAD_DIM;
    if (HEAD_DIM <= 128) {  // wider heads have no registers left
      if (warp == 0) prefetch(angle, HEAD_DIM * 4);
      if (warp == 1 && q_norm) prefetch(q_norm, HEAD_DIM * sizeof(W));
      if (warp == 1 && k_norm) prefetch(k_norm, HEAD_DIM * sizeof(W));
    }
    wait_for_predecessor();

    const T* heads = qkv + (long long)unit.row * (GROUP + (STORES ? 2 : 0)) * kv_heads * HEAD_DIM;
    // This block stores the new token's K and V, and computes its partial result in the last split.
    bool takes_new = STORES && until == unit.splits && rank == CLUSTER - 1;
    if (FAIR && threadIdx.x == 0) kept_until = until, kept_size = unit.size;
    Head key;  // key of the new token
    const T* new_key = heads + (GROUP * kv_heads + kv_head) * HEAD_DIM;
    for (int first = warp; first < 8; first += HEADS_AT_ONCE * WARPS) {
      Head own[HEADS_AT_ONCE];
#pragma unroll
      for (int i = 0; i < HEADS_AT_ONCE; ++i) {
        int head = first + i * WARPS;
        if (head < GROUP) own[i].load(heads + (kv_head * GROUP + head) * HEAD_DIM);
      }
      if (HEADS_AT_ONCE > 1 && takes_new && warp == WARPS - 1) key.load(new_key);
#pragma unroll
      for (int i = 0; i < HEADS_AT_ONCE; ++i) {
        int head = first + i * WARPS;
        if (head < GROUP) norm_rotate(own[i], q_norm, eps, angle);
        if (head < 8) {
          *(Vec<PAIRS, M>*)(q[head] + lane * PAIRS) = operand(own[i].low);
          *(Vec<PAIRS, M>*)(q[head] + HALF + lane * PAIRS) = operand(own[i].high);
        }
      }
    }
    if (takes_new) {
      long long to = place(cache, unit.position) + kv_head * HEAD_DIM;
      if (warp == WARPS - 1) {
        if (HEADS_AT_ONCE == 1) key.load(new_key);
        norm_rotate(key, k_norm, eps, angle);
        if (first_value == 0) {
          store(k_cache + to + lane * PAIRS, key.low);
          store(k_cache + to + HALF + lane * PAIRS, key.high);
        }
        *(Vec<PAIRS>*)(new_k + lane * PAIRS) = as_stored(key.low);
        *(Vec<PAIRS>*)(new_k + HALF + lane * PAIRS) = as_stored(key.high);
      } else if (warp == WARPS - 2) {
        constexpr int LANE_VALUES = VALUE_DIM / 32;
        using Part = Vec<LANE_VALUES>;
        const T* value = heads + ((GROUP + 1) * kv_heads + kv_head) * HEAD_DIM + lane * LANE_VALUES;
        Part part = *(const Part*)(value + first_value);
        if (v_eps >= 0.f) {
          float squares = 0.f;
          for (int i = 0; i < HEAD_DIM; i += VALUE_DIM) {
            Part any = *(const Part*)(value + i);
#pragma unroll
            for (int j = 0; j < LANE_VALUES; ++j) squares += to_float(any.v[j]) * to_float(any.v[j]);
          }
          float factor = rsqrtf(warp_sum(squares) / HEAD_DIM + v_eps);
#pragma unroll
          for (int j = 0; j < LANE_VALUES; ++j) part.v[j] = from_float<T>(to_float(part.v[j]) * factor);
        }
        store(v_cache + to + first_value + lane * LANE_VALUES, part);
        *(Part*)(new_v + lane * LANE_VALUES) = as_stored(part);
      }
    }
    __syncthreads();

    uint4 kept[STRIPS];
    if (KEEP_Q) load_q(kept, q);
    for (;;) {  // one split after another
      // A lane has heads 2p and 2p + 1: their highest score, their sum, and dimensions g and g + 8 of each 16
      // dimensions of the output.
      float highest[2] = {-INF, -INF}, sum[2] = {}, o[HALVES * 4][4] = {};

      for (; tile < unit.tiles; tile += STEP) {
        float s[4] = {};
#pragma unroll
        for (int piece = 0; piece < VALUE_SPLIT; ++piece) {
          if (piece > 0) load_k(k, cache, start, tile, unit.end, piece);
          uint4 loaded[STRIPS];
          if (!KEEP_Q) load_q(loaded, q, piece);
#pragma unroll
          for (int j = 0; j < STRIPS; ++j) {
            uint4 b = KEEP_Q ? kept[j] : loaded[j];
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; i += 2)
              mma<M>(s, two_of_k(k[0], i), two_of_k(k[1], i), two_of_k(k[0], i + 1), two_of_k(k[1], i + 1),
                     word(b, i % 4), word(b, i % 4 + 1));
          }
        }
        int next = tile + STEP;
        start = next_start;
        if (next < tiles) {
          load_k(k, cache, start, next, unit.end);
          next_start = place(cache, min(next + STEP, tiles - 1) * TILE);
        }

        int position = tile * TILE + (lane >> 2);
        bool low_in = position < unit.end && position >= unit.first,
             high_in = position + 8 < unit.end && position + 8 >= unit.first;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          s[i] = low_in ? s[i] * scale : -INF, s[i + 2] = high_in ? s[i + 2] * scale : -INF;
          // `higher` is finite: every tile has at least one position that is not masked.
          float higher = fmaxf(highest[i], column_max(fmaxf(s[i], s[i + 2])));
          float fade = exp2f(highest[i] - higher);
          highest[i] = higher;
          s[i] = exp2f(s[i] - higher), s[i + 2] = exp2f(s[i + 2] - higher);
          sum[i] = sum[i] * fade + s[i] + s[i + 2];
#pragma unroll
          for (int n = 0; n < HALVES * 4; ++n) o[n][i] *= fade, o[n][i + 2] *= fade;
        }
        unsigned p0 = transpose(pack<M>(s[0], s[1])), p1 = transpose(pack<M>(s[2], s[3]));
#pragma unroll
        for (int n = 0; n < HALVES * 4; ++n) {  // a thread's dimensions 2n and 2n + 1 are rows g and g + 8
          unsigned a[4];
          two_of_v(a, v, n);
          mma<M>(o[n], a[0], a[1], a[2], a[3], p0, p1);
        }
        if (next < tiles) load_v(v, cache, start, next, unit.end);
      }

      bool has_new = takes_new && unit.split == unit.splits - 1, continues = FAIR && unit.split + 1 < kept_until;
      if (!starts_early && !continues) start_successor();

      // Merge the partial results of the warps and of the new token.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int head = (lane & 3) * 2 + i;
        float all = column_sum(sum[i]);
        if (lane < 4) partial_max[warp][head] = highest[i], partial_sum[warp][head] = all;
        if (head < GROUP) {
#pragma unroll
          for (int n = 0; n < HALVES * 4; ++n) {
            int d = 2 * n / V_VALUES * 8 * V_VALUES + (lane >> 2) * V_VALUES + 2 * n % V_VALUES;
            *(Vec2*)&partial[warp][head][d ^ swap(head)] = Vec2{o[n][i], o[n][i + 2]};
          }
        }
      }
      for (int head = warp; head < GROUP; head += WARPS) {
        float best = -INF, sum = 0.f, share = 0.f;
        if (has_new) {
          float dot = 0.f;
          for (int d = lane; d < HEAD_DIM; d += 32) dot += to_float(q[head][d]) * to_float(new_k[d]);
          // The sink counts once per row: in the partial result of the new token.
          float score = warp_sum(dot) * scale, sink = sinks ? to_float(sinks[kv_head * GROUP + head]) * LOG2_E : -INF;
          best = fmaxf(score, sink), share = exp2f(score - best), sum = share + exp2f(sink - best);
        }
        if (lane == 0) partial_max[WARPS][head] = best, partial_sum[WARPS][head] = sum, new_share[head] = share;
      }
      __syncthreads();
      int pair = unit.row * parts + unit.part, splits = unit.splits;
      long long first = ((long long)unit.row * kv_heads + kv_head) * GROUP * HEAD_DIM + first_value;
      Output to = {out + first, codes + first, scales + kv_head * GROUP * scales_stride + unit.row, scales_stride};
      float* records_of_row = records + (long long)(pair * CLUSTER + rank) * max_splits * RECORD;
      float* record = records_of_row + unit.split * RECORD;
      if (CLUSTER > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all blocks have begun
#pragma unroll
      for (int i = threadIdx.x * 4; i < VALUES; i += THREADS * 4) {  // four contiguous values per thread
        int head = i / VALUE_DIM, d = i % VALUE_DIM;
        float best = partial_max[WARPS][head];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) best = fmaxf(best, partial_max[w][head]);
        float base = best == -INF ? 0.f : best;  // a block may have no token at all
        float weight = exp2f(partial_max[WARPS][head] - base), of_new = has_new ? new_share[head] * weight : 0.f;
        float total = partial_sum[WARPS][head] * weight, y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = has_new ? to_float(new_v[d + j]) * of_new : 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          weight = exp2f(partial_max[w][head] - base);
          float4 v = *(const float4*)&partial[w][head][d ^ (swap(head) & 4)];
          if (swap(head) & 2) v = make_float4(v.z, v.w, v.x, v.y);
          total += partial_sum[w][head] * weight;
          y[0] += v.x * weight, y[1] += v.y * weight, y[2] += v.z * weight, y[3] += v.w * weight;
        }
        if (CLUSTER == 1 && splits == 1) {
          to.store(i, y, total);
        } else if (CLUSTER == 1) {
#pragma unroll
          for (int j = 0; j < 4; ++j) record[i + j] = y[j];
          if (d == 0) record[OWN_VALUES + head] = best, record[OWN_VALUES + GROUP + head] = total;
        } else {
          int owner = i / OWN_VALUES, at = i % OWN_VALUES;
          store_at(address_in(owner, &block[rank][at]), y);
          if (at == 0 || d == 0) {
            store_at(address_in(owner, &block_max[rank][head]), best);
            store_at(address_in(owner, &block_sum[rank][head]), total);
          }
        }
      }
      if (CLUSTER > 1) {  // each block merges its own values of all blocks' partial results
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
        for (int j = threadIdx.x * RUN; j < OWN_VALUES; j += THREADS * RUN) {
          int i = rank * OWN_VALUES + j, head = i / VALUE_DIM;
          float best = -INF, total = 0.f, y[RUN] = {};
#pragma unroll
          for (int r = 0; r < CLUSTER; ++r) best = fmaxf(best, block_max[r][head]);
#pragma unroll
          for (int r = 0; r < CLUSTER; ++r) {
            float weight = exp2f(block_max[r][head] - best);
            total += block_sum[r][head] * weight;
#pragma unroll
            for (int n = 0; n < RUN; ++n) y[n] += block[r][j + n] * weight;
          }
          if (splits == 1) {
            to.store(i, y, total);
          } else {
#pragma unroll
            for (int n = 0; n < RUN; ++n) record[j + n] = y[n];
            if (j == 0 || i % VALUE_DIM == 0)
              record[OWN_VALUES + head] = best, record[OWN_VALUES + GROUP + head] = total;
          }
        }
      }
      if (splits > 1) {
        __syncthreads();
        if (threadIdx.x == 0) {
          __threadfence();  // make the record visible before counting it
          int* counter = counters + pair * CLUSTER + rank;
          is_last = atomicAdd(counter, 1) == splits - 1;
          if (is_last) *counter = 0, __threadfence();
        }
        __syncthreads();
        if (is_last) merge_splits(to, records_of_row, splits);
      }
      if (!continues) break;
      // The first tiles of the next split are being loaded.
      ++unit.split, unit.tiles = min(unit.tiles + kept_size, tiles);
      if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // has read its `block`
    }
    if (is_spare) __syncthreads();
  } while (is_spare);
}
