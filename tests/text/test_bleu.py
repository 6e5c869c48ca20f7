"""BLEU: one right number, and the wrong ones that look like it."""

import json
import math
import random
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU, CHRF

from text.bleu import (
    FIGURES,
    bleu_card,
    card_lines,
    choose_tokeniser,
    corpus_bleu,
    sacrebleu_metric,
    sentence_scores,
    tokens_of,
)

# What a small model gets wrong: numbers, quotes, hyphens, short sentences. Reference | translation.
PAIRS = """\
The government will publish the report next week.|The government will publish a report next week.
He said: "I don't know what happened."|He said: "I do not know what happened."
In 2008, exports rose by 3.5% to $1,200 million.|In 2008 exports rose 3.5% to $1,200 million.
She lives in a small town near Beijing.|She lives in a small town near Beijing.
The well-known writer died at the age of 87.|The famous writer died at 87 years old.
Could you tell me the way to the station?|Can you tell me how to get to the station?
It has been raining for three days.|It has rained for three days.
Nobody was hurt in the accident.|No one was injured in the accident.
Prices have fallen since last year.|The price has fallen since last year.
The bus leaves at 7:30 every morning.|The bus leaves every morning at 7:30.
I would like a cup of tea, please.|I would like a cup of tea.
The U.S. dollar fell against the yen.|The US dollar fell against the yen.
China's economy grew faster than expected.|China's economy grew faster than expected last year.
The company plans to hire 1,000 workers.|The company plans to hire 1,000 workers .\
"""
REFERENCES = [line.split("|")[0] for line in PAIRS.splitlines()]
HYPOTHESES = [line.split("|")[1] for line in PAIRS.splitlines()]


def sacrebleu_score(references, hypotheses, tokenize="13a", smooth="none"):
    """By default with the settings that mean the same as nltk's method0."""
    metric = BLEU(tokenize=tokenize, smooth_method=smooth, force=True)
    return metric.corpus_score(hypotheses, [references])


@pytest.mark.parametrize(
    "references, hypotheses, complaint",
    [
        ("abc", ["abc"], "references must be a list of sentences, not str"),
        (["abc"], "abc", "hypotheses must be a list of sentences, not str"),
        (["a b"], [["a", "b"]], r"hypotheses\[0\] must be a plain sentence \(str\), not list"),
        (["a b", None], ["a", "c"], r"references\[1\] must be a plain sentence .*, not NoneType"),
        (["a b", "c"], ["a b"], "2 references, 1 hypotheses"),
        ([], [], "0 references, 0 hypotheses"),
    ],
)
@pytest.mark.parametrize("function", [corpus_bleu, bleu_card])
def test_wrong_shapes_are_refused_in_one_line(function, references, hypotheses, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        function(references, hypotheses)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- nltk and sacreBLEU agree


def test_the_reported_score_is_sacrebleus():
    reported = corpus_bleu(REFERENCES, HYPOTHESES)
    assert reported == pytest.approx(sacrebleu_score(REFERENCES, HYPOTHESES).score, abs=1e-6)
    assert 30 < reported < 70


WORDS = "the The cat sat on a mat . , can't 3.5 U.S. &amp; é -".split()
SENTENCES = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


@settings(max_examples=60)
@given(st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1, max_size=6))
def test_short_hypotheses_differ_only_by_the_guard_against_zero_totals(pairs):
    """For each hypothesis of fewer than n tokens nltk adds one n-gram to the total of order n.

    With the same totals sacreBLEU's formula gives the same score; without them nltk's is lower.
    """
    references, hypotheses = zip(*pairs)
    reported, standard = (
        corpus_bleu(references, hypotheses),
        sacrebleu_score(references, hypotheses),
    )
    lengths = [len(tokens) for tokens in tokens_of(hypotheses, sacrebleu_metric(references))]
    totals = [standard.totals[n - 1] + sum(length < n for length in lengths) for n in (1, 2, 3, 4)]
    counts, sizes = list(standard.counts), (standard.sys_len, standard.ref_len)
    guarded = BLEU.compute_bleu(counts, totals, *sizes, smooth_method="none")
    assert reported == pytest.approx(guarded.score, abs=0.01)
    assert reported <= standard.score + 0.01


