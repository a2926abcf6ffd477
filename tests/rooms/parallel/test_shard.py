"""A model cut into ranks computes what the whole one does, and reads no more than its part."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from nanovllm.batch import Drawn, build_batch
from nanovllm.checkpoint import open_checkpoint
from nanovllm.config import ModelConfig
from nanovllm.errors import ConfigError
from nanovllm.kv_cache import KVCache
from nanovllm.loader import build_model, load_weights
from nanovllm.ops.attention import find_backend
from nanovllm.parallel.shard import first_kv_head, shard, share
from nanovllm.request import Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import SchedulerOutput, Span

CPU = torch.device("cpu")


def load(folder, communicator=None, tensors=None):
    checkpoint = open_checkpoint(str(folder))
    whole = ModelConfig.from_dict(checkpoint.config)
    config = whole if communicator is None else share(whole, communicator.size)
    model = build_model(config, 64, torch.float32, CPU)
    if communicator is not None:
        shard(model, whole, communicator, 64)
    load_weights(model, checkpoint.tensors() if tensors is None else tensors(checkpoint), CPU, torch.float32)
    return model, config


def logits(folder, token_ids, communicator=None):
    """The logits after each token, computed in two pieces."""
    model, config = load(folder, communicator)
    cache = KVCache.allocate(config, 6, 8, torch.float32, CPU)
    request = Request(request_id="", prompt_token_ids=token_ids, params=SamplingParams(), max_tokens=1, arrival=0)
    request.block_ids = random.Random(0).sample(range(6), -(-len(token_ids) // 8))
    rows = []
    with torch.inference_mode():
        for start, stop in ((0, 5), (5, len(token_ids))):
            output = SchedulerOutput((Span(request, start, stop, True),))
            rows.append(
                model.logits(
                    model(build_batch(output, 8, find_backend("auto", "cpu"), Drawn(1, CPU), all_hidden=True), cache)
                )
            )
    return torch.cat(rows)


CASES = [(name, 2) for name in ("llama", "qwen2", "qwen3", "gemma3", "wide")]
CASES += [("llama", 4), ("qwen2", 4), ("gemma3", 4), ("wide", 8)]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_ranks_together_are_the_model(folders, kit, name, size):
    vocab = {**kit.sizes, **kit.models[name]}["vocab_size"]
    token_ids = [random.Random(1).randrange(vocab) for _ in range(19)] + [0, vocab - 1]
    expected = logits(folders[name], token_ids)
    found = kit.on_ranks(size, lambda rank: logits(folders[name], token_ids, rank))
    assert expected.shape == (21, vocab) and expected.std() > 0.1
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=2e-5)
        assert torch.equal(each, found[0]), "ranks draw from the same bits"


def test_padding_is_zero(folders, kit):
    """A weight that is not finite would be held in float32 on a CPU, whatever is asked for."""
    tables = kit.on_ranks(2, lambda rank: load(folders["qwen3"], rank)[0].model.embed_tokens.table())
    assert not tables[1][-1].any() and all(table.isfinite().all() for table in tables)


def test_a_layer_sums_once_and_the_head_gathers_once(folders, kit):
    def calls(rank):
        logits(folders["llama"], list(range(10)), rank)
        return rank.calls

    per_step = 1 + 2 * kit.sizes["num_hidden_layers"] + 1
    assert kit.on_ranks(2, calls) == [2 * per_step] * 2


def test_a_rank_takes_its_part_of_each_tensor(folders, kit, monkeypatch):
    """All parts together are each tensor once, but for what all ranks hold."""
    taken = []
    plain = torch.Tensor.copy_

    def copy(self, source, *rest):
        taken[-1] += source.numel()
        return plain(self, source, *rest)

    folder = folders["llama"]
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        shapes = {name: file.get_slice(name).get_shape() for name in names}
    everywhere = sum(
        torch.Size(s).numel() for n, s in shapes.items() if "norm" in n or re.search("(o|down)_proj.bias", n)
    )
    total = sum(torch.Size(shape).numel() for shape in shapes.values())

    class Still:
        size = 2

        def __init__(self, rank):
            self.rank = rank

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    for rank in (0, 1):
        taken.append(0)
        monkeypatch.setattr("nanovllm.loader._prepare", lambda *_: None)
        load(folder, Still(rank))
    assert sum(taken) == total + everywhere and min(taken) > 0.45 * total


def test_tensors_of_a_file_are_mapped_not_read(folders):
    """So the part that is not taken is never brought into memory."""
    tensor = dict(open_checkpoint(str(folders["llama"])).tensors())["model.layers.0.mlp.down_proj.weight"]
    address = tensor.data_ptr()
    spans = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (found,) = [s for s in spans if int(s[0].split("-")[0], 16) <= address < int(s[0].split("-")[1], 16)]
    assert found[-1].endswith("model.safetensors")


CONFIG = ModelConfig.from_dict(
    dict(architectures=["LlamaForCausalLM"], vocab_size=10, hidden_size=48, intermediate_size=96, num_hidden_layers=1,
         num_attention_heads=12, num_key_value_heads=4, head_dim=4)
)  # fmt: skip


@pytest.mark.parametrize(
    ("size", "rule"),
    [(5, "12 attention heads"), (6, "4 key-value heads"), (3, "4 key-value heads"), (24, "12 attention heads")],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(size, rule):
    with pytest.raises(
        ConfigError, match=f"tensor_parallel_size is {size}; it must divide .*{rule}.*: 1, 2, 4, 12"
    ) as e:
        share(CONFIG, size)
    assert (e.value.parameter, e.value.value) == ("tensor_parallel_size", size)


def test_channels_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="98 channels of the MLP. Sizes for this model: 1, 2"):
        share(replace(CONFIG, intermediate_size=98), 4)


def test_the_vocabulary_is_padded_and_few_key_value_heads_are_shared():
    cut = share(CONFIG, 12)
    assert (cut.num_heads, cut.num_kv_heads, cut.intermediate_size, cut.vocab_size) == (1, 1, 8, 1)
    assert [first_kv_head(CONFIG, rank, 12) for rank in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [first_kv_head(CONFIG, rank, 2) for rank in range(2)] == [0, 2]


def test_a_tensor_of_another_shape_is_refused_with_the_whole_shape(folders, kit):
    def tensors(checkpoint):
        for name, tensor in checkpoint.tensors():
            yield name, tensor[:32] if name.endswith("layers.1.self_attn.q_proj.weight") else tensor

    with pytest.raises(ValueError, match=re.escape("has shape [32, 48]; config.json asks for [64, 48]")):
        kit.on_ranks(2, lambda rank: load(folders["llama"], rank, tensors))
