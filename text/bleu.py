"""BLEU: the one place that turns translations into a score, always on the scale 0–100.

The reported score is nltk's `corpus_bleu`; sacreBLEU's standard score stands beside it, to compare
with papers. Both see the same words: those of sacreBLEU's tokeniser (Post 2018, "A Call for Clarity
in Reporting BLEU Scores"), which gets plain text and never the subwords of the model.

Without smoothing nltk and sacreBLEU agree, with one exception. For each hypothesis of fewer than n
tokens nltk adds one n-gram that cannot match to the total of order n (its guard against 0/0);
sacreBLEU adds none. Many very short hypotheses therefore make nltk's score a little lower, and the
card says so where it shows in the second decimal.

Both packages take half a second to import, so the functions that need them import them.
"""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

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
    check_sentences(references, hypotheses)
    metric = sacrebleu_metric(references)
    return nltk_bleu(tokens_of(references, metric), tokens_of(hypotheses, metric), smooth)


def check_sentences(references: list[str], hypotheses: list[str]) -> None:
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


def nltk_bleu(references: list[list[str]], hypotheses: list[list[str]], smooth: bool) -> float:
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


@dataclass(frozen=True)
class BleuCard:
    """The report about one set of translations; scores and precisions are on the scale 0–100."""

    nltk: float  # the reported score
    sacrebleu: float  # sacreBLEU's score with its standard settings
    signature: str  # those settings, in sacreBLEU's notation
    chrf: float  # chrF2, the character n-gram F-score (Popović 2015)
    chrf_signature: str
    lowercase: float  # sacreBLEU without case: for information
    precisions: list[float]  # of 1- to 4-grams
    brevity_penalty: float
    ratio: float  # hypothesis tokens / reference tokens
    hyp_length: int  # tokens
    ref_length: int
    low: float  # 95 % interval of the score without smoothing
    high: float
    sentences: int
    short: int  # hypotheses of fewer than 4 tokens, which nltk and sacreBLEU count differently

    def lines(self) -> list[str]:
        """The printed card."""
        tokeniser = self.signature.split("tok:")[1].split("|")[0]
        label = f"BLEU (nltk corpus_bleu, {tokeniser} tokens, cased, no smoothing)"
        interval = f"95 % interval [{self.low:.2f}, {self.high:.2f}]   scale 0–100"
        precisions = " / ".join(f"{precision:.1f}" for precision in self.precisions)
        lengths = f"{self.ratio:.3f} = {self.hyp_length:,} / {self.ref_length:,} tokens"
        uncased = "sacreBLEU, uncased (for information)"
        card = [
            f"{label:<60}{self.nltk:6.2f}   {interval}",
            f"{'sacreBLEU':<60}{self.sacrebleu:6.2f}   {self.signature}",
            f"{uncased:<60}{self.lowercase:6.2f}   as above with case:lc",
            f"{'chrF2':<60}{self.chrf:6.2f}   {self.chrf_signature}",
            f"n-gram precisions  {precisions}   (n = 1 to 4)",
            f"brevity penalty    {self.brevity_penalty:.3f}   (length ratio {lengths})",
            f"sentences          {self.sentences:,}",
        ]
        if min(self.precisions) == 0:
            card.append(
                "note: BLEU is 0, because no n-gram of some length n matches; "
                "sacreBLEU smooths (smooth:exp); "
                "see docs/troubleshooting.md#translations-and-scores"
            )
        elif self.short and abs(self.nltk - self.sacrebleu) >= 0.005:
            card.append(
                f"note: nltk is stricter than sacreBLEU on the {self.short:,} hypotheses "
                "with fewer than 4 tokens"
            )
        return card


def bleu_card(references: list[str], hypotheses: list[str]) -> BleuCard:
    """The reported score and all that explains it. Arguments as for `corpus_bleu`.

    The interval is sacreBLEU's bootstrap (Koehn 2004): the scores of 1,000 test sets, each drawn
    with replacement from this one; of fewer if it has more than 20,000 rows.
    """
    from sacrebleu.metrics import CHRF

    check_sentences(references, hypotheses)
    cased = sacrebleu_metric(references)
    uncased = sacrebleu_metric(references, lowercase=True)
    unsmoothed = sacrebleu_metric(references, smooth="none")
    chrf = CHRF()
    standard = cased.corpus_score(hypotheses, [references])
    # sacreBLEU holds 40 bytes for each row of each resample: fewer of them bound the memory.
    resamples = min(1000, max(20, 20_000_000 // len(references)))
    score = unsmoothed.corpus_score(hypotheses, [references], n_bootstrap=resamples)
    # sacreBLEU has no public name for the mean of the resampled scores and half of the interval.
    ends = (score._mean - score._ci, score._mean + score._ci)
    low, high = (min(max(end, 0.0), 100.0) for end in ends)
    hypothesis_tokens = tokens_of(hypotheses, cased)
    return BleuCard(
        nltk=nltk_bleu(tokens_of(references, cased), hypothesis_tokens, smooth=False),
        sacrebleu=standard.score,
        signature=str(cased.get_signature()),
        chrf=chrf.corpus_score(hypotheses, [references]).score,
        chrf_signature=str(chrf.get_signature()),
        lowercase=uncased.corpus_score(hypotheses, [references]).score,
        precisions=score.precisions,
        brevity_penalty=standard.bp,
        ratio=standard.ratio,
        hyp_length=standard.sys_len,
        ref_length=standard.ref_len,
        low=low,
        high=high,
        sentences=len(references),
        short=sum(len(tokens) < 4 for tokens in hypothesis_tokens),
    )


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
        check_sentences(references, hypotheses)
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
