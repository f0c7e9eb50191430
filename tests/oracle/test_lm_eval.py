"""lm-evaluation-harness: its ``hf`` model, and its client of a running server, give the results
that kvjax's model class gives."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvjax
from kvjax import models
from tests import harness
from tests.test_serve import RunningServer

REASON = "needs lm_eval (the extra `oracle`)"
TINY = Path(models.__file__).parent / "tiny"
ROLLED = 256
"""Of the model's positions, so that pages take several windows and examples are cut."""
SERVED = [task for task in harness.TASKS if task != "own_shots"]


@pytest.fixture(scope="module")
def lm_eval(torch: Any, transformers: Any) -> Any:
    return pytest.importorskip("lm_eval", reason=REASON)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_tasks(tmp_path_factory.mktemp("tasks"), 200, texts=40, pages=3)


@pytest.fixture(scope="module")
def reference(lm_eval: Any, tasks: Path, torch: Any) -> dict[str, Any]:
    """The results of ``hf``."""
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(0)
    model = HFLM(str(TINY), device="cpu", dtype="float32", batch_size=16, max_length=ROLLED)
    return harness.evaluated(model, tasks, harness.TASKS)


def kvjax_results(tasks: Path, lm: Any = None, **options: Any) -> dict[str, Any]:
    from kvjax.adapters.lm_eval import KvjaxLM

    lm = models.load(TINY, dtype="float32") if lm is None else lm
    model = KvjaxLM(lm, max_length=ROLLED, batch_size=16, **options)
    return harness.evaluated(model, tasks, harness.TASKS)


def assert_same(results: dict[str, Any], reference: dict[str, Any], tasks: list[str]) -> None:
    for task in tasks:
        mine, theirs = (harness.responses(each, task) for each in (results, reference))
        if task == "own_text":
            assert mine == theirs
        elif task == "own_rolling":
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-3)
        else:
            assert len(mine) == 4 * (200 if task == "own_choice" else 40)
            scores = [[logprob for logprob, _ in each] for each in (mine, theirs)]
            np.testing.assert_allclose(*scores, atol=1e-4)
            assert [greedy for _, greedy in mine] == [greedy for _, greedy in theirs]
        own, other = (
            {k: v for k, v in x["results"][task].items() if "," in k} for x in (results, reference)
        )
        assert own.keys() == other.keys() and len(own) >= 1
        for name, value in own.items():
            if isinstance(value, float) and not math.isnan(value):
                assert value == pytest.approx(other[name], rel=1e-5), (task, name)


@pytest.mark.parametrize("cache", ["paged", "static"])
def test_the_harness_s_own_model_gives_the_same(
    reference: dict[str, Any], tasks: Path, cache: str
) -> None:
    results = kvjax_results(tasks, cache=cache)
    assert_same(results, reference, harness.TASKS)
    assert results["results"]["own_choice"]["acc,none"] > 0.3  # the tasks are not noise
    assert len(set(harness.responses(results, "own_text"))) > 20


def test_a_mesh_gives_the_same(reference: dict[str, Any], tasks: Path) -> None:
    lm = models.load(TINY, dtype="float32", mesh=kvjax.make_mesh(data=2, tensor=2))
    assert_same(kvjax_results(tasks, lm), reference, harness.TASKS)


def test_a_server_gives_the_same(lm_eval: Any, tasks: Path) -> None:
    """The harness's ``local-completions`` against ``kvjax serve``."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    lm = models.load(TINY, dtype="float32")
    with RunningServer(lm) as running:
        client = LocalCompletionsAPI(
            base_url=f"{running.url}/v1/completions", model="tiny", tokenizer=str(TINY),
            max_length=ROLLED + 2,  # it counts a new token, and another one for windows
 batch_size=4, num_concurrent=1,
        )  # fmt: skip
        served = harness.evaluated(client, tasks, SERVED)
    results = kvjax_results(tasks)
    assert_same(served, results, SERVED)
