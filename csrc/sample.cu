// Sampling of one token per row from logits [rows, vocab], in two launches. sample_partials reads all logits once and
// summarizes each group of GROUP logits, one warp per group. sample_choose has one block per row; it reads again only
// the few groups that can contain the sampled token or decide the filters.
//
// The token is sampled by inverting the cumulative distribution of the tokens that top-k, top-p and min-p keep, in
// vocabulary order, at a uniform number that depends on seed and position alone. At temperature 0 it is the first of
// the largest logits. engine/sampling/sampler.py defines the filters.
//
// The filters together amount to one limit on the distance from the largest logit, (max - x) / temperature, as a 32-bit
// integer: tokens within the limit are kept. First the kernel computes cheap bounds on the limit. If few tokens lie
// within the bounds, each is compared with all others. If there are many, the limit is found by a radix select: by
// histograms, most significant bits first. All sums that decide are integers, so the order of additions does not
// matter, and equal input gives equal tokens. -DTHREADS: threads per block of sample_choose, 512 or 1024.
//
// A row with a NaN, or without a finite maximum, gets NO_TOKEN: all maxima keep a NaN, which is larger than all numbers
// in the order of `ordered`.
//
// The vocabulary may be divided among -DRANKS GPUs. Each GPU then runs sample_partials on its own logits, the partials
// are gathered, and sample_choose reads the few groups that it needs from the GPUs that hold them.
#include "common.cuh"

#ifndef RANKS
#define RANKS 1
#endif

#define INF __int_as_float(0x7f800000)
using u64 = unsigned long long;

constexpr int GROUP = 512;          // contiguous logits, read by one warp at a time
constexpr int PER_LANE = GROUP / 32;
constexpr int MAX_GROUPS = 2048;    // groups per row
constexpr int PARTIAL_WARPS = 8;    // warps per block of sample_partials
constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffffu;

constexpr int FEW = 512;                  // tokens that are compared with each other
constexpr int BINS = 2048;                // bins of a histogram
constexpr int FIRST_SHIFT = 21;           // 32 bits less the 11 of a bin
constexpr float STEPS = 0x1p27f;          // steps of a distance in one nat
constexpr unsigned FARTHEST = ALL - 1;    // 32 nats: farther tokens weigh less than 1e-13 and are never kept
constexpr float SLACK_ONE = 0x1p18f;      // a bin's sum of (1 - weight / weight at its near end) in fixed point
constexpr float MASS_ONE = 0x1p40f;       // the weight of the largest logit in sums of weights
constexpr float EXCLUDED = -2e30f;        // logit of masked ids: finite, as in engine/sampling/logits_processing.py
constexpr int NO_TOKEN = -1;              // as in core.py

struct Partial {  // summary of one group of a row
  float max;      // largest logit
  float sum;      // sum of exp((logit - max) / temperature)
  int argmax;     // id of the first largest logit
  int pad;
};

struct Amount {  // number of some tokens, and the sum of their weights in fixed point
  unsigned count;
  u64 mass;
};

struct Found {       // the bin in which the running amount reaches the wanted one
  int bin;           // index of the bin; -1: the amount is never reached
  unsigned count;    // number of tokens in the bin
  Amount before;     // amount of all bins before it
  Amount with;       // amount with this bin included
};

struct Shared {
  alignas(16) float max[MAX_GROUPS];  // beyond the row's groups, up to a multiple of 4, -infinity
  float weight[MAX_GROUPS];   // weight of a group's kept tokens, in units of the largest logit's
  union {
    struct {
      unsigned count[BINS];
      unsigned detail[BINS];  // first level: the slack; below: which bits of the distances differ
    };
    struct {  // few tokens, in any order
      alignas(16) unsigned distance[FEW];
      alignas(16) int id[FEW];
      alignas(16) u64 mass[FEW];
    };
  };
  int tokens;                 // number of tokens collected, or more than FEW
  unsigned limit;
  u64 wanted;
  Amount warp_total[WARPS];
  float value[WARPS];
  int place[WARPS];
  float kth;
  int group, token;
  u64 rest;
  Found found;
};

