"""Tensor-parallel layers. Each is built for one rank of a TP group and says which parts of a checkpoint it keeps."""
