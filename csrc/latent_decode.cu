// Latent attention (MLA) over the latents themselves, of decodes and short chunks: each query's heads attend to the same cached rows, of which the first RANK
// dimensions are the values too. Flash-decoding (Dao et al., 2023): a block takes 16 heads of a row and one of the
// row's splits, tile by tile of 64 tokens; a second kernel merges the splits.
//
// While a tile is used, the next one comes in. Of a tile, a warp multiplies its own 8 tokens by all of the 16 queries,
// warps agree on each head's maximum, and then each adds the tile's values to its own RANK / 8 dimensions. Scores are
// exponents of two. Rows in shared memory are 16 bytes longer, so that ldmatrix finds 8 of them in different banks.
//
// -DRANK, a multiple of 128, and -DROPE, whose sum is one of 32; -DPAGE_SIZE.
#include "mma.cuh"

constexpr int ROW = RANK + ROPE;
constexpr int HEADS = 16;
constexpr int TILE = 64;
constexpr int WARPS = TILE / 8;
constexpr int THREADS = WARPS * 32;
constexpr int STRIDE = ROW + 8;
constexpr int P_STRIDE = TILE + 8;
constexpr int DIMS = RANK / WARPS;  // of a warp
constexpr int PARTS = ROW / 8;      // of 16 bytes, of a row
constexpr float LOG2_E = 1.44269504f;
#define INF __int_as_float(0x7f800000)

struct Shared {
  alignas(16) T q[HEADS][STRIDE];
  alignas(16) T rows[2][TILE][STRIDE];
  alignas(16) T p[HEADS][P_STRIDE];
  float largest[WARPS][HEADS], sum[WARPS][HEADS];
};

__device__ __forceinline__ unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ uint4 ldmatrix(const void* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address(row)) : "memory");
  return v;
}

__device__ __forceinline__ uint4 ldmatrix_transposed(const void* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address(row)) : "memory");
  return v;
}

