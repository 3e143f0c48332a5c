// Second kernel of the chunked Gated DeltaNet (delta_chunks.cuh): it computes the recurrence of the memory over each
// row's chunks, one after another.
#include "delta_chunks.cuh"

// One chunk in shared memory, with the columns of v of SCAN_WARPS warps.
constexpr int COLUMNS = 16 * SCAN_WARPS, SPLITS = VALUE_DIM / COLUMNS;
constexpr int LOADERS = 128, THREADS = SCAN_WARPS * 32 + LOADERS;
struct Stage {
  bf16 k[2][CHUNK][STRIDE];
  bf16 q[PARTS][CHUNK][STRIDE];
  bf16 solve[2][CHUNK][TOKEN_STRIDE];
  bf16 scores[PARTS][CHUNK][TOKEN_STRIDE];
  float v[CHUNK][COLUMNS + 4];
  float gates[CHUNK][4];
};

// Grid: (value heads times SPLITS, blocks that take rows in turn, up to the first row of length 0). A block has
// SCAN_WARPS consumer warps, each with 16 columns of a memory in registers, and loader warps, the producers. While the
// consumers compute on one stage, which holds one chunk, the producers fill the next one. `values` are overwritten with
// the values read from the memory. memory [slots, value_heads, KEY_DIM, VALUE_DIM] and the convolution's history,
// inputs [slots, TAPS - 1, channels], are updated to the end of the row.
extern "C" __global__ void __launch_bounds__(THREADS) delta_scan(
    const T* projected, T* inputs, float* memory, const long long* slots, const long long* positions,
    const long long* begins, const long long* lengths, const bf16* keys, const bf16* queries, float* values,
    const bf16* solve, const bf16* scores, const float* gates, int rows, int tokens, int key_heads, int value_heads,
    int width) {
  extern __shared__ uint4 dynamic[];
  Stage* stages = (Stage*)dynamic;
  int head = blockIdx.x / SPLITS, column = blockIdx.x % SPLITS * COLUMNS;
  int group = value_heads / key_heads, key_head = head / group, warp = threadIdx.x >> 5;
  wait_for_predecessor();
  start_successor();
  int turn = 0;  // number of chunks so far

  if (warp >= SCAN_WARPS) {
    int thread = threadIdx.x - SCAN_WARPS * 32, channels = num_channels(key_heads, value_heads);
    for (int row = blockIdx.y; row < rows && lengths[row] != 0; row += gridDim.y) {
      bool fresh = positions[row] == 0;
      int length = (int)lengths[row];
      long long begin = begins[row], slot = slots[row];
      // Store the last inputs of this block's columns of v as history. The first block of a key head's group also
      // stores the last inputs of q and k.
      auto keep_input = [&](int channel) {
        T* history = inputs + slot * (TAPS - 1) * channels + channel;
        T last[TAPS - 1];
#pragma unroll
        for (int tap = 0; tap < TAPS - 1; ++tap) {
          int token = length - (TAPS - 1) + tap;
          if (token >= 0) last[tap] = projected[(begin + token) * width + channel];
          else last[tap] = fresh ? from_float<T>(0.f) : history[(TAPS - 1 + token) * channels];
        }
#pragma unroll
        for (int tap = 0; tap < TAPS - 1; ++tap) history[tap * channels] = last[tap];
      };
      for (int chunk = 0; chunk * CHUNK < length; ++chunk) {
        // Copy the rows of the chunk's tokens, `stride` bytes apart, to the rows of a tile; rows after the last token
        // become zeros.
        long long at = begin + chunk * CHUNK;
        int count = min(length - chunk * CHUNK, CHUNK);
        auto copy = [&](void* tile, int tile_stride, int bytes, const void* from, long long stride) {
          int parts = bytes / 16, first = thread / parts, part = thread % parts * 16;
          const char* source = (const char*)from + first * stride + part;
#pragma unroll
          for (int i = 0; i < CHUNK * parts / LOADERS; ++i) {
            int token = first + i * (LOADERS / parts);
            copy_16(
                (char*)tile + token * tile_stride + part, token < count ? source : (const char*)from, token < count);
            source += LOADERS / parts * stride;
          }
        };
        Stage& stage = stages[turn++ & 1];
        long long key_row = at * key_heads + key_head, row_of_head = at * value_heads + head;
        long long keys_plane = (long long)tokens * key_heads * HEAD, plane = (long long)tokens * value_heads * CHUNK;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          copy(stage.k[part], STRIDE * 2, HEAD * 2, keys + part * keys_plane + key_row * HEAD, key_heads * HEAD * 2);
          copy(
              stage.solve[part], TOKEN_STRIDE * 2, CHUNK * 2, solve + part * plane + row_of_head * CHUNK,
              value_heads * CHUNK * 2);
          if (part >= PARTS) continue;
          copy(stage.q[part], STRIDE * 2, HEAD * 2, queries + part * keys_plane + key_row * HEAD, key_heads * HEAD * 2);
          copy(
              stage.scores[part], TOKEN_STRIDE * 2, CHUNK * 2, scores + part * plane + row_of_head * CHUNK,
              value_heads * CHUNK * 2);
        }
        copy(stage.v, sizeof(stage.v[0]), COLUMNS * 4, values + row_of_head * HEAD + column, value_heads * HEAD * 4);
        if (thread < CHUNK)
          copy_16(
              stage.gates[thread], gates + (row_of_head + min(thread, count - 1) * value_heads) * 4, thread < count);
        commit_group();
        if (chunk == 0) {
          for (int i = thread; i < COLUMNS; i += LOADERS) keep_input(2 * key_heads * HEAD + head * HEAD + column + i);
          if (head % group == 0 && column == 0)
            for (int i = thread; i < 2 * HEAD; i += LOADERS)
              keep_input((i / HEAD * key_heads + key_head) * HEAD + i % HEAD);
        }
        wait_group<0>();
        __syncthreads();  // the stage has arrived, and the one before it may be overwritten
      }
    }
    return;
  }

  int g = (threadIdx.x & 31) >> 2, p = threadIdx.x & 3;
  for (int row = blockIdx.y; row < rows && lengths[row] != 0; row += gridDim.y) {
    bool fresh = positions[row] == 0;
    int length = (int)lengths[row];
    long long begin = begins[row], slot = slots[row];
    // s: the memory's columns of this warp, transposed: accumulators [16, 8] of columns and keys.
    float s[KEY_DIM / 8][4];
    float* state = memory + ((slot * value_heads + head) * KEY_DIM) * VALUE_DIM + column + warp * 16 + g;
#pragma unroll
    for (int tile = 0; tile < KEY_DIM / 8; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[tile][i] = fresh ? 0.f : state[(tile * 8 + 2 * p + (i & 1)) * VALUE_DIM + (i >> 1) * 8];

    for (int chunk = 0; chunk * CHUNK < length; ++chunk) {
      __syncthreads();
      const Stage& stage = stages[turn++ & 1];
      int count = min(length - chunk * CHUNK, CHUNK);

      // All matrices are transposed: their rows are the warp's columns, their columns the chunk's tokens.
      float u[CHUNK / 8][4] = {}, o[CHUNK / 8][4] = {};
#pragma unroll
      for (int dim = 0; dim < KEY_DIM / 16; ++dim) {
        Operand a = as_operand(s[2 * dim], s[2 * dim + 1]);
        add_product<true>(u, a, rows_of<true>(stage.k[0], stage.k[1], dim * 16));
        add_product<FINE>(o, a, rows_of<FINE>(stage.q[0], stage.q[PARTS - 1], dim * 16));
      }
      float r[CHUNK / 8][4];
#pragma unroll
      for (int tile = 0; tile < CHUNK / 8; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int token = tile * 8 + 2 * p + (i & 1);
          float passed = stage.gates[token][0];
          r[tile][i] = stage.gates[token][2] * (stage.v[token][warp * 16 + g + (i >> 1) * 8] - passed * u[tile][i]);
          o[tile][i] *= passed;
          u[tile][i] = 0.f;
        }
#pragma unroll
      for (int before = 0; before < CHUNK / 16; ++before) {
        Operand a = as_operand(r[2 * before], r[2 * before + 1]);
        add_product<true>(u, a, rows_of<true>(stage.solve[0], stage.solve[1], before * 16, before), before);
      }
#pragma unroll
      for (int before = 0; before < CHUNK / 16; ++before) {
        Operand a = as_operand(u[2 * before], u[2 * before + 1]);
        add_product<FINE>(o, a, rows_of<FINE>(stage.scores[0], stage.scores[PARTS - 1], before * 16, before), before);
      }
      float* out = values + ((begin + chunk * CHUNK) * value_heads + head) * HEAD + column + warp * 16 + g;
#pragma unroll
      for (int tile = 0; tile < CHUNK / 8; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int token = tile * 8 + 2 * p + (i & 1);
          u[tile][i] *= stage.gates[token][1];
          if (token < count) out[(long long)token * value_heads * HEAD + (i >> 1) * 8] = o[tile][i];
        }
      float passed = stage.gates[count - 1][0];
#pragma unroll
      for (int tile = 0; tile < KEY_DIM / 8; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[tile][i] *= passed;
#pragma unroll
      for (int before = 0; before < CHUNK / 16; ++before) {
        Operand a = as_operand(u[2 * before], u[2 * before + 1]);
#pragma unroll
        for (int dim = 0; dim < KEY_DIM; dim += 64)
          add_product<true>(&s[dim / 8], a, columns_of(stage.k[0], stage.k[1], before * 16, dim));
      }
    }
#pragma unroll
    for (int tile = 0; tile < KEY_DIM / 8; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) state[(tile * 8 + 2 * p + (i & 1)) * VALUE_DIM + (i >> 1) * 8] = s[tile][i];
  }
}
