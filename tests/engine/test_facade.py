"""The public class: forms of prompts, refusals, interruption, streaming, endings, and memory given back."""

import gc
import json
import shutil
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import sample_seed
from nanovllm.errors import CheckpointError, ConfigError, EngineError, RequestError, UnknownOptionError
from nanovllm.tokenizer import Tokenizer, TokenizerParts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[72, 101, 108], [5], [9] * 17, [1, 2, 3, 4, 5, 6, 7, 8]]


def run(llm, prompts, params=GREEDY, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


def joined(pieces):
    return [token for piece in pieces for token in piece.token_ids]


# Prompts


def test_results_come_in_the_order_of_the_prompts(open_llm):
    llm = open_llm()
    expected = [run(llm, prompt)[0].token_ids for prompt in PROMPTS]
    lengths = [12, 3, 7, 1]
    outputs = run(llm, PROMPTS, [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths])
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert tokens_of(outputs) == [tokens[:n] for tokens, n in zip(expected, lengths, strict=True)]


@pytest.mark.parametrize("number", [2, 5, 33])
def test_equal_prompts_in_one_call(open_llm, number):
    llm = open_llm()
    (one,) = run(llm, PROMPTS[2])
    assert tokens_of(run(llm, PROMPTS[2:3] * number)) == [one.token_ids] * number
    cold = open_llm(enable_prefix_caching=False)
    assert tokens_of(run(cold, PROMPTS[2:3] * number)) == [one.token_ids] * number


def test_no_prompts(open_llm):
    llm = open_llm()
    assert run(llm, []) == []
    assert run(llm, [], []) == []
    assert list(llm.stream([])) == []


def test_the_tokenizer_names_ends_and_single_tokens_as_transformers_does(open_llm):
    tokenizer = open_llm().get_tokenizer()
    assert tokenizer.eos_token_id == (tokenizer.eos_token_ids or (None,))[0]
    token = tokenizer.encode("a")[-1]
    assert tokenizer.convert_tokens_to_ids(tokenizer.backend.id_to_token(token)) == token
    assert tokenizer.convert_tokens_to_ids("no such token") is None
    parts = TokenizerParts(backend=tokenizer.backend, eos_token_ids=(7, 5))
    assert (Tokenizer(parts).eos_token_id, Tokenizer(replace(parts, eos_token_ids=())).eos_token_id) == (7, None)


def test_every_form_of_a_prompt(open_llm):
    llm = open_llm()
    ids = llm.get_tokenizer().encode("Héllo")
    forms = [
        "Héllo",
        ids,
        tuple(ids),
        {"prompt": "Héllo"},
        {"prompt_token_ids": ids},
        {"prompt": "x", "prompt_token_ids": ids},
    ]
    singly = [run(llm, form)[0] for form in forms]
    together = run(llm, [*forms])
    for output, again in zip(singly, together, strict=True):
        assert output.prompt_token_ids == again.prompt_token_ids == ids
        assert output.token_ids == again.token_ids == singly[0].token_ids
        assert output.text == again.text == singly[0].text
    assert [output.prompt for output in together] == ["Héllo", None, None, "Héllo", None, "x"]


@pytest.mark.parametrize(
    "bad", [None, 5, 3.5, {"text": "x"}, {"prompt": 5}, {}, b"bytes", [b"bytes"], [None], {"prompt": "a", "x": 1}]
)
def test_what_is_no_prompt_is_refused(open_llm, tiny, bad):
    llm = open_llm()
    with pytest.raises((RequestError, TypeError)):
        run(llm, bad)
    tiny.assert_idle(llm)
    assert run(llm, PROMPTS[0])[0].finished


@pytest.mark.parametrize("bad", [None, {"promt": "x"}, {"prompt": "x", "cache_salt": 3}, b"x", 0.5])
def test_what_is_no_prompt_among_others_is_named_by_its_place_too(open_llm, tiny, bad):
    llm = open_llm()
    with pytest.raises(RequestError, match="^prompt 2 of 4: a prompt is .*no other keys") as caught:
        run(llm, [PROMPTS[0], PROMPTS[1], bad, PROMPTS[3]])
    assert caught.value.parameter == "prompts" and caught.value.value == bad
    with pytest.raises(RequestError, match="^a prompt is"):
        run(llm, [bad])
    tiny.assert_idle(llm)


def test_an_array_is_told_how_to_become_a_prompt(open_llm):
    for array in (torch.tensor([1, 2, 3]), [torch.tensor([1, 2, 3])], {"prompt_token_ids": torch.tensor([1])}):
        with pytest.raises(RequestError, match=r"a prompt is .*tensor.*\.tolist\(\)"):
            run(open_llm(), array)


def test_the_progress_bar_may_be_switched_off_in_third_place(open_llm, capsys):
    """As in nano-vllm."""
    llm = open_llm()
    assert tokens_of(llm.generate(PROMPTS[0], GREEDY, False)) == tokens_of(run(llm, PROMPTS[0], GREEDY))
    assert "Processed prompts" not in capsys.readouterr().err


@pytest.mark.parametrize("bad", [[], "", [-1], [259], [10**12], [True], [1, "a"], [1.0], [0] * 256, [0] * 300])
def test_one_bad_prompt_names_its_place_and_harms_no_other(open_llm, tiny, bad):
    llm = open_llm()
    with pytest.raises(RequestError, match="^prompt 2 of 4: ") as caught:
        run(llm, [PROMPTS[0], PROMPTS[1], {"prompt_token_ids": bad} if isinstance(bad, list) else bad, PROMPTS[3]])
    assert caught.value.parameter is not None
    tiny.assert_idle(llm)
    assert tokens_of(run(llm, PROMPTS)) == tokens_of(run(open_llm(), PROMPTS))


def test_a_prompt_that_can_never_fit_the_cache_is_refused(open_llm, tiny):
    llm = open_llm(num_gpu_blocks_override=3)
    assert len(run(llm, [7] * 24)[0].token_ids) == 1
    with pytest.raises(RequestError, match="25 tokens long.*3 blocks of 8"):
        run(llm, [PROMPTS[0], [7] * 25])
    tiny.assert_idle(llm)


def test_priorities_are_refused_where_they_would_be_ignored(open_llm, tiny):
    llm = open_llm()
    with pytest.raises(RequestError, match="prompt 1 of 2: priority is 5; it needs scheduling_policy"):
        run(llm, PROMPTS[:2], GREEDY, priority=[0, 5])
    with pytest.raises(RequestError, match="needs scheduling_policy"):
        next(llm.stream(PROMPTS[0], GREEDY, priority=-1))
    tiny.assert_idle(llm)


@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_a_wrong_number_of_parameters_is_refused(open_llm, tiny, number):
    llm = open_llm()
    with pytest.raises(RequestError, match=f"sampling_params has {number} entries for 4 prompts"):
        run(llm, PROMPTS, [GREEDY] * number)
    with pytest.raises(RequestError, match=f"priority has {number} entries for 4 prompts"):
        run(llm, PROMPTS, GREEDY, priority=[0] * number)
    tiny.assert_idle(llm)


def test_parameters_are_checked_again_when_they_are_used(open_llm, tiny):
    llm, params = open_llm(), SamplingParams()
    params.top_p = float("nan")
    with pytest.raises(RequestError, match="top_p"):
        run(llm, PROMPTS[0], params)
    for wrong in ("greedy", 5, [None]):
        with pytest.raises(RequestError, match="sampling_params"):
            run(llm, PROMPTS[:1], wrong)
    with pytest.raises(RequestError, match="logprobs is 21.*max_logprobs=20"):
        run(llm, PROMPTS[0], SamplingParams(logprobs=21))
    with pytest.raises(RequestError, match="stop_token_ids is 259"):
        run(llm, PROMPTS[0], SamplingParams(stop_token_ids=[259]))
    tiny.assert_idle(llm)


def test_the_caller_may_change_its_objects_afterwards(open_llm):
    llm, prompt = open_llm(), [1, 2, 3]
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    prompt.append(9)
    list(stream)
    assert run(llm, [1, 2, 3])[0].prompt_token_ids == [1, 2, 3]


def test_without_a_tokenizer_ids_go_in_and_out(open_llm):
    llm = open_llm(skip_tokenizer_init=True)
    (output,) = run(llm, PROMPTS[0])
    assert output.token_ids == run(open_llm(), PROMPTS[0])[0].token_ids
    assert output.text == ""
    with pytest.raises(ConfigError, match="no tokenizer"):
        run(llm, "text")
    with pytest.raises(RequestError, match="stop"):
        run(llm, PROMPTS[0], SamplingParams(stop="x"))


# Endings


@pytest.fixture
def natural(open_llm):
    """A prompt and its greedy continuation, in which the third and sixth tokens are new ones."""
    llm = open_llm()
    for first in range(256):
        (output,) = run(llm, [first, 77])
        if len(set(output.token_ids[:6])) == 6:
            return [first, 77], output.token_ids
    raise AssertionError("no lively prompt found")


def test_stop_token_ids(open_llm, natural):
    prompt, tokens = natural
    llm = open_llm()
    for place in (0, 2, 5):
        (output,) = run(llm, prompt, SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[tokens[place]]))
        assert output.token_ids == tokens[: place + 1]
        completion = output.outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[place])
        assert completion.text == llm.get_tokenizer().decode(tokens[:place])