// Positions from `length` on are replaced by the last before it: they are finite, and count for nothing.
__device__ __forceinline__ void load_tile(T (*rows)[STRIDE], const T* cache, const int* pages, int tile, int length) {
#pragma unroll
  for (int i = 0; i < TILE * PARTS / THREADS; ++i) {
    int part = threadIdx.x + i * THREADS, token = part / PARTS, at = part % PARTS * 8;
    int position = min(tile * TILE + token, length - 1);
    long long place = (long long)pages[position / PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE;
    copy_16(&rows[token][at], cache + place * ROW + at);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// query [rows, num_heads, ROW]; grid: rows times splits, blocks of heads. A row is a query; the pages that it sees are
// those of its number in `table_rows`, or else its own. With one split the result goes to out [rows, num_heads, RANK], else
// to partial [rows, num_heads, splits, RANK], and the logarithm of its weight, to base 2, to weights [rows, num_heads, splits].
extern "C" __global__ void __launch_bounds__(THREADS) latent_decode(
    const T* query, const T* cache, const int* lengths, OPTIONAL const int* table_rows, const int* page_table,
    long long table_stride, int splits, int num_heads, float softmax_scale, OPTIONAL float* partial, OPTIONAL float* weights, T* out) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  int row = blockIdx.x / splits, split = blockIdx.x % splits, first_head = blockIdx.y * HEADS;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, p = lane & 3;
  wait_for_predecessor();
  start_successor();
  int length = lengths[row], count = (length + TILE - 1) / TILE, each = (count + splits - 1) / splits;
  int tile = split * each, end = min(tile + each, count);
  long long at_head = (long long)row * num_heads + first_head;
  if (tile >= end) {
    if (weights && threadIdx.x < HEADS && first_head + threadIdx.x < num_heads)
      weights[(at_head + threadIdx.x) * splits + split] = -INF;
    return;
  }
  const int* pages = page_table + (table_rows ? table_rows[row] : row) * table_stride;
  load_tile(shared.rows[tile & 1], cache, pages, tile, length);
  for (int part = threadIdx.x; part < HEADS * PARTS; part += THREADS) {
    int head = part / PARTS, at = part % PARTS * 8;
    uint4 values = {};
    if (first_head + head < num_heads) values = *(const uint4*)(query + (at_head + head) * ROW + at);
    *(uint4*)&shared.q[head][at] = values;
  }

  float acc[DIMS / 8][4] = {}, largest[2] = {-INF, -INF}, sum[2] = {}, scale = softmax_scale * LOG2_E;
  for (; tile < end; ++tile) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    T(*rows)[STRIDE] = shared.rows[tile & 1];
    if (tile + 1 < end) load_tile(shared.rows[(tile + 1) & 1], cache, pages, tile + 1, length);

    float s[2][4] = {};
#pragma unroll 6
    for (int k = 0; k < ROW; k += 32) {
      uint4 b = ldmatrix(&rows[warp * 8 + (lane & 7)][k + (lane >> 3) * 8]);
      uint4 a = ldmatrix(&shared.q[lane & 15][k + (lane >> 4) * 8]);
      mma(s[0], a.x, a.y, a.z, a.w, b.x, b.y);
      a = ldmatrix(&shared.q[lane & 15][k + 16 + (lane >> 4) * 8]);
      mma(s[1], a.x, a.y, a.z, a.w, b.z, b.w);
    }
    // This thread has the scores of head g + 8 * h with tokens 2p and 2p + 1 of the warp's.
    int token = warp * 8 + 2 * p;
    float x[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        x[h][i] = tile * TILE + token + i < length ? (s[0][2 * h + i] + s[1][2 * h + i]) * scale : -INF;
      float most = fmaxf(x[h][0], x[h][1]);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      if (p == 0) shared.largest[warp][g + 8 * h] = most;
    }
    __syncthreads();
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = largest[h];
#pragma unroll
      for (int w = 0; w < WARPS; ++w) most = fmaxf(most, shared.largest[w][g + 8 * h]);
      rescale[h] = exp2f(largest[h] - most), largest[h] = most;
      float low = exp2f(x[h][0] - most), high = exp2f(x[h][1] - most);
      sum[h] = sum[h] * rescale[h] + low + high;
      *(unsigned*)&shared.p[g + 8 * h][token] = pack(low, high);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < DIMS / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] *= rescale[i >> 1];
#pragma unroll
    for (int k = 0; k < TILE; k += 16) {
      uint4 a = ldmatrix(&shared.p[lane & 15][k + (lane >> 4) * 8]);
#pragma unroll
      for (int n = 0; n < DIMS; n += 16) {
        uint4 b = ldmatrix_transposed(&rows[k + (lane & 15)][warp * DIMS + n + (lane >> 4) * 8]);
        mma(acc[n / 8], a.x, a.y, a.z, a.w, b.x, b.y);
        mma(acc[n / 8 + 1], a.x, a.y, a.z, a.w, b.z, b.w);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] = quad_sum(sum[h]);
    if (p == 0) shared.sum[warp][g + 8 * h] = sum[h];
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int head = g + 8 * h;
    if (first_head + head >= num_heads) continue;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += shared.sum[w][head];
    float factor = 1.f / total;
#pragma unroll
    for (int n = 0; n < DIMS / 8; ++n) {
      int dim = warp * DIMS + n * 8 + 2 * p;
      float low = acc[n][2 * h] * factor, high = acc[n][2 * h + 1] * factor;
      if (partial)
        *(Vec2*)(partial + ((at_head + head) * splits + split) * RANK + dim) = {low, high};
      else
        *(unsigned*)(out + (at_head + head) * RANK + dim) = pack(low, high);
    }
    if (weights && warp == 0 && p == 0) weights[(at_head + head) * splits + split] = largest[h] + log2f(total);
  }
}

// out [heads of all rows, RANK] from the splits' results; one block a head, RANK / 4 threads.
extern "C" __global__ void __launch_bounds__(RANK / 4) latent_merge(
    const float* partial, const float* weights, T* out, int splits) {
  wait_for_predecessor();
  start_successor();
  long long head = blockIdx.x;
  int dim = threadIdx.x * 4;
  weights += head * splits, partial += head * splits * RANK + dim;
  float largest = -INF, total = 0.f, sum[4] = {};
  for (int split = 0; split < splits; ++split) largest = fmaxf(largest, weights[split]);
#pragma unroll 4
  for (int split = 0; split < splits; ++split) {
    float share = exp2f(weights[split] - largest);
    if (share == 0.f) continue;  // of a split without tokens nothing was written
    Vec<4, float> part = *(const Vec<4, float>*)(partial + (long long)split * RANK);
    total += share;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += share * part.v[i];
  }
  Vec<4> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) result.v[i] = from_float<T>(sum[i] / total);
  *(Vec<4>*)(out + head * RANK + dim) = result;
}
