"""BLEU: one right number, and the wrong ones that look like it."""

import json
import warnings
from dataclasses import asdict

import pytest
from conftest import run_code
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU, CHRF

from text.bleu import (
    bleu_card,
    bleu_from_counts,
    corpus_bleu,
    sacrebleu_metric,
    sentence_counts,
    sentence_scores,
    tokens_of,
)

# Reference, translation: the kinds of error a small model makes, with numbers, quotes, hyphens and short sentences.
PAIRS = [
    (
        "The government will publish the report next week.",
        "The government will publish a report next week.",
    ),
    ('He said: "I don\'t know what happened."', 'He said: "I do not know what happened."'),
    (
        "In 2008, exports rose by 3.5% to $1,200 million.",
        "In 2008 exports rose 3.5% to $1,200 million.",
    ),
    ("She lives in a small town near Beijing.", "She lives in a small town near Beijing."),
    ("The well-known writer died at the age of 87.", "The famous writer died at 87 years old."),
    ("Could you tell me the way to the station?", "Can you tell me how to get to the station?"),
    ("It has been raining for three days.", "It has rained for three days."),
    ("Nobody was hurt in the accident.", "No one was injured in the accident."),
    ("Prices have fallen since last year.", "The price has fallen since last year."),
    ("The bus leaves at 7:30 every morning.", "The bus leaves every morning at 7:30."),
    ("I would like a cup of tea, please.", "I would like a cup of tea."),
    ("The U.S. dollar fell against the yen.", "The US dollar fell against the yen."),
    (
        "China's economy grew faster than expected.",
        "China's economy grew faster than expected last year.",
    ),
    ("Children under six travel free of charge.", "Children under 6 years old travel free."),
    ("The old man sat down & said nothing.", "The old man sat and said nothing."),
    ("The company plans to hire 1,000 workers.", "The company plans to hire 1,000 workers ."),
]
REFERENCES, HYPOTHESES = [pair[0] for pair in PAIRS], [pair[1] for pair in PAIRS]


def unsmoothed_sacrebleu(references, hypotheses, tokenize="13a"):
    """sacreBLEU with the settings that mean the same as nltk's method0."""
    metric = BLEU(tokenize=tokenize, smooth_method="none", force=True)
    return metric.corpus_score(hypotheses, [references])


# --- the right form, and the wrong ones -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "references, hypotheses, complaint",
    [
        ("abc", ["abc"], "references must be a list of sentences, not str"),
        (["abc"], "abc", "hypotheses must be a list of sentences, not str"),
        (None, ["abc"], "references must be a list of sentences, not NoneType"),
        (["a b"], [["a", "b"]], r"hypotheses\[0\] must be a plain sentence \(str\), not list"),
        (
            ["a b", None],
            ["a b", "c"],
            r"references\[1\] must be a plain sentence \(str\), not NoneType",
        ),
        (["a b", "c"], ["a b"], "2 references, 1 hypotheses"),
        ([], [], "0 references, 0 hypotheses"),
    ],
)
@pytest.mark.parametrize("function", [corpus_bleu, bleu_card])
def test_wrong_shapes_are_refused_in_one_line(function, references, hypotheses, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        function(references, hypotheses)
    assert "\n" not in str(caught.value)


# --- nltk and sacreBLEU agree -----------------------------------------------------------------------------------------


def test_agreement_on_fixed_pairs():
    graded = corpus_bleu(REFERENCES, HYPOTHESES)
    assert graded == pytest.approx(unsmoothed_sacrebleu(REFERENCES, HYPOTHESES).score, abs=1e-6)
    assert graded == pytest.approx(
        BLEU(force=True).corpus_score(HYPOTHESES, [REFERENCES]).score, abs=1e-6
    )
    assert 30 < graded < 70


WORDS = "the The cat sat on a mat . , can't 3.5 U.S. &amp; é -".split()
SENTENCES = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


@settings(max_examples=150)
@given(st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1, max_size=6))
def test_short_hypotheses_differ_only_by_the_guard_against_zero_totals(pairs):
    """nltk adds one n-gram to the total of order n for each hypothesis of fewer than n tokens. Give sacreBLEU's formula
    the same totals and the scores are equal; leave them out and nltk is never the higher one."""
    references, hypotheses = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    graded, like_for_like = (
        corpus_bleu(references, hypotheses),
        unsmoothed_sacrebleu(references, hypotheses),
    )
    lengths = [len(tokens) for tokens in tokens_of(hypotheses, sacrebleu_metric("en"))]
    totals = [
        like_for_like.totals[n - 1] + sum(length < n for length in lengths) for n in (1, 2, 3, 4)
    ]
    guarded = BLEU.compute_bleu(
        list(like_for_like.counts),
        totals,
        like_for_like.sys_len,
        like_for_like.ref_len,
        smooth_method="none",
    )
    assert graded == pytest.approx(guarded.score, abs=0.01)
    assert graded <= like_for_like.score + 0.01


