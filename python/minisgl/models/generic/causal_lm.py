"""A causal model of transformers as the engine runs one. What it computes is transformers' but for attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.kernel.base import KernelNeeds, Ops
from minisgl.layers.layer_config import NO_ROPE
from minisgl.layers.rotary import Rotary
from minisgl.models.base import Model
from minisgl.models.config.model_config import ModelConfig, TransformersModules, UnsupportedModel, WeightError
from minisgl.models.generic.attention_seat import PAGED, PROBED, PagedSeat, Probe, Step, register, seat
from minisgl.models.hub import some

_PROBED = 4  # tokens


def hf_config(content: str) -> Any:
    """Return transformers' config of a config.json. UnsupportedModel if transformers does not know its model_type."""
    from transformers import CONFIG_MAPPING

    raw = json.loads(content)
    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModel(f"transformers does not know the model_type {kind!r} either")
    return CONFIG_MAPPING[kind].from_dict(raw)


def make_empty(content: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return transformers' model of a config.json on the meta device, where experts' products want bfloat16."""
    from transformers import AutoModelForCausalLM

    register()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config(content), dtype=dtype, attn_implementation=PROBED).eval()


def probe(model: Any) -> Probe:
    """Return what each attention of a model on the meta device asks for. UnsupportedModel if it cannot be paged."""
    if not model._supports_attention_backend:
        raise UnsupportedModel("its attention is not exchangeable in transformers")
    found = Probe({module: name for name, module in model.named_modules()})
    for module in model.modules():
        seat(module, found)
    ids = torch.zeros(1, _PROBED, dtype=torch.int64, device="meta")
    positions = torch.arange(_PROBED, device="meta").unsqueeze(0)
    try:
        with torch.inference_mode():
            # A mask of no padding, without which transformers looks at the positions for sequences in one row.
            model.get_submodule(_decoder_name(model))(
                input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False
            )
    except UnsupportedModel:
        raise
    except Exception as error:  # of any module of transformers
        line = " ".join(str(error).split())
        raise UnsupportedModel(
            f"its modules cannot be probed without weights: {type(error).__name__}: {line}"
        ) from error
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(found.names) != layers:
        raise UnsupportedModel(f"{len(found.names)} of its {layers} layers attend by transformers' registry")
    return found


def _decoder_name(model: Any) -> str:
    """Return the name of the part of a causal model below its head."""
    decoder = model.get_decoder()
    name = next((name for name, module in model.named_modules() if module is decoder), "")
    if not name:
        raise UnsupportedModel("transformers has no decoder apart from its head")
    return name


class StatesAlone:
    """A decoder's output of which its head reads the states; whatever else a model's head passes on is None."""

    def __init__(self, states: Tensor | None) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


class GivenStates(nn.Module):
    """Stands in the place of the decoder below a head: gives the head states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.states: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> StatesAlone:
        return StatesAlone(self.states)


class PagedDecoder(nn.Module):
    """[T] token ids -> [R, hidden_size]: the states of `ctx.logits_indices` (None: of all T tokens), normed."""

    def __init__(self, decoder: nn.Module, step: Step) -> None:
        super().__init__()
        self.decoder = decoder
        self._step = step

    def forward(self, ctx: ForwardContext) -> Tensor:
        self._step.ctx = ctx
        try:
            out = self.decoder(
                input_ids=ctx.input_ids.unsqueeze(0), position_ids=ctx.positions.unsqueeze(0), use_cache=False
            )
        finally:
            self._step.ctx = None
        states: Tensor = out[0][0]
        return states if ctx.logits_indices is None else states[ctx.logits_indices]


class GenericCausalLM(Model):
    """A decoder of transformers over the paged pool, and the rest of its causal model, which makes logits of states."""

    def __init__(self, config: ModelConfig, model: Any) -> None:
        """Take over transformers' causal model."""
        super().__init__(config, model.dtype)
        step = Step()
        head_dims = {attention.head_dim for attention in config.attentions}
        unrotated = {dim: Rotary(dim, config.max_position_embeddings, NO_ROPE).cos_sin for dim in head_dims}
        for layer, (name, attention) in enumerate(zip(_modules(config).attending, config.attentions, strict=True)):
            seat(model.get_submodule(name), PagedSeat(layer, attention, unrotated[attention.head_dim], step))
        name = _decoder_name(model)
        self.model = PagedDecoder(model.get_submodule(name), step)
        self._given = GivenStates()
        model.set_submodule(name, self._given)
        self.head = model

    def graph_safe(self, ops: Ops) -> bool:  # noqa: ARG002
        return False  # nobody knows what transformers' modules do with the host

    def prefill_graph_safe(self, ops: Ops) -> bool:
        return self.graph_safe(ops)

    def kernel_needs(self, kv_dtype: torch.dtype) -> KernelNeeds:
        head_dims = frozenset(attention.head_dim for attention in self.config.attentions)
        return KernelNeeds(self.dtype, kv_dtype, self.dtype, head_dims, products=frozenset(), experts=frozenset())

    @property
    def layer_weights(self) -> int:
        return sum(weight.numel() for weight in self.model.parameters()) // self.config.num_layers

    def logits(self, states: Tensor, ctx: ForwardContext) -> Tensor:
        self._given.states = states.unsqueeze(0)
        try:
            logits: Tensor = self.head(input_ids=None, use_cache=False).logits[0]
        finally:
            self._given.states = None
        return logits if ctx.logits is None else ctx.logits.copy_(logits)


def build_generic(config: ModelConfig, *, dtype: torch.dtype) -> GenericCausalLM:
    """Return the model on the meta device."""
    with torch.device("meta"):
        return GenericCausalLM(config, make_empty(_modules(config).config_json, dtype))


def load_generic(
    config: ModelConfig, folder: Path, *, dtype: torch.dtype, device: torch.device, dummy: bool
) -> GenericCausalLM:
    """Return the model as transformers loads it, or with random weights. WeightError if the folder's do not fit."""
    from transformers import AutoModelForCausalLM

    register()
    if dummy:
        made = hf_config(_modules(config).config_json)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation=PAGED)
    else:
        model = _read(folder, dtype)
    with torch.device(device):
        return GenericCausalLM(config, model.to(device).eval())


def _read(folder: Path, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, attn_implementation=PAGED, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise WeightError(f"transformers cannot load {folder}: {' '.join(str(error).split())}") from error
    if info["missing_keys"]:
        raise WeightError(f"the checkpoint in {folder} lacks {some(sorted(info['missing_keys']))}")
    return model


def _modules(config: ModelConfig) -> TransformersModules:
    if config.transformers is None:
        raise ValueError("the model is not one of transformers")
    return config.transformers