def test_smoothing_changes_nothing_where_every_order_matches():
    assert corpus_bleu(REFERENCES, HYPOTHESES, smooth=True) == corpus_bleu(REFERENCES, HYPOTHESES)
    early = {"references": ["the cat sat on the mat"], "hypotheses": ["the dog sat by the door"]}
    floor = BLEU(smooth_method="floor", smooth_value=0.1)
    expected = floor.corpus_score(early["hypotheses"], [early["references"]]).score
    assert corpus_bleu(**early, smooth=True) == pytest.approx(expected) and 0 < expected < 30


# ---------------------------------------------------------------- languages and case


@pytest.mark.parametrize(
    "references, tokeniser",
    [
        (["a", "我", "b"], "13a"),  # a Chinese name in one line of three
        (["a", "我"], "13a"),
        (["a", "我", "你"], "zh"),
        (["我喜欢の字", "你好", "再见"], "zh"),  # a Japanese word in one line of three
        (["私は学生です。", "東京タワーへ行く。", "大変"], "char"),
        (["나는 학생입니다.", "안녕"], "char"),
        ([""], "13a"),
    ],
)
def test_the_characters_of_most_references_choose_the_tokeniser(references, tokeniser):
    assert choose_tokeniser(references) == tokeniser


@pytest.mark.parametrize(
    "reference, hypothesis, tokeniser",
    [
        ("我们明天去北京参观博物馆。", "我们明天到北京参观博物馆。", "zh"),
        ("私は明日東京へ行きます。", "私は明日大阪へ行きます。", "char"),
    ],
)
def test_languages_without_spaces_are_scored_by_characters(reference, hypothesis, tokeniser):
    card = bleu_card([reference], [hypothesis])
    assert f"tok:{tokeniser}|" in card["signature"]
    assert f"nltk corpus_bleu, {tokeniser}, cased" in card["settings"]
    assert card["nltk"] == corpus_bleu([reference], [hypothesis])
    expected = sacrebleu_score([reference], [hypothesis], tokeniser).score
    assert card["nltk"] == pytest.approx(expected, abs=0.01)
    assert card["nltk"] > 40  # in words between spaces nothing would match


def test_scores_are_cased():
    references, hypotheses = ["The cat sat on it."], ["the cat sat on it."]
    assert corpus_bleu(references, hypotheses) < 100
    assert sentence_scores(references, hypotheses)[0] < 100
    card = bleu_card(references, hypotheses)
    assert card["nltk"] < 100 and card["sacrebleu"] < 100
    assert card["lowercase"] == pytest.approx(100)
    assert "|case:mixed|" in card["signature"]


# ---------------------------------------------------------------- the card


def test_the_card_holds_sacrebleus_numbers():
    card = bleu_card(references=REFERENCES, hypotheses=HYPOTHESES)
    standard = sacrebleu_score(REFERENCES, HYPOTHESES, smooth="exp")
    assert card["nltk"] == corpus_bleu(REFERENCES, HYPOTHESES)
    assert card["sacrebleu"] == standard.score and card["precisions"] == standard.precisions
    assert (card["hyp_length"], card["ref_length"]) == (standard.sys_len, standard.ref_len)
    assert card["ratio"] == pytest.approx(card["hyp_length"] / card["ref_length"])
    assert card["brevity_penalty"] == standard.bp < 1
    assert card["chrf"] == CHRF().corpus_score(HYPOTHESES, [REFERENCES]).score
    assert card["sentences"] == len(REFERENCES)
    assert card["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.")
    assert card["chrf_signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|")


def test_the_interval_is_sacrebleus_bootstrap():
    card = bleu_card(REFERENCES, HYPOTHESES)
    theirs = BLEU(force=True).corpus_score(HYPOTHESES, [REFERENCES], n_bootstrap=1000)
    low, high = card["interval"]
    text = f"μ = {(low + high) / 2:.2f} ± {(high - low) / 2:.2f}"
    assert text in theirs.format() and low < card["nltk"] < high
    assert bleu_card(REFERENCES, HYPOTHESES) == card  # the same in every run