@pytest.fixture
def with_end(folders, tmp_path):
    """Write the llama folder anew, with this token as its end."""

    def write(token: int):
        folder = tmp_path / "with_end"
        shutil.copytree(folders["llama"], folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [token]}))
        return LLM(folder, dtype="float32", use_tqdm_on_load=False, block_size=8, num_gpu_blocks_override=64)

    return write


def test_end_ids_ignore_eos_and_min_tokens(with_end, natural):
    prompt, tokens = natural
    with with_end(tokens[2]) as llm:
        (output,) = run(llm, prompt, SamplingParams(temperature=0.0, max_tokens=12))
        assert output.token_ids == tokens[:3]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
        assert run(llm, prompt)[0].token_ids == tokens  # GREEDY ignores it
        for least in (1, 3, 4, 12):
            (output,) = run(llm, prompt, SamplingParams(temperature=0.0, max_tokens=12, min_tokens=least))
            assert output.token_ids[:2] == tokens[:2]
            assert least <= len(output.token_ids) <= 12
            assert tokens[2] not in output.token_ids[:least] or least <= 2 or output.token_ids.index(tokens[2]) >= least
            if least < 3:
                assert output.token_ids == tokens[:3]
        # a length of 3 with the end id as third token is a stop, not a cut
        (output,) = run(llm, prompt, SamplingParams(temperature=0.0, max_tokens=3))
        assert output.outputs[0].finish_reason == "stop"


