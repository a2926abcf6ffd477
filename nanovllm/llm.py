"""The facade: prompts in, texts out. It mirrors vLLM's offline class ``LLM``."""

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from importlib.util import find_spec
from threading import RLock
from typing import Any, cast

import torch
from tqdm import tqdm

from nanovllm.admission import expect
from nanovllm.block_manager import BlockManager
from nanovllm.build import Built, build
from nanovllm.checkpoint import find
from nanovllm.config import EngineConfig, configure_logging
from nanovllm.engine import LLMEngine
from nanovllm.errors import ConfigError, EngineError, RequestError, nearest, unknown_option
from nanovllm.interrupts import HeldBack, no_collection, old_objects_kept
from nanovllm.loader import update_weights
from nanovllm.outputs import RequestOutput
from nanovllm.prompts import Prompt, TokensPrompt, as_list, built_options, one_each, parse, where
from nanovllm.request import Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.tokenizer import Message, Tokenizer

logger = logging.getLogger(__name__)

METRICS = "nanovllm.metrics:attach"
"""What counts, unless ``disable_log_stats``."""
BEAM_SEARCH = "nanovllm.beam_search:beam_search"
SCORE = "nanovllm.scoring:score"
TRACE = "nanovllm.trace.file:open_trace"
"""What records, for ``trace`` and ``live``."""
CALL = {"sampling_params", "use_tqdm", "priority"}
"""What a call takes beside its prompts or messages."""

Priority = int | Sequence[int] | None
Conversations = Sequence[Message] | Sequence[Sequence[Message]]
Params = SamplingParams | Sequence[SamplingParams] | None


class CachedPrefix(AbstractContextManager["CachedPrefix"]):
    """A prefix whose blocks stay in the cache until ``unpin``, or until the ``with`` block ends."""

    def __init__(self, blocks: BlockManager, block_ids: list[int], turn: RLock) -> None:
        self._blocks = blocks
        self._block_ids = block_ids
        self._turn = turn
        self.num_tokens = len(block_ids) * blocks.block_size
        """Tokens pinned: whole blocks only."""

    def unpin(self) -> None:
        """Let the blocks be evicted again. A second call does nothing."""
        with self._turn:
            self._blocks.unpin(self._block_ids)
            self._block_ids = []

    def __exit__(self, *_: object) -> None:
        self.unpin()


