"""The engine for asyncio: one async iterator for each request, as many at once as one likes.

The engine is not thread-safe, so one thread owns it. Commands reach it through a queue, between two steps; outputs
leave it through the event loops of those who wait:

    event loops                                   the engine's thread
    generate() -- check, encode                   take commands | step | put outputs into inboxes
        |--- begin, abort --> queue ------------->|
        |<-- call_soon_threadsafe, once a step <--|   an inbox merges what its reader has not taken

An inbox holds one merged output, however slow its reader is: memory is bounded by the request's own length.
"""

import asyncio
import contextlib
import gc
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import Any

from nanovllm.engine import LLMEngine
from nanovllm.errors import EngineError, NanoError, RequestError
from nanovllm.interrupts import old_objects_kept
from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.prompts import Prompt
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.tokenizer import Message, Tokenizer

logger = logging.getLogger(__name__)

Command = Callable[[LLMEngine], None]

Failure = str | NanoError
"""Why a request has no output: the text of an EngineError, or the error that is the reader's own."""


class AsyncLLM:
    """A model that answers many callers at once. ``options`` are those of ``LLM``; an open ``LLM`` is taken over.

    Use it as ``async with AsyncLLM(...) as llm``, or call ``close()``. Event loops may come and go, and there may be
    several; ``close``, ``abort`` and ``generate`` may be called from any thread that has one.

    Errors: those of ``LLM`` here; RequestError from the call of ``generate`` and ``chat``, and for a grammar that is
    refused out of the iterator; EngineError out of the iterators of the requests that a failed step ended, and of all
    of them after ``close()``.
    """

    def __init__(self, model: "str | os.PathLike[str] | LLM", **options: Any) -> None:
        self._llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._lock = threading.Lock()  # held for the tables and inboxes, never during a step
        self._inboxes: dict[str, Inbox] = {}  # by the engine's own name for a request, which is never used again
        self._keys: dict[str, str] = {}  # the caller's name -> the engine's
        self._count = count()
        self._gone: str | None = None  # why there is no engine any more
        self._thread = threading.Thread(target=self._serve, name="nanovllm engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Finish the step under way, end all requests, and give the memory back. A second call does nothing."""
        self._commands.put(None)
        self._thread.join()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; see ``LLM.get_tokenizer``."""
        return self._llm.get_tokenizer()

    def get_metrics(self, *, per_replica: bool = False) -> list[Any]:
        """Return what has been counted; see ``LLM.get_metrics``. Any thread may ask, and no request waits for it.

        With ``data_parallel_size`` the caller waits for the replicas' answers: ask in a thread if milliseconds count.
        """
        return self._llm.get_metrics(per_replica=per_replica)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt. Yields outputs until one is ``finished``, also when ``abort`` ends it.

        ``sampling_params.output_kind`` says what each holds: all so far (CUMULATIVE, the default), what is new since
        the one before (DELTA), or there is one only, at the end (FINAL_ONLY). A reader slower than the engine gets
        fewer and larger ones. ``request_id=None`` draws one. Work begins when the first output is asked for. The
        request ends with its iterator: when the task that reads is cancelled, the loop is left, or ``aclose()`` called.

        Raises RequestError at once for what can never be served, and EngineError after ``close()``. Whether a grammar
        can be compiled is found out when work begins: the iterator raises that RequestError.
        """
        with self._lock:
            self._check(request_id)
        params = self._llm.get_default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params is {params!r}; it must be SamplingParams.", parameter="sampling_params"
            )
        params = params.clone()
        text, tokens, salt = self._llm.encode(prompt)
        self._llm.llm_engine.check(tokens, params, priority, salt)

        def begin(engine: LLMEngine, key: str) -> None:
            stream = params.output_kind is not RequestOutputKind.FINAL_ONLY
            engine.add_request(key, tokens, params, prompt=text, priority=priority, cache_salt=salt, stream=stream)

        return self._read(request_id, params.output_kind, begin)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation as ``generate`` does; ``template`` is that of ``LLM.chat``."""
        return self.generate(self._llm.render(messages, **template), sampling_params, request_id, priority=priority)

    def abort(self, request_id: str) -> None:
        """End a request: its iterator yields what it had, with ``finish_reason`` "abort". An unknown one is nothing."""

        def end(engine: LLMEngine) -> None:
            output = engine.abort(self._keys.get(request_id, ""))
            self._post([output] if output else [])

        self._commands.put(end)

    async def _read(
        self, name: str | None, kind: RequestOutputKind, begin: Callable[[LLMEngine, str], None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Queue the request, and yield what comes into its inbox until it ends, or the reader leaves."""
        cumulative = kind is RequestOutputKind.CUMULATIVE
        with self._lock:
            self._check(name)
            key = str(next(self._count))
            if name is None:
                name = next(drawn for drawn in map(str, count(int(key))) if drawn not in self._keys)
            inbox = Inbox(name, asyncio.get_running_loop(), cumulative=cumulative)
            self._keys[name], self._inboxes[key] = key, inbox
            self._commands.put(lambda engine: self._begin(engine, key, begin))
        ended = False
        try:
            while not ended:
                await inbox.arrived.wait()
                with self._lock:
                    output = inbox.take()
                output.request_id, ended = name, output.finished
                yield output
        finally:
            with self._lock:
                self._forget(key)
            if not ended:
                self._commands.put(_end(key))

    def _forget(self, key: str) -> None:
        if key in self._inboxes:
            del self._keys[self._inboxes.pop(key).name]

    def _check(self, request_id: str | None) -> None:
        if self._gone is not None:
            raise EngineError(self._gone)
        if request_id is not None and (not isinstance(request_id, str) or request_id in self._keys):
            raise RequestError(
                f"request_id is {request_id!r}; it must be a string that is not in use, or None to have one drawn.",
                parameter="request_id", value=request_id,
            )  # fmt: skip

    # --- in the engine's thread ---

    def _serve(self) -> None:
        reason = "this AsyncLLM has been closed; make a new one."
        try:
            gc.collect()
            with old_objects_kept():
                while self._obey():
                    self._step()
        except BaseException as error:  # a panic in a library of Rust is no Exception, and readers would wait for ever
            logger.exception("the engine is lost")
            reason = f"the engine is lost: {type(error).__name__}: {error}"
        with self._lock:
            self._gone = reason
            waiting = dict.fromkeys(self._inboxes, reason)
        self._post([], waiting)
        self._llm.close()

    def _obey(self) -> bool:
        """Take the commands that have come, and wait for one while there is nothing to do; False ends it all."""
        engine = self._llm.llm_engine
        while not self._commands.empty() or not engine.has_unfinished_requests:
            command = self._commands.get()
            if command is None:
                return False
            command(engine)
        return True

    def _begin(self, engine: LLMEngine, key: str, begin: Callable[[LLMEngine, str], None]) -> None:
        if key in self._inboxes:  # else its reader has left already
            try:
                begin(engine, key)
            except EngineError:
                raise
            except NanoError as error:  # a grammar is compiled here, and may be refused
                self._post([], {key: type(error)(str(error), parameter=error.parameter, value=error.value)})

    def _step(self) -> None:
        try:
            self._post(self._llm.llm_engine.step())
        except EngineError as error:
            ended = [output.request_id for output in error.outputs if output.finished]
            self._post([output for output in error.outputs if not output.finished], dict.fromkeys(ended, str(error)))

    def _post(self, outputs: Sequence[RequestOutput], failures: Mapping[str, Failure] | None = None) -> None:
        """Put outputs, and the reasons of failures, into inboxes, and wake their readers, each event loop once."""
        wake: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        with self._lock:
            news: list[tuple[str, RequestOutput | Failure]] = [(output.request_id, output) for output in outputs]
            news += (failures or {}).items()
            for key, each in news:
                inbox = self._inboxes.get(key)
                if inbox is None:  # its reader has left, and the command that ends it is on its way
                    continue
                if inbox.loop.is_closed():  # nobody will read, and nobody can say so
                    self._forget(key)
                    self._commands.put(_end(key))
                elif inbox.put(each):
                    wake.setdefault(inbox.loop, []).append(inbox.arrived)
        for loop, events in wake.items():
            with contextlib.suppress(RuntimeError):  # closed at this moment; the next output finds out
                loop.call_soon_threadsafe(_set, events)


