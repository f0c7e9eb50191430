"""RULER's retrieval tasks from our own generator: prompts of a given length, answers, distractors.

The tasks are those of Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context
Language Models?" (arXiv:2404.06654), with its prompts: needles, which are sentences that give the
value of a key, are hidden in a haystack, and the question asks for the values of one key or of
several; or assignments of variables are hidden, and the question asks for all variables that have a
value. An item is a function of the task, the length, the seed, the depth and the tokenizer.
"""

from __future__ import annotations

import bisect
import random
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

ADJECTIVES = """amber ancient bitter blunt brave bright bronze calm careful cheerful clever cloudy
    coastal copper crimson curious dainty dusty eager early elegant fabulous faint famous frosty
    gentle giant golden grumpy hasty hollow humble icy idle jolly keen lively lonely loud lucky
    marble mellow misty modest narrow noisy nimble odd orange patient placid polite proud quaint
    rapid rustic salty shy silent sleepy steep stormy sturdy tame tidy timid velvet violet vivid
    wicked windy witty wooden zealous"""
NOUNS = """acrobat anchor antelope apricot arrow badger balcony banjo barrel beacon beetle bishop
    blanket bottle bridge candle canyon carpet castle cellar cobbler compass cottage cricket dagger
    dolphin drummer engine falcon feather ferry fiddle forest fountain garden goblet guitar hammer
    harbor helmet island jacket jungle kettle ladder lantern lizard magnet meadow mirror mitten
    monkey oyster paddle parrot pebble pepper pigeon pillow planet pocket rabbit ribbon saddle
    sailor shovel sparrow spider temple thimble ticket tractor trumpet tunnel turtle valley violin
    walnut whistle window wizard"""
"""Keys and words are an adjective and a noun with a hyphen, as in RULER."""
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's noise: repeated as often as necessary."""
DISTRACTORS = 8
"""Wrong answers of an item; the chance of guessing is 1 / (1 + DISTRACTORS)."""
MORE_TOKENS = 16
"""New tokens that a model may generate in addition to those of the right answers: for each needle,
or for all variables, which models list as the example does."""


@dataclass(frozen=True)
class Task:
    """What is hidden, and what is asked.

    Attributes:
      values: the type of values: ``numbers``, ``words`` or ``uuids``; or ``variables``.
      haystack: ``noise`` or ``prose``.
      keys: keys in the haystack.
      per_key: values, and so needles, of each key.
      asked: keys that the question names.
      chains, hops: for variables: chains of assignments, and assignments of a variable to the next
        in each.
      ruler: the name of the task in RULER's configuration, if it has one.
    """

    values: str = "numbers"
    haystack: str = "prose"
    keys: int = 1
    per_key: int = 1
    asked: int = 1
    chains: int = 2
    hops: int = 4
    ruler: str = ""


TASKS = {
    "single, noise": Task(haystack="noise", ruler="niah_single_1"),
    "single, numbers": Task(ruler="niah_single_2"),
    "single, words": Task(values="words"),
    "single, uuids": Task(values="uuids", ruler="niah_single_3"),
    "multi-key": Task(keys=4, ruler="niah_multikey_1"),
    "multi-value": Task(per_key=4, ruler="niah_multivalue"),
    "multi-query": Task(keys=4, asked=4, ruler="niah_multiquery"),
    "variable tracking": Task(values="variables", haystack="noise"),
}
"""The tasks by name. RULER's ``vt`` has one chain of variables, so every variable of its haystack
is an answer. Here there are two."""


