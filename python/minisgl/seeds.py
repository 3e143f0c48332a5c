"""Seeds of choices: one request's seed gives each of its n choices a seed of its own.

The seed of choice i is output i of SplitMix64 (Steele, Lea and Flood, 2014) started at the request's seed, without
the sign bit, so that it fits a signed 64-bit integer on any device. It depends on nothing else: a seeded request
gets the same random numbers in any batch. Choices are counted within their prompt, so a prompt in a list gets what it
gets alone.
"""

from __future__ import annotations

import secrets

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one choice: 63 bits, from a seed of 64 bits of either sign."""
    z = (seed + (choice + 1) * _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def random_seed() -> int:
    """Return a seed for a request that names none."""
    return secrets.randbits(63)
