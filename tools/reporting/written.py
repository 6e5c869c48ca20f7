"""The sections that the handout wants in words: process, positional encoding, sources.

The program fills in what it knows. `Page.to_write` marks what the student must add.
"""

import inspect
import json
from functools import partial

import torch

import model
from tools.reporting.page import Page
from tools.reporting.reading import Fact, RunFiles
from tools.reporting.sections import table

MODEL = ("model", "模型")
SELECTION = ("choice of the training pairs", "训练句对的筛选")
SMOOTHING = ("label smoothing", "标签平滑")
OPTIMIZER = ("optimizer", "优化器")
MUON = ("optimizer of the matrices", "矩阵的优化器")
SCHEDULE = ("learning-rate schedule", "学习率调度")
TOKENIZERS = ("tokenizers", "分词器")
SCORE = ("score", "得分")
SHARDING = ("sharding", "分片")
TENSOR = ("tensor parallelism", "张量并行")
RECOMPUTATION = ("recomputation", "重计算")
WORD_VECTORS = ("word vectors", "词向量")
SCHEDULES = ("schedules of the pipeline", "流水线的调度")
PAPERS = {  # paper → what it is used for, and where
    "Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762": (
        MODEL,
        "model.py",
    ),
    "PyTorch, torch.nn.Transformer": (
        ("encoder and decoder layers", "编码器与解码器层"),
        "model.py",
    ),
    "Press and Wolf 2017, Using the Output Embedding, arXiv:1608.05859": (
        ("output projection tied to the target embedding", "输出层与目标词嵌入共享权重"),
        "model.py",
    ),
    "Szegedy et al. 2016, Rethinking the Inception Architecture, arXiv:1512.00567": (
        SMOOTHING,
        "model.py",
    ),
    "Loshchilov and Hutter 2019, AdamW, arXiv:1711.05101": (OPTIMIZER, "engine/optimizer.py"),
    "Jordan et al. 2024, Muon, kellerjordan.github.io/posts/muon": (MUON, "engine/optimizer.py"),
    "Liu et al. 2025, Muon is Scalable for LLM Training, arXiv:2502.16982": (
        MUON,
        "engine/optimizer.py",
    ),
    "Hu et al. 2024, MiniCPM, arXiv:2404.06395": (SCHEDULE, "engine/schedule.py"),
    "Hägele et al. 2024, Scaling Laws Beyond Fixed Training Durations, arXiv:2405.18392": (
        SCHEDULE,
        "engine/schedule.py",
    ),
    "Moore and Lewis 2010, Intelligent Selection of Language Model Training Data": (
        SELECTION,
        "text/cleaning.py",
    ),
    "Axelrod et al. 2011, Domain Adaptation via Pseudo In-Domain Data Selection": (
        SELECTION,
        "text/cleaning.py",
    ),
    "Sennrich et al. 2016, subword units (BPE), arXiv:1508.07909": (
        TOKENIZERS,
        "text/subwords.py",
    ),
    "Papineni et al. 2002, BLEU; Bird et al., NLTK": (SCORE, "text/bleu.py"),
    "Post 2018, sacreBLEU, arXiv:1804.08771": (SCORE, "text/bleu.py"),
    "Popović 2015, chrF": (SCORE, "text/bleu.py"),
    "Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation": (
        ("interval of the score", "得分的置信区间"),
        "text/bleu.py",
    ),
}
# A setting that only this lab has → papers as above.
PAPERS_OF_LABS = {
    "activation": {
        "LeCun et al. 1998, Gradient-Based Learning Applied to Document Recognition": (
            MODEL,
            "labs/lenet/model.py",
        ),
    },
    "data_parallel": {
        "Radford et al. 2019, Language Models are Unsupervised Multitask Learners (GPT-2)": (
            MODEL,
            "labs/gpt/model.py",
        ),
        "Brown et al. 2020, GPT-3, arXiv:2005.14165": (
            ("settings of the optimizer", "优化器的设置"),
            "labs/gpt/parallel.py",
        ),
        "Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054": (
            SHARDING,
            "labs/gpt/parallel.py",
        ),
        "Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053": (
            TENSOR,
            "labs/gpt/parallel.py",
        ),
        "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174": (
            RECOMPUTATION,
            "labs/gpt/model.py",
        ),
    },
    "schedule": {
        "Huang et al. 2019, GPipe, arXiv:1811.06965": (SCHEDULES, "labs/pipeline/schedule.py"),
        "Narayanan et al. 2021, Megatron-LM on GPU Clusters, arXiv:2104.04473": (
            SCHEDULES,
            "labs/pipeline/schedule.py",
        ),
        "Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241": (
            SCHEDULES,
            "labs/pipeline/schedule.py",
        ),
    },
    "glove": {
        "Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762": (
            MODEL,
            "labs/wikitext/model.py",
        ),
        "Press and Wolf 2017, Using the Output Embedding, arXiv:1608.05859": (
            ("output projection tied to the embedding", "输出层与词嵌入共享权重"),
            "labs/wikitext/model.py",
        ),
        "Pennington et al. 2014, GloVe": (WORD_VECTORS, "labs/wikitext/glove.py"),
    },
}


