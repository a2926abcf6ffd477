"""Options of an engine and facts of a model: defaults, aliases, refusals."""

import logging
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from nanovllm.config import ALIASES, DTYPES, IGNORED, NOT_BUILT, EngineConfig, ModelConfig, configure_logging, token_ids
from nanovllm.errors import CheckpointError, ConfigError, UnknownOptionError

NAN = float("nan")


def options(**given):
    return EngineConfig.from_options("folder", given)


def test_the_defaults():
    config = options()
    assert (
        config.model == "folder"
        and config.dtype == config.device == config.load_format == config.kv_cache_dtype == "auto"
    )
    assert (config.max_num_seqs, config.gpu_memory_utilization, config.seed) == (256, 0.9, 0)
    assert config.max_model_len is config.block_size is config.num_gpu_blocks_override is None
    assert config.enable_prefix_caching and not config.skip_tokenizer_init


def test_a_path_is_a_name_too():
    assert EngineConfig.from_options(Path("a") / "b", {}).model == str(Path("a") / "b")


@pytest.mark.parametrize("model", [None, 3, b"folder"])
def test_what_is_no_name_of_a_model_is_refused(model):
    with pytest.raises(ConfigError, match="model is .*it must be of type str") as caught:
        EngineConfig.from_options(model, {})
    assert caught.value.parameter == "model" and caught.value.value == model


def test_a_config_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        options().max_num_seqs = 3


POSITIVE = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes", "num_gpu_blocks_override", "block_size")
REFUSED = [
    *((name, value) for name in (*POSITIVE, "max_num_seqs") for value in (0, -2, 1.0, 1.5, NAN, "8", True)),
    ("kv_cache_memory_bytes", -1),
    ("max_num_seqs", -1),
    ("max_num_seqs", None),
    *(("gpu_memory_utilization", value) for value in (0, 0.0, -0.1, 1.01, NAN, "0.9", None, True)),
    *(("max_logprobs", value) for value in (-2, 1.0, "1", None, True, NAN)),
    *(("target_itl_ms", value) for value in (0, 0.0, -1, NAN, float("inf"), "20", True)),
    *(("dtype", value) for value in ("float64", "int8", "", None, 16)),
    *(("kv_cache_dtype", value) for value in ("fp8_e5m2", "int8", "float16", "", None)),
    *(("load_format", value) for value in ("safetensors", "", None)),
    *(("scheduling_policy", value) for value in ("lifo", "", None)),
    *(("generation_config", value) for value in ("none", None)),
    *(("tensor_parallel_size", value) for value in (0, -1, 1.0, True)),
    ("compile", 1),
    ("max_model_len", 1),
    *(("quantization", value) for value in ("awq", 0)),
    ("pipeline_parallel_size", 2),
    ("override_generation_config", {"temperature": 0.5}),
    ("enable_lora", True),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: str(value)[:30])
def test_a_refusal_names_the_option_the_value_and_the_rule(name, value):
    with pytest.raises(ConfigError) as caught:
        options(**{name: value})
    error = caught.value
    assert isinstance(error, ValueError) and error.parameter == name and error.value is value
    assert str(error).startswith(f"{name} is {value!r}; it ")
    assert any(word in str(error) for word in ("must", "is not supported"))


UNCHECKED = [("seed", "x"), ("seed", 1.5), ("seed", True), ("enable_prefix_caching", "no"), ("dtype", ["float32"])]


@pytest.mark.parametrize(("name", "value"), UNCHECKED, ids=str)
def test_a_wrong_type_is_refused(name, value):
    with pytest.raises(ConfigError) as caught:
        options(**{name: value})
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"max_model_len": -1}, {"max_model_len": None}),
        ({"num_gpu_blocks_override": -1}, {"num_gpu_blocks_override": None}),
        ({"num_kvcache_blocks": -1}, {"num_gpu_blocks_override": None}),
        ({"num_kvcache_blocks": 12}, {"num_gpu_blocks_override": 12}),
        ({"kvcache_block_size": 256}, {"block_size": 256}),
        ({"max_logprobs": -1}, {"max_logprobs": -1}),
        ({"gpu_memory_utilization": 1}, {"gpu_memory_utilization": 1}),
        *(({"target_itl_ms": value}, {"target_itl_ms": value}) for value in (None, 1, 0.5, 1e6)),
        ({"gpu_memory_utilization": 1e-3}, {"gpu_memory_utilization": 1e-3}),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 1}, {"max_num_seqs": 1, "max_num_batched_tokens": 1}),
        ({"scheduling_policy": "priority"}, {"scheduling_policy": "priority"}),
        *(({"kv_cache_dtype": name}, {"kv_cache_dtype": name}) for name in ("auto", "fp8", "fp8_e4m3")),
        ({"compile": True, "tensor_parallel_size": 1, "quantization": None}, {"compile": True}),
    ],
    ids=str,
)
def test_what_is_accepted_and_what_becomes_of_it(given, kept):
    config = options(**given)
    assert {name: getattr(config, name) for name in kept} == kept


def test_options_of_vllm_that_ask_for_nothing_may_stand_in_a_script():
    for name, values in NOT_BUILT.items():
        assert all(options(**{name: value}) == options() for value in values)


@pytest.mark.parametrize("dtype", ["auto", *DTYPES])
def test_every_spelling_of_a_type(dtype):
    assert options(dtype=dtype).dtype == dtype


def test_an_alias_and_its_option_are_one():
    with pytest.raises(ConfigError, match=r"block_size and kvcache_block_size are one option"):
        options(block_size=16, kvcache_block_size=16)
    assert set(ALIASES.values()) <= {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("max_model_length", "max_model_len"), ("blocksize", "block_size"), ("num_kvcache_block", "num_kvcache_blocks")],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(wrong, right):
    with pytest.raises(UnknownOptionError, match=f"LLM has no option '{wrong}'. Did you mean '{right}'") as caught:
        options(**{wrong: 1})
    assert caught.value.parameter == wrong and isinstance(caught.value, TypeError)


