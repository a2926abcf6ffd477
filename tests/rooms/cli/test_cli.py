"""The command line, with an engine that answers at once: what is printed where, and the exit status."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm.cli.chat
import nanovllm.cli.info
import nanovllm.cli.opening
from nanovllm.cli import COMMANDS, main
from nanovllm.errors import CheckpointError, RequestError
from nanovllm.outputs import CompletionOutput, RequestOutput

ROOT = Path(nanovllm.cli.__file__).parents[2]


class Engine:
    """Answers "<prompt>!"; remembers what it was asked."""

    opened: list["Engine"]
    on_delta = staticmethod(lambda number: None)
    refuses: Exception | None = None

    def __init__(self, model, **options):
        if model == "missing":
            raise CheckpointError("there is no model\n'missing'. Name another one.")
        assert options.pop("use_tqdm_on_load") is False
        self.model, self.options, self.closed = model, options, False
        self.asked: list[object] = []
        self.params: object = None
        self.aborted = 0
        Engine.opened.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.closed = True

    def generate(self, prompts, params, *, use_tqdm):
        assert use_tqdm is False, "no bar where standard error is no terminal"
        self.asked, self.params = prompts, params
        return [result(f"{prompt}!", [1, 2]) for prompt in prompts]

    def chat(self, talks, params, *, use_tqdm):
        self.asked, self.params = talks, params
        return [result(f"{talk[-1]['content']}?", [1, 2, 3]) for talk in talks]

    def stream_chat(self, messages, params):
        self.asked.append([dict(message) for message in messages])
        self.params = params
        if self.refuses is not None:
            raise self.refuses  # at once, as LLM does, and not when the first token is asked for
        return self.deltas()

    def deltas(self):
        try:
            for number in range(4):
                yield result(f"w{number} ", [number])
                type(self).on_delta(number)
        except GeneratorExit:
            self.aborted += 1
            raise


def result(text, token_ids):
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[5, 6, 7],
        outputs=[CompletionOutput(index=0, text=text, token_ids=token_ids, finish_reason="length")],
        num_cached_tokens=0,
    )


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(nanovllm.cli.opening, "LLM", Engine)
    monkeypatch.setattr(Engine, "opened", [], raising=False)
    return Engine


def typed(monkeypatch, *lines):
    """Let ``input`` return these lines; an exception among them is raised; then the input ends."""
    script = iter(lines)

    def read(prompt):
        line = next(script, EOFError())
        if isinstance(line, BaseException | type):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)


# generate


def test_generate_prints_answers_on_one_stream_and_figures_on_the_other(engine, capsys):
    assert main(["generate", "one", "two", "--temperature", "0", "--stop", "x", "--stop", "y"]) == 0
    out, err = capsys.readouterr()
    assert out == "--- one\none!\n\n--- two\ntwo!\n\n"
    assert "loaded in" in err and "4 tokens in" in err and "tokens/s" in err
    (opened,) = engine.opened
    assert opened.model == "smollm2-135m-instruct" and opened.options == {} and opened.closed
    assert opened.params.temperature == 0 and list(opened.params.stop) == ["x", "y"]


def test_generate_reads_prompts_from_standard_input(engine, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n  \n two \r\n"))
    assert main(["generate", "--quiet"]) == 0
    assert capsys.readouterr() == ("one!\n two !\n", "")


def test_generate_as_json(engine, capsys):
    assert main(["generate", "é", "two", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "prompt": "é",
        "text": "é!",
        "finish_reason": "length",
        "token_ids": [1, 2],
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
    }
    assert second["prompt"] == "two"


def test_generate_chat_wraps_each_prompt_in_a_conversation(engine, capsys):
    assert main(["generate", "--chat", "--system", "Be brief.", "one", "two"]) == 0
    system = {"role": "system", "content": "Be brief."}
    assert engine.opened[0].asked == [
        [system, {"role": "user", "content": "one"}],
        [system, {"role": "user", "content": "two"}],
    ]
    assert "one?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "stdin", "message"),
    [
        (["generate"], "", "0 prompts"),
        (["generate", "x", "--system", "s"], "", "Add --chat"),
        (["generate", "x", "--model", "missing"], "", "there is no model 'missing'. Name another one."),
        (["generate", "x", "--temperature", "-1"], "", "temperature"),
        (["bench", "--min-len", "5", "--max-len", "4"], "", "--min-len is 5"),
    ],
)
def test_what_we_raise_on_purpose_is_one_line_and_status_2(engine, capsys, monkeypatch, argv, stdin, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("nanovllm: error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second is Python's own where LC_ALL=C
def test_input_that_is_no_text_is_refused(engine, capsys, monkeypatch, command, errors):
    given = io.TextIOWrapper(io.BytesIO(b"fine\n\xff\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", given)
    assert main([command]) == 2
    assert "0xff, which is no utf-8" in capsys.readouterr().err


def test_the_mark_with_which_some_editors_begin_a_file_is_no_part_of_a_prompt(engine, capsys, monkeypatch):
    given = io.TextIOWrapper(io.BytesIO("\ufeffone\r\n\ufefftwo\r\n".encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", given)
    assert main(["generate", "--quiet"]) == 0
    assert capsys.readouterr().out == "one!\n\ufefftwo!\n"


@pytest.mark.parametrize(("name", "status", "words"), [("generate", 2, "0 prompts"), ("chat", 0, "loaded in")])
def test_standard_input_may_be_closed(engine, capsys, monkeypatch, name, status, words):
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of `<&-`
    assert main([name]) == status
    sys.stdin.close()
    assert words in "".join(capsys.readouterr())


def test_options_of_the_engine_are_passed_on_and_read_as_json(engine, capsys):
    options = ["-o", "enforce_eager=true", "-o", "block-size=32", "-o", "device=cpu", "-o", "dtype=float16"]
    assert main(["generate", "x", "--dtype", "float32", "--max-model-len", "64", *options]) == 0
    assert engine.opened[0].options == {
        "dtype": "float16",
        "max_model_len": 64,
        "enforce_eager": True,
        "block_size": 32,
        "device": "cpu",
    }


def test_sizes_of_parallel_engines_have_arguments_of_their_own(engine, capsys):
    sizes = ["--tensor-parallel-size", "2", "--data-parallel-size", "3"]
    assert main(["generate", "x", *sizes]) == 0
    assert engine.opened[0].options == {"tensor_parallel_size": 2, "data_parallel_size": 3}
    for command in ("generate", "chat", "bench", "info"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "--tensor-parallel-size N" in (said := capsys.readouterr().out) and "--data-parallel-size N" in said


@pytest.mark.parametrize(
    "bad", [["-o", "novalue"], ["-o", "=1"], ["-o", "model=x"], ["--max-tok", "1"], ["--top-k", "x"]]
)
def test_bad_arguments_end_with_status_2(engine, capsys, bad):
    with pytest.raises(SystemExit) as caught:
        main(["generate", "x", *bad])
    assert caught.value.code == 2
    assert engine.opened == []


def test_ctrl_c_ends_with_status_130_and_closes_the_engine(engine, capsys, monkeypatch):
    def interrupt(self, *arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "generate", interrupt)
    assert main(["generate", "x"]) == 130
    assert engine.opened[0].closed


def test_ctrl_c_while_a_command_is_imported_is_not_lost(tmp_path, monkeypatch):
    """Some module of a library takes it for an error of its own, and goes on."""
    (tmp_path / "taking_it.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.1)\n"
        "except BaseException:\n    pass\n"
        "def run(args):\n    raise AssertionError('nobody wanted that any more')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "generate", "taking_it:run")
    assert main(["generate", "x"]) == 130


# chat


def test_chat_streams_and_remembers(engine, capsys, monkeypatch):
    typed(monkeypatch, "Hi", "", "And you?", "/clear", "Again", "/unknown", "/exit", "never read")
    assert main(["chat", "--system", "s"]) == 0
    out = capsys.readouterr().out
    assert out.count("w0 w1 w2 w3 ") == 3 and "(cleared)" in out
    (opened,) = engine.opened
    roles = [[message["role"] for message in asked] for asked in opened.asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert opened.asked[1][2]["content"] == "w0 w1 w2 w3 "
    assert opened.closed and opened.params.max_tokens == 512


def test_ctrl_c_stops_the_answer_and_not_the_program(engine, capsys, monkeypatch):
    interrupts = iter([False, True])

    def on_delta(number):
        if number == 1 and next(interrupts, False):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Engine, "on_delta", staticmethod(on_delta))
    before = signal.getsignal(signal.SIGINT)
    typed(monkeypatch, "first", "second", "third")
    assert main(["chat"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    opened = engine.opened[0]
    assert opened.aborted == 1 and len(opened.asked) == 3
    assert "(stopped)" in capsys.readouterr().out
    assert opened.asked[2][3] == {"role": "assistant", "content": "w0 w1 w2 "}  # kept as far as it came


def test_a_second_ctrl_c_breaks_into_an_answer(engine, capsys, monkeypatch):
    def on_delta(number):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Engine, "on_delta", staticmethod(on_delta))
    typed(monkeypatch, "first")
    assert main(["chat"]) == 130
    assert engine.opened[0].closed


def test_ctrl_c_at_the_prompt_leaves_when_it_comes_twice_in_a_row(engine, capsys, monkeypatch):
    typed(monkeypatch, KeyboardInterrupt, "Hi", KeyboardInterrupt, KeyboardInterrupt, "never read")
    assert main(["chat"]) == 130
    assert len(engine.opened[0].asked) == 1 and engine.opened[0].closed
    assert "once more" in capsys.readouterr().out


def test_a_refused_turn_is_forgotten_and_the_talk_goes_on(engine, capsys, monkeypatch):
    typed(monkeypatch, "long", "short")
    monkeypatch.setattr(Engine, "refuses", RequestError("too long"))
    assert main(["chat"]) == 0
    assert [len(asked) for asked in engine.opened[0].asked] == [1, 1]
    assert "too long (/clear starts afresh)" in capsys.readouterr().err


# info

FACTS = {
    "architecture": "LlamaForCausalLM",
    "parameters": 134_515_008,
    "dtype": "float32",
    "cache_tokens": 4096,
    "something_new": None,
}


def test_info_prints_a_table_or_json(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(nanovllm.cli.info, "describe", lambda model, **options: asked.append((model, options)) or FACTS)
    assert main(["info", "some/model", "--dtype", "float32"]) == 0
    assert asked == [("some/model", {"dtype": "float32"})]
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["architecture", "LlamaForCausalLM"] in lines and ["parameters", "134,515,008"] in lines
    assert lines[-2:] == [["cache", "tokens     4,096 tokens"], ["something", "new    None"]]
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == FACTS


# the process


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def test_help_and_version_need_no_torch():
    code = (
        "import sys; from nanovllm.cli import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    done = command("-c", code)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout and "bench" in done.stdout
    done = command("-m", "nanovllm", "--version")
    assert done.returncode == 0 and done.stdout.startswith("nanovllm ")


def test_a_reader_that_leaves_is_no_error():
    code = (
        "import sys; import nanovllm.cli as cli\n"
        "cli._find = lambda name: lambda args: print('x' * 100_000) or 0\n"
        "sys.exit(cli.main(['generate', 'x']))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


PRINT = "import sys; import nanovllm.cli as cli; cli._find = lambda name: lambda args: print('x' * {}) or 0; "


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
@pytest.mark.parametrize("letters", [1, 100_000])
def test_a_full_disk_is_one_line_and_status_1(letters):
    code = PRINT.format(letters) + "sys.exit(cli.main(['generate', 'x']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "nanovllm: error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("closed", [1, 2])
def test_streams_may_be_closed(closed):
    code = PRINT.format(1).replace("or 0", "or print('y', file=sys.stderr) or 0")
    code += "sys.exit(cli.main(['generate', 'x']))"
    begin = f"import os, sys; os.close({closed}); os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    done = command("-c", begin, code)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == (("", "y\n") if closed == 1 else ("x\n", ""))


def test_downloads_are_announced_once(monkeypatch, capsys):
    hub = logging.getLogger("nanovllm.hub")
    monkeypatch.setattr(hub, "handlers", [])
    monkeypatch.setattr(hub, "hasHandlers", lambda: bool(hub.handlers))  # pytest has handlers of its own
    monkeypatch.setattr(hub, "propagate", True)
    monkeypatch.setattr(hub, "level", hub.level)
    for _ in range(2):
        nanovllm.cli.opening.show_downloads()
    logging.getLogger("nanovllm.hub.builtin").info("fetching")
    assert capsys.readouterr().err == "fetching\n"
