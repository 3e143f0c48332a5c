// multiply_add (multiply_add.cuh) for e4m3 operands in shared memory. Both are passed as matrix descriptors: a [64, 32]
// and b [RIGHT_ROWS, 32].
#pragma once

using Left = unsigned long long;
#define LEFT(a0, a1, a2, a3) "%" a0
#define LEFT_INPUTS(a) "l"(a)
#define INSTRUCTION(n) "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3"
#define MODIFIERS "1, 1"
#include "multiply_add.cuh"
