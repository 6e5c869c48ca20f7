"""One line out for each line in; standard output receives translations alone."""

import io
import os
import sys

import pytest
import torch
from conftest import fork_ranks, forked, run_script

import translate as script
from decoding import Decoder
from engine.errors import UserError
from loading import load_trained
from translation import translate_lines


@pytest.fixture(scope="session")
def reference(tiny_run):
    """A function: these lines translated by the model directly."""
    trained = load_trained(tiny_run)
    tools = Decoder(trained.model), trained.source_tokenizer, trained.target_tokenizer
    return lambda lines, **options: translate_lines(*tools, lines, **options).texts


class StandardInput(io.TextIOWrapper):
    terminal = False

    def isatty(self):
        return self.terminal


@pytest.fixture
def called(tiny_run, monkeypatch, capsys):
    """A function: translate.py in this process; returns standard output and standard error."""

    def called(*text, stdin: bytes = b"", **settings) -> tuple[str, str]:
        stream = StandardInput(io.BytesIO(stdin), encoding="ascii", newline="\n")
        monkeypatch.setattr("sys.stdin", stream)
        config = script.Config(**{"ckpt": str(tiny_run), "device": "cpu", **settings})
        config.text = list(text)
        script.translate(config)
        printed = capsys.readouterr()
        return printed.out, printed.err

    return called


# ---------------------------------------------------------------- as a user types it

LINES = [
    "一二三",
    "",
    "九八七六",
    "   ",
    "  五\t四 ",
    "\u3000",
    "没见过的字 & English 😀",
    "一二三",
]


def test_lines_of_standard_input(tiny_run, reference):
    """With the newest run, in a process of its own with a locale of ASCII."""
    stdin = "\n".join(LINES) + "\n"
    result = run_script("translate.py", cwd=tiny_run.parent.parent, stdin=stdin, LC_ALL="C")
    assert result.returncode == 0, result.stderr
    expected = reference(LINES)
    assert result.stdout.split("\n") == [*expected, ""] and len(expected) == len(LINES)
    assert expected[0] == expected[7] != "" and [expected[row] for row in (1, 3, 5)] == ["", "", ""]
    assert "no --ckpt given, using the newest run: runs" in result.stderr
    assert "device: " in result.stderr
    assert "Traceback" not in result.stderr and "Warning" not in result.stderr


def test_the_first_word_may_be_the_run(tiny_run, reference, tmp_path):
    output = forked("translate.py", tiny_run, "一二三", "四", "--device", "cpu", cwd=tmp_path)
    assert output.splitlines()[-2:] == reference(["一二三", "四"])


def give_standard_input(text: str) -> None:
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="ascii")


def test_many_processes_translate_each_line_once(tiny_run, reference, tmp_path):
    """Rank 0 reads and prints; all ranks translate."""
    first = give_standard_input, "\n".join(LINES)
    ranks = fork_ranks(2, "translate.py", "--ckpt", tiny_run, cwd=tmp_path, first=first)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    notes = ("device: ", "note: ")
    lines = [line for line in ranks[0].output.split("\n") if not line.startswith(notes)]
    assert lines == [*reference(LINES), ""] and not ranks[1].output


# ---------------------------------------------------------------- in this process


def test_arguments_are_translated_and_standard_input_is_not_read(called, reference):
    lines = ["一二三", "", "两 行\n一", "-5", "九八"]
    assert called(*lines, stdin=b"not read\n")[0].split("\n") == [*reference(lines), ""]


@pytest.mark.parametrize(
    "stdin, lines",
    [
        ("", []),
        ("\n\n\n", ["", "", ""]),
        ("一\n\n", ["一", ""]),
        ("一\r\n二\r\n", ["一", "二"]),
        ("一\r二\n三", ["一 二", "三"]),
        ("一\x0b二\x0c三\u2028四\x85五\n六", ["一 二 三 四 五", "六"]),
    ],
)
def test_as_many_lines_out_as_in(called, reference, stdin, lines):
    out, _ = called(stdin=stdin.encode())
    assert out == "".join(text + "\n" for text in (reference(lines) if lines else []))


def test_groups_of_lines_keep_their_order(called, reference, monkeypatch):
    lines = ["一", "", "二三四五六", "七八", "", "九" * 7, "零"]
    stdin = "\n".join(lines).encode()
    monkeypatch.setattr("text.input.LINES_AT_ONCE", 3)
    out, err = called(stdin=stdin)
    groups = (lines[:3], lines[3:6], lines[6:])
    assert out.splitlines() == [text for group in groups for text in reference(group)]
    assert "were cut" not in err