@dataclass(frozen=True)
class Step:
    """An answer's turn: the right answers before it are given.

    Attributes:
      lead: token ids between the previous step's position and this answer.
      candidates: token ids of the answer, then of each distractor.
    """

    lead: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Item:
    """A prompt with its answers.

    Attributes:
      task: the task's name.
      length: the most tokens of the prompt and the new tokens.
      messages: the prompt as a conversation, whose last message is the beginning of the answer.
      context, question: the prompt as the model reads it, in two parts: up to the end of the
        haystack, and the rest.
      context_ids, question_ids: their token ids.
      answers: the right answers, in the order in which they are scored.
      distractors: wrong answers of the same form.
      present: how many of the distractors occur in the haystack; they come first.
      depths: where each answer first occurs, as a fraction of the haystack's words.
      new_tokens: how many tokens a model may generate.
      steps: the answers as token ids.
    """

    task: str
    length: int
    messages: tuple[dict[str, str], ...]
    context: str
    question: str
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answers: tuple[str, ...]
    distractors: tuple[str, ...]
    present: int
    depths: tuple[float, ...]
    new_tokens: int
    steps: tuple[Step, ...]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of the whole prompt."""
        return self.context_ids + self.question_ids


@dataclass(frozen=True)
class _Plan:
    """An item without its haystack."""

    intro: str
    statements: list[str]
    question: str
    prefix: str
    answers: list[str]
    present: list[str]
    example: str = ""
    separator: str = ","


def make_item(
    name: str,
    tokenizer: Any,
    *,
    length: int,
    seed: int = 0,
    depth: float = 0.5,
    prose: str = "",
) -> Item:
    """Make an item of a task.

    Args:
      name: a key of ``TASKS``.
      tokenizer: the model's, as in ``LanguageModel.tokenizer``. A model with a chat template gets
        the prompt as a conversation.
      length: the most tokens of the prompt and the new tokens. The haystack is as long as possible.
      seed: which keys and values, and where the prose begins.
      depth: from 0 to 1. Needle or assignment ``j`` of ``n``, counted from 0, is at the fraction
        ``(j + depth) / n`` of the haystack, between the nearest sentences.
      prose: the haystack's text for tasks with prose; it is repeated if it is too short.

    Raises:
      ValueError: if the length is too small for the task, or prose is necessary and not given.
    """
    task = TASKS[name]
    if task.haystack == "prose" and not prose.split():
        raise ValueError(f"the task {name!r} needs prose for its haystack")
    rng = random.Random(f"{name}/{length}/{seed}")
    start = rng.random()
    text = NOISE if task.haystack == "noise" else prose
    words = text.split()
    begin = _sentence_starts(words)
    first = begin[int(start * len(begin))]
    words = words[first:] + words[:first]
    plan = (_variables if task.values == "variables" else _needles)(rng, task, text)
    absent = _absent(rng, task, [text, *plan.statements, plan.example], plan.answers)
    distractors = [*plan.present, *(next(absent) for _ in range(DISTRACTORS - len(plan.present)))]
    distractors = distractors[:DISTRACTORS]

    spaced = [f" {answer}" for answer in plan.answers]
    listed = plan.separator.join(spaced)
    lines = 1 if task.values == "variables" else len(plan.answers)
    new = len(continuation(tokenizer, plan.prefix, listed)) + MORE_TOKENS * lines

    def prompt(count: int) -> tuple[str, str, tuple[dict[str, str], ...], tuple[float, ...]]:
        haystack, depths = _hide(plan, _repeated(words, count), depth)
        context = f"{plan.example}{plan.intro}\n{haystack}"
        return *_rendered(tokenizer, context, plan.question, plan.prefix), depths

    def size(count: int) -> int:
        return len(_encode(tokenizer, "".join(prompt(count)[:2]))) + new

    if size(0) > length:
        raise ValueError(f"the task {name!r} needs more than {length} tokens")
    count = bisect.bisect_right(range(length), length, key=size) - 1
    while size(count) > length:  # the number of tokens may fall where words are added
        count -= 1
    context, question, messages, depths = prompt(count)
    ids = _encode(tokenizer, context + question)
    split = _common(ids, _encode(tokenizer, context))
    return Item(
        name, length, messages, context, question, tuple(ids[:split]), tuple(ids[split:]),
        tuple(plan.answers), tuple(distractors), min(len(plan.present), DISTRACTORS), depths, new,
        tuple(_steps(tokenizer, question, spaced, distractors, plan.separator)),
    )  # fmt: skip


def _needles(rng: random.Random, task: Task, text: str) -> _Plan:
    keys = _distinct(lambda: _words(rng), task.keys, [text])
    values = _distinct(_values(rng, task), task.keys * task.per_key, [text, *keys])
    of = [values[n * task.per_key : (n + 1) * task.per_key] for n in range(task.keys)]
    noun = task.values.removesuffix("s")
    statements = [
        f"One of the special magic {noun}s for {key} is: {value}."
        for key, own in zip(keys, of, strict=True)
        for value in own
    ]
    if task.keys > 1:
        rng.shuffle(statements)
    asked = keys[: task.asked]
    several = task.asked * task.per_key > 1
    what = f"{noun}s" if several else noun
    hidden = f"Some special magic {what} are" if several else f"A special magic {what} is"
    named = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    every, verb = ("all the", "are") if several else ("the", "is")
    about = f"special magic {what} for {named} mentioned in the provided text"
    return _Plan(
        intro=f"{hidden} hidden within the following text. Make sure to memorize it. I will quiz "
        f"you about the {what} afterwards.",
        statements=statements,
        question=f"What {verb} {every} {about}?",
        prefix=f"The {about} {verb}",
        answers=values[: task.asked * task.per_key],
        present=values[task.asked * task.per_key :],
    )


def _variables(rng: random.Random, task: Task, text: str) -> _Plan:
    """Chains of assignments, after an example with its answers, as in RULER."""
    per_chain = task.hops + 1
    names = _distinct(_values(rng, task), 2 * task.chains * per_chain, [text])
    numbers = _distinct(lambda: str(rng.randint(10000, 99999)), 2 * task.chains, [text, *names])
    half = len(names) // 2
    shown, plan = (
        _chains(rng, task, names[at : at + half], numbers[n : n + task.chains])
        for at, n in ((half, task.chains), (0, 0))
    )
    noise: list[str] = [*NOISE.split()]
    haystack, _ = _hide(shown, _repeated(noise, 4 * len(noise)), 0.0)
    example = f"{shown.intro}\n{haystack}\n{shown.question} {shown.prefix}"
    return replace(plan, example=f"{example} {' '.join(shown.answers)}.\n\n", separator="")


def _chains(rng: random.Random, task: Task, names: list[str], numbers: list[str]) -> _Plan:
    size = task.hops + 1
    chains = [names[n * size : (n + 1) * size] for n in range(task.chains)]
    order = [n for n in range(task.chains) for _ in range(size)]
    rng.shuffle(order)
    left = [iter(zip([number, *(f"VAR {x}" for x in chain[:-1])], chain, strict=True))
            for number, chain in zip(numbers, chains, strict=True)]  # fmt: skip
    statements = []
    for chain in order:
        value, variable = next(left[chain])
        statements.append(f"VAR {variable} = {value}.")
    return _Plan(
        intro="Memorize and track the chain(s) of variable assignment hidden in the following "
        "text.",
        statements=statements,
        question=f"Question: Find all variables that are assigned the value {numbers[0]} in the "
        "text above.",
        prefix="Answer: According to the chain(s) of variable assignment in the text above, "
        f"{size} variables are assigned the value {numbers[0]}, they are:",
        answers=chains[0],
        present=[name for chain in chains[1:] for name in chain],
    )


def _values(rng: random.Random, task: Task) -> Callable[[], str]:
    """A function that draws a value of the task's type."""
    return {
        "numbers": lambda: str(rng.randint(10**6, 10**7 - 1)),
        "words": lambda: _words(rng),
        "uuids": lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
        "variables": lambda: "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)),
    }[task.values]


