"""The tree of exceptions, and messages that name a way out."""

import pytest

from nanovllm import errors
from nanovllm.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    NanoError,
    RequestError,
    UnknownOptionError,
    nearest,
    unknown_option,
)

TREE = {
    ConfigError: ValueError,
    UnknownOptionError: (ConfigError, ValueError, TypeError),
    CheckpointError: ValueError,
    RequestError: ValueError,
    EngineError: RuntimeError,
}


@pytest.mark.parametrize(("kind", "also"), TREE.items(), ids=lambda value: getattr(value, "__name__", "bases"))
def test_every_error_is_ours_and_one_of_pythons(kind, also):
    assert issubclass(kind, NanoError)
    for base in also if isinstance(also, tuple) else (also,):
        assert issubclass(kind, base)
    with pytest.raises(NanoError) as caught:
        raise kind("what", parameter="dial", value=3)
    assert (str(caught.value), caught.value.parameter, caught.value.value) == ("what", "dial", 3)


def test_the_tree_drawn_in_the_module_is_the_tree():
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert defined == {kind.__name__ for kind in TREE} | {"NanoError"}
    assert all(name in errors.__doc__ for name in defined)


def test_parameter_and_value_are_optional():
    error = EngineError("lost")
    assert error.parameter is None and error.value is None
    assert not issubclass(EngineError, ValueError) and not issubclass(NanoError, ValueError)


def test_nearest_suggests_only_what_is_near():
    known = ["temperature", "top_p", "top_k"]
    assert nearest("temprature", known) == " Did you mean 'temperature'?"
    assert nearest("zzz", known) == "" == nearest("x", [])


def test_an_unknown_option_names_itself_the_nearest_and_all_known():
    error = unknown_option("LLM", "block_sise", {"block_size", "dtype"})
    assert str(error) == "LLM has no option 'block_sise'. Did you mean 'block_size'? Known: block_size, dtype."
    assert error.parameter == "block_sise"
