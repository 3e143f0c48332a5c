// Rounding of rows of x to FP8 with one scale per group of 128 columns, as quantize.cu does with GROUP, without a norm.
//
// Groups are contiguous in x, so they are distributed among threads regardless of rows, and a few rows keep all SMs
// busy. 16 consecutive threads share a group, with 8 columns each. They load TURNS groups at a time, one grid's width
// apart. Scales: [K / 128, stride].
#include "rounding.cuh"

constexpr int TURNS = 4;

extern "C" __global__ void __launch_bounds__(256) quantize_groups(
    const T* x, e4m3* codes, float* scales, int stride, int M, int K) {
  start_successor();  // which may load its weights already
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
      // The warp's other 16 threads may have no group.
      float largest = largest_of<16>(kept[turn], 0xffffu << (threadIdx.x & 16));
      if (group >= all) break;
      float scale = fp8_scale(largest);
      int row = group / groups;
      if ((threadIdx.x & 15) == 0) scales[(long long)(group - row * groups) * stride + row] = scale;
      store_rounded(codes + (long long)group * 128 + (threadIdx.x & 15) * 8, kept[turn], scale, __frcp_rn(scale));
    }
  }
}