__device__ __forceinline__ u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// floor(uniform * total), below total: the uniform number is (bits + 1/2) / 2^23.
__device__ __forceinline__ u64 uniform_part(long long seed, int position, u64 total) {
  u64 bits = mix(mix((u64)seed) + (position + 1ull) * 0x9E3779B97F4A7C15ull) >> 41;
  return __umul64hi(total, (2 * bits + 1) << 40);
}

// The larger number; NaN if one of the two is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// Unsigned integer with the same order as the floats; both zeros are equal, and NaN is above infinity.
__device__ __forceinline__ unsigned ordered(float x) {
  unsigned bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Index in a group of a lane's i-th logit: the lanes load vectors that are contiguous.
__device__ __forceinline__ int place_of(int i, int lane) { return i / VEC * 32 * VEC + lane * VEC + i % VEC; }

struct Shards {  // sharding of the logits among GPUs; unused with one
  const long long* addresses;  // address of each GPU's logits [rows, row_stride]
  int ids;                     // number of ids of a GPU
  int groups;                  // number of groups of a GPU

  __device__ __forceinline__ int first_id(int group) const {
    return RANKS == 1 ? group * GROUP : group / groups * ids + group % groups * GROUP;
  }
};

struct Logits {  // logits of one row
  const T* values;
  const unsigned* mask;  // bit i of word w is set where id 32 w + i is allowed; null: all are
  int vocab;
  Shards shards;
  long long offset;  // offset of the row in each GPU's logits

  __device__ __forceinline__ int first_id(int group) const { return shards.first_id(group); }

  // Load a lane's logits of a group; those beyond the vocabulary are -infinity.
  __device__ __forceinline__ void load(int group, int lane, float* x) const {
    int start = group * GROUP, end = vocab;
    const T* from = values;
    if (RANKS > 1) {
      int rank = group / shards.groups;
      from = (const T*)shards.addresses[rank] + offset;
      start = (group - rank * shards.groups) * GROUP, end = min(shards.ids, vocab - rank * shards.ids);
    }
    if (start + GROUP <= end && (size_t)from % 16 == 0) {
#pragma unroll
      for (int i = 0; i < PER_LANE; i += VEC) {
        Vec<VEC> v = *(const Vec<VEC>*)(from + start + place_of(i, lane));
#pragma unroll
        for (int j = 0; j < VEC; ++j) x[i + j] = to_float(v.v[j]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        int place = start + place_of(i, lane);
        x[i] = place < end ? to_float(from[place]) : -INF;
      }
    }
    if (!mask) return;
#pragma unroll
    for (int i = 0; i < PER_LANE; i += VEC) {
      int place = start + place_of(i, lane);  // VEC neighbours in one word
      unsigned bits = place < vocab ? mask[place / 32] >> place % 32 : 0;
#pragma unroll
      for (int j = 0; j < VEC; ++j)
        if (!(bits >> j & 1) && place + j < vocab) x[i + j] = EXCLUDED;
    }
  }
};

__device__ __forceinline__ Logits logits_of(
    const T* logits, long long row_stride, const unsigned* mask, int vocab, int row, Shards shards = {}) {
  long long offset = row * row_stride;
  return {logits + offset, mask ? mask + (long long)row * ((vocab + 31) / 32) : nullptr, vocab, shards, offset};
}

extern "C" __global__ void __launch_bounds__(32 * PARTIAL_WARPS) sample_partials(
    const T* logits, long long row_stride, OPTIONAL const unsigned* mask, const long long* slots,
    const float* temperature, Partial* partials, int groups, int vocab, int first_id) {
  int row = blockIdx.y, lane = threadIdx.x & 31, group = blockIdx.x * PARTIAL_WARPS + (threadIdx.x >> 5);
  wait_for_predecessor();
  start_successor();
  if (group >= groups) return;
  float x[PER_LANE];
  logits_of(logits, row_stride, mask, vocab, row).load(group, lane, x);
  float best = x[0];
#pragma unroll
  for (int i = 1; i < PER_LANE; ++i) best = max_or_nan(best, x[i]);
  unsigned key = ordered(best), top = __reduce_max_sync(ALL, key);
  best = __shfl_sync(ALL, best, __ffs(__ballot_sync(ALL, key == top)) - 1);
  int place = GROUP;
#pragma unroll
  for (int i = PER_LANE - 1; i >= 0; --i)
    if (x[i] == best) place = place_of(i, lane);
  place = __reduce_min_sync(ALL, (unsigned)place);

  float t = temperature[slots[row]], sum = 0.f;
  if (t > 0.f && best > -INF) {
    float inverse = 1.f / t;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) sum += __expf((x[i] - best) * inverse);
    sum = warp_sum(sum);
  }
  int argmax = first_id + group * GROUP + (place < GROUP ? place : 0);
  if (lane == 0) partials[(long long)row * groups + group] = {best, sum, argmax, 0};
}

__device__ __forceinline__ unsigned clamped(float steps) {
  return steps < 4294967040.f ? (unsigned)steps : ALL;  // the largest float below 2^32
}

// Logits of a row with what sample_choose knows of them.
struct Row {
  Logits logits;
  int groups;
  float max, inverse;  // the largest logit; 1 / temperature

  __device__ __forceinline__ unsigned distance(float x) const { return clamped((max - x) * (inverse * STEPS)); }
};

__device__ __forceinline__ float weight_at(unsigned distance) { return __expf((float)distance * (-1.f / STEPS)); }

// Exclusive prefix sum over the threads of the block; `total` is the sum over all of them.
__device__ __forceinline__ Amount scan(Amount own, Shared& s, Amount& total) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Amount sum = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    unsigned count = __shfl_up_sync(ALL, sum.count, offset);
    u64 mass = __shfl_up_sync(ALL, sum.mass, offset);
    if (lane >= offset) sum.count += count, sum.mass += mass;
  }
  if (lane == 31) s.warp_total[warp] = sum;
  __syncthreads();
  Amount part = lane < WARPS ? s.warp_total[lane] : Amount{0, 0};
