"""BLEU: the one place that turns translations into a score, always on the scale 0–100.

The reported score is nltk's `corpus_bleu`; sacreBLEU's standard score stands beside it, to compare
with papers. Both see the same words: those of sacreBLEU's tokeniser (Post 2018, "A Call for Clarity
in Reporting BLEU Scores"), which gets plain text and never the subwords of the model.

Without smoothing nltk and sacreBLEU agree, with one exception. For each hypothesis of fewer than n
tokens nltk adds one n-gram that cannot match to the total of order n (its guard against 0/0);
sacreBLEU adds none. Many very short hypotheses therefore make nltk's score lower, and the card says
so where it shows in the second decimal.

Both packages take half a second to import, so the functions that need them import them.
"""

import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

CHINESE_CHARACTER = re.compile("[\u3400-\u9fff]")  # Japanese uses them too
# Hiragana and katakana; Hangul's letters and syllables.
KANA_OR_HANGUL = re.compile("[\u3041-\u30fa\u31f0-\u31ff\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3]")


def corpus_bleu(references: list[str], hypotheses: list[str], smooth: bool = False) -> float:
    """The reported score, 0–100: nltk's corpus BLEU (Papineni et al. 2002), case-sensitive.

    Both lists hold plain sentences, one reference for each hypothesis. Raises `ValueError` for any
    other shape. References come first, as in nltk. The order matters: matches are divided by the
    n-grams of the hypotheses, and only these pay the brevity penalty. So name them:
    `corpus_bleu(references=..., hypotheses=...)`.

    `smooth` is for the training curve only: a model that has just begun to learn matches no four
    tokens in a row and would score 0.
    """
    _check_sentences(references, hypotheses)
    metric = sacrebleu_metric(references)
    return _nltk_bleu(tokens_of(references, metric), tokens_of(hypotheses, metric), smooth)


def _check_sentences(references: list[str], hypotheses: list[str]) -> None:
    """Raise ValueError for a wrong shape, for which nltk would silently return a wrong score."""
    for name, sentences in (("references", references), ("hypotheses", hypotheses)):
        if isinstance(sentences, str) or not isinstance(sentences, Sequence):
            raise ValueError(f"{name} must be a list of sentences, not {type(sentences).__name__}")
        for position, sentence in enumerate(sentences):
            if not isinstance(sentence, str):
                kind = type(sentence).__name__
                raise ValueError(f"{name}[{position}] must be a plain sentence (str), not {kind}")
    if len(references) != len(hypotheses) or not references:
        numbers = f"{len(references)} references, {len(hypotheses)} hypotheses"
        raise ValueError(f"{numbers}: the numbers must be equal and at least 1")


def sacrebleu_metric(references: Sequence[str], lowercase: bool = False, smooth: str = "exp"):
    """sacreBLEU's BLEU for these references; by default with the settings that papers report."""
    from sacrebleu.metrics import BLEU

    tokeniser = choose_tokeniser(references)
    # `force` silences a warning about lines that end in " .".
    return BLEU(tokenize=tokeniser, lowercase=lowercase, smooth_method=smooth, force=True)


def choose_tokeniser(references: Sequence[str]) -> str:
    """The name of sacreBLEU's tokeniser for the language of the references.

    Their characters decide and not the name of their column: English may stand under `zh_en`, and
    Chinese under `target`. "13a", the standard, cuts at spaces and punctuation. Chinese ("zh"),
    Japanese and Korean ("char") are cut into characters.
    """
    chinese = 0
    japanese_or_korean = 0
    for sentence in references:
        if KANA_OR_HANGUL.search(sentence):
            japanese_or_korean += 1
        elif CHINESE_CHARACTER.search(sentence):
            chinese += 1
    # More than half, because an English sentence may quote a Chinese name.
    if 2 * (chinese + japanese_or_korean) <= len(references):
        return "13a"
    # A short Japanese sentence may have no kana, and a Chinese one may quote a Japanese name.
    return "char" if japanese_or_korean > chinese else "zh"


def tokens_of(sentences: list[str], metric) -> list[list[str]]:
    """The tokens of each sentence, exactly as this sacreBLEU metric counts them."""
    return [metric.tokenizer(sentence.rstrip()).split() for sentence in sentences]


def _nltk_bleu(references: list[list[str]], hypotheses: list[list[str]], smooth: bool) -> float:
    """nltk's corpus BLEU of token lists, 0–100."""
    from nltk.translate import bleu_score

    # method0 is BLEU as defined; method1 counts 0.1 matches where nothing matches. Never the other
    # methods: they are made for single sentences, and method6 even leaves the scale (104 of 100).
    smoothing = bleu_score.SmoothingFunction()
    method = smoothing.method1 if smooth else smoothing.method0
    # nltk allows several references for a hypothesis, so it wants a list of them for each.
    nested = [[reference] for reference in references]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\s*The hypothesis contains 0 counts")
        score = bleu_score.corpus_bleu(nested, hypotheses, smoothing_function=method)
    # BLEU is 0 if no n-gram of some order matches. nltk takes 2e-308 for a precision of 0, and its
    # score is then below 1e-76.
    return 100.0 * score if score > 1e-50 else 0.0


