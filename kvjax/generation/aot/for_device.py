"""The programs of a generation, compiled for devices that need not be here: from shapes alone."""

import functools
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from kvjax.cache.sizes import abstract_arguments, array_shardings
from kvjax.cache.state import KVCache
from kvjax.core.compat import jax_0_8_compiler_options
from kvjax.core.topology import compiling_for, resolve_device_or_mesh
from kvjax.generation import programs
from kvjax.generation.aot.shapes import (
    AbstractModel,
    abstract_request_cache,
    chunk_widths,
    request_capacities,
)
from kvjax.generation.aot.step_programs import (
    drafted_guided_programs,
    guided_programs,
    search_programs,
)
from kvjax.generation.context import Cached
from kvjax.generation.drafts.speculative import SpeculativeDecoder, speculate
from kvjax.generation.guides.masks import mask_words
from kvjax.generation.options import GenerationOptions
from kvjax.generation.programs import Progress
from kvjax.generation.request import GenerationRequest, prepare_request
from kvjax.policies.presets import PolicyChoice, budget_of
from kvjax.sampling.history import make_history
from kvjax.sampling.scores import Scores


def compile_for_device(
    lm: Any, policy: PolicyChoice, batch: int, options: GenerationOptions, device: Any
) -> dict[str, jax.stages.Compiled]:
    """The programs that ``generate`` would run, by name.

    Args:
      lm: a loaded model, or its architecture.
      policy, batch: of the cache.
      options: of the generation.
      device: a device, its name, a topology, or a mesh.

    Raises:
      ValueError: as of ``compile``.
      MissingCompilerError: if the device's compiler is not installed.
    """
    device, mesh = resolve_device_or_mesh(device)
    if budget_of(policy) is not None:
        raise ValueError(
            "policy('auto') moves its layers while it runs: compile for a device with the policies "
            "that it chooses among, on the device or on the host"
        )
    model: Any = AbstractModel.of(lm, mesh)
    request = prepare_request(model, [[0]] * batch, options)
    with compiling_for(device):
        first = abstract_request_cache(
            model, policy, request, None
        )  # what grows, as small as it begins
        found: dict[str, jax.stages.Compiled] = {}
        capacities = request_capacities(request, first)
        for least, most in capacities:
            of = f" of {most}" if len(capacities) > 1 else ""
            programs_of = _Programs(
                model, request, abstract_request_cache(model, policy, request, most), device
            )
            if request.search is not None:
                # A row for each beam, of the pages that they need.
                wide = abstract_request_cache(
                    model, request.policy or policy, request, most, request.samples
                )
                for name, ready in _Programs(model, request, wide, device).of_search().items():
                    name += "" if name == "first tokens" else of
                    if name not in found:
                        found[name] = ready()
                for width in chunk_widths(request, least, most):
                    found[f"prefill {width}{of}"] = programs_of.prefill(width)
                continue
            if not found and request.guides is None:
                found["first token"] = programs_of.begin()
            for width in chunk_widths(request, least, most):
                found[f"prefill {width}{of}"] = programs_of.prefill(width)
            for name, ready in programs_of.steps().items():
                found[f"{name}{of}"] = ready()
    return found