class LLM(AbstractContextManager["LLM"]):
    """A model ready to answer. ``options`` are the fields of ``EngineConfig``, in vLLM's names.

    Several may live in one process. Memory goes back with ``close()``, at the end of a ``with`` block, or when
    the last reference goes. Calls from several threads wait for each other; ``AsyncLLM`` serves them together.

    Errors: UnknownOptionError, ConfigError and CheckpointError here; RequestError from ``generate`` and its kind,
    with nothing computed and the engine as it was; EngineError if a step fails.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        configure_logging()
        self.config = EngineConfig.from_options(model, options)
        # before anything is loaded: its files may be no place to write
        trace = find(TRACE)(self.config) if (self.config.trace, self.config.live) != (None, None) else None
        try:
            self._built: Built | None = build(self.config)
        except BaseException:
            if trace is not None:
                trace.cancel()
            raise
        self._metrics = counter(self.config, self._built)
        if trace is not None:
            trace.begin(self, self._built, self.config)
        self._mail: dict[str, deque[RequestOutput]] = {}  # by request: where its stream looks for outputs
        self._turn = RLock()  # of the thread whose call may change the engine

    def close(self) -> None:
        """Give back the memory of model and cache. Later calls raise EngineError; a second close does nothing."""
        with self._turn:
            built, self._built = self._built, None
            self._mail.clear()
            if built is not None:
                built.engine.close()
                built.close()
                del built
                torch.cuda.empty_cache()  # or torch would keep it, for this process alone

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        built = self._built
        state = f"{built.plan.model.architecture} on {built.plan.device}" if built is not None else "closed"
        return f"<LLM {self.config.model!r}: {state}>"

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine below, for those who want to step it themselves."""
        return self._alive().engine

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises ConfigError if the engine was built without one."""
        tokenizer = self._alive().tokenizer
        if tokenizer is None:
            raise ConfigError("this engine has no tokenizer (skip_tokenizer_init); give and take token ids.")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's generation_config.json recommends, over our own defaults."""
        if self.config.generation_config != "auto":
            return SamplingParams()
        same = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        names = {"max_new_tokens": "max_tokens"} | {name: name for name in same}
        known = self._alive().generation_config
        return SamplingParams(**{ours: known[name] for name, ours in names.items() if known.get(name) is not None})

    def get_metrics(self, *, per_replica: bool = False) -> list[Any]:
        """Return what has been counted, as ``nanovllm.metrics`` says. Raises ConfigError if nothing has been.

        With ``data_parallel_size`` that of all replicas together, or, ``per_replica``, of each, told apart by the label
        ``engine``; they answer in the middle of a step too. Raises EngineError if one is lost. Any thread may ask.
        """
        self._alive()
        if self._metrics is None:
            rule = "no metrics are kept; make an LLM without disable_log_stats, with the folder nanovllm/metrics there."
            raise ConfigError(rule, parameter="disable_log_stats", value=self.config.disable_log_stats)
        return list(self._metrics.read(per_replica=per_replica))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True, *, priority: Priority = None, **vllm: Any,
    ) -> list[RequestOutput]:  # fmt: skip
        """Continue each prompt. Results come in the order of the prompts; one prompt gives a list of one.

        A prompt is a str, a list of token ids, ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``. One
        ``SamplingParams`` serves all prompts; a list has one for each. ``priority``: smaller goes first, under
        ``scheduling_policy="priority"``; else it is refused, unless 0. ``vllm``: what ``prompts.NOT_BUILT`` lists, as
        long as it asks for nothing.

        Raises RequestError before anything is computed if some prompt can never be served, with its place in the
        list; nothing of the call is queued then. A request that fails alone while it runs has a result like the others,
        with ``finish_reason`` "error". If a step fails as a whole: EngineError, whose ``outputs`` are the results, one
        for each prompt, those that were done and how far the others came ("error" or "abort"). On any exception,
        Ctrl-C included, the requests of this call are aborted, and the engine can go on.
        """
        if unknown := built_options(vllm):
            raise unknown_option("generate", min(unknown), CALL)
        return self._finish(as_list(prompts), sampling_params, priority, use_tqdm)[1]

    def chat(
        self, messages: Conversations, sampling_params: Params = None, use_tqdm: bool | Callable[..., Any] = True, *,
        priority: Priority = None, **template: Any,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer one conversation (a list of messages) or many (a list of lists), through the chat template.

        ``template`` takes ``add_generation_prompt``, ``continue_final_message``, ``tools``, ``chat_template`` and
        ``chat_template_kwargs``, and what ``generate`` takes as ``vllm``.
        """
        return self._finish(self._conversations(messages, template), sampling_params, priority, use_tqdm)[1]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, priority: Priority = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield each prompt's new text and tokens after every step, until all have finished.

        A piece holds only what is new: its texts joined are the text that ``generate`` gives, however characters and
        stop strings are cut into tokens. Text that may still become a stop string, or a character, comes later.
        ``request_id`` tells the prompts apart: it is the prompt's place in the list. The last piece of each prompt,
        and no other, is ``finished``. Work begins, and errors are raised, when the first piece is asked for; closing
        the iterator, or leaving its loop, aborts what has not finished. Cost of a piece: constant.
        """
        return self._stream(as_list(prompts), sampling_params, priority)

    def stream_chat(
        self, messages: Conversations, sampling_params: Params = None, *, priority: Priority = None, **template: Any
    ) -> Generator[RequestOutput, None, None]:
        """Answer one conversation or many, as ``chat`` does, in pieces, as ``stream`` does."""
        return self._stream(self._conversations(messages, template), sampling_params, priority)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: Any, **options: Any) -> Any:
        """Search with ``BeamSearchParams``; see ``nanovllm.beam_search.beam_search``."""
        return find(BEAM_SEARCH)(self, prompts, params, **options)

    def score(self, prompts: Prompt | Sequence[Prompt], continuations: Any, **options: Any) -> Any:
        """Return the log-probabilities of given continuations; see ``nanovllm.scoring.score``."""
        return find(SCORE)(self, prompts, continuations, **options)

    def encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int], str]:
        """Return (text, token ids, cache salt) of a prompt. Any thread may ask."""
        return self._encode([prompt])[0]

    def render(self, messages: Sequence[Message], **options: Any) -> TokensPrompt:
        """Render and encode a conversation. The template writes the BOS token, so the tokenizer must not."""
        variables = options.pop("chat_template_kwargs", None) or {}
        expect("chat_template_kwargs", variables, Mapping, "must be a dict of the template's own variables")
        known = {"add_generation_prompt", "continue_final_message", "tools", "chat_template"}
        if wrong := sorted(set(options) - known) or sorted(set(variables) & {*known, "messages"}):
            raise RequestError(
                f"chat has no option {wrong[0]!r}, or it was not given as one; chat_template_kwargs holds a template's "
                f"own variables and no others.{nearest(wrong[0], (known | CALL) - set(variables))}", parameter=wrong[0],
            )  # fmt: skip
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, **options, **variables)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def cache_prefix(self, prompt: Prompt) -> CachedPrefix:
        """Compute a prompt and keep its full blocks in the prefix cache until the handle's ``unpin``.

        Raises RequestError, with nothing kept, if other pins leave too little room, or the model gives no numbers.
        """
        if not self.config.enable_prefix_caching:
            raise ConfigError("cache_prefix needs enable_prefix_caching=True.", parameter="enable_prefix_caching")
        self._need_one("cache_prefix", "data_parallel_size")
        with self._turn:
            (request,), _ = self._finish([prompt], SamplingParams(max_tokens=1, temperature=0.0), None, use_tqdm=False)
            blocks = self.llm_engine.scheduler.blocks
            prefix = CachedPrefix(blocks, blocks.pin(request), self._turn)
        if len(request.prompt_token_ids) - prefix.num_tokens >= blocks.block_size:
            prefix.unpin()
            raise RequestError(
                "the prefix was not computed: other pins leave no room for it, or its logits hold NaN. Unpin some.",
                parameter="prompt", value=prompt,
            )  # fmt: skip
        return prefix

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while requests or pins hold blocks."""
        with self._turn:
            return self.llm_engine.scheduler.blocks.reset_prefix_cache()

    def update_weights(self, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write new weights over the old ones, in place, under the checkpoint's own names (``state_dict()`` or pairs).

        What is not named keeps its values, so several calls may bring a model in pieces; each call holds its tensors
        until all are checked. The prefix cache is emptied. Any floating-point type and device will do.

        Raises, with nothing changed: EngineError while requests or pinned prefixes are alive; CheckpointError for a
        name that the model does not have or that comes twice, and for another shape.
        """
        with self._turn:
            built = self._alive()
            self._need_one("update_weights", "tensor_parallel_size", "data_parallel_size")
            if built.engine.has_unfinished_requests or built.engine.scheduler.blocks.num_held:
                raise EngineError(
                    "weights cannot change under requests and pinned prefixes, whose keys and values are of the old "
                    "ones. Finish or abort the requests, and unpin the prefixes."
                )
            facts = built.plan
            try:
                named = tensors.items() if isinstance(tensors, Mapping) else tensors
                update_weights(built.model, named, facts.device, facts.storage, deterministic=facts.deterministic)
            finally:
                self.reset_prefix_cache()

    def _need_one(self, what: str, *names: str) -> None:
        """Refuse what reaches no other process, where there are others that hold the model."""
        for name in names:
            if (size := getattr(self.config, name)) > 1:
                raise ConfigError(f"{what} needs {name}=1, not {size}. Make a new LLM.", parameter=name, value=size)

    def _alive(self) -> Built:
        if self._built is None:
            raise EngineError("this LLM has been closed; make a new one.")
        return self._built

    def _conversations(self, messages: Conversations, options: Mapping[str, Any]) -> list[TokensPrompt]:
        one = not isinstance(messages, Sequence) or (bool(messages) and isinstance(messages[0], Mapping))
        conversations = cast("Sequence[Sequence[Message]]", [messages] if one else messages)
        return [self.render(conversation, **built_options(options)) for conversation in conversations]

    def _add(self, prompts: Sequence[Prompt], params: Params, priority: Priority, *, stream: bool) -> list[Request]:
        """Check and queue the prompts of one call; if one is refused, none is queued."""
        number = len(prompts)
        if params is None:
            params = self.get_default_sampling_params()
        each = one_each("sampling_params", params, number, SamplingParams)
        order = one_each("priority", 0 if priority is None else priority, number, int)
        engine = self.llm_engine
        added: list[Request] = []
        try:
            for place, (text, tokens, salt) in enumerate(self._encode(prompts)):
                try:
                    request = engine.add_request(
                        None, tokens, each[place], prompt=text, priority=order[place], cache_salt=salt, stream=stream
                    )
                except RequestError as error:
                    about = f"{where(place, number)}{error}"
                    raise RequestError(about, parameter=error.parameter, value=error.value) from error
                added.append(request)
        except BaseException:
            self._abort(added)
            raise
        return added

    def _encode(self, prompts: Sequence[Prompt]) -> list[tuple[str | None, Sequence[int], str]]:
        """Return (text, token ids, cache salt) of each prompt; texts are encoded together."""
        parsed = [parse(prompt, where(place, len(prompts))) for place, prompt in enumerate(prompts)]
        texts = [text for text, tokens, _ in parsed if tokens is None and text is not None]
        encoded = iter(self.get_tokenizer().encode_batch(texts) if texts else ())
        return [(text, next(encoded) if tokens is None else tokens, salt) for text, tokens, salt in parsed]

    def _finish(
        self, prompts: Sequence[Prompt], params: Params, priority: Priority, use_tqdm: bool | Callable[..., Any]
    ) -> tuple[list[Request], list[RequestOutput]]:
        """Queue the prompts of a call and step until they have finished; Ctrl-C comes between two steps."""
        with self._turn, HeldBack() as ctrl_c, old_objects_kept():
            requests = self._add(prompts, params, priority, stream=False)
            try:
                return requests, self._finished(requests, use_tqdm, ctrl_c)
            finally:
                self._abort(requests)

    def _finished(
        self, requests: Sequence[Request], use_tqdm: bool | Callable[..., Any], ctrl_c: HeldBack
    ) -> list[RequestOutput]:
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        started, prompt_tokens, output_tokens = time.perf_counter(), 0, 0
        finished: dict[str, RequestOutput] = {}
        ours = {request.request_id for request in requests}
        hidden = not use_tqdm or (make_bar is tqdm and sys.stderr is None)  # None: a program without a terminal
        look = {"total": len(requests), "desc": "Processed prompts", "disable": hidden, "dynamic_ncols": True}
        try:
            with closing(make_bar(**look)) as bar:
                while len(finished) < len(requests):
                    ctrl_c.check()
                    # others were queued at the engine itself
                    for output in (each for each in self._step() if each.request_id in ours):
                        finished[output.request_id] = output
                        prompt_tokens += len(output.prompt_token_ids)
                        output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
                        seconds = time.perf_counter() - started
                        speed = f"{prompt_tokens / seconds:.1f} toks/s, output: {output_tokens / seconds:.1f} toks/s"
                        bar.set_postfix_str(f"input: {speed}", refresh=False)
                        bar.update(1)
        except EngineError as error:
            finished |= {output.request_id: output for output in error.outputs}
            results = (finished.get(each.request_id) or self.llm_engine.abort(each.request_id) for each in requests)
            error.outputs = [output for output in results if output]
            raise
        return [finished[request.request_id] for request in requests]

    def _stream(
        self, prompts: Sequence[Prompt], params: Params, priority: Priority
    ) -> Generator[RequestOutput, None, None]:
        """Queue the prompts when the first piece is asked for, so that an iterator never begun leaves nothing."""
        requests: list[Request] = []
        places: dict[str, str] = {}
        mail = deque[RequestOutput]()
        try:
            with self._turn, HeldBack():
                requests = self._add(prompts, params, priority, stream=True)
                places = {request.request_id: str(place) for place, request in enumerate(requests)}
                self._mail |= dict.fromkeys(places, mail)
            pending = len(requests)
            with old_objects_kept():
                while pending:
                    while not mail:
                        with self._turn, HeldBack():
                            if not mail:  # another thread's step may have brought some
                                self._step()
                    output = mail.popleft()
                    pending -= output.finished
                    output.request_id = places[output.request_id]
                    yield output
        finally:
            with HeldBack(), self._turn:
                self._abort(requests)
                for request_id in places:
                    self._mail.pop(request_id, None)

    def _step(self) -> list[RequestOutput]:
        """Compute one step; put what a stream waits for into its mail, return the rest."""
        engine = self.llm_engine
        if not engine.has_unfinished_requests:
            raise EngineError("the requests of this call were ended from outside, by an abort or a failed step.")
        try:
            with no_collection():  # it would end a forgotten stream in the middle of a step
                return self._sort(engine.step())
        except EngineError as error:
            error.outputs = self._sort(error.outputs)
            raise

    def _sort(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        rest: list[RequestOutput] = []
        for output in outputs:
            self._mail.get(output.request_id, rest).append(output)
        return rest

    def _abort(self, requests: Sequence[Request]) -> None:
        """End what has not ended."""
        if self._built is not None:
            for request in requests:
                self._built.engine.abort(request.request_id)


def counter(config: EngineConfig, built: Built, replica: int = 0) -> Any:
    """Return what counts what an engine does; None under ``disable_log_stats``, or if the room is not there."""
    if config.disable_log_stats or find_spec(METRICS.partition(":")[0]) is None:
        return None
    return find(METRICS)(built.engine, config, built.plan, replica)
