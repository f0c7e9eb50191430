"""The training text of the embedded model: the documentation included in every CPython.

It has three sources, read from the running interpreter: the topics of ``pydoc_data.topics``, the
docstrings and signatures in the standard library's ``.py`` files, and the docstrings of its
extension modules. All are formatted like the topics: a title, then entries with their signatures
and indented text. Each topic is a document, and so is each top-level module with its submodules.

``split.json`` assigns the documents to training, validation (choosing when to stop) and held-out
text (the figures of the model card). Documents that it does not list are not used.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import sysconfig
import textwrap
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

PARTS = ("train", "validation", "held_out")
SHINGLE = 5
"""The number of words in a shingle."""
LIMIT = 0.5
"""An entry is a duplicate if at least this fraction of its shingles has been seen before."""

_SKIPPED = re.compile(r"(^|\.)(tests?|idle_test|site-packages|__pycache__|_test\w*|_xx\w*)(\.|$)")
_EASTER_EGGS = ("antigravity", "this", "__hello__", "__phello__")
_INDENT = "   "

Document = list[str]
"""A list of entries. Each is a paragraph, or a signature with its docstring."""


def read_documents() -> dict[str, Document]:
    """Return all documents in the running Python's documentation, by names such as ``topic:NAME``
    and ``module:NAME``."""
    from pydoc_data.topics import topics

    documents = {
        f"topic:{name}": re.split(r"\n{2,}(?=\S)", text.strip("\n"))
        for name, text in sorted(topics.items())
    }
    modules: dict[str, Document] = {}
    for name, entries in [*_source_modules(), *_extension_modules()]:
        top = name.split(".")[0].lstrip("_") or name
        if len(entries) > 1:
            modules.setdefault(f"module:{top}", []).extend(entries)
    return documents | dict(sorted(modules.items()))


def read_split() -> dict[str, list[str]]:
    """Return the names of each part's documents, from ``split.json``."""
    return json.loads((Path(__file__).parent / "split.json").read_text(encoding="utf-8"))


def read_parts(documents: dict[str, Document] | None = None) -> dict[str, dict[str, str]]:
    """Return the text of each part's documents, by name, without near-duplicates.

    An entry is dropped if at least half of its five-word shingles occur in entries kept before it.
    Documents are processed part by part, longest first. After that, training and validation entries
    are dropped if at least half of their shingles occur in the held-out text, because a short entry
    can be part of a long held-out entry that is new as a whole.
    """
    documents = read_documents() if documents is None else documents
    seen: set[bytes] = set()
    kept: dict[str, dict[str, Document]] = {}
    for part, names in read_split().items():
        known = [name for name in names if name in documents]
        kept[part] = {}
        for name in sorted(known, key=lambda n: (-sum(map(len, documents[n])), n)):
            kept[part][name] = [e for e in documents[name] if _is_new(e, seen, add=True)]
    held_out: set[bytes] = set()
    for entry in (e for document in kept["held_out"].values() for e in document):
        held_out.update(shingles(entry))
    parts: dict[str, dict[str, str]] = {}
    for part, by_name in kept.items():
        parts[part] = {}
        for name, entries in sorted(by_name.items()):
            if part != "held_out":
                entries = [e for e in entries if _is_new(e, held_out, add=False)]
            if sum(map(len, entries)) > 200:
                parts[part][name] = "\n\n".join(entries) + "\n"
    return parts