def test_min_tokens_bans_stop_token_ids_too(open_llm, natural):
    prompt, tokens = natural
    params = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=5, ignore_eos=True, stop_token_ids=[tokens[1]])
    (output,) = run(open_llm(), prompt, params)
    assert output.token_ids[0] == tokens[0]
    assert tokens[1] not in output.token_ids[:5]
    assert len(output.token_ids) >= 5


def test_stop_strings_cut_the_text(open_llm, natural):
    prompt, _ = natural
    llm = open_llm()
    for seed in range(6):
        whole = run(llm, prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True))[0].text
        stop = whole[7:9]
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True, stop=stop)
        (output,) = run(llm, prompt, params)
        assert output.text == whole[: whole.index(stop)]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        assert "".join(piece.text for piece in llm.stream(prompt, params)) == output.text


def test_max_tokens_none_fills_the_context(open_llm):
    (output,) = run(open_llm(max_model_len=30), [1] * 20, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.token_ids) == 10
    assert output.outputs[0].finish_reason == "length"


# Streaming


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=4), dict(num_gpu_blocks_override=5)], ids=str)
def test_pieces_of_a_stream_make_the_whole(open_llm, options, temperature):
    llm = open_llm(**options)
    params = [
        SamplingParams(temperature=temperature, seed=place, max_tokens=15, ignore_eos=True, logprobs=2)
        for place in range(len(PROMPTS))
    ]
    whole = run(llm, PROMPTS, params)
    pieces = list(llm.stream(PROMPTS, params))
    for place, output in enumerate(whole):
        mine = [piece for piece in pieces if piece.request_id == str(place)]
        assert "".join(piece.text for piece in mine) == output.text
        assert joined(mine) == output.token_ids
        entries = [entry for piece in mine for entry in piece.outputs[0].logprobs]
        for left, right in zip(entries, output.outputs[0].logprobs, strict=True):
            assert next(iter(left)) == next(iter(right))
            assert next(iter(left.values())).logprob == pytest.approx(next(iter(right.values())).logprob, abs=1e-4)
        assert [piece.finished for piece in mine] == [False] * (len(mine) - 1) + [True]
        assert [piece.outputs[0].finish_reason for piece in mine[:-1]] == [None] * (len(mine) - 1)