#pragma unroll
  for (int offset = 1; offset < WARPS; offset <<= 1) {
    unsigned count = __shfl_up_sync(ALL, part.count, offset);
    u64 mass = __shfl_up_sync(ALL, part.mass, offset);
    if (lane >= offset) part.count += count, part.mass += mass;
  }
  total = {__shfl_sync(ALL, part.count, WARPS - 1), __shfl_sync(ALL, part.mass, WARPS - 1)};
  unsigned count = __shfl_sync(ALL, part.count, (warp + 31) & 31);
  u64 mass = __shfl_sync(ALL, part.mass, (warp + 31) & 31);
  if (warp == 0) count = 0, mass = 0;
  __syncthreads();
  return {count + sum.count - own.count, mass + sum.mass - own.mass};
}

// Count the tokens at distances from `near` to `far` in bins of 2^shift steps.
template <bool FIRST>
__device__ __forceinline__ void histogram(const Row& row, Shared& s, unsigned near, unsigned far, int shift) {
  int lane = threadIdx.x & 31;
  for (int i = threadIdx.x; i < BINS; i += THREADS) s.count[i] = s.detail[i] = 0;
  __syncthreads();
  for (int group = threadIdx.x >> 5; group < row.groups; group += WARPS) {
    if (row.distance(s.max[group]) > far) continue;
    float x[PER_LANE];
    row.logits.load(group, lane, x);
    unsigned distance[PER_LANE], nearest = ALL, farthest = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      unsigned d = distance[i] = row.distance(x[i]);
      if (d >= near && d <= far) nearest = min(nearest, d), farthest = max(farthest, d);
    }
    nearest = __reduce_min_sync(ALL, nearest), farthest = __reduce_max_sync(ALL, farthest);
    if (nearest > farthest) continue;
    bool same = (nearest - near) >> shift == (farthest - near) >> shift;
    unsigned count = 0, detail = 0;  // if all are in one bin, the warp adds once: equal logits would contend
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      unsigned d = distance[i];
      if (d < near || d > far) continue;
      unsigned mine;
      if (FIRST) {
        float u = (float)(d & ((1u << FIRST_SHIFT) - 1)) * (1.f / STEPS);
        mine = (unsigned)(u * (1.f - 0.5f * u) * SLACK_ONE + 0.5f);  // 1 - exp(-u), below 1e-6 from it
      } else {
        mine = (d & 1023) | (~d & 1023) << 10;
      }
      if (same) {
        ++count;
        detail = FIRST ? detail + mine : detail | mine;
      } else {
        unsigned bin = (d - near) >> shift;
        atomicAdd(&s.count[bin], 1);
        FIRST ? atomicAdd(&s.detail[bin], mine) : atomicOr(&s.detail[bin], mine);
      }
    }
    if (same) {
      count = __reduce_add_sync(ALL, count);
      detail = FIRST ? __reduce_add_sync(ALL, detail) : __reduce_or_sync(ALL, detail);
      if (lane == 0) {
        unsigned bin = (nearest - near) >> shift;
        atomicAdd(&s.count[bin], count);
        FIRST ? atomicAdd(&s.detail[bin], detail) : atomicOr(&s.detail[bin], detail);
      }
    }
  }
  __syncthreads();
}

