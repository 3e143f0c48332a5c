"""Architecture name -> the function that reads its config.json. No torch.

A family is one file in this folder, and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from minisgl.models import gemma3, llama
from minisgl.models.config.config_reader import ConfigReader
from minisgl.models.config.model_config import ModelConfig

FAMILIES: Mapping[str, Callable[[str, ConfigReader], ModelConfig]] = {
    **dict.fromkeys(llama.VARIANTS, llama.read_llama),
    **dict.fromkeys(gemma3.ARCHITECTURES, gemma3.read_gemma3),
}
