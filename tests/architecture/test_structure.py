"""The rules of the house that a machine can check: who imports whom, what may not be in it, how large it is."""

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nanovllm"
TESTS = Path(__file__).parents[1]

CORE = [
    "errors", "sampling_params", "outputs", "prompts", "config", "request", "block_manager", "scheduler", "observer",
    "admission", "engine",
    "ops", "batch", "kv_cache", "layers", "models", "tokenizer", "checkpoint", "loader", "sampler", "cuda_graphs",
    "model_runner", "build", "interrupts", "llm",
]  # fmt: skip
"""The parts of the core, low to high: a part imports from its left only."""

NO_TORCH = CORE[: CORE.index("engine") + 1]

ROOMS = [
    "gguf", "hub", "cli", "compiled", "quantization", "templates", "async_llm", "beam_search", "scoring", "pacing",
    "parallel", "metrics", "trace", "server", "batch_files", "ray", "speculative", "structured",
]  # fmt: skip
"""Folders that could be deleted; those of the second line are to come."""

ENTRANCES = {"nanovllm": "__init__.py", "cli": "__main__.py"}
"""Files at the top that are no part: public names, and the door of the command line."""

CODE_LINES, FILE_LINES = 4280, 300

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path):
    """The part or room that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    entrance = [part for part, name in ENTRANCES.items() if name == first]
    return entrance[0] if entrance else first.removesuffix(".py")


def part_named(module):
    """The part that ``nanovllm.x.y`` names."""
    return module.split(".")[1]


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree):
    """Every module that is imported anywhere in a file, with the node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield node.module, node


def our_parts(tree):
    """The parts of this package that a file imports from."""
    for module, node in imports(tree):
        if module == "nanovllm":
            for alias in node.names:
                yield alias.name if (alias.name in CORE or alias.name in ROOMS) else "nanovllm"
        elif module.startswith("nanovllm."):
            yield part_named(module)


def label(path):
    return str(path.relative_to(PACKAGE))


each_file = pytest.mark.parametrize("path", FILES, ids=label)


def test_every_file_belongs_to_a_part_or_a_room():
    """A new file or folder takes its place in the lists above, or it is a room."""
    assert FILES
    assert {part_of(path) for path in FILES} <= {*CORE, *ROOMS, *ENTRANCES}
    assert set(CORE) <= {part_of(path) for path in FILES}, "a part of the list is gone"


@each_file
def test_imports_point_downwards(path):
    here = part_of(path)
    used = set(our_parts(tree_of(path))) - {here}
    if here == "nanovllm":
        assert not used & set(ROOMS) - {"async_llm", "beam_search"}, (
            "the public rooms alone have a name at the front door"
        )
    elif here == "cli":
        assert not used & set(ROOMS), "rooms do not know each other"
    elif here == "ops":
        assert used <= {"errors"}, "operations take tensors and numbers"
    elif here in ROOMS:
        assert not used & {*ROOMS, "nanovllm"}, "a room imports the core, and no other room"
    else:
        assert not used & set(ROOMS), "the core knows no room"
        assert "nanovllm" not in used, "the core does not go through its own front door"
        above = {part for part in used if CORE.index(part) > CORE.index(here)}
        assert not above, f"{here} stands below {above}"


@each_file
def test_control_code_knows_no_tensors(path):
    if part_of(path) in {*NO_TORCH, "nanovllm"}:
        heavy = {module for module, _ in imports(tree_of(path)) if module.split(".")[0] in {"torch", "numpy", "triton"}}
        assert not heavy


