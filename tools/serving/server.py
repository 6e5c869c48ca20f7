"""`translate.py --serve`: a page and a JSON endpoint on this machine, for one person.

GET  /            the page
GET  /model       what `describe` returns
POST /translate   {"text": "…", "beam": 4, "attention": true} -> what `PageServer.translate` returns

A lock gives the model to one request at a time. Only requests by a local name of this machine are
answered, and only JSON from the page itself or a program: another page in the same browser can
neither use the model nor, by a name of its own for 127.0.0.1 (DNS rebinding), read an answer.
"""

import json
import os
import re
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

import torch

from decoding import Decoder
from engine.errors import UserError
from engine.precision import Precision
from loading import Trained
from text.cleaning import normalise
from text.sentences import join, sentences
from text.subwords import encode
from tools.reporting.attention import attention_of
from translation import translate_lines

LONGEST_TEXT = 20_000  # characters, about ten pages
MOST_HYPOTHESES = 10
SENTENCES_AT_ONCE = 8  # between these the server looks whether the client still waits
LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
SCORES = ("test-greedy", "validation-greedy", "train-greedy")  # the first that is there


def serve(trained: Trained, precision: Precision, decoder: Decoder, config) -> None:
    """Serve the page until Ctrl-C. Raises `UserError` if the port is not free."""
    try:
        server = PageServer(config.port, trained, precision, decoder, config.length_penalty)
    except OSError as error:
        raise UserError(
            f"--port {config.port}: {error.strerror}; choose another, or 0 for a free one"
        ) from None
    address = f"http://127.0.0.1:{server.server_port}"
    print(f"serving at {address}; press Ctrl-C to stop", file=sys.stderr, flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    print("stopped", file=sys.stderr, flush=True)
    # A normal exit would disturb a thread that still translates.
    os._exit(0)


def describe(trained: Trained) -> dict:
    """What the page says about the model; "score" is None before an evaluation."""
    config = trained.config
    score = None
    for name in SCORES:
        with suppress(OSError, ValueError, KeyError, TypeError):
            text = (trained.run / "eval" / f"{name}.json").read_text(encoding="utf-8")
            figures = json.loads(text)
            if Path(figures["checkpoint"]).name != trained.checkpoint.name:
                continue  # the score of another one
            score = {"bleu": float(figures["nltk"]), "split": figures["split"]}
            break
    pairs = None
    is_sample = False
    with suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads((trained.run / "data.json").read_text(encoding="utf-8"))
        pairs = facts["counts"]["kept"]
        is_sample = facts["is_sample"]
    return {
        "run": trained.run.name,
        "checkpoint": trained.checkpoint.name,
        "data": config["data"],
        "is_sample": is_sample,
        "pairs": pairs,
        "source": config["source"],
        "target": config["target"],
        "score": score,
        "longest": trained.model.config.longest_sentence,
    }


class PageServer(ThreadingHTTPServer):
    """Answers requests to 127.0.0.1 by translations of one model."""

    def __init__(
        self,
        port: int,
        trained: Trained,
        precision: Precision,
        decoder: Decoder,
        length_penalty: float,
    ):
        super().__init__(("127.0.0.1", port), Handler)
        self.description = describe(trained)
        self.model = trained.model
        self.tokenizers = (trained.source_tokenizer, trained.target_tokenizer)
        self.precision = precision
        self.decoder = decoder
        self.length_penalty = length_penalty
        self.longest = trained.model.config.longest_sentence
        self.lock = Lock()

    def handle_error(self, request, client_address) -> None:
        """Print the traceback in the terminal, except where the browser has closed the line."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def translate(
        self,
        text: str,
        beam: int,
        attention: bool,
        has_left: Callable[[], bool] = lambda: False,
    ) -> dict:
        """The translation of a text, and under "lines" the sentences of each line.

        `has_left`: whether nobody waits for the answer any more; then it is an error.
        """
        lines = [sentences(line) if line.strip() else [] for line in text.splitlines()]
        sources = [sentence.strip() for line in lines for sentence in line]
        found = []
        with self.lock, self.precision.autocast(), torch.inference_mode():
            for first in range(0, len(sources), SENTENCES_AT_ONCE):
                if has_left():
                    raise ConnectionAbortedError("the client has left")
                some = sources[first : first + SENTENCES_AT_ONCE]
                found += self.translate_sentences(some, beam, attention)
        translated = iter(found)
        answers = [[next(translated) for _ in line] for line in lines]
        translation = "\n".join(
            join(answer["hypotheses"][0]["text"] for answer in line) for line in answers
        )
        return {"translation": translation, "lines": answers}

    def translate_sentences(self, sources: list[str], beam: int, attention: bool) -> list[dict]:
        """Of each sentence the hypotheses, best first, and the cross-attention of the best one.

        The score of greedy search is None. "cut": the sentence is too long for the model.
        """
        translations = translate_lines(
            self.decoder,
            *self.tokenizers,
            sources,
            beam=beam,
            nbest=beam if beam > 1 else 0,
            length_penalty=self.length_penalty,
        )
        texts = [normalise(source) for source in sources]
        ids = encode(self.tokenizers[0], texts, self.longest + 1)
        answers = []
        for source, hypotheses, tokens in zip(sources, translations.nbest, ids):
            best, _ = hypotheses[0]
            answer = {
                "source": source,
                "hypotheses": [{"text": text, "score": score} for text, score in hypotheses],
                "cut": len(tokens) > self.longest,
                "attention": None,
            }
            if attention and best:
                answer["attention"] = self.attention(source, best)
            answers.append(answer)
        return answers

    def attention(self, source: str, translation: str) -> dict | None:
        """`weights[i][j]`: attention to source word j for target word i. A row sums to 1.

        None if the model has no such attention.
        """
        found = attention_of(self.model, self.tokenizers, source, translation, self.longest)
        if found is None:
            return None
        return {
            "source_words": found.source_words,
            "target_words": found.target_words,
            "weights": found.weights.astype(float).round(3).tolist(),
        }


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: PageServer

    def do_GET(self) -> None:
        """Send the page, or the facts about the model that it shows."""
        path = self.path.partition("?")[0]
        if not self.is_local():
            self.send(403, "text/plain", b"open the page as http://127.0.0.1 or http://localhost")
        elif path == "/":
            page = Path(__file__).with_name("page.html").read_bytes()
            self.send(200, "text/html", page)
        elif path == "/model":
            self.send_json(200, self.server.description)
        else:
            self.send(404, "text/plain", b"the page is at /")

    do_HEAD = do_GET  # `send` leaves the content out

    def do_POST(self) -> None:
        """Translate a text, or send one line on what is wrong with the request."""
        status = 200
        try:
            if self.path.partition("?")[0] != "/translate":
                raise UserError("POST to /translate")
            length = self.headers.get("Content-Length", "0")
            if not re.fullmatch("[0-9]{1,8}", length):  # of bytes, below 100 MB
                raise UserError("the request has no valid Content-Length")
            query = self.rfile.read(int(length))
            self.require_local_json()
            answer = self.server.translate(*read_query(query), self.has_left)
        except UserError as error:
            status, answer = 400, {"detail": str(error)}
        except ConnectionError:
            raise
        except Exception:
            self.send_json(500, {"detail": "an error; the terminal of the server shows it"})
            raise
        self.send_json(status, answer)

    def is_local(self) -> bool:
        """Whether the browser was given a local name, and no other page's script asks."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")  # of the page whose script asks
        with suppress(ValueError):  # not an address
            is_ours = origin is None or urlsplit(origin).netloc == host
            return is_ours and urlsplit(f"//{host}").hostname in LOCAL_NAMES
        return False

    def require_local_json(self) -> None:
        """Raises `UserError` for what only another page would send."""
        if not self.is_local():
            raise UserError("only the page at http://127.0.0.1 and local programs may translate")
        # Without this type a browser would let any page send the request.
        if self.headers.get_content_type() != "application/json":
            raise UserError("send JSON with `Content-Type: application/json`")

    def has_left(self) -> bool:
        """Whether the client has closed the connection, on which it sends nothing more."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send_json(self, status: int, answer: dict) -> None:
        """Send an answer of the endpoint."""
        self.send(status, "application/json", json.dumps(answer).encode())

    def send(self, status: int, kind: str, content: bytes) -> None:
        """Send the answer."""
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_) -> None:
        """Print nothing for a request."""


def read_query(body: bytes) -> tuple[str, int, bool]:
    """The text, the beam size and whether attention is wanted. Raises `UserError`."""
    try:
        query = json.loads(body)
        text = query["text"]
        text.encode()  # half a character is an error
        beam = query.get("beam", 1)
        attention = bool(query.get("attention", False))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError('send JSON: {"text": "…", "beam": 4, "attention": true}') from None
    if len(text) > LONGEST_TEXT:
        raise UserError(
            f"the text has more than {LONGEST_TEXT:,} characters; use translate.py < FILE"
        )
    if type(beam) is not int or not 1 <= beam <= MOST_HYPOTHESES:
        raise UserError(f"beam must be a whole number from 1 to {MOST_HYPOTHESES}")
    return text, beam, attention
