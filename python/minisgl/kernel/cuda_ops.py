"""Fused operations on the CUDA kernels of csrc/. Cases that no kernel supports (odd sizes, no rows) run in torch."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.base import (
    Activation,
    DecodeInputs,
    DeltaHeads,
    GateActivation,
    Heads,
    KernelNeeds,
    LatentRows,
    Mixture,
    Norm,
    Routing,
    Weight,
)
from minisgl.kernel.cuda_latent import CudaLatent
from minisgl.kernel.delta_net.cuda_chunks import CudaDeltaChunks
from minisgl.kernel.delta_net.cuda_step import CudaDeltaStep
from minisgl.kernel.delta_net.recurrent_rows import ChunkedRows, SingleRows
from minisgl.kernel.experts.cuda_moe import CudaMoe
from minisgl.kernel.experts.cuda_routing import CudaRouting
from minisgl.kernel.gemm.cuda_weights import Fp8BlockWeight, Fp8Weight, QuantizedWeight
from minisgl.kernel.gemm.fp8_gemm import Fp8Gemm, fp8_matrix
from minisgl.kernel.gemm.quantized_gemm import QuantizedGemm
from minisgl.kernel.gemm.skinny_gemm import SkinnyGemm
from minisgl.kernel.gemm.small_batch_gemm import SmallBatchGemm
from minisgl.kernel.launch.compile import Compiler
from minisgl.kernel.launch.signature import MAX_EARLY_ROWS, SCALAR_NAMES, VECTOR_BYTES, KernelSpec, Macros
from minisgl.kernel.torch_ops import DenseWeight, TorchOps, latent_query, latent_values
from minisgl.quantization.gpu_layout import pack_levels
from minisgl.quantization.levels import LevelFormat, Levels
from minisgl.quantization.rounding import Int4Grid

_WARPS = 4  # per block whose warps work independently
_ACTIVATION_THREADS = 128
_MAX_THREADS = 1024  # of a block
_MAX_NEXT_NORMS = 3  # as in norm.cu


class CudaOps:
    """Implements kernel.base.Ops. Kernels are compiled at the first use of a dtype and head size."""

    def __init__(self, device: torch.device) -> None:
        self._compiler = Compiler(device)
        self._torch = TorchOps()
        self._skinny = SkinnyGemm(self._compiler)
        self._small_batch = SmallBatchGemm(self._compiler)
        self._quantized = QuantizedGemm(self._compiler)
        self._fp8 = Fp8Gemm(self._compiler, device)
        self._routing = CudaRouting(self._compiler)
        self._moe = CudaMoe(self._compiler, self._routing)
        self._delta_step = CudaDeltaStep(self._compiler)
        self._delta_chunks = CudaDeltaChunks(self._compiler)
        self._latent = CudaLatent(self._compiler)

    def begin_compiling(self, needs: KernelNeeds) -> None:
        dtype, norm_dtype, begin = needs.dtype, needs.norm_dtype, self._compiler.begin
        begin([_decode_inputs(), _embed(dtype), _rms_norm(dtype, norm_dtype)])
        begin(_norm_rope_store(dtype, needs.kv_dtype, norm_dtype, each) for each in needs.head_dims)
        begin(_activate_and_mul(dtype, product.gate) for product in needs.products if product.gate is not None)
        for dims in needs.latents:
            self._latent.begin_compiling(dtype, needs.kv_dtype, norm_dtype, dims)
        self._skinny.begin_compiling(dtype, needs.products, norms_late=_norms_late(dtype, norm_dtype))
        self._small_batch.begin_compiling(dtype, needs.products)
        self._delta_step.begin_compiling(dtype, needs.delta_taps)
        self._delta_chunks.begin_compiling(dtype, needs.delta_taps)
        for experts in needs.experts:
            self._moe.begin_compiling(dtype, experts)

    def bind(self, weight: Tensor, grid: Int4Grid | None = None) -> Weight:  # noqa: ARG002 (a grid is for CPUs; `bind_levels` gets int4)
        return DenseWeight(self, weight)

    def keeps(self, form: LevelFormat, width: int, size: int, dtype: torch.dtype) -> bool:
        return self._quantized.supports(form, width, size, dtype)  # which includes all that self._fp8 supports

    def keeps_experts(self, form: LevelFormat, width: int, size: int, dtype: torch.dtype) -> bool:
        return self._moe.keeps(form, width, size, dtype)

    def bind_levels(self, levels: Levels, dtype: torch.dtype, *, gated: bool) -> Weight:
        if self._fp8.supports(levels.format, *levels.shape, dtype):
            matrix = fp8_matrix(levels, gated=gated)
            if matrix is not None:
                self._fp8.begin_compiling(matrix, dtype)
                kind = Fp8BlockWeight if matrix.group else Fp8Weight
                return kind(self._fp8, matrix, dtype, self.activate_and_mul)
        packed = pack_levels(levels, dtype, gated=gated)
        self._quantized.begin_compiling(packed, dtype)
        order = levels.format.order
        columns = None if order is None else torch.tensor(order, device=packed.words.device)
        return QuantizedWeight(self, self._quantized, packed, dtype, columns)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        size = x.shape[-1]
        if not _vectorizes(x, size) or not len(x):
            return self._torch.rms_norm(x, norm)
        out = torch.empty_like(x)
        rows = x.numel() // size
        kernel = self._compiler.kernel(_rms_norm, x.dtype, norm.weight.dtype)
        kernel(
            (rows,),
            _row_threads(x, size),
            x=x,
            weight=norm.weight,
            out=out,
            H=size,
            eps=norm.eps,
            early=rows <= MAX_EARLY_ROWS,
        )
        return out

    def norm_add(
        self, x: Tensor, norm: Norm, residual: Tensor, *next_norms: Norm, factor: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        rows, size = x.shape
        in_registers = size * x.itemsize <= _MAX_THREADS * VECTOR_BYTES
        kinds = {(each.weight.dtype, each.eps) for each in next_norms} | {(norm.weight.dtype, norm.eps)}
        alike = len(kinds) == 1 and len(next_norms) <= _MAX_NEXT_NORMS
        if not _vectorizes(x, size) or not residual.is_contiguous() or not rows or not in_registers or not alike:
            return self._torch.norm_add(x, norm, residual, *next_norms, factor=factor)
        normed = x.new_empty((len(next_norms), rows, size)) if next_norms else None
        weights = [each.weight for each in next_norms] + [None] * (_MAX_NEXT_NORMS - len(next_norms))
        kernel = self._compiler.kernel(_norm_add, x.dtype, norm.weight.dtype)
        kernel(
            (rows,),
            _row_threads(x, size),
            x=x,
            weight=norm.weight,
            residual=residual,
            factor=factor,
            next_weight=weights[0],
            second_weight=weights[1],
            third_weight=weights[2],
            sum=residual,
            normed=normed,
            H=size,
            eps=norm.eps,
            early=rows <= MAX_EARLY_ROWS,
        )
        return residual, *(() if normed is None else normed)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        if self._skinny.supports(x, weight):
            return self._skinny.product(x, None, weight, bias, residual)
        if self._small_batch.supports(x, weight):
            return self._small_batch.product(x, weight, bias, residual)
        if residual is not None and bias is None:
            return residual.addmm_(x, weight.t())  # in place, because cuBLAS would copy the residual first
        y = F.linear(x, weight, bias)
        return y if residual is None else y.add_(residual)

    def norm_linear(
        self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        # Nearly all products with a norm that these kernels support compute q, k and v, so attention follows.
        if self._skinny.supports(x, weight):
            x, late = self._norm_for_skinny(x, norm)
            return self._skinny.product(x, late, weight, bias, before_attention=True, out=out)
        x = self._normed(x, norm)
        if self._small_batch.supports(x, weight):
            return self._small_batch.product(x, weight, bias, before_attention=True, out=out)
        if out is not None and bias is None:
            return torch.mm(x, weight.t(), out=out)
        y = F.linear(x, weight, bias)
        return y if out is None else out.copy_(y)

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else self.rms_norm(x, norm)

    def _norm_for_skinny(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """Return x and the norm that skinny_gemm.cu is to apply; or x normed, and None."""
        if norm is not None and _norms_late(x.dtype, norm.weight.dtype):
            return x, norm
        return self._normed(x, norm), None

    def norm_gated_linear(
        self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None = None, *, activation: Activation
    ) -> Tensor:
        if self._skinny.supports(x, weight) and len(weight) % 16 == 0:
            x, late = self._norm_for_skinny(x, norm)
            return self._skinny.product(x, late, weight, bias, gate=activation)
        x = self._normed(x, norm)
        if self._small_batch.supports(x, weight) and len(weight) % 16 == 0:
            return self._small_batch.product(x, weight, bias, gate=activation)
        return self.activate_and_mul(F.linear(x, weight, bias), activation)

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(first half) * second half of each row: [T, 2 * I] -> [T, I]."""
        width = gate_up.shape[1] // 2
        return self.activate(gate_up[:, :width], gate_up[:, width:], activation)

    def activate(self, gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
        tokens, width = gate.shape
        if not tokens or not all(_rows_vectorize(one) for one in (gate, up)):
            return self._torch.activate(gate, up, activation)
        out = gate.new_empty((tokens, width))
        parts = -(-width * out.itemsize // (VECTOR_BYTES * _ACTIVATION_THREADS))
        kernel = self._compiler.kernel(_activate_and_mul, gate.dtype, activation)
        kernel(
            (tokens * parts,),
            _ACTIVATION_THREADS,
            gate=gate,
            up=up,
            gate_stride=gate.stride(0),
            up_stride=up.stride(0),
            out=out,
            I=width,
            parts=parts,
            early=tokens <= MAX_EARLY_ROWS,
        )
        return out

    def norm_rope_store(
        self, qkv: Tensor, heads: Heads, positions: Tensor, out_cache_loc: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        tokens, head_dim = len(qkv), k_cache.shape[-1]
        dims = (64, 128, 256, 512) if qkv.itemsize == 2 else (64, 128, 256)
        if head_dim not in dims or not qkv.is_contiguous():
            return self._torch.norm_rope_store(qkv, heads, positions, out_cache_loc, k_cache, v_cache)
        q = qkv.new_empty((tokens, heads.num_heads, head_dim))
        heads_of_warp = 64 * VECTOR_BYTES // (head_dim * qkv.itemsize)
        units = tokens * -(-(heads.num_heads + 2 * heads.num_kv_heads) // heads_of_warp)
        norm_dtype = qkv.dtype if heads.q_norm is None else heads.q_norm.weight.dtype
        kernel = self._compiler.kernel(_norm_rope_store, qkv.dtype, k_cache.dtype, norm_dtype, head_dim)
        kernel(
            (-(-units // _WARPS),),
            _WARPS * 32,
            qkv=qkv,
            positions=positions,
            cos_sin=heads.cos_sin,
            out_cache_loc=out_cache_loc,
            q_out=q,
            k_cache=k_cache,
            v_cache=v_cache,
            q_norm=None if heads.q_norm is None else heads.q_norm.weight,
            k_norm=None if heads.k_norm is None else heads.k_norm.weight,
            tokens=tokens,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            eps=0.0 if heads.q_norm is None else heads.q_norm.eps,
            v_eps=-1.0 if heads.v_eps is None else heads.v_eps,
            early=tokens <= MAX_EARLY_ROWS,
        )
        return q

    def norm_rope_store_latent(self, rows: LatentRows, q_rope: Tensor, rotated: Tensor) -> None:
        self._latent.store(rows, q_rope, rotated)

    def latent_query(self, rows: LatentRows, q_nope: Tensor, q_rope: Tensor, keys: Tensor) -> Tensor:
        if self._latent.makes_query(q_nope, len(rows.norm.weight)):
            return self._latent.query(rows, q_nope, q_rope, keys)
        return latent_query(self, rows, q_nope, q_rope, keys)

    def latent_values(self, latents: Tensor, weight: Tensor) -> Tensor:
        few = self._latent.makes_values(latents, weight)
        return self._latent.values(latents, weight) if few else latent_values(latents, weight)

    def embed(self, ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
        size = weight.shape[1]
        if not _vectorizes(weight, size) or not len(ids):
            return self._torch.embed(ids, weight, first)
        out = weight.new_empty((len(ids), size))
        kernel = self._compiler.kernel(_embed, weight.dtype)
        kernel(
            (len(ids),),
            _row_threads(out, size),
            input_ids=ids,
            weight=weight,
            out=out,
            first=first or 0,
            count=len(weight),
            H=size,
        )
        return out

    def decode_inputs(
        self, slots: Tensor, tokens: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, *, pages: bool
    ) -> DecodeInputs:
        rows, width = len(slots), page_table.shape[1]
        input_ids, positions, out_cache_loc = (torch.empty_like(slots) for _ in range(3))
        kv_lens = lengths.new_empty(rows)
        table = page_table.new_empty((rows, width if pages else 0))
        kernel = self._compiler.kernel(_decode_inputs)
        kernel(
            (rows,),
            128,
            slots=slots,
            tokens=tokens,
            tokens_stride=tokens.stride(0),
            lengths=lengths,
            page_table=page_table,
            table_stride=page_table.stride(0),
            page_size=page_size,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=out_cache_loc,
            kv_lens=kv_lens,
            pages=table if pages else None,
            width=width,
        )
        return DecodeInputs(input_ids, positions, out_cache_loc, kv_lens, table)

    def delta_step(
        self, projected: Tensor, heads: DeltaHeads, inputs: Tensor, memory: Tensor, rows: SingleRows, out: Tensor
    ) -> None:
        step = self._delta_step if self._delta_step.supports(heads, projected.dtype) else self._torch.delta_step
        step(projected, heads, inputs, memory, rows, out)

    def delta_chunks(
        self, projected: Tensor, heads: DeltaHeads, inputs: Tensor, memory: Tensor, rows: ChunkedRows, out: Tensor
    ) -> None:
        fits = self._delta_chunks.supports(heads, projected.dtype)
        chunks = self._delta_chunks if fits else self._torch.delta_chunks
        chunks(projected, heads, inputs, memory, rows, out)

    def delta_graph_safe(self, heads: DeltaHeads, dtype: torch.dtype, /) -> bool:
        return self._delta_step.supports(heads, dtype) and self._delta_chunks.supports(heads, dtype)

    def norm_router(
        self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if gate is None and norm is not None and self._routing.scores_many(x, weight):
            return self._routing.norm_router_many(x, norm, weight, bias)
        if gate is not None or (norm is not None and self._routing.scores(x, weight)):
            return self._routing.norm_router(x, norm, weight, bias, gate)
        normed = self._normed(x, norm)
        return normed, self.linear(normed.to(weight.dtype), weight, bias)

    def norm_moe(
        self,
        x: Tensor,
        norm: Norm | None,
        weight: Tensor,
        bias: Tensor | None,
        gate: Tensor | None,
        mixture: Mixture,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if gate is None and norm is not None and self._moe.chooses_with_router(x, weight, mixture):
            return self._moe.norm_mix(x, norm, weight, bias, mixture, residual)
        normed, router_logits = self.norm_router(x, norm, weight, bias, gate)
        return normed, self.moe(normed, router_logits, mixture, residual)

    def moe(self, x: Tensor, router_logits: Tensor, mixture: Mixture, residual: Tensor | None = None) -> Tensor:
        on_kernels = not isinstance(mixture.w13, Tensor) or self.moe_graph_safe(mixture)
        moe = self._moe if on_kernels else self._torch.moe
        return moe(x, router_logits, mixture, residual)

    def moe_chosen(self, x: Tensor, weights: Tensor, experts: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        mixture = Mixture(w13, w2, len(w13), Routing(experts.shape[1], renormalize=False))
        if not self.moe_graph_safe(mixture):
            return self._torch.moe_chosen(x, weights, experts, w13, w2)
        return self._moe.mix_chosen(x, weights, experts, mixture)

    def merges_shared(self, tokens: int, mixture: Mixture, /) -> bool:
        return self._moe.merges_shared(tokens, mixture)

    def moe_graph_safe(self, mixture: Mixture, /) -> bool:
        return self._moe.supports(mixture)


def _norms_late(dtype: torch.dtype, norm_dtype: torch.dtype) -> bool:
    """Return True if skinny_gemm.cu applies the RMSNorm of x [M, K] itself.

    The kernel multiplies x by the norm's weight in x's dtype, and divides the sums by the root mean square in the
    epilogue. It is not used with float16, in which the products may overflow, nor with a float32 weight, for which x's
    dtype is too coarse.
    """
    return dtype != torch.float16 and norm_dtype == dtype


def _decode_inputs() -> KernelSpec:
    return KernelSpec("inputs.cu", "decode_inputs", {"SCALAR": "f32"})  # only the file's other kernel uses SCALAR


def _embed(dtype: torch.dtype) -> KernelSpec:
    return KernelSpec("inputs.cu", "embed", {"SCALAR": SCALAR_NAMES[dtype]})


def _rms_norm(dtype: torch.dtype, norm_dtype: torch.dtype) -> KernelSpec:
    macros: Macros = {"SCALAR": SCALAR_NAMES[dtype], "NORM_SCALAR": SCALAR_NAMES[norm_dtype]}
    return KernelSpec("norm.cu", "rms_norm", macros)


def _norm_add(dtype: torch.dtype, norm_dtype: torch.dtype) -> KernelSpec:
    return replace(_rms_norm(dtype, norm_dtype), name="norm_add")  # both are kernels of one compiled module


def _activate_and_mul(dtype: torch.dtype, activation: GateActivation) -> KernelSpec:
    macros: Macros = {
        "SCALAR": SCALAR_NAMES[dtype],
        "GELU_TANH": int(activation == "gelu_tanh"),
        "SIGMOID": int(activation == "sigmoid"),
    }
    return KernelSpec("activation.cu", "activate_and_mul", macros)


def _norm_rope_store(dtype: torch.dtype, cache: torch.dtype, norm_dtype: torch.dtype, head_dim: int) -> KernelSpec:
    macros: Macros = {
        "SCALAR": SCALAR_NAMES[dtype],
        "NORM_SCALAR": SCALAR_NAMES[norm_dtype],
        "CACHE": SCALAR_NAMES[cache],
        "HEAD_DIM": head_dim,
    }
    return KernelSpec("rope.cu", "norm_rope_store", macros)


def _vectorizes(x: Tensor, size: int) -> bool:
    """Return True if rows of this size can be read 16 bytes at a time."""
    return x.is_contiguous() and size * x.itemsize % VECTOR_BYTES == 0


def _rows_vectorize(x: Tensor) -> bool:
    """Return True if each row of x [T, n] can be read 16 bytes at a time; rows need not be contiguous."""
    vector = VECTOR_BYTES // x.itemsize
    return x.stride(1) == 1 and not (x.shape[1] % vector or x.stride(0) % vector or x.storage_offset() % vector)


def _row_threads(x: Tensor, size: int) -> int:
    """Return the threads for one row: one per 16 bytes, rounded up to whole warps, at most _MAX_THREADS."""
    vectors = size * x.itemsize // VECTOR_BYTES
    return min(-(-vectors // 32) * 32, _MAX_THREADS)