@each_file
def test_imports_stand_at_the_top(path):
    """But for rooms, which load what is heavy when it is needed, and the front doors of operations."""
    tree = tree_of(path)
    inside = [
        node.lineno
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert part_of(path) in {*ROOMS, "ops"} or not inside, f"imports in functions, lines {inside}"


CONSTANT = re.compile(r"_{0,2}[A-Z][A-Z0-9_]*|__\w+__")
CHANGEABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAKERS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter", "WeakKeyDictionary"}


def changeable(value):
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in MAKERS
    return isinstance(value, CHANGEABLE)


def bindings(body):
    """(name, value) of each assignment in a module's or a class's own body."""
    for node in body:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


@each_file
def test_nothing_at_module_level_changes(path):
    """Tables in capitals are constants: nothing in their file stores into them."""
    tree = tree_of(path)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)], "a global statement"
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    state = [name for body in bodies for name, value in bindings(body) if changeable(value)]
    assert not [name for name in state if not CONSTANT.fullmatch(name)]
    tables = {name for name in state if not name.startswith("__")}
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        called = isinstance(node, ast.Attribute) and node.attr in {
            "append", "add", "update", "setdefault", "pop", "clear", "extend", "remove", "insert", "popitem", "discard"
        }  # fmt: skip
        if (stored or called) and isinstance(node.value, ast.Name):
            assert node.value.id not in tables, f"line {node.lineno} changes {node.value.id}"


@each_file
def test_results_are_not_kept_behind_the_back(path):
    """``functools.cache`` is module-level state by another name."""
    names = {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name)}
    assert not names & {"lru_cache", "cached_property"}


UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "imp", "runpy", "code"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}


def unsafe(tree):
    """(line, what) of whatever could run code that came with a model or over a wire."""
    for module, node in imports(tree):
        finds_only = isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] == ["find_spec"]
        if module.split(".")[0] in UNSAFE_MODULES or (module == "importlib.util" and not finds_only):
            yield node.lineno, module
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if called in UNSAFE_CALLS or called in {"yaml.load", "yaml.unsafe_load", "os.system", "os.popen"}:
            yield node.lineno, called
        if called.endswith("torch.load") or called == "load":
            only = given.get("weights_only")
            if not (isinstance(only, ast.Constant) and only.value is True):
                yield node.lineno, f"{called} without weights_only=True"
        for name in ("allow_pickle", "trust_remote_code", "shell"):
            if name in given and not (isinstance(given[name], ast.Constant) and given[name].value is False):
                yield node.lineno, f"{called}({name}=...)"


@each_file
def test_nothing_runs_code_that_came_with_a_model(path):
    assert list(unsafe(tree_of(path))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import marshal as m", "def f():\n    import shelve",
        "eval('1')", "exec(text)", "__import__('os')", "yaml.load(text)", "os.system(text)", "run(text, shell=True)",
        "torch.load(path)", "torch.load(path, weights_only=False)", "torch.load(path, weights_only=flag)",
        "numpy.load(path, allow_pickle=True)", "from importlib.util import spec_from_file_location",
        "from importlib.util import find_spec, module_from_spec", "import importlib.util",
    ],
)  # fmt: skip
def test_the_scan_for_unsafe_code_finds_it(source):
    assert list(unsafe(ast.parse(source)))


def test_the_scan_for_unsafe_code_allows_the_safe():
    safe = "import re\nre.compile('a')\ntorch.load(path, weights_only=True)\nmodel.eval()\njson.loads(text)\n"
    safe += "from importlib.util import find_spec\n"
    assert list(unsafe(ast.parse(safe))) == []


@each_file
def test_the_environment_is_read_in_one_place(path):
    reads = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.Attribute, ast.Name, ast.alias))
        and (getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None))
        in {"environ", "getenv", "environb"}
    ]
    assert part_of(path) in {"config", *ROOMS} or not reads, f"lines {reads}"


NETWORK = {"huggingface_hub", "modelscope", "urllib", "requests", "httpx", "aiohttp", "socket", "http", "ssl", "ftplib"}


@each_file
def test_only_the_hub_knows_the_network(path):
    used = {module for module, _ in imports(tree_of(path)) if module.split(".")[0] in NETWORK}
    live = path.parent.name == "trace" and path.stem in {"live", "top"}  # on one machine
    assert part_of(path) in {"hub", "server", "parallel"} or live or not used


# --- in a process of its own ------------------------------------------------------------------------------------