@settings(max_examples=100)
@given(st.lists(st.tuples(st.text(max_size=30), st.text(max_size=30)), min_size=1, max_size=4))
def test_any_text_gets_a_score_and_sacrebleus_tokens(pairs):
    references, hypotheses = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for target in ("en", "zh", "ja"):
        assert 0 <= corpus_bleu(references, hypotheses, target=target) <= 100 + 1e-9
        metric = sacrebleu_metric(target, references)
        counted = metric.corpus_score(hypotheses, [references])
        assert counted.sys_len == sum(map(len, tokens_of(hypotheses, metric)))
        assert counted.ref_len == sum(map(len, tokens_of(references, metric)))


@pytest.mark.parametrize(
    "target",
    "zh zh_cn Chinese cn cmn 中文 汉语 简体中文 text_zh ja jp 日本語 ko kr text_ja target_ko".split(),
)
def test_languages_without_spaces_are_cut_into_characters(target):
    references = ["我买书。"]
    assert tokens_of(references, sacrebleu_metric(target, references)) == [[*"我买书。"]]


def test_chinese_references_are_known_by_their_characters():
    references, hypotheses = (
        ["我想买书。", "你好，世界。", "GPU"],
        ["我想买书。", "你好，世上。", "GPU"],
    )
    for score in (corpus_bleu, lambda *texts, target: bleu_card(*texts, target).nltk):
        assert (
            score(references, hypotheses, target="译文")
            == score(references, hypotheses, target="zh")
            > 50
        )


@pytest.mark.parametrize(
    "references, name",
    [
        (["a", "我", "b"], "13a"),  # a name in one line of three
        (["a", "我"], "13a"),
        (["a", "我", "你"], "zh"),
        (["我"], "zh"),
        ([], "13a"),
    ],
)
def test_more_than_half_of_the_references_make_chinese(references, name):
    assert sacrebleu_metric("target", references).tokenizer.signature() == name


@pytest.mark.parametrize("target", ["zh_en", "zh2en", "en_from_cn", "cn-en", "中英"])
def test_english_is_scored_in_words_whatever_its_column_is_called(target):
    card = bleu_card(REFERENCES, HYPOTHESES, target, resamples=20)
    assert "|tok:13a|" in card.signature
    assert card.nltk == corpus_bleu(REFERENCES, HYPOTHESES)


def test_scores_are_cased_unless_told_otherwise():
    assert "case:mixed" in bleu_card(["The cat sat."], ["the cat sat."], resamples=20).signature
    assert sentence_scores(["The cat sat."], ["the cat sat."])[0] < 100
    lowercase = sacrebleu_metric("en", lowercase=True)
    assert lowercase.corpus_score(["the cat sat."], [["The cat sat."]]).score == pytest.approx(100)


@pytest.mark.parametrize("target", ["en", "english", "kreyol", "jav", "cnn_summary", "kohde"])
def test_other_languages_into_words(target):
    assert sacrebleu_metric(target).tokenizer.signature() == "13a"


@pytest.mark.parametrize("references", [["", ""], ["a", ""], ["a b c d e", "f"]])
@pytest.mark.parametrize("hypotheses", [["", ""], ["a", ""], ["a b c d e", "f"], ["   ", "."]])
def test_empty_and_one_word_sentences_make_a_card(references, hypotheses):
    card = bleu_card(references, hypotheses, resamples=20)
    json.dumps(asdict(card), allow_nan=False)
    assert 0 <= card.low <= card.high <= 100 + 1e-9
    assert card.lines()


def test_the_card_explains_a_gap_to_sacrebleu():
    short = bleu_card(REFERENCES + ["Yes."] * 20, HYPOTHESES + ["Yes."] * 20)
    assert short.short == 20
    assert short.sacrebleu - short.nltk > 0.1
    assert "nltk is stricter than sacreBLEU on the 20 hypotheses" in short.lines()[-1]
    hopeless = bleu_card(["the cat sat on the mat"], ["the dog sat by the door"])
    assert hopeless.nltk == 0.0 < hopeless.sacrebleu
    assert "smooth:exp" in hopeless.lines()[-1]
    assert not any("note" in line for line in bleu_card(REFERENCES, HYPOTHESES).lines())


# --- smoothing, case, language ----------------------------------------------------------------------------------------


def test_only_harmless_smoothing():
    """method1 touches nothing unless a count is 0."""
    assert corpus_bleu(REFERENCES, HYPOTHESES, smooth=True) == corpus_bleu(REFERENCES, HYPOTHESES)
    early = {"references": ["the cat sat on the mat"], "hypotheses": ["the dog sat by the door"]}
    assert 0 < corpus_bleu(**early, smooth=True) < 30
    floor = BLEU(smooth_method="floor", smooth_value=0.1).corpus_score(
        early["hypotheses"], [early["references"]]
    )
    assert corpus_bleu(**early, smooth=True) == pytest.approx(floor.score)


