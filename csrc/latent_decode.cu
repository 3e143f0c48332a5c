// Absorbed latent attention (MLA) of decode rows and short chunks: softmax(scale * q @ rows^T) @ latents. All heads of
// a query attend to the same cached rows of RANK + ROPE dimensions, of which the first RANK, the latent, are also the
// values. Queries, cache and output are T, sums float32. The work is divided by split-KV as in flash-decoding (Dao et
// al., 2023): a block computes 16 heads of a query over one split of its row, in tiles of 32 tokens. A second kernel
// merges the splits (LSE merge).
//
// The loads of the next tiles overlap the computation of the current one. For the scores, warps divide tokens and
// dimensions: a warp multiplies eight tokens with one half of the dimensions of the 16 queries, which it keeps in
// registers. For the softmax, a warp has two heads and a lane one token: the lane adds up the two halves, and the warp
// reduces the maximum of the head. For the output, each warp has RANK / 8 dimensions, to which it adds the tile's
// values. The softmax uses exp2. Rows in shared memory are padded by 16 bytes, so that ldmatrix reads eight of them
// without bank conflicts.
//
// -DRANK: a multiple of 128. -DROPE: RANK + ROPE must be a multiple of 64. -DPAGE_SIZE: tokens per page.
#include "mma.cuh"
#include "tiles.cuh"

constexpr int ROW = RANK + ROPE;
constexpr int HEADS = 16;
constexpr int TILE = 32;
constexpr int STAGES = 5;
constexpr int STAGES_AHEAD = STAGES - 1;  // stages in flight
constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int STRIDE = ROW + 8;
constexpr int P_STRIDE = TILE + 8;
constexpr int HALF = ROW / 2;
constexpr int DIMS = RANK / WARPS;  // dimensions of the output of a warp
constexpr int ROW_VECTORS = ROW / 8;                 // 16-byte vectors of a row
constexpr int LOADS = TILE * ROW_VECTORS / THREADS;  // loads of a thread for one tile
constexpr int MERGERS = 4;  // most groups of threads of latent_merge, which divide the splits
constexpr int MAX_SPLITS = 64;
constexpr float LOG2_E = 1.44269504f;
#define INF __int_as_float(0x7f800000)

struct Shared {
  alignas(16) T rows[STAGES][TILE][STRIDE];
  alignas(16) T p[HEADS][P_STRIDE];
  float scores[2][HEADS][TILE + 1];
  float rescale[HEADS], sum[HEADS];
};

// query [rows, num_heads, ROW], where a row is one query. Grid: (rows * splits, blocks of heads). A row's pages are in
// row table_rows[row] of the page table, or in row `row` if `table_rows` is null. In the latter case the predecessor
// writes only the last position of the cache, so the tiles before it are loaded before waiting for the predecessor.
// With one split the result goes to out [rows, num_heads, RANK]. With several, it goes to partial [rows, num_heads,
// splits, RANK], and its log-sum-exp to base 2 to weights [rows, num_heads, splits].
extern "C" __global__ void __launch_bounds__(THREADS, 1) latent_decode(
    const T* query, const T* cache, const int* lengths, OPTIONAL const int* table_rows, const int* page_table,
    long long table_stride, int splits, int num_heads, float softmax_scale, OPTIONAL float* partial,
    OPTIONAL float* weights, T* out) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  int row = blockIdx.x / splits, split = blockIdx.x % splits, first_head = blockIdx.y * HEADS;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, p = lane & 3;
  int length = lengths[row], count = (length + TILE - 1) / TILE, each = (count + splits - 1) / splits;
  int begin = split * each, end = min(begin + each, count);
  const int* pages = page_table + (table_rows ? table_rows[row] : row) * table_stride;

  // Rows of the pool that this thread copies for a tile, looked up one tile early. Positions at or after `length` load
  // the last valid position in their place, so that their scores are finite; they are masked later.
  int places[LOADS];
  auto find = [&](int tile) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      int position = min(tile * TILE + (threadIdx.x + i * THREADS) / ROW_VECTORS, length - 1);
      places[i] = pages[position / PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE;
    }
  };
  auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      int part = threadIdx.x + i * THREADS, at = part % ROW_VECTORS * 8;
      copy_16(&shared.rows[tile % STAGES][part / ROW_VECTORS][at], cache + (long long)places[i] * ROW + at);
    }
  };
  // End of the tiles that are loaded early.
  int early = table_rows ? begin : min(min(begin + STAGES_AHEAD, end), (length - 1) / TILE);
  if (begin < end) find(begin);
  for (int tile = begin; tile < early; ++tile) load(tile), commit_group(), find(min(tile + 1, end - 1));
  wait_for_predecessor();
  start_successor();
  if (begin >= end) return;
  for (int tile = max(begin, early); tile < begin + STAGES_AHEAD; ++tile) {
    if (tile < end) load(tile), find(min(tile + 1, end - 1));
    commit_group();
  }
  long long at_head = (long long)row * num_heads + first_head;
  int tokens = warp % 4 * 8, half = warp / 4 * HALF;  // tokens and dimensions of this warp's scores
  unsigned q[HALF / 16][4];
