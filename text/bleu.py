"""BLEU: the one place that turns translations into a score, always on the scale 0–100.

The graded score is nltk's `corpus_bleu`; sacreBLEU's standard score stands beside it, to compare with papers. Both
see sacreBLEU's tokens (Post 2018, "A Call for Clarity in Reporting BLEU Scores"), cut from plain text, not subwords.

Without smoothing nltk and sacreBLEU agree, except in one case: for each hypothesis with fewer than n tokens nltk adds
one n-gram that cannot match to the total of order n (its guard against 0/0); sacreBLEU adds none. Many very short
hypotheses therefore make nltk's score a little lower, and the card says so when it shows in the second decimal.
Both packages take half a second to import, so the functions that need them do it, on the first score.
"""

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# What a column's name may hold: the code of the language or of a country, its name in English or in itself.
JAPANESE_OR_KOREAN = re.compile("(.*[^a-z])?(ja|jpn?|ko|kor|kr)(?![a-z])|japan|korea|[日韩한]")


def corpus_bleu(
    references: list[str], hypotheses: list[str], target: str = "en", smooth: bool = False
) -> float:
    """The graded score, 0–100: nltk's corpus BLEU (Papineni et al. 2002) on sacreBLEU's tokens, case-sensitive.

    Both lists hold plain sentences in the language `target`, one reference for each hypothesis. References come first,
    as in nltk; swapped, the score changes: matches are divided by the n-grams of the hypotheses, and only these pay the
    brevity penalty. So name them: `corpus_bleu(references=..., hypotheses=...)`.
    `smooth` is for the training curve only: an early model matches no four tokens in a row and would score 0.
    """
    references, hypotheses = checked(references, hypotheses)
    metric = sacrebleu_metric(target, references)
    return nltk_bleu(tokens_of(references, metric), tokens_of(hypotheses, metric), smooth)


def checked(references: list[str], hypotheses: list[str]) -> tuple[list[str], list[str]]:
    """Both as lists of sentences, or a ValueError: given a wrong shape, nltk silently returns a wrong score."""
    for name, sentences in (("references", references), ("hypotheses", hypotheses)):
        if isinstance(sentences, str) or not isinstance(sentences, Sequence):
            raise ValueError(f"{name} must be a list of sentences, not {type(sentences).__name__}")
        for position, sentence in enumerate(sentences):
            if not isinstance(sentence, str):
                raise ValueError(
                    f"{name}[{position}] must be a plain sentence (str), not {type(sentence).__name__}"
                )
    if len(references) != len(hypotheses) or not references:
        numbers = f"{len(references)} references, {len(hypotheses)} hypotheses"
        raise ValueError(f"{numbers}: the numbers must be equal, at least 1")
    return list(references), list(hypotheses)


def sacrebleu_metric(target: str, references: Sequence[str] = (), lowercase: bool = False):
    """sacreBLEU's standard BLEU for a language. Its tokeniser 13a cuts at spaces and punctuation; Chinese, Japanese and
    Korean are cut into characters, since a whole clause may stand between two spaces. Chinese is known by the characters
    of the `references`, never by the column's name: English may stand under `zh_en`, and Chinese under `target`. The
    name tells Japanese and Korean, whose texts may hold Chinese characters, too."""
    from sacrebleu.metrics import BLEU

    if JAPANESE_OR_KOREAN.match(target.lower()):
        tokeniser = "char"
    elif mostly_chinese(references):
        tokeniser = "zh"
    else:
        tokeniser = "13a"
    # force: no warning about lines ending in " ."
    return BLEU(tokenize=tokeniser, lowercase=lowercase, force=True)


def mostly_chinese(sentences: Sequence[str]) -> bool:
    """Whether more than half of the sentences hold a Chinese character: a name in an English one does not count."""
    chinese = sum(bool(re.search("[\u4e00-\u9fff]", sentence)) for sentence in sentences)
    return 2 * chinese > len(sentences)


def tokens_of(sentences: list[str], metric) -> list[list[str]]:
    """The tokens of each sentence, exactly as this sacreBLEU metric cuts and counts them."""
    return [metric.tokenizer(sentence.rstrip()).split() for sentence in sentences]


