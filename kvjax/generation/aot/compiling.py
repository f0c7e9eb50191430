"""``compile``: compile the programs of ``generate`` in advance of the first request."""

import time
from dataclasses import dataclass, field, replace
from typing import Unpack, cast

import jax
import numpy as np

from kvjax.cache.state import KVCache
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.topology import DeviceChoice
from kvjax.core.validation import as_int
from kvjax.generation import programs
from kvjax.generation.aot.for_device import chunk_widths, compile_for_device, request_capacities
from kvjax.generation.beams.programs import rows_to_keep
from kvjax.generation.beams.session import search_of
from kvjax.generation.encoder import check_encoded
from kvjax.generation.guides.session import session_of
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.options import CompileKeywords, GenerationOptions, explicit_signature
from kvjax.generation.request import GenerationRequest, prepare_request, prompt_chunks
from kvjax.generation.results import Timer
from kvjax.generation.session import Session
from kvjax.memory.sizes import Plannable
from kvjax.policies.presets import PolicyChoice


@dataclass(frozen=True)
class Compiled:
    """The result of ``compile``.

    Attributes:
      seconds: the duration of the call.
      programs: how many programs of the generation are ready. At every capacity, these are the
        prefill program for each chunk width, the program for the first token, and the decode loop.
      compilations: how many programs were compiled or read from the persistent compilation cache,
        including small helper programs; 0 if all were compiled before.
      temporaries: bytes of temporary memory of the largest program, in addition to weights and
        cache; None if the compiler does not report it.
      executables: JAX's compiled programs, by names such as ``"prefill 16"``, ``"decode"``, and for
        a growing cache ``"decode of 256"``. They have ``.as_text()`` and ``.memory_analysis()``.
        The program for the first token is included only with ``device=``.

    Example:
      ```python
      compiled = kvjax.compile(lm, max_len=64)
      print(compiled.temporaries, list(compiled.executables))
      ```
    """

    seconds: float
    programs: int
    compilations: int
    temporaries: int | None
    executables: dict[str, jax.stages.Compiled] = field(default_factory=dict, repr=False)


@explicit_signature(CompileKeywords)
@without_mesh_context
def compile(
    lm: LanguageModel | Plannable,
    policy: PolicyChoice = "static",
    *,
    max_len: int,
    batch: int = 1,
    device: DeviceChoice = None,
    **settings: Unpack[CompileKeywords],
) -> Compiled:
    """Compile the programs that ``generate(lm, prompts, cache=policy, max_len=max_len, ...)`` runs.

    In this process, ``generate`` then compiles nothing, for any prompts and any number of new
    tokens.

    Programs are compiled one after another. Meanwhile, a cache is allocated. A growing cache is
    allocated at every capacity that a sequence may need. The model does not run, but the sampler
    runs once, on logits of 0. ``jax.clear_caches`` discards the programs. With JAX's persistent
    compilation cache, later processes read them instead of compiling. With ``policy("auto")``,
    ``generate`` may move layers in ways that this function does not try, and then compiles more
    programs.

    Args:
      lm: the model. With ``device``, an architecture without weights is sufficient
        (``models.Architecture``, ``lm.architecture``).
      policy: the cache's policy.
      max_len: the maximum number of tokens per row in the cache. ``generate`` without ``max_len``
        rounds the capacity up (for the policy ``"static"``), and uses the programs of the rounded
        capacity.
      batch: the number of rows.
      device: compile for this target device, which need not be attached. It is a name (``"v5e"``,
        ``"h200"``), a ``jax.Device``, a topology, or a mesh of target devices
        (``make_mesh(tensor=4, devices="v5e")``). Nothing is allocated, and the programs
        are kept only in the result (``Compiled.executables``).
      settings: sampling parameters and other arguments, as for ``generate``. Programs depend on
        which sampling parameters are given and on whether ``temperature`` is 0, but not on their
        other values.
      eos_token_ids, prefill_chunk: as for ``generate``. More than 7 end tokens need a different
        program.
      logit_bias, logprobs: as for ``generate``. Programs depend on whether they are given, on the
        number of ``logprobs``, and on the number of biased tokens plus 1, rounded up to 8, 16, 32
        and so on.
      guide: any guide. It is not changed. Programs depend only on whether one is given.
      rotary_len: as for ``generate``. Each value has its own programs.
      num_beams, num_beam_groups: as for ``generate``, with ``n=1``. For each other ``n``,
        ``generate`` compiles one more small program. With a policy that sets ``pages``, it compiles
        nothing else. Without ``pages``, the size of page pools depends on a request's beams, and
        each new size needs new programs.

    Raises:
      ValueError: for the same reasons as ``generate``, if ``policy`` is a cache, if the device is
        unknown, or if its compiler does not support caches on the host.
      MissingCompilerError: if the compiler of ``device`` is not installed.

    Example:
      ```python
      compiled = kvjax.compile(lm, max_len=64)
      print(compiled.programs, "programs in", compiled.seconds, "s")
      ```
    """
    if device is None and not hasattr(lm, "params"):
        raise ValueError(
            f"expected a loaded model, got a {type(lm).__name__}: without weights, compile needs "
            "device=, for example 'v5e'"
        )
    if isinstance(policy, KVCache):
        raise ValueError("expected a policy, got a cache: give the policy that it was created with")
    check_encoded(lm)
    batch = as_int("batch", batch, 1)
    options = GenerationOptions(cache=policy, max_len=max_len, max_new_tokens=1, **settings)
    least = min(as_int("min_new_tokens", options.min_new_tokens, 0), 1)
    groups = as_int("num_beam_groups", options.num_beam_groups, 1)
    options = replace(options, min_new_tokens=least, diversity_penalty=float(groups > 1))
    start, timer = time.perf_counter(), Timer()
    with timer.running():
        if device is not None:
            executables = compile_for_device(lm, policy, batch, options, device)
            count = len(executables)
        else:
            compiler = _Compiler(cast(LanguageModel, lm), batch, options)
            for fewest, most in compiler.capacities:
                compiler.compile_capacity(fewest, most)
            executables, count = compiler.executables, compiler.programs
    sizes = [each.memory_analysis() for each in executables.values()]
    temporaries = [int(size.temp_size_in_bytes) for size in sizes if size is not None]
    return Compiled(
        time.perf_counter() - start,
        count,
        timer.compilations,
        max(temporaries, default=None),
        executables,
    )


