"""Whatever stands in a model's folder is loaded, or refused by one of our errors; nothing outside is touched."""

import json
import math
import random
import shutil

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from nanovllm.checkpoint import FolderCheckpoint
from nanovllm.config import ModelConfig
from nanovllm.errors import CheckpointError, NanoError
from nanovllm.loader import build_model, load_weights, parameter_places

SETTINGS = settings(
    max_examples=100, deadline=None, derandomize=True, database=None,
    phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
CONFIG = dict(
    architectures=["Qwen2ForCausalLM"], vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1000.0,
    hidden_act="silu", torch_dtype="float32", eos_token_id=1, tie_word_embeddings=False, sliding_window=None,
    use_sliding_window=False, rope_scaling=None, head_dim=8,
)  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), st.sampled_from([0, -1, 1, 2, 7, 2**31, 2**63, 2**64, 10**30, -(2**63)]),
    st.sampled_from([0.0, -1.0, 1e400, -1e400, math.nan, 0.5, 1e-300]), st.text(max_size=6), st.just([]), st.just({}),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
    st.sampled_from([{"rope_type": "yarn"}, {"rope_type": "linear", "factor": 0}, {"type": "llama3", "factor": "2"}]),
    st.sampled_from([{"rope_type": "yarn", "factor": 1e400}, {"rope_type": "dynamic", "factor": -1}, ["sliding"]]),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = build_model(ModelConfig.from_dict(CONFIG), 8, torch.float32, torch.device("cpu"))
    tensors = {name: torch.ones(place.shape) for name, place in parameter_places(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folder / "model.safetensors", folder / "whole")
    return folder


def load(folder):
    checkpoint = FolderCheckpoint(folder)
    config = ModelConfig.from_dict(checkpoint.config)
    if config.num_layers > 100 or config.vocab_size * config.hidden_size > 10**8:
        return None  # meant seriously, it is only large; the shapes do not fit, as the others show
    model = build_model(config, 8, torch.float32, torch.device("cpu"))
    load_weights(model, checkpoint.tensors(), torch.device("cpu"), torch.float32)
    return model


@SETTINGS
@given(changes=st.dictionaries(st.sampled_from(sorted(CONFIG)), ODD, min_size=1, max_size=2), drop=st.booleans())
@example(changes={"hidden_size": 10**30}, drop=False)
@example(changes={"auto_map": {"AutoConfig": "evil.Evil"}}, drop=False)
def test_configurations(folder, changes, drop):
    path = folder / "config.json"
    config = {name: value for name, value in CONFIG.items() if not (drop and name in changes)}
    path.write_text(json.dumps(config if drop else config | changes))
    try:
        load(folder)
    except NanoError as error:
        assert str(error)
    finally:
        path.write_text(json.dumps(CONFIG))


@SETTINGS
@given(seed=st.integers(0, 2**32), number=st.integers(1, 4), cut=st.none() | st.integers(-200, 200))
def test_headers_of_safetensors(folder, seed, number, cut):
    whole = (folder / "whole").read_bytes()
    dice, data = random.Random(seed), bytearray(whole)
    size = int.from_bytes(whole[:8], "little")
    for _ in range(number):  # figures and braces, where a flip of any bit would nearly always be no JSON
        place = (
            dice.randrange(8 + size)
            if dice.random() < 0.3
            else dice.choice([at for at in range(8, 8 + size) if chr(data[at]) in '0123456789[]{}",:FI'])
        )
        data[place] = dice.choice(b'0123456789[]{}",:-eFIB')
    path = folder / "model.safetensors"
    path.write_bytes(bytes(data[:cut]))
    try:
        load(folder)
    except NanoError as error:
        assert str(error)
    finally:
        path.write_bytes(whole)


NAMES = st.one_of(
    st.text(max_size=8), st.integers(), st.none(), st.just("model.safetensors"),
    st.sampled_from(
        ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", ".", "x\0.safetensors", "\udc80.bin",
         "x" * 5000 + ".safetensors", "C:\\a.safetensors", "model.safetensors/", "./model.safetensors", "config.json"]
    ),
)  # fmt: skip


@SETTINGS
@given(names=st.lists(NAMES, max_size=3), extra=ODD)
@example(names=["x" * 5000 + ".safetensors"], extra=None)
@example(names=["x\0.safetensors"], extra=None)
def test_indices(folder, names, extra):
    path = folder / "model.safetensors.index.json"
    weight_map = dict(zip("abc", names, strict=False)) if names else extra
    path.write_text(json.dumps({"weight_map": weight_map, "metadata": extra}))
    try:
        files = FolderCheckpoint(folder)._weight_files()
        assert {file.name for file in files} == {"model.safetensors"} and set(names) == {"model.safetensors"}
    except CheckpointError as error:
        assert str(error) and set(names) != {"model.safetensors"}
    finally:
        path.unlink()


@SETTINGS
@given(data=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-16")))
@example(data=b"[" * 100_000)
@example(data=b'{"vocab_size": ' + b"9" * 5000 + b"}")
def test_bytes_in_the_place_of_json(folder, data):
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(data)
        try:
            load(folder)
        except NanoError as error:
            assert str(error)
        finally:
            path.unlink() if before is None else path.write_bytes(before)
