"""The engine: executes plans on a device. Model, KV pool, slot state, attention, sampler and CUDA graphs meet here."""
