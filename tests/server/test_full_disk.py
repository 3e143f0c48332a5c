"""A full disk loses no answer: a response that cannot be stored is returned, and says that it is not stored."""

from __future__ import annotations

import resource
from pathlib import Path

import openai
import pytest

from support.server import Server, worker_pids


def test_a_full_disk_is_told_and_overcome(tmp_path: Path) -> None:
    """The limit of file sizes stands for the disk's end: the kernel refuses each write of the API process."""
    with Server("--model", "demo", "--response-store", str(tmp_path / "responses.db")) as server:
        responses = server.client.responses
        pid = worker_pids(server.process.pid)["minisgl.server.api.api_process"]
        before = responses.create(model="demo", input="before", max_output_tokens=2)
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

        lost = [responses.create(model="demo", input="while full", max_output_tokens=2).to_dict() for _ in range(2)]
        assert [response["store"] for response in lost] == [False, False]
        for call in (responses.retrieve, responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(str(lost[0]["id"]))
        assert responses.retrieve(before.id) == before
        with pytest.raises(openai.APIStatusError, match="cannot be accessed at the moment") as failed:
            responses.delete(before.id)
        assert failed.value.status_code == 503

        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
        after = responses.create(model="demo", input="after", max_output_tokens=2)
        assert responses.retrieve(after.id) == after
        responses.delete(before.id)
        server.end()
        lines = [line for line in server.log if "--response-store" in line]
        assert len(lines) == 2, server.log
        assert f"{tmp_path}/responses.db cannot be used, so responses are not stored: " in lines[0]
        assert "can be used again" in lines[1]
