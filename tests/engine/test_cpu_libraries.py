"""Resources of torch's CPU libraries: idle threads that spin, and products that are kept compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from minisgl.kernel.cpu_ops import multiplies_bfloat16
from minisgl.process.machine import CACHED_PRIMITIVES, MALLOC, PRIMITIVE_CACHES, SPIN_COUNT, cpu_environment

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", *MALLOC, *PRIMITIVE_CACHES)

# CPU milliseconds of a process whose parallel regions stand 10 ms apart.
IDLE = """
import time, torch
torch.set_num_threads(2)
x = torch.ones(1 << 16)
x.exp()
begin = time.process_time()
for _ in range(40):
    x.exp()
    time.sleep(0.01)
print(1000 * (time.process_time() - begin))
"""

# MB that the process takes after so many products with other numbers of tokens, and after as many again.
PRODUCTS = """
import sys, torch
from minisgl.kernel.cpu_ops import CpuOps, multiplies_bfloat16

def rss() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

torch.set_num_threads(1)
ops = CpuOps(bfloat16_products=multiplies_bfloat16())
with torch.inference_mode():
    weight = ops.bind(torch.ones((64, 64), dtype=torch.bfloat16))
    found = []
    for tokens in range(1, 2 * int(sys.argv[1]) + 1):
        weight.linear(torch.ones((tokens, 64), dtype=torch.bfloat16))
        if tokens in (1, int(sys.argv[1]), 2 * int(sys.argv[1])):
            found.append(rss())
print(*found)
"""

PRODUCTS_EACH = CACHED_PRIMITIVES + 32  # more than are kept


def run(script: str, argument: str, environment: dict[str, str]) -> list[float]:
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", script, argument]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True, timeout=120)
    return [float(number) for number in done.stdout.split()]


def test_the_users_own_choices_stay() -> None:
    assert cpu_environment({})["GOMP_SPINCOUNT"] == str(SPIN_COUNT)
    assert cpu_environment({}).keys() == {"GOMP_SPINCOUNT", *MALLOC, *PRIMITIVE_CACHES}
    assert "GOMP_SPINCOUNT" not in cpu_environment({"OMP_WAIT_POLICY": "active"})
    chosen = dict.fromkeys(cpu_environment({}), "7")
    assert cpu_environment(chosen) == {}


def test_idle_openmp_threads_of_a_worker_sleep_and_do_not_spin() -> None:
    (spinning,) = run(IDLE, "nothing", {"GOMP_SPINCOUNT": "300000"})  # libgomp's own default
    (sleeping,) = run(IDLE, "nothing", cpu_environment({}))
    assert spinning > 60  # milliseconds of 400: proves that the trial can see spinning
    assert sleeping < spinning / 2


def test_compiled_products_are_bounded() -> None:
    """Each number of tokens is another product. Twice as many as fill the cache take hardly more memory."""
    _, half, whole = run(PRODUCTS, str(PRODUCTS_EACH), cpu_environment({}))
    assert whole - half < PRODUCTS_EACH / 8  # each product takes some 0.5 MB


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU has no products of bfloat16: oneDNN's are not used")
def test_products_are_not_bounded_without_it() -> None:
    """The test above would notice, on a CPU that multiplies bfloat16."""
    _, half, whole = run(PRODUCTS, str(PRODUCTS_EACH), {})
    assert whole - half > PRODUCTS_EACH / 4