constexpr int BINS_PER_THREAD = BINS / THREADS;

// Read the amounts in a thread's bins.
template <bool FIRST>
__device__ __forceinline__ void read_bins(const Shared& s, unsigned near, int shift, Amount* bins) {
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; ++i) {
    unsigned bin = threadIdx.x * BINS_PER_THREAD + i, count = s.count[bin];
    unsigned distance = near + (bin << shift);
    float weight = FIRST ? weight_at(distance) : weight_at(distance + (1u << shift >> 1));
    float tokens = FIRST ? (float)count - (float)s.detail[bin] * (1.f / SLACK_ONE) : (float)count;
    bins[i] = {count, (u64)(tokens * weight * MASS_ONE)};
  }
}

// Find the first bin at which the running amount, starting from `before`, reaches `wanted` tokens, or `wanted` mass.
__device__ __forceinline__ Found find(const Amount* bins, Amount before, u64 wanted, bool by_mass, Shared& s) {
  Amount own = {0, 0}, total;
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; ++i) own.count += bins[i].count, own.mass += bins[i].mass;
  if (threadIdx.x == 0) s.found.bin = -1;
  Amount sum = scan(own, s, total);
  sum.count += before.count, sum.mass += before.mass;
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; ++i) {
    Amount with = {sum.count + bins[i].count, sum.mass + bins[i].mass};
    if ((by_mass ? sum.mass : sum.count) < wanted && (by_mass ? with.mass : with.count) >= wanted)
      s.found = {(int)threadIdx.x * BINS_PER_THREAD + i, bins[i].count, sum, with};
    sum = with;
  }
  __syncthreads();
  Found found = s.found;
  __syncthreads();
  return found;
}

