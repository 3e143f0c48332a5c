// Processing of a row's logits before the temperature: biases, penalties, ids to avoid and ids that are not allowed, in
// one launch that writes a float32 copy. The results equal those of engine/sampling/logits_processing.py bit for bit.
//
// A block processes CHUNK consecutive ids of one row, and counts how often each of them is among the row's tokens.
#include "common.cuh"

constexpr int CHUNK = 4096;
constexpr int THREADS = 256;
constexpr float AVOIDED = -1e30f, EXCLUDED = -2e30f;
constexpr unsigned IS_KNOWN = 1u << 31, IS_AVOIDED = 1u << 30, COUNT = IS_AVOIDED - 1;  // bits of a token's state

// Tables of widths `n_...` with -1 for no id; words of WORD ids end in their last column. Null `mask`: all allowed.
extern "C" __global__ void __launch_bounds__(THREADS) process_logits(
    const T* logits, long long row_stride, OPTIONAL const unsigned* mask, const long long* slots, const int* tokens,
    long long tokens_stride, const int* lengths, const int* prompt_lens, const float* presence_penalty,
    const float* frequency_penalty, const float* repetition_penalty, const int* min_tokens, const int* stop_ids,
    int n_stop_ids, const int* bias_ids, const float* biases, int n_biases, const int* bad_words, int n_bad_words,
    const bool* is_restricted, const unsigned* allowed, int n_allowed, float* out, int vocab) {
  __shared__ unsigned state[CHUNK];
  __shared__ float bias[CHUNK];
  wait_for_predecessor();
  start_successor();
  int row = blockIdx.y, begin = blockIdx.x * CHUNK, size = min(CHUNK, vocab - begin), thread = threadIdx.x;
  long long slot = slots[row];
  const int* known = tokens + slot * tokens_stride;
  int length = lengths[slot], prompt_len = prompt_lens[slot];
  float presence = presence_penalty[slot], frequency = frequency_penalty[slot], repetition = repetition_penalty[slot];
  for (int i = thread; i < size; i += THREADS) state[i] = 0, bias[i] = 0.f;
  __syncthreads();

  if (presence != 0.f || frequency != 0.f || repetition != 1.f)
    for (int place = thread; place < length; place += THREADS) {
      unsigned id = known[place] - begin;
      if (id >= size) continue;
      atomicOr(&state[id], IS_KNOWN);
      if (place >= prompt_len) atomicAdd(&state[id], 1);
    }
  for (int i = thread; i < n_biases; i += THREADS) {
    int id = bias_ids[slot * n_biases + i];
    if (id >= begin && id < begin + size) bias[id - begin] = biases[slot * n_biases + i];
  }
  if (length - prompt_len < min_tokens[slot])
    for (int i = thread; i < n_stop_ids; i += THREADS) {
      int id = stop_ids[slot * n_stop_ids + i];
      if (id >= begin && id < begin + size) atomicOr(&state[id - begin], IS_AVOIDED);
    }
  for (int i = thread; i < n_bad_words; i += THREADS) {
    const int* word = bad_words + (slot * n_bad_words + i) * WORD;
    int id = word[WORD - 1];
    if (id < begin || id >= begin + size) continue;
    bool begun = true;  // the output ends in all of the word but its last id
    for (int j = 0; j < WORD - 1; ++j) {
      int place = length - (WORD - 1) + j;
      begun &= word[j] == -1 || (place >= prompt_len && known[place] == word[j]);
    }
    if (begun) atomicOr(&state[id - begin], IS_AVOIDED);
  }
  __syncthreads();

  const T* x_row = logits + row * row_stride + begin;
  const unsigned* row_mask = mask ? mask + (long long)row * ((vocab + 31) / 32) : nullptr;
  bool restricted = is_restricted[slot];
#pragma unroll 8
  for (int i = thread; i < size; i += THREADS) {
    int id = begin + i, word = id / 32;
    unsigned flags = state[i];
    float count = flags & COUNT, x = to_float(x_row[i]) + bias[i];
    if (flags & IS_KNOWN) x = x > 0.f ? x / repetition : x * repetition;
    x = __fsub_rn(x, __fmul_rn(frequency, count));
    if (count > 0.f) x -= presence;
    if (flags & IS_AVOIDED) x = AVOIDED;
    if (restricted && !(word < n_allowed && allowed[slot * n_allowed + word] >> id % 32 & 1)) x = EXCLUDED;
    if (row_mask && !(row_mask[word] >> id % 32 & 1)) x = EXCLUDED;
    out[(long long)row * vocab + id] = x;
  }
}