def _words(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES.split())}-{rng.choice(NOUNS.split())}"


def _distinct(draw: Callable[[], str], count: int, apart: Sequence[str]) -> list[str]:
    """Return values that are not substrings of each other or of the texts ``apart``."""
    found: list[str] = []
    while len(found) < count:
        value = draw()
        alike = any(value in other or other in value for other in found)
        if not alike and not any(value in text for text in apart):
            found.append(value)
    return found


def _absent(
    rng: random.Random, task: Task, texts: Sequence[str], answers: Sequence[str]
) -> Iterator[str]:
    """Values that occur in no text and are not part of an answer."""
    found: list[str] = []
    while True:
        value = _distinct(_values(rng, task), 1, [*texts, *answers, *found])[0]
        if not any(answer in value for answer in answers):
            found.append(value)
            yield value


def _sentence_starts(words: Sequence[str]) -> list[int]:
    """The indices of words that begin a sentence."""
    return [n for n in range(len(words)) if n == 0 or re.search(r"[.!?][)\"']?$", words[n - 1])]


def _repeated(words: list[str], count: int) -> list[str]:
    return (words * (count // len(words) + 1))[:count]


def _hide(plan: _Plan, words: list[str], depth: float) -> tuple[str, tuple[float, ...]]:
    """Put a plan's statements between sentences, in order; the text, and the answers' depths."""
    starts, count = _sentence_starts(words) or [0], len(plan.statements)
    pieces: list[str] = []
    done, depths = 0, {}
    for number, statement in enumerate(plan.statements):
        wanted = (number + depth) / count * len(words)
        start = min(starts, key=lambda start: abs(start - wanted))
        pieces += [*words[done:start], statement]
        done = start
        for answer in plan.answers:
            if answer in statement:
                depths.setdefault(answer, start / max(len(words), 1))
    return " ".join([*pieces, *words[done:]]), tuple(depths[answer] for answer in plan.answers)


def _rendered(
    tokenizer: Any, context: str, question: str, prefix: str
) -> tuple[str, str, tuple[dict[str, str], ...]]:
    """The prompt in two parts, and as messages."""
    messages = (
        {"role": "user", "content": f"{context}\n{question}"},
        {"role": "assistant", "content": prefix},
    )
    if not getattr(tokenizer, "templates", None):
        return context, f"\n{question} {prefix}", messages
    text = tokenizer.render(messages, continue_final_message=True)
    split = text.rindex(f"\n{question}")
    return text[:split], text[split:], messages


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt; a chat template has written its special tokens itself."""
    return tokenizer.encode(text, add_special_tokens=not getattr(tokenizer, "templates", None))


def _common(ids: Sequence[int], other: Sequence[int]) -> int:
    """The number of equal tokens at the beginning."""
    pairs = zip(ids, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(other)))


def continuation(tokenizer: Any, before: str, text: str) -> list[int]:
    """Token ids of a text that follows another one."""
    known = tokenizer.encode(before, add_special_tokens=False)
    ids = tokenizer.encode(before + text, add_special_tokens=False)
    if ids[: len(known)] == known:
        return ids[len(known) :]
    return tokenizer.encode(text, add_special_tokens=False)


def _steps(
    tokenizer: Any,
    question: str,
    answers: Sequence[str],
    distractors: Sequence[str],
    separator: str,
) -> Iterator[Step]:
    before, lead = question, tuple[int, ...]()
    for answer in answers:
        candidates = [answer, *(f" {value}" for value in distractors)]
        ids = tuple(tuple(continuation(tokenizer, before, text)) for text in candidates)
        yield Step(lead, ids)
        lead = ids[0]
        before += answer
        if separator:
            lead += tuple(continuation(tokenizer, before, separator))
            before += separator
