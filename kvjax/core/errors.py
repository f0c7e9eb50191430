"""kvjax's exceptions; wrong arguments raise ``ValueError``."""


class KvjaxError(Exception):
    """Base class of kvjax's exceptions."""


class CheckpointError(KvjaxError, ValueError):
    """A checkpoint file is missing, damaged, or uses an unsupported feature.

    The message names the file, the field and the expected value.
    """


class CacheOverflowError(KvjaxError, RuntimeError):
    """A traced step appended more tokens than the cache can hold; the tokens were dropped."""


class CacheMemoryError(KvjaxError, MemoryError):
    """The device or its host has too little memory for a cache."""


class NonFiniteError(KvjaxError, ArithmeticError):
    """A model returned logits that are NaN or infinite, so no token can be chosen."""


class MissingCompilerError(KvjaxError, ImportError):
    """The compiler for a target device is not installed; the message says how to install it."""
