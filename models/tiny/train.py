"""Train the embedded model from scratch: ``python -m kvjax.models.tiny.train``.

If training is interrupted, the same command resumes from the last checkpoint. The optimizer is Muon
for matrices (Jordan et al., 2024, kellerjordan.github.io/posts/muon) and AdamW for other
parameters. Muon needs fewer steps, which matters because the small text and a CPU allow only a few
thousand. The learning rate warms up, stays constant, and decays to zero over the last steps.
"""

import argparse
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tokenizers
from jaxtyping import Array, Int, PyTree
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.numpy import save_file

from kvjax.core.typing import Json

from ..architecture import Architecture, Params
from ..config import LlamaConfig
from ..weights import flatten
from .corpus import read_parts
from .data import Data, save_tokenizer, train_tokenizer
from .recipe import Recipe, optimizer


def token_losses(
    architecture: Architecture, params: Params, windows: Int[Array, "rows length"]
) -> Array:
    """Compute the loss, in nats, of each token after the first, float32[rows, length - 1]."""
    logits = architecture.apply(params, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])


class Windows(Protocol):
    """The training data of a run."""

    def batch(self, step: int) -> np.ndarray:
        """Return the windows of a step, int32[rows, length + 1]. They must be deterministic."""
        ...


class Trainer:
    """A training run: its state, step number, and checkpoints in ``workdir``."""

    def __init__(
        self,
        recipe: Recipe,
        workdir: Path,
        *,
        save_every: int = 50,
        loss: Callable[[Architecture, Params, Array], Array] = token_losses,
    ):
        self.recipe, self.workdir = recipe, workdir
        self.architecture = Architecture(recipe.config())
        self.optimizer = optimizer(recipe)
        self.loss = loss
        self._same_recipe()
        self.manager = ocp.CheckpointManager(
            (workdir / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=save_every),
        )
        self.validate = jax.jit(functools.partial(token_losses, self.architecture))
        self.update = jax.jit(self._update, donate_argnums=(0,))
        self.state = self._start()
        self.step = self.manager.latest_step() or 0
        if self.step:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
            self.state = self.manager.restore(self.step, args=ocp.args.StandardRestore(target))

    def _same_recipe(self) -> None:
        """Check that a resumed run has the same recipe. The number of steps may change."""
        file = self.workdir / "recipe.json"
        mine = {k: v for k, v in dataclasses.asdict(self.recipe).items() if k != "steps"}
        if file.exists():
            saved = json.loads(file.read_text(encoding="utf-8"))
            differing = sorted(k for k in mine | saved if mine.get(k) != saved.get(k))
            if differing:
                raise ValueError(
                    f"{file}: this run was started with a different {', '.join(differing)}: choose "
                    "a new --workdir"
                )
        self.workdir.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(mine, indent=1), encoding="utf-8")

    def _start(self) -> dict[str, PyTree]:
        params = self.architecture.init_params(self.recipe.seed)
        return {"params": params, "optimizer": self.optimizer.init(params)}

    def _update(self, state: dict[str, PyTree], windows: Array) -> tuple[dict[str, PyTree], Array]:
        def mean_loss(params: Params) -> Array:
            return self.loss(self.architecture, params, windows).mean()

        loss, gradients = jax.value_and_grad(mean_loss)(state["params"])
        updates, inner = self.optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": inner}, loss

    def run(self, data: Windows, until: int | None = None) -> Iterator[tuple[int, float]]:
        """Train, and save checkpoints. Yields the number of steps and the loss after each step."""
        until = self.recipe.steps if until is None else until
        while self.step < until:
            self.state, loss = self.update(self.state, jnp.asarray(data.batch(self.step)))
            self.step += 1
            self.save(force=self.step == until)
            yield self.step, float(loss)

    def save(self, *, force: bool = False) -> None:
        if self.manager.latest_step() != self.step:
            self.manager.save(self.step, args=ocp.args.StandardSave(self.state), force=force)

    def validation_loss(self, data: Data) -> float:
        rows = self.recipe.rows
        batches = [data.validation[i : i + rows] for i in range(0, len(data.validation), rows)]
        losses = [self.validate(self.state["params"], jnp.asarray(batch)) for batch in batches]
        return float(jnp.concatenate(losses).mean())

    def close(self) -> None:
        self.manager.wait_until_finished()
        self.manager.close()


