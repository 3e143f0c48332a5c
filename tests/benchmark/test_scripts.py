"""Each script from end to end on something tiny. What they measure is not looked at, only that they do."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from measuring.shapes import SHAPES, make_shape, read_vocab_size

SCRIPTS = Path(__file__).parents[2] / "benchmark"
NEED_GPUS = ["all_reduce", "attention", "kernel_times", "long_steps", "timeline"]
WITH_JSON = {
    "offline",
    "latency",
    "serve",
    "goodput",
    "pipeline",
    "structured",
    "interference",
    "timeline",
    "simulate",
}
SERVER = ["--", sys.executable, "-m", "minisgl", "--port", "0", "--num-pages", "400"]


def run(tmp_path: Path, script: str, *arguments: str, returncode: int = 0) -> tuple[str, Any]:
    """A script's stdout, and the results in its JSON file."""
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "result.json"
    at = arguments.index("--") if "--" in arguments else len(arguments)
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *arguments[:at], "--json", str(file), *arguments[at:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == returncode, done.stderr
    document = json.loads(file.read_text())
    assert document["tool"] == script
    assert document["environment"]["cores"] >= 1
    return done.stdout, document["results"]


def test_offline(tmp_path: Path):
    """An engine that fails, as one does that is not installed, costs only its own figures."""
    work = ("--requests", "3", "--longest", "12", "--runs", "2", "--num-pages", "400")
    engines = ("--engine", "sglang,minisgl,transformers", "--static-batch", "2,3")
    stdout, results = run(tmp_path, "offline", *work, *engines, "--dtype", "float32", returncode=1)
    assert "tok/s" in stdout
    assert list(results) == ["minisgl", "transformers"]
    for result in results.values():
        assert len(result["offline_tokens_per_second"]) == 2
        assert result["environment"]["torch"]
    assert "static batches of" in results["transformers"]["tuned"]


PEER = """
class SamplingParams:
    def __init__(self, *, temperature, ignore_eos, max_tokens, detokenize):
        assert ignore_eos and not detokenize
        self.max_tokens = max_tokens


class _Answer:
    def __init__(self, count):
        self.outputs, self.token_ids = [self], [0] * count


class LLM:
    def __init__(self, **options):
        assert (options["tensor_parallel_size"], options["max_num_seqs"], options["mode"]) == (2, 9, "eager")

    def generate(self, prompts, params, use_tqdm):
        assert all(prompt["prompt_token_ids"] for prompt in prompts)
        return [_Answer(one.max_tokens) for one in params]
"""


def test_a_peer_is_found_where_its_path_says(tmp_path: Path):
    """vLLM is not installed where this runs: something with the part of its interface that is used stands for it."""
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text(PEER)
    work = ("--requests", "3", "--longest", "12", "--runs", "1", "--tp", "2")
    where = ("--engine", "vllm", "--engine-path", f"vllm={tmp_path / 'site'}")
    own = ("--engine-option", "vllm:max_num_seqs=9", "--engine-option", "vllm:mode=eager")
    stdout, results = run(tmp_path, "offline", *work, *where, *own)
    assert "vllm" in stdout
    assert results["vllm"]["environment"]["vllm"] == "unknown"


def test_latency(tmp_path: Path):
    sizes = ("--batch-sizes", "1,2", "--prompt", "8", "--new", "4", "--prefill", "16", "--repeats", "1")
    stdout, results = run(tmp_path, "latency", *sizes, "--num-pages", "400")
    assert "ms/token" in stdout
    figures = results["minisgl"]["latency"]
    assert list(figures["decode"]) == ["1", "2"]
    assert figures["prefill_tokens_per_second"]["16"] > 0


def test_no_more_sequences_at_once_than_the_engine_takes():
    command = [sys.executable, str(SCRIPTS / "latency.py"), "--batch-sizes", "1,9", "--max-running", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "9 sequences at once are more than the 8 of --max-running"


def test_serve(tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
    rows = [row, row | {"timestamp": 3000, "hash_ids": [1, 3]}, row | {"timestamp": 3000, "input_length": 9000}]
    trace.write_text("".join(json.dumps(one) + "\n" for one in rows))
    work = ("--trace", str(trace), "--speed", "2", "--processes", "2")
    stdout, results = run(tmp_path, "serve", *work, *SERVER, "--max-seq-len-override", "1024")
    assert "1 of 3 requests were cut to the context of 1024 tokens" in stdout
    assert results["cut_requests"] == {"2x": 1}
    figures = results["loads"]["2x"]
    assert (figures["requests"], figures["errors"]) == (3, 0)
    assert figures["hit_rate"] > 0.2


def test_serve_at_several_rates(tmp_path: Path):
    work = ("--rate", "20,40", "--requests", "4", "--input", "20", "--output", "4", "--fixed")
    _, results = run(tmp_path, "serve", *work, *SERVER)
    for figures in results["loads"].values():
        assert (figures["requests"], figures["errors"], figures["ttft_ms"]["count"]) == (4, 0, 4)


def test_serve_with_so_many_requests_at_a_time(tmp_path: Path):
    work = ("--concurrency", "2", "--requests", "6", "--input", "20", "--output", "40", "--fixed")
    _, results = run(tmp_path, "serve", *work, *SERVER)
    figures = results["loads"]["2 at a time"]
    assert (figures["requests"], figures["errors"]) == (4, 0)
    assert figures["output_tokens_per_second"] > 0


def test_serve_for_a_time(tmp_path: Path):
    """A load ends long before its 200 requests; the next one begins when the server is done with what it left."""
    work = ("--concurrency", "2,3", "--seconds", "0.5", "--requests", "200", "--input", "20", "--output", "90")
    _, results = run(tmp_path, "serve", *work, *SERVER)
    for figures in results["loads"].values():
        assert figures["errors"] == 0
        assert 0 < figures["requests"] < 200
        assert figures["seconds"] > 0
        assert figures["tpot_ms"]["count"] > 0
        assert figures["output_tokens_per_second"] > 0


def test_goodput(tmp_path: Path):
    """Two probes of sessions on a real server; another one that does not start costs only its own rows."""
    file = tmp_path / "result.json"
    sizes = ("--workload", "conversation:requests=8:range=4,64", "--scale", "0.02", "--think", "0.01", "--warm-up", "2")
    search = ("--precision", "1", "--late", "60000", "--slo-ttft", "60000", "--slo-tpot", "60000")
    pages = ("--page-size", "4", "--num-pages", "2000")
    servers = (
        "--server",
        f"demo={shlex.join([*SERVER[1:], *pages])}",
        "--server",
        f"broken={sys.executable} -c exit(3)",
    )
    command = [sys.executable, str(SCRIPTS / "goodput.py"), *sizes, *search, *servers, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1, done.stderr
    assert "conversation: 2 probes of 8 requests" in done.stdout
    assert "broken: the server ended with 3" in done.stderr
    demo, broken = json.loads(file.read_text())["results"]
    assert (demo["found"], demo["failure"]) == ("at least 32.00", None)
    assert [probe["rate"] for probe in demo["probes"]] == pytest.approx([16, 32])
    for probe in demo["probes"]:
        figures = probe["summary"]
        assert (figures["requests"], figures["errors"], figures["good_share"]) == (8, 0, 1)
        assert figures["hit_rate"] > 0.2  # the cache holds earlier turns
        assert probe["generator_cpu"] > 0
    assert (broken["found"], broken["probes"]) == ("failed", [])
    stdout, merged = run(tmp_path / "again", "goodput", "--merge", str(file), "--merge", str(file), returncode=1)
    assert merged == [demo, broken, demo, broken]
    assert stdout.count("at least 32.00") == 2


def test_structured(tmp_path: Path):
    work = ("--batch-sizes", "2", "--prompt", "4", "--new", "6", "--runs", "1", "--num-pages", "100")
    stdout, results = run(tmp_path, "structured", *work, "--dtype", "float32")
    assert "schema tok/s" in stdout
    assert {kind: len(rates) for kind, rates in results["batch_sizes"]["2"].items()} == {"free": 1, "json_schema": 1}


def test_serve_says_why_it_cannot(tmp_path: Path):
    command = [sys.executable, str(SCRIPTS / "serve.py"), "--", sys.executable, "-c", "print('out of luck'); exit(3)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the server ended with 3" in done.stderr
    assert "out of luck" in done.stderr


def test_pipeline(tmp_path: Path):
    work = ("--clients", "4", "--prompt", "8", "--output", "60", "--step-ms", "5", "--profile")
    stdout, (figures,) = run(tmp_path, "pipeline", *work)
    assert "CPU us/token" in stdout
    assert set(figures["processes"]) == {"scheduler", "tokenizer", "detokenizer", "api", "load generator"}
    assert set(figures["profiles"]) == {"scheduler", "tokenizer", "detokenizer", "api"}
    assert figures["tokens_per_event"] >= 1


def test_simulate(tmp_path: Path):
    stdout, results = run(tmp_path, "simulate", "--requests", "12", "--policies", "prefill-first,mixed:0:512,mixed")
    assert "tbt p99 ms" in stdout
    assert {tuple(found) for found in results.values()} == {("prefill-first", "mixed:0:512", "mixed")}


@pytest.mark.parametrize("script", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_help(script: str):
    done = subprocess.run([sys.executable, str(SCRIPTS / f"{script}.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert "--json" in done.stdout or script not in WITH_JSON


@pytest.mark.parametrize("script", NEED_GPUS)
def test_a_script_for_gpus_says_that_there_is_none(script: str):
    command = [sys.executable, str(SCRIPTS / f"{script}.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    assert re.fullmatch(r"this measures (a GPU|\d GPUs), and torch finds none\n", done.stderr)


@pytest.mark.parametrize(
    "name",
    [
        "0.6b",
        "30b-a3b-fp8",
        "llama-8b",
        "gemma-3-12b",
        "gpt-oss-20b-mxfp4",
        "deepseek-v2-lite",
        "smollm2-135m",
        "qwen3.5-9b",
    ],
)
def test_shapes_are_models_with_their_sizes(name: str, tmp_path: Path):
    from minisgl.models.load_config import load_model_config

    folder = make_shape(name, tmp_path)
    config = load_model_config(folder)
    assert (config.num_layers, config.hidden_size) == (SHAPES[name].layers, SHAPES[name].hidden)
    assert read_vocab_size(folder) == config.vocab_size


def test_a_shapes_tokenizer_has_a_token_a_byte(tmp_path: Path):
    from minisgl.tokenizer.text import TextTokenizer

    ids = TextTokenizer.from_folder(make_shape("smollm2-135m", tmp_path)).encode("héllo")
    assert len(ids) == len("héllo".encode())