def python(code, folder, *arguments):
    """Run code with the package from ``folder``; return what it printed, read as JSON."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOADED = "import json, sys\n{}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"


@pytest.mark.parametrize("code", ["import nanovllm", "from nanovllm import LLMEngine, RequestOutput, SamplingParams"])
def test_the_package_is_imported_without_torch(code):
    loaded = python(LOADED.format(code), PACKAGE.parent)
    assert "nanovllm" in loaded and not {"torch", "numpy", "tokenizers", "huggingface_hub"} & set(loaded)


def test_control_code_is_imported_without_torch():
    code = "\n".join(f"import nanovllm.{part}" for part in NO_TORCH)
    loaded = python(LOADED.format(code), PACKAGE.parent)
    assert not {"torch", "numpy", "triton", "tokenizers"} & set(loaded)


def test_the_whole_core_is_imported_without_the_network_or_an_oracle():
    loaded = python(LOADED.format("import nanovllm.llm"), PACKAGE.parent)
    assert "torch" in loaded and not {"huggingface_hub", "modelscope", "transformers", "gguf"} & set(loaded)


TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip

GENERATE = """
import json, sys
# an editable installation has a finder that would bring the deleted rooms back
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
from nanovllm import LLM, CheckpointError, ConfigError, SamplingParams

options = dict(load_format="dummy", skip_tokenizer_init=True, dtype="float32", device="cpu", num_gpu_blocks_override=8)
with LLM(sys.argv[1], **options) as llm:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)
    try:
        counted = llm.get_metrics()
    except ConfigError as error:
        counted = str(error)
try:
    LLM("somebody/some-model")
    refused = ""
except CheckpointError as error:
    refused = str(error)
print(json.dumps([[output.token_ids for output in outputs], refused, counted]))
"""


def test_the_core_generates_with_every_room_deleted(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "nanovllm", ignore=shutil.ignore_patterns(*ROOMS, "__pycache__"))
    left = {path.name for path in (tmp_path / "nanovllm").iterdir()}
    assert not left & set(ROOMS) and "llm.py" in left
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    tokens, refused, counted = python(GENERATE, tmp_path, tmp_path / "model")
    assert [len(each) for each in tokens] == [5, 5]
    assert all(0 <= token < 61 for each in tokens for token in each)
    assert "nanovllm.hub" in refused, "without the room its job is refused by name"
    assert "nanovllm/metrics" in counted


# --- size -------------------------------------------------------------------------------------------------------


def code_lines(source):
    """Lines that hold code: no blank lines, no comments, no docstrings (of attributes neither)."""
    texts = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, node.end_lineno + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def test_what_counts_as_a_line():
    head = '"""Text.\n\nMore."""\n\nimport os  # why\n\n# no\nx = (\n    1,\n)\n"""About x."""\n'
    function = 'def f():\n    "Doc."\n    return """a\nb"""\n'
    assert code_lines(head) == 1 + 3 and code_lines(function) == 1 + 2
    assert code_lines(head + "\n\n" + function) == 7


def core_files():
    """What one has to read: no rooms, and of the operations only their meaning."""
    for path in FILES:
        kernel = part_of(path) == "ops" and path.name not in {"__init__.py", "reference.py"}
        if part_of(path) in {*CORE, "nanovllm"} and not kernel:
            yield path


def test_the_core_can_be_read_in_an_afternoon():
    counts = {label(path): code_lines(path.read_text(encoding="utf-8")) for path in core_files()}
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{count:5d} {name}")
    print(f"{sum(counts.values()):5d} lines of code in the core")
    assert sum(counts.values()) <= CODE_LINES
    stated = re.search(r"lines of the core \| ([\d,]+) ", (TESTS.parent / "README.md").read_text(encoding="utf-8"))
    assert abs(int(stated.group(1).replace(",", "")) - sum(counts.values())) <= 50, "the README states another count"
    assert not {name: count for name, count in counts.items() if count > FILE_LINES}


def test_every_operation_has_its_meaning_and_its_test():
    operations = [path for path in (PACKAGE / "ops").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert operations
    for operation in operations:
        assert (operation / "__init__.py").is_file() and (operation / "reference.py").is_file(), operation.name
        assert list((TESTS / "ops").glob(f"test_{operation.name}*.py")), (
            f"tests/ops/test_{operation.name}.py is missing"
        )
