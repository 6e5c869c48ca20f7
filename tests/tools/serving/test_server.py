"""The page's server answers each request by its translation or one line on what is wrong."""

import http.client
import json
import os
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from conftest import HANGS, Forked

from decoding import Decoder
from engine.errors import UserError
from engine.precision import choose_precision
from loading import load_trained
from text.sentences import sentences
from tools.serving.server import LONGEST_TEXT, PageServer, describe, serve
from translation import translate_lines


@pytest.fixture(scope="module")
def server(tiny_run):
    """A server that runs in a thread."""
    precision = choose_precision(torch.device("cpu"), "fp32")
    trained = load_trained(tiny_run)
    with PageServer(0, trained, precision, Decoder(trained.model), 0.6) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def request(
    port: int, method: str, path: str, body: str | None = None, **headers: str
) -> tuple[int, str]:
    """Status and content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANGS)
    headers = {"Content-Type": "application/json"} | headers if body else headers
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def ask(server, text: str, **more) -> dict:
    """The endpoint's answer."""
    status, answer = request(
        server.server_port, "POST", "/translate", json.dumps({"text": text, **more})
    )
    assert status == 200, answer
    return json.loads(answer)


@pytest.mark.parametrize("beam", [1, 3])
def test_lines_and_sentences_come_back_in_their_places(server, tiny_run, beam):
    text = "一二。三四！\n\n五六"
    answer = ask(server, text, beam=beam, attention=True)
    pieces = [piece for line in text.split("\n") for piece in sentences(line)]
    tools = server.decoder, *server.tokenizers
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


def test_a_sentence_longer_than_the_model_reads_is_marked_as_cut(server):
    answers = [ask(server, "一" * count) for count in (5, 100)]
    assert [answer["lines"][0][0]["cut"] for answer in answers] == [False, True]


def test_one_request_at_a_time_has_the_model_and_an_error_does_not_keep_it(server, monkeypatch):
    running, most = [], []

    def translate(sources, beam, attention):
        running.append(sources)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()
        if sources == ["bad"]:
            raise RuntimeError("no")
        return [{"hypotheses": [{"text": sources[0][::-1]}]}]

    monkeypatch.setattr(server, "translate_sentences", translate)
    monkeypatch.setattr(server, "handle_error", lambda *_: None)  # which prints the traceback
    with pytest.raises(AssertionError, match="the terminal of the server shows it"):
        ask(server, "bad")
    texts = [f"text {number}" for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda text: ask(server, text), texts))
    assert [answer["translation"] for answer in answers] == [text[::-1] for text in texts]
    assert max(most) == 1


WRONG_REQUESTS = [
    '{"text": 5}',
    '{"text": "<b>", "beam": 99}',
    '{"text": "<b>", "beam": "2"}',
    '{"text',
    '["<i>"]',
    '{"text": "\\ud800 <b>"}',  # half a character
    json.dumps({"text": "<" * (LONGEST_TEXT + 1)}),
]


@pytest.mark.parametrize("body", WRONG_REQUESTS)
def test_a_wrong_request_gets_a_line_that_does_not_repeat_it(server, body):
    status, answer = request(server.server_port, "POST", "/translate", body)
    assert status == 400 and "<" not in json.loads(answer)["detail"].replace("< FILE", "")


@pytest.mark.parametrize("length", ["many", "-1", "9" * 14])
def test_a_wrong_length_of_a_request_is_one_line(server, length):
    headers = {"Content-Length": length}
    status, answer = request(server.server_port, "POST", "/translate", "{}", **headers)
    assert status == 400 and "Content-Length" in answer


def test_a_browser_that_leaves_is_no_traceback(server, monkeypatch, capsys):
    """It resets the connection while the server waits for the rest of the request."""
    handle_error, handled = server.handle_error, threading.Event()

    def handle(*arguments):
        handle_error(*arguments)
        handled.set()

    monkeypatch.setattr(server, "handle_error", handle)
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.sendall(b"POST /translate HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
        reset_at_close = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_at_close)
    assert handled.wait(HANGS)
    assert "Traceback" not in capsys.readouterr().err


JSON = "application/json"
EVIL = "http://evil.example"


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Host": "evil.example"}, 400),  # DNS rebinding
        ({"Host": "evil.example", "Origin": EVIL}, 400),
        ({"Origin": EVIL}, 400),
        ({"Origin": "null"}, 400),
        ({"Origin": "http://127.0.0.1:1"}, 400),  # another program of this machine
        ({"Content-Type": "text/plain"}, 400),  # which any page may send
        ({"Host": "[::1"}, 400),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "localhost:9", "Origin": "http://localhost:9"}, 200),  # through ssh -L
        ({"Host": "[::1]:9"}, 200),
    ],
)
def test_only_the_page_and_local_programs_are_answered(server, headers, status):
    asked = request(server.server_port, "POST", "/translate", '{"text": "1"}', **headers)
    assert asked[0] == status and ("translation" in asked[1]) == (status == 200)
    if "Content-Type" not in headers:
        shown = request(server.server_port, "GET", "/model", **headers)
        assert shown[0] == (403 if status == 400 else 200)


