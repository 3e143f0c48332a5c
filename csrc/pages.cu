// Conversion of the page tables of a batch's rows to one list (CSR), from tables and lengths that are on the device.
// One block of THREADS threads per row. starts [rows + 1]: begin of each row's pages in the list; last_page_lens
// [rows]: number of tokens in each row's last page.

extern "C" __global__ void flatten_pages(const int* table, const int* kv_lens, int* starts, int* last_page_lens,
                                         int* pages, int rows, int width, int page_size) {
  __shared__ int partial[THREADS / 32];
  int row = blockIdx.x;
  // There are few rows, so each block adds up the page counts of the rows before its own.
  int before = 0;
  for (int r = threadIdx.x; r < row; r += THREADS) before += (kv_lens[r] + page_size - 1) / page_size;
  for (int offset = 16; offset > 0; offset >>= 1) before += __shfl_xor_sync(0xffffffffu, before, offset);
  if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = before;
  __syncthreads();
  int start = 0;
  for (int warp = 0; warp < THREADS / 32; ++warp) start += partial[warp];

  int length = kv_lens[row], own = (length + page_size - 1) / page_size;
  if (threadIdx.x == 0) {
    starts[row] = start;
    last_page_lens[row] = length - (own - 1) * page_size;
    if (row == rows - 1) starts[rows] = start + own;
  }
  for (int i = threadIdx.x; i < own; i += THREADS) pages[start + i] = table[(long long)row * width + i];
}