def test_closing_a_stream_frees_its_blocks(open_llm, tiny):
    llm = open_llm()
    for number in (0, 1, 5):
        stream = llm.stream(PROMPTS, GREEDY)
        assert len(list(islice(stream, number))) == number
        stream.close()
        tiny.assert_idle(llm)
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    assert llm.llm_engine.scheduler.blocks.num_held > 0
    del stream
    tiny.assert_idle(llm)


def test_streams_and_calls_may_be_interleaved(open_llm):
    llm = open_llm()
    expected = tokens_of(run(llm, PROMPTS))
    first, second = llm.stream(PROMPTS[:2], GREEDY), llm.stream(PROMPTS[2], GREEDY)
    pieces = [*islice(first, 5)]
    late = [*islice(second, 2)]
    assert tokens_of(run(llm, PROMPTS[3])) == expected[3:]
    late += second
    pieces += first
    assert joined(late) == expected[2]
    for place in (0, 1):
        assert joined(piece for piece in pieces if piece.request_id == str(place)) == expected[place]


def test_requests_added_below_do_not_get_into_a_call(open_llm):
    """Whoever queues requests at the engine itself must not shorten a call that runs meanwhile."""
    llm = open_llm()
    expected = tokens_of(run(llm, PROMPTS))
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for prompts in (PROMPTS, PROMPTS[:1]):
        llm.llm_engine.add_request("mine", [1, 2], one)
        assert tokens_of(run(llm, prompts)) == expected[: len(prompts)]
        llm.llm_engine.abort("mine")


class Bar:
    """A bar of the caller's own that fails in one of its methods."""

    def __init__(self, fails, **_):
        self.fails = fails
        self("__init__")

    def __call__(self, method):
        if method in self.fails:
            raise ArithmeticError(f"no {method}")

    def set_postfix_str(self, *_, **__):
        self("set_postfix_str")

    def update(self, _):
        self("update")

    def close(self):
        self("close")


@pytest.mark.parametrize("fails", [["__init__"], ["set_postfix_str"], ["update", "close"], ["close"]], ids=str)
def test_a_progress_bar_that_fails_leaves_no_request(open_llm, tiny, fails):
    llm = open_llm()
    expected = tokens_of(run(llm, PROMPTS))
    params = [SamplingParams(temperature=0.0, max_tokens=place, ignore_eos=True) for place in (1, 12, 12, 12)]
    with pytest.raises(ArithmeticError):
        llm.generate(PROMPTS, params, use_tqdm=lambda **options: Bar(fails, **options))
    tiny.assert_idle(llm)
    assert tokens_of(run(llm, PROMPTS)) == expected


