"""Compiling before the first request: what ``kvjax.generate`` will run, without running it."""

import time
from dataclasses import dataclass, field, replace
from typing import Any, Unpack, cast

import jax
import numpy as np

from kvjax.cache.state import KVCache
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.validation import as_int
from kvjax.generation import programs
from kvjax.generation.aot.for_device import compile_for_device
from kvjax.generation.aot.shapes import chunk_widths, request_capacities
from kvjax.generation.beams.programs import rows_to_keep
from kvjax.generation.beams.session import search_of
from kvjax.generation.drafts.guided import session_of
from kvjax.generation.encoder import check_encoded
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.options import CompileKeywords, GenerationOptions, explicit_signature
from kvjax.generation.request import GenerationRequest, prepare_request, prompt_chunks
from kvjax.generation.results import Timer
from kvjax.generation.session import Session
from kvjax.memory.sizes import Plannable
from kvjax.policies.presets import PolicyChoice


@dataclass(frozen=True)
class Compiled:
    """What ``compile`` has made ready.

    ``seconds``: what it took. ``programs``: of the generation, ready now: prefill for every width
    of a chunk, the first token, and the decode loop, at every capacity. ``compilations``: how many
    were compiled, or fetched from the persistent compilation cache, for it, small ones around them
    counted; 0 if all were there. ``temporaries``: bytes that the largest of them needs beside
    weights and cache, None where the compiler does not say. ``executables``: by name (``"prefill
    16"``, ``"decode"``, of a cache that grows ``"decode of 256"``), what JAX knows of each:
    ``.as_text()``, ``.memory_analysis()``; the first token's, which runs here, among those for a
    ``device`` alone.
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
    device: Any = None,
    **settings: Unpack[CompileKeywords],
) -> Compiled:
    """Compile what ``generate(lm, prompts, cache=policy, max_len=max_len, ...)`` will run, so that
    in this process it compiles nothing, for any prompts and any number of new tokens.

    It costs the compilations, one after the other, and the memory of a cache while they last, which
    is allocated and freed: of one that grows twice, grown to every capacity that a text may meet
    on its way. The model is not run; the sampler is, once, on logits of 0. Programs are kept where
    ``jax.jit`` finds them again, so ``jax.clear_caches`` forgets them; with JAX's persistent
    compilation cache the next process reads instead of compiling. A cache that keeps to a memory
    (``policy("auto")``) may move its layers on ways that are not gone here, and then compiles.

    Args:
      lm: the model; for a ``device`` its architecture, without weights, will do
        (``models.Architecture``, ``lm.architecture``).
      policy, max_len, batch: of the cache, tokens a row that it can hold, and rows. A text without
        ``max_len`` has the programs of the capacity that ``generate`` rounds up to, where the
        policy is ``"static"``.
      device: compile for this one instead, whether it is here or not: a name (``"v5e"``,
        ``"h200"``), a ``jax.Device``, a topology, or a mesh of such (``make_mesh(tensor=4,
        devices="v5e")``). Nothing is allocated, and nothing is kept but in the result.
      temperature, top_k, top_p, min_p, typical_p, repetition_penalty, frequency_penalty,
        presence_penalty, no_repeat_ngram_size, min_new_tokens: as they will be given to
        ``generate``. Which of them are given chooses programs, and whether ``temperature`` is 0;
        other values compile nothing.
      eos_token_ids, prefill_chunk: as for ``generate``; more than 7 tokens choose a program.
      logit_bias, logprobs: as for ``generate``; whether they are given chooses programs, and of the
        tokens of a bias how many: room is made for 8, 16, 32 and so on, one of it left empty. Each
        number of ``logprobs`` has its own.
      guide: as for ``generate``, any guide, which stays as it is; whether it is given chooses
        programs.
      rotary_len: as for ``generate``; each has programs of its own.
      num_beams, num_beam_groups: as for ``generate``, with ``n=1``, which chooses a small program.
        Pools of pages are as large as beams of a request need; one whose ``pages`` the policy names
        compiles nothing more.

    Raises:
      ValueError: as of ``generate``; if ``policy`` is a cache; if there is no such device, or it
        does not compile for bodies on the host.
      MissingCompilerError: if the compiler of ``device`` is not installed.
    """
    if device is None and not hasattr(lm, "params"):
        raise ValueError(
            f"compile takes a loaded model; of a {type(lm).__name__} alone it compiles for a "
            "device=, 'v5e' perhaps"
        )
    if isinstance(policy, KVCache):
        raise ValueError("compile takes a policy, not a cache: give the one that it follows")
    check_encoded(lm)
    batch = as_int("batch", batch, 1)
    options = GenerationOptions(cache=policy, max_len=max_len, max_new_tokens=1, **settings)
    least = min(as_int("min_new_tokens", options.min_new_tokens, 0), 1)
    groups = as_int("num_beam_groups", options.num_beam_groups, 1)
    options = replace(options, min_new_tokens=least, diversity_penalty=float(groups > 1))
    start, meter = time.perf_counter(), Timer()
    with meter.running():
        if device is not None:
            found = compile_for_device(lm, policy, batch, options, device)
            count = len(found)
        else:
            ready = _Ready(cast(LanguageModel, lm), batch, options)
            for least, most in ready.capacities:
                ready.at(least, most)
            found, count = ready.executables, ready.programs
    sizes = [each.memory_analysis() for each in found.values()]
    temporaries = [int(size.temp_size_in_bytes) for size in sizes if size is not None]
    return Compiled(
        time.perf_counter() - start,
        count,
        meter.compilations,
        max(temporaries, default=None),
        found,
    )


class _Ready:
    """The programs of a generation, made ready one capacity after the other."""

    def __init__(self, lm: LanguageModel, batch: int, options: GenerationOptions) -> None:
        self._lm, self._batch, self._options = lm, batch, options
        self._request = request = self._asked(1)
        self._session = session_of(lm, request) if request.search is None else Session(lm, request)
        self._session.start()
        cache = self._session.cache
        assert cache is not None
        self.capacities = request_capacities(request, cache)
        self._searches = request.search is not None
        if not self._searches:
            # Nothing is fed: tokens are chosen from logits of 0.
            jax.block_until_ready(self._session.begin())
        self.programs = 1
        self.executables: dict[str, jax.stages.Compiled] = {}

    def at(self, least: int, most: int) -> None:
        """Make the programs ready that a cache has at one of its capacities."""
        if self._searches:
            # Whose rows are more than those of its prompts.
            self._session = Session(self._lm, self._request)
        session = self._session
        session.start()
        further = max(
            self._request.prefill_chunk, programs.MAX_STEPS + 1
        )  # tokens that a dispatch may add
        for _, before in self.capacities:
            if before < least <= before + further:
                self._grown(before, most)
                session.start()
                session.make_room(before)
                session.make_room(most)
        widths = chunk_widths(self._request, least, most)
        chunks = [prompt_chunks(self._asked(rest))[0] for rest in widths.values()]
        of = f" of {most}" if len(self.capacities) > 1 else ""
        ready = dict(
            zip((f"prefill {n}{of}" for n in widths), session.lower_prefill(chunks), strict=True)
        )
        if self._searches:
            search = search_of(self._request, session)
            jax.block_until_ready(search.begin())
            steps = search.lowered()
        else:
            steps = session.lower_steps()
            its = zip(widths, session.lower_draft_prefill(chunks), strict=False)
            ready |= {f"draft's prefill {n}{of}": lowered for n, lowered in its}
        ready |= {f"{name}{of}": lowered for name, lowered in steps.items()}
        for name, lowered in ready.items():
            self.executables[name] = lowered.compile()
            self.programs += 1
        if self._searches:
            first = np.arange(len(self._request.prompts))[:, None] * self._request.samples
            search.keep(*rows_to_keep(first, np.zeros_like(first), self._request))
            return
        # What stands around the programs: a stop string that is taken back.
        session.rewind(np.zeros(len(self._request.prompts), np.int32))
        session.check()

    def _grown(self, before: int, most: int) -> None:
        """A search that outgrows a capacity, once its beams have rows of their own."""
        if self._searches:
            session = Session(self._lm, self._request)
            session.start()
            session.make_room(before)
            search_of(self._request, session).begin()
            session.make_room(most)

    def _asked(self, tokens: int) -> GenerationRequest:
        """A request of so many tokens a row."""
        return prepare_request(self._lm, [[0] * tokens] * self._batch, self._options)
