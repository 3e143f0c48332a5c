// GEMV with a quantized weight on Hopper, for a decode of one row: y [N] = x [K] @ weight [N, K]^T. x and y are T (bf16
// or f16), the weight is packed (quantized.cuh). The kernel is bound by memory bandwidth.
//
// The grid is persistent: each block has an SM to itself and computes one tile of ROWS rows of the weight after
// another. Smaller blocks would be distributed unevenly: while the preceding kernel still occupies some SMs, two blocks
// could start on one SM and none on another, and the two would end late. The SPLIT blocks of a cluster divide K
// (split-K). The warps of a block divide it further: they take slices of 128 columns in turn. Each warp fills a ring of
// its own, of STAGES slices of the weight. It synchronizes with the other warps only at the end of a tile, to add up
// their sums; meanwhile the weights of the next tile arrive. A warp's slices of x are the same for all tiles and stay
// in shared memory.
//
// While the predecessor runs, the rings are filled at a limited rate: if all weights were requested at once, the
// predecessor's own reads, and then the loads of x, would queue after them. One warp fills its ring without this limit;
// it waits for the predecessor's end and signals it to the others.
//
// INT4: decoding to T would take more instructions than can be issued while the levels are read. Therefore int8 tensor
// cores multiply the levels themselves, as unsigned bytes: four LOP3 and two shifts turn two words of a lane into the
// left operand of m16n8k32. x is rounded to 15-bit integers, relative to the largest value of each slice; the high and
// the low bytes of these integers are two columns of the right operand. The sums of a group are thus exact. A product
// with a left operand of ones gives the exact sum of x, by which the zero point is multiplied. Both are multiplied by
// the group's scale in float32.
//
// E4M3: the bits of a value are moved to the positions where T has them (quantized.cuh). The result is too small by a
// power of two, by which the sums are multiplied. In bf16, x is multiplied by X_UNIT, so that products are not
// subnormal.
//
// Example: with K = 5120 (40 slices), N = 10240, WARPS 8 and tiles of 80 rows, warp 3 has slices 3, 11, 19, 27 and 35
// of each tile. In slice 3 it multiplies columns 384 to 511.
//
// NORM: x is RMS-normed: it is multiplied by the norm's weight as it is loaded, and by the row's scale in the epilogue.
// GATED: y [N / 2] = activation(gate) * up. The first 8 of each 16 rows of the weight are gates, the next 8 their ups.
// K must be a multiple of 128, N of 16. SLICES: the most slices that a warp has.
#include "hopper.cuh"
#include "mma.cuh"
#include "quantized.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int ROWS = ROW_BLOCKS * 16;
constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS;
constexpr int OWN_COLUMNS = OUTPUTS / SPLIT;       // columns of y whose epilogue a block of a cluster computes
constexpr int SLICE = 128;                         // columns of K
constexpr int GROUPS = GROUP ? SLICE / GROUP : 0;  // per slice
constexpr int CHUNKS = SLICE / CHUNK_K;            // per slice
constexpr int TILE_CHUNK = ROW_BLOCKS * 512;       // bytes of a tile's rows of a chunk
constexpr int LEVELS = TILE_CHUNK * CHUNKS;
constexpr int SCALES = ROW_BLOCKS * 64;            // bytes of a group's scales
constexpr int STAGE = LEVELS + SCALES * GROUPS;
constexpr int PIECES = (ROW_BLOCKS + 6) / 4;       // most chunks of 64 rows over which a tile extends
constexpr int COPIES = CHUNKS + GROUPS;            // copies of each of these: levels, then scales
constexpr int BATCH = SLICES < 16 ? SLICES : 16;   // slices of x that are loaded together
constexpr int SUMS = (ROWS + 1 + 3) / 4 * 4;       // floats of a warp: sums of the rows, then of the squares of x
constexpr int APART = WEIGHT == INT4 ? 16 : 8;     // distance in columns between a lane's two pairs of x
constexpr unsigned X_UNIT = Is<T>::bf16 ? 0x5d805d80 : 0x3c003c00;  // 2^60 or 1, twice
constexpr float SUM_UNIT = WEIGHT == INT4 ? 1.f : Is<T>::bf16 ? 0x1p60f : 0x1p8f;
// Registers per thread. With 96, a block of decode_attention.cu and eight warps of this kernel can be resident on the
// same SM; larger tiles need more.
constexpr int REGISTERS = ROW_BLOCKS < 5 ? 96 : 128;
constexpr int WAITING_WARP = WARPS - 1;  // the warp that waits for the predecessor
// Cycles between stages of the other warps while the predecessor runs: 60 for each KB that the block requests.
constexpr int PACE = 60 * WARPS * STAGE / 1024;
static_assert((WEIGHT == INT4 || WEIGHT == E4M3) && (!GROUP || GROUP >= 32));
static_assert(PIECES * COPIES <= 32 && OWN_COLUMNS <= THREADS);

