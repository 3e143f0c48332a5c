// Inputs of a decode step, gathered on the device from the tables of all slots: the host sends only the rows' slots.
#include "common.cuh"

// Gather, for each row by one block: the newest token of the row's slot, its position, its place in the KV pool, the
// length and, unless `pages` is null, the slot's row of the page table.
extern "C" __global__ void decode_inputs(
    const long long* slots, const int* tokens, long long tokens_stride, const int* lengths, const int* page_table,
    long long table_stride, int page_size, long long* input_ids, long long* positions, long long* out_cache_loc,
    int* kv_lens, OPTIONAL int* pages, int width) {
  wait_for_predecessor();
  start_successor();
  int row = blockIdx.x;
  long long slot = slots[row];
  int length = lengths[slot], position = length - 1;
  const int* mine = page_table + slot * table_stride;
  if (threadIdx.x == 0) {
    input_ids[row] = tokens[slot * tokens_stride + position];
    positions[row] = position;
    out_cache_loc[row] = (long long)mine[position / page_size] * page_size + position % page_size;
    kv_lens[row] = length;
  }
  if (pages) {
    int used = min(width, position / page_size + 1);
    for (int i = threadIdx.x; i < used; i += blockDim.x) pages[(long long)row * width + i] = mine[i];
  }
}

// Look up the embedding of each token by one block. This rank holds the rows of the `count` ids from `first` on, and
// writes zeros for other ids. H is a multiple of VEC.
extern "C" __global__ void embed(
    const long long* input_ids, const T* weight, T* out, long long first, long long count, int H) {
  wait_for_predecessor();
  start_successor();
  long long row = input_ids[blockIdx.x] - first;
  bool is_here = row >= 0 && row < count;
  const T* from = weight + row * H;
  for (int i = threadIdx.x * VEC; i < H; i += blockDim.x * VEC)
    *(Vec<VEC>*)(out + (long long)blockIdx.x * H + i) = is_here ? *(const Vec<VEC>*)(from + i) : Vec<VEC>{};
}
