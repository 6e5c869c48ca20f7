"""The papers and programs behind each method, and which of them a run used.

A method of the optimizer or of the learning rate brings its papers with it, in `OPTIMIZERS` and
`SCHEDULES`; all others are here.
"""

import math
from collections.abc import Iterator

from engine.optimizer import OPTIMIZERS
from engine.schedule import SCHEDULES
from tools.reporting.reading import RunFiles, is_number
from tools.reporting.words import Words

Use = tuple[str, Words, str]  # reference, what it is used for, file

TRANSFORMER = "Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762"
TORCH_TRANSFORMER = "PyTorch, torch.nn.Transformer"
TIED = "Press and Wolf 2017, Using the Output Embedding, arXiv:1608.05859"
PRE_NORM = "Xiong et al. 2020, On Layer Normalization in the Transformer, arXiv:2002.04745"
DROPOUT = "Srivastava et al. 2014, Dropout, JMLR 15"
SMOOTHING = "Szegedy et al. 2016, Rethinking the Inception Architecture, arXiv:1512.00567"
SAMPLED = "Jean et al. 2015, On Using Very Large Target Vocabulary, arXiv:1412.2007"
CLIPPING = "Pascanu et al. 2013, On the Difficulty of Training RNNs, arXiv:1211.5063"
BPE = "Sennrich et al. 2016, Neural MT of Rare Words with Subword Units, arXiv:1508.07909"
SELECTION = "Moore and Lewis 2010, Intelligent Selection of Language Model Training Data"
SELECTION_OF_PAIRS = "Axelrod et al. 2011, Domain Adaptation via Pseudo In-Domain Data Selection"
BLEU = "Papineni et al. 2002, BLEU; Bird et al. 2009, NLTK"
SACREBLEU = "Post 2018, sacreBLEU, arXiv:1804.08771"
BOOTSTRAP = "Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation"
CHRF = "Popović 2015, chrF"
TER = "Snover et al. 2006, A Study of Translation Edit Rate"
LENGTH_PENALTY = "Wu et al. 2016, Google's Neural Machine Translation System, arXiv:1609.08144"
MIXED_PRECISION = "Micikevicius et al. 2018, Mixed Precision Training, arXiv:1710.03740"
DDP = "Li et al. 2020, PyTorch Distributed, arXiv:2006.15704"
FSDP = "Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277"
COMPILE = "Ansel et al. 2024, PyTorch 2, ASPLOS"
FLASH = "Dao et al. 2022, FlashAttention, arXiv:2205.14135"
LENET = "LeCun et al. 1998, Gradient-Based Learning Applied to Document Recognition"
GELU = "Hendrycks and Gimpel 2016, Gaussian Error Linear Units, arXiv:1606.08415"
GPT2 = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners (GPT-2)"
GPT3 = "Brown et al. 2020, Language Models are Few-Shot Learners (GPT-3), arXiv:2005.14165"
TRANSFORMERS = "Wolf et al. 2020, Transformers, arXiv:1910.03771"
ZERO = "Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054"
MEGATRON = "Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053"
SEQUENCE_PARALLEL = "Korthikanti et al. 2022, Reducing Activation Recomputation, arXiv:2205.05198"
RECOMPUTATION = "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174"
GPIPE = "Huang et al. 2019, GPipe, arXiv:1811.06965"
PIPEDREAM = "Narayanan et al. 2021, Megatron-LM on GPU Clusters, arXiv:2104.04473"
ZERO_BUBBLE = "Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241"
GLOVE = "Pennington et al. 2014, GloVe"
WIKITEXT = "Merity et al. 2016, Pointer Sentinel Mixture Models (WikiText), arXiv:1609.07843"
KNESER_NEY = "Kneser and Ney 1995, Improved Backing-off for M-gram Language Modeling"
LIGHTNING = "Falcon et al. 2019, PyTorch Lightning"

