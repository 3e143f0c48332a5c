// Rows of x in FP8 with scales of groups of 128 columns, as quantize.cu makes them, without a norm.
//
// Groups lie one after another in x, whatever row they are of. 16 threads have 8 columns each of a group, and fetch
// TURNS groups at a time, far apart, so that few rows are divided among all threads. Scales: [K / 128, stride].
#include "rounding.cuh"

constexpr int TURNS = 4;

extern "C" __global__ void __launch_bounds__(256) quantize_groups(
    const T* x, e4m3* codes, float* scales, int stride, int M, int K) {
  start_successor();  // which may fetch weights
  int groups = K / 128, all = M * groups, apart = gridDim.x * 16;
  wait_for_predecessor();
  for (int first = (blockIdx.x * 256 + threadIdx.x) / 16; first < all; first += TURNS * apart) {
    Vec<8> kept[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      int group = first + turn * apart;
      kept[turn] = {};
      if (group < all) kept[turn] = *(const Vec<8>*)(x + (long long)group * 128 + (threadIdx.x & 15) * 8);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      int group = first + turn * apart;
      float largest = largest_of<16>(kept[turn], 0xffffu << (threadIdx.x & 16));  // the other 16 may have none
      if (group >= all) break;
      float scale = fp8_scale(largest);
      int row = group / groups;
      if ((threadIdx.x & 15) == 0) scales[(long long)(group - row * groups) * stride + row] = scale;
      store_rounded(codes + (long long)group * 128 + (threadIdx.x & 15) * 8, kept[turn], scale, __frcp_rn(scale));
    }
  }
}
