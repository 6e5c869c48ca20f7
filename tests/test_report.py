"""The report says what the run's files say: every number is walked back; what is missing or damaged is said."""

import fcntl
import html
import json
import math
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
from conftest import TINY_FLAGS, forked, make_report, write_pairs
from matplotlib.font_manager import get_font
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import report as script
from engine import checkpoint
from engine.errors import UserError
from engine.telemetry import ProcessMeter
from loading import load_trained
from model import ModelConfig, Translator, training_flops
from text.rows import fingerprint_of
from tools.reporting import figures, fonts, space
from tools.reporting.attention import END, Attention, group_characters, in_words, picture
from tools.reporting.page import Page
from tools.reporting.reading import RunFiles, read_run, rows_of
from tools.reporting.words import CHINESE

NUMBER = re.compile(r"-?[\d,]+(?:\.\d+)?(?:e[+-]\d+)?")
WORDS_WITH_DIGITS = ["chrF2", "1-gram", "2-gram", "3-gram", "4-gram", "100 %", "95 %", "0.025"]


def look_at_once() -> None:
    """At the memory too, however quick the machine is: the last look was always a second earlier."""
    read = ProcessMeter.read

    def read_later(meter: ProcessMeter) -> dict[str, float]:
        meter.last = tuple(before - 1 for before in meter.last)
        return read(meter)

    ProcessMeter.read = read_later


@pytest.fixture(scope="session")
def trained(toy_data, tmp_path_factory) -> Path:
    """A run of train.py with a result of evaluate.py; far from converged."""
    folder = tmp_path_factory.mktemp("reported")
    flags = [
        *TINY_FLAGS,
        "--max_length",
        32,
        "--max_steps",
        30,
        "--eval_every",
        15,
        "--log_every",
        10,
        "--lr",
        0.01,
    ]
    said = forked(
        "train.py", "--data", toy_data, *flags, "--run", "a", cwd=folder, first=(look_at_once,)
    )
    said += forked("evaluate.py", "--ckpt", "runs/a", cwd=folder)
    assert "findfont" not in said and "Glyph" not in said
    return folder / "runs" / "a"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(trained, tmp_path / "runs" / "a", symlinks=True)


def make(*runs: Path, **flags) -> str:
    """The page, in the first run's folder."""
    return make_report(*runs, out=runs[0] / "report", **flags)


class Reader(HTMLParser):
    """The facts of a page, its verbatim parts, its attention tables, and the plain text that is left."""

    def __init__(self, page: str):
        super().__init__()
        self.facts, self.verbatim, self.tables, self.rest, self.open = [], [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in ("meta", "img"):
            self.open.append((tag, attributes))
        if tag == "table" and attributes.get("class") == "attention":
            self.tables.append([])
        if tag == "td" and attributes.get("style", "").startswith("background"):
            self.tables[-1].append(float(attributes["title"]))
        assert tag not in ("script", "link", "iframe") and not attributes.get(
            "src", "data:"
        ).startswith(("http", "/"))

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, text):
        tag, attributes = self.open[-1] if self.open else ("", {})
        classes = [held.get("class") for _, held in self.open]
        if tag == "data":
            self.facts.append((attributes["value"], attributes["title"], text))
        elif tag == "pre":
            self.verbatim.append((attributes["title"], text))
        elif tag != "style" and "attention" not in classes and "missing" not in classes:
            self.rest.append(text)


def value_at(runs: Path, source: str):
    """What stands at the place that a fact names, read without any of the report's own code."""
    name, _, place = source.partition("/")
    file, *keys = place.split("#")
    path = runs / name / file
    if file == "metrics.jsonl":
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        tag, how = keys
        times, values = zip(
            *((record["time"], record[tag]) for record in records if record.get(tag) is not None)
        )
        if how == "mean":  # over the time; the first value counts for the usual one
            return np.average(values, weights=[np.median(np.diff(times)), *np.diff(times)])
        spans = {"span": lambda v: v[-1] - v[0], "last": lambda v: v[-1]}
        return (spans | {"min": min, "max": max, "median": statistics.median})[how](values)
    if keys == ["seconds", "sum"]:
        return sum(session["seconds"] for session in json.loads(path.read_text()))
    value = json.loads(path.read_text(encoding="utf-8"))
    for key in keys[0].split("."):
        value = value[int(key) if isinstance(value, list) else key]
    return value