#pragma unroll
  for (int k = 0; k < HALF / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int head = g + i % 2 * 8, at = half + k * 16 + i / 2 * 8 + 2 * p;
      q[k][i] = first_head + head < num_heads ? *(const unsigned*)(query + (at_head + head) * ROW + at) : 0u;
    }

  float acc[DIMS / 8][4] = {}, largest[2] = {-INF, -INF}, sum[2] = {}, scale = softmax_scale * LOG2_E;
  for (int tile = begin; tile < end; ++tile) {
    wait_group<STAGES_AHEAD - 1>();
    __syncthreads();
    T(*rows)[STRIDE] = shared.rows[tile % STAGES];
    if (tile + STAGES_AHEAD < end) load(tile + STAGES_AHEAD), find(min(tile + STAGES_AHEAD + 1, end - 1));
    commit_group();

    float s[2][4] = {};
#pragma unroll
    for (int k = 0; k < HALF / 32; ++k) {
      uint4 b = ldmatrix(&rows[tokens + (lane & 7)][half + k * 32 + (lane >> 3) * 8]);
      mma(s[0], q[2 * k][0], q[2 * k][1], q[2 * k][2], q[2 * k][3], b.x, b.y);
      mma(s[1], q[2 * k + 1][0], q[2 * k + 1][1], q[2 * k + 1][2], q[2 * k + 1][3], b.z, b.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.scores[warp / 4][g + i / 2 * 8][tokens + 2 * p + i % 2] = s[0][i] + s[1][i];
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int head = warp * 2 + h;
      float x = (shared.scores[0][head][lane] + shared.scores[1][head][lane]) * scale, most = largest[h];
      if (tile * TILE + lane >= length) x = -INF;
      float own = x;
#pragma unroll
      for (int offset = 16; offset > 0; offset >>= 1) own = fmaxf(own, __shfl_xor_sync(0xffffffffu, own, offset));
      most = fmaxf(most, own);
      float factor = exp2f(largest[h] - most), share = exp2f(x - most);
      largest[h] = most, sum[h] = sum[h] * factor + share;
      shared.p[head][lane] = from_float<T>(share);
      if (lane == 0) shared.rescale[head] = factor;
    }
    __syncthreads();
    float rescale[2] = {shared.rescale[g], shared.rescale[g + 8]};
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
    int head = warp * 2 + h;
    float total = warp_sum(sum[h]);
    if (lane != 0) continue;
    shared.sum[head] = total;
    if (weights && first_head + head < num_heads)
      weights[(at_head + head) * splits + split] = largest[h] + log2f(total);
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int head = g + 8 * h;
    if (first_head + head >= num_heads) continue;
    float factor = 1.f / shared.sum[head];
#pragma unroll
    for (int n = 0; n < DIMS / 8; ++n) {
      int dim = warp * DIMS + n * 8 + 2 * p;
      float low = acc[n][2 * h] * factor, high = acc[n][2 * h + 1] * factor;
      if (partial)
        *(Vec2*)(partial + ((at_head + head) * splits + split) * RANK + dim) = {low, high};
      else
        *(unsigned*)(out + (at_head + head) * RANK + dim) = pack(low, high);
    }
  }
}

// Merge the splits into out [rows, num_heads, RANK]. Grid: rows * num_heads. A block has up to MERGERS groups of RANK /
// 4 threads. A thread has four dimensions; the groups divide the splits. Only the first splits of a row have tokens.
extern "C" __global__ void __launch_bounds__(MERGERS * RANK / 4) latent_merge(
    const float* partial, const float* weights, const int* lengths, T* out, int splits, int num_heads) {
  __shared__ float shares[MAX_SPLITS], total;
  __shared__ alignas(16) float sums[MERGERS][RANK];
  wait_for_predecessor();
  start_successor();
  long long head = blockIdx.x;
  int thread = threadIdx.x, dim = thread % (RANK / 4) * 4, merger = thread / (RANK / 4);
  int mergers = blockDim.x / (RANK / 4);
  int count = (lengths[head / num_heads] + TILE - 1) / TILE, each = (count + splits - 1) / splits;
  int used = (count + each - 1) / each;
  partial += head * splits * RANK + dim;
  if (thread < 32) {
    float x[MAX_SPLITS / 32], most = -INF, all = 0.f;
#pragma unroll
    for (int i = 0; i < MAX_SPLITS / 32; ++i) {
      x[i] = i * 32 + thread < used ? weights[head * splits + i * 32 + thread] : -INF;
      most = fmaxf(most, x[i]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
#pragma unroll
    for (int i = 0; i < MAX_SPLITS / 32; ++i) all += shares[i * 32 + thread] = exp2f(x[i] - most);
    all = warp_sum(all);
    if (thread == 0) total = all;
  }
  constexpr int AT_ONCE = 8;
  Vec<4, float> part[AT_ONCE] = {};
  auto fetch = [&](int from) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (from + i * mergers < used)
        part[i] = *(const Vec<4, float>*)(partial + (long long)(from + i * mergers) * RANK);
  };
  fetch(merger);
  __syncthreads();
  float sum[4] = {};
  for (int split = merger; split < used; split += mergers * AT_ONCE) {
    if (split > merger) fetch(split);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (split + i * mergers < used)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += shares[split + i * mergers] * part[i].v[j];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) sums[merger][dim + j] = sum[j];
  __syncthreads();
  if (merger) return;
  Vec<4> result;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float all = 0.f;
    for (int m = 0; m < mergers; ++m) all += sums[m][dim + j];
    result.v[j] = from_float<T>(all / total);
  }
  *(Vec<4>*)(out + head * RANK + dim) = result;
}