MODEL = ("model", "模型")
ACTIVATION = ("activation function", "激活函数")
TIED_WEIGHTS = ("output layer tied to the embedding", "输出层与词嵌入共享权重")
OPTIMIZER = ("optimizer", "优化器")
LEARNING_RATE = ("learning-rate schedule", "学习率调度")
SCORE = ("score", "得分")
PIPELINE = ("schedule of the pipeline", "流水线的调度")
PIPELINE_SCHEDULES = {
    "gpipe": GPIPE,
    "1f1b": PIPEDREAM,
    "interleaved": PIPEDREAM,
    "zb": ZERO_BUBBLE,
    "zbv": ZERO_BUBBLE,
}


def references_of(run: RunFiles) -> list[Use]:
    """What this run used, without repetitions."""
    uses = USES.get(run.kind, lambda run: iter(()))
    return list(dict.fromkeys([*uses(run), *of_training(run)]))


def of_training(run: RunFiles) -> Iterator[Use]:
    """Methods that several kinds of runs may use, by their settings and machine."""
    config = run.config
    optimizer = str(config.get("optimizer", "adamw"))
    # The table has those of train.py. The labs take AdamW, or one of their own.
    known = OPTIMIZERS.keys() if run.kind == "translation" else {"adamw"}
    if run.kind and run.kind != "collectives" and optimizer in known:
        for paper in OPTIMIZERS[optimizer].papers:
            yield paper, OPTIMIZER, "engine/optimizer.py"
    if run.kind and run.kind not in ("pipeline", "collectives"):  # these have a constant rate
        schedule = SCHEDULES.get(str(config.get("schedule", "wsd")))
        for paper in schedule.papers if schedule else ():
            yield paper, LEARNING_RATE, "engine/schedule.py"
    if config.get("dropout"):
        yield DROPOUT, ("dropout", "随机失活"), "torch.nn.Dropout"
    if config.get("label_smoothing"):
        yield SMOOTHING, ("label smoothing", "标签平滑"), "torch.nn.functional.cross_entropy"
    if config.get("clip") or run.kind == "gpt":
        yield CLIPPING, ("gradient clipping", "梯度裁剪"), "engine/precision.py"
    if config.get("compile"):
        yield COMPILE, "torch.compile", "PyTorch"
    if any(session.get("precision") in ("fp16", "bf16") for session in run.environment):
        yield MIXED_PRECISION, ("number format", "数值格式"), "engine/precision.py"
    if replicas(run) > 1 and config.get("data_parallel", "ddp") == "ddp":
        paper = FSDP if config.get("shard") else DDP
        yield paper, ("data parallelism", "数据并行"), "engine/distributed.py"


def replicas(run: RunFiles) -> float:
    """Copies of the model that were trained side by side, in the session with most processes."""
    if run.kind in ("pipeline", "collectives"):
        return 1
    counts = [session.get("processes") for session in run.environment]
    shared = [run.config.get(name, 1) for name in ("tensor", "pipe")]
    sizes = [size if is_number(size) and size else 1 for size in shared]
    return max(filter(is_number, counts), default=1) / math.prod(sizes)


def of_translation(run: RunFiles) -> Iterator[Use]:
    """A run of train.py and its scores."""
    config = run.config
    yield TRANSFORMER, MODEL, "model.py"
    yield TORCH_TRANSFORMER, ("encoder and decoder layers", "编码器与解码器层"), "model.py"
    yield TIED, TIED_WEIGHTS, "model.py"
    if config.get("norm_first"):
        yield PRE_NORM, ("layer norm before each sub-layer", "先归一化的子层"), "model.py"
    if not config.get("tokenizer"):  # else a pretrained one
        yield BPE, ("tokenizers", "分词器"), "text/subwords.py"
    if config.get("select"):
        selection = ("choice of the training pairs", "训练句对的筛选")
        yield SELECTION, selection, "text/cleaning.py"
        yield SELECTION_OF_PAIRS, selection, "text/cleaning.py"
    if run.kind == "attention_op":
        yield FLASH, ("attention by hand", "手写的注意力"), "labs/attention_op"
    if run.samples_the_softmax:
        yield SAMPLED, ("sampled softmax", "采样 softmax"), "model.py"
    yield BLEU, SCORE, "text/bleu.py"
    scores = [result for result in run.results.values() if "nltk" in result]
    if scores:
        yield SACREBLEU, SCORE, "text/bleu.py"
    if any("interval" in score or "low" in score for score in scores):
        yield BOOTSTRAP, ("interval of the score", "得分的置信区间"), "text/bleu.py"
    if any("chrf" in score for score in scores):
        yield CHRF, SCORE, "text/bleu.py"
    if any("ter" in score for score in scores):
        yield TER, SCORE, "text/bleu.py"
    if any("length penalty" in str(score.get("decoding")) for score in scores):
        yield LENGTH_PENALTY, ("beam search", "束搜索"), "decoding.py"