def test_the_interval_is_that_of_the_number_above_it():
    """Of many titles of two words nltk's score is far below sacreBLEU's; checked by resampling."""
    references = ["Zhang Wei"] * 100 + REFERENCES
    hypotheses = ["Zhang Wei"] * 100 + HYPOTHESES
    card = bleu_card(references, hypotheses)
    draw = random.Random(0)
    scores = []
    for _ in range(200):
        rows = draw.choices(range(len(references)), k=len(references))
        scores.append(
            corpus_bleu([references[row] for row in rows], [hypotheses[row] for row in rows])
        )
    scores.sort()
    assert card["interval"] == pytest.approx([scores[5], scores[-6]], abs=3)
    assert card["sacrebleu"] > card["interval"][1] > card["nltk"] > card["interval"][0]
    # The precisions explain the same number.
    geometric_mean = math.prod(card["precisions"]) ** (1 / 4)
    assert card["nltk"] == pytest.approx(card["brevity_penalty"] * geometric_mean)


@pytest.mark.parametrize("references", [["", ""], ["a", ""], ["a b c d e", "f"]])
@pytest.mark.parametrize("hypotheses", [["", ""], ["a b c d e", "f"], ["   ", "."]])
def test_empty_and_one_word_sentences_make_a_card(references, hypotheses):
    card = bleu_card(references, hypotheses)
    assert json.loads(json.dumps(card, allow_nan=False)) == card
    assert 0 <= card["interval"][0] <= card["interval"][1] <= 100
    lines = card_lines(card)
    empty = references.count("")
    assert (f"note: {empty} references are empty, and no translation" in lines[-1]) == (empty > 0)


def test_every_figure_is_a_line_of_80_columns():
    lines = card_lines(bleu_card(REFERENCES * 200, HYPOTHESES * 200))
    labels = [line[:21].strip() for line in lines]
    assert labels == [figure.label for figure in FIGURES]
    assert max(map(len, lines)) <= 80
    assert lines[labels.index("sentences")].split()[1] == "2,800"


def test_the_card_explains_a_gap_to_sacrebleu():
    def notes(references, hypotheses):
        lines = card_lines(bleu_card(references, hypotheses))[len(FIGURES) :]
        assert all(len(line) <= 80 for line in lines)
        return " ".join(" ".join(lines).split())

    titles = ["Yes."] * 20
    short = bleu_card(REFERENCES + titles, HYPOTHESES + titles)
    assert short["short"] == 20 and short["sacrebleu"] - short["nltk"] > 0.1
    assert notes(REFERENCES + titles, HYPOTHESES + titles) == (
        "note: nltk's BLEU is lower than sacreBLEU's, because it adds an n-gram without a match "
        "for each translation of fewer than n tokens (below four tokens: 20)"
    )
    hopeless = (["the cat sat on the mat"], ["the dog sat by the door"])
    card = bleu_card(*hopeless)
    assert card["nltk"] == card["interval"][1] == 0.0 < card["sacrebleu"]
    assert "smooth:exp" in notes(*hopeless)
    assert notes(REFERENCES, HYPOTHESES) == ""


def test_a_short_sentence_is_scored_by_the_n_grams_it_has():
    scores = sentence_scores(["the cat sat", "no"], ["the cat sat", "yes"])
    assert scores == [pytest.approx(100), 0]


def test_no_warnings(capsys, caplog):
    tokenised = [hypothesis[:-1] + " ." for hypothesis in HYPOTHESES]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bleu_card(REFERENCES * 8, tokenised * 8)  # sacreBLEU would warn from 100 lines on
        bleu_card(["a", "the cat sat on the mat"], ["", "the dog sat by the door"])  # no 4-gram
    captured = capsys.readouterr()
    assert (captured.out, captured.err, caplog.text) == ("", "", "")
