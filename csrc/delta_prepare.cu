// First kernel of the chunked Gated DeltaNet (delta_chunks.cuh): it computes everything that does not depend on the
// memory, for all chunks in parallel. A warp processes 16 tokens of a chunk, a block of WARPS warps one chunk at a
// time.
#include "delta_chunks.cuh"

constexpr int WARPS = 4;

__device__ __forceinline__ void set(Operand& a, uint4 high, uint4 low) {
  a.high[0] = high.x, a.high[1] = high.y, a.high[2] = high.z, a.high[3] = high.w;
  a.low[0] = low.x, a.low[1] = low.y, a.low[2] = low.z, a.low[3] = low.w;
}

struct Shared {
  union {
    bf16 k[2][CHUNK][STRIDE];
    bf16 inverse[2][CHUNK][TOKEN_STRIDE];  // once k has been read
  };
  bf16 q[PARTS][CHUNK][STRIDE];
  float diagonal[WARPS][16][20];  // blocks [16, 16] on the system's diagonal, column by column
  float total[CHUNK], beta[CHUNK], half;
};

// Invert a unit lower triangular block [16, 16], which is stored by columns. A lane gets one column x of the inverse.
__device__ __forceinline__ void invert(const float (*system)[20], int column, float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
  for (int i = 0; i < 15; ++i)
#pragma unroll
    for (int below = (i + 1) / 4 * 4; below < 16; below += 4) {
      Vec<4, float> factor = *(const Vec<4, float>*)&system[i][below];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (below + j > i) x[below + j] -= factor.v[j] * x[i];
    }
}