class _Programs:
    """The programs for one capacity of the cache."""

    def __init__(
        self, model: AbstractModel, request: GenerationRequest, cache: KVCache, device: Any
    ) -> None:
        self._model, self._request = model, request
        self._rows = cache.batch
        self._context = Cached(cache)
        self._device, self._platform = device, device.platform
        self._near = SingleDeviceSharding(device)
        weights: Any = jax.tree.map(lambda _: self._near, model.params)
        if model.mesh is not None:
            weights = _sharded(model.architecture)(model.mesh)
        there = Cached(array_shardings(cache, device))
        self._homes: list[tuple[Any, Any]] = [(model.params, weights), (self._context, there)]
        vocab = model.config.vocab_size
        self._logits = self._of_rows(jnp.float32, vocab)
        past = make_history(
            [[]] * self._rows,
            vocab=vocab,
            width=request.history_len,
            seen=request.filters.needs_seen,
            tokens=request.filters.needs_tokens or request.draft is not None,
        )
        self._past = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), past)
        self._limit = jax.ShapeDtypeStruct((), jnp.int32)
        self._progress = Progress(
            self._of_rows(jnp.int32),
            self._of_rows(jnp.int32),
            self._of_rows(jnp.bool_),
            self._of_rows(jnp.bool_),
        )

    def prefill(self, width: int) -> jax.stages.Compiled:
        """Of a chunk of so many tokens."""
        call = functools.partial(unwrap(programs.prefill), self._model.architecture)
        chunk = (
            self._of_rows(jnp.int32, width),
            self._of_rows(jnp.int32),
            self._of_rows(jnp.bool_),
        )
        return self._compiled(
            call,
            (1, 2),
            (self._model.params, self._context, self._logits, *chunk),
            (self._context, self._logits),
        )

    def begin(self) -> jax.stages.Compiled:
        """Of the first token."""
        filters, scores = self._request.filters, self._request.logprobs

        def call(logits: Any, settings: Any, limit: Any, past: Any) -> Any:
            return unwrap(programs.choose_first)(logits, filters, settings, limit, past, scores)

        given = self._logits, self._request.sampling, self._limit, self._past
        return self._compiled(call, (3,), given, (self._progress, self._past, self._scores(1)))

    def steps(self) -> dict[str, Callable[[], jax.stages.Compiled]]:
        """Of a step, or of many in a loop, each when it is asked for."""
        model, request = self._model, self._request
        if request.guides is None:
            return {"decode": self.decode}
        words, vocab = mask_words(model.config), model.config.vocab_size
        common = request, model.architecture, model.params, self._context
        found = guided_programs(
            *common,
            self._logits,
            self._past,
            self._progress,
            words,
            self._scores(1),
            self._compiled,
        )
        if (drafts := self._drafts()) is not None:
            found |= drafted_guided_programs(
                *common, self._past, self._progress, words, vocab, drafts, self._compiled
            )
        return found

    def decode(self) -> jax.stages.Compiled:
        """Of the decode loop, perhaps with drafts."""
        static = self._model.architecture, self._request.filters
        scores, drafts = self._request.logprobs, self._drafts()
        given = (
            self._model.params,
            self._context,
            self._progress,
            self._past,
            self._of_rows(jnp.bool_),
            self._request.sampling,
            self._limit,
            self._limit,
        )
        chosen = self._of_rows(jnp.int32, programs.MAX_STEPS), self._scores(programs.MAX_STEPS)
        found = self._context, self._progress, self._past, *chosen
        if drafts is None:
            call = functools.partial(unwrap(programs.decode), *static, logprobs=scores)
            return self._compiled(call, (1, 3), given, found)
        proposer, its, held, fared = drafts

        def checked(its: Any, held: Any, fared: Any, *rest: Any) -> Any:
            return unwrap(speculate)(proposer, its, held, fared, *static, *rest, scores=scores)

        return self._compiled(checked, (1, 4, 6), (its, held, fared, *given), (held, fared, *found))

    def _drafts(self) -> tuple[Any, ...] | None:
        """What proposes, its parameters, its cache, and how it fares, as shapes."""
        request, model = self._request, self._model
        if request.draft is None:
            return None
        drafts = SpeculativeDecoder(model, request, request.draft, self._platform)
        held = jax.eval_shape(drafts.new_context)
        proposer = drafts.proposer(self._context.cache, held)
        if proposer is None:
            return None
        if held is not None:
            self._homes.append((held, Cached(array_shardings(held.cache, self._device))))
        its = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), drafts.params)
        mesh, everywhere = model.mesh, jax.tree.map(lambda _: self._near, its)
        if mesh is not None and its is not None:
            everywhere = _sharded(drafts.architecture)(mesh)
        self._homes.append((its, everywhere))
        return proposer, its, held, jax.eval_shape(lambda: drafts.acceptance)

    def of_search(self) -> dict[str, Callable[[], jax.stages.Compiled]]:
        """Of a beam search, each when it is asked for."""
        return search_programs(
            self._request,
            self._model.architecture,
            self._model.params,
            self._context,
            self._logits,
            self._past,
            mask_words(self._model.config),
            self._compiled,
        )

    def _scores(self, tokens: int) -> Scores | None:
        most, shape = self._request.logprobs, (self._rows, tokens)
        return None if most is None else jax.eval_shape(lambda: Scores.zeros(shape, most))

    def _of_rows(self, dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((self._rows, *shape), dtype)

    def _compiled(
        self, call: Callable[..., Any], donated: tuple[int, ...], given: Any, found: Any
    ) -> jax.stages.Compiled:
        """A program, of shapes that are given and found."""
        shardings = self._shardings(given)
        program = jax.jit(
            call,
            donate_argnums=donated,
            in_shardings=shardings,
            out_shardings=self._shardings(found),
        )
        lowered = program.lower(*abstract_arguments(given, shardings))
        return lowered.compile(jax_0_8_compiler_options(self._device))

    def _shardings(self, parts: Any) -> tuple[Any, ...]:
        """Of a program's arguments or results, one after the other."""

        def of(part: Any) -> Any:
            home = next((home for known, home in self._homes if part is known), None)
            return jax.tree.map(self._place, part) if home is None else home

        return tuple(of(part) for part in parts)

    def _place(self, x: Any) -> Any:
        """Of an array that may have numbers for every row."""
        spread = self._request.spread
        if spread is None:
            return self._near
        batches = self._rows, len(self._request.prompts)
        return spread.sharding(spread.row_spec() if x.shape[:1] in [(n,) for n in batches] else P())


def _sharded(architecture: Any) -> Any:
    """How a model divides its parameters."""
    found = getattr(architecture, "param_shardings", None)
    if found is None:
        raise ValueError(
            f"a {type(architecture).__name__} does not say how its parameters are divided: it has "
            "no param_shardings(mesh)"
        )
    return found
