"""`translate.py --serve`: a page and a JSON endpoint on this machine.

    GET /             the page            GET /docs         the endpoint, described and to try
    POST /translate   {"text": "…", "beam": 4, "attention": true}

Requests only queue their sentences; one batch at a time is translated, of what has come in meanwhile.
"""

import asyncio
import math
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, Field
from starlette.middleware.trustedhost import TrustedHostMiddleware

from data import Collate
from decoding import beam_search, output_limit, plan_for, translate_lines
from engine.errors import UserError
from engine.precision import Precision
from loading import Trained
from text.cleaning import normalise
from text.sentences import join, sentences
from text.subwords import decode, encode, special_ids
from tools.reporting import fonts
from validation import attention_of

MOST_BYTES = 1_000_000  # of a request
MOST_WAITING = 1000  # sentences, of all requests together
TOGETHER = 64  # sentences translated at once
SECONDS_TO_END = 5  # so long do requests under way have at Ctrl-C to be answered


class Query(BaseModel):
    """What is asked for."""

    text: str = Field(description="lines, each of one sentence or more")
    beam: int = Field(1, ge=1, le=10, description="hypotheses for each sentence; 1: greedy")
    attention: bool = Field(False, description="also where the model looked for each word")


class Hypothesis(BaseModel):
    """A translation and its score: the log-probability, divided by a length penalty; none for greedy search."""

    text: str
    score: float | None = None


class Attention(BaseModel):
    """`weights[i][j]`: how much the model looked at source word j for target word i; a row sums to 1."""

    source_words: list[str]
    target_words: list[str]
    weights: list[list[float]]


class Sentence(BaseModel):
    """A sentence, its translations, best first, and where the model looked for the best one."""

    source: str
    hypotheses: list[Hypothesis]
    attention: Attention | None = None
    cut: bool = Field(
        False, description="the source is longer than the model reads: its end is not translated"
    )


class Answer(BaseModel):
    """The whole translation, line by line, and each line's sentences."""

    translation: str
    lines: list[list[Sentence]]


@dataclass
class Job:
    """A sentence that waits."""

    source: str
    beam: int
    attention: bool
    result: asyncio.Future


class Batcher:
    """Translates what waits: `translate(jobs)` of one beam size gives a `Sentence` for each. Only that is in another thread."""

    def __init__(self, translate: Callable[[list[Job]], list[Sentence]]):
        self.translate, self.jobs, self.came = translate, deque(), asyncio.Event()

    def submit(self, jobs: list[Job]) -> bool:
        """Queue all of them; False if there is no room, now."""
        self.jobs = deque(
            job for job in self.jobs if not job.result.done()
        )  # of a page that was left, or at Ctrl-C
        if len(self.jobs) + len(jobs) > MOST_WAITING:
            return False
        self.jobs.extend(jobs)
        self.came.set()
        return True

    async def run(self) -> None:
        """Without end; what comes in while a batch is under way waits for the next."""
        while await self.came.wait():
            batch = [self.jobs.popleft() for _ in range(min(TOGETHER, len(self.jobs)))]
            if not self.jobs:
                self.came.clear()
            batch = [job for job in batch if not job.result.done()]  # given up since
            for beam in {job.beam for job in batch}:
                alike = [job for job in batch if job.beam == beam]
                try:
                    answers = await asyncio.to_thread(self.translate, alike)
                except Exception as error:  # is the request's answer, and must not end the others
                    answers = [error] * len(alike)
                for job, answer in zip(alike, answers, strict=True):
                    if not job.result.done():
                        failed = isinstance(answer, Exception)
                        (job.result.set_exception if failed else job.result.set_result)(answer)


def translator(
    trained: Trained, precision: Precision, steps: Callable | None, length_penalty: float
) -> Callable:
    """What a `Batcher` calls."""
    tokenizers, longest = (
        (trained.source_tokenizer, trained.target_tokenizer),
        trained.model.config.max_length - 1,
    )

    def translate(jobs: list[Job]) -> list[Sentence]:
        sources, beam = [job.source for job in jobs], jobs[0].beam
        with precision.autocast(), torch.inference_mode():
            if beam == 1:
                texts = translate_lines(trained.model, *tokenizers, sources, steps=steps).texts
                hypotheses = [[Hypothesis(text=text)] for text in texts]
            else:
                hypotheses = alternatives(trained, sources, beam, length_penalty)
            answers = [
                Sentence(source=source, hypotheses=found)
                for source, found in zip(sources, hypotheses)
            ]
            ids = encode(tokenizers[0], [normalise(source) for source in sources], longest + 1)
            for job, answer, whole in zip(jobs, answers, ids):
                answer.cut = len(whole) > longest
                if job.attention and answer.hypotheses[0].text:
                    seen = attention_of(
                        trained.model, tokenizers, job.source, answer.hypotheses[0].text, longest
                    )
                    words = dict(source_words=seen.source_words, target_words=seen.target_words)
                    answer.attention = Attention(
                        **words, weights=seen.weights.astype(float).round(3).tolist()
                    )
        return answers

    return translate