// Refine the bin found at the first level to the limit itself; set `mass` to the mass of the wanted tokens.
__device__ __forceinline__ unsigned refine(
    const Row& row, Found found, u64 wanted, bool by_mass, unsigned cut, Shared& s, u64& mass) {
  unsigned near = (unsigned)found.bin << FIRST_SHIFT, far = min(near + ((1u << FIRST_SHIFT) - 1), cut);
  for (int shift = FIRST_SHIFT - 11; found.count > 1 && (by_mass || found.with.count != wanted); shift -= 10) {
    histogram<false>(row, s, near, far, shift);
    Amount bins[BINS_PER_THREAD];
    read_bins<false>(s, near, shift, bins);
    Found inside = find(bins, found.before, wanted, by_mass, s);
    if (inside.bin < 0) break;  // not reached because masses are rounded: keep the whole bin
    found = inside;
    near += (unsigned)found.bin << shift, far = min(near + ((1u << shift) - 1), far);
    unsigned differ = s.detail[found.bin];
    __syncthreads();
    if (shift == 0 || (differ & differ >> 10) == 0) break;  // all in the bin are equal
  }
  mass = found.with.mass;
  if (!by_mass && found.with.count > wanted)  // only as many of the equal tokens at the limit as are wanted
    mass = found.before.mass + (mass - found.before.mass) / found.count * (wanted - found.before.count);
  return far;
}

struct Filters {
  int top_k;            // vocab: no limit
  float top_p;
  unsigned min_p_limit; // the largest distance that min-p keeps
  unsigned cut;         // tokens beyond this distance are neither kept nor needed to decide which are kept
  u64 mass;             // mass of all tokens

  __device__ __forceinline__ bool by_mass() const { return top_p < 1.f; }
  __device__ __forceinline__ u64 wanted(u64 mass) const { return max((u64)((double)top_p * (double)mass), 1ull); }
};

// Compute bounds on the limit from the groups' partials. `total` is the mass of all tokens, in units of the mass of the
// largest logit.
__device__ __forceinline__ Filters
find_bounds(const Row& row, int top_k, float top_p, float min_p, float total, Shared& s) {
  int vocab = row.logits.vocab;
  bool by_count = top_k > 0 && top_k < vocab, by_mass = top_p < 1.f;
  unsigned min_p_limit = min_p > 0.f ? min(clamped(-logf(min_p) * STEPS), FARTHEST) : FARTHEST;
  unsigned cut = by_count && by_mass ? FARTHEST : min_p_limit;  // top-p counts what min-p will drop
  if (by_count && top_k <= row.groups) {
    // Find the k-th largest of the groups' maxima: at least k tokens are as large as it.
    for (int group = threadIdx.x; group < row.groups; group += THREADS) {
      float mine = s.max[group];
      int larger = 0, equal = 0;
      for (int other = 0; other < row.groups; other += 4) {
        float4 m = *(const float4*)(s.max + other);
        larger += (m.x > mine) + (m.y > mine) + (m.z > mine) + (m.w > mine);
        equal += (m.x == mine) + (m.y == mine) + (m.z == mine) + (m.w == mine);
      }
      if (larger < top_k && top_k <= larger + equal) s.kth = mine;
    }
    __syncthreads();
    cut = min(cut, row.distance(s.kth));
  }
  if (!by_count && by_mass) {
    // Top-p drops at least a mass of (1 - top_p) * total, so it drops all tokens that weigh less than
    // (1 - top_p) * total / vocab: their mass is smaller. A smaller distance is a bound too, if the groups that lie
    // wholly beyond it, plus the most that the other groups can have beyond it, weigh less than the dropped mass.
    // Each warp tries one distance.
    float dropped = 0.999f * (1.f - top_p) * total, farthest = logf(vocab / dropped);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float nats = farthest * (warp + 1) / WARPS, at_most = GROUP * __expf(-nats), beyond = 0.f;
    for (int group = lane; group < row.groups; group += 32) {
      bool is_beyond = (row.max - s.max[group]) * row.inverse > nats;
      beyond += is_beyond ? s.weight[group] : fminf(s.weight[group], at_most);
    }
    beyond = warp_sum(beyond);
    if (threadIdx.x == 0) s.limit = clamped(farthest * STEPS);
    __syncthreads();
    if (lane == 0 && beyond < dropped) atomicMin(&s.limit, clamped(nats * STEPS));
    __syncthreads();
    cut = min(cut, s.limit);
  }
  return {by_count ? top_k : vocab, top_p, min_p_limit, cut, (u64)(total * MASS_ONE)};
}

