"""Sums over GPUs by one kernel are those of float32 in the order of ranks, bit for bit, and no rank waits for ever."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.parallel.communicator import new_identity
from nanovllm.parallel.peer import OneShot

DEVICES = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices"),
]

HERE = Path(__file__).parent
SIZES = sorted({2, min(8, max(2, DEVICES))})
CONFIG = dict(
    architectures=["Qwen3ForCausalLM"], vocab_size=515, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, rms_norm_eps=1e-6,
    rope_theta=1e4, hidden_act="silu", torch_dtype="bfloat16", tie_word_embeddings=True,
)  # fmt: skip


class Ranks:
    """Processes that run one case of ``peer_rank.py``, one on each device."""

    def __init__(self, folder, case, size):
        identity = new_identity().hex()
        paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        self.texts = [folder / f"rank-{rank}" for rank in range(size)]
        self.processes = []
        for rank, text in enumerate(self.texts):
            with text.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(HERE / "peer_rank.py"), case, identity, str(rank), str(size)],
                        stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT,
                        env=os.environ | {"PYTHONPATH": paths},
                    )
                )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait(self, process, seconds=240):
        """Wait until one has ended; the first that ends badly ends the test."""
        deadline = time.monotonic() + seconds
        while process.poll() is None:
            assert not any(other.poll() for other in self.processes if other is not process), self.told()
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.02)
        return process.returncode

    def end(self):
        """Wait until all have ended well."""
        assert [self.wait(process) for process in self.processes] == [0] * len(self.processes), self.told()

    def told(self):
        return "\n".join(text.read_text() for text in self.texts)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ["sums", "back_to_back", "replays"])
def test_sums_are_those_of_float32_in_the_order_of_ranks(tmp_path, case, size):
    with Ranks(tmp_path, case, size) as ranks:
        ranks.end()


def test_where_one_rank_cannot_all_leave_it_to_nccl(tmp_path):
    with Ranks(tmp_path, "refused", 2) as ranks:
        ranks.end()
        assert "rank 1 leaves all sums to NCCL: no memory today" in ranks.texts[1].read_text()
        assert "rank 0 leaves all sums to NCCL" in ranks.texts[0].read_text()


@pytest.mark.parametrize("case", ["lost", "lost_in_graphs"])
def test_a_killed_rank_frees_the_other_and_its_memory_comes_back(tmp_path, case):
    with Ranks(tmp_path, case, 2) as ranks:
        left, killed = ranks.processes
        assert ranks.wait(killed) == -signal.SIGKILL, ranks.told()
        left.stdin.write(b"it is gone\n")
        left.stdin.flush()
        ranks.processes.remove(killed)
        assert ranks.wait(left, 30) == 0, ranks.told()


def test_two_engines_at_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = dict(device="cuda", skip_tokenizer_init=True, num_gpu_blocks_override=512, use_tqdm_on_load=False)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = [[(7 * i + 3 * j) % 515 for j in range(5 + 13 * i)] for i in range(12)]
    found = {}

    def generate(name, llm):
        found[name] = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    def engine():
        return LLM(str(tmp_path), tensor_parallel_size=2, load_format="dummy", **options)

    with engine() as first, engine() as second:
        assert isinstance(first.llm_engine._runner._group.connection, OneShot)
        generate("alone", first)
        generate("after", second)
        for llm in (first, second):
            llm.reset_prefix_cache()
        threads = [threading.Thread(target=generate, args=pair) for pair in (("first", first), ("second", second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found["first"] == found["second"] == found["alone"] == found["after"]