def process(page: Page, runs: list[RunFiles]) -> None:
    """What was done, from data to score, as far as the files tell."""
    page.heading("Process in brief", "实验过程（简要）")
    rows = [
        ("config.json#data", "data set", "数据集"),
        ("data.json#counts.kept", "pairs kept", "保留句对"),
        ("config.json#optimizer", *OPTIMIZER),
        ("config.json#lr", "peak learning rate", "最高学习率"),
        (
            "config.json#tokens_per_batch",
            "padded tokens per step and side",
            "每步每边词元数（含填充）",
        ),
        ("environment.json#*.command", "command", "命令"),
        (partial(of_first_result, key="split"), "scored split", "评测集"),
        (partial(of_first_result, key="decoding"), "decoding", "解码方式"),
        (partial(of_first_result, key="checkpoint"), "scored checkpoint", "评测的检查点"),
    ]
    table(page, runs, rows)
    page.to_write(
        "Describe in your own words what you did, which problems you met and how you solved them.",
        "用自己的话简要写出：做了什么，遇到什么问题，怎样解决。",
    )


def of_first_result(run: RunFiles, key: str) -> Fact | None:
    """A value of the first result, which is the one that the handout asks for."""
    name = next(iter(run.results), "")
    return run.look_up(f"{name}.json#{key}") if name else None


def positional_encoding(page: Page, runs: list[RunFiles]) -> None:
    """The code of `model.sinusoids`, and why it is so."""
    runs = [run for run in runs if run.is_translation]
    if not runs:
        return
    page.heading("Positional encoding", "位置编码")
    if not all(map(has_sinusoids, runs)):
        page.to_write(
            "model.py no longer adds the sinusoids of the paper. Show your code, and explain it "
            "line by line.",
            "model.py 用的不再是论文中的正弦编码。请贴出自己的代码，并逐行解释。",
        )
        return
    page.paragraph(
        "Self-attention treats all tokens alike: if the input is shuffled, the output is "
        "shuffled in the same way. So each position p gets a vector that is added to its "
        "embedding:",
        "自注意力对所有词元一视同仁：打乱输入，输出只是同样地打乱。"
        "所以每个位置 p 有一个向量，加到该处的词嵌入上：",
    )
    page.verbatim(inspect.getsource(model.sinusoids).rstrip(), "model.py")
    page.bullets(
        [
            (
                "Each pair of columns is a clock hand: the angle is p times a frequency. "
                "Frequencies fall in a geometric series, so fast pairs tell neighbours apart, "
                "slow ones distant positions.",
                "每两列像一根钟的指针，角度是 p 乘以频率。"
                "频率按等比数列下降：快的分辨相邻的词，慢的分辨相距远的位置。",
            ),
            (
                "A shift by k positions rotates each pair by a fixed angle, whatever p is. "
                'A linear layer can therefore express "the token k places back".',
                "往后移 k 个位置，每一对就转过固定的角度，与 p 无关。"
                "所以一个线性层就能表示“往前第 k 个词”。",
            ),
            (
                "The inner product of two encodings depends on their distance alone.",
                "两个编码的内积只与它们的距离有关。",
            ),
            (
                "Embeddings are multiplied by the square root of the model width before the "
                "addition, so that both have the same scale. The encoding has no parameters and "
                "is not trained.",
                "相加之前，词嵌入先乘以模型宽度的平方根，使两者大小相当。编码没有参数，不参加训练。",
            ),
        ]
    )
    page.to_write(
        "Explain the code line by line in your own words; docs/positional_encoding.md has the "
        "proofs and a picture.",
        "用自己的话逐行解释这段代码；证明与图见 docs/positional_encoding.zh-CN.md。",
    )


