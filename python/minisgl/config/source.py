"""The model's source, and the sampling defaults that its folder declares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from minisgl.config.settings import ConfigError, Setting, Settings

DEMO_MODEL = "demo"  # name of the built-in model for --model and for clients

ModelSource = Literal["huggingface", "modelscope"]


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Values of generation_config.json for fields that a request leaves out; None: not set there."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None  # limit on every answer, even if its request wants more tokens

    @property
    def fields(self) -> dict[str, Any]:
        """Defaults that are set, by the names of a request's fields, without `max_new_tokens`."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        found.pop("max_new_tokens", None)
        return found


class SourceConfig(Settings, frozen=True, kw_only=True):
    """Source of the model: its name, hub, revision, tokenizer and chat template."""

    model: Annotated[
        str,
        Setting(
            "folder or hub id of the model; demo: the built-in one", flags=("--model", "--model-path"), metavar="MODEL"
        ),
    ] = DEMO_MODEL
    model_source: Annotated[
        ModelSource, Setting("hub of models and tokenizers; modelscope needs the extra of that name")
    ] = "huggingface"
    revision: Annotated[
        str | None, Setting("branch, tag or commit of the model on its hub; none: the newest", metavar="NAME")
    ] = None
    tokenizer: Annotated[
        str | None,
        Setting(
            "folder or hub id of the tokenizer and its chat template; none: the model's",
            aliases=("--tokenizer-path",),
            metavar="MODEL",
        ),
    ] = None
    chat_template: Annotated[
        str | None, Setting("Jinja file of the chat template; none: the tokenizer's", metavar="FILE")
    ] = None

    generation_config: Annotated[
        str,
        Setting(
            "defaults of sampling parameters; auto: those of the model's generation_config.json; vllm: none; or a "
            "folder with such a file",
            metavar="FOLDER",
        ),
    ] = "auto"

    def validate(self) -> None:
        super().validate()
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ConfigError(f"--chat-template {self.chat_template}: there is no such file")
