"""Folders as they come: one file or shards, safetensors or PyTorch's pickles, either spelling of the configuration,
16-bit numbers, surplus buffers; and everything that may be wrong with them.

In tests new memory holds NaN, so a parameter that nothing writes shows in the logits.
"""

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams, loader
from nanovllm.checkpoint import FolderCheckpoint
from nanovllm.config import ModelConfig
from nanovllm.errors import CheckpointError
from nanovllm.loader import build_model, parameter_places
from nanovllm.models import MODELS

TOKENS = [5, 17, 99, 3, 64, 120, 0, 130, 41, 8]
ATOL = 1e-4


@pytest.fixture(scope="module")
def reference(kit):
    return kit.make_reference("Qwen2Config", seed=3, num_hidden_layers=3)


@pytest.fixture(scope="module")
def tied(kit):
    return kit.make_reference("LlamaConfig", seed=4, tie_word_embeddings=True)


@pytest.fixture
def folder(reference, tmp_path: Path) -> Path:
    """The untied model in one safetensors file."""
    reference.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def edit_config(folder: Path, *drop: str, **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in drop}))


def check(kit, folder: Path, reference, atol: float = ATOL) -> None:
    torch.testing.assert_close(
        kit.our_logits(kit.load_ours(folder), TOKENS), kit.reference_logits(reference, TOKENS), rtol=0, atol=atol
    )


def refused(kit, folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        kit.load_ours(folder)


def open_llm(folder: Path, **options) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, use_tqdm_on_load=False, **options)


# Files that load


def test_one_file(kit, folder, reference):
    check(kit, folder, reference)


def test_every_parameter_is_written(kit, folder, monkeypatch):
    """Looked at when a module is complete, before it is rearranged."""
    prepare, seen = loader._prepare, []

    def watched(module, *rest):
        for parameter in module.parameters(recurse=False):
            assert not parameter.is_meta
            assert not parameter.isnan().any()
            seen.append(parameter.numel())
        prepare(module, *rest)

    monkeypatch.setattr(loader, "_prepare", watched)
    kit.load_ours(folder)
    assert sum(seen) == sum(tensor.numel() for tensor in load_tensors(folder).values())


def test_shards_with_an_index(kit, reference, tmp_path):
    reference.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    check(kit, tmp_path, reference)


def to_bin(folder: Path, shards: int = 1, **options) -> None:
    """Replace the safetensors file by pickles as transformers wrote them before version 5."""
    tensors = load_tensors(folder)
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin", **options)
        return
    names = [f"pytorch_model-{number + 1:05}-of-{shards:05}.bin" for number in range(shards)]
    weight_map = {tensor: names[place % shards] for place, tensor in enumerate(tensors)}
    for name in names:
        torch.save({tensor: tensors[tensor] for tensor in tensors if weight_map[tensor] == name}, folder / name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 3])
def test_pytorch_files(kit, folder, reference, shards):
    to_bin(folder, shards)
    check(kit, folder, reference)


def test_pytorch_file_of_the_old_format(kit, folder, reference):
    to_bin(folder, _use_new_zipfile_serialization=False)
    check(kit, folder, reference)


@pytest.mark.parametrize("container", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_on_disk(kit, folder, reference, dtype, container):
    store(folder, {name: tensor.to(dtype) for name, tensor in load_tensors(folder).items()})
    if container == "bin":
        to_bin(folder)
    rounded = kit.make_reference("Qwen2Config", seed=3, num_hidden_layers=3)
    rounded.load_state_dict({name: tensor.to(dtype).float() for name, tensor in reference.state_dict().items()})
    check(kit, folder, rounded)


@pytest.mark.parametrize("which", ["reference", "tied"])
def test_matrices_held_in_float16_are_rounded_once(kit, request, tmp_path, which):
    """All arithmetic, norms and biases stay in float32; nothing but the matrices loses digits."""
    model = request.getfixturevalue(which)
    model.save_pretrained(tmp_path)
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.half().float()
    found = kit.our_logits(kit.load_ours(tmp_path, storage=torch.float16), TOKENS)
    torch.testing.assert_close(found, kit.reference_logits(rounded, TOKENS), rtol=0, atol=ATOL)
    assert float((found - kit.reference_logits(model, TOKENS)).abs().max()) > ATOL, "nothing was rounded"


@pytest.mark.parametrize("head", ["absent", "present"])
def test_tied_heads(kit, tied, tmp_path, head):
    tied.save_pretrained(tmp_path)
    tensors = load_tensors(tmp_path)
    assert "lm_head.weight" not in tensors
    if head == "present":
        store(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    check(kit, tmp_path, tied)


def test_buffers_of_old_checkpoints_are_passed_over(kit, folder, reference):
    extra = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.randn(6) for layer in range(3)}
    store(folder, load_tensors(folder) | extra)
    check(kit, folder, reference)


def test_the_order_of_names_does_not_matter(kit, folder, reference):
    tensors = load_tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors, key=lambda name: name[::-1])
    torch.save({name: tensors[name] for name in names}, folder / "pytorch_model.bin")
    check(kit, folder, reference)