extern __shared__ __align__(128) unsigned char memory[];  // by warp: rings, sums, slices of x and their units

// c [16, 8] += a [16, 32] @ b [32, 8] of bytes, unsigned in a and signed in b. The layout of the matrices is that of
// `mma` (mma.cuh), with four contiguous values of a or b in a register.
__device__ __forceinline__ void mma_bytes(
    int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, const uint2& b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}

// Maximum of each half.
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
  unsigned c;
  asm("max.u16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// Four values of x as integers of 15 bits, 256 * high + low, in a unit that follows from the warp's largest value.
struct Bytes {
  unsigned high, low;  // four signed bytes each: of the pairs' first values, then of their second ones
  float unit;

  __device__ __forceinline__ explicit Bytes(const unsigned (&pairs)[2]) {
    unsigned both = larger(pairs[0] & 0x7fff7fff, pairs[1] & 0x7fff7fff);
    float largest = low_of(__reduce_max_sync(0xffffffff, max(both & 0xffff, both >> 16)));
    int exponent = max((int)(__float_as_uint(largest) >> 23), 14);  // so that the scale is finite
    float scale = __uint_as_float((267 - exponent) << 23);          // the largest value becomes less than 2^14
    unit = __uint_as_float((exponent - 13) << 23) + largest * 0.f;  // not a number if a value is infinite or none
    // Adding 1.5 * 2^23 leaves the rounded integer in the mantissa. Adding 128 more rounds the high byte such that the
    // low byte is signed.
    unsigned v[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v[i] = __float_as_uint(fmaf(low_of(pairs[i]), scale, 0x1.8p23f + 128));
      v[i + 2] = __float_as_uint(fmaf(high_of(pairs[i]), scale, 0x1.8p23f + 128));
    }
    unsigned first = __byte_perm(v[0], v[1], 0x5140), second = __byte_perm(v[2], v[3], 0x5140);
    high = __byte_perm(first, second, 0x7632), low = __byte_perm(first, second, 0x5410) ^ 0x80808080;
  }
};

// Store a lane's pairs of a slice of x in the order in which `multiply_slice` reads them. INT4: [step of 32 columns,
// lane % 4, high or low bytes, half of the columns]. E4M3: [lane % 4, step of 16 columns].
__device__ __forceinline__ void store_slice(unsigned char* slice, float* unit, unsigned (&pairs)[2]) {
  int lane = threadIdx.x & 31;
  if constexpr (WEIGHT == INT4) {
    Bytes rounded_x(pairs);
    if (lane == 0) *unit = rounded_x.unit;
    unsigned* words = (unsigned*)slice + (lane >> 1) * 4 + (lane & 1);
    words[0] = rounded_x.high, words[2] = rounded_x.low;
  } else {
    *(uint2*)(slice + (lane & 3) * 64 + (lane >> 2) * 8) =
        make_uint2(multiply(pairs[0], X_UNIT), multiply(pairs[1], X_UNIT));
  }
}

#if WEIGHT == INT4
// Multiply a tile's rows by the slice of x at `slice`. Lanes 0, 4, 8, ... get the sums of rows lane / 4 and
// lane / 4 + 8 of each 16; the sums of the other lanes are unused.
__device__ __forceinline__ void multiply_slice(
    float (&total)[ROW_BLOCKS][4], const unsigned char* slice, const float* units, const unsigned char* stage) {
  int lane = threadIdx.x & 31;
  float unit = *units;
  uint2 b[SLICE / 32];
#pragma unroll
  for (int j = 0; j < SLICE / 32; ++j)
    b[j] = *(const uint2*)(slice + j * 64 + (lane & 3) * 16 + (lane >> 2 & 1) * 8);
  int x_sums[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    int sums[4] = {};
#pragma unroll
    for (int j = g * (GROUP / 32); j < (g + 1) * (GROUP / 32); ++j)
      mma_bytes(sums, 0x01010101, 0x01010101, 0x01010101, 0x01010101, b[j]);
    x_sums[g] = sums[0] * 256 + sums[1];
  }
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r) {
    uint4 chunk[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) chunk[c] = *(const uint4*)(stage + c * TILE_CHUNK + r * 512 + lane * 16);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      int sums[4] = {};
#pragma unroll
      for (int j = g * (GROUP / 32); j < (g + 1) * (GROUP / 32); ++j) {
        unsigned row = j % 2 ? chunk[j / 2].z : chunk[j / 2].x, other = j % 2 ? chunk[j / 2].w : chunk[j / 2].y;
        mma_bytes(
            sums, row & 0x0f0f0f0f, other & 0x0f0f0f0f, row >> 4 & 0x0f0f0f0f, other >> 4 & 0x0f0f0f0f, b[j]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        unsigned word = *(const unsigned*)(stage + LEVELS + g * SCALES + r * 64 + h * 32 + (lane >> 2) * 4);
        int sum = sums[h * 2] * 256 + sums[h * 2 + 1];
        if (OFFSETS)  // (level - 8) * scale + offset
          total[r][h * 2] += unit * (low_of(word) * (sum - 8 * x_sums[g]) + high_of(word) * x_sums[g]);
        else
          total[r][h * 2] += Scale{word}.factor() * unit * (sum - (int)(word & 0xff) * x_sums[g]);
      }
    }
  }
}
#else
// Multiply a tile's rows by a slice of x. All columns of the right operand are x, so all lanes get sums of their rows.
__device__ __forceinline__ void multiply_slice(
    float (&total)[ROW_BLOCKS][4], const unsigned char* slice, const float*, const unsigned char* stage) {
  int lane = threadIdx.x & 31;
  uint4 b[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) b[c] = *(const uint4*)(slice + (lane & 3) * 64 + c * 16);
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r) {
    float sums[4] = {};
    float (&to)[4] = GROUP ? sums : total[r];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      uint4 words = *(const uint4*)(stage + c * TILE_CHUNK + r * 512 + lane * 16);
      mma(to, place_e4m3(words.x, 0), place_e4m3(words.y, 0), place_e4m3(words.x, 1), place_e4m3(words.y, 1),
          b[c].x, b[c].y);
      mma(to, place_e4m3(words.z, 0), place_e4m3(words.w, 0), place_e4m3(words.z, 1), place_e4m3(words.w, 1),
          b[c].z, b[c].w);
    }
    if (GROUP)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        total[r][h * 2] +=
            sums[h * 2] * *(const float*)(stage + LEVELS + r * 64 + h * 32 + (lane >> 2) * 4);
  }
}
#endif