// Store an accumulator [16, 8] times `sign` to a tile, split into two bf16 parts.
__device__ __forceinline__ void store_tile(
    const float (&c)[4], float sign, bf16 (*tile)[CHUNK][TOKEN_STRIDE], int row, int column) {
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    unsigned part[2];
    split(sign * c[upper * 2], sign * c[upper * 2 + 1], part[0], part[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *(unsigned*)&tile[i][row + (lane >> 2) + upper * 8][column + (lane & 3) * 2] = part[i];
  }
}

// Grid: (key heads, blocks that take the chunks in turn). `chunk_rows` has the row of each chunk, `chunk_firsts` the
// index of its first token in that row. Outputs: keys [2, tokens, key_heads, KEY_DIM] and queries [PARTS, ...], as bf16
// parts; values [tokens, value_heads, VALUE_DIM]; solve [2, tokens, value_heads, CHUNK] and scores [PARTS, ...],
// without the blocks of 16 above the diagonal, which are not written; gates [tokens, value_heads, 4]: exp(g),
// exp(g_last - g) and beta.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 3) delta_prepare(
    const T* projected, const T* inputs, const float* conv, const float* a_log, const float* dt_bias,
    const long long* slots, const long long* positions, const long long* begins, const long long* lengths,
    const long long* chunk_rows, const long long* chunk_firsts, bf16* keys, bf16* queries, float* values, bf16* solve,
    bf16* scores, float* gates, int chunks, int tokens, int key_heads, int value_heads, int width) {
  extern __shared__ uint4 dynamic[];
  Shared& shared = *(Shared*)dynamic;
  int key_head = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int channels = num_channels(key_heads, value_heads), group = value_heads / key_heads;
  wait_for_predecessor();
  start_successor();
  for (int chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
    int row = (int)chunk_rows[chunk], first = (int)chunk_firsts[chunk];
    int count = min((int)lengths[row] - first, CHUNK);
    if (count <= 0) return;  // the remaining chunks are empty, too
    bool fresh = positions[row] == 0;
    long long begin = begins[row] + first;
    const T* history = inputs + slots[row] * (TAPS - 1) * channels;

    // Load four channels of the convolution's inputs for a token of the chunk, or before it if negative. Loads are not
    // predicated, so that all of them are in flight together.
    auto input = [&](int token, int channel) {
      bool before = first + token < 0;
      const T* from = before ? history + (TAPS - 1 + first + token) * channels
                             : projected + (begin + min(token, count - 1)) * width;
      Vec<4> x = *(const Vec<4>*)(from + channel);
#pragma unroll
      for (int i = 0; i < 4; ++i) x.v[i] = before && fresh ? from_float<T>(0.f) : x.v[i];
      return x;
    };
    // Compute the convolution of q, k and the value heads for the warp's 16 tokens, four channels in each lane.
    constexpr int MINE = CHUNK / WARPS;
    for (int part = 0; part < 2 + group; ++part) {
      int head = part < 2 ? part * key_heads + key_head : key_head * group + part - 2;
      int channel = (part < 2 ? head : 2 * key_heads + head) * HEAD + lane * 4;
      Vec<4, float> weights[TAPS];
      Vec<4> window[TAPS - 1 + MINE];
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) weights[tap] = *(const Vec<4, float>*)(conv + tap * channels + channel);
#pragma unroll
      for (int i = 0; i < TAPS - 1 + MINE; ++i) window[i] = input(warp * MINE + i - (TAPS - 1), channel);
#pragma unroll
      for (int i = 0; i < MINE; ++i) {
        int token = warp * MINE + i;
        Vec<4, float> x = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int tap = 0; tap < TAPS; ++tap) x.v[j] += weights[tap].v[j] * to_float(window[i + tap].v[j]);
          x.v[j] = token < count ? silu(x.v[j]) : 0.f;
        }
        if (part >= 2) {
          if (token < count) *(Vec<4, float>*)(values + ((begin + token) * value_heads + head) * HEAD + lane * 4) = x;
          continue;
        }
        float square = x.v[0] * x.v[0] + x.v[1] * x.v[1] + x.v[2] * x.v[2] + x.v[3] * x.v[3];
        float scale = rsqrtf(warp_sum(square) + 1e-6f) * (part == 0 ? rsqrtf((float)KEY_DIM) : 1.f);
        unsigned parts[2][2];
        split(x.v[0] * scale, x.v[1] * scale, parts[0][0], parts[1][0]);
        split(x.v[2] * scale, x.v[3] * scale, parts[0][1], parts[1][1]);
        bf16* to = (part == 0 ? queries : keys) + ((begin + token) * key_heads + key_head) * HEAD + lane * 4;
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          if (part == 0 && p >= PARTS) continue;
          uint2 both = make_uint2(parts[p][0], parts[p][1]);
          *(uint2*)&(part == 0 ? shared.q : shared.k)[p][token][lane * 4] = both;
          if (token < count) *(uint2*)(to + p * (long long)tokens * key_heads * HEAD) = both;
        }
      }
    }
    __syncthreads();

    // K K' and Q K' of the warp's 16 tokens with all tokens of the chunk.
    float kk[CHUNK / 8][4] = {}, qk[CHUNK / 8][4] = {};
#pragma unroll
    for (int dim = 0; dim < KEY_DIM; dim += 16) {
      Operand k, q;
      set(k, left_of(shared.k[0], warp * 16, dim), left_of(shared.k[1], warp * 16, dim));
      set(q, left_of(shared.q[0], warp * 16, dim), left_of(shared.q[PARTS - 1], warp * 16, dim));
      Blocks right = rows_of<true>(shared.k[0], shared.k[1], dim);
      add_product<true>(kk, k, right, 0);
      add_product<FINE>(qk, q, right, 0);
    }

    long long plane = (long long)tokens * value_heads * CHUNK;
    for (int head = key_head * group; head < (key_head + 1) * group; ++head) {
      int at = threadIdx.x;
      long long first_row = begin * value_heads + head;
      if (at < CHUNK) {
        float x = 0.f, step = 0.f;
        if (at < count) {
          const T* logits = projected + (begin + at) * width + channels + value_heads * VALUE_DIM + head;
          step = sigmoid(logits[0]);
          x = log_decay(logits[value_heads], dt_bias[head], expf(a_log[head]));
        }
        shared.beta[at] = step;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          float before = __shfl_up_sync(0xffffffffu, x, distance);
          if (lane >= distance) x += before;
        }
        if (at == 31) shared.half = x;
        shared.total[at] = x;
      }
      __syncthreads();
      auto total = [&](int token) { return shared.total[token] + (token < 32 ? 0.f : shared.half); };
      float last = total(CHUNK - 1);
      if (at < count)
        *(Vec<4, float>*)(gates + (first_row + (long long)at * value_heads) * 4) =
            {expf(total(at)), expf(last - total(at)), shared.beta[at], 0.f};

      // The warp's rows of the system and of the scores.
      float system[CHUNK / 8][4];
      int row_of_lane = warp * 16 + (lane >> 2);
      float row_total[2] = {total(row_of_lane), total(row_of_lane + 8)};
      float row_beta[2] = {shared.beta[row_of_lane], shared.beta[row_of_lane + 8]};