def shingles(text: str) -> set[bytes]:
    """Return the hashes of all five-word sequences of a text. The set is empty for texts with fewer
    than five words."""
    words = re.findall(r"\w+", text.lower())
    runs = (" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1))
    return {hashlib.blake2b(run.encode(), digest_size=8).digest() for run in runs}


def _is_new(entry: str, seen: set[bytes], *, add: bool) -> bool:
    own = shingles(entry)
    new = not own or len(own & seen) < LIMIT * len(own)
    if new and add:
        seen |= own
    return new


def _source_modules() -> Iterator[tuple[str, Document]]:
    """Yield the modules that are written in Python. They are parsed, not imported."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        name = ".".join(parts)
        if not parts or _SKIPPED.search(name) or not name.replace(".", "").isidentifier():
            continue
        if parts[0] in _EASTER_EGGS or parts[0] not in sys.stdlib_module_names:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue  # templates and deliberately broken files
        entries = [_title(name), *_entry("", ast.get_docstring(tree), 0)]
        yield name, entries + [e for node in tree.body for e in _definitions(node, name, 0)]


def _definitions(node: ast.stmt, owner: str, depth: int) -> Iterator[str]:
    """Yield the documented classes and functions in a statement. Classes precede their members."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        head = f"class {owner}.{node.name}" + (f"({bases})" if bases else "")
        entries = list(_entry(head, ast.get_docstring(node), depth))
        inner = [e for child in node.body for e in _definitions(child, node.name, depth + 1)]
        yield from entries or ([textwrap.indent(head, _INDENT * depth)] if inner else [])
        yield from inner
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        word = "coroutine " if isinstance(node, ast.AsyncFunctionDef) else ""
        head = f"{word}{owner}.{node.name}({_arguments(node.args)})"
        yield from _entry(head, ast.get_docstring(node), depth)
    elif isinstance(node, ast.If | ast.Try):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield from _definitions(child, owner, depth)


def _arguments(arguments: ast.arguments) -> str:
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    text = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(arguments))
    return text if len(text) <= 200 else "..."


def _extension_modules() -> Iterator[tuple[str, Document]]:
    """Yield the modules that are written in C. They are imported, because their docstrings are not
    in source files."""
    for name in sorted(sys.stdlib_module_names):
        if _SKIPPED.search(name) or name in _EASTER_EGGS:
            continue
        try:
            spec = importlib.util.find_spec(name)
            compiled = spec and (
                spec.origin == "built-in" or str(spec.origin).endswith((".so", ".pyd"))
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name) if compiled else None
        except (ImportError, ValueError):
            continue  # not built here, or for another platform
        if module is not None:
            yield name, [_title(name), *_entry("", module.__doc__, 0), *_members(module, name)]


def _members(module: types.ModuleType, name: str) -> Iterator[str]:
    for key, value in sorted(vars(module).items()):
        if isinstance(value, type):
            if value.__module__ in (name, name.lstrip("_")) and value.__name__ == key:
                head = f"class {name}.{key}{_signature(value)}"
                inner = [
                    entry
                    for method, function in sorted(vars(value).items())
                    # Slot wrappers all say the same: "Implement iter(self)."
                    if not isinstance(function, types.WrapperDescriptorType)
                    and (callable(function) or inspect.isdatadescriptor(function))
                    for entry in _entry(
                        f"{key}.{method}{_signature(function)}", function.__doc__, 1
                    )
                ]
                yield from [*_entry(head, value.__doc__, 0)] or ([head] if inner else [])
                yield from inner
        elif isinstance(value, types.BuiltinFunctionType):
            yield from _entry(f"{name}.{key}{_signature(value)}", value.__doc__, 0)


def _signature(function: object) -> str:
    text = getattr(function, "__text_signature__", None) or ""
    return re.sub(r"\$\w+(, /)?(, )?", "", text)


def _title(name: str) -> str:
    return f"{name}\n{'*' * len(name)}"


def _entry(head: str, text: object, depth: int) -> Iterator[str]:
    """Yield a signature followed by its docstring. Without a docstring, nothing is yielded."""
    if not isinstance(text, str) or not text.strip():
        return
    body = inspect.cleandoc(text)
    lines = [line.rstrip() for line in body.expandtabs().splitlines()]
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    if head:
        body = head + "\n\n" + textwrap.indent(body, _INDENT)
    yield textwrap.indent(body, _INDENT * depth)
