"""Weights of `cpu_ops`, in the layouts that CPUs read fastest.

`weights` has torch's layouts, `int4` the one of csrc/int4_cpu.cpp, which `compile` compiles with the machine's C++
compiler.
"""