extern "C" __global__ void __maxnreg__(REGISTERS) quantized_gemv(
    const T* x, const unsigned* weight, const unsigned* scales, OPTIONAL const float* row_scales,
    OPTIONAL const T* norm, float eps, OPTIONAL const T* bias, OPTIONAL const T* residual, T* out, int N, int K) {
  __shared__ Barrier full[WARPS][STAGES], ended;  // ended: completes when the predecessor has ended
  __shared__ float received[SPLIT][SPLIT > 1 ? SUMS : 1];  // sums of the cluster's blocks
  int split = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int slices = K / SLICE, begin = slices * split / SPLIT + warp, end = slices * (split + 1) / SPLIT;
  int count = max((end - begin + WARPS - 1) / WARPS, 0);  // slices of this warp
  int tiles = (N + ROWS - 1) / ROWS, first_tile = blockIdx.y, stride = gridDim.y;
  int steps = count * ((tiles - first_tile + stride - 1) / stride);
  unsigned char* ring = memory + warp * STAGES * STAGE;
  float* all_sums = (float*)(memory + WARPS * STAGES * STAGE);
  float* own_sums = all_sums + warp * SUMS;
  unsigned char* all_x = (unsigned char*)(all_sums + WARPS * SUMS);
  unsigned char* own_x = all_x + warp * SLICES * SLICE * 2;
  float* units = (float*)(all_x + WARPS * SLICES * SLICE * 2) + warp * SLICES;

  // A lane copies one part of each stage: 16 to 64 neighbouring rows of a chunk, or of the scales of a group.
  int load_tile = first_tile, load_slice = 0, to = 0, bytes = 0;
  const unsigned char* from = nullptr;
  int piece = lane / COPIES, part = lane % COPIES;
  bool levels = part < CHUNKS;
  int pitch = levels ? CHUNKS * CHUNK : GROUPS * 256;  // bytes of a slice of 64 rows
  auto load = [&](int slot) {
    if (load_slice == 0) {
      int first = load_tile * ROW_BLOCKS, aligned = (first / 4 + piece) * 4;  // in units of 16 rows
      int low = max(first, aligned), blocks = min(first + ROW_BLOCKS, aligned + 4) - low;
      int row_bytes = levels ? 512 : 64;
      long long line = min(aligned / 4, (N + 63) / 64 - 1);  // line of 64 rows; clamped to the weight's last one
      from = (const unsigned char*)(levels ? weight : scales) + (line * slices + begin) * pitch;
      from += (levels ? part * CHUNK : (part - CHUNKS) * 256) + low % 4 * row_bytes;
      to = (levels ? part * TILE_CHUNK : LEVELS + (part - CHUNKS) * SCALES) + (low - first) * row_bytes;
      bytes = blocks * row_bytes;
    }
    Barrier* barrier = &full[warp][slot];
    if (lane == 0) expect(barrier, STAGE);
    if (piece < PIECES && bytes > 0) copy_bytes(ring + slot * STAGE + to, from, bytes, barrier);
    from += WARPS * pitch;
    if (++load_slice == count) load_slice = 0, load_tile += stride;
  };

  // A lane's four columns of a slice are the columns of one word of the weight (quantized.cuh).
  int column = begin * SLICE;
  if (WEIGHT == INT4) column += (lane >> 3) * 32 + (lane & 1) * 8 + (lane >> 1 & 3) * 2;
  else column += (lane >> 2) * 16 + (lane & 3) * 2;
  unsigned pairs[BATCH][2], norms[BATCH][2];
  auto load_batch = [&](unsigned (&to)[BATCH][2], const T* from, int first) {
#pragma unroll
    for (int k = 0; k < BATCH; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        to[k][i] = *(const unsigned*)(from + column + min(first + k, count - 1) * (WARPS * SLICE) + i * APART);
  };
  if (NORM && count > 0) load_batch(norms, norm, 0);  // before the ring is filled: else they would arrive after it
  if (SPLIT > 1) arrive_at_cluster();
  if (lane == 0) {
    for (int s = 0; s < STAGES; ++s) init(&full[warp][s], 1);
    if (warp == WAITING_WARP) init(&ended, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  int stages = min(STAGES, steps), asked = 0;
  for (long long next = clock64(); asked < stages; ++asked) {
    if (warp != WAITING_WARP && asked > 0) {
      bool known = false;
      for (next += PACE; !known && clock64() < next;) known = completed(&ended, 0);
      if (__any_sync(0xffffffff, known)) break;
    }
    load(asked);
  }
  wait_for_predecessor();
  start_successor();
  if (warp == WAITING_WARP && lane == 0) arrive(&ended);
  float square = 0.f;
  for (int first = 0; first < count; first += BATCH) {
    load_batch(pairs, x, first);
    if (NORM && first > 0) load_batch(norms, norm, first);
    while (asked < stages) load(asked++);  // fill the rest of the ring after x
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      int slice = min(first + k, count - 1);
      if (NORM)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          square += first + k < count ? sum_squares(pairs[k][i]) : 0.f;
          pairs[k][i] = multiply(pairs[k][i], norms[k][i]);
        }
      store_slice(own_x + slice * SLICE * 2, units + slice, pairs[k]);
    }
  }
  if (NORM) square = warp_sum(square);
  __syncwarp();

  int slot = 0, parity = 0, step = 0;
  float scale = SUM_UNIT;  // factor of all sums
  for (int tile = first_tile; tile < tiles; tile += stride) {
    int width = GATED ? N / 2 : N;
    int at = split * OWN_COLUMNS + thread, n = tile * OUTPUTS + at;  // the thread's column of y
    bool ends = thread < OWN_COLUMNS && n < width;
    // Operands of the tile's epilogue are loaded before its products.
    T before = {}, biases[2] = {};
    float factors[2] = {1.f, 1.f};
    if (ends && residual) before = residual[n];
#pragma unroll
    for (int h = 0; h < (GATED ? 2 : 1); ++h) {
      if (ends && row_scales) factors[h] = row_scales[n + h * width];
      if (ends && bias) biases[h] = bias[n + h * width];
    }
    float total[ROW_BLOCKS][4] = {};
    for (int slice = 0; slice < count; ++slice, ++step) {
      wait(&full[warp][slot], parity);
      multiply_slice(total, own_x + slice * SLICE * 2, units + slice, ring + slot * STAGE);
      __syncwarp();
      if (step + STAGES < steps) load(slot);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }

#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if ((lane & 3) == 0) own_sums[r * 16 + h * 8 + (lane >> 2)] = total[r][h * 2];
    bool scales_x = NORM && tile == first_tile;
    if (scales_x && lane == 0) own_sums[ROWS] = square;
    __syncthreads();
    auto add_warps = [&](int row) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += all_sums[w * SUMS + row];
      return sum;
    };
    if (SPLIT > 1) {  // a row's sum goes to the block of its epilogue, the sum of squares to all blocks
      wait_for_cluster();  // the other blocks have begun, and have read the sums of the previous tile
      float* to = &received[split][SPLIT > 1 ? thread : 0];
      int owner = (GATED ? thread / 16 * 8 + thread % 8 : thread) / OWN_COLUMNS;
      if (thread < ROWS) store_at(address_in(owner, to), add_warps(thread));
      if (scales_x && thread == ROWS)
#pragma unroll
        for (int s = 0; s < SPLIT; ++s) {
          float sum = add_warps(ROWS);
          store_at(address_in(s, to), sum);
        }
      __syncwarp();
      arrive_at_cluster(), wait_for_cluster();
    }
    auto sum_of = [&](int row) {
      if (SPLIT == 1) return add_warps(row);
      float sum = 0.f;
#pragma unroll
      for (int s = 0; s < SPLIT; ++s) sum += received[s][SPLIT > 1 ? row : 0];
      return sum;
    };
    if (ends) {
      if (scales_x) scale *= rsqrtf(sum_of(ROWS) / K + eps);
      int row = GATED ? at / 8 * 16 + at % 8 : at;
      float y = sum_of(row) * scale * factors[0] + to_float(biases[0]);
      if (GATED) {
        float up = rounded(sum_of(row + 8) * scale * factors[1] + to_float(biases[1]));
        y = rounded(activation(rounded(y))) * up;
      }
      if (residual) y = rounded(y) + to_float(before);
      out[n] = from_float<T>(y);
    }
    // Sums are overwritten only when all threads have read them.
    __syncwarp();
    if (tile + stride < tiles) {
      if (SPLIT > 1) arrive_at_cluster();
      else __syncthreads();
    }
  }
}