def test_links_within_a_folder_or_a_hubs_cache_are_followed(kit, folder, reference, tmp_path):
    shutil.move(folder / "model.safetensors", folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    check(kit, folder, reference)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "blobs").mkdir()
    (snapshot / "model.safetensors").unlink()
    shutil.move(snapshot / "weights", snapshot.parents[1] / "blobs" / "cafe")
    (snapshot / "model.safetensors").symlink_to("../../blobs/cafe")
    check(kit, snapshot, reference)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "chat_template.jinja"])
def test_links_out_of_the_folder_are_refused(folder, tmp_path, name):
    secret = tmp_path / "secret"
    if (folder / name).exists():
        shutil.move(folder / name, secret)
    (folder / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match=rf"{name} is a link to .*secret, outside the model's folder\. Copy"):
        FolderCheckpoint(folder)


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
ROPES = {
    "default": (dict(rope_type="default", rope_theta=500.0), dict(rope_theta=500.0)),
    "linear": (
        dict(rope_type="linear", rope_theta=1e4, factor=2.0),
        dict(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0}),
    ),
    "llama3": (
        dict(rope_type="llama3", rope_theta=1e4, **LLAMA3),
        dict(rope_theta=1e4, rope_scaling=dict(rope_type="llama3", **LLAMA3)),
    ),
    "yarn": (
        dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64),
        dict(rope_theta=1e4, rope_scaling=dict(rope_type="yarn", factor=4, original_max_position_embeddings=64)),
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_both_spellings_of_the_configuration(kit, tmp_path, name):
    new, old = ROPES[name]
    reference = kit.make_reference("LlamaConfig", rope_parameters=new)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {"rope_parameters", "dtype"} <= set(config)
    check(kit, tmp_path, reference)
    edit_config(tmp_path, "rope_parameters", "dtype", torch_dtype="float32", **old)
    check(kit, tmp_path, reference)


def test_old_spelling_of_qwen2_windows(kit, tmp_path):
    reference = kit.make_reference(
        "Qwen2Config", num_hidden_layers=3, use_sliding_window=True, sliding_window=4, max_window_layers=1
    )
    reference.save_pretrained(tmp_path)
    edit_config(tmp_path, "layer_types")
    check(kit, tmp_path, reference)