// Collect the tokens within the cut. Returns their number; a result above FEW means that they are too many to collect.
__device__ __forceinline__ int collect(const Row& row, unsigned cut, Shared& s) {
  int lane = threadIdx.x & 31;
  if (threadIdx.x == 0) s.tokens = 0;
  __syncthreads();
  for (int group = threadIdx.x >> 5; group < row.groups; group += WARPS) {
    if (row.distance(s.max[group]) > cut) continue;
    if (__shfl_sync(ALL, *(volatile int*)&s.tokens, 0) > FEW) break;
    float x[PER_LANE];
    row.logits.load(group, lane, x);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      unsigned d = row.distance(x[i]), lanes = __ballot_sync(ALL, d <= cut);
      if (!lanes) continue;
      int at = 0;
      if (lane == 0) at = atomicAdd(&s.tokens, __popc(lanes));
      at = __shfl_sync(ALL, at, 0) + __popc(lanes & ((1u << lane) - 1));
      if (d <= cut && at < FEW) s.distance[at] = d, s.id[at] = row.logits.first_id(group) + place_of(i, lane);
    }
  }
  __syncthreads();
  return s.tokens;
}

// Sample a token from the few that were collected; returns `fallback` if no token is kept.
__device__ __forceinline__ int choose_of_few(
    const Filters& filters, int count, long long seed, int position, int fallback, Shared& s) {
  int thread = threadIdx.x, end = (count + 3) & ~3;
  bool is_one = thread < count, kept = false;
  unsigned distance = is_one ? s.distance[thread] : ALL;
  int id = is_one ? s.id[thread] : 0;
  u64 mass = is_one ? (u64)(weight_at(distance) * MASS_ONE) : 0;
  if (thread < end) s.distance[thread] = distance, s.mass[thread] = mass;
  if (thread == 0) s.limit = filters.min_p_limit, s.wanted = filters.wanted(filters.mass), s.token = fallback;
  __syncthreads();

  u64 mass_before = 0;
  if (is_one) {
    int before = 0, equal = 0;
    for (int other = 0; other < end; other += 4) {
      uint4 d = *(const uint4*)(s.distance + other);
      const u64* m = s.mass + other;
      before += (d.x < distance) + (d.y < distance) + (d.z < distance) + (d.w < distance);
      equal += (d.x == distance) + (d.y == distance) + (d.z == distance) + (d.w == distance);
      mass_before += (d.x < distance ? m[0] : 0) + (d.y < distance ? m[1] : 0) + (d.z < distance ? m[2] : 0) +
                     (d.w < distance ? m[3] : 0);
    }
    if (before < filters.top_k && filters.top_k <= before + equal) {  // only as many equal ones count as are wanted
      s.limit = min(filters.min_p_limit, distance);
      s.wanted = filters.wanted(mass_before + mass * (filters.top_k - before));
    }
  }
  __syncthreads();
  kept = is_one && distance <= s.limit && (!filters.by_mass() || mass_before < s.wanted);
  if (thread < end) s.mass[thread] = kept ? mass : 0;
  __syncthreads();
  if (kept) {
    u64 before = 0, all = 0;
    for (int other = 0; other < end; other += 4) {
      int4 i = *(const int4*)(s.id + other);
      const u64* m = s.mass + other;
      all += m[0] + m[1] + m[2] + m[3];
      before += (i.x < id ? m[0] : 0) + (i.y < id ? m[1] : 0) + (i.z < id ? m[2] : 0) + (i.w < id ? m[3] : 0);
    }
    u64 target = uniform_part(seed, position, all);
    if (before <= target && target < before + mass) s.token = id;
  }
  __syncthreads();
  return s.token;
}

