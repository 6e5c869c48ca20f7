"""The page's server: every request is answered, with its own translation or with one line that says why not."""

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import HANGS, Forked

from decoding import translate_lines
from engine.errors import UserError
from engine.precision import choose_precision
from loading import load_trained
from text.sentences import sentences

server = pytest.importorskip("tools.serving.server")
testclient = pytest.importorskip("starlette.testclient")
HERE = "http://127.0.0.1"


@pytest.fixture(scope="module")
def trained(tiny_run):
    return load_trained(tiny_run)


@pytest.fixture
def client(trained):
    precision = choose_precision(torch.device("cpu"), "fp32")
    app = server.make_app(server.translator(trained, precision, None, 0.6), "a run")
    with testclient.TestClient(app, base_url=HERE) as client:
        yield client


def translated(job, text: str):
    return server.Sentence(source=job.source, hypotheses=[server.Hypothesis(text=text)])


def ask(client, text: str, **more):
    return client.post("/translate", json={"text": text, **more})


@pytest.mark.parametrize("beam", [1, 3])
def test_lines_and_sentences_come_back_in_their_places(client, trained, beam):
    text = "一二。三四！\n\n五六"
    answer = ask(client, text, beam=beam, attention=True).json()
    pieces = [piece for line in text.split("\n") for piece in sentences(line)]
    tools = trained.model, trained.source_tokenizer, trained.target_tokenizer
    first, second, _, last = translate_lines(*tools, pieces, beam=beam, length_penalty=0.6).texts
    assert answer["translation"] == f"{first} {second}\n\n{last}"
    sources = [[sentence["source"] for sentence in line] for line in answer["lines"]]
    assert sources == [["一二。", "三四！"], [], ["五六"]]
    for sentence in (sentence for line in answer["lines"] for sentence in line):
        scores = [hypothesis["score"] for hypothesis in sentence["hypotheses"]]
        assert (
            scores == ([None] if beam == 1 else sorted(scores, reverse=True))
            and len(scores) == beam
        )
        seen = sentence["attention"]
        assert len(seen["weights"]) == len(seen["target_words"])
        assert all(
            len(row) == len(seen["source_words"]) and abs(sum(row) - 1) < 0.02
            for row in seen["weights"]
        )


def test_200_requests_at_once_are_all_answered_by_few_batches(monkeypatch):
    """Each gets its own translation; requests wait together while a batch, the first here, is under way."""
    sizes, came, all_came, submit = [], [], threading.Event(), server.Batcher.submit

    def count(batcher, jobs):
        came.append(submit(batcher, jobs))
        if len(came) == 200:
            all_came.set()
        return came[-1]

    def translate(jobs):
        all_came.wait(HANGS)
        sizes.append(len(jobs))
        return [translated(job, job.source[::-1]) for job in jobs]

    async def send():
        httpx = testclient.httpx
        app = server.make_app(translate, "a run")
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HERE)
        async with app.router.lifespan_context(app), client:
            return await asyncio.gather(*(ask(client, f"text {number}") for number in range(200)))

    monkeypatch.setattr(server.Batcher, "submit", count)
    answers = asyncio.run(send())
    assert [answer.json()["translation"] for answer in answers] == [
        f"text {number}"[::-1] for number in range(200)
    ]
    assert sum(sizes) == 200 and max(sizes) <= server.TOGETHER and len(sizes) <= 5


def test_a_full_queue_says_so(client, monkeypatch):
    batcher = server.Batcher(None)  # does not run: what waits goes on waiting
    left = SimpleNamespace(done=lambda: False)
    jobs = [server.Job("一", 1, False, left)] * 600
    assert batcher.submit(jobs) and not batcher.submit(jobs) and batcher.submit(jobs[:400])
    left.done = lambda: True  # the pages are gone: nobody waits for these
    assert batcher.submit(jobs)
    monkeypatch.setattr(server.Batcher, "submit", lambda *_: False)
    full = ask(client, "一。")
    assert (
        full.status_code == 503
        and "try again" in full.json()["detail"]
        and full.headers["retry-after"]
    )
    assert ask(client, "一。" * (server.MOST_WAITING + 1)).status_code == 413


@pytest.mark.parametrize("chunked", [False, True])
def test_a_megabyte_is_refused(client, chunked):
    body = json.dumps({"text": "a" * 1_000_000}).encode()
    answer = client.post("/translate", content=iter([body[:500], body[500:]]) if chunked else body)
    assert answer.status_code == 413 and "1,000,000 bytes" in answer.json()["detail"]