def nltk_bleu(references: list[list[str]], hypotheses: list[list[str]], smooth: bool) -> float:
    """nltk's corpus BLEU of token lists, 0–100."""
    from nltk.translate import bleu_score

    # method0 is BLEU as defined; method1 counts 0.1 match where nothing matches. Never the others: made for single
    # sentences, they change a corpus score that needs no smoothing, and method6 even leaves the scale (104 of 100).
    smoothing = bleu_score.SmoothingFunction()
    method = smoothing.method1 if smooth else smoothing.method0
    nested = [
        [reference] for reference in references
    ]  # nltk wants a list of references for each hypothesis
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\s*The hypothesis contains 0 counts")
        score = bleu_score.corpus_bleu(nested, hypotheses, smoothing_function=method)
    # BLEU is 0 if no n-gram of some order matches; nltk takes 2e-308 for that precision and ends below 1e-76.
    return 100.0 * score if score > 1e-50 else 0.0


@dataclass(frozen=True)
class BleuCard:
    """The report about one set of translations; scores and precisions are on the scale 0–100."""

    nltk: float  # the graded score
    sacrebleu: float  # with sacreBLEU's standard settings
    signature: str  # what those are
    chrf: float  # chrF2, the character n-gram F-score
    chrf_signature: str
    lowercase: float  # sacreBLEU without case: an extra column, not graded
    precisions: list[float]  # of 1- to 4-grams
    brevity_penalty: float
    ratio: float  # hypothesis tokens / reference tokens
    hyp_length: int
    ref_length: int
    low: float  # 95 % interval of the graded score
    high: float
    sentences: int
    short: int  # hypotheses of fewer than 4 tokens, which nltk and sacreBLEU count differently

    def lines(self) -> list[str]:
        """The printed card."""
        tokeniser = self.signature.split("tok:")[1].split("|")[0]
        interval = f"95 % interval [{self.low:.2f}, {self.high:.2f}]   scale 0–100"
        lengths = (
            f"length ratio {self.ratio:.3f} = {self.hyp_length:,} / {self.ref_length:,} tokens"
        )
        card = [
            f"{f'BLEU (nltk corpus_bleu, {tokeniser} tokens, cased, no smoothing)':<60}{self.nltk:6.2f}   {interval}",
            f"{'sacreBLEU':<60}{self.sacrebleu:6.2f}   {self.signature}",
            f"{'sacreBLEU, uncased (for information)':<60}{self.lowercase:6.2f}   as above with case:lc",
            f"{'chrF2':<60}{self.chrf:6.2f}   {self.chrf_signature}",
            f"n-gram precisions  {' / '.join(f'{p:.1f}' for p in self.precisions)}   (n = 1 to 4)",
            f"brevity penalty    {self.brevity_penalty:.3f}   ({lengths})",
            f"sentences          {self.sentences:,}",
        ]
        if min(self.precisions) == 0:
            card.append(
                "note: BLEU is 0, because no n-gram of some length n matches; sacreBLEU smooths (smooth:exp)"
            )
        elif self.short and abs(self.nltk - self.sacrebleu) >= 0.005:
            short = f"{self.short:,} hypotheses with fewer than 4 tokens"
            card.append(f"note: nltk is stricter than sacreBLEU on the {short}")
        return card


def bleu_card(
    references: list[str],
    hypotheses: list[str],
    target: str = "en",
    resamples: int = 1000,
    seed: int = 0,
) -> BleuCard:
    """The graded score and what explains it: sacreBLEU (Post 2018), chrF2 (Popović 2015), the precisions and lengths
    that BLEU is made of, and a bootstrap interval (Koehn 2004). Arguments as for `corpus_bleu`."""
    from sacrebleu.metrics import CHRF

    references, hypotheses = checked(references, hypotheses)
    (cased, uncased), chrf = (
        (sacrebleu_metric(target, references, lowercase) for lowercase in (False, True)),
        CHRF(),
    )
    reference_tokens, hypothesis_tokens = tokens_of(references, cased), tokens_of(hypotheses, cased)
    counts = sentence_counts(reference_tokens, hypothesis_tokens)
    low, high = bootstrap_interval(counts, resamples, seed)
    standard = cased.corpus_score(hypotheses, [references])
    return BleuCard(
        nltk=nltk_bleu(reference_tokens, hypothesis_tokens, smooth=False),
        sacrebleu=standard.score,
        signature=str(cased.get_signature()),
        chrf=chrf.corpus_score(hypotheses, [references]).score,
        chrf_signature=str(chrf.get_signature()),
        lowercase=uncased.corpus_score(hypotheses, [references]).score,
        precisions=(100.0 * counts[:, :4].sum(axis=0) / counts[:, 4:8].sum(axis=0)).tolist(),
        brevity_penalty=standard.bp,
        ratio=standard.ratio,
        hyp_length=standard.sys_len,
        ref_length=standard.ref_len,
        low=low,
        high=high,
        sentences=len(references),
        short=int((counts[:, 8] < 4).sum()),
    )


