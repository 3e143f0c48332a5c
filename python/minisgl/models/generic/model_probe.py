"""A run of a model of transformers without weights: what the engine must know of it, or why it cannot serve it."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.error_text import in_one_line
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.models.generic.attention_interface import PAGED, PROBED, Probe, give_queries, register, set_attention
from minisgl.models.generic.linears import LinearInputs
from minisgl.models.generic.rotation import RotationProbe

_PROBED = 4  # tokens
_NOT_EXCHANGEABLE = "its attention is not exchangeable in transformers"


def hf_config(content: str) -> Any:
    """Return transformers' config of a config.json. UnsupportedModel if transformers does not know its model_type."""
    from transformers import CONFIG_MAPPING

    raw = json.loads(content)
    kind = raw.get("model_type")
    if kind == "mistral" and "layer_types" in raw:
        kind = "ministral"  # as transformers loads it
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModel(f"transformers does not know the model_type {kind!r} either")
    return CONFIG_MAPPING[kind].from_dict(raw)


def make_empty(content: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return transformers' model of a config.json on the meta device, where experts' products want bfloat16."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    register()
    config = hf_config(content)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"transformers has no causal language model of the model_type {config.model_type!r}")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PROBED)
    except KeyError as error:
        if error.args != (PROBED,):
            raise
        raise UnsupportedModel(_NOT_EXCHANGEABLE) from error  # classes of attention by names that transformers has
    return model.eval()


def probe(model: Any) -> tuple[Probe, tuple[tuple[str, ...], ...]]:
    """Return what each attention of a model on the meta device asks for, and which linear layers read one input.

    UnsupportedModel if the attention cannot be paged.
    """
    if not model._supports_attention_backend:
        raise UnsupportedModel(_NOT_EXCHANGEABLE)
    names = {module: name for name, module in model.named_modules()}
    rotations, inputs = RotationProbe(names), LinearInputs(names)
    rotations.watch(model)
    inputs.watch(model)
    found = Probe(names, rotations)
    for module in model.modules():
        set_attention(module, found)
    try:
        with torch.inference_mode():
            _run_without_weights(model)
            merged = inputs.shared()
            model.set_attn_implementation(PAGED)  # its modules get no masks then
            for module in model.modules():
                set_attention(module, give_queries)
            _run_without_weights(model)
    except UnsupportedModel:
        raise
    except Exception as error:  # from any module of transformers
        raise UnsupportedModel(
            f"its modules cannot be probed without weights: {type(error).__name__}: {in_one_line(error)}"
        ) from error
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(found.names) != layers:
        raise UnsupportedModel(f"{len(found.names)} of its {layers} layers attend by transformers' registry")
    return found, merged


def _run_without_weights(model: Any) -> None:
    """Run the decoder, then the head on its states."""
    ids = torch.zeros(1, _PROBED, dtype=torch.int64, device="meta")
    positions = torch.arange(_PROBED, device="meta").unsqueeze(0)
    name = decoder_name(model)
    decoder = model.get_submodule(name)
    # A mask of no padding, without which transformers looks at the positions for sequences in one row.
    out = decoder(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False)
    given = GivenStates()
    model.set_submodule(name, given)
    try:
        given.logits(model, out[0][0])
    finally:
        model.set_submodule(name, decoder)


def decoder_name(model: Any) -> str:
    """Return the name of the part of a causal model below its head."""
    decoder = model.get_decoder()
    name = next((name for name, module in model.named_modules() if module is decoder), "")
    if not name:
        raise UnsupportedModel("transformers has no decoder apart from its head")
    return name


class StatesAlone:
    """Output of a decoder with nothing but states: all other attributes are None."""

    def __init__(self, states: Tensor | None) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


class GivenStates(nn.Module):
    """Takes the decoder's place below a head, and returns states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self._states: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> StatesAlone:
        return StatesAlone(self._states)

    def logits(self, head: nn.Module, states: Tensor) -> Tensor:
        """Return the logits [S, vocab_size] that `head`, which has this as its decoder, makes of states [S, hidden]."""
        self._states = states.unsqueeze(0)
        try:
            # Embeddings, because what stands around the decoder of a model of more than text asks for its input.
            logits: Tensor = head(inputs_embeds=self._states, use_cache=False).logits[0]
        finally:
            self._states = None
        return logits