def alternatives(
    trained: Trained, sources: list[str], beam: int, length_penalty: float
) -> list[list[Hypothesis]]:
    """What beam search finds for each source, best first."""
    model, longest = trained.model, trained.model.config.max_length
    collate = Collate(special_ids(trained.source_tokenizer), special_ids(trained.target_tokenizer))
    bos, eos = collate.target_ids["bos"], collate.target_ids["eos"]
    ids = encode(trained.source_tokenizer, [normalise(source) for source in sources], longest - 1)
    found = [[Hypothesis(text="")] for _ in sources]  # an empty source is in no batch
    for rows in plan_for(model, list(map(len, ids)), beam):
        src, src_pad = (
            side.to(model.output.weight.device)
            for side in collate.pad_sources([ids[row] for row in rows])
        )
        limits = output_limit((~src_pad).sum(1), longest)
        tokens, scores = beam_search(model, src, src_pad, limits, bos, eos, beam, length_penalty)
        for row, limit, outputs, values in zip(
            rows, limits.tolist(), tokens.tolist(), scores.tolist()
        ):
            texts = decode(
                trained.target_tokenizer, [output[:limit] for output in outputs]
            )  # without end tokens
            found[row] = [
                Hypothesis(text=text, score=round(score, 3))
                for text, score in zip(texts, values)
                if score > -math.inf
            ]
    return found


def limited_size(app: Callable) -> Callable:
    """`app`, which reads no more than `MOST_BYTES` of a request, however it is sent."""

    async def call(scope, receive, send):
        size = 0

        async def receive_some():
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MOST_BYTES:
                raise HTTPException(
                    413,
                    f"文字太长，请分几次 · more than {MOST_BYTES:,} bytes; send the text in parts",
                )
            return message

        await app(scope, receive_some, send)

    return call


def make_app(translate: Callable[[list[Job]], list[Sentence]], name: str) -> FastAPI:
    """The web application; `name` is the run's."""
    try:
        from fastapi_offline import FastAPIOffline as App  # with /docs that need no network
    except ImportError:
        App = FastAPI
    batcher = Batcher(translate)

    @asynccontextmanager
    async def lifespan(app):
        running = asyncio.create_task(batcher.run())
        yield
        running.cancel()

    app = App(title=f"Translation · {name}", lifespan=lifespan)
    app.add_middleware(limited_size)
    # No page of another name reads here.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])

    @app.exception_handler(RequestValidationError)
    async def say_what_is_wrong(request, error):
        """In words of ours: the answer does not repeat what was sent."""
        wrong = "; ".join(
            f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors()
        )
        return JSONResponse({"detail": wrong}, 422)

    @app.get("/", include_in_schema=False)
    async def page():
        return FileResponse(Path(__file__).with_name("page.html"))

    @app.get("/font.otf", include_in_schema=False)
    async def font():
        return FileResponse(fonts.OWN)

    @app.post(
        "/translate",
        responses={413: {"description": "too long"}, 503: {"description": "the queue is full"}},
    )
    async def translate_text(query: Query, request: Request) -> Answer:
        """Translate every sentence of every line."""
        text = query.text.encode(
            errors="replace"
        ).decode()  # halves of characters, which JSON can hold, go
        try:
            lines = await asyncio.to_thread(
                lambda: [sentences(line) if line.strip() else [] for line in text.splitlines()]
            )
            if sum(map(len, lines)) > MOST_WAITING:
                raise HTTPException(
                    413,
                    f"句子太多，请分几次 · more than {MOST_WAITING:,} sentences; send them in parts",
                )
            new = asyncio.get_running_loop().create_future
            jobs = [
                [Job(source.strip(), query.beam, query.attention, new()) for source in line]
                for line in lines
            ]
            everything = [job for line in jobs for job in line]
            if not batcher.submit(everything):
                why = "排队的句子太多，请稍后再试 · too many sentences are waiting; try again in a moment"
                raise HTTPException(503, why, {"Retry-After": "2"})
            waiting = asyncio.gather(*(job.result for job in everything))
            try:
                while (
                    not (await asyncio.wait([waiting], timeout=1))[0]
                    and not await request.is_disconnected()
                ):
                    pass
            finally:
                waiting.cancel()  # of what is done nothing; what is not begun goes
            await waiting
        except asyncio.CancelledError:  # the page was left; or uvicorn's, after `SECONDS_TO_END`
            raise HTTPException(503, "程序正在结束 · the server is ending") from None
        done = [[job.result.result() for job in line] for line in jobs]
        translation = "\n".join(
            join(sentence.hypotheses[0].text for sentence in line) for line in done
        )
        return Answer(translation=translation, lines=done)

    return app


def serve(trained: Trained, precision: Precision, steps: Callable | None, config) -> None:
    """Until Ctrl-C. Raises `UserError` if the port is not free."""
    app = make_app(
        translator(trained, precision, steps, config.length_penalty), trained.run.resolve().name
    )
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", config.port))
            listening.listen()
        except OSError as error:
            raise UserError(
                f"--port {config.port}: {error.strerror}; choose another, or 0 for a free one"
            ) from None
        options = dict(log_level="warning", timeout_graceful_shutdown=SECONDS_TO_END)
        with suppress(KeyboardInterrupt):  # which uvicorn raises again when all is put away
            asyncio.new_event_loop().run_until_complete(
                Server(uvicorn.Config(app, **options)).serve([listening])
            )
    print("stopped", file=sys.stderr, flush=True)
    os._exit(
        0
    )  # any other way out waits for the thread with the batch under way, which may take minutes


class Server(uvicorn.Server):
    """Says where it is when it is there, and Ctrl-C ends it in order."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        await super().startup(sockets)
        address = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        print(
            f"{address} has the page, {address}/docs the JSON endpoint; Ctrl-C ends it",
            file=sys.stderr,
            flush=True,
        )