@pytest.mark.parametrize("target, name", [("zh-CN", "zh"), ("ja", "char"), ("ko", "char")])
def test_tokeniser_follows_the_language(target, name):
    references = ["我们明天去北京参观博物馆。", "他喜欢喝绿茶,不喜欢喝咖啡。"]
    hypotheses = ["我们明天到北京参观博物馆。", "他喜欢喝绿茶,不爱喝咖啡。"]
    card = bleu_card(references, hypotheses, target=target)
    assert f"tok:{name}|" in card.signature
    assert f"{name} tokens" in card.lines()[0]
    assert card.nltk == corpus_bleu(references, hypotheses, target=target)
    assert card.nltk == pytest.approx(
        unsmoothed_sacrebleu(references, hypotheses, name).score, abs=0.01
    )
    assert card.nltk > 50  # as words between spaces, nothing would match


# --- the card ---------------------------------------------------------------------------------------------------------


def test_card_holds_sacrebleus_own_numbers():
    card = bleu_card(references=REFERENCES, hypotheses=HYPOTHESES)
    standard = BLEU(force=True).corpus_score(HYPOTHESES, [REFERENCES])
    assert card.sacrebleu == standard.score
    assert card.precisions == pytest.approx(standard.precisions)
    assert (card.hyp_length, card.ref_length) == (standard.sys_len, standard.ref_len)
    assert card.ratio == pytest.approx(card.hyp_length / card.ref_length)
    assert card.brevity_penalty == standard.bp < 1
    assert card.chrf == CHRF().corpus_score(HYPOTHESES, [REFERENCES]).score
    assert card.sentences == len(PAIRS) and card.low < card.nltk < card.high
    assert card.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.")
    assert card.chrf_signature.startswith(
        "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2."
    )


def test_no_output_beside_the_result(capsys, caplog):
    tokenised = [
        hypothesis[:-1] + " ." for hypothesis in HYPOTHESES
    ] * 5  # sacreBLEU would warn from 100 lines on
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bleu_card(REFERENCES * 5, tokenised)
        bleu_card(["我们去北京。"], ["我们去北京。"], target="zh")
        bleu_card(
            ["a", "the cat sat on the mat"], ["", "the dog sat by the door"]
        )  # nothing of some length matches
    captured = capsys.readouterr()
    assert (captured.out, captured.err, caplog.text) == ("", "", "")


# --- the interval -----------------------------------------------------------------------------------------------------


def test_own_counts_give_nltks_score():
    references, hypotheses = [*REFERENCES, "Yes.", "", "No"], [*HYPOTHESES, "Yes", "Oh", ""]
    metric = sacrebleu_metric("en")
    counts = sentence_counts(tokens_of(references, metric), tokens_of(hypotheses, metric))
    assert bleu_from_counts(counts.sum(axis=0)) == pytest.approx(
        corpus_bleu(references, hypotheses), abs=1e-9
    )
    # Too long costs precision alone: there is a penalty for short outputs, and no reward for long ones.
    longer = [f"{hypothesis} and so on" for hypothesis in HYPOTHESES]
    counts = sentence_counts(tokens_of(REFERENCES, metric), tokens_of(longer, metric))
    assert bleu_from_counts(counts.sum(axis=0)) == pytest.approx(
        corpus_bleu(REFERENCES, longer), abs=1e-9
    )


def test_interval_is_like_sacrebleus():
    card = bleu_card(REFERENCES, HYPOTHESES)
    theirs = BLEU(force=True).corpus_score(HYPOTHESES, [REFERENCES], n_bootstrap=1000)
    # The ends of two times 1,000 draws of the same lie some 3 % apart; their middle is not the mean, but near.
    assert (card.high - card.low) / 2 == pytest.approx(theirs._ci, rel=0.05)
    assert (card.high + card.low) / 2 == pytest.approx(theirs._mean, rel=0.02)


def test_interval_depends_on_the_seed_only():
    first, second = (
        bleu_card(REFERENCES, HYPOTHESES, seed=1),
        bleu_card(REFERENCES, HYPOTHESES, seed=1),
    )
    other = bleu_card(REFERENCES, HYPOTHESES, seed=2)
    assert first == second
    assert (first.low, first.high) != (other.low, other.high)
    assert first.nltk == other.nltk
    card = bleu_card(
        ["the cat sat on the mat"], ["the cat sat on the rug"]
    )  # of one sentence: no spread
    assert card.low == card.high == pytest.approx(card.nltk)


def test_import_is_light():
    """Importing the module loads neither scorer; scoring loads no deep-learning package."""
    run_code(
        "import sys; import text.bleu; loaded = {'nltk', 'sacrebleu', 'torch', 'transformers'} & set(sys.modules);"
        "assert not loaded, loaded; text.bleu.bleu_card(['a'], ['a']);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )


def test_a_short_sentence_is_scored_by_the_n_grams_it_has():
    assert sentence_scores(["the cat sat", "no"], ["the cat sat", "yes"]) == [pytest.approx(100), 0]
