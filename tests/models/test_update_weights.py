"""New weights in a running engine: afterwards it answers as one that was opened with them."""

import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, CheckpointError, EngineError, SamplingParams
from nanovllm.ops.linear import fbgemm, few_rows, prepare
from nanovllm.ops.linear.product import Product

FAMILIES = {
    "llama": ("LlamaConfig", dict(attention_bias=True)),
    "llama-tied": ("LlamaConfig", dict(tie_word_embeddings=True)),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", dict(head_dim=12, tie_word_embeddings=True)),
    "gemma3": ("Gemma3TextConfig", dict(head_dim=12, sliding_window=9)),
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [100, 101, 102, 103, 104, 105, 106, 107, 1], [9] * 20]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
OPTIONS = dict(skip_tokenizer_init=True, use_tqdm_on_load=False, num_gpu_blocks_override=64, block_size=4, device="cpu")


@pytest.fixture(scope="module")
def models(kit, tmp_path_factory):
    """Folders of two models of each family, made when they are first asked for."""
    made = {}

    def both(family):
        if family not in made:
            name, changes = FAMILIES[family]
            folders = [tmp_path_factory.mktemp(f"{family}-{seed}") for seed in (1, 2)]
            for seed, folder in enumerate(folders, 1):
                kit.make_reference(name, seed=seed, **changes).save_pretrained(folder)
            made[family] = folders
        return made[family]

    return both


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


class Near(list):
    """Numbers that are equal to within 1e-5."""

    def __eq__(self, other):
        return list(self) == pytest.approx(list(other), abs=1e-5)


def answers(llm):
    """Tokens, and the log-probability of each: its last bits depend on where the blocks lie, 1e-5 is a hundred times
    that. Weights rounded to float16 differ from the others by 1e-3."""
    assert llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    numbers = [next(iter(entry.values())).logprob for output in outputs for entry in output.outputs[0].logprobs]
    return [output.token_ids for output in outputs], Near(numbers)


def opened(folder, **options):
    with LLM(folder, **OPTIONS, **options) as llm:
        return answers(llm)


each_family = pytest.mark.parametrize("family", FAMILIES)
HELD = [dict(dtype="float32"), dict(dtype="float16"), dict(dtype="bfloat16")]


@each_family
@pytest.mark.parametrize("held", HELD, ids=lambda held: held["dtype"])
def test_afterwards_it_answers_as_one_opened_with_them(models, family, held) -> None:
    """And back again. Weights held in float16 are written from float32, not from what was rounded."""
    first, second = models(family)
    with LLM(first, **OPTIONS, **held) as llm:
        before = answers(llm)
        llm.update_weights(tensors_of(second).items())
        after = answers(llm)
        assert after == opened(second, **held) and after != before
        llm.update_weights(reversed(tensors_of(first).items()))
        assert answers(llm) == before


@each_family
@pytest.mark.parametrize("held", HELD[:2], ids=lambda held: held["dtype"])
@pytest.mark.parametrize(
    "only", ["q_proj.weight", "up_proj.weight", "embed_tokens.weight", "norm.weight", "lm_head.weight"]
)
def test_what_is_not_named_keeps_its_values(models, family, held, only, tmp_path) -> None:
    first, second = models(family)
    new = {name: tensor for name, tensor in tensors_of(second).items() if name.endswith(only)}
    mixed = tensors_of(first) | new
    save_file(mixed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((first / "config.json").read_text())
    with LLM(first, **OPTIONS, **held) as llm:
        llm.update_weights(new.items())
        assert answers(llm) == opened(tmp_path, **held)


def test_what_a_trainer_has_will_do(models, kit) -> None:
    """Parameters that require gradients, in another type, the tied head named a second time."""
    first, second = models("llama-tied")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(second).double()
    with LLM(first, **OPTIONS, dtype="float32") as llm:
        llm.update_weights(model.named_parameters())
        expected = opened(second, dtype="float32")
        assert answers(llm) == expected
        assert "lm_head.weight" in model.state_dict()
        llm.update_weights(model.state_dict())
        assert answers(llm) == expected
        places = llm._built.model.places.values()
        kept = [getattr(place.module, place.kind) for place in places]
        assert not any(each.requires_grad for each in kept if each is not None)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t | {"model.layers.0.self_attn.q_prj.weight": torch.ones(2)}, "q_prj.*Did you mean"),
        (lambda t: t | {"model.norm.weight": torch.ones(5)}, r"shape \[5\].*\[48\]"),
        (lambda t: t | {"model.layers.1.self_attn.k_proj.weight": torch.ones(48, 48)}, r"\[48, 48\].*\[24, 48\]"),
        (lambda t: t | {"model.norm.weight": torch.ones(48, dtype=torch.int64)}, "holds torch.int64.*floating"),
        (lambda t: t | {"model.norm.weight": [1.0] * 48}, "holds list.*tensor"),
    ],
)
def test_a_mistake_is_named_before_anything_changes(models, spoil, message) -> None:
    first, second = models("llama")
    with LLM(first, **OPTIONS, dtype="float32") as llm:
        before = answers(llm)
        with pytest.raises(CheckpointError, match=message):
            llm.update_weights(spoil(tensors_of(second)).items())
        with pytest.raises(CheckpointError, match=r"norm\.weight.*twice"):
            llm.update_weights([*tensors_of(second).items(), ("model.norm.weight", torch.ones(48))])
        assert answers(llm) == before
        llm.update_weights([])
        assert answers(llm) == before


