"""`translate.py --serve`: a page and a JSON endpoint on this machine, for one person.

GET /             the page            GET /docs         the endpoint, described and to try
POST /translate   {"text": "…", "beam": 4, "attention": true}

A lock gives the model to one request at a time.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, Field
from starlette.middleware.trustedhost import TrustedHostMiddleware

from decoding import translate_lines
from engine.errors import UserError
from engine.precision import Precision
from fast import CompiledDecoder
from loading import Trained
from text.cleaning import normalise
from text.sentences import join, sentences
from text.subwords import encode
from tools.reporting import fonts
from validation import attention_of

LONGEST_TEXT = 20_000  # characters, about ten pages
SECONDS_TO_STOP = 5  # after Ctrl-C, for a request that is being answered


class Query(BaseModel):
    """A text to translate."""

    text: str = Field(
        max_length=LONGEST_TEXT, description="lines, each of one sentence or more; longer: stdin"
    )
    beam: int = Field(1, ge=1, le=10, description="hypotheses for each sentence; 1: greedy")
    attention: bool = Field(False, description="also where the model looked for each word")


class Hypothesis(BaseModel):
    """A translation; its score is a log-probability over a length penalty, or None (greedy)."""

    text: str
    score: float | None = None


def hypothesis(text: str, score: float | None) -> Hypothesis:
    """With a score that is short to read."""
    return Hypothesis(text=text, score=None if score is None else round(score, 3))


class Attention(BaseModel):
    """`weights[i][j]`: attention to source word j for target word i. A row sums to 1."""

    source_words: list[str]
    target_words: list[str]
    weights: list[list[float]]


class Sentence(BaseModel):
    """A sentence, its hypotheses, best first, and the attention of the best one."""

    source: str
    hypotheses: list[Hypothesis]
    attention: Attention | None = None
    cut: bool = Field(False, description="too long for the model: the end is not translated")


class Answer(BaseModel):
    """The whole translation, and the sentences of each line."""

    translation: str
    lines: list[list[Sentence]]


class PageModel:
    """The trained model as the page needs it: sentences in, `Sentence` objects out."""

    def __init__(
        self,
        trained: Trained,
        precision: Precision,
        decoder: CompiledDecoder | None,
        length_penalty: float,
    ):
        self.trained = trained
        self.precision = precision
        self.decoder = decoder
        self.length_penalty = length_penalty
        self.tokenizers = (trained.source_tokenizer, trained.target_tokenizer)
        self.longest = trained.model.config.max_length - 1  # tokens, without the end token

    def translate(self, sources: list[str], beam: int, attention: bool) -> list[Sentence]:
        """Translate sentences."""
        with self.precision.autocast(), torch.inference_mode():
            translations = translate_lines(
                self.trained.model,
                *self.tokenizers,
                sources,
                beam=beam,
                nbest=beam if beam > 1 else 0,
                length_penalty=self.length_penalty,
                decoder=self.decoder,
            )
            answers = [
                Sentence(source=source, hypotheses=[hypothesis(*one) for one in found])
                for source, found in zip(sources, translations.nbest)
            ]
            for answer, ids in zip(answers, self.encode(sources, self.longest + 1)):
                answer.cut = len(ids) > self.longest
                if attention and answer.hypotheses[0].text:
                    answer.attention = self.attention(answer.source, answer.hypotheses[0].text)
        return answers

    def encode(self, sources: list[str], longest: int) -> list[list[int]]:
        """Token ids of each sentence, at most `longest`."""
        texts = [normalise(source) for source in sources]
        return encode(self.trained.source_tokenizer, texts, longest)

    def attention(self, source: str, translation: str) -> Attention:
        """Cross-attention of the last layer, in words."""
        seen = attention_of(self.trained.model, self.tokenizers, source, translation, self.longest)
        return Attention(
            source_words=seen.source_words,
            target_words=seen.target_words,
            weights=seen.weights.astype(float).round(3).tolist(),
        )


def make_app(translate: Callable[[list[str], int, bool], list[Sentence]], name: str) -> FastAPI:
    """The web application; `translate(sentences, beam, attention)`, and the run's name."""
    try:
        from fastapi_offline import FastAPIOffline as App  # /docs without network
    except ImportError:
        App = FastAPI
    app = App(title=f"Translation · {name}")
    # A page of another site that resolves its name to 127.0.0.1 is refused.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    lock = asyncio.Lock()

    @app.exception_handler(RequestValidationError)
    async def describe_errors(request, error):
        """One line without the text that was sent, which would otherwise be repeated."""
        problems = [f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()]
        return JSONResponse({"detail": "; ".join(problems)}, 422)

    @app.get("/", include_in_schema=False)
    async def page():
        return FileResponse(Path(__file__).with_name("page.html"))

    @app.get("/font.otf", include_in_schema=False)
    async def font():
        return FileResponse(fonts.OWN)

    @app.post("/translate")
    async def translate_text(query: Query) -> Answer:
        """Translate every sentence of every line."""
        lines = [sentences(line) if line.strip() else [] for line in query.text.splitlines()]
        sources = [sentence.strip() for line in lines for sentence in line]
        try:
            async with lock:
                found = await asyncio.to_thread(translate, sources, query.beam, query.attention)
        except asyncio.CancelledError:  # by uvicorn, SECONDS_TO_STOP after Ctrl-C
            raise HTTPException(503, "the server is stopping") from None
        answers = iter(found)
        translated = [[next(answers) for _ in line] for line in lines]
        translation = "\n".join(
            join(sentence.hypotheses[0].text for sentence in line) for line in translated
        )
        return Answer(translation=translation, lines=translated)

    return app


def serve(trained: Trained, precision: Precision, decoder: CompiledDecoder | None, config) -> None:
    """Serve the page until Ctrl-C. Raises `UserError` if the port is not free."""
    model = PageModel(trained, precision, decoder, config.length_penalty)
    app = make_app(model.translate, trained.run.resolve().name)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", config.port))
            listening.listen()
        except OSError as error:
            raise UserError(
                f"--port {config.port}: {error.strerror}; choose another, or 0 for a free one"
            ) from None
        options = dict(log_level="warning", timeout_graceful_shutdown=SECONDS_TO_STOP)
        server = Server(uvicorn.Config(app, **options))
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after its own shutdown
            asyncio.new_event_loop().run_until_complete(server.serve([listening]))
    print("stopped", file=sys.stderr, flush=True)
    # A normal exit would wait for the thread that translates, perhaps for minutes.
    os._exit(0)


class Server(uvicorn.Server):
    """Prints its address once it can be reached."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then print."""
        await super().startup(sockets)
        address = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        print(
            f"{address} has the page, {address}/docs the JSON endpoint; Ctrl-C ends it",
            file=sys.stderr,
            flush=True,
        )
