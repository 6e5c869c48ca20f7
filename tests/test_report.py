"""The report shows what the run's files say; what is missing or damaged is noted."""

import fcntl
import json
import re
import shutil
import statistics
import warnings
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import torch
from conftest import ROOT, TINY_FLAGS, forked, make_report, write_pairs
from matplotlib.font_manager import get_font

import model
import report as script
from engine.errors import UserError
from engine.meters import ProcessMeter
from engine.optimizer import OPTIMIZERS
from engine.schedule import SCHEDULES
from engine.tables import code, plain
from loading import load_trained
from text.bleu import FIGURES, paired_bootstrap
from text.reading import fingerprint_of
from tools.reporting import figures, fonts, references, sections
from tools.reporting.attention import END, group_characters, in_words, picture
from tools.reporting.page import Page
from tools.reporting.reading import RunFiles, newest_run, read_all, read_run, rows_of

NUMBER = re.compile(r"-?[\d,]+(?:\.\d+)?(?:e[+-]\d+)?")
WORDS_WITH_DIGITS = ["chrF2", "below 4 tokens", "100 %", "95 %"]
PAPERS = [value for value in vars(references).values() if isinstance(value, str)]
PAPERS += [paper for each in (*OPTIMIZERS.values(), *SCHEDULES.values()) for paper in each.papers]
LAYERS = re.compile(r'<div class="wide"><table><tr><th[^>]*>layer</th>.*?</table></div>')
GREEDY = "eval/test-greedy"


def measure_memory_at_once() -> None:
    """The process meter reports at its first reading, however short the run is."""
    read = ProcessMeter.read

    def read_later(meter: ProcessMeter) -> dict[str, float]:
        meter.last_time -= 1
        return read(meter)

    ProcessMeter.read = read_later


@pytest.fixture(scope="session")
def trained(toy_data, tmp_path_factory) -> Path:
    """A run of train.py with a result of evaluate.py; far from converged."""
    folder = tmp_path_factory.mktemp("reported")
    flags = "--max_length 32 --max_steps 30 --eval_every 15 --log_every 10 --lr 0.01 --run a"
    command = ["train.py", "--data", toy_data, *TINY_FLAGS, *flags.split()]
    output = forked(*command, cwd=folder, first=(measure_memory_at_once,))
    output += forked("evaluate.py", "--ckpt", "runs/a", cwd=folder)
    assert "findfont" not in output and "Glyph" not in output
    return folder / "runs" / "a"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(trained, tmp_path / "runs" / "a", symlinks=True)


def copy_of(run: Path, name: str) -> Path:
    """A second run beside it."""
    return shutil.copytree(run, run.with_name(name), symlinks=True)


def make(*runs: Path, **flags) -> str:
    """The page, in the first run's folder."""
    return make_report(*runs, out=runs[0] / "report", **flags)


def compare(*runs: Path) -> None:
    """report.py RUNS --compare"""
    config = script.Config(compare=True)
    config.runs = list(map(str, runs))
    script.report(config)


def change_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# Numbers of sections and figures are no facts of a run.
NO_FACTS = {"style", "nav", "h2", "figcaption", "summary"}


class Reader(HTMLParser):
    """The facts of a page, its verbatim parts, and the text that is left."""

    def __init__(self, page: str):
        super().__init__()
        self.facts, self.verbatim, self.rest, self.open = [], [], [], []
        self.feed(page.replace("<wbr>", ""))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in ("meta", "img"):
            self.open.append((tag, attributes))
        if tag == "data":
            self.facts.append((attributes["value"], attributes["title"], ""))
        assert tag not in ("script", "link", "iframe")
        assert not attributes.get("src", "data:").startswith(("http", "/"))

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, text):
        tag, attributes = self.open[-1] if self.open else ("", {})
        tags = {held for held, _ in self.open}
        classes = [held.get("class") for _, held in self.open]
        if "data" in tags:
            value, source, beginning = self.facts[-1]
            self.facts[-1] = (value, source, beginning + text)
        elif tag == "pre":
            self.verbatim.append((attributes["title"], text))
        elif not tags & NO_FACTS and "missing" not in classes:
            self.rest.append(text)


def value_at(runs: Path, source: str):
    """The value at the place that a fact names, read without the report's own code."""
    name, _, place = source.partition("/")
    file, *keys = place.split("#")
    path = runs / name / file
    if file == "metrics.jsonl":
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        tag, summary = keys
        values = [record[tag] for record in records if record.get(tag) is not None]
        if summary == "last":
            return values[-1]
        summaries = {"min": min, "max": max, "mean": np.mean, "median": statistics.median}
        return summaries[summary](values)
    if keys == ["seconds", "sum"]:
        return sum(session["seconds"] for session in json.loads(path.read_text()))
    value = json.loads(path.read_text(encoding="utf-8"))
    for key in keys[0].split("."):
        value = value[int(key) if isinstance(value, list) else key]
    return value


