"""Pooling models: what one makes of prompts, and the arithmetic on its vectors. Pure, for every process."""
