"""Tasks for lm-evaluation-harness, made from this repository's own pages."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("caches", "serving", "memory", "quantization", "performance", "faq", "paging", "sharding")
TASKS = ["own_choice", "own_shots", "own_letters", "own_text", "own_rolling"]
CHOICE = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
fewshot_split: test
fewshot_config: {{sampler: first_n}}
num_fewshot: {shots}
doc_to_text: "{text}"
doc_to_choice: "{{{{{choices}}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXT = """task: own_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: [".", "\\n\\n"], max_gen_toks: {new}, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
ROLLING = """task: own_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{page}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}]
"""


def sentences() -> list[str]:
    """Sentences of the pages, 8 to 30 words each."""
    found = []
    for page in PAGES:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        text = re.sub(r"```.*?```|^[|#].*?$", "", text, flags=re.DOTALL | re.MULTILINE)
        found += [" ".join(each.split()) for each in re.split(r"(?<=\.)\s", text)]
    return [each for each in found if 8 <= len(each.split()) <= 30]


def questions(count: int) -> list[dict[str, Any]]:
    """The first half of a sentence, its second half, and three of others."""
    halves = [
        (words[: len(words) // 2], words[len(words) // 2 :])
        for words in map(str.split, sentences())
    ]
    found = []
    for number in range(count):
        first, _ = halves[number % len(halves)]
        ends = [" ".join(halves[(number + 17 * n) % len(halves)][1]) for n in range(4)]
        label = number % 4
        ends[0], ends[label] = ends[label], ends[0]
        found.append({"question": " ".join(first), "choices": ends, "label": label})
    return found


def write_tasks(folder: Path, count: int, *, texts: int, pages: int, new: int = 24) -> Path:
    """Write the tasks and their data: ``count`` questions, of which all but one task use the first
    ``texts`` alone, and ``pages`` documents."""
    asked = questions(count)
    documents = [
        {"page": (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")[:4000]}
        for name in PAGES[:pages]
    ]
    letters = "ABCD"
    for each in asked:
        each["listed"] = " ".join(
            f"{letter}. {choice}" for letter, choice in zip(letters, each["choices"], strict=True)
        )
        each["letters"] = list(letters)
    data = {"choice": asked, "few": asked[:texts], "rolling": documents}
    for name, rows in data.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    plain = dict(text="{{question}}", choices="choices", data=folder / "choice.jsonl")
    few = plain | dict(data=folder / "few.jsonl")
    lettered = few | dict(text="{{question}} {{listed}} Answer:", choices="letters")
    tasks = {
        "own_choice": CHOICE.format(name="own_choice", shots=0, **plain),
        "own_shots": CHOICE.format(name="own_shots", shots=3, **few),
        "own_letters": CHOICE.format(name="own_letters", shots=0, **lettered),
        "own_text": TEXT.format(data=few["data"], new=new),
        "own_rolling": ROLLING.format(data=folder / "rolling.jsonl"),
    }
    for name, text in tasks.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def evaluated(model: Any, folder: Path, tasks: list[str], **options: Any) -> dict[str, Any]:
    """The harness's results of a model on tasks of ``write_tasks``, with samples."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results: Any = simple_evaluate(
        model, tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=0, **options
    )
    return results


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """What the model returned for each request of a task, in order."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for each in sample["resps"] for response in each]
