"""Pooling models: their description, and the arithmetic on their vectors. Pure, for every process."""