def has_sinusoids(run: RunFiles) -> bool:
    """Whether model.py, which a reader may have changed, adds the sinusoids of the paper."""
    try:
        saved = json.loads((run.folder / "model.json").read_text(encoding="utf-8"))
        # A small model, with all that the reader may have added as in the run.
        small = dict(source_vocab=1, target_vocab=1, d_model=8, nhead=1, max_length=16)
        sizes = model.ModelConfig(**saved | small)
        positions = dict(model.Translator(sizes).named_buffers())["positions"]
        inspect.getsource(model.sinusoids)
    except Exception:  # whatever the changed code raises
        return False
    angle = torch.arange(16.0)[:, None] / 10000 ** (torch.arange(0, 8, 2) / 8)  # (16, 4)
    expected = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)  # (16, 8)
    return positions.shape == expected.shape and torch.allclose(positions, expected, atol=1e-5)


def unused_in(config: dict) -> set:
    """What a run with these settings did without."""
    unused = set()
    if not config.get("label_smoothing"):
        unused.add(SMOOTHING)
    if config.get("tokenizer"):  # a pretrained one
        unused.add(TOKENIZERS)
    if config.get("optimizer") != "muon":
        unused.add(MUON)
    if not config.get("select"):
        unused.add(SELECTION)
    if not str(config.get("data_parallel")).startswith("zero"):
        unused.add(SHARDING)
    if config.get("tensor", 1) == 1:
        unused.add(TENSOR)
    if not config.get("recompute"):
        unused.add(RECOMPUTATION)
    if not config.get("glove"):
        unused.add(WORD_VECTORS)
    return unused


def sources(page: Page, runs: list[RunFiles]) -> None:
    """Papers and code that the run used, with a column for the student's words."""
    page.heading("Sources and own understanding", "参考资料与自己的理解")
    unused = set.intersection(*(unused_in(run.config) for run in runs))
    to_write = ("✎ to be written", "✎ 待写")
    lines = [[("this repository", "本仓库"), ("all code", "全部代码"), "README.md", to_write]]
    papers = dict(PAPERS) if any(run.is_translation for run in runs) else {}
    for setting, papers_of_lab in PAPERS_OF_LABS.items():
        if any(setting in run.config for run in runs):
            papers |= papers_of_lab
    for paper, (purpose, file) in papers.items():
        if purpose not in unused:
            lines.append([paper, purpose, file, to_write])
    header = [
        ("paper or code", "论文或代码"),
        ("used for", "用途"),
        ("file", "文件"),
        ("your understanding", "你的理解"),
    ]
    page.table(header, lines)
    page.to_write(
        "Add everything else that you read or were given: web pages, other people's code, "
        "assistants. Code without a source in the report counts as copied.",
        "请补上其他参考：网页、别人的代码、AI 助手。报告中没有列出来源的代码会被视为抄袭。",
    )
