"""litellm's proxy in front of the server: OpenAI's and Anthropic's SDKs through it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import anthropic
import openai

MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
MASTER_KEY = "sk-of-the-proxy"
CONFIG = """
model_list:
  - model_name: demo
    litellm_params: {model: openai/demo, api_base: %s/v1, api_key: a-key}
"""


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).read()
        except OSError:
            assert process.poll() is None, "the proxy ended"
            assert time.monotonic() < deadline, "the proxy does not answer"
            time.sleep(0.5)
        else:
            return


def main() -> None:
    Path("config.yaml").write_text(CONFIG % os.environ["MINISGL_URL"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = ["litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": MASTER_KEY}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | settings)
    try:
        wait_for(f"{url}/health/liveliness", process)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=MASTER_KEY)
        chat = {"model": "demo", "messages": MESSAGES, "temperature": 0}
        text = client.chat.completions.create(**chat).choices[0].message.content
        assert "42" in text
        chunks = client.chat.completions.create(**chat, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert client.responses.create(model="demo", input="What is 12 + 30?", temperature=0).output_text == text
        claude = anthropic.Anthropic(base_url=url, api_key=MASTER_KEY)
        message = claude.messages.create(model="demo", max_tokens=64, messages=MESSAGES)
        assert "42" in message.content[0].text
    finally:
        process.terminate()
        process.wait()
    print("chat, stream, responses and Anthropic's messages through the proxy")


main()