def test_the_page_is_found_with_a_query_and_its_head_alone(server):
    port = server.server_port
    status, page = request(port, "GET", "/?a=1")
    assert status == 200 and "<html" in page
    assert request(port, "HEAD", "/") == (200, "")
    assert request(port, "GET", "//[")[0] == 404
    assert request(port, "POST", "/translate?a=1", '{"text": "1"}')[0] == 200


def test_a_client_that_leaves_gives_the_model_back(server, monkeypatch):
    """It is noticed after the first eight of 80 sentences, not after all."""
    begun, left, translated = threading.Event(), threading.Event(), []

    def translate(sources, beam, attention):
        translated.append(len(sources))
        begun.set()
        assert left.wait(HANGS)
        return [{"hypotheses": [{"text": "x"}]} for _ in sources]

    monkeypatch.setattr(server, "translate_sentences", translate)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=HANGS)
    body = json.dumps({"text": "一。" * 80})
    connection.request("POST", "/translate", body, {"Content-Type": JSON})
    assert begun.wait(HANGS)
    connection.close()
    left.set()
    assert ask(server, "二。")["translation"] == "x"
    assert translated == [8, 1]


def test_the_page_names_the_run_its_data_and_its_score(server, tiny_run):
    status, answer = request(server.server_port, "GET", "/model")
    facts = json.loads(answer)
    assert status == 200 and facts["run"] == tiny_run.name and facts["score"] is None
    assert facts["pairs"] > 0 and (facts["source"], facts["target"]) == ("zh", "en")
    trained = load_trained(tiny_run)
    assert facts["data"] == trained.config["data"] and not facts["is_sample"]


def test_the_score_is_that_of_the_test_split(tmp_path):
    (tmp_path / "eval").mkdir()
    facts = json.dumps({"counts": {"kept": 5}, "is_sample": True})
    (tmp_path / "data.json").write_text(facts, encoding="utf-8")
    trained = SimpleNamespace(
        run=tmp_path,
        checkpoint=tmp_path / "checkpoints/step-2",
        config={"data": "x", "source": "zh", "target": "en"},
        model=SimpleNamespace(config=SimpleNamespace(longest_sentence=63)),
    )
    for split, bleu in (("validation", 12.5), ("test", 9.25)):
        figures = json.dumps({"nltk": bleu, "split": split, "checkpoint": "/elsewhere/a/step-2"})
        (tmp_path / f"eval/{split}-greedy.json").write_text(figures)
        assert describe(trained)["score"] == {"bleu": bleu, "split": split}
    assert describe(trained)["is_sample"]
    for damaged in ("{", "[]", '{"nltk": null, "split": "test"}'):
        (tmp_path / "eval/test-greedy.json").write_text(damaged)
        assert describe(trained)["score"]["split"] == "validation"
    trained.checkpoint = tmp_path / "checkpoints/step-1"
    assert describe(trained)["score"] is None  # it has not been scored


def test_text_of_the_user_is_never_html(server):
    status, answer = request(server.server_port, "GET", "/%3Cscript%3E")
    assert status == 404 and "<" not in answer
    status, page = request(server.server_port, "GET", "/")
    assert status == 200 and "POST" in page
    assert not any(word in page for word in ("innerHTML", "insertAdjacentHTML", "document.write"))


def test_a_port_in_use_is_one_line(server):
    config = SimpleNamespace(port=server.server_port, length_penalty=0.6)
    trained = SimpleNamespace(model=None)
    with pytest.raises(UserError, match=r"^--port \d+: Address already in use; choose another"):
        serve(trained, None, None, config)


def hang_in_some_texts():
    """In the server's process: the translation of "hang" never ends."""
    translate = PageServer.translate

    def translate_or_hang(server, text, *options):
        if text == "hang":
            print("begun", flush=True)
            threading.Event().wait()
        return translate(server, text, *options)

    PageServer.translate = translate_or_hang


def test_ctrl_c_ends_it_also_during_a_translation(tiny_run, tmp_path):
    flags = "--ckpt", tiny_run, "--serve", "--port", 0, "--device", "cpu"
    script = Forked("translate.py", *flags, cwd=tmp_path, first=(hang_in_some_texts,))
    try:
        line = script.wait_for("press Ctrl-C to stop").splitlines()[-1]  # serving at http://…;
        address = line.removeprefix("serving at ").partition(";")[0]
        port = int(address.rpartition(":")[2])
        assert request(port, "POST", "/translate", '{"text": "1"}')[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", port)
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/translate", '{"text": "hang"}', kind)
        script.wait_for("begun")
        # Not by another address of this machine: the page is for its user alone.
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        os.kill(script.process.pid, signal.SIGINT)
        assert script.wait() == 0 and script.output.endswith("stopped\n")
        assert "Traceback" not in script.output and "Exception" not in script.output
    finally:
        script.process.kill()