class Inbox:
    """What one reader has not taken yet, merged. Under the lock of its AsyncLLM, but for ``arrived``."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, *, cumulative: bool) -> None:
        self.name = name
        """What its reader calls the request."""
        self.loop = loop
        self.arrived = asyncio.Event()
        """Set in the reader's event loop when there is something."""
        self._cumulative = cumulative
        self._last: RequestOutput | None = None
        self._samples: dict[int, Sample] = {}
        self._failure: Failure | None = None
        self._called = False  # the reader has been woken, and has not come yet

    def put(self, news: RequestOutput | Failure) -> bool:
        """Add an output, or why there will be none; return whether the reader has to be woken."""
        if not isinstance(news, RequestOutput):
            self._failure = news
        else:
            self._last = news
            for new in news.outputs:
                self._samples.setdefault(new.index, Sample()).add(new)
        wake, self._called = not self._called, True
        return wake

    def take(self) -> RequestOutput:
        """Return all there is, or raise what the request failed with."""
        self.arrived.clear()
        self._called = False
        if isinstance(self._failure, NanoError):
            raise self._failure
        if self._failure is not None or self._last is None:
            raise EngineError(self._failure or "the reader was woken, and there is nothing to read.")
        outputs = [self._samples[index].merged() for index in sorted(self._samples)]
        if not self._cumulative:
            self._samples = {}
        return replace(self._last, outputs=outputs)


class Sample:
    """The outputs of one sample, one after the other."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Any] = []
        self._last: CompletionOutput | None = None

    def add(self, new: CompletionOutput) -> None:
        """Add what is new. Cost: what is new."""
        self._last = new
        self._texts.append(new.text)
        self._token_ids += new.token_ids
        self._logprobs += new.logprobs or ()

    def merged(self) -> CompletionOutput:
        """Return all in one."""
        assert self._last is not None
        self._texts = ["".join(self._texts)]
        logprobs = None if self._last.logprobs is None else list(self._logprobs)
        return replace(self._last, text=self._texts[0], token_ids=list(self._token_ids), logprobs=logprobs)


def _set(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()


def _end(key: str) -> Command:
    """Return the command that aborts a request which nobody reads any more."""

    def end(engine: LLMEngine) -> None:
        engine.abort(key)

    return end
