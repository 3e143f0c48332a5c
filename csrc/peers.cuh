// Flags that GPUs of a group set in one another's memory, and waits for them that end: when the flag is set, when the
// peer is late, or when the host aborts.
#pragma once
#include "common.cuh"

constexpr unsigned LOOKS_BETWEEN_CLOCKS = 1 << 14;  // polls from one look at the clock to the next, some 4 ms

struct Status {        // in the host's memory
  unsigned abort;      // set by the host: wait no longer
  unsigned late_rank;  // one more than the rank whose data did not arrive in time
};

__device__ __forceinline__ unsigned look(const unsigned* flag) { return *(const volatile unsigned*)flag; }

__device__ __forceinline__ void set(unsigned* flag, unsigned value) { *(volatile unsigned*)flag = value; }

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Bound of one wait. `failed` is set once a peer is late or the host aborts: later waits end at once.
struct Patience {
  Status* status;
  unsigned* failed;
  unsigned long long nanos;  // until a peer is late
  unsigned long long deadline;
  unsigned looks;

  // To be called after each look at what rank `from` has not sent yet; true if the wait must end without it.
  __device__ __forceinline__ bool ends(int from) {
    if (++looks % LOOKS_BETWEEN_CLOCKS) return false;
    unsigned long long now = nanoseconds();
    if (deadline == 0) deadline = now + nanos;
    bool late = now > deadline;
    if (late) set(&status->late_rank, from + 1);
    if (late || look(&status->abort)) set(failed, 1);
    return look(failed);
  }
};