def test_chat_and_its_stream(open_llm, tiny):
    llm = open_llm()
    talk = [{"role": "user", "content": "hé"}]
    (output,) = llm.chat(talk, GREEDY, use_tqdm=False)
    text = "<|start|>user:hé\n<|start|>assistant:"
    assert output.prompt == text
    assert output.prompt_token_ids == llm.get_tokenizer().encode(text)
    assert output.prompt_token_ids.count(tiny.start) == 2
    assert tokens_of(llm.chat([talk, talk], GREEDY, use_tqdm=False)) == [output.token_ids] * 2
    assert "".join(piece.text for piece in llm.stream_chat(talk, GREEDY)) == output.text


def test_chat_takes_many_conversations_in_pieces_too(open_llm):
    llm = open_llm(scheduling_policy="priority")
    talks = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in ("a", "b", "c")]
    whole = llm.chat(talks, GREEDY, use_tqdm=False)
    pieces = list(llm.stream_chat(talks, GREEDY, priority=[1, 2, 3]))
    for place, output in enumerate(whole):
        assert joined(piece for piece in pieces if piece.request_id == str(place)) == output.token_ids
    assert llm.chat([], GREEDY) == []


def test_the_bos_token_is_never_doubled(folders, tmp_path):
    """The template writes it, and the tokenizer would add it to plain text."""
    folder = shutil.copytree(folders["llama"], tmp_path / "bos")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|start|>": {"id": "<|start|>", "ids": [257], "tokens": ["<|start|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {"bos_token": "<|start|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(folder, dtype="float32", use_tqdm_on_load=False, num_gpu_blocks_override=64) as llm:
        assert run(llm, "hi")[0].prompt_token_ids.count(257) == 1
        (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
        assert output.prompt == "<|start|>hi" and output.prompt_token_ids.count(257) == 1


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "add_generation_prompt"])
def test_what_the_call_decides_cannot_come_with_the_templates_variables(open_llm, name):
    talk = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match=f"chat has no option '{name}'") as caught:
        open_llm().chat(talk, GREEDY, chat_template_kwargs={name: "x"})
    assert caught.value.parameter == name
    with pytest.raises(RequestError, match="chat has no option 'enable_thinking'"):
        open_llm().chat(talk, GREEDY, enable_thinking=True)


@pytest.mark.parametrize(
    ("wrong", "right"), [("chat_templat", "chat_template"), ("tool", "tools"), ("sampling_param", "sampling_params")]
)
def test_an_option_that_chat_does_not_have_is_refused_with_the_nearest_name(open_llm, wrong, right):
    with pytest.raises(RequestError, match=f"chat has no option '{wrong}'.* Did you mean '{right}'"):
        open_llm().chat([{"role": "user", "content": "x"}], **{wrong: None})


@pytest.mark.parametrize(
    "given", [None, {"role": "user", "content": "hi"}, 5, pytest.param(iter([]), id="iterator"), "hi", [None]]
)
def test_what_is_no_list_of_messages(open_llm, given):
    with pytest.raises(RequestError, match="a conversation is a list of at least one message"):
        open_llm().chat(given)


def test_variables_of_a_template_come_in_a_dict(open_llm):
    with pytest.raises(RequestError, match="chat_template_kwargs is 'x'; it must be a dict"):
        open_llm().chat([{"role": "user", "content": "hi"}], chat_template_kwargs="x")


def test_a_base_model_cannot_chat(folders, tmp_path):
    folder = shutil.copytree(folders["llama"], tmp_path / "base")
    (folder / "tokenizer_config.json").write_text("{}")
    talk = [{"role": "user", "content": "x"}]
    with LLM(folder, dtype="float32", use_tqdm_on_load=False, num_gpu_blocks_override=64) as llm:
        with pytest.raises(RequestError, match="no chat template"):
            llm.chat(talk)
        with pytest.raises(RequestError, match="no chat template"):
            llm.stream_chat(talk)
        assert llm.chat(talk, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}")[0].prompt == "x"


# Failures and interruption