def test_old_spelling_of_gemma3(kit, tmp_path):
    """Gemma 3 was published with a pattern (every sixth layer sees everything) and two bases, not with lists."""
    reference = kit.make_reference(
        "Gemma3TextConfig", num_hidden_layers=4, sliding_window=4, head_dim=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e5),
                             sliding_attention=dict(rope_type="default", rope_theta=300.0)),
    )  # fmt: skip
    reference.save_pretrained(tmp_path)
    edit_config(
        tmp_path, "layer_types", "rope_parameters", sliding_window_pattern=3, rope_theta=1e5,
        rope_local_base_freq=300.0, rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip
    check(kit, tmp_path, reference)


def test_old_spelling_of_gemma2(kit, tmp_path):
    """Gemma 2 was published without a list of layers: every second one, from the first on, has the window."""
    reference = kit.make_reference(
        "Gemma2Config", num_hidden_layers=3, sliding_window=4, head_dim=16, attn_logit_softcapping=1.5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    reference.save_pretrained(tmp_path)
    edit_config(tmp_path, "layer_types")
    check(kit, tmp_path, reference)


@pytest.mark.parametrize("cap", [0, -1.0, True, "30", float("inf"), float("nan")])
def test_caps_that_bound_nothing_are_refused(kit, tmp_path, cap):
    kit.make_reference("Gemma2Config", num_hidden_layers=1, head_dim=16).save_pretrained(tmp_path)
    edit_config(tmp_path, final_logit_softcapping=cap)
    with pytest.raises(CheckpointError, match="final_logit_softcapping is .*must be a number above 0"):
        open_llm(tmp_path)


def test_gemma3_has_no_cap_on_scores(kit, tmp_path):
    kit.make_reference("Gemma3TextConfig", num_hidden_layers=1, head_dim=16).save_pretrained(tmp_path)
    edit_config(tmp_path, attn_logit_softcapping=50.0)
    with pytest.raises(CheckpointError, match=r"attn_logit_softcapping is 50\.0"):
        open_llm(tmp_path)


# What the machine has to say about precision


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_type_generates(folder, dtype):
    with open_llm(folder, dtype=dtype) as llm:
        (output,) = llm.generate([TOKENS], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
        assert len(output.token_ids) == 4


def test_dummy_weights_need_a_configuration_alone(tmp_path, folder):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    outputs = []
    for seed in (0, 0, 1):
        with open_llm(bare, load_format="dummy", dtype="float32", seed=seed) as llm:
            greedy = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
            outputs.append(llm.generate([TOKENS], greedy, use_tqdm=False)[0].outputs[0].logprobs)
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]
    with pytest.raises(CheckpointError, match="no weights.*load_format"):
        open_llm(bare)


# Weights that do not fit


def test_an_unexpected_name(kit, folder):
    store(folder, load_tensors(folder) | {"model.layers.0.self_attn.q_proj.weigth": torch.ones(1)})
    refused(
        kit,
        folder,
        r"q_proj\.weigth' that the model has no place for.*Did you mean 'model.layers.0.self_attn.q_proj.weight'",
    )


def test_a_layer_too_many(kit, folder):
    edit_config(folder, "layer_types", num_hidden_layers=2)
    refused(kit, folder, r"'model\.layers\.2\..*no place for")


def test_missing_names(kit, folder):
    tensors = load_tensors(folder)
    del tensors["model.layers.1.self_attn.k_proj.bias"], tensors["lm_head.weight"]
    store(folder, tensors)
    refused(kit, folder, r"lacks 2 of 39 tensors: .*k_proj\.bias.*")


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_wrong_shapes(kit, folder, name):
    tensors = load_tensors(folder)
    for wrong in (tensors[name][:-1], tensors[name][None], tensors[name].flatten()[:1]):
        store(folder, tensors | {name: wrong})
        refused(kit, folder, f"'{name}' has shape .* config.json asks for")


def test_a_name_in_two_shards(kit, folder):
    tensors = load_tensors(folder)
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "more.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors") | {"model.norm.weight": "more.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(kit, folder, r"'model\.norm\.weight' twice")


# Files that are damaged or dangerous


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -1000])
def test_cut_safetensors(kit, folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(kit, folder, "damaged or cut short")


@pytest.mark.parametrize("container", ["safetensors", "bin"])
@pytest.mark.parametrize("way", ["cut", "gone"])
def test_a_file_that_changes_while_it_is_read(folder, container, way):
    """Its tensors are views of the file: to touch what was cut off would end the process."""
    if container == "bin":
        to_bin(folder)
    (path,) = (each for each in folder.iterdir() if each.suffix in {".safetensors", ".bin"} and "model" in each.name)
    tensors = FolderCheckpoint(folder).tensors()
    next(tensors)
    if way == "cut":
        os.truncate(path, 100)
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match="changed while it was read"):
        next(tensors)


def test_safetensors_with_a_huge_header(kit, folder):
    path = folder / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])
    refused(kit, folder, "damaged or cut short")


@pytest.mark.parametrize("keep", [0, 10, 1000, -1, -1000])
def test_cut_pytorch_files(kit, folder, keep):
    to_bin(folder)
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:keep])
    refused(kit, folder, "cannot be read as plain weights")