def computed(run: Path, source: str, rows: list[dict]) -> float:
    """What the report counts out itself, counted out once more."""
    sizes = ModelConfig(**json.loads((run / "model.json").read_text()))
    data = json.loads((run / "data.json").read_text())
    if source.endswith("/model.json"):
        return sum(weights.numel() for weights in Translator(sizes).parameters())
    if source.endswith("data.json"):
        of_each = (data["tokens"][side] / data["counts"]["kept"] for side in ("source", "target"))
        return training_flops(
            sizes, *(tokens + 1 for tokens in of_each)
        )  # the end of a source, the begin of a target
    file, _, row = source.removeprefix("computed from a/").partition("#")
    hypothesis = (run / file).read_text(encoding="utf-8").splitlines()[int(row)]
    return sacrebleu.sentence_bleu(hypothesis, [rows[int(row)]["en"]]).score


def shows(text: str, value) -> bool:
    """Whether the text is the value, rounded as the text is."""
    if isinstance(value, str | bool):
        return text == str(value)
    factor = (
        100
        if text.endswith("%")
        else 1e-9
        if text.endswith(" G")
        else 1 / 60
        if text.endswith(" min")
        else 1
    )
    number = NUMBER.search(text)[0].replace(",", "")
    mantissa, _, exponent = number.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    digits = len(mantissa.replace(".", "").lstrip("-0"))
    rounding = max(unit / 2, abs(value * factor) * 10.0**-digits) if "." not in number else unit / 2
    return abs(float(number) - value * factor) <= rounding * (1 + 1e-9)


