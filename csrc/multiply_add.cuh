// multiply_add(c, a, b): c [64, RIGHT_ROWS] = a @ b^T, plus c if ADD. It issues one wgmma for each 128, 64, 32, 16 or 8
// columns of c. c is in the registers of a warpgroup, 16 rows per warp, in the layout of `mma` (mma.cuh).
//
// The file that includes this defines the left operand a (Left: its type; LEFT: its text in the instruction;
// LEFT_INPUTS: its asm inputs) and the instruction (INSTRUCTION of n columns; MODIFIERS). b is the matrix descriptor of
// the right operand, RIGHT_ROWS rows of LINE bytes in shared memory: the M_MAX rows of x, unless the file defines it.
#pragma once
#include "hopper.cuh"

#ifndef RIGHT_ROWS
#define RIGHT_ROWS M_MAX
#endif

constexpr int LINE = 128;  // bytes of a row of a stage, as wide as the swizzle

#define PRODUCT(n, registers, b, add, left)                                                                     \
  "{.reg .pred p; setp.ne.b32 p, " add ", 0;\n" INSTRUCTION(n) " {" registers "}, " left ", " b ", p, " MODIFIERS ";}"
#define RIGHT "l"(b), "n"((int)ADD), LEFT_INPUTS(a)

template <bool ADD, int AT = 0>
__device__ __forceinline__ void multiply_add(float (*c)[4], Left a, unsigned long long b) {
  constexpr int REST = RIGHT_ROWS - AT;
  constexpr int PIECE = REST >= 128 ? 128 : REST >= 64 ? 64 : REST >= 32 ? 32 : REST >= 16 ? 16 : 8;
  if constexpr (PIECE == 128)
    asm volatile(PRODUCT("128", TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63", "%64", "%65",
                         LEFT("66", "67", "68", "69"))
                 : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12) : RIGHT);
  else if constexpr (PIECE == 64)
    asm volatile(PRODUCT("64", TEN() TEN(1) TEN(2) "%30,%31", "%32", "%33", LEFT("34", "35", "36", "37"))
                 : SIXTEEN(0), SIXTEEN(4) : RIGHT);
  else if constexpr (PIECE == 32)
    asm volatile(PRODUCT("32", TEN() "%10,%11,%12,%13,%14,%15", "%16", "%17", LEFT("18", "19", "20", "21"))
                 : SIXTEEN(0) : RIGHT);
  else if constexpr (PIECE == 16)
    asm volatile(PRODUCT("16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", LEFT("10", "11", "12", "13"))
                 : FOUR(0), FOUR(1) : RIGHT);
  else
    asm volatile(PRODUCT("8", "%0,%1,%2,%3", "%4", "%5", LEFT("6", "7", "8", "9")) : FOUR(0) : RIGHT);
  if constexpr (REST > PIECE) multiply_add<ADD, AT + PIECE>(c + PIECE / 8, a, b + (PIECE * LINE >> 4));
}