def fail_at(monkeypatch, llm, step: int, error: BaseException) -> None:
    """Let the model runner raise at its ``step``-th step from now, once."""
    runner = llm.llm_engine._runner
    submit, calls = runner.submit, []

    def failing(output):
        calls.append(output)
        if len(calls) == step:
            raise error
        return submit(output)

    monkeypatch.setattr(runner, "submit", failing)


@pytest.mark.parametrize("step", [1, 2, 3, 7])
@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=4), dict(num_gpu_blocks_override=5)], ids=str)
def test_ctrl_c_gives_everything_back(open_llm, tiny, monkeypatch, step, options):
    llm = open_llm(**options)
    fail_at(monkeypatch, llm, step, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(llm, PROMPTS)
    tiny.assert_idle(llm)
    assert tokens_of(run(llm, PROMPTS)) == tokens_of(run(open_llm(), PROMPTS))


def test_ctrl_c_in_a_call_leaves_a_stream_unharmed(open_llm, monkeypatch):
    llm = open_llm()
    expected = run(llm, PROMPTS[0])[0].token_ids
    stream = llm.stream(PROMPTS[0], GREEDY)
    pieces = [next(stream)]
    fail_at(monkeypatch, llm, 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(llm, PROMPTS[1:])
    pieces += stream
    assert joined(pieces) == expected


@pytest.mark.parametrize("step", [1, 4])
def test_a_failed_step_is_an_engine_error_and_the_engine_goes_on(open_llm, tiny, monkeypatch, step):
    llm = open_llm()
    fail_at(monkeypatch, llm, step, RuntimeError("the machine is on fire"))
    with pytest.raises(EngineError, match="RuntimeError: the machine is on fire") as caught:
        run(llm, PROMPTS)
    assert isinstance(caught.value.__cause__, RuntimeError)
    tiny.assert_idle(llm)
    assert tokens_of(run(llm, PROMPTS)) == tokens_of(run(open_llm(), PROMPTS))


@pytest.mark.parametrize("step", [1, 4, 9])
def test_an_engine_error_carries_a_result_for_each_prompt(open_llm, tiny, monkeypatch, step):
    """In the order of the prompts: those that were done, and how far the others came."""
    llm = open_llm(max_num_seqs=3)
    lengths = [12, 3, 7, 12]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    expected = run(open_llm(), PROMPTS, params)
    fail_at(monkeypatch, llm, step, RuntimeError("no memory"))
    with pytest.raises(EngineError, match="no memory") as caught:
        run(llm, PROMPTS, params)
    results = caught.value.outputs
    assert [result.prompt_token_ids for result in results] == PROMPTS
    assert all(result.finished for result in results)
    reasons = [result.outputs[0].finish_reason for result in results]
    assert (
        reasons
        == {
            1: ["error", "error", "error", "abort"],
            4: ["error", "length", "error", "error"],
            9: ["error", "length", "length", "error"],
        }[step]
    )
    for result, whole in zip(results, expected, strict=True):
        assert whole.token_ids[: len(result.token_ids)] == result.token_ids
        assert whole.text.startswith(result.text)
    tiny.assert_idle(llm)


def test_a_step_that_fails_in_a_call_ends_a_stream_that_was_in_it(open_llm, monkeypatch):
    llm = open_llm()
    stream = llm.stream(PROMPTS[0], GREEDY)
    pieces = [next(stream)]
    fail_at(monkeypatch, llm, 2, RuntimeError("no memory"))
    with pytest.raises(EngineError, match="no memory") as caught:
        run(llm, PROMPTS[1:])
    assert [result.prompt_token_ids for result in caught.value.outputs] == PROMPTS[1:]
    pieces += stream
    assert pieces[-1].finished and pieces[-1].outputs[0].finish_reason == "error"
    assert joined(pieces) == run(llm, PROMPTS[0])[0].token_ids[:2]


class Untimely(Exception):
    """What the reader of a stream raises."""


@pytest.mark.parametrize("step", [1, 2, 3, 7])
@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=4), dict(num_gpu_blocks_override=6)], ids=str)
def test_ctrl_c_in_a_stream_of_samples_gives_everything_back(open_llm, tiny, monkeypatch, step, options):
    llm = open_llm(**options)
    params = SamplingParams(n=3, seed=1, max_tokens=12, ignore_eos=True)
    fail_at(monkeypatch, llm, step, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream(PROMPTS, params))
    tiny.assert_idle(llm)
    fail_at(monkeypatch, llm, step, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(llm, PROMPTS, params)
    tiny.assert_idle(llm)
    with pytest.raises(Untimely):
        for _ in llm.stream(PROMPTS, params):
            raise Untimely
    tiny.assert_idle(llm)
    for output, expected in zip(run(llm, PROMPTS, params), run(open_llm(), PROMPTS, params), strict=True):
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected.outputs]


