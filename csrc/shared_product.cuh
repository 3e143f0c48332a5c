// multiply_add (multiply_add.cuh) for 16-bit operands in shared memory. Both are passed as matrix descriptors: a [64,
// 16] and b [RIGHT_ROWS, 16].
#pragma once

using Left = unsigned long long;
#define LEFT(a0, a1, a2, a3) "%" a0
#define LEFT_INPUTS(a) "l"(a)
#define INSTRUCTION(n) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." TYPE(SCALAR) "." TYPE(SCALAR)
#define MODIFIERS "1, 1, 0, 0"
#include "multiply_add.cuh"