def sentence_counts(references: list[list[str]], hypotheses: list[list[str]]) -> np.ndarray:
    """All BLEU needs of each sentence, in a row of ten: matches and totals of 1- to 4-grams, then both lengths."""
    rows = []
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        matches, totals = [], []
        for order in (1, 2, 3, 4):
            # n-grams: a list zipped with itself from its 2nd, 3rd, … token on.
            wanted = Counter(zip(*(reference[start:] for start in range(order))))
            offered = Counter(zip(*(hypothesis[start:] for start in range(order))))
            # Clipped: an n-gram counts at most as often as the reference has it ("the the the" earns one "the").
            matches.append(
                sum(min(offered[ngram], wanted[ngram]) for ngram in offered.keys() & wanted.keys())
            )
            totals.append(max(1, len(hypothesis) - order + 1))  # at least 1, as nltk counts
        rows.append([*matches, *totals, len(hypothesis), len(reference)])
    return np.array(rows, dtype=float)


def bleu_from_counts(counts: np.ndarray) -> np.ndarray:
    """BLEU from summed counts [..., 10]: brevity penalty times geometric mean (Papineni et al. 2002, section 2.3)."""
    matches, totals, hyp_length, ref_length = (
        counts[..., :4],
        counts[..., 4:8],
        counts[..., 8],
        counts[..., 9],
    )
    brevity_penalty = np.exp(np.minimum(0.0, 1.0 - ref_length / np.maximum(hyp_length, 1.0)))
    with np.errstate(divide="ignore"):  # log 0 = -inf, and exp(-inf) = 0 is the right score
        return 100.0 * brevity_penalty * np.exp(np.log(matches / totals).mean(axis=-1))


def bootstrap_interval(counts: np.ndarray, resamples: int, seed: int) -> tuple[float, float]:
    """The middle 95 % of the scores of `resamples` test sets drawn, with replacement, from this one (Koehn 2004)."""
    generator, size, sums = np.random.default_rng(seed), len(counts), []
    for _ in range(resamples):
        times_drawn = np.bincount(generator.integers(size, size=size), minlength=size)
        sums.append(
            times_drawn @ counts
        )  # BLEU needs only the summed counts of the drawn sentences
    low, high = np.percentile(bleu_from_counts(np.array(sums)), [2.5, 97.5])
    return float(low), float(high)


def sentence_scores(
    references: list[str], hypotheses: list[str], target: str = "en"
) -> list[float]:
    """sacreBLEU's BLEU of each sentence, 0–100: to find good and bad ones by; their mean is not the corpus score."""
    metric = sacrebleu_metric(target, references)
    metric.effective_order = (
        True  # a sentence of three words has no 4-grams, and is scored by what it has
    )
    pairs = zip(references, hypotheses)
    return [metric.sentence_score(hypothesis, [reference]).score for reference, hypothesis in pairs]


@dataclass(frozen=True)
class Compared:
    """One system of a paired comparison, 0–100."""

    name: str
    metric: str
    score: float
    low: float  # 95 % interval of the resampled scores, as sacreBLEU gives it: mean ± half width
    high: float
    p_value: float | None  # None: the system that the others are compared with


def paired_bootstrap(
    references: list[str], systems: dict[str, list[str]], target: str = "en"
) -> list[Compared]:
    """sacreBLEU's paired bootstrap (Koehn 2004): do the others differ from the first system, or only on these rows?

    All are scored on the same 1,000 resamples of the rows. p: how often chance alone would give so large a difference in this
    direction; in either direction it is about twice that. Takes 72 kB of memory a row.
    """
    from sacrebleu.metrics import CHRF
    from sacrebleu.significance import PairedTest

    for hypotheses in systems.values():
        checked(references, hypotheses)
    metrics = {"BLEU": sacrebleu_metric(target, references), "chrF2": CHRF()}
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