class _Compiler:
    """Compiles the programs of a generation on its device, one capacity after another."""

    def __init__(self, lm: LanguageModel, batch: int, options: GenerationOptions) -> None:
        self._lm, self._batch, self._options = lm, batch, options
        self._request = request = self._request_of(1)
        self._session = session_of(lm, request) if request.search is None else Session(lm, request)
        self._session.start()
        cache = self._session.cache
        assert cache is not None
        self.capacities = request_capacities(request, cache)
        self._beam_search = request.search is not None
        if not self._beam_search:
            # Choose tokens from logits of 0, without a prefill.
            jax.block_until_ready(self._session.begin())
        self.programs = 1
        self.executables: dict[str, jax.stages.Compiled] = {}

    def compile_capacity(self, fewest: int, most: int) -> None:
        """Compile the programs for sequences that have from ``fewest`` to ``most`` tokens."""
        if self._beam_search:
            # The previous session has a row per beam; prefill needs a row per prompt.
            self._session = Session(self._lm, self._request)
        session = self._session
        session.start()
        per_dispatch = max(self._request.prefill_chunk, programs.MAX_STEPS + 1)
        for _, before in self.capacities:
            if before < fewest <= before + per_dispatch:
                self._grow_beams(before, most)
                session.start()
                session.make_room(before)
                session.make_room(most)
        widths = chunk_widths(self._request, fewest, most)
        chunks = [prompt_chunks(self._request_of(rest))[0] for rest in widths.values()]
        of = f" of {most}" if len(self.capacities) > 1 else ""
        names = [f"prefill {width}{of}" for width in widths]
        lowered = dict(zip(names, session.lower_prefill(chunks), strict=True))
        if self._beam_search:
            search = search_of(self._request, session)
            jax.block_until_ready(search.begin())
            steps = search.lowered()
        else:
            steps = session.lower_steps()
            drafts = zip(widths, session.lower_draft_prefill(chunks), strict=False)
            lowered |= {f"draft's prefill {width}{of}": program for width, program in drafts}
        lowered |= {f"{name}{of}": program for name, program in steps.items()}
        for name, program in lowered.items():
            self.executables[name] = program.compile()
            self.programs += 1
        if self._beam_search:
            first = np.arange(len(self._request.prompts))[:, None] * self._request.samples
            search.keep(*rows_to_keep(first, np.zeros_like(first), self._request))
            return
        # Run small programs, such as the one that rewinds after a stop string.
        session.rewind(np.zeros(len(self._request.prompts), np.int32))
        session.check()

    def _grow_beams(self, before: int, most: int) -> None:
        """Grow the cache of a beam search that already has a row per beam."""
        if self._beam_search:
            session = Session(self._lm, self._request)
            session.start()
            session.make_room(before)
            search_of(self._request, session).begin()
            session.make_room(most)

    def _request_of(self, tokens: int) -> GenerationRequest:
        """Make a request whose prompts have ``tokens`` tokens."""
        return prepare_request(self._lm, [[0] * tokens] * self._batch, self._options)
