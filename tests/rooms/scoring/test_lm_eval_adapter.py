"""The model of lm-evaluation-harness in examples/: with a stand-in for the harness's base class, and with itself.

The harness brings a hundred packages, so it is no part of the development tools: where it is installed
(``pip install "lm_eval[hf]"``), its tasks must have the results of its own model class on transformers.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanovllm import LLM, RequestError, SamplingParams

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # transformers and the harness have warnings of their own

HERE = Path(__file__).parent
ADAPTER = HERE.parents[2] / "examples" / "lm_eval_adapter.py"
LONGEST = 96


class Base:
    """What the adapter needs of ``lm_eval.api.model.LM``."""

    def __init__(self):
        self.cached = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *entry: self.cached.append(entry))


def load_adapter():
    spec = importlib.util.spec_from_file_location("lm_eval_adapter", ADAPTER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def adapter(monkeypatch):
    stand_in = ModuleType("lm_eval.api.model")
    stand_in.LM = Base
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", stand_in)
    return load_adapter()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama whose bytes are its tokens but for some pairs, as transformers writes it."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("e", "r"), ("i", "n"), ("Ġ", "a"), ("o", "n"), ("w", "a"), ("Ġ", "f"), ("Ġ", "t")]
    words = [*alphabet, *map("".join, pairs)]
    backend = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(folder)
    end = backend.token_to_id("<|end|>")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=end + 1, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, eos_token_id=end, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, dtype="float32", max_model_len=LONGEST + 2, use_tqdm_on_load=False, block_size=8) as llm:
        yield llm


def requests(*arguments):
    return [SimpleNamespace(args=each) for each in arguments]


def forced(llm, tokens, start):
    """The sum of the log-probabilities of ``tokens[start:]``."""
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    entries = llm.generate([tokens], asked, use_tqdm=False)[0].prompt_logprobs
    return sum(entry[token].logprob for entry, token in list(zip(entries, tokens, strict=True))[start:])


def test_continuations(adapter, llm):
    model = adapter.NanoLM(llm)
    encode = llm.get_tokenizer().encode
    end = model.prefix_token_id
    long = "word after " * 40 + "word"
    given = [("The sky is", " blue"), ("The sky is ", "a"), ("", "in"), (long, "on"), ("x", "er"), ("", "<|end|>a")]
    found = model.loglikelihood(requests(*given), disable_tqdm=True)
    whole = [encode("".join(pair)) for pair in given]
    expected = [
        (whole[0], len(encode("The sky is"))), (whole[1], len(encode("The sky is"))), ([end, *whole[2]], 1),
        (whole[3][-LONGEST - 1 :], LONGEST), (whole[4], 1), (whole[5], 1),
    ]  # fmt: skip
    assert encode(" a") == whole[1][len(encode("The sky is")) :], "one token across the border"
    for (value, _), (tokens, start) in zip(found, expected, strict=True):
        assert value == pytest.approx(forced(llm, tokens, start), abs=1e-4)
    assert [entry[:2] for entry in model.cached] == [("loglikelihood", pair) for pair in given]
    (greedy,) = llm.generate("The sky is", SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)
    pair = ("The sky is", greedy.text)
    if encode("".join(pair))[-len(greedy.token_ids) :] == greedy.token_ids:
        assert model.loglikelihood(requests(pair), disable_tqdm=True)[0][1] is True
    with pytest.raises(RequestError, match="must be at most 97 tokens long"):
        model.loglikelihood(requests(("a", "bc" * 60)), disable_tqdm=True)


@pytest.mark.parametrize("length", [1, LONGEST - 1, LONGEST, LONGEST + 1, 3 * LONGEST + 5])
def test_texts_of_any_length_are_scored_once_with_as_much_context_as_fits(adapter, llm, length):
    model = adapter.NanoLM(llm)
    tokens = [(7 * place) % 250 for place in range(length)]
    windows = list(model._windows(tokens))
    assert [token for _, more in windows for token in more] == tokens
    for place, (context, more) in enumerate(windows):
        assert len(context) + len(more) == LONGEST + 1 or (place == 0 and length < LONGEST)
        assert context == [model.prefix_token_id] if place == 0 else len(context) >= 1
    text = "ab cd " * (length // 6 + 1)
    (found,) = model.loglikelihood_rolling(requests((text,)), disable_tqdm=True)
    cut = list(model._windows(llm.get_tokenizer().encode(text)))
    assert found == pytest.approx(sum(forced(llm, one + other, len(one)) for one, other in cut), abs=1e-3)


def test_generation_options(adapter, llm):
    model = adapter.NanoLM(llm)
    plain = SamplingParams(temperature=0.0, max_tokens=12)
    (expected,) = llm.generate("The sky is", plain, use_tqdm=False)
    stop = expected.text[4]
    given = [
        ("The sky is", {"max_gen_toks": 12}),
        ("The sky is", {"max_gen_toks": 12, "until": [stop]}),
        ("The sky is", {"max_new_tokens": 5, "do_sample": False, "temperature": 0.7, "until": stop + "never"}),
        ("long " * 60, {"max_gen_toks": 4}),
    ]
    found = model.generate_until(requests(*given), disable_tqdm=True)
    assert found[0] == expected.text and found[1] == expected.text.partition(stop)[0]
    assert expected.text.startswith(found[2].rstrip("\ufffd"))
    assert (
        adapter.sampling_params({}).max_tokens == 256
        and adapter.sampling_params({"temperature": 0.5}).temperature == 0.5
    )
    with pytest.raises(ValueError, match="no option 'beams'"):
        adapter.sampling_params({"beams": 3})


TASKS = {
    "choices": dict(output_type="multiple_choice", doc_to_text="{{question}}", doc_to_choice="choices",
                    doc_to_target="answer",
                    metric_list=[{"metric": name, "aggregation": "mean"} for name in ("acc", "acc_norm")]),
    "rolling": dict(output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
                    metric_list=[{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}]),
    "generation": dict(output_type="generate_until", doc_to_text="Say: {{text}}", doc_to_target="{{text}}",
                       generation_kwargs={"until": ["a", "\n"], "max_gen_toks": 12, "do_sample": False},
                       metric_list=[{"metric": "exact_match"}]),
}  # fmt: skip


@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="lm_eval is not installed")
def test_tasks_have_the_results_of_the_harness_on_transformers(folder, llm, tmp_path):
    """Every score of every document, and what is made of them."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(HERE / "questions.jsonl")}}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test", **data, **task}))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1, max_length=LONGEST)
    runs = []
    for model in (load_adapter().NanoLM(llm), theirs):
        found = simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
        samples = {
            name: [document["filtered_resps"] for document in sorted(each, key=lambda one: one["doc_id"])]
            for name, each in found["samples"].items()
        }
        runs.append((samples, found["results"]))
    (ours, our_results), (others, their_results) = runs
    assert ours["generation"] == others["generation"] and len(ours["choices"]) == 5
    for one, other in zip(ours["choices"], others["choices"], strict=True):
        assert [greedy for _, greedy in one] == [greedy for _, greedy in other]
        assert [value for value, _ in one] == pytest.approx([value for value, _ in other], abs=1e-3)
    for one, other in zip(ours["rolling"], others["rolling"], strict=True):
        assert one == pytest.approx(other, abs=1e-2)
    for name in TASKS:
        numbers = {key: value for key, value in their_results[name].items() if isinstance(value, float)}
        assert numbers == pytest.approx({key: our_results[name][key] for key in numbers}, rel=1e-4)