# A character never seen is spelled in three bytes: ten of them, a space and the end fill 32 tokens.
def test_long_input_is_cut_with_a_note(called, reference):
    lines = ["鸞" * 11, "鸞" * 10, "鸞" * 200, "三"]
    out, err = called(*lines)
    assert "note: 2 sentences were cut to the model's limit of 31 tokens" in err
    assert out.splitlines() == reference(lines) and len(out.splitlines()) == 4
    assert "were cut" not in called("鸞" * 10)[1]


def test_beams(called, reference):
    lines = ["一二三", "四五"]
    out, _ = called(*lines, beam=3, length_penalty=0.9)
    assert out.splitlines() == reference(lines, beam=3, length_penalty=0.9) != reference(lines)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_format_reaches_the_translation(called, monkeypatch, precision):
    formats = []

    def translate(*arguments, **options):
        formats.append(torch.is_autocast_enabled("cpu"))
        return translate_lines(*arguments, **options)

    monkeypatch.setattr(script, "translate_lines", translate)
    called("一二三", precision=precision)
    assert formats == [precision == "bf16"]


def test_a_file_belongs_on_standard_input(called, tmp_path):
    (tmp_path / "zh.txt").write_text("一二")
    message = r"zh.txt is a file; give its lines on standard input: < .*zh.txt$"
    with pytest.raises(UserError, match=message):
        called("三", str(tmp_path / "zh.txt"))


@pytest.mark.parametrize("beam", [1, 3])
def test_the_best_of_each_line_with_scores(called, reference, monkeypatch, beam):
    monkeypatch.setattr("text.input.LINES_AT_ONCE", 2)
    lines = ["一二。三", "", "四五"]  # the first has two sentences, but stays whole
    out, _ = called(stdin="\n".join(lines).encode(), beam=beam, nbest=beam)
    rows = [line.split(" ||| ") for line in out.splitlines()]
    assert [row[0] for row in rows] == ["0"] * beam + ["1"] + ["2"] * beam
    best = [next(text for number, text, _ in rows if number == str(row)) for row in range(3)]
    assert best == reference(lines, beam=beam)
    scores = [float(score) for number, _, score in rows if number == "2"]
    assert scores == sorted(scores, reverse=True) and scores[0] < 0


def test_tiny_scores_keep_their_order(called):
    """With a length penalty of 10 a score is divided by the length to the power of 10."""
    out, _ = called("一二三四五", beam=3, nbest=3, length_penalty=10.0)
    scores = [float(line.split(" ||| ")[2]) for line in out.splitlines()]
    assert -1e-4 < scores[0] < 0 and scores == sorted(set(scores), reverse=True)


@pytest.mark.parametrize(
    "flags, error",
    [
        (dict(beam=2, nbest=3), "--nbest 3 needs --beam 3 or larger"),
        (dict(length_penalty=2.0), "--length_penalty needs --beam 2 or larger"),
        (dict(port=5), "--port is for --serve"),
        (dict(quantization="int8"), "--quantization is for --export"),
    ],
)
def test_flags_that_would_have_no_effect_are_a_mistake(flags, error):
    with pytest.raises(UserError, match=error):
        script.Config(**flags)


def test_a_page_with_a_length_penalty_asks_for_the_beam_size_itself():
    assert script.Config(length_penalty=2.0, serve=True).beam == 1


def test_at_a_prompt(called, reference, monkeypatch):
    not_utf8 = UnicodeDecodeError("utf-8", b"\xc4", 0, 1, "no")
    typed = iter(["一二 ", "", not_utf8, "\udcc4\udce3", "三", EOFError(), "never read"])

    def type_line(shown):
        line = next(typed)
        if isinstance(line, Exception):
            raise line
        return line

    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr(StandardInput, "terminal", True)
    out, err = called()
    assert out.splitlines() == [*reference(["一二"]), *reference(["三"])]
    assert "Ctrl-D ends the program" in err and err.count("note: this line is not UTF-8") == 2
    assert next(typed) == "never read"


def test_a_paragraph_is_translated_sentence_by_sentence(called, reference):
    lines, pieces = ["一二。三四！", "", "五六。"], ["一二。", "三四！", "", "五六。"]
    first, second, *rest = reference(pieces)
    out, _ = called(*lines)
    assert out.split("\n") == [f"{first} {second}", *rest, ""]
    whole, _ = called(*lines, whole_lines=True)
    assert whole.split("\n") == [*reference(lines), ""] != out.split("\n")


def test_input_that_is_not_utf8(called):
    message = r"standard input after line 0 is not UTF-8 .*; convert it with iconv first"
    with pytest.raises(UserError, match=message):
        called(stdin="你好\n".encode("gb18030"))
    with pytest.raises(UserError, match=r"the text is not UTF-8; .* with iconv"):
        called("一", os.fsdecode("你好".encode("gb18030")))
