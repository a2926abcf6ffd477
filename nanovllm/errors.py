"""Everything this package raises on purpose.

    NanoError
    |-- ConfigError             an option has a value the engine cannot honour      (ValueError)
    |   `-- UnknownOptionError  there is no option or field of that name            (also TypeError)
    |-- CheckpointError         files on disk do not match the model they claim     (ValueError)
    |-- RequestError            this request cannot be served; the others go on     (ValueError)
    `-- EngineError             the engine itself failed; what was in flight is lost (RuntimeError)

A message has three parts: the value found, the rule, and the way out.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class NanoError(Exception):
    """Base class: ``except NanoError`` catches what we raise on purpose and no more.

    ``parameter`` names the argument at fault and ``value`` is what it was, where there is one.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class ConfigError(NanoError, ValueError):
    """An option is out of range, contradicts another one, or asks for what is not built."""


class UnknownOptionError(ConfigError, TypeError):
    """No option or field has this name; the message names the nearest one."""


class CheckpointError(NanoError, ValueError):
    """The model on disk is missing, damaged, or not what its configuration says."""


class RequestError(NanoError, ValueError):
    """One request (its prompt or its sampling parameters) cannot be served."""


class EngineError(NanoError, RuntimeError):
    """A step failed: every request that was in it has ended.

    ``outputs``: from ``LLMEngine.step`` what these requests had so far (``finish_reason`` "error"), from
    ``LLM.generate`` one result for each prompt, in order: those that were done, and how far the others came.
    """

    def __init__(self, message: str, *, outputs: Sequence[Any] = (), **about: Any) -> None:
        super().__init__(message, **about)
        self.outputs = list(outputs)


def shown(value: object) -> str:
    """Write a value for a message: as ``repr``, cut to 1,000 characters, and without failing."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of more than 4,300 digits
        text = f"{type(value).__name__} with an integer of more than 4,300 digits"
    return text if len(text) <= 1000 else f"{text[:800]} ... {text[-195:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest of ``known``, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown_option(owner: str, name: str, known: Iterable[str]) -> UnknownOptionError:
    """Build the error for an option or field ``name`` that ``owner`` does not have."""
    known = sorted(known)
    message = f"{owner} has no option {name!r}.{nearest(name, known)} Known: {', '.join(known)}."
    return UnknownOptionError(message, parameter=name)