def train(recipe: Recipe, workdir: Path, folder: Path, *, every: int = 50) -> None:
    """Train the model, and write its folder every ``every`` steps and at the end.

    Args:
      recipe: the architecture and the training hyperparameters.
      workdir: the folder for checkpoints and the log of losses.
      folder: the folder to which the model is written.
      every: the number of steps between checkpoints, validations and exports.

    Raises:
      ValueError: if ``workdir`` contains a run with a different recipe, or there is too little
        text.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    texts = read_parts()
    tokenizer_file = workdir / "tokenizer.json"
    if tokenizer_file.exists():
        tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    else:
        tokenizer = train_tokenizer(texts["train"].values(), recipe.vocab_size)
        save_tokenizer(tokenizer, workdir, recipe.context)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(workdir / name, folder / name)
    data = Data(texts, tokenizer, recipe)
    trainer = Trainer(recipe, workdir, save_every=every)
    log = _Log(workdir / "losses.jsonl", trainer.step)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=recipe.steps, completed=trainer.step)
        for step, loss in trainer.run(data):
            entry: dict[str, float] = {"step": step, "loss": loss}
            if step % every == 0 or step == recipe.steps:
                entry["validation"] = trainer.validation_loss(data)
                export(trainer.state["params"], recipe.config(), folder)
            log.add(entry)
            words = ", ".join(f"{k} {v:.3f}" for k, v in entry.items() if k != "step")
            progress.update(task, completed=step, description=words)
            if "validation" in entry or not progress.console.is_terminal:
                progress.console.print(f"step {step}: {words}")
    trainer.close()
    plot_losses(log.entries, recipe.rows * recipe.context, folder / "loss.png")


class _Log:
    """A log with one JSON object per step. Steps that a resumed run repeats are removed."""

    def __init__(self, file: Path, step: int):
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.entries = [e for e in map(json.loads, lines) if e["step"] <= step]
        self.file = file
        file.write_text("".join(json.dumps(e) + "\n" for e in self.entries), encoding="utf-8")

    def add(self, entry: dict[str, float]) -> None:
        self.entries.append(entry)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def main() -> None:
    folder = Path(__file__).parent
    parser = argparse.ArgumentParser(prog="python -m kvjax.models.tiny.train", description=__doc__)
    cache = Path.home() / ".cache" / "kvjax" / "tiny"
    parser.add_argument("--workdir", type=Path, default=cache, help="checkpoints (%(default)s)")
    parser.add_argument("--out", type=Path, default=folder, help="the model's folder (%(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    for field in dataclasses.fields(Recipe):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    workdir, out, every = options.pop("workdir"), options.pop("out"), options.pop("every")
    out.mkdir(parents=True, exist_ok=True)
    train(Recipe(**options), workdir, out, every=every)


def export(params: Params, config: LlamaConfig, folder: Path) -> None:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors`` in bfloat16.

    The tied head is omitted, as in Transformers. Weights are written to a temporary file and then
    renamed, so the folder never contains an incomplete file.
    """
    tensors = {
        name: np.ascontiguousarray(np.asarray(jax.device_get(x)).astype(jnp.bfloat16))
        for name, x in flatten(params)
    }
    unfinished = folder / "model.safetensors.unfinished"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)  # safetensors makes new files readable by their owner only
    unfinished.replace(folder / "model.safetensors")
    written = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": config.qkv_bias,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "dtype": "bfloat16",
        "eos_token_id": 0,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": config.mlp_bias,
        "model_type": config.model_type,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": 0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope.theta, "rope_type": "default"},
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    _write(folder / "config.json", written)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    _write(folder / "generation_config.json", ids)


def plot_losses(entries: Sequence[dict[str, float]], tokens: int, file: Path) -> None:
    """Plot the losses in ``losses.jsonl`` against the number of tokens seen. A step has ``tokens``
    tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("validation", "validation")):
        points = [(e["step"] * tokens / 1e6, e[key]) for e in entries if key in e]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1)
    axes.set(xlabel="million tokens", ylabel="nats a token", title="loss of the embedded model")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def _write(file: Path, values: Json) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