def test_every_number_on_the_page_is_one_of_the_runs_files(run, toy_data):
    page = make(run)
    assert "@font-face" in page
    page = Reader(page)
    rows = [
        json.loads(line)
        for line in (toy_data / "test.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    hypotheses = (run / "eval" / "test-greedy.txt").read_text(encoding="utf-8").splitlines()
    log = (run / "train.log").read_text(encoding="utf-8")
    assert len(page.facts) > 100
    for value, source, text in page.facts:
        if source == "a":
            assert text == value == "a"
        elif source.startswith(str(toy_data)):
            assert text in rows[int(value)].values() and int(value) == int(
                source.rpartition("#")[2]
            )
        elif source.endswith("train.log"):
            assert text in log and value in log
        elif source.startswith("a/eval/test-greedy.txt"):
            assert text == hypotheses[int(value)] and source.endswith(f"#{value}")
        else:
            expected = (
                computed(run, source, rows)
                if source.startswith("computed")
                else value_at(run.parent, source)
            )
            assert value == str(expected) or float(value) == pytest.approx(expected, rel=1e-12), (
                source
            )
            assert shows(text, expected), (source, text, expected)
    for source, text in page.verbatim:
        assert source.startswith("computed") or all(line in log for line in text.splitlines()), (
            source
        )
    rest = " ".join(page.rest)
    for words in WORDS_WITH_DIGITS:
        rest = rest.replace(words, "")
    assert not re.search(r"\d", rest), re.search(r".{20}\d.{20}", rest)
    sources = {source for _, source, _ in page.facts}
    for needed in (
        "environment.json#-1.torch",
        "environment.json#seconds#sum",
        "data.json#counts.read",
        "metrics.jsonl#cpu/memory_gib#max",
        "metrics.jsonl#valid/bleu#max",
        "eval/test-greedy.json#nltk",
        "metrics.jsonl#data/wait_share#median",
        "config.json#lr",
    ):
        assert f"a/{needed}" in sources, needed
    # The same in Markdown, and a picture for every link.
    markdown = (run / "report" / "report.md").read_text(encoding="utf-8")
    assert all(text.replace("|", "\\|") in markdown for _, _, text in page.facts)
    links = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    assert len(links) > 10 and all(
        (run / "report" / link.replace("%20", " ")).stat().st_size > 1000 for link in links
    )


def test_the_rows_of_a_large_training_split(trained, toy_data, monkeypatch):
    monkeypatch.setattr("text.formats.CHUNK", 100)
    rows = [
        json.loads(line)
        for line in (toy_data / "train.jsonl").read_text(encoding="utf-8").splitlines()[:250]
    ]
    run = RunFiles(trained, "a", config={"data": str(toy_data), "source": "zh", "target": "en"})
    run.results["eval/train-greedy"], run.hypotheses["eval/train-greedy"] = (
        {"split": "train"},
        [""] * 250,
    )
    assert (
        rows_of(run, "eval/train-greedy") == [(row["zh"], row["en"]) for row in rows]
        and not run.missing
    )


def test_attention_is_a_table_of_words(run, without_drawing):
    page = make(run, language="zh")
    tables = Reader(page).tables
    heads = [
        re.findall(r"<th>(.*?)</th>", table)
        for table in re.findall(r'<table class="attention">(<tr>.*?</tr>)', page)
    ]
    assert len(tables) == 3
    for weights, (corner, *words, end) in zip(tables, heads):
        assert (
            corner == ""
            and end == CHINESE[END]
            and set("".join(words)) <= set("零一二三四五六七八九")
        )
        columns = len(words) + 1
        for first in range(0, len(weights), columns):
            assert sum(weights[first : first + columns]) == pytest.approx(1, abs=0.001 * columns)
    captions = re.findall(
        r'<small>([^<]*)</small></p>\s*<div class="wide"><table class="attention">', page
    )
    assert [set(caption) - set(" ") for caption in captions] == [
        set("".join(words)) for _, *words, _ in heads
    ]
    assert "训练报告" in page and "交叉注意力" in page
    for word in re.findall(r"<(?:h\d|small|th)>([^<]*)</", page):
        assert not re.search("[a-z]{3} [a-z]{3}", word), f"not translated: {word}"


class Bytes:
    """A tokenizer that knows single bytes only."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_bytes_of_one_character_are_one_column():
    ids = list("a渲\ufffd".encode()), list(b"b")
    assert [word for _, word in group_characters(Bytes(), ids[0])] == ["a", "渲", "\ufffd", END]
    spaced = list("a 😀b".encode())  # a space is none of its own
    assert [word for _, word in group_characters(Bytes(), spaced)] == ["a", "😀", "b", END]
    weights = np.full((2, 8), 1 / 8)
    attention = in_words("a渲\ufffd", "b", (Bytes(), Bytes()), ids, weights)
    assert attention.weights[0] == pytest.approx(
        [1 / 8, 3 / 8, 3 / 8, 1 / 8]
    ) and attention.target_words == ["b", END]


def test_the_word_end_is_no_end_of_a_sentence(tmp_path):
    page = Page("", "zh", tmp_path)
    page.attention(Attention("", "", ["the", END, END], [END, END], np.eye(2, 3)), "x", b"")
    assert [page.html[-1].count(f"<th>{word}</th>") for word in (END, CHINESE[END])] == [2, 2]


def test_pictures_have_chinese_characters_and_fixed_colours(tmp_path):
    # With $, which matplotlib would take for mathematics.
    attention = in_words(
        "渲染了 $5$ 张图",
        "It drew $5.",
        (Bytes(), Bytes()),
        (list("渲染了 $5$ 张图".encode()), list(b"It drew $5.")),
        np.full((12, 23), 1 / 23),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a glyph that no font has
        figure = picture(attention)
        figure.savefig(tmp_path / "picture.png")
    assert figure.axes[0].images[0].get_clim() == (0, 1) and "渲染了" in figure.axes[0].get_title()
    charmap = get_font(fonts.OWN).get_charmap()
    assert all(
        ord(character) in charmap
        for character in "".join(CHINESE.values())
        if ord(character) > 0x2E80
    )
    assert CHINESE.keys() >= {
        *figures.PANELS,
        "loss_scale",
        "bubble_share",
    }  # the names of all curves


def test_no_line_goes_over_the_pause_between_two_starts_and_no_mean_counts_it():
    points = {
        0: 1,
        60: 1,
        180: 8,
        240: 1,
        4000: 1,
        4060: 1,
    }  # seconds → GiB; those of 8 stand for twice the usual time
    records = [
        {"step": n, "time": time, "cpu/memory_gib": gib}
        for n, (time, gib) in enumerate(points.items())
    ]
    run = RunFiles(Path(), "a", records=records)
    drawn = figures.hardware(run, str).axes[0].lines[0].get_ydata()
    assert [math.isnan(value) for value in drawn] == [
        False,
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    assert run.figure("cpu/memory_gib", "mean").value == pytest.approx((5 * 1 + 2 * 8) / 7)


def test_a_block_in_the_log_of_a_large_model_is_its_layers(tmp_path):
    block = "a block: Block(\n  (ln_1): LayerNorm()\n)"
    stamp = "2026-01-01 00:00:00 "
    (tmp_path / "train.log").write_text(f"{stamp}{block}\n{stamp}stopped: all done\n")
    run = read_run(tmp_path)
    assert run.printed_model() == block and block not in run.opening()
    assert not any(
        place == "eval/" for place, *_ in run.missing
    )  # it has ended, and makes no evaluation


def test_a_report_of_two_runs(run, without_drawing):
    other = shutil.copytree(run, run.with_name("b"), symlinks=True)
    lines = (other / "eval" / "test-greedy.txt").read_text().splitlines()
    (other / "eval" / "test-greedy.txt").write_text("".join(f"{line} one\n" for line in lines))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"lr": 0.02}))
    page = make(run, other)
    differing = {"--lr"} | ({"--run"} if config["run"] != "a" else set())
    assert (
        set(re.findall('<tr class=mark><th><span class="flag">(.*?)</span></th>', page))
        == differing
    )
    assert "Paired bootstrap" in page and ">b</data>" in page


def test_a_labs_run_beside_it_hides_no_translations(run, without_drawing):
    lab = run.with_name("lenet")
    lab.mkdir()
    (lab / "config.json").write_text('{"variant": "relu"}')
    page = make(lab, run, shutil.copytree(run, run.with_name("b"), symlinks=True))
    assert (
        "<h2>Translations</h2>" in page
        and "<h2>Cross-attention</h2>" in page
        and "· data set ·" not in page
    )
    assert "<h2>Paired bootstrap</h2>" in page


def test_runs_of_the_same_name(run, without_drawing):
    other = shutil.copytree(run, run.parent / "c" / "a", symlinks=True)
    page = make(run, other)
    assert (
        f">{run}</data>" in page
        and f">{other}</data>" in page
        and Page("", "en", "x").keep("a/b", b"") == b""
    )


def test_the_evaluations_of_one_run_stand_side_by_side_greedy_first(run, without_drawing):
    for end in ("json", "txt"):
        shutil.copy(run / "eval" / f"test-greedy.{end}", run / "eval" / f"test-beam4.{end}")
    page = make(run)
    assert "<tr><th></th><th>eval/test-greedy</th><th>eval/test-beam4</th></tr>" in page
    assert "<h2>Translations</h2>\n<h3>eval/test-greedy</h3>" in page


def test_names_of_files_and_runs_stay_as_they_are(run, without_drawing):
    other = run.rename(run.with_name("my_run"))
    shutil.rmtree(other / "eval")
    page = make(other)
    command = html.escape(f"python evaluate.py --ckpt {shlex.quote(str(other))}")
    assert f"<li>my_run · eval/ · no result yet · this makes one · {command}</li>" in page


def test_a_resumed_run_shows_the_command_that_began_it_all_machines_and_its_last_step(
    run, without_drawing
):
    (first,) = json.loads((run / "environment.json").read_text())
    second = first | {"command": "python train.py --resume a"}
    (run / "environment.json").write_text(json.dumps([first | {"gpu": "A100"}, second]))
    log = (run / "train.log").read_text()
    (run / "train.log").write_text(log.replace("stopped after step 30", "stopped after step 33"))
    facts = Reader(make(run)).facts
    assert [text for _, source, text in facts if source.endswith("command")] == [
        first["command"],
        second["command"],
    ]
    assert ("A100 → —", "a/environment.json#*.gpu", "A100 → —") in facts and (
        "33",
        "a/train.log",
        "33",
    ) in facts


def test_the_time_of_a_run_that_was_killed_is_at_least_that_of_its_checkpoint(run):
    (session,) = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(
        json.dumps([session | {"seconds": None}, session | {"seconds": 300}])
    )
    in_json(run / "checkpoints/last/state.json", minutes=600)
    assert read_run(run).seconds().text == "≥ 600.0 min"


def test_a_score_of_an_earlier_checkpoint_is_said_and_its_attention_is_of_that_one(
    run, without_drawing, monkeypatch
):
    (earlier,) = {"step-15", "step-30"} - {(run / "checkpoints/best").resolve().name}
    in_json(run / "eval/test-greedy.json", checkpoint=f"/elsewhere/a/checkpoints/{earlier}")
    looked_at = []
    monkeypatch.setattr(
        script,
        "load_trained",
        lambda path, say: looked_at.append(path) or load_trained(path, say=say),
    )
    words = "of an earlier checkpoint than the best"
    assert f"eval/test-greedy.json · {earlier} · {words}" in make(run)
    assert looked_at == [run / "checkpoints" / earlier]
    for end in ("json", "txt"):  # as evaluate.py calls it when it is asked for that checkpoint
        (run / f"eval/test-greedy.{end}").rename(run / f"eval/test-greedy-{earlier}.{end}")
    assert words not in make(run)


def test_the_paired_bootstrap_is_sacrebleus(run, toy_data, tmp_path, capsys):
    other = shutil.copytree(run, run.with_name("b"), symlinks=True)
    references = [
        json.loads(line)["en"] for line in (toy_data / "test.jsonl").read_text().splitlines()
    ]
    texts = [reference if row % 2 else "one two" for row, reference in enumerate(references)]
    (other / "eval" / "test-greedy.txt").write_text("".join(f"{text}\n" for text in texts))
    (tmp_path / "references").write_text("".join(f"{reference}\n" for reference in references))
    config = script.Config(compare=True)
    config.runs = [str(run), str(other)]
    script.report(config)
    printed = capsys.readouterr().out.splitlines()[1:]
    words = [
        sys.executable,
        "-m",
        "sacrebleu",
        tmp_path / "references",
        "-m",
        "bleu",
        "chrf",
        "--paired-bs",
        "--force",
        "-w",
        "4",
        "--format",
        "text",
        "-i",
        *(path / "eval" / "test-greedy.txt" for path in (run, other)),
    ]
    table = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    cells = re.findall(
        r"([\d.]+) \(([\d.]+) ± ([\d.]+)\)", table
    )  # BLEU and chrF2 of the first, then of the second
    p_values = re.findall(r"p = ([\d.]+)", table)
    assert len(cells) == 4 and len(p_values) == 2 and len(printed) == 4
    for line, cell, p_value in zip(
        printed, (cells[n] for n in (0, 2, 1, 3)), (None, p_values[0], None, p_values[1])
    ):
        score, mean, half = map(float, cell)
        numbers = [float(number) for number in re.findall(r"\d+\.\d+", line)]
        assert numbers[:3] == pytest.approx([score, mean - half, mean + half], abs=0.006), line
        assert numbers[3:] == ([float(p_value)] if p_value else []), line


def test_two_scores_of_one_run_are_compared(run, capsys):
    config, hypotheses = script.Config(compare=True), run / "eval" / "test-greedy.txt"
    config.runs = [str(run)]
    with pytest.raises(UserError, match="two evaluations of one"):
        script.report(config)
    greedy = json.loads((run / "eval" / "test-greedy.json").read_text())
    worse = "one two\n" * len(hypotheses.read_text().splitlines())
    evaluations = {
        "test-greedy-fp32": (greedy["rows"], hypotheses.read_text()),
        "test-beam4-lp0.6": (greedy["rows"], worse),
        "test-beam4-lp0.6-first50": ("other rows", worse),
        "test-beam9-lp0.6": (greedy["rows"], worse.removesuffix("one two\n")),
    }  # a line was lost
    for name, (rows, text) in evaluations.items():
        (run / "eval" / f"{name}.txt").write_text(text)
        (run / "eval" / f"{name}.json").write_text(json.dumps(greedy | {"rows": rows}))
    script.report(config)
    lines = [
        line.split() for line in capsys.readouterr().out.splitlines()[1:] if line.startswith("BLEU")
    ]
    assert [line[1] for line in lines] == [
        "eval/test-greedy",
        "eval/test-greedy-fp32",
        "eval/test-beam4-lp0.6",
    ]
    assert (
        lines[1][-3:] == ["p", "=", "1.0000"] and lines[2][-2] == "="
    )  # the same outputs differ by nothing
    assert (
        float(lines[0][2]) == pytest.approx(greedy["sacrebleu"], abs=0.006)
        and float(lines[2][2]) == 0
    )
    in_json(run / "eval" / "test-greedy.json", checkpoint="checkpoints/step-1")
    script.report(config)
    assert (
        "note: a · eval/test-greedy.json · step-1 · of an earlier checkpoint"
        in capsys.readouterr().out
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def in_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


DAMAGES = {
    "no config": (lambda run: (run / "config.json").unlink(), "config.json · not there"),
    "torn config": (lambda run: cut(run / "config.json"), "config.json · damaged"),
    "no sizes": (lambda run: (run / "model.json").unlink(), "model.json · not there"),
    "wrong sizes": (
        lambda run: (run / "model.json").write_text('{"d_model": "wide"}'),
        "model.json · damaged",
    ),
    "no environment": (
        lambda run: (run / "environment.json").unlink(),
        "environment.json · not there",
    ),
    "not a list": (
        lambda run: (run / "environment.json").write_text("{}"),
        "environment.json · damaged",
    ),
    "no data": (lambda run: (run / "data.json").unlink(), "data.json · not there"),
    "other data": (
        lambda run: (run / "data.json").write_text('{"counts": 3}'),
        "data.json · damaged",
    ),
    "no log": (lambda run: (run / "train.log").unlink(), "train.log · not there"),
    "no last words": (lambda run: cut(run / "train.log"), "train.log · no last words"),
    "no curves": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl · not there"),
    "torn curves": (lambda run: cut(run / "metrics.jsonl"), "metrics.jsonl · 1 · damaged"),
    "no figures": (lambda run: (run / "metrics.jsonl").write_text(""), "<h2>Results</h2>"),
    "binary": (
        lambda run: (run / "metrics.jsonl").write_bytes(bytes(range(256)) * 9),
        "damaged lines",
    ),
    "strange": (
        lambda run: (run / "metrics.jsonl").write_text(
            '{"step": 1, "time": 1, "train/loss": null, "valid/loss": "low"}\n[]\n{"step": "x"}\n'
            '{"step": 2, "time": 2, "train/loss": NaN, "valid/loss": [1], "valid/bleu": true}\n'
        ),
        "2 · damaged lines",
    ),
    "no result": (lambda run: shutil.rmtree(run / "eval"), "eval/ · no result yet"),
    "torn result": (
        lambda run: cut(run / "eval" / "test-greedy.json"),
        "eval/test-greedy.json · damaged",
    ),
    "other rows": (
        lambda run: in_json(run / "eval" / "test-greedy.json", rows="0"),
        "test-greedy is of other rows than",
    ),
    "other data set": (
        lambda run: in_json(run / "eval" / "test-greedy.json", split="all"),
        "test-greedy is of other rows than",
    ),
    "torn translations": (
        lambda run: cut(run / "eval" / "test-greedy.txt"),
        "eval/test-greedy.txt",
    ),
    "no translations": (
        lambda run: (run / "eval" / "test-greedy.txt").unlink(),
        "eval/test-greedy.txt · not there",
    ),
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoints"), "Cross-attention"),
    "begun just now": (
        lambda run: [
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            for path in run.iterdir()
            if path.name not in ("config.json", "train.log")
        ],
        "metrics.jsonl · not there",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_gives_a_report_that_says_so(run, damage, without_drawing):
    spoil, words = DAMAGES[damage]
    spoil(run)
    page = make(run)
    assert "<h2>Summary</h2>" in page and words in page


def test_data_that_is_gone(run, without_drawing):
    in_json(run / "eval" / "test-greedy.json", data=str(run / "gone"))
    page = make(run)
    assert (
        "gone is not on this disk" in page
        and "BLEU (nltk, graded)" in page
        and "<h2>Translations</h2>" not in page
    )
    for end in ("json", "txt"):  # evaluated again, of data in another place
        shutil.copy(run / f"eval/test-greedy.{end}", run / f"eval/test-greedy-data-1.{end}")
    in_json(
        run / "eval" / "test-greedy-data-1.json",
        data=json.loads((run / "config.json").read_text())["data"],
    )
    assert "<h2>Translations</h2>" in make(run)
    config = script.Config(compare=True)
    config.runs = [str(run)]
    script.report(config)


def test_a_run_is_no_place_for_its_report(run, without_drawing):
    with pytest.raises(UserError, match="a is a run itself; name a folder of its own by --out DIR"):
        Page("title", "en", run)


def test_a_run_with_the_name_of_a_folder_that_is_none(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    assert read_run("a").config["target"] == "en"


def test_an_evaluation_of_other_data_is_read_from_there(run, tmp_path):
    rows = [("一 二", "one two"), ("三", "three")]
    other = write_pairs(tmp_path / "other", rows, {"train": slice(None)})
    (run / "eval" / "test-greedy.txt").write_text("some words\n" * len(rows))
    said = dict(data=str(other), columns=["zh", "en"], split="all", rows=fingerprint_of(rows))
    in_json(run / "eval" / "test-greedy.json", **said)
    assert rows_of(read_run(run), "eval/test-greedy") == rows


def test_a_run_under_way(run, without_drawing):
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(run).running and "under way" in make(run)
    assert not read_run(run).running and "under way" not in make(run)


def test_no_text_of_a_run_is_taken_for_html(run, without_drawing):
    evil = '<script>alert("1")</script>'
    lines = (run / "eval" / "test-greedy.txt").read_text().splitlines()
    (run / "eval" / "test-greedy.txt").write_text("".join(f"{evil}|\n" for _ in lines))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"tokenizer": evil, evil: "</td>"}))
    page = make(run)
    assert "<script" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize("name, words", [("gone", "no such run"), ("empty", "is no run")])
def test_what_is_no_run_is_said_in_a_line(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=words):
        make(tmp_path / name)


def test_a_labs_run(tmp_path):
    """Its result, its network from the log, its own pictures, and a GPU as nvidia-smi shows it."""
    run = tmp_path / "lenet"
    (run / "eval").mkdir(parents=True)
    (run / "config.json").write_text('{"variant": "relu", "data": "mnist"}')
    (run / "eval" / "test.json").write_text(
        '{"accuracy": 0.99, "places": 124439808, "confusion": [[1, 2]]}'
    )
    (run / "eval" / "filters.png").write_bytes(b"PNG" * 400)
    network = "LeNet5(\n  (c1): Conv2d(1, 6)\n)"
    times = ["2026-01-01 00:00:00 ", "2026-01-01 00:03:00 "]
    log = [
        f"{network}",
        "LeNet-5 relu: 61,706 parameters",
        "step 1 loss 2",
        "stopped: all epochs are done",
    ]
    (run / "train.log").write_text(
        "".join(times[n > 1] + line + "\n" for n, line in enumerate(log))
    )
    gpu = {
        "gpu/utilisation_percent": 90,
        "gpu/memory_gib": 3,
        "gpu/power_watt": 250,
        "gpu/temperature_celsius": 61,
    }
    records = [
        {
            "step": n,
            "time": 60 * n,
            "train/loss": 1 / n,
            "validation/loss": 2 / n,
            "test/accuracy": accuracy,
        }
        | gpu
        for n, accuracy in enumerate([0.9, 0.995, 0.98, 0.99], 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = make(run)
    facts = Reader(page).facts
    assert ("0.5", "lenet/metrics.jsonl#validation/loss#min", "0.5") in facts
    assert (
        "0.99",
        "lenet/metrics.jsonl#test/accuracy#last",
        "99.00%",
    ) in facts  # not the best on the test set
    assert "124,439,808" in page  # a whole number, with all its digits
    for words in (
        "61,706",
        "Conv2d(1, 6)",
        "0.99",
        "<h2>Pictures of the run</h2>",
        "GPU power (W), mean",
    ):
        assert words in page
    assert "confusion" not in page and (run / "report" / "lenet filters.png").exists()
    axes = figures.hardware(read_run(run), lambda words: words).axes
    assert [a.get_title(loc="left") for a in axes] == [
        "GPU utilisation_percent (%)",
        "GPU memory_gib (GiB)",
        "GPU power_watt (W)",
        "GPU temperature_celsius (°C)",
    ]
    assert axes[0].get_ylim() == (0, 100) and list(axes[0].lines[0].get_xdata()) == [0, 1, 2, 3]


def test_what_a_run_writes_for_it(trained):
    (session,) = json.loads((trained / "environment.json").read_text())
    assert (
        session["command"].startswith("python train.py --data ")
        and session["torch"]
        and session["cpu"]
    )
    assert session["seconds"] > 0 and session["gpu"] is None
    log = (trained / "train.log").read_text()
    assert f"cpu {session['cpu']}, cores" in log and re.search(
        r"time: \d+\.\d minutes\n.*stopped after step 30: ", log
    )
    data = json.loads((trained / "data.json").read_text())
    for side in ("source", "target"):
        assert (
            sum(n * count for n, count in enumerate(data["lengths"][side])) == data["tokens"][side]
        )
        assert sum(data["lengths"][side]) == data["counts"]["kept"]
    tags = sorted(EventAccumulator(str(trained)).Reload().Tags()["scalars"])  # TensorBoard's order
    assert [tag.partition(" ")[2] for tag in tags[:2]] == [
        "first/00 train loss",
        "first/01 valid loss",
    ]
    assert "1 first/06 valid bleu" in tags[:5] and not any(
        tag in tags for tag in ("train/loss", "valid/bleu")
    )


def test_the_process_meter_counts(monkeypatch):
    now = [10.0, 3.0]  # on the wall, busy
    clocks = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[1])
    monkeypatch.setattr("engine.telemetry.time", clocks)
    meter = ProcessMeter()
    now[:] = [10.9, 3.9]
    assert meter.read() == {}
    now[:] = [12.0, 4.0]
    read = meter.read()
    assert read["cpu/utilisation_percent"] == 50 and 0.05 < read["cpu/memory_gib"] < 50
    assert meter.read() == {}


# ---------------------------------------------------------------- what could go


def test_what_could_go_goes_on_request_and_the_newest_and_the_best_stay(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent.parent)
    shutil.copytree(run / "checkpoints/step-15", run / "checkpoints/step-7")
    kept = {checkpoint.latest(run / "checkpoints").name, checkpoint.resolve(run).name}
    old, key = (
        run / "checkpoints/step-7",
        checkpoint.load_state(run / "checkpoints/last")["data_key"],
    )
    for name in (key, "stale"):
        Path("runs/.cache", name).mkdir(parents=True)
        Path("runs/.cache", name, "ids.npy").write_bytes(bytes(2**20))

    def main(*runs, **flags) -> str:
        config = space.Config(**flags)
        config.runs = runs
        space.main(config)
        return capsys.readouterr().out

    with open(run / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert (
            "0.0 MiB deleted" in main(delete=True)
            and old.exists()
            and Path("runs/.cache/stale").exists()
        )
    said = main()
    assert "step-7" in said and "1.0 MiB  runs/.cache/stale; 1.0 MiB could go: all of it" in said
    assert (
        f"MiB  runs/.cache/{key}\n" in said and old.exists() and Path("runs/.cache/stale").exists()
    )
    before = (run / "checkpoints").stat().st_mtime  # which tells the newest run
    main(delete=True)
    assert (run / "checkpoints").stat().st_mtime == before
    assert {f"step-{step}" for step in checkpoint.steps(run / "checkpoints")} == kept
    assert [cache.name for cache in Path("runs/.cache").iterdir()] == [key]
    assert checkpoint.latest(run / "checkpoints", to_resume=True)
    main("runs/a", delete=True, optimizer=True)
    assert checkpoint.resolve("runs/a").name in kept and not list(run.rglob("optimizer.pt"))
    with pytest.raises(UserError, match=r"no config\.json"):
        main("runs")