// Find the largest distance that the filters keep, by histograms.
__device__ __forceinline__ unsigned find_limit(const Row& row, const Filters& filters, Shared& s) {
  unsigned cut = filters.cut, limit = min(cut, filters.min_p_limit);
  bool by_count = filters.top_k < row.logits.vocab;
  if (!by_count && !filters.by_mass()) return limit;
  histogram<true>(row, s, 0, cut, FIRST_SHIFT);
  Amount bins[BINS_PER_THREAD];
  read_bins<true>(s, 0, FIRST_SHIFT, bins);
  u64 mass = filters.mass;
  if (by_count) {
    Found found = find(bins, {0, 0}, filters.top_k, false, s);
    if (found.bin >= 0) limit = min(limit, refine(row, found, filters.top_k, false, cut, s, mass));
  }
  if (filters.by_mass()) {
    u64 wanted = filters.wanted(mass), reached;
    Found found = find(bins, {0, 0}, wanted, true, s);
    if (found.bin >= 0) limit = min(limit, refine(row, found, wanted, true, cut, s, reached));
  }
  return limit;
}

// Compute each group's weight within the limit.
__device__ __forceinline__ void weigh(const Row& row, unsigned limit, Shared& s) {
  int lane = threadIdx.x & 31;
  for (int group = threadIdx.x >> 5; group < row.groups; group += WARPS) {
    float kept = 0.f;
    if (row.distance(s.max[group]) <= limit) {
      float x[PER_LANE];
      row.logits.load(group, lane, x);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        if (row.distance(x[i]) <= limit) kept += __expf((x[i] - row.max) * row.inverse);
      kept = warp_sum(kept);
    }
    if (lane == 0) s.weight[group] = kept;
  }
  __syncthreads();
}

// Sample a token within the limit: find the first one at which the running mass exceeds a uniformly drawn part of the
// total. Returns `fallback` if the total is 0.
__device__ __forceinline__ int choose(
    const Row& row, unsigned limit, long long seed, int position, int fallback, Shared& s) {
  constexpr int THREAD_GROUPS = MAX_GROUPS / THREADS;
  int lane = threadIdx.x & 31;
  Amount own = {0, 0}, total;
#pragma unroll
  for (int i = 0; i < THREAD_GROUPS; ++i) {
    int group = threadIdx.x * THREAD_GROUPS + i;
    if (group < row.groups) own.mass += (u64)(s.weight[group] * MASS_ONE);
  }
  Amount sum = scan(own, s, total);
  if (total.mass == 0) return fallback;
  u64 target = uniform_part(seed, position, total.mass);
#pragma unroll
  for (int i = 0; i < THREAD_GROUPS; ++i) {
    int group = threadIdx.x * THREAD_GROUPS + i;
    u64 mass = group < row.groups ? (u64)(s.weight[group] * MASS_ONE) : 0;
    if (sum.mass <= target && target < sum.mass + mass) s.group = group, s.rest = target - sum.mass;
    sum.mass += mass;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int start = row.logits.first_id(s.group), last = -1, chosen = -1;
    u64 rest = s.rest;
    float x[PER_LANE];
    row.logits.load(s.group, lane, x);
    for (int i = 0; i < PER_LANE; i += VEC) {
      u64 mass[VEC], sum = 0;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        bool kept = row.distance(x[i + j]) <= limit;
        mass[j] = kept ? (u64)(__expf((x[i + j] - row.max) * row.inverse) * MASS_ONE) : 0;
        sum += mass[j];
        if (kept && mass[j] > 0) last = place_of(i + j, lane);
      }
      u64 upto = sum;
#pragma unroll
      for (int offset = 1; offset < 32; offset <<= 1) {
        u64 other = __shfl_up_sync(ALL, upto, offset);
        if (lane >= offset) upto += other;
      }
      u64 before = upto - sum;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        if (chosen < 0 && before <= rest && rest < before + mass[j]) chosen = place_of(i + j, lane);
        before += mass[j];
      }
      u64 all = __shfl_sync(ALL, upto, 31);
      if (__any_sync(ALL, chosen >= 0)) break;
      rest -= all;
    }
    // If rounding puts the target after all tokens, take the last token that has a mass.
    int found = __reduce_max_sync(ALL, chosen), end = __reduce_max_sync(ALL, last);
    if (lane == 0) s.token = found >= 0 ? start + found : end >= 0 ? start + end : fallback;
  }
  __syncthreads();
  return s.token;
}

