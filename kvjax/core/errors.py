"""The errors that kvjax raises beside the built-in ``ValueError``."""


class KvjaxError(Exception):
    """Base of every error that is kvjax's own."""


class CheckpointError(KvjaxError, ValueError):
    """A file of a checkpoint is missing, damaged, or asks for something that is not understood.

    The message names the file, the field, and what was expected there.
    """


class CacheOverflowError(KvjaxError, RuntimeError):
    """A traced step asked a cache for more tokens than it can hold; the tokens were dropped."""


class CacheMemoryError(KvjaxError, MemoryError):
    """A device or its host has no memory for a cache."""


class NonFiniteError(KvjaxError, ArithmeticError):
    """A model gave logits that are not finite numbers, so that no token can be chosen."""


class MissingCompilerError(KvjaxError, ImportError):
    """The compiler of a device that is not here is not installed; the message says how it comes."""