def of_lenet(run: RunFiles) -> Iterator[Use]:
    """A run of labs.lenet, also with Lightning."""
    yield LENET, MODEL, "labs/lenet/model.py"
    if "gelu" in str(run.config.get("activation")).lower():
        yield GELU, ACTIVATION, "labs/lenet/model.py"
    if run.kind == "lightning":
        yield LIGHTNING, ("training loop", "训练循环"), "labs/lenet/lightning.py"


def of_wikitext(run: RunFiles) -> Iterator[Use]:
    """A run of labs.wikitext."""
    yield TRANSFORMER, MODEL, "labs/wikitext/model.py"
    yield TIED, TIED_WEIGHTS, "labs/wikitext/model.py"
    if "wikitext" in str(run.config.get("data")).lower():
        yield WIKITEXT, ("data set", "数据集"), "labs/wikitext/text.py"
    if run.config.get("glove"):
        yield GLOVE, ("word vectors", "词向量"), "labs/wikitext/glove.py"
    if any("trigram" in name for name in run.results):
        yield KNESER_NEY, ("baseline", "对照模型"), "labs/wikitext/trigram.py"


def of_gpt(run: RunFiles) -> Iterator[Use]:
    """A run of labs.gpt."""
    config = run.config
    yield GPT2, MODEL, "labs/gpt/model.py"
    yield GELU, ACTIVATION, "labs/gpt/model.py"
    yield TIED, TIED_WEIGHTS, "labs/gpt/model.py"
    yield GPT3, ("settings of the optimizer", "优化器的设置"), "labs/gpt/parallel.py"
    if config.get("data") != "random":
        yield BPE, ("tokenizer", "分词器"), "text/subwords.py"
    if config.get("model") == "hf":
        yield TRANSFORMERS, MODEL, "labs/gpt/model.py"
    if str(config.get("data_parallel")).startswith("zero"):
        yield ZERO, ("sharding", "分片"), "labs/gpt/parallel.py"
        if config.get("data_parallel") != "zero1":
            yield FSDP, ("sharding", "分片"), "labs/gpt/parallel.py"
    if config.get("tensor", 1) != 1:
        yield MEGATRON, ("tensor parallelism", "张量并行"), "labs/gpt/parallel.py"
        yield SEQUENCE_PARALLEL, ("tensor parallelism", "张量并行"), "labs/gpt/parallel.py"
    if config.get("recompute"):
        yield RECOMPUTATION, ("recomputation", "重计算"), "labs/gpt/model.py"
    if config.get("pipe", 1) != 1:
        paper = GPIPE if config.get("accumulate") == 1 else PIPEDREAM
        yield paper, PIPELINE, "labs/gpt/parallel.py"


def of_pipeline(run: RunFiles) -> Iterator[Use]:
    """A run of labs.pipeline."""
    yield TRANSFORMER, MODEL, "labs/pipeline/stages.py"
    paper = PIPELINE_SCHEDULES.get(str(run.config.get("schedule")))
    if paper:
        yield paper, PIPELINE, "labs/pipeline/schedule.py"


USES = {
    "translation": of_translation,
    "attention_op": of_translation,
    "lenet": of_lenet,
    "lightning": of_lenet,
    "wikitext": of_wikitext,
    "gpt": of_gpt,
    "pipeline": of_pipeline,
}
