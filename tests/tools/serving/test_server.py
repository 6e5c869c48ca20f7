"""The page's server answers each request by its translation or one line on what is wrong."""

import http.client
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from conftest import Forked

from decoding import translate_lines
from engine.errors import UserError
from engine.precision import choose_precision
from loading import load_trained
from text.sentences import sentences

server = pytest.importorskip("tools.serving.server")
testclient = pytest.importorskip("starlette.testclient")
LOCALHOST = "http://127.0.0.1"


@pytest.fixture(scope="module")
def trained(tiny_run):
    return load_trained(tiny_run)


@pytest.fixture
def client(trained):
    precision = choose_precision(torch.device("cpu"), "fp32")
    app = server.make_app(server.PageModel(trained, precision, None, 0.6).translate, "a run")
    with testclient.TestClient(app, base_url=LOCALHOST) as client:
        yield client


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
        assert len(scores) == beam
        assert scores == ([None] if beam == 1 else sorted(scores, reverse=True))
        seen = sentence["attention"]
        assert len(seen["weights"]) == len(seen["target_words"])
        for row in seen["weights"]:
            assert len(row) == len(seen["source_words"]) and sum(row) == pytest.approx(1, abs=0.02)


def test_a_sentence_longer_than_the_model_reads_is_marked_as_cut(client):
    answers = [ask(client, "一" * count).json() for count in (5, 100)]
    assert [answer["lines"][0][0]["cut"] for answer in answers] == [False, True]


def test_one_request_at_a_time_has_the_model_and_an_error_does_not_keep_it():
    running, most = [], []

    def translate(sources, beam, attention):
        running.append(sources)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()
        if sources == ["bad"]:
            raise RuntimeError("no")
        hypothesis = server.Hypothesis(text=sources[0][::-1])
        return [server.Sentence(source=sources[0], hypotheses=[hypothesis])]

    app = server.make_app(translate, "a run")
    texts = [f"text {number}" for number in range(20)] + ["bad"]
    with (
        testclient.TestClient(app, base_url=LOCALHOST, raise_server_exceptions=False) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(lambda text: ask(client, text), ["bad", *texts]))
    assert answers[0].status_code == answers[-1].status_code == 500
    assert [answer.json()["translation"] for answer in answers[1:-1]] == [
        t[::-1] for t in texts[:-1]
    ]
    assert max(most) == 1


WRONG_REQUESTS = [
    '{"text": 5}',
    '{"text": "<b>", "beam": 99}',
    '{"text',
    '["<i>"]',
    '{"text": "\\ud800 <b>"}',  # half a character
    f'{{"text": "{"<" * (server.LONGEST_TEXT + 1)}"}}',
]


@pytest.mark.parametrize("body", WRONG_REQUESTS)
def test_a_wrong_request_gets_a_line_that_does_not_repeat_it(client, body):
    answer = client.post("/translate", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422 and isinstance(answer.json()["detail"], str)
    assert "<" not in answer.text


def test_text_of_the_user_is_never_html_and_other_hosts_are_refused(client, tiny_run):
    assert "<" not in client.get("/%3Cscript%3E").text
    assert client.get("/", headers={"Host": "elsewhere.example"}).status_code == 400
    page = client.get("/").text
    assert not any(word in page for word in ("innerHTML", "insertAdjacentHTML", "document.write"))
    assert str(tiny_run.parent) not in page + client.get("/docs").text


def test_a_port_in_use_is_one_line(trained):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = SimpleNamespace(port=other.getsockname()[1], length_penalty=0.6)
        with pytest.raises(UserError, match=r"^--port \d+: Address already in use; choose another"):
            server.serve(trained, None, None, config)


def translate_forever():
    """In the server's process: the model begins to translate and never ends."""

    def translate(*_):
        print("begun", flush=True)
        threading.Event().wait()

    server.SECONDS_TO_STOP = 1
    server.PageModel.translate = translate


@pytest.mark.parametrize("busy", [False, True])
def test_ctrl_c_ends_it_also_during_a_translation(tiny_run, tmp_path, busy):
    flags = "--ckpt", tiny_run, "--serve", "--port", 0, "--device", "cpu"
    first = (translate_forever,) if busy else ()
    script = Forked("translate.py", *flags, cwd=tmp_path, first=first)
    try:
        address = script.wait_for("Ctrl-C ends it").splitlines()[-1].split()[0]
        connection = http.client.HTTPConnection(address.removeprefix("http://"))
        json_type = {"Content-Type": "application/json"}
        connection.request("POST", "/translate", '{"text": "1"}', json_type)
        if busy:
            script.wait_for("begun")
        else:
            assert connection.getresponse().status == 200
        # Not by another address of this machine: the page is for its user alone.
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", int(address.rpartition(":")[2])), timeout=5)
        os.kill(script.process.pid, signal.SIGINT)
        assert script.wait() == 0 and script.output.endswith("stopped\n")
        assert "Traceback" not in script.output and "Exception" not in script.output
    finally:
        script.process.kill()