# Samples


@pytest.mark.parametrize("options", [{}, dict(enable_prefix_caching=False), dict(num_gpu_blocks_override=7)], ids=str)
def test_each_sample_is_what_its_seed_gives_alone(open_llm, options):
    llm = open_llm(**options)
    params = SamplingParams(n=4, seed=11, max_tokens=10, logprobs=1)
    outputs = run(llm, PROMPTS, params)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    pieces = list(llm.stream(PROMPTS, params))
    for place, output in enumerate(outputs):
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
        for index, completion in enumerate(output.outputs):
            one = SamplingParams(seed=sample_seed(11, index), max_tokens=10, logprobs=1)
            (alone,) = run(llm, PROMPTS[place], one)
            assert (completion.token_ids, completion.text) == (alone.token_ids, alone.text)
            assert completion.cumulative_logprob == pytest.approx(alone.outputs[0].cumulative_logprob, abs=1e-3)
            mine = [c for piece in pieces if piece.request_id == str(place) for c in piece.outputs if c.index == index]
            assert "".join(c.text for c in mine) == alone.text
            assert [token for c in mine for token in c.token_ids] == alone.token_ids


# Life and death


def test_after_close_everything_is_refused(open_llm):
    llm = open_llm()
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    llm.close()
    llm.close()
    assert "closed" in repr(llm)
    talk = [{"role": "user", "content": "x"}]
    calls = (
        lambda: run(llm, PROMPTS),
        lambda: llm.get_tokenizer(),
        lambda: llm.chat(talk),
        lambda: next(llm.stream(PROMPTS)),
        lambda: llm.cache_prefix([1]),
        lambda: llm.reset_prefix_cache(),
    )
    for call in calls:
        with pytest.raises(EngineError, match="closed"):
            call()
    with pytest.raises(EngineError):
        list(stream)  # what was computed before may still come


def test_two_engines_with_different_blocks_in_one_process(open_llm):
    """A block size kept in a class, as some small engines do, would corrupt one of them."""
    first, second = open_llm(block_size=4), open_llm(block_size=16)
    expected = tokens_of(run(open_llm(), PROMPTS))
    stream = first.stream(PROMPTS[2], GREEDY)
    pieces = [next(stream)]
    assert tokens_of(run(second, PROMPTS)) == expected
    pieces += stream
    assert joined(pieces) == expected[2]
    assert tokens_of(run(first, PROMPTS)) == expected


@pytest.mark.parametrize("way", ["del", "close", "with"])
def test_memory_goes_back_without_the_collector(folders, way):
    """Without a cycle the last reference frees model and cache at once, so a second engine finds room."""
    gc.collect()
    gc.disable()
    try:
        llm = LLM(folders["llama"], dtype="float32", use_tqdm_on_load=False, num_gpu_blocks_override=8)
        run(llm, PROMPTS)
        list(islice(llm.stream(PROMPTS, GREEDY), 2))
        with pytest.raises(RequestError):
            run(llm, [[]])
        runner = llm.llm_engine._runner
        model, parameter = weakref.ref(runner.model), weakref.ref(next(runner.model.parameters()))
        del runner
        if way == "del":
            del llm
        elif way == "close":
            llm.close()
        else:
            with llm:
                pass
        assert model() is None
        assert parameter() is None
    finally:
        gc.enable()


