"""``compile=True``: the same answers, everything compiled before the first step, and who is told why not."""

import json
import os
import shutil
import weakref

import pytest
import torch
from safetensors.torch import save_file

from nanovllm import LLM, SamplingParams, compiled
from nanovllm.cli.gate import gate
from nanovllm.compiled import CompiledProduct, Functions, surrounded
from nanovllm.config import ModelConfig
from nanovllm.errors import ConfigError
from nanovllm.layers.linear import Linear
from nanovllm.loader import build_model, parameter_places
from nanovllm.ops.linear import reference

MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 256,
    "tie_word_embeddings": True, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX") or "g++") is None, reason="no C++ compiler: apt install g++"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(MODEL))
    model = build_model(ModelConfig.from_dict(MODEL), 8, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, place in parameter_places(model).items():
        tensors[name] = torch.randn(place.shape, generator=generator) * 0.1 + ("norm" in name)
    save_file(tensors, made / "model.safetensors")
    return made


def open_llm(folder, **options):
    defaults = dict(device="cpu", dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False,
                    num_gpu_blocks_override=64, block_size=16)  # fmt: skip
    return LLM(folder, **defaults | options)


def answers(llm):
    """Tokens and log-probabilities of requests that end one after the other, prompts in pieces."""
    prompts = [list(range(1, length)) for length in (2, 40, 20, 6)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=3) for n in (20, 4, 9, 13)]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    logprobs = [entry.logprob for each in outputs for place in each.logprobs for entry in place.values()]
    return [each.token_ids for each in outputs], torch.tensor(logprobs)


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_one_layer_that_keeps_fewer_rows_than_it_gets(tmp_path):
    """The last layer's products have as many rows as draw, another number than those of the layers before."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 1}))
    with (
        open_llm(tmp_path, max_num_batched_tokens=24, compile=True, load_format="dummy") as llm,
        torch.compiler.set_stance("fail_on_recompile"),
    ):
        tokens, _ = answers(llm)
    assert list(map(len, tokens)) == [20, 4, 9, 13]


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # PyTorch's compiler has some
def test_answers_are_the_same_and_nothing_is_compiled_in_a_step(folder):
    with open_llm(folder, max_num_batched_tokens=24) as llm:
        tokens, logprobs = answers(llm)
    with open_llm(folder, max_num_batched_tokens=24, compile=True) as llm:
        layers = [each for each in llm.llm_engine._runner.model.modules() if isinstance(each, Linear)]
        assert len(layers) == 12 and all(isinstance(layer._product, CompiledProduct) for layer in layers)
        with torch.compiler.set_stance("fail_on_recompile"):
            found, compiled_logprobs = answers(llm)
        weights = [weakref.ref(layer._product._weight) for layer in layers]
        del layers
    assert not any(weight() is not None for weight in weights), "what is compiled keeps the weights of a closed engine"
    assert found == tokens
    torch.testing.assert_close(compiled_logprobs, logprobs, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_parts_are_recorded_in_graphs(folder, dtype):
    own = dict(device="cuda", dtype=dtype)
    with open_llm(folder, **own) as llm:
        tokens, logprobs = answers(llm)
    before = torch.cuda.memory_allocated()
    with open_llm(folder, **own, compile=True) as llm:
        with torch.compiler.set_stance("fail_on_recompile"):
            found, compiled_logprobs = answers(llm)
            again, _ = answers(llm)
        assert llm.llm_engine._runner._graphs._recorded, "decodes went without graphs"
    assert again == found
    if dtype == "float32":
        assert found == tokens
        torch.testing.assert_close(compiled_logprobs, logprobs, rtol=0, atol=1e-4)
    assert compiled_logprobs.isfinite().all()
    del llm
    assert torch.cuda.memory_allocated() <= before, "memory is not given back"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_gate_of_the_bench_compares_it_with_our_own_kernels():
    assert gate({"compile": True})[2:] == ["graphs on = graphs off"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("added", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_pytorch_tanh"])
def test_what_is_compiled_means_the_reference(dtype, added, activation):
    x, gain, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((5, 16), (16,), (24, 16), (24,)))
    residual = torch.randn_like(x) if added else None
    if activation is None:
        expected = reference.norm_linear(x, residual, gain, 1e-5, weight, bias)
    else:
        expected = reference.norm_gated(x, residual, gain, 1e-5, weight, bias, activation)
    found = surrounded(x, residual, gain, 1e-5, weight, bias, activation)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_shapes_have_functions_of_their_own(monkeypatch):
    """Or the compiler would count the shapes of all layers and engines as one function's, and give up after eight."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    functions = Functions()
    made = [functions.find(torch.empty(size, 8), None, kind) for size in (4, 6) for kind in (None, "silu")]
    assert len({function.__code__ for function in made}) == 4
    assert functions.find(torch.empty(4, 8), None, "silu") is made[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"enforce_eager": True}, "False with enforce_eager=True"), ({"deterministic": True}, "with deterministic=True")],
    ids=str,
)
def test_contradictions_are_refused(folder, options, words):
    with pytest.raises(ConfigError, match=f"compile is True; it must be {words}".replace("be with", "be .*with")) as it:
        open_llm(folder, compile=True, **options)
    assert (it.value.parameter, it.value.value) == ("compile", True)


def test_without_a_compiler_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"a C\+\+ compiler on a CPU, and 'no-such-compiler' is not.*apt install g"):
        open_llm(folder, compile=True)


def test_a_compiler_that_fails_is_a_configuration_error(folder, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Python.h: No such file\nand more")

    monkeypatch.setattr(compiled.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch, "compile", lambda function, **how: fail)
    with pytest.raises(
        ConfigError, match=r"compiler fails here \(RuntimeError: Python.h: No such file and more\).*python3-dev"
    ):
        open_llm(folder, compile=True)