def _count_as_nltk(metric) -> None:
    """Make a sacreBLEU metric count the n-grams of very short hypotheses as nltk does."""
    count = metric._compute_segment_statistics  # sacreBLEU has no public name for it

    def count_at_least_one(hypothesis: str, reference: dict) -> list[int]:
        """As `count`, but no n-gram length has a total of 0."""
        statistics = count(hypothesis, reference)  # lengths, matches of 1- to 4-grams, totals
        totals = statistics[-metric.max_ngram_order :]
        at_least_one = [max(1, total) for total in totals]
        return statistics[: -len(totals)] + at_least_one

    metric._compute_segment_statistics = count_at_least_one


# ---------------------------------------------------------------- the card

CARD_WIDTH = 80  # characters of a line
LABEL_WIDTH = 21


class ScoredTexts:
    """Translations beside their references. The figures of the card are computed from it."""

    def __init__(self, references: list[str], hypotheses: list[str]):
        _check_sentences(references, hypotheses)
        self.references = references
        self.hypotheses = hypotheses
        self.metric = sacrebleu_metric(references)

    def score(self, metric, **options):
        """sacreBLEU's score by this metric: BLEU, CHRF or TER."""
        return metric.corpus_score(self.hypotheses, [self.references], **options)

    @cached_property
    def tokens(self) -> list[list[str]]:
        """The tokens of each hypothesis."""
        return tokens_of(self.hypotheses, self.metric)

    @cached_property
    def reported(self) -> float:
        """nltk's BLEU."""
        return _nltk_bleu(tokens_of(self.references, self.metric), self.tokens, smooth=False)

    @cached_property
    def resampled(self):
        """The reported BLEU by sacreBLEU's formula, with its bootstrap (Koehn 2004).

        The scores of 1,000 test sets, each drawn with replacement from this one; of fewer if it has
        more than 20,000 rows.
        """
        unsmoothed = sacrebleu_metric(self.references, smooth="none")
        _count_as_nltk(unsmoothed)
        # sacreBLEU holds 40 bytes for each row of each resample: fewer of them bound the memory.
        resamples = min(1000, max(20, 20_000_000 // len(self.references)))
        return self.score(unsmoothed, n_bootstrap=resamples)

    @cached_property
    def interval(self) -> list[float]:
        """The 95 % interval of the reported BLEU."""
        # sacreBLEU has no public names for the mean of the resampled scores and half the interval.
        middle = self.resampled._mean
        half = self.resampled._ci
        return [max(0.0, middle - half), min(100.0, middle + half)]

    @cached_property
    def standard(self):
        """sacreBLEU's score with the settings that papers report."""
        return self.score(self.metric)

    @property
    def signature(self) -> str:
        """Those settings, in sacreBLEU's notation."""
        assert self.standard  # the metric counts the references while it scores
        return str(self.metric.get_signature())

    @property
    def settings(self) -> str:
        """The settings of the reported BLEU, in words."""
        tokeniser = choose_tokeniser(self.references)
        return f"nltk corpus_bleu, {tokeniser}, cased, no smoothing, scale 0–100"

    @cached_property
    def chrf(self):
        """The character n-gram F-score (Popović 2015), and its settings."""
        from sacrebleu.metrics import CHRF

        metric = CHRF()
        return self.score(metric), str(metric.get_signature())


@dataclass(frozen=True)
class Figure:
    """One line of the card: a number, several numbers or a text."""

    name: str  # in the score file
    label: str
    chinese: str  # label, on a Chinese page
    form: str  # of each number, as in an f-string
    function: Callable[[ScoredTexts], Any]

    def text(self, value) -> str:
        """The value as the card shows it."""
        values = value if isinstance(value, list) else [value]
        return ", ".join(format(each, self.form) for each in values)


# The card, the score file and the report show these, in this order. All scores are on the scale
# 0–100.
FIGURES = [
    Figure("nltk", "BLEU (nltk)", "BLEU（nltk）", ".2f", lambda texts: texts.reported),
    Figure("interval", "95 % interval", "95 % 区间", ".2f", lambda texts: texts.interval),
    Figure("settings", "settings", "计算方式", "", lambda texts: texts.settings),
    Figure("sacrebleu", "sacreBLEU", "sacreBLEU", ".2f", lambda texts: texts.standard.score),
    Figure("signature", "signature", "签名", "", lambda texts: texts.signature),
    Figure(
        "lowercase",
        "sacreBLEU, uncased",
        "sacreBLEU，不分大小写",
        ".2f",
        lambda texts: texts.score(sacrebleu_metric(texts.references, lowercase=True)).score,
    ),
    Figure("chrf", "chrF2", "chrF2", ".2f", lambda texts: texts.chrf[0].score),
    Figure("chrf_signature", "signature of chrF2", "chrF2 的签名", "", lambda texts: texts.chrf[1]),
    # Those of the reported BLEU, of 1- to 4-grams.
    Figure(
        "precisions",
        "n-gram precisions",
        "n 元精确率",
        ".1f",
        lambda texts: list(texts.resampled.precisions),
    ),
    Figure(
        "brevity_penalty", "brevity penalty", "简短惩罚", ".3f", lambda texts: texts.standard.bp
    ),
    Figure("ratio", "length ratio", "长度比", ".3f", lambda texts: texts.standard.ratio),
    Figure("hyp_length", "tokens", "译文词数", ",", lambda texts: texts.standard.sys_len),
    Figure(
        "ref_length",
        "tokens, references",
        "参考译文词数",
        ",",
        lambda texts: texts.standard.ref_len,
    ),
    Figure("sentences", "sentences", "句数", ",", lambda texts: len(texts.references)),
    # Hypotheses that nltk and sacreBLEU count differently.
    Figure(
        "short",
        "below four tokens",
        "不足四个词的句数",
        ",",
        lambda texts: sum(len(tokens) < 4 for tokens in texts.tokens),
    ),
    Figure(
        "empty",
        "empty references",
        "空的参考译文",
        ",",
        lambda texts: sum(not reference.strip() for reference in texts.references),
    ),
]


def bleu_card(references: list[str], hypotheses: list[str]) -> dict[str, Any]:
    """The reported score and all that explains it: the value of each of `FIGURES`, by its name.

    Arguments as for `corpus_bleu`. The values are of JSON's types.
    """
    texts = ScoredTexts(references, hypotheses)
    return {figure.name: figure.function(texts) for figure in FIGURES}


def card_lines(card: dict[str, Any]) -> list[str]:
    """What is printed of the result of `bleu_card`: a line for each figure, then notes."""
    lines = []
    for figure in FIGURES:
        lines += labelled(figure.label, figure.text(card[figure.name]))
    if min(card["precisions"]) == 0:
        lines += note(
            "BLEU is 0, because no n-gram of some length n matches; sacreBLEU smooths "
            "(smooth:exp); see docs/troubleshooting.md#translations-and-scores"
        )
    elif card["short"] and abs(card["nltk"] - card["sacrebleu"]) >= 0.005:
        lines += note(
            "nltk's BLEU is lower than sacreBLEU's, because it adds an n-gram without a match for "
            f"each translation of fewer than n tokens (below four tokens: {card['short']:,})"
        )
    if card["empty"]:
        lines += note(f"{card['empty']:,} references are empty, and no translation matches these")
    return lines


def labelled(label: str, text: str) -> list[str]:
    """A line of the card, or several if the text is long."""
    return _wrapped(text, f"{label:<{LABEL_WIDTH}}")


def note(text: str) -> list[str]:
    """A remark below the card, in lines."""
    return _wrapped(text, "note: ")


def _wrapped(text: str, first: str) -> list[str]:
    """Lines of at most `CARD_WIDTH` characters, but no word is cut; `first` begins the first."""
    return textwrap.wrap(
        text,
        CARD_WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


# ---------------------------------------------------------------- sentences, comparisons


def sentence_scores(references: list[str], hypotheses: list[str]) -> list[float]:
    """sacreBLEU's BLEU of each sentence, 0–100, to find good and bad ones.

    Their mean is not the corpus score.
    """
    metric = sacrebleu_metric(references)
    # A sentence of three words has no 4-grams: score it by the orders that it has.
    metric.effective_order = True
    pairs = zip(references, hypotheses)
    return [metric.sentence_score(hypothesis, [reference]).score for reference, hypothesis in pairs]


@dataclass(frozen=True)
class Compared:
    """One system of a paired comparison; scores 0–100."""

    name: str
    metric: str
    score: float
    low: float  # 95 % interval of the resampled scores, as sacreBLEU gives it: mean ± half width
    high: float
    p_value: float | None  # None: the system that the others are compared with


def paired_bootstrap(references: list[str], systems: dict[str, list[str]]) -> list[Compared]:
    """sacreBLEU's paired bootstrap (Koehn 2004) of the first system with each of the others.

    It asks whether they differ or only seem to on these rows: all systems are scored on the same
    1,000 resamples of the rows. p is how often chance alone would give a difference as large in
    this direction; in either direction it is about twice that. Takes 72 kB of memory a row.
    """
    from sacrebleu.metrics import CHRF
    from sacrebleu.significance import PairedTest

    for hypotheses in systems.values():
        _check_sentences(references, hypotheses)
    metrics = {"BLEU": sacrebleu_metric(references), "chrF2": CHRF()}
    _, scores = PairedTest(list(systems.items()), metrics, [references], test_type="bs")()
    compared = []
    for metric in metrics:
        first, *others = scores[metric]
        for other in others:
            if (other.score, other.mean, other.ci) == (first.score, first.mean, first.ci):
                other.p_value = 1.0  # no resample differs; sacreBLEU says 1/1001
        for name, result in zip(systems, scores[metric], strict=True):
            low, high = result.mean - result.ci, result.mean + result.ci
            compared.append(Compared(name, metric, result.score, low, high, result.p_value))
    return compared