def sentence_score(run: Path, source: str, rows: list[dict]) -> float:
    """The score of a translation, computed once more."""
    file, _, row = source.removeprefix("computed from a/").partition("#")
    hypothesis = (run / file).read_text(encoding="utf-8").splitlines()[int(row)]
    return sacrebleu.sentence_bleu(hypothesis, [rows[int(row)]["en"]]).score


def shows(text: str, value) -> bool:
    """Whether the text is the value, rounded as the text is."""
    if isinstance(value, str | bool):
        return text == str(value)
    if isinstance(value, list):
        return all(shows(*each) for each in zip(text.split(", "), value, strict=True))
    units = {"%": 100, " min": 1 / 60}
    value *= next((factor for unit, factor in units.items() if text.endswith(unit)), 1)
    number = NUMBER.search(text)[0].replace(",", "")
    mantissa, _, exponent = number.partition("e")
    rounding = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])) / 2
    if "." not in number:
        digits = len(mantissa.replace(".", "").lstrip("-0"))
        rounding = max(rounding, abs(value) * 10.0**-digits)
    return abs(float(number) - value) <= rounding * (1 + 1e-9)


def test_every_number_on_the_page_is_one_of_the_runs_files(run, toy_data):
    page = make(run)
    assert "@font-face" in page
    page = Reader(LAYERS.sub("", page))
    lines = (toy_data / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    hypotheses = (run / f"{GREEDY}.txt").read_text(encoding="utf-8").splitlines()
    log = (run / "train.log").read_text(encoding="utf-8")
    assert len(page.facts) > 90
    for value, source, text in page.facts:
        if source.startswith(str(toy_data)):
            assert source.endswith(f"#{value}") and text in rows[int(value)].values()
        elif source.endswith("train.log"):
            assert text in log and value in (text, text.replace(",", ""))
        elif source.startswith(f"a/{GREEDY}.txt"):
            assert text == hypotheses[int(value)] and source.endswith(f"#{value}")
        elif source.endswith("#interval") or source.endswith("#precisions"):
            expected = value_at(run.parent, source)
            numbers = [float(number) for number in text.split(", ")]
            assert value == str(expected) and numbers == pytest.approx(expected, abs=0.0501)
        else:
            if source.startswith("computed"):
                expected = sentence_score(run, source, rows)
            else:
                expected = value_at(run.parent, source)
            same = value == str(expected) or float(value) == pytest.approx(expected, rel=1e-12)
            assert same and shows(text, expected), (source, text, expected)
    texts = {"model.py": (ROOT / "model.py").read_text(encoding="utf-8")}
    for source, text in page.verbatim:
        assert all(line in texts[source] for line in text.splitlines())
    rest = " ".join(page.rest)
    for words in [*WORDS_WITH_DIGITS, *PAPERS]:
        rest = rest.replace(words, "")
    assert not re.search(r"\d", rest), re.search(r".{20}\d.{20}", rest)
    sources = {source for _, source, _ in page.facts}
    for needed in (
        "environment.json#-1.torch",
        "environment.json#seconds#sum",
        "data.json#counts.read",
        "metrics.jsonl#cpu/memory_gib#max",
        "metrics.jsonl#valid/perplexity#min",
        f"{GREEDY}.json#nltk",
        "metrics.jsonl#data/wait_share#median",
        "config.json#lr",
    ):
        assert f"a/{needed}" in sources, needed
    # The same in Markdown, and a picture for every link.
    markdown = (run / "report" / "report.md").read_text(encoding="utf-8")
    for _, _, text in page.facts:
        assert plain(text) in markdown or code(text) in markdown
    links = [link.replace("%20", " ") for link in re.findall(r"!\[.*?\]\((.*?)\)", markdown)]
    assert len(links) > 10 and "attention 3 a.png" in links
    assert all((run / "report" / link).stat().st_size > 1000 for link in links)


def test_all_parts_that_the_handout_wants_are_there_in_chinese(run, without_drawing):
    gpu = "| 0  NVIDIA A100   97% |"
    (run / "nvidia-smi.txt").write_text(f"{gpu}\n")
    change_json(run / f"{GREEDY}.json", is_sample=True)
    page = make(run, language="zh")
    reader = Reader(page)
    headings = re.findall("<h2 .*?>[0-9]+ (.*?)</h2>", page)
    assert headings == [
        "概览",
        "实验设置",
        "训练过程",
        "评测结果",
        "观察与分析",
        "位置编码",
        "结论",
        "参考资料",
    ]
    verbatim = dict(reader.verbatim)
    assert verbatim["a/nvidia-smi.txt"] == gpu
    assert verbatim["model.py"].startswith("def sinusoids(")
    assert page.count('<p class="missing">✎') == 5  # in words
    assert page.count('<span class="missing">✎</span>') == 4  # name, number, course, date
    assert "自带样例，不是 WMT19" in page and "正常结束" in page
    for text in {*reader.rest} - {*PAPERS, "greedy"}:
        assert not re.search("[a-z]{3} [a-z]{3}", text), f"not translated: {text}"


def test_a_gpu_run_without_nvidia_smi_asks_for_it_and_other_data_are_not_the_sample(
    run, without_drawing
):
    (session,) = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps([session | {"gpu": "A100"}]))
    page = make(run)
    assert "Add what nvidia-smi shows" in page and "bundled sample" not in page


