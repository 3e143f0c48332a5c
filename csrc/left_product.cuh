// multiply_add (multiply_add.cuh) for 16-bit operands: a [64, 16] in registers, in the layout of a left operand of
// `mma`, and b [RIGHT_ROWS, 16] in shared memory, passed as a matrix descriptor.
#pragma once
#include "hopper.cuh"

using Left = const unsigned (&)[4];
#define LEFT(a0, a1, a2, a3) "{%" a0 ",%" a1 ",%" a2 ",%" a3 "}"
#define LEFT_INPUTS(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define INSTRUCTION(n) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." TYPE(SCALAR) "." TYPE(SCALAR)
#define MODIFIERS "1, 1, 0"
#include "multiply_add.cuh"