#pragma unroll
      for (int tile = 0; tile < CHUNK / 8; ++tile)
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          int i = row_of_lane + upper * 8, j = tile * 8 + (lane & 3) * 2;
          float score[2];
#pragma unroll
          for (int next = 0; next < 2; ++next) {
            float between = j + next <= i ? __expf(row_total[upper] - total(j + next)) : 0.f;
            score[next] = between * qk[tile][upper * 2 + next];
            float factor = j + next < i ? row_beta[upper] * between * kk[tile][upper * 2 + next] : 0.f;
            system[tile][upper * 2 + next] = factor;
            if (tile / 2 == warp) shared.diagonal[warp][j + next - warp * 16][i - warp * 16] = factor;
          }
          if (i < count && tile / 2 <= warp) {
            unsigned part[2];
            split(score[0], score[1], part[0], part[1]);
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
              *(unsigned*)(scores + p * plane + (first_row + (long long)i * value_heads) * CHUNK + j) = part[p];
          }
        }
      __syncwarp();
      float column[16];
      invert(shared.diagonal[warp], lane & 15, column);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        bf16 high = from_float<bf16>(column[i]);
        if (lane < 16) shared.inverse[0][warp * 16 + i][warp * 16 + lane] = high;
        else shared.inverse[1][warp * 16 + i][warp * 16 + lane - 16] = from_float<bf16>(column[i] - to_float(high));
      }
      // Block row i of the inverse is -D_i (A_i0 T_0 + ... + A_ij T_j), j < i, with D_i the inverse of the diagonal's
      // block.
      float sum[CHUNK / 8][4] = {};
#pragma unroll
      for (int known = 0; known < CHUNK / 16 - 1; ++known) {
        __syncthreads();
        if (warp <= known) continue;
        Operand a = as_operand(system[2 * known], system[2 * known + 1]);
        add_product<true>(
            sum, a, columns_of(shared.inverse[0], shared.inverse[1], known * 16, 0, known + 1), 0, known + 1);
        if (warp != known + 1) continue;
        int row = warp * 16;
#pragma unroll
        for (int tile = 0; tile < 2 * known + 2; ++tile) store_tile(sum[tile], -1.f, shared.inverse, row, tile * 8);
        __syncwarp();
        Operand d;
        set(d, left_of(shared.inverse[0], row, row), left_of(shared.inverse[1], row, row));
        Blocks right = columns_of(shared.inverse[0], shared.inverse[1], row, 0, known + 1);
        float solved[CHUNK / 8][4] = {};
        add_product<true>(solved, d, right, 0, known + 1);
        __syncwarp();
#pragma unroll
        for (int tile = 0; tile < 2 * known + 2; ++tile) store_tile(solved[tile], 1.f, shared.inverse, row, tile * 8);
      }
      __syncthreads();
#pragma unroll
      for (int part = 0; part < 2; ++part)
        for (int i = at; i < count * (CHUNK / 8); i += WARPS * 32) {
          int token = i / (CHUNK / 8), from = i % (CHUNK / 8) * 8;
          *(uint4*)(solve + part * plane + (first_row + (long long)token * value_heads) * CHUNK + from) =
              *(const uint4*)&shared.inverse[part][token][from];
        }
      __syncthreads();
    }
  }
}