# -------------------------------------------------------------------- attention and pictures


class Bytes:
    """A tokenizer that knows single bytes only."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_bytes_of_one_character_are_one_column():
    ids = list("a渲\ufffd".encode()), list(b"b")
    assert [word for _, word in group_characters(Bytes(), ids[0])] == ["a", "渲", "\ufffd", END]
    spaced = list("a 😀b".encode())  # a space has no column
    assert [word for _, word in group_characters(Bytes(), spaced)] == ["a", "😀", "b", END]
    attention = in_words("a渲\ufffd", "b", (Bytes(), Bytes()), ids, np.full((2, 8), 1 / 8))
    assert attention.weights[0] == pytest.approx([1 / 8, 3 / 8, 3 / 8, 1 / 8])
    assert attention.target_words == ["b", END]


def test_pictures_have_chinese_characters_and_fixed_colours(tmp_path):
    texts = "渲染了 $5$ 张图", "It drew $5."  # matplotlib would take $ for mathematics
    ids = [list(text.encode()) for text in texts]
    weights = np.full((12, 23), 1 / 23)
    attention = in_words(*texts, (Bytes(), Bytes()), ids, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # for a glyph that no font has
        figure = picture(attention)
        figure.savefig(tmp_path / "picture.png")
    assert figure.axes[0].images[0].get_clim() == (0, 1)
    charmap = get_font(fonts.OWN).get_charmap()
    for file in fonts.OWN.parent.glob("*.py"):  # the texts of the report
        chinese = {ord(letter) for letter in file.read_text(encoding="utf-8") if letter > "\u2e80"}
        assert chinese <= charmap.keys()


# -------------------------------------------------------------------- several runs


def test_a_report_of_two_runs_and_a_lab(run, without_drawing):
    other, lab = copy_of(run, "b"), run.with_name("lenet")
    lines = (other / f"{GREEDY}.txt").read_text().splitlines()
    (other / f"{GREEDY}.txt").write_text("".join(f"{line} one\n" for line in lines))
    change_json(other / "config.json", lr=0.02)
    page = make(run, other)
    marked = re.findall("<tr class=mark><th[^>]*><code>(.*?)</code></th>", page)
    assert marked == ["--lr"]
    assert '<th class="short">b</th>' in page
    lab.mkdir()
    (lab / "config.json").write_text('{"variant": "relu"}')
    page = make(lab, run, other)
    assert "<h3>Translations</h3>" in page and "<h3>Cross-attention</h3>" in page
    assert "· data set ·" not in page
    same_name = shutil.copytree(run, run.parent / "c" / "a", symlinks=True)
    page = make(run, same_name)
    shown = page.replace("<wbr>", "")
    assert f'<th class="text">{run}</th>' in shown and f'<th class="text">{same_name}</th>' in shown


def test_the_evaluations_of_one_run_stand_side_by_side_greedy_first(run, without_drawing):
    # Other data of which all rows were scored, and a checkpoint whose name contains "test".
    others = ("test-beam4", "validation-greedy-latest", "all-greedy-data-0a1b2c3d")
    for end in ("json", "txt"):
        for name in others:
            shutil.copy(run / f"{GREEDY}.{end}", run / f"eval/{name}.{end}")
    page = make(run)
    heads = [re.sub("<[^>]*>", "", row) for row in re.findall("<tr>(<th.*?)</tr>", page)]
    assert GREEDY + "".join(f"eval/{name}" for name in others) in heads
    assert f"<h3>Translations</h3>\n<p><small><code>{GREEDY}</code>" in page


def test_compare_prints_the_paired_bootstrap(run, toy_data, capsys):
    other = copy_of(run, "b")
    rows = (toy_data / "test.jsonl").read_text().splitlines()
    references = [json.loads(row)["en"] for row in rows]
    systems = {
        "a": (run / f"{GREEDY}.txt").read_text().splitlines(),
        "b": [reference if n % 2 else "one two" for n, reference in enumerate(references)],
    }
    (other / f"{GREEDY}.txt").write_text("\n".join(systems["b"]) + "\n")
    compare(run, other)
    lines = capsys.readouterr().out.splitlines()[1:]
    for line, system in zip(lines, paired_bootstrap(references, systems), strict=True):
        assert line.startswith(f"{system.metric:<6} {system.name}")
        numbers = [float(number) for number in re.findall(r"\d+\.\d+", line)]
        expected = [system.score, system.low, system.high]
        expected += [] if system.p_value is None else [system.p_value]
        assert numbers == pytest.approx(expected, abs=0.006)


def test_compare_of_one_run_compares_its_evaluations_of_the_same_rows(run, capsys):
    with pytest.raises(UserError, match="two evaluations of one"):
        compare(run)
    greedy = json.loads((run / f"{GREEDY}.json").read_text())
    text = (run / f"{GREEDY}.txt").read_text()
    worse = "one two\n" * len(text.splitlines())
    evaluations = {
        "test-greedy-fp32": (greedy["rows"], text),
        "test-beam4-lp0.6": (greedy["rows"], worse),
        "test-beam4-lp0.6-first50": ("other rows", worse),
        "test-beam9-lp0.6": (greedy["rows"], worse.removesuffix("one two\n")),  # a line was lost
    }
    for name, (rows, text) in evaluations.items():
        (run / "eval" / f"{name}.txt").write_text(text)
        (run / "eval" / f"{name}.json").write_text(json.dumps(greedy | {"rows": rows}))
    change_json(run / f"{GREEDY}.json", checkpoint="checkpoints/step-1")
    compare(run)
    output = capsys.readouterr().out
    assert f"note: a · {GREEDY}.json · step-1 · of an earlier checkpoint" in output
    lines = [line.split() for line in output.splitlines() if line.startswith("BLEU")]
    names = [GREEDY, "eval/test-greedy-fp32", "eval/test-beam4-lp0.6"]
    assert [line[1] for line in lines] == names
    assert lines[1][-3:] == ["p", "=", "1.0000"]  # the same translations differ by nothing
    change_json(run / f"{GREEDY}.json", rows="of other data")
    compare(run)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines if line[0] == "BLEU"] == names[1:]


# -------------------------------------------------------------------- what is read


def test_the_rows_of_the_training_split_and_of_other_data(trained, toy_data, tmp_path):
    lines = (toy_data / "train.jsonl").read_text(encoding="utf-8").splitlines()[:250]
    rows = [tuple(json.loads(line).values()) for line in lines]
    run = RunFiles(trained, "a")
    result = dict(data=str(toy_data), columns=["zh", "en"], split="train", sentences=250)
    run.results["train"] = result | {"rows": fingerprint_of(rows)}
    run.hypotheses["train"] = [""] * 250
    assert rows_of(run, "train") == rows and not run.missing
    rows = [("一 二", "one two"), ("三", "three")]
    other = write_pairs(tmp_path / "other", rows, {"train": slice(None)})
    result |= dict(data=str(other), split="all", sentences=2, rows=fingerprint_of(rows))
    run.results["other"], run.hypotheses["other"] = result, ["some words"] * 2
    assert rows_of(run, "other") == rows and not run.missing


def test_a_resumed_run_shows_its_commands_machines_and_last_step(run, without_drawing):
    (first,) = json.loads((run / "environment.json").read_text())
    second = first | {"command": "python train.py --resume a"}
    (run / "environment.json").write_text(json.dumps([first | {"gpu": "A100"}, second]))
    log = (run / "train.log").read_text()
    (run / "train.log").write_text(log.replace("stopped after step 30", "stopped after step 33"))
    facts = Reader(make(run)).facts
    (commands,) = {text for _, source, text in facts if source.endswith("command")}
    assert commands == f"{first['command']} → {second['command']}"
    assert ("A100 → —", "a/environment.json#*.gpu", "A100 → —") in facts
    assert ("33", "a/train.log", "33") in facts


def test_the_time_of_a_run_that_was_killed_is_at_least_that_of_its_checkpoint(run):
    (session,) = json.loads((run / "environment.json").read_text())
    sessions = [session | {"seconds": None}, session | {"seconds": 300}]
    (run / "environment.json").write_text(json.dumps(sessions))
    change_json(run / "checkpoints/last/state.json", minutes=600)
    assert read_run(run).seconds().text == "≥ 600.0 min"


def test_a_score_of_an_earlier_checkpoint_is_noted_and_its_attention_is_of_that_one(
    run, without_drawing, monkeypatch
):
    (earlier,) = {"step-15", "step-30"} - {(run / "checkpoints/best").resolve().name}
    change_json(run / f"{GREEDY}.json", checkpoint=f"/elsewhere/a/checkpoints/{earlier}")
    loaded = []

    def load(path, average, log):
        loaded.append((path, average))
        return load_trained(path, average, log=log)

    monkeypatch.setattr(sections, "load_trained", load)
    words = "of an earlier checkpoint than the best"
    assert f"{GREEDY}.json · {earlier} · {words}" in make(run)
    assert loaded.pop() == (run / "checkpoints" / earlier, 1)
    for end in ("json", "txt"):  # the name that evaluate.py gives when asked for that checkpoint
        (run / f"{GREEDY}.{end}").rename(run / f"{GREEDY}-{earlier}.{end}")
    assert words not in make(run)
    mean = dict(checkpoint="mean of step-15, step-30 of a", average=2)
    change_json(run / f"{GREEDY}-{earlier}.json", **mean)
    make(run)
    assert loaded.pop() == (run, 2)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# Not finite, and cut by a kill.
LOST_RECORDS = '{"step": 1, "time": 1, "train/loss": null}\n{"step": 2, "time": 2, "train'


def remove_all_but_log_and_settings(run: Path) -> None:
    for path in run.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in ("config.json", "train.log"):
            path.unlink()


@pytest.mark.parametrize("count, sizes", [(1, [1]), (4, [3, 1]), (8, [3, 2, 3]), (30, [3, 3, 3])])
def test_no_translation_is_shown_twice(count, sizes):
    rows = [("源", "a b c d e f")] * count
    outputs = ["a b c d e f"[: 1 + row % 11] for row in range(count)]
    run = RunFiles(Path("r"), "r", hypotheses={GREEDY: outputs}, rows={GREEDY: rows})
    parts = sections.choose_examples([run]).parts.values()
    assert [len(numbers) for numbers in parts] == sizes
    assert len({row for numbers in parts for row in numbers}) == sum(sizes)


# Each report has several damages: what happens to the run, and words on the page.
DAMAGES = [
    [(remove_all_but_log_and_settings, "metrics.jsonl · not there")],
    [(lambda run: (run / "config.json").unlink(), "config.json · not there")],
    [
        (lambda run: (run / "config.json").write_text("[]"), "config.json · damaged"),
        (lambda run: (run / "metrics.jsonl").write_text("12\n"), "metrics.jsonl · 1 damaged"),
    ],
    [
        (lambda run: cut(run / "config.json"), "config.json · damaged"),
        (lambda run: cut(run / "environment.json"), "environment.json · damaged"),
    ],
    [
        (lambda run: cut(run / "data.json"), "data.json · damaged"),
        (lambda run: cut(run / "train.log"), "train.log · no final message"),
        (lambda run: cut(run / "metrics.jsonl"), "metrics.jsonl · 1 damaged"),
        (lambda run: cut(run / f"{GREEDY}.txt"), f"{GREEDY}.txt has"),
    ],
    [
        (lambda run: (run / "train.log").unlink(), "train.log · not there"),
        (lambda run: (run / f"{GREEDY}.txt").unlink(), f"{GREEDY}.txt · not there"),
    ],
    [
        (
            lambda run: (run / "metrics.jsonl").write_text('{"valid/loss": 1}\n'),
            "1 damaged line(s)",
        ),
        (lambda run: (run / "environment.json").write_text('["x"]'), "2 Setup</h2>"),
    ],
    [
        (lambda run: (run / "metrics.jsonl").write_text(LOST_RECORDS), "1 damaged line(s)"),
        (lambda run: shutil.rmtree(run / "eval"), "eval/ · no result yet · this makes one"),
    ],
    [(lambda run: cut(run / f"{GREEDY}.json"), f"{GREEDY}.json · damaged")],
    [
        (
            lambda run: change_json(run / f"{GREEDY}.json", rows="0"),
            "test-greedy was computed on other rows than",
        )
    ],
    [(lambda run: shutil.rmtree(run / "checkpoints"), "Cross-attention · ")],
]


@pytest.mark.parametrize("damages", DAMAGES)
def test_a_damaged_run_gives_a_report_that_says_so(run, damages, without_drawing):
    for spoil, _ in damages:
        spoil(run)
    page = make(run)
    assert "1 Summary</h2>" in page
    for _, words in damages:
        assert words in page


def test_other_positions_are_not_taken_for_sinusoids(run, without_drawing, monkeypatch):
    explained = "Frequencies fall in a geometric series"
    left_to_you = "no longer adds the sinusoids"
    page = make(run)
    assert explained in page and left_to_you not in page
    monkeypatch.setattr("model.sinusoids", torch.randn)
    page = make(run)
    assert explained not in page and left_to_you in page


def test_positions_of_an_own_class_are_not_taken_for_sinusoids(run, without_drawing, monkeypatch):
    class Learned(model.Translator):
        """It still has the table of sinusoids, and adds something else."""

        def embed(self, embedding, ids, first=0):
            return super().embed(embedding, ids, first).flip(1)

    monkeypatch.setattr(model, "make_translator", Learned)
    assert "no longer adds the sinusoids" in make(run)


def test_a_decoder_without_attention_is_noted(run, without_drawing, monkeypatch):
    def decode(translator, memory, src_pad, tgt_in, first=0):
        embedded = translator.embed(translator.target_embedding, tgt_in, first)
        return embedded + memory.mean(1, keepdim=True)

    why = "the decoder has no <code>nn.MultiheadAttention</code> to the source that gives"
    assert why not in make(run)
    monkeypatch.setattr(model.Translator, "decode", decode)
    assert why in make(run)


@pytest.mark.parametrize(
    "name, value, label, drawn",
    [
        ("loss", 2.5, "loss (nats per token)", 2.5),
        ("accuracy", 0.993, "error rate (%)", 0.7),
        ("padding_share", 0.12, "padding (%)", 12.0),
        ("wait_share", 0.12, "waiting for data (%)", 12.0),
        ("bubble_share", 0.12, "bubble of the pipeline (%)", 12.0),
        ("model_flops_utilisation", 0.12, "model FLOPs utilisation (%)", 12.0),
        ("a_curve_of_mine", 0.12, "a curve of mine", 0.12),
    ],
)
def test_a_curve_is_drawn_in_the_unit_of_its_axis(name, value, label, drawn):
    tag = f"valid/{name}"
    run = SimpleNamespace(
        name="run", records=[{"step": 9}], tags=lambda: [tag], series=lambda tag: ([9], [value])
    )
    (axes,) = figures.curves([run], name, [tag], "en").axes
    assert axes.get_ylabel() == label
    assert axes.lines[0].get_ydata() == pytest.approx([drawn])


def test_data_that_is_gone(run, without_drawing):
    change_json(run / f"{GREEDY}.json", data=str(run / "gone"))
    page = make(run)
    assert "gone is not on this disk" in page and "BLEU (nltk)" in page
    assert "<h3>Translations</h3>" not in page
    for end in ("json", "txt"):  # evaluated again, with data in another place
        shutil.copy(run / f"{GREEDY}.{end}", run / f"eval/test-greedy-data-1.{end}")
    data = json.loads((run / "config.json").read_text())["data"]
    change_json(run / "eval/test-greedy-data-1.json", data=data)
    assert "<h3>Translations</h3>" in make(run)
    compare(run)


def test_a_run_under_way(run, without_drawing):
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(run).running and "under way" in make(run)
    assert not read_run(run).running


def test_no_text_of_a_run_is_taken_for_html(run, without_drawing):
    evil = '<script>alert("1")</script>'
    lines = (run / f"{GREEDY}.txt").read_text().splitlines()
    (run / f"{GREEDY}.txt").write_text("".join(f"{evil}|\n" for _ in lines))
    (run / "nvidia-smi.txt").write_text(evil)
    change_json(run / "config.json", **{"tokenizer": evil, evil: "</td>"})
    page = make(run)
    assert "<script" not in page and "&lt;script&gt;" in page


def test_a_folder_that_is_no_run_or_no_place_for_a_report_is_one_line(run, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no such run"):
        make(tmp_path / "gone")
    with pytest.raises(UserError, match="is not a run"):
        make(tmp_path / "empty")
    with pytest.raises(UserError, match="is named twice; name every run once"):
        read_all([run, tmp_path / "empty" / ".." / run.relative_to(tmp_path)])
    with pytest.raises(UserError, match="a is a run itself; name another folder with --out DIR"):
        Page(("title", "标题"), "en", run)


def test_a_labs_run(tmp_path, without_drawing):
    """Its result, its layers from the log, its pictures, a GPU, and an impossible utilisation."""
    run = tmp_path / "lenet"
    (run / "eval").mkdir(parents=True)
    (run / "config.json").write_text('{"variant": "relu", "data": "mnist"}')
    (run / "environment.json").write_text('[{"kind": "lenet", "processes": 1}]')
    result = {"accuracy": 0.99, "places": 124439808, "confusion": [[1, 2]]}
    (run / "eval" / "test.json").write_text(json.dumps(result))
    (run / "eval" / "filters.png").write_bytes(b"PNG" * 400)
    network = "LeNet5(\n  (c1): Conv2d(1, 6)\n)"
    messages = [network, "LeNet-5 relu: 61,706 parameters", "step 1 loss 2", "stopped: done"]
    stamp = "2026-01-01 00:00:00 "
    (run / "train.log").write_text("".join(f"{stamp}{line}\n" for line in messages))
    gpu = {"utilisation_percent": 90, "memory_gib": 3, "power_watt": 250, "temperature_celsius": 61}
    records = [
        {"step": n, "time": 60 * n, "train/loss": 1 / n, "valid/loss": 2 / n}
        | {"test/accuracy": accuracy, "speed/model_flops_utilisation": n}
        | {f"gpu/{name}": value for name, value in gpu.items()}
        for n, accuracy in enumerate([0.9, 0.995, 0.98, 0.99], 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = make(run)
    facts = Reader(page).facts
    assert ("0.5", "lenet/metrics.jsonl#valid/loss#min", "0.5") in facts
    # The last accuracy, not the best on the test set.
    assert ("0.99", "lenet/metrics.jsonl#test/accuracy#last", "99.00%") in facts
    assert ("0.99", "lenet/metrics.jsonl#test/accuracy#last", "1.00%") in facts  # as its curve
    assert "next word" not in page
    for words in ("124,439,808", "61,706", "Conv2d(1, 6)", "mean GPU power (W)"):
        assert words in page
    assert "<h3>Pictures of the run</h3>" in page and "confusion" not in page
    assert "Positional encoding" not in page
    assert 'alt="lenet filters"' in page and "FLOPs utilisation" not in page
    assert "speed/model_flops_utilisation · above 100 %" in page
    files = read_run(run)
    assert files.printed_model() == network
    axes = figures.hardware(files, "en").axes
    titles = [a.get_title(loc="left").partition(" (")[0] for a in axes]
    assert titles == ["GPU utilisation", "GPU memory", "GPU power", "GPU temperature"]
    assert axes[0].get_ylim() == (0, 100) and list(axes[0].lines[0].get_xdata()) == [1, 2, 3, 4]


# -------------------------------------------------------------------- what a run writes for it


def test_what_a_run_writes_for_its_report(trained):
    (session,) = json.loads((trained / "environment.json").read_text())
    assert re.match(r"python \S*train\.py --data ", session["command"])
    assert session["seconds"] > 0 and session["gpu"] is None and session["cpu"]
    data = json.loads((trained / "data.json").read_text())
    for side in ("source", "target"):
        counts = data["lengths"][side]
        assert sum(n * count for n, count in enumerate(counts)) == data["tokens"][side]
        assert sum(counts) == data["counts"]["kept"]


# -------------------------------------------------------------------- what a reader must know first


@pytest.mark.parametrize("ending", ["stopped after step 30: interrupted", ""])
def test_an_interrupted_or_killed_run_says_so_in_red_at_the_top(run, without_drawing, ending):
    log = (run / "train.log").read_text(encoding="utf-8")
    assert "stopped after step 30: finished" in log
    assert 'class="warning"' not in make(run)
    lines = [line for line in log.splitlines() if "stopped after" not in line]
    if ending:
        lines.append(f"2026-01-01 00:00:00 {ending}")
    (run / "train.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    page = make(run)
    assert page.index('<p class="warning">a was interrupted') < page.index("<h2")
    assert "> **a was interrupted" in (run / "report/report.md").read_text(encoding="utf-8")
    assert "中断了" in make(run, language="zh")


def test_settings_at_their_defaults_are_folded(run, without_drawing):
    page = make(run)
    shown, _, folded = page.partition("<details>")
    folded = folded.partition("</details>")[0]
    for name, is_shown in (("max_steps", True), ("lr", True), ("clip", False), ("patience", False)):
        flag = f"<code>--{name}</code>"
        assert (flag in shown) == is_shown and (flag in folded) == (not is_shown), name


def test_the_curve_of_bleu_is_not_the_score(run, without_drawing):
    (caption,) = re.findall("<figcaption>(.*?BLEU.*?)</figcaption>", make(run))
    assert "validation BLEU of 100 rows, smoothed" in caption
    assert "all rows, without smoothing" in caption


def test_the_layers_have_as_many_parameters_as_the_log_says(run):
    files = read_run(run)
    logged = files.look_up("train.log#parameters").value
    assert sum(layer.parameters for layer in files.layers) == logged
    saved = [{"name": "own", "type": "Own", "shape": [2], "count": 1, "parameters": 7}]
    (run / "layers.json").write_text(json.dumps(saved))
    assert [layer.name for layer in read_run(run).layers] == ["own"]
    (run / "layers.json").write_text('[{"name": 1}]')
    files = read_run(run)
    assert not files.layers and any("damaged" in str(note) for note in files.missing)


def test_every_figure_of_the_score_file_is_on_the_page(run, without_drawing):
    page = make(run)
    for each in FIGURES:
        assert f'title="a/{GREEDY}.json#{each.name}"' in page, each.name


def test_the_flag_ckpt_names_a_run_as_its_first_word_does(run, without_drawing, capsys):
    config = script.Config(ckpt=str(run), out=str(run / "report"), language="en")
    config.runs = []
    script.report(config)
    assert "no run given" not in capsys.readouterr().out
    assert "1 Summary</h2>" in (run / "report/report.html").read_text(encoding="utf-8")


# -------------------------------------------------------------------- damages, other rows

ODD = [10**401, "x", [], {"a": 1}, None]


@pytest.mark.parametrize("number", range(len(ODD)))
def test_a_value_of_a_wrong_type_ends_in_no_error(run, without_drawing, number):
    """All values of one file at once: a note or a dash, never an error."""
    odd = ODD[number]
    for file in (f"{GREEDY}.json", "config.json", "data.json", "environment.json", "model.json"):
        whole = (run / file).read_text(encoding="utf-8")
        content = json.loads(whole)
        damaged = dict.fromkeys(content[0] if isinstance(content, list) else content, odd)
        (run / file).write_text(json.dumps([damaged] if isinstance(content, list) else damaged))
        assert "1 Summary</h2>" in make(run)
        (run / file).write_text(whole)
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": odd, "time": odd}) + "\n")
        file.write(json.dumps({"step": 31, "train/loss": odd, "valid/bleu": odd}) + "\n")
    with open(run / "train.log", "a", encoding="utf-8") as file:
        file.write(f"2026-01-01 00:00:00 stopped after step {'9' * 5000}: finished\n")
    make(run)


@pytest.mark.parametrize(
    "key, odd", [("decoding", 5), ("checkpoint", []), ("rows", {}), ("data", 3)]
)
def test_a_score_with_a_wrong_type_is_noted_or_shown(run, without_drawing, key, odd):
    change_json(run / f"{GREEDY}.json", **{key: odd})
    page = make(run)
    assert ("test-greedy.json · damaged" in page) == (key != "decoding")
    with pytest.raises(UserError):
        compare(run)


def test_runs_that_were_scored_on_other_rows_are_not_compared(run, toy_data, tmp_path):
    """As many rows, the same name of the result, both data sets are there: still not comparable."""
    other = copy_of(run, "b")
    lines = (toy_data / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [tuple(json.loads(line).values()) for line in lines][::-1]
    data = write_pairs(tmp_path / "other", rows, {"train": slice(50), "test": slice(None)})
    change_json(other / f"{GREEDY}.json", data=str(data), rows=fingerprint_of(rows))
    assert rows_of(read_run(other), GREEDY) == rows
    with pytest.raises(UserError, match="no translations of the same rows"):
        compare(run, other)


# -------------------------------------------------------------------- tables, Lightning


def write_table(folder: Path, shares: list[float]) -> Path:
    """A table of labs.gpt with a run for its first row."""
    rows, outcomes = [], []
    for number, share in enumerate(shares, 1):
        rows.append(f"| row {number}<br>`--flag {number}` | 1 | {share:.1%} | {number}.00 GiB |")
        figures_of_row = {"share_of_peak": share, "tokens_per_second": 100.0 * number}
        outcomes.append({"parameters": 9, "peak_gib": [0.1, float(number)], **figures_of_row})
    head = "| technique | processes | of measured peak | memory a rank |\n|---|---|---|---|\n"
    run = folder / "row-0"
    run.mkdir(parents=True)
    (run / "config.json").write_text('{"data": "random"}')
    (run / "environment.json").write_text('[{"kind": "gpt", "processes": 1}]')
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 6}\n{"step": 2, "train/loss": 5}')
    (run / "train.log").write_text("2026-01-01 00:00:00 stopped after step 2: finished\n")
    (folder / "table.md").write_text(head + "\n".join(rows) + "\n\nabout all rows\n")
    (folder / "table.json").write_text(json.dumps(outcomes))
    return folder


def test_a_table_has_its_cells_ratios_losses_and_sources(tmp_path, monkeypatch, without_drawing):
    drawn = []
    monkeypatch.setattr(figures, "curves", lambda runs, *_: drawn.append(runs) or b"")
    folder = write_table(tmp_path / "compare", [0.5, 4.58])
    page = make(folder)
    cells = [re.sub("<[^>]*>", "", cell) for cell in re.findall("<t[dh][^>]*>(.*?)</t[dh]>", page)]
    assert "row 1 --flag 1" in cells and "50.0%" in cells and "2.00 GiB" in cells
    assert "458.0%" not in page and "above 100 %" in page
    assert cells.count("2.00 ×") == 2 and cells.count("1.00 ×") == 2  # speed and memory
    assert [[run.name for run in runs] for runs in drawn] == [["row 1 · 1"]]
    assert references.GPT2 in page and "about all rows" in page
    (folder / "table.json").write_text("[]")
    with pytest.raises(UserError, match="has no table that can be read"):
        make(folder)


def test_a_run_of_lightning_has_its_curves(tmp_path, monkeypatch, without_drawing):
    from torch.utils.tensorboard import SummaryWriter

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/lightning/version_0"
    with SummaryWriter(str(folder)) as writer:
        for step in (50, 100):
            writer.add_scalar("train/loss", 50 / step, step)
        writer.add_scalar("test/accuracy", 0.75, 100)
        writer.add_scalar("epoch", 0, 100)
    (folder / "hparams.yaml").write_text("{}\n")
    assert newest_run() == Path("runs/lightning/version_0")
    files = read_run(folder)
    assert files.series("train/loss") == ([50, 100], [1.0, 0.5]) and not files.missing
    assert list(figures.panels_of([files])) == ["loss", "accuracy"]
    page = make(folder)
    assert "LeNet-5 with PyTorch Lightning" in page and references.LIGHTNING in page
    assert 'class="warning"' not in page