class Touch:
    """Unpickling this creates a file, if code in pickles is run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("new_format", [True, False])
def test_code_in_a_pickle_is_refused_and_not_run(kit, folder, tmp_path, new_format):
    marker = tmp_path / "marker"
    (folder / "model.safetensors").unlink()
    torch.save(
        {"model.norm.weight": Touch(marker)}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new_format
    )
    refused(kit, folder, "cannot be read as plain weights")
    assert not marker.exists()


@pytest.mark.parametrize("content", [[1, 2], {"model.norm.weight": [1.0]}, {3: torch.ones(2)}, torch.ones(3)])
def test_pickles_of_something_else(kit, folder, content):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    refused(kit, folder, "must hold a dict from names to tensors")


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "sub/part.safetensors", "..", ".", "", "absent.safetensors",
     "config.json", "a\0.safetensors", 5, None, ["model.safetensors"], {}],
)  # fmt: skip
def test_names_of_shards_stay_in_the_folder(kit, folder, name):
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / "sub").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "sub" / "part.safetensors")
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(kit, folder, "names the shard .* plain name of a file in the same folder")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", "nonsense"])
def test_a_useless_index(kit, folder, content):
    (folder / "model.safetensors.index.json").write_text(content)
    refused(kit, folder, "index.json (has no weight_map|cannot be read as JSON|holds a list)")


def test_python_in_the_folder_is_never_run(kit, folder, reference, tmp_path):
    marker = tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w').close()\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "__init__.py", "conftest.py", "tokenization_evil.py"):
        (folder / name).write_text(code)
    auto_map = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    edit_config(folder, auto_map=auto_map, custom_pipelines={"x": {"impl": "modeling_evil.Evil"}})
    check(kit, folder, reference)
    with open_llm(folder, dtype="float32", trust_remote_code=True) as llm:
        assert llm.generate([TOKENS], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
    assert not marker.exists()


# Configurations


def test_a_folder_without_a_configuration(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="has no config.json"):
        open_llm(folder)


@pytest.mark.parametrize("content", ["", "{", "nonsense", "[" * 100_000, "\xff\xfe"])
def test_a_configuration_that_is_no_json(folder, content):
    (folder / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match="config.json cannot be read as JSON"):
        open_llm(folder)


@pytest.mark.parametrize("content", ["[]", "5", '"text"', "null"])
def test_a_configuration_that_is_no_object(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        open_llm(folder)


def test_an_unknown_architecture_lists_the_known_ones(folder):
    edit_config(folder, architectures=["Qwen3ForCausalLn"])
    with pytest.raises(CheckpointError) as caught:
        open_llm(folder)
    assert all(name in str(caught.value) for name in MODELS)
    assert "Did you mean 'Qwen3ForCausalLM'?" in str(caught.value)


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [5], {}])
def test_no_architecture(folder, architectures):
    edit_config(folder, architectures=architectures)
    with pytest.raises(CheckpointError, match="names no architecture"):
        open_llm(folder)


COUNTS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "max_position_embeddings", "head_dim"]  # fmt: skip


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [64]])
@pytest.mark.parametrize("name", COUNTS)
def test_sizes_that_are_none(folder, name, value):
    edit_config(folder, **{name: value})
    with pytest.raises(CheckpointError, match=f"{name}: .*whole number from 1 to"):
        open_llm(folder)


CONTRADICTIONS = {
    "heads": (dict(num_attention_heads=5, num_key_value_heads=2), "5 attention heads do not divide into 2"),
    "more key heads": (dict(num_key_value_heads=8), "4 attention heads do not divide into 8"),
    "hidden": (dict(hidden_size=50), "hidden_size 50 does not divide into 4 heads"),
    "layers": (
        dict(layer_types=["full_attention"] * 2, use_sliding_window=True, sliding_window=4),
        "2 entries for 3 layers",
    ),
    "window": (dict(sliding_window=0, use_sliding_window=True), "sliding_window is 0"),
    "activation": (dict(hidden_act="relu"), "hidden_act is 'relu'; known are gelu"),
    "end": (dict(eos_token_id="</s>"), "eos_token_id is '</s>'"),
    "rope": (dict(rope_parameters={"rope_type": "longrope"}), "rope type is 'longrope'; known are default"),
    "old rope": (dict(rope_parameters=None, rope_scaling={"type": "su"}), "rope type is 'su'; known are"),
    "no factor": (dict(rope_parameters={"rope_type": "linear"}), "rope type 'linear' needs 'factor'"),
    "no low": (dict(rope_parameters={"rope_type": "llama3", "factor": 2.0}), "rope type 'llama3' needs"),
    "factor": (dict(rope_parameters={"rope_type": "linear", "factor": "x"}), "rope_scaling is .*'x'"),
    "infinite": (dict(rope_parameters={"rope_type": "dynamic", "factor": 1e999}), "rope_scaling is .*inf"),
    "low": (
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                factor=2.0,
                low_freq_factor="x",
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        ),
        "rope_scaling is .*'x'",
    ),
    "zero": (dict(rope_parameters={"rope_type": "yarn", "factor": 0.0}), "yarn"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_configurations_that_contradict_themselves(folder, name):
    changes, match = CONTRADICTIONS[name]
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=match):
        open_llm(folder)


# The map from names to parameters


@pytest.mark.parametrize("architecture", MODELS)
def test_every_row_of_every_parameter_has_one_place(architecture):
    raw = dict(
        architectures=[architecture], hidden_size=32, intermediate_size=40, num_attention_heads=4, vocab_size=33,
        num_key_value_heads=2, num_hidden_layers=2, attention_bias=True, mlp_bias=True, head_dim=6,
    )  # fmt: skip
    model = build_model(ModelConfig.from_dict(raw), 64, torch.float32, torch.device("cpu"))
    counts = {name: torch.zeros(parameter.shape[0]) for name, parameter in model.named_parameters()}
    paths = {module: path for path, module in model.named_modules()}
    for place in parameter_places(model).values():
        assert place.shape[0] == place.stop - place.start
        counts[f"{paths[place.module]}.{place.kind}"][place.start : place.stop] += 1
    for name, count in counts.items():
        assert torch.equal(count, torch.ones_like(count)), name
