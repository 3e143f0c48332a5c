"""The training program: rows keep documents apart, Muon makes updates orthogonal, a run can be resumed."""

import random
from itertools import islice

import pytest
import torch

from demo_model.batches import LONGEST_DOCUMENT, documents, longest_context, pack
from demo_model.evaluate import DEMO_FOLDER
from demo_model.model import Model
from demo_model.muon import orthogonal
from demo_model.train import learning_rate_share, main


def test_rows_hold_whole_documents():
    stream = list(islice(documents(random.Random(0), lambda: 200), 30))
    batch = next(pack(iter(stream), 4 * LONGEST_DOCUMENT // 3))
    for number, (start, end) in enumerate(zip(batch.starts, batch.starts[1:], strict=False)):
        if batch.learned[start:end].any():
            assert batch.tokens[start:end].tolist() == stream[number].ids.tolist()
            assert batch.learned[start:end].tolist() == stream[number].learned.tolist()


def test_a_document_does_not_see_its_neighbours():
    model = Model.load(DEMO_FOLDER)
    first, second = torch.randint(0, 256, (40,)), torch.randint(0, 256, (30,))
    with torch.inference_mode():
        row = model(torch.cat([first, second]), torch.tensor([0, 40, 70, 70], dtype=torch.int32))
        alone = model(second, torch.tensor([0, 30], dtype=torch.int32))
    assert torch.allclose(row[40:], alone, atol=1e-3)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 24, 8), (1, 8, 24)])
def test_muon_updates_are_nearly_orthogonal(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert values.min() > 0.3
    assert values.max() < 1.4


def test_schedules_of_context_and_learning_rate():
    assert longest_context(0.0) < longest_context(0.2) < longest_context(1.0) == 2000
    assert learning_rate_share(0.0) < 0.2 < learning_rate_share(0.2) == 1.0 > learning_rate_share(0.9) > 0.0
    assert learning_rate_share(1.0) == 0.0


def test_a_run_can_be_resumed(tmp_path, capsys):
    command = ["--out", str(tmp_path), "--minutes", "60", "--layers", "1", "--tokens", "512"]
    command += ["--workers", "0", "--log-every", "1"]
    main([*command, "--steps", "2"])
    assert "step 1 " in capsys.readouterr().out
    main([*command, "--steps", "3", "--resume"])
    resumed = capsys.readouterr().out
    assert "step 3 " in resumed
    assert "step 1 " not in resumed
    assert Model.load(tmp_path).config["num_hidden_layers"] == 1
