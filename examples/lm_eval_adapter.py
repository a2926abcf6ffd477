"""lm-evaluation-harness with nanovllm as its model: its tasks are scored and generated here.

    pip install lm_eval
    python examples/lm_eval_adapter.py MODEL TASK[,TASK...] [--limit N] [--num-fewshot N] [--include FOLDER]

Prompts that are too long lose their beginning, as in the harness's own models; a continuation that is longer than the
context is an error.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM

from nanovllm import LLM, SamplingParams

MAX_GEN_TOKS = 256
"""What the harness's own models generate at most where a task does not say."""


class NanoLM(LM):
    """A model of the harness. ``options`` are those of ``LLM``; an open one is taken as it is."""

    def __init__(self, model: "LLM | str", **options: Any) -> None:
        super().__init__()
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.tokenizer = self.llm.get_tokenizer()
        bos = self.tokenizer.special_tokens.get("bos_token")
        self._bos = bos or None
        ends = self.tokenizer.eos_token_ids or tuple(self.llm.llm_engine.limits.eos_token_ids)
        self.prefix_token_id = self.tokenizer.backend.token_to_id(bos) if bos else ends[0]
        self.max_length = self.llm.llm_engine.limits.max_model_len - 2
        """Tokens that are read before the last one of a continuation: prompt and continuation may have one more."""

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation after its context, and whether it is the greedy one."""
        pairs = [self._cut(*request.args) for request in requests]
        found = self._score(pairs, disable_tqdm)
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, which is as long as it likes: each token is scored once."""
        windows = [list(self._windows(self._encode(request.args[0]))) for request in requests]
        scores = iter(self._score([window for each in windows for window in each], disable_tqdm))
        found = [sum(next(scores)[0] for _ in each) for each in windows]
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context as its task says."""
        params = [sampling_params(request.args[1]) for request in requests]
        prompts = [
            self._encode(request.args[0])[-max(1, self.max_length - one.max_tokens) :]
            for request, one in zip(requests, params, strict=True)
        ]
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        found = [output.text for output in outputs]
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, result)
        return found

    @property
    def tokenizer_name(self) -> str:
        """What the harness keeps rendered requests under."""
        return str(self.llm.config.model).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the model's own, which is the only one there is."""
        return (self.tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation as the model was trained to read it."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _encode(self, text: str) -> list[int]:
        """A rendered conversation has its BOS token already."""
        return self.tokenizer.encode(text, add_special_tokens=not (self._bos and text.startswith(self._bos)))

    def _cut(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode both in one piece, and cut behind the context, whose last spaces belong to the continuation."""
        if context:
            whole, start = self._encode(context + continuation), len(self._encode(context.rstrip()))
        else:
            whole, start = self.tokenizer.encode(continuation, add_special_tokens=False), 0
        if start == 0 and whole[:1] == [self.prefix_token_id]:
            start = 1
        elif start == 0:
            whole, start = [self.prefix_token_id, *whole], 1
        surplus = max(0, min(len(whole) - self.max_length - 1, start - 1))
        return whole[surplus:start], whole[start:]

    def _windows(self, tokens: list[int]) -> Any:
        """Yield contexts and continuations whose continuations joined are the text, each behind as much as fits.

        tokens    [ t t t t t t t t t t ]     four tokens of input at a time
                  B[t t t t]                  B: the prefix token
                        c[t t t t]            c: context
                             c c c[t t]
        """
        size, done = self.max_length, 0
        while done < len(tokens):
            end = min(done + size, len(tokens))
            yield (tokens[end - size - 1 : done] if done else [self.prefix_token_id]), tokens[done:end]
            done = end

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool) -> list[tuple[float, bool]]:
        scores = self.llm.score([one for one, _ in pairs], [other for _, other in pairs], use_tqdm=not disable_tqdm)
        return [(score.logprob, score.is_greedy) for score in scores]


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    """Translate a task's generation options; what is none of ours either is refused by its name."""
    options = dict(given)
    lengths = [options.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens")]
    sampled = options.pop("do_sample", None)
    temperature = float(options.pop("temperature", 0.0) or 0.0)
    return SamplingParams(
        stop=options.pop("until", None) or None,
        max_tokens=next((int(length) for length in lengths if length is not None), MAX_GEN_TOKS),
        temperature=0.0 if sampled is False else temperature,
        **options,
    )


def main() -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("tasks")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--include", help="folder with task files of one's own")
    options = parser.parse_args()
    found = simple_evaluate(
        NanoLM(options.model),
        tasks=options.tasks.split(","),
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        task_manager=TaskManager(include_path=options.include),
    )
    print(make_table(found))


if __name__ == "__main__":
    main()