@pytest.mark.parametrize("name", IGNORED)
def test_what_is_ignored_is_said_if_it_was_asked_for(name, caplog):
    asked = name != "enable_chunked_prefill"
    with caplog.at_level(logging.WARNING, "nanovllm"):
        assert options(**{name: not asked}) == options()
        assert not caplog.records
        assert options(**{name: asked}) == options()
    (record,) = caplog.records
    assert name in record.getMessage() and IGNORED[name] in record.getMessage()


# --- config.json ------------------------------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "eos_token_id": 2, "rope_theta": 5e5,
}  # fmt: skip


def facts(**changes):
    return ModelConfig.from_dict({name: value for name, value in (LLAMA | changes).items() if value != "left out"})


def test_the_facts_of_a_model():
    model = facts()
    assert (model.architecture, model.vocab_size, model.num_layers) == ("LlamaForCausalLM", 99, 3)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (4, 2, 16)
    assert (model.dtype, model.eos_token_ids, model.tie_word_embeddings) == ("bfloat16", (2,), True)
    assert (model.rope.theta, model.rope.kind, model.rope.settings) == (5e5, "default", {})
    assert model.windows == (None, None, None) and model.raw == LLAMA


def test_what_a_file_may_leave_out():
    model = facts(num_key_value_heads="left out", rope_theta="left out", eos_token_id=None, head_dim=24)
    assert (model.num_kv_heads, model.head_dim, model.rope.theta, model.eos_token_ids) == (4, 24, 10_000.0, ())
    assert facts(head_dim=None).head_dim == 16
    assert facts(torch_dtype="float16", dtype="float32").dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": "left out"}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": "LlamaForCausalLM"}, "names no architecture"),
        ({"architectures": [None]}, "names no architecture"),
        ({"hidden_size": "left out", "hidden_sise": 64}, "hidden_size: None.*Did you mean 'hidden_sise'"),
        ({"hidden_size": 0}, "hidden_size: 0; it must be a whole number from 1 to"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers: 2.0"),
        ({"num_attention_heads": True}, "num_attention_heads: True"),
        ({"vocab_size": "99"}, "vocab_size: '99'"),
        ({"head_dim": -1}, "head_dim: -1"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3"),
        ({"hidden_size": 66}, "hidden_size 66 does not divide into 4 heads"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id is \[1, -1\]"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": True}, "sliding_window is True"),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
    ],
    ids=str,
)
def test_a_file_that_misses_or_contradicts_a_fact(changes, words):
    with pytest.raises(CheckpointError, match=words):
        facts(**changes)


WRONG_TYPES = [
    {"rms_norm_eps": "small"},
    {"rope_theta": "large"},
    {"rope_scaling": "yarn"},
    {"sliding_window": 8, "layer_types": 3},
    {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": "3"},
    {"eos_token_id": True},
]


@pytest.mark.parametrize("changes", WRONG_TYPES, ids=str)
def test_a_file_with_values_of_a_wrong_type(changes):
    with pytest.raises(CheckpointError):
        facts(**changes)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, (8, 8, 8)),  # Mistral
        ({"sliding_window": None, "use_sliding_window": True}, (None, None, None)),
        ({"sliding_window": 8, "use_sliding_window": False}, (None, None, None)),  # Qwen
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8)),
        ({"sliding_window": 8, "use_sliding_window": True}, (None, None, None)),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (8, None, 8),
        ),
    ],
    ids=str,
)
def test_which_layers_slide(changes, windows):
    assert facts(**changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "theta", "kind", "settings"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 5e5, "yarn", {"factor": 4.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5, "linear", {"factor": 2.0}),
        ({"rope_scaling": {"type": "x", "rope_type": "llama3", "factor": 8}}, 5e5, "llama3", {"factor": 8}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, "default", {}),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 7.0}}}, 7.0, "linear", {}),
        ({"rope_scaling": None}, 5e5, "default", {}),
    ],
    ids=str,
)
def test_both_spellings_of_the_rotary_embedding(changes, theta, kind, settings):
    rope = facts(**changes).rope
    assert (rope.theta, rope.kind, rope.settings) == (theta, kind, settings)


def test_end_ids_are_a_number_a_list_or_nothing():
    assert (token_ids(None), token_ids(0), token_ids([3, 1]), token_ids([])) == ((), (0,), (3, 1), ())


# --- logging ----------------------------------------------------------------------------------------------------


@pytest.fixture
def package():
    logger = logging.getLogger("nanovllm")
    before = list(logger.handlers), logger.level
    logger.handlers = []
    yield logger
    logger.handlers, logger.level = before


def test_logging_is_left_alone_without_the_variable(package, monkeypatch):
    monkeypatch.delenv("NANOVLLM_LOG_LEVEL", raising=False)
    configure_logging()
    assert package.handlers == []


def test_the_variable_sets_the_level_once(package, monkeypatch):
    monkeypatch.setenv("NANOVLLM_LOG_LEVEL", "debug")
    configure_logging()
    configure_logging()
    assert package.level == logging.DEBUG and len(package.handlers) == 1


def test_a_level_that_is_none_is_refused(package, monkeypatch):
    monkeypatch.setenv("NANOVLLM_LOG_LEVEL", "LOUD")
    with pytest.raises(ConfigError, match="NANOVLLM_LOG_LEVEL is 'LOUD'; it must be one of DEBUG, INFO"):
        configure_logging()