def test_engines_made_again_and_again(open_llm, folders):
    expected = tokens_of(run(open_llm(), PROMPTS))
    for _ in range(3):
        with LLM(folders["llama"], dtype="float32", use_tqdm_on_load=False, num_gpu_blocks_override=64) as llm:
            assert tokens_of(run(llm, PROMPTS)) == expected


# Threads, and what may be missing around them


def test_calls_from_several_threads_wait_for_each_other(open_llm):
    llm = open_llm()
    expected = tokens_of(run(llm, PROMPTS))

    def call(number):
        if number % 3 == 2:
            pieces = list(llm.stream(PROMPTS, GREEDY))
            return [
                joined(piece for piece in pieces if piece.request_id == str(place)) for place in range(len(PROMPTS))
            ]
        if number % 3 == 1:
            with llm.cache_prefix(PROMPTS[2]):
                return tokens_of(run(llm, PROMPTS))
        return tokens_of(run(llm, PROMPTS))

    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(call, range(18))) == [expected] * 18
    finally:
        sys.setswitchinterval(often)


def test_a_bar_that_cannot_be_made_leaves_no_request(open_llm):
    llm = open_llm()

    def make_bar(**options):
        raise ImportError("no widgets here")

    with pytest.raises(ImportError, match="no widgets"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=make_bar)
    assert not llm.llm_engine.has_unfinished_requests


@pytest.mark.parametrize("part", ["schedule", "update"])
def test_a_forgotten_stream_is_not_ended_in_the_middle_of_a_step(open_llm, monkeypatch, part):
    llm = open_llm()
    expected = joined(llm.stream(PROMPTS[0], GREEDY))
    scheduler = llm.llm_engine.scheduler
    whole, seen = getattr(scheduler, part), []

    def collect_and_go_on(*arguments):
        held = scheduler.blocks.num_held
        [[] for _ in range(2000)]  # enough that garbage is due
        seen.append(scheduler.blocks.num_held - held)
        return whole(*arguments)

    monkeypatch.setattr(scheduler, part, collect_and_go_on)
    forgotten = llm.stream(PROMPTS, GREEDY)
    next(forgotten)
    cycle = [forgotten]
    cycle.append(cycle)
    del forgotten, cycle
    assert joined(llm.stream(PROMPTS[0], GREEDY)) == expected
    assert not any(seen)
    gc.collect()


def test_a_program_without_standard_error(folders, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw, and in some services
    with LLM(folders["llama"], dtype="float32", num_gpu_blocks_override=64) as llm:
        assert len(llm.generate([5], GREEDY)[0].token_ids) == 12


def test_an_empty_name_is_no_folder(folders, monkeypatch):
    monkeypatch.chdir(folders["llama"])
    with pytest.raises(CheckpointError, match="there is no model ''"):
        LLM("")


NOTHING = {"lora_request": None, "tokenization_kwargs": None, "mm_processor_kwargs": {}}


def test_arguments_of_vllm_that_ask_for_nothing_are_accepted(open_llm):
    llm = open_llm()
    (plain,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    (output,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, **NOTHING)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    for name in NOTHING:
        with pytest.raises(RequestError, match=f"{name} is 'x'; it is not supported; leave it out"):
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, **{name: "x"})
    with pytest.raises(UnknownOptionError, match="generate has no option 'prioritty'. Did you mean 'priority'"):
        llm.generate(PROMPTS[0], GREEDY, prioritty=1)


def test_a_conversation_takes_them_too(open_llm):
    llm, talk = open_llm(), [{"role": "user", "content": "hi"}]
    given = NOTHING | {"chat_template_content_format": "auto"}
    (plain,), (output,) = (llm.chat(talk, GREEDY, use_tqdm=False, **more) for more in ({}, given))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    with pytest.raises(RequestError, match="chat_template_content_format is 'openai'"):
        llm.chat(talk, GREEDY, use_tqdm=False, chat_template_content_format="openai")
