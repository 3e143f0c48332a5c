"""Tries every causal model of the installed transformers on --model-impl transformers: exact, or refused and why.

Each is made tiny with random weights in float32; three prompts, of which two begin alike, are answered greedily in one
batch with pages of 4 tokens and chunks of 8, and every token must be the best of transformers' own forward over the
whole sequence (eager attention), or as good to 1e-4. Prints a table in Markdown.

    PYTHONPATH=python python tools/try_architectures.py [--only MODEL_TYPE,...] [--tp 2]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import queue
import sys
import tempfile
from collections import Counter
from typing import Any

from minisgl.error_text import in_one_line

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "rotary_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 256,
    "sliding_window": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Values that families set though their configs begin with None.
_SET_THOUGH_NONE = ("deepseek_v2", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "nemotron")
_UNSET = ("head_dim", "num_key_value_heads", "num_experts", "n_routed_experts", "num_experts_per_tok")
_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
# Values that a family asks for besides.
_MORE: dict[str, dict[str, Any]] = {
    "dots1": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    # One key-value head for each query head, as where they are made of a latent; head_dim is what is rotated.
    **{name: {"num_key_value_heads": 4, "head_dim": 8} for name in _LATENT},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["full_attention", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}
_LISTS = ("layer_types", "mlp_layer_types", "attention_types", "no_rope_layers")
_PROMPTS = [[3, 5, 7, 9, 11] * 4, [2, 4, 6], [3, 5, 7, 9, 11] * 4 + [8, 4]]
_TOKENS = 12
_SETTINGS: dict[str, Any] = {
    "model_impl": "transformers",
    "tokenizer": "demo",
    "page_size": 4,
    "max_extend_tokens": 8,
}
_PATIENCE = 90  # seconds for a family


def tiny_config(model_type: str) -> Any:
    """Return a config of the family with few small layers."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    for part in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
        for name, value in _SIZES.items():
            _set(part, name, value, also_unset=name in _UNSET and model_type in _SET_THOUGH_NONE)
        for name in _LISTS:
            kinds = getattr(part, name, None)
            if isinstance(kinds, list) and len(kinds) > 2:
                setattr(part, name, [kinds[0], kinds[-1]])
        for name, value in _MORE.get(model_type, {}).items():
            setattr(part, name, value)
    return config


def _set(part: Any, name: str, value: Any, *, also_unset: bool) -> None:
    """Set a key that a config has, unless it has a value for each layer or follows from others."""
    with contextlib.suppress(AttributeError):
        if hasattr(part, name) and (getattr(part, name) is not None or also_unset):
            setattr(part, name, value)


def try_one(model_type: str, tp_size: int) -> str:
    """Return what became of a family on so many ranks."""
    import torch
    from transformers import AutoModelForCausalLM

    from minisgl import LLM, SamplingParams
    from minisgl.config import ConfigError

    torch.manual_seed(0)
    try:
        config = tiny_config(model_type)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    except Exception as error:  # from transformers, for a config made by this script
        return f"not tried: no tiny model: {type(error).__name__}: {in_one_line(error)[:120]}"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            with LLM(folder, "float32", tp_size=tp_size, **_SETTINGS) as llm:
                params = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
                answers = [answer["token_ids"] for answer in llm.generate(_PROMPTS, params)]
        except ConfigError as error:
            return f"refused: {str(error).split('modules: ')[-1].split('; known are')[0]}"
    worst = 0.0
    for prompt, answer in zip(_PROMPTS, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])
        worst = max(worst, float((logits.max(1, keepdim=True).values - chosen).max()))
    return "exact" if worst < 1e-4 else f"WRONG by {worst:.2g}"


def _try_apart(model_type: str, tp_size: int, results: Any) -> None:
    try:
        results.put(try_one(model_type, tp_size))
    except BaseException as error:  # told, and then the process ends as it would have
        results.put(f"failed: {type(error).__name__}: {in_one_line(error)[:200]}")
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TYPES", help="model types, with commas (default: all)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    import minisgl.llm.llm  # noqa: F401 (so that the children need not)

    mapping = AutoModelForCausalLM._model_mapping
    types = args.only.split(",") if args.only else sorted({config.model_type for config in mapping})
    counts: Counter[str] = Counter()
    print("| model type | result |\n|---|---|")
    context = multiprocessing.get_context("fork")
    for model_type in types:
        results = context.Queue()
        child = context.Process(target=_try_apart, args=(model_type, args.tp, results))
        child.start()
        try:
            result = results.get(timeout=_PATIENCE)
        except queue.Empty:
            result = f"failed: no answer in {_PATIENCE} s"
        child.kill()
        child.join()
        counts[result.split(":")[0].split(" by")[0]] += 1
        print(f"| {model_type} | {result} |", flush=True)
    print("\n" + ", ".join(f"{count} {what}" for what, count in counts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
