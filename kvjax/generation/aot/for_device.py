"""Compile the programs of a generation for a target device, from abstract models and caches."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled
from jax.typing import DTypeLike
from jaxtyping import PyTree

from kvjax.cache.creation import allocate
from kvjax.cache.sizes import abstract_arguments, array_shardings
from kvjax.cache.state import KVCache
from kvjax.core.compat import jax_0_8_compiler_options
from kvjax.core.target import JaxDevice
from kvjax.core.topology import DeviceChoice, compiling_for, resolve_device_or_mesh
from kvjax.generation import programs
from kvjax.generation.aot.step_programs import (
    Compilers,
    drafted_guided_programs,
    guided_programs,
    search_programs,
)
from kvjax.generation.drafts.speculative import SpeculativeDecoder, speculate
from kvjax.generation.guides.masks import mask_words
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import GenerationDefaults, Model, ModelConfig, capacity_bucket
from kvjax.generation.options import GenerationOptions
from kvjax.generation.programs import Cached, Progress
from kvjax.generation.request import GenerationRequest, prepare_request
from kvjax.layouts import as_paged
from kvjax.memory.sizes import Plannable, as_plannable
from kvjax.policies.presets import PolicyChoice, budget_of, per_layer
from kvjax.sampling.history import make_history
from kvjax.sampling.scores import Scores

_DEFAULTS = GenerationDefaults()


@dataclass(frozen=True)
class AbstractModel:
    """A model whose parameters are ``jax.ShapeDtypeStruct``s."""

    architecture: Model
    config: ModelConfig
    params: PyTree
    mesh: Mesh | None
    generation: GenerationDefaults = _DEFAULTS
    tokenizer: object = None
    source: str = "an abstract model"

    @classmethod
    def of(cls, lm: LanguageModel | Plannable, mesh: Mesh | None) -> "AbstractModel":
        """Make the abstract form of a loaded model or of an ``Architecture``.

        Raises:
          ValueError: if kvjax can plan for the model but can't run it.
        """
        architecture: Any = getattr(lm, "architecture", lm)
        params = getattr(lm, "params", None)
        if params is None:
            params = as_plannable(architecture).abstract_params()
        if architecture.apply is None:
            raise ValueError(f"a {type(lm).__name__} can only be used for planning: give a model")
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        defaults, tokenizer = getattr(lm, "generation", _DEFAULTS), getattr(lm, "tokenizer", None)
        return cls(architecture, lm.config, shapes, mesh, defaults, tokenizer)

    def on(self, mesh: Mesh) -> "AbstractModel":
        """Return the same model on a mesh."""
        return replace(self, mesh=mesh)


def abstract_request_cache(
    model: AbstractModel,
    policy: PolicyChoice,
    request: GenerationRequest,
    slots: int | None,
    times: int = 1,
) -> KVCache:
    """Make the abstract cache of a request.

    Args:
      model, policy, request: the model, the cache policy and the request.
      slots: the current size of growing layouts; None for their initial size.
      times: the number of rows per prompt.
    """
    policies = list(per_layer(policy, model.config))
    if slots is not None:
        policies = [
            each if as_paged(each.layout) else replace(each, layout=each.layout.starting_at(slots))
            for each in policies
        ]
    make = functools.partial(
        allocate,
        model.config,
        policies,
        batch=len(request.prompts) * times,
        max_len=request.max_len,
        initial_len=request.capacity,
        mesh=model.mesh,
        rotary_len=request.rotary_len,
    )
    return jax.eval_shape(make)


def request_capacities(request: GenerationRequest, cache: KVCache) -> list[tuple[int, int]]:
    """Return the capacities that a request's cache can have. ``cache`` has the initial size. For
    each capacity, the result has the minimum and the maximum number of tokens per row for which the
    cache has it."""
    most = request.capacity if cache.grows_to is None else cache.max_len
    ranges = [(1, most)]
    while most < request.capacity:
        fewest, most = most + 1, min(capacity_bucket(most + 1), request.capacity)
        ranges.append((fewest, most))
    return ranges


def chunk_widths(request: GenerationRequest, fewest: int, most: int) -> dict[int, int]:
    """Return the padded widths of the last chunk of prompts that have from ``fewest`` to ``most``
    tokens. The result maps each width to a number of real tokens that gives it."""
    chunk, widths = request.prefill_chunk, {}
    for tokens in range(fewest, min(fewest + chunk, most + 1)):
        rest = tokens - (tokens - 1) // chunk * chunk
        widths.setdefault(request.padded_width(rest), rest)
    return widths


def compile_for_device(
    lm: LanguageModel | Plannable,
    policy: PolicyChoice,
    batch: int,
    options: GenerationOptions,
    device: DeviceChoice,
) -> dict[str, Compiled]:
    """Compile the programs that ``generate`` would run on a target device. Returns them by name.

    Args:
      lm: a loaded model, or its architecture.
      policy: the policy of the cache.
      batch: the number of rows.
      options: the options of the generation.
      device: a device, its name, a topology, or a mesh.

    Raises:
      ValueError: for the same reasons as ``compile``.
      MissingCompilerError: if the device's compiler is not installed.
    """
    chip, mesh = resolve_device_or_mesh(device)
    if budget_of(policy) is not None:
        raise ValueError(
            "policy('auto') moves layers at run time, so it can't be compiled for a device: use a "
            "policy for the device or for the host"
        )
    model: Any = AbstractModel.of(lm, mesh)
    request = prepare_request(model, [[0]] * batch, options)
    compiled: dict[str, Compiled] = {}
    with compiling_for(chip):
        capacities = request_capacities(
            request, abstract_request_cache(model, policy, request, None)
        )
        for fewest, most in capacities:
            of = f" of {most}" if len(capacities) > 1 else ""
            cache = abstract_request_cache(model, policy, request, most)
            programs_of = _Programs(model, request, cache, chip)
            if request.search is not None:
                # The cache has one row per beam, and page pools of the size that beams need.
                beam_cache = abstract_request_cache(
                    model, request.policy or policy, request, most, request.samples
                )
                beam_programs = _Programs(model, request, beam_cache, chip).search()
                for name, compile_program in beam_programs.items():
                    name += "" if name == "first tokens" else of
                    if name not in compiled:
                        compiled[name] = compile_program()
                for width in chunk_widths(request, fewest, most):
                    compiled[f"prefill {width}{of}"] = programs_of.prefill(width)
                continue
            if not compiled and request.guides is None:
                compiled["first token"] = programs_of.choose_first()
            for width in chunk_widths(request, fewest, most):
                compiled[f"prefill {width}{of}"] = programs_of.prefill(width)
            for name, compile_program in programs_of.steps().items():
                compiled[f"{name}{of}"] = compile_program()
    return compiled


class _Programs:
    """Compiles the programs for one capacity of the cache."""

    def __init__(
        self, model: AbstractModel, request: GenerationRequest, cache: KVCache, device: JaxDevice
    ) -> None:
        self._model, self._request = model, request
        self._rows = cache.batch
        self._context = Cached(cache)
        self._device, self._platform = device, device.platform
        self._on_device = SingleDeviceSharding(device)
        weights: PyTree = jax.tree.map(lambda _: self._on_device, model.params)
        if model.mesh is not None:
            weights = _param_shardings(model.architecture)(model.mesh)
        context_shardings = Cached(array_shardings(cache, device))
        # The arguments with known shardings. All others are sharded by rows or replicated.
        self._known: list[tuple[PyTree, PyTree]] = [
            (model.params, weights),
            (self._context, context_shardings),
        ]
        vocab = model.config.vocab_size
        self._logits = self._row_array(jnp.float32, vocab)
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
            self._row_array(jnp.int32),
            self._row_array(jnp.int32),
            self._row_array(jnp.bool_),
            self._row_array(jnp.bool_),
        )

    def prefill(self, width: int) -> Compiled:
        """Compile the prefill of a chunk of ``width`` tokens."""
        call = functools.partial(unwrap(programs.prefill), self._model.architecture)
        chunk = (
            self._row_array(jnp.int32, width),
            self._row_array(jnp.int32),
            self._row_array(jnp.bool_),
        )
        arguments = (self._model.params, self._context, self._logits, *chunk)
        return self._compile(call, (1, 2), arguments, (self._context, self._logits))

    def choose_first(self) -> Compiled:
        """Compile the program that chooses the first token."""
        filters, logprobs = self._request.filters, self._request.logprobs

        def call(*arguments: PyTree) -> PyTree:
            logits, sampling, limit, past = arguments
            return unwrap(programs.choose_first)(logits, filters, sampling, limit, past, logprobs)

        arguments = self._logits, self._request.sampling, self._limit, self._past
        return self._compile(call, (3,), arguments, (self._progress, self._past, self._scores(1)))

    def steps(self) -> Compilers:
        """Return functions that compile the decode loop, or the programs of a guided step, by
        name."""
        model, request = self._model, self._request
        if request.guides is None:
            return {"decode": self.decode}
        words, vocab = mask_words(model.config), model.config.vocab_size
        common = request, model.architecture, model.params, self._context
        compilers = guided_programs(
            *common, self._logits, self._past, self._progress, words, self._scores(1), self._compile
        )
        if (drafts := self._drafts()) is not None:
            compilers |= drafted_guided_programs(
                *common, self._past, self._progress, words, vocab, drafts, self._compile
            )
        return compilers

    def decode(self) -> Compiled:
        """Compile the decode loop, with drafts if the request has them."""
        static = self._model.architecture, self._request.filters
        logprobs, drafts = self._request.logprobs, self._drafts()
        arguments = (
            self._model.params,
            self._context,
            self._progress,
            self._past,
            self._row_array(jnp.bool_),
            self._request.sampling,
            self._limit,
            self._limit,
        )
        tokens = self._row_array(jnp.int32, programs.MAX_STEPS)
        scores = self._scores(programs.MAX_STEPS)
        results = self._context, self._progress, self._past, tokens, scores
        if drafts is None:
            call = functools.partial(unwrap(programs.decode), *static, logprobs=logprobs)
            return self._compile(call, (1, 3), arguments, results)
        proposer, draft_params, draft_context, acceptance = drafts

        def call_speculate(*arguments: PyTree) -> PyTree:
            params, context, acceptance, *rest = arguments
            return unwrap(speculate)(
                proposer, params, context, acceptance, *static, *rest, scores=logprobs
            )

        arguments = draft_params, draft_context, acceptance, *arguments
        results = draft_context, acceptance, *results
        return self._compile(call_speculate, (1, 4, 6), arguments, results)

    def _drafts(self) -> tuple[PyTree, ...] | None:
        """Return the proposer, and the shapes of its parameters, its context and its acceptance
        statistics."""
        request, model = self._request, self._model
        if request.draft is None:
            return None
        drafts = SpeculativeDecoder(model, request, request.draft, self._platform)
        context = jax.eval_shape(drafts.new_context)
        proposer = drafts.proposer(self._context.cache, context)
        if proposer is None:
            return None
        if context is not None:
            self._known.append((context, Cached(array_shardings(context.cache, self._device))))
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), drafts.params)
        mesh, shardings = model.mesh, jax.tree.map(lambda _: self._on_device, params)
        if mesh is not None and params is not None:
            shardings = _param_shardings(drafts.architecture)(mesh)
        self._known.append((params, shardings))
        return proposer, params, context, jax.eval_shape(lambda: drafts.acceptance)

    def search(self) -> Compilers:
        """Return functions that compile the programs of a beam search, by name."""
        return search_programs(
            self._request,
            self._model.architecture,
            self._model.params,
            self._context,
            self._logits,
            self._past,
            mask_words(self._model.config),
            self._compile,
        )

    def _scores(self, tokens: int) -> Scores | None:
        most, shape = self._request.logprobs, (self._rows, tokens)
        return None if most is None else jax.eval_shape(lambda: Scores.zeros(shape, most))

    def _row_array(self, dtype: DTypeLike, *shape: int) -> PyTree:
        return jax.ShapeDtypeStruct((self._rows, *shape), dtype)

    def _compile(
        self,
        call: Callable[..., PyTree],
        donated: tuple[int, ...],
        arguments: PyTree,
        results: PyTree,
    ) -> Compiled:
        """Compile a program with abstract arguments and results."""
        shardings = self._shardings(arguments)
        program = jax.jit(
            call,
            donate_argnums=donated,
            in_shardings=shardings,
            out_shardings=self._shardings(results),
        )
        lowered = program.lower(*abstract_arguments(arguments, shardings))
        return lowered.compile(jax_0_8_compiler_options(self._device))

    def _shardings(self, parts: PyTree) -> tuple[PyTree, ...]:
        """Return the shardings of a program's arguments or results."""

        def shardings_of(part: PyTree) -> PyTree:
            known = next((shardings for tree, shardings in self._known if part is tree), None)
            return jax.tree.map(self._sharding, part) if known is None else known

        return tuple(shardings_of(part) for part in parts)

    def _sharding(self, x: jax.ShapeDtypeStruct | np.ndarray) -> Sharding:
        """Return the sharding of an array whose first axis may be rows."""
        mesh = self._request.mesh_sharding
        if mesh is None:
            return self._on_device
        batches = self._rows, len(self._request.prompts)
        return mesh.sharding(mesh.row_spec() if x.shape[:1] in [(n,) for n in batches] else P())


def _param_shardings(architecture: Model) -> Callable[[Mesh], PyTree]:
    """Return the model's function that computes the parameter shardings for a mesh."""
    shardings = getattr(architecture, "param_shardings", None)
    if shardings is None:
        raise ValueError(
            f"a {type(architecture).__name__} has no param_shardings(mesh), so its parameters "
            "can't be sharded"
        )
    return shardings
