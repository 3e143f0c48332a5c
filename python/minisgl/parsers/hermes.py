"""Tool calls as in Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from minisgl.parsers.tool_calls import ToolCallParser


class HermesParser(ToolCallParser):
    """Further calls come in tags of their own, with text between them or none."""

    markers = ("<tool_call>",)
    kept = ("<tool_call>", "</tool_call>")

    def _begin(self) -> None:
        self._begin_json(self._closing)

    def _closing(self) -> bool:
        return self._expect("</tool_call>", self._content)