@pytest.mark.parametrize(
    "body", ['{"text": 5}', '{"text": "<b>", "beam": 99}', '{"text', '{"<script>": 1}', '["<i>"]']
)
def test_a_wrong_request_is_told_so_and_not_repeated(client, body):
    answer = client.post("/translate", content=body, headers={"Content-Type": "application/json"})
    assert (
        answer.status_code == 422
        and isinstance(answer.json()["detail"], str)
        and "<" not in answer.text
    )


def test_nothing_of_the_user_is_html(client, tiny_run):
    broken = client.post(
        "/translate",
        content='{"text": "\\ud800 <b>"}',
        headers={"Content-Type": "application/json"},
    )
    assert broken.status_code == 200 and broken.headers["content-type"] == "application/json"
    assert "<" not in client.get("/%3Cscript%3E").text
    assert client.get("/", headers={"Host": "elsewhere.example"}).status_code == 400
    page = client.get("/").text
    assert not any(word in page for word in ("innerHTML", "insertAdjacentHTML", "document.write"))
    assert str(tiny_run.parent) not in page + client.get("/docs").text


def test_sentences_of_a_page_that_was_left_are_not_translated():
    begun, left, batches = threading.Event(), threading.Event(), []

    def translate(jobs):
        batches.append([job.source for job in jobs])
        begun.set()
        assert left.wait(HANGS)
        return [translated(job, "x") for job in jobs]

    async def leave_and_ask_again():
        app, body = (
            server.make_app(translate, "a run"),
            json.dumps({"text": "一。" * (server.TOGETHER + 1)}).encode(),
        )
        scope = dict(
            type="http",
            method="POST",
            path="/translate",
            raw_path=b"/translate",
            query_string=b"",
            root_path="",
            scheme="http",
            http_version="1.1",
            client=None,
            server=("127.0.0.1", 80),
            state={},
            asgi={"version": "3.0"},
            headers=[(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        )
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            if not begun.is_set():
                await asyncio.Event().wait()  # asked whether the page was left: not yet
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        async with app.router.lifespan_context(app):
            await app(scope, receive, send)
            left.set()

    asyncio.run(leave_and_ask_again())
    assert [len(batch) for batch in batches] == [
        server.TOGETHER
    ]  # the sentence that was left is in none


def test_an_error_of_the_model_does_not_end_the_server():
    def translate(jobs):
        if jobs[0].source == "bad":
            raise RuntimeError("no")
        return [translated(job, "ok") for job in jobs]

    app = server.make_app(translate, "a run")
    with testclient.TestClient(app, base_url=HERE, raise_server_exceptions=False) as client:
        assert [ask(client, text).status_code for text in ("bad", "good", "bad", "good")] == [
            500,
            200,
            500,
            200,
        ]


def test_a_port_in_use_is_one_line(trained):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = SimpleNamespace(port=other.getsockname()[1], length_penalty=0.6)
        with pytest.raises(UserError, match=r"^--port \d+: Address already in use; choose another"):
            server.serve(trained, None, None, config)


def never_done(busy: str):
    """In the server's process: translating, or cutting a text into sentences, says when it begins and has no end."""
    without_end = lambda *_: print("begun", flush=True) or time.sleep(10**6)  # noqa: E731
    server.SECONDS_TO_END = 1
    server.translator = lambda *_: without_end
    server.sentences = without_end if busy == "cutting" else server.sentences


@pytest.mark.parametrize("busy", ["", "translating", "cutting"])
def test_ctrl_c_ends_it_also_while_a_text_is_under_way(tiny_run, tmp_path, busy):
    flags = "--ckpt", tiny_run, "--serve", "--port", 0, "--device", "cpu"
    script = Forked("translate.py", *flags, cwd=tmp_path, first=(never_done, busy) if busy else ())
    try:
        address = script.wait_for("Ctrl-C ends it").splitlines()[-1].split()[0]
        connection = http.client.HTTPConnection(address.removeprefix("http://"))
        connection.request(
            "POST", "/translate", '{"text": "1"}', {"Content-Type": "application/json"}
        )
        if busy:
            script.wait_for("begun")
        else:
            assert connection.getresponse().status == 200
        with pytest.raises(
            OSError
        ):  # by another address of this machine: the page is for its user alone
            socket.create_connection(("127.0.0.2", int(address.rpartition(":")[2])), timeout=5)
        os.kill(script.process.pid, signal.SIGINT)
        assert script.wait() == 0 and script.output.endswith("stopped\n")
        assert "Traceback" not in script.output and "Exception" not in script.output
    finally:
        script.process.kill()


def test_a_sentence_that_the_model_cannot_hold_says_that_it_is_cut(client):
    assert [ask(client, "一" * count).json()["lines"][0][0]["cut"] for count in (5, 100)] == [
        False,
        True,
    ]