def test_not_under_requests_nor_pins(models) -> None:
    first, second = models("llama")
    new = tensors_of(second)
    with LLM(first, **OPTIONS, dtype="float32") as llm:
        pin = llm.cache_prefix(PROMPTS[0])
        with pytest.raises(EngineError, match="unpin"):
            llm.update_weights(new.items())
        pin.unpin()
        stream = llm.stream(PROMPTS, GREEDY)
        next(stream)
        with pytest.raises(EngineError, match="abort"):
            llm.update_weights(new.items())
        stream.close()
        waiting = llm.llm_engine.add_request(None, PROMPTS[0], GREEDY)
        with pytest.raises(EngineError, match="abort"):
            llm.update_weights(new.items())
        llm.llm_engine.abort(waiting.request_id)
        llm.update_weights(new.items())
        assert answers(llm) == opened(second, dtype="float32")
    with pytest.raises(EngineError, match="closed"):
        llm.update_weights(new.items())


def test_the_prefix_cache_forgets_what_the_old_weights_computed(models) -> None:
    first, second = models("llama")
    with LLM(first, **OPTIONS, dtype="float32") as llm:
        answers(llm)
        assert len(llm.llm_engine.scheduler.blocks._cached) > 0
        llm.update_weights(tensors_of(second).items())
        assert len(llm.llm_engine.scheduler.blocks._cached) == 0
        tokens = [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert tokens == opened(second, dtype="float32")[0]


def test_random_weights_may_be_replaced(models) -> None:
    """As in reinforcement learning: an engine opens without files, and the trainer brings the weights."""
    _, second = models("qwen3")
    with LLM(second, **OPTIONS, dtype="float32", load_format="dummy") as llm:
        llm.update_weights(tensors_of(second).items())
        assert answers(llm) == opened(second, dtype="float32")


@pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_a_product_gives_its_parameters_back(storage, with_bias) -> None:
    """To the bit that it holds: packing is no rounding but to the type that was asked for."""
    dtype = torch.bfloat16 if storage is torch.bfloat16 else torch.float32
    weight, bias = torch.randn(37, 50).to(dtype), torch.randn(37).to(dtype) if with_bias else None
    found, also = prepare(weight, bias, storage).parameters()
    held = weight.to(storage) if storage is not torch.float16 or fbgemm.available() else weight
    assert found.dtype is dtype and torch.equal(found, held.to(dtype))
    assert also is bias or torch.equal(also, bias)


def test_on_a_gpu_the_memory_stays_the_same(monkeypatch) -> None:
    """Recorded graphs read it; and no product refers to itself, or it would outlive its engine."""
    monkeypatch.setattr(few_rows, "kernels_run_on", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    weight, bias = torch.randn(8, 16), torch.randn(8)
    product: Product = few_rows.FewRows(weight, bias)
    assert product.parameters()[0].data_ptr() == weight.data_ptr() and product.parameters()[1] is bias
    gone = weakref.ref(product)
    del product
    assert gone() is None