// Sample a row's token by one block, append it to the slot's sequence and increment its length. With several GPUs all
// of them compute the same result; the logits lie at `addresses`, and each GPU has `ids_of_rank` ids in
// `groups_of_rank` groups.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) sample_choose(
    const T* logits, OPTIONAL const long long* addresses, int ids_of_rank, int groups_of_rank, long long row_stride,
    OPTIONAL const unsigned* mask, const long long* slots, const float* temperature, const int* top_k,
    const float* top_p, const float* min_p, const long long* seeds, const Partial* partials, int groups, int vocab,
    int* tokens, long long tokens_stride, int* lengths, int scratch_slot, int* sampled) {
  __shared__ Shared s;
  int index = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  long long slot = slots[index];
  const Partial* mine = partials + (long long)index * groups;
  float t = temperature[slot];
  int length = lengths[slot];
  wait_for_predecessor();
  start_successor();

  unsigned key = 0;
  int place = vocab;
  for (int group = threadIdx.x; group < groups; group += THREADS) {
    Partial part = mine[group];
    s.max[group] = part.max, s.weight[group] = part.sum;
    unsigned other = ordered(part.max);
    if (other > key || place == vocab) key = other, place = part.argmax;  // a thread's groups ascend
  }
  if (threadIdx.x < 4 && groups + threadIdx.x < MAX_GROUPS) s.max[groups + threadIdx.x] = -INF;
  unsigned top = __reduce_max_sync(ALL, key);
  place = __reduce_min_sync(ALL, key == top ? (unsigned)place : vocab);
  if (lane == 0) s.value[warp] = __uint_as_float(top), s.place[warp] = place;
  __syncthreads();
  key = __float_as_uint(s.value[lane % WARPS]);
  top = __reduce_max_sync(ALL, key);
  place = __reduce_min_sync(ALL, key == top ? (unsigned)s.place[lane % WARPS] : vocab);

  bool is_finite = top > ordered(-INF) && top < ordered(INF);
  int token = place;
  if (t > 0.f && is_finite) {
    Shards shards = {addresses, ids_of_rank, groups_of_rank};
    Row row = {logits_of(logits, row_stride, mask, vocab, index, shards), groups, from_ordered(top), 1.f / t};
    float sum = 0.f;
    for (int group = threadIdx.x; group < groups; group += THREADS) {
      float weight = s.weight[group];
      if (weight > 0.f) weight *= __expf((s.max[group] - row.max) * row.inverse);
      s.weight[group] = weight;
      sum += weight;
    }
    __syncthreads();
    int k = top_k[slot];
    float p = top_p[slot], least = min_p[slot];
    if ((k > 0 && k < vocab) || p < 1.f || least > 0.f) {
      Filters filters = find_bounds(row, k, p, least, block_sum(sum, s.value), s);
      int few = collect(row, filters.cut, s);
      if (few <= FEW) {
        token = choose_of_few(filters, few, seeds[slot], length, place, s);
      } else {
        unsigned limit = find_limit(row, filters, s);
        weigh(row, limit, s);
        token = choose(row, limit, seeds[slot], length, place, s);
      }
    } else {
      token = choose(row, ALL, seeds[slot], length, place, s);
    }
  }
  if (threadIdx.x == 0) {
    sampled[index] = is_finite ? token : NO_TOKEN;
    bool real = slot != scratch_slot;  // the scratch slot of padding rows never grows
    tokens[slot * tokens_stride + (real ? length : 0)] = token;
    if (real) lengths[slot] = length + 1;
  }
}
