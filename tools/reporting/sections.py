"""The sections of a report: functions that add to the page. A table has one column for each run.

To add one, write a function here (texts as in words.py) and call it in report.py. A row of a table
begins with where its values are: a place as `RunFiles.look_up` reads it, or a function of the run.
Then comes its text in English and, unless it is the same, in Chinese.
"""

from dataclasses import dataclass, field

from engine.errors import UserError
from loading import load_trained
from text.bleu import FIGURES, sentence_scores
from text.cleaning import REASONS
from tools.reporting import figures
from tools.reporting.attention import attention_of, picture
from tools.reporting.comparing import shared_results
from tools.reporting.page import Page
from tools.reporting.reading import SAMPLE_NOTE, Fact, RunFiles, rows_of
from tools.reporting.words import Words

EXAMPLES = 3  # of the best, the middle and the worst translations each
WIDEST = 20  # tokens of a sentence in a picture of attention, which fits the page
PARAMETERS = ("train.log#parameters", "parameters", "参数量")
CROSS_ATTENTION = ("Cross-attention", "交叉注意力")


def table(
    page: Page, runs: list[RunFiles], rows: list[tuple], mark: set[int] = frozenset()
) -> None:
    """A row for each (place, English, Chinese); `mark`: numbers of rows to colour."""
    cells = []
    for place, *texts in rows:
        values = [place(run) if callable(place) else run.look_up(place) for run in runs]
        cells.append([tuple(texts), *values])
    names = [run.name for run in runs]
    page.table([("run", "训练"), *names], cells, mark)


# -------------------------------------------------------------------- the run


def summary(page: Page, runs: list[RunFiles]) -> None:
    """How the runs ended, their best figures, every BLEU, and what could not be read."""
    page.heading("Summary", "概览")
    for run in runs:
        if run.is_of_sample():
            page.bullets([f"{run.name} · {page.text(SAMPLE_NOTE)}"], "missing")
    page.hint_for_html(
        "Hover over a number to see the file it is from.",
        "鼠标停在数字上，可以看到它来自哪个文件。",
    )
    rows = [
        (status, "status", "状态"),
        (RunFiles.seconds, "time", "总用时"),
        (last_step, "steps", "步数"),
        PARAMETERS,
        ("metrics.jsonl#train/loss#last", "last training loss", "最后的训练损失"),
        ("metrics.jsonl#valid/loss#min", "best validation loss", "最好的验证损失"),
        ("metrics.jsonl#valid/perplexity#min", "best validation perplexity", "最好的验证困惑度"),
        (
            "metrics.jsonl#valid/bleu#max:.2f",
            "best validation BLEU (smoothed)",
            "最好的验证 BLEU（平滑）",
        ),
        ("metrics.jsonl#test/accuracy#last:.2%", "test accuracy", "测试准确率"),
        ("metrics.jsonl#test/errors#last:,.0f", "test errors", "测试错误数"),
        ("eval/test.json#perplexity:.2f", "test perplexity", "测试困惑度"),
        ("eval/test.json#accuracy:.2%", "accuracy of the next word", "下一个词的准确率"),
    ]
    for name in names_of_results(runs):
        rows.append((f"{name}.json#nltk:.2f", f"BLEU {name}"))
    table(page, runs, rows)
    for run in runs:
        if run.missing:
            page.heading("What is missing", "缺少的内容", level=3)
            notes = [(run.name, *words) for words in dict.fromkeys(run.missing)]
            page.bullets([" · ".join(map(page.text, note)) for note in notes], "missing")


def names_of_results(runs: list[RunFiles]) -> list[str]:
    """The evaluations of all runs, such as "eval/test-greedy"."""
    return list(dict.fromkeys(name for run in runs for name in run.results))


def status(run: RunFiles) -> Fact | Words:
    """Why it stopped, or that it runs."""
    if run.running:
        return ("under way", "正在运行")
    message = run.final_message()
    if not message:
        return ("no final message", "没有正常结束")
    return Fact(message, message, f"{run.name}/train.log")


def last_step(run: RunFiles) -> Fact | None:
    """The step it stopped after; an interrupted run is some steps ahead of its last record."""
    stopped_after = run.logged(r"stopped after step ([\d,]+)")
    if run.final_message() and stopped_after:
        return stopped_after
    if not run.records:
        return None
    step = run.records[-1]["step"]
    return Fact(step, f"{step:,}", f"{run.name}/metrics.jsonl#step#last")


def environment(page: Page, runs: list[RunFiles]) -> None:
    """Machine and versions."""
    page.heading("Environment", "运行环境")
    rows = [
        ("environment.json#*.gpu", "GPU"),
        ("environment.json#*.gpu_memory_gib", "GPU memory (GiB)", "显存（GiB）"),
        ("environment.json#*.driver", "driver", "驱动"),
        ("environment.json#*.cuda", "CUDA"),
        ("environment.json#*.cpu", "CPU"),
        ("environment.json#*.cores", "cores", "核数"),
        ("environment.json#*.threads", "threads", "线程数"),
        ("environment.json#*.processes", "processes", "进程数"),
        ("environment.json#*.precision", "number format of training", "训练的数值格式"),
        ("environment.json#*.system", "system", "系统"),
        ("environment.json#*.python", "Python"),
        ("environment.json#*.torch", "torch"),
        ("environment.json#*.commit", "commit", "代码版本（commit）"),
        ("environment.json#0.begun", "begun", "开始时间"),
    ]
    table(page, runs, rows)


REASONS_IN_CHINESE = {
    "empty": "有一边为空",
    "identical": "原文与译文相同",
    "held out": "划入验证集或测试集",
    "in validation or test": "有一边也在验证集或测试集中",
    "duplicate": "完全重复",
    "too long": "超过 --max_length",
    "length ratio": "两边长度相差太大",
    "unlike validation": "用词与验证集相差较大（--select）",
    "short target": "译文偏短（--select）",
}


def data(page: Page, runs: list[RunFiles]) -> None:
    """The data set, the counts of its pairs and tokens, and why pairs were dropped."""
    page.heading("Data", "数据")
    rows = [
        ("config.json#data", "data set", "数据集"),
        ("data.json#counts.read", "pairs read", "读入句对"),
        ("data.json#counts.kept", "pairs kept", "保留句对"),
    ]
    for reason, english in REASONS.items():
        rows.append((f"data.json#counts.{reason}", english, REASONS_IN_CHINESE[reason]))
    rows += [
        ("data.json#validation_rows", "validation rows", "验证集行数"),
        ("data.json#unknown:.2%", "unknown tokens", "未知词元比例"),
        ("data.json#vocabulary.source", "source vocabulary", "原文词表大小"),
        ("data.json#tokens.source", "source tokens", "原文词元数"),
        ("data.json#vocabulary.target", "target vocabulary", "译文词表大小"),
        ("data.json#tokens.target", "target tokens", "译文词元数"),
    ]
    table(page, runs, rows)


def model(page: Page, runs: list[RunFiles]) -> None:
    """Parameters, FLOPs and print(model); the same layers of several runs once."""
    page.heading("Model", "模型")
    rows = [
        PARAMETERS,
        (
            "train.log#FLOPs a training token",
            "FLOPs of a training token",
            "每个训练词元的浮点运算次数",
        ),
        (
            "train.log#FLOPs a training image",
            "FLOPs of a training image",
            "每张训练图片的浮点运算次数",
        ),
    ]
    table(page, runs, rows)
    printed = {}
    for run in runs:
        printed.setdefault(run.printed_model(), run.name)
    for text, name in printed.items():
        if text:
            page.verbatim(text, f"{name}/train.log")


# -------------------------------------------------------------------- training


def curves(page: Page, runs: list[RunFiles]) -> None:
    """A figure for each quantity, all runs in it."""
    panels = figures.panels_of(runs)
    if not panels:
        return
    page.heading("Training curves", "训练曲线")
    if any(run.is_translation for run in runs):
        page.note(
            "Losses are in nats per token, without label smoothing unless it says so; "
            "validation BLEU is smoothed and of the first rows only.",
            "损失的单位是每词元 nat，除注明外不含标签平滑；"
            "验证 BLEU 经过平滑，只用验证集的前若干行计算。",
        )
    page.figures(
        {name: figures.curves(runs, name, tags, page.language) for name, tags in panels.items()}
    )


def hardware(page: Page, runs: list[RunFiles]) -> None:
    """What nvidia-smi printed; utilisation, memory and power of GPU and CPU over the steps."""
    drawn = {f"hardware {run.name}": figures.hardware(run, page.language) for run in runs}
    drawn = {name: figure for name, figure in drawn.items() if figure}
    tables = [run for run in runs if run.gpu_table]
    on_gpu = any(start.get("gpu") for run in runs for start in run.environment)
    if not (drawn or tables or on_gpu):
        return
    page.heading("Hardware use", "硬件使用情况")
    for run in tables:
        page.heading(f"{run.name} nvidia-smi", level=3)
        page.verbatim(run.gpu_table, f"{run.name}/nvidia-smi.txt")
    if on_gpu and not tables:
        page.to_write(
            "Add what nvidia-smi shows during training: a screenshot (PNG) or nvidia-smi.txt "
            "in the run's folder appears in this report.",
            "请补上训练时的 nvidia-smi：把截图（PNG）或 nvidia-smi.txt "
            "放进这次训练的文件夹，就会出现在报告里。",
        )
    if drawn:
        page.note("100 % of the CPU is one core.", "CPU 利用率 100 % 表示用满一个核。")
        page.figures(drawn)
    rows = []
    for device in ("gpu", "cpu"):
        for quantity in ("utilisation_percent", "memory_gib", "power_watt"):
            english, chinese = figures.QUANTITIES[quantity]
            for summary, in_chinese in (("mean", "平均"), ("max", "最高")):
                place = f"metrics.jsonl#{device}/{quantity}#{summary}:,.1f"
                names = (f"{summary} {device.upper()} ", f"{in_chinese} {device.upper()} ")
                rows.append((place, names[0] + english, names[1] + chinese))
    table(page, runs, rows)


def speed(page: Page, runs: list[RunFiles]) -> None:
    """Medians over the run, and the peak memory."""
    page.heading("Speed", "速度")
    page.note("Medians over the run.", "整个训练过程的中位数。")
    medians = [
        ("speed/tokens_per_second", ",.0f", "tokens per second", "每秒词元数"),
        ("speed/target_tokens_per_second", ",.0f", "target tokens per second", "每秒目标词元数"),
        ("speed/images_per_second", ",.0f", "images per second", "每秒图片数"),
        (
            "speed/model_flops_utilisation",
            ".1%",
            "model FLOPs utilisation",
            "模型算力利用率（MFU）",
        ),
        ("data/padding_share", ".1%", "padding", "填充比例"),
        ("data/wait_share", ".1%", "waiting for data", "等待数据的时间比例"),
    ]
    rows = [(f"metrics.jsonl#{tag}#median:{form}", *texts) for tag, form, *texts in medians]
    peak = ("peak memory (GiB)", "内存峰值（GiB；在 GPU 上是显存）")
    rows.append(("metrics.jsonl#memory/peak_gib#max:.2f", *peak))
    table(page, runs, rows)


# -------------------------------------------------------------------- results

CARD = [  # key in eval/*.json, and its text
    *((f"{figure.name}:{figure.form}", figure.label, figure.chinese) for figure in FIGURES),
    ("capped", "outputs cut at the length limit", "写到长度上限仍未结束的句数"),
    ("decoding", "decoding", "解码方式"),
    ("checkpoint", "checkpoint", "检查点"),
]


def results(page: Page, runs: list[RunFiles]) -> None:
    """The BLEU cards side by side, then the plain numbers of a lab's results."""
    columns = []
    for name in names_of_results(runs):
        columns += [(run, name) for run in runs if name in run.results]
    if not columns:
        return
    page.heading("Results", "评测结果")
    cards = [(run, name) for run, name in columns if "nltk" in run.results[name]]
    results_table(page, cards, CARD, with_runs=len(runs) > 1)
    others = [column for column in columns if column not in cards]
    keys = dict.fromkeys(key for run, name in others for key in run.results[name])
    keys.pop("data_key", None)  # a checksum, for the program alone
    plain = []
    for key in keys:
        values = [run.results[name].get(key) for run, name in others]
        # A list or a dict does not fit into a cell.
        if not any(isinstance(value, list | dict) for value in values):
            plain.append((f"{key}:,.6g", key.replace("_", " ")))
    results_table(page, others, plain, with_runs=len(runs) > 1)


def results_table(
    page: Page, columns: list[tuple[RunFiles, str]], rows: list[tuple], with_runs: bool
) -> None:
    """A row for each (key, English, Chinese), and a column for each result of a run."""
    header = [f"{run.name} {name}" if with_runs else name for run, name in columns]
    cells = []
    for key, *texts in rows:
        values = [run.look_up(f"{name}.json#{key}") for run, name in columns]
        cells.append([tuple(texts), *values])
    page.table(["", *header], cells)


@dataclass
class Examples:
    """Translations of the same rows by several runs, and which of them the report shows."""

    name: str = ""  # of the result
    runs: list[RunFiles] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)  # source, reference
    scores: list[list[float]] = field(default_factory=list)  # of each run's translations
    parts: dict[Words, list[int]] = field(default_factory=dict)  # "best" → numbers of rows


def choose_examples(runs: list[RunFiles]) -> Examples:
    """The best, middle and worst translations of the first run that has any; perhaps none."""
    runs = [run for run in runs if run.hypotheses]  # a lab's run has none
    name = next((name for name in shared_results(runs) if rows_of(runs[0], name)), "")
    if not name:
        return Examples()
    rows = rows_of(runs[0], name)
    runs = [run for run in runs if rows_of(run, name) == rows]
    references = [reference for _, reference in rows]
    scores = [sentence_scores(references, run.hypotheses[name]) for run in runs]
    # Of equal scores the longer reference first: "Yes." is easily right.
    order = sorted(range(len(rows)), key=lambda row: (-scores[0][row], -len(references[row])))
    best, others = order[:EXAMPLES], order[EXAMPLES:]
    worst = others[-EXAMPLES:][::-1]
    between = others[:-EXAMPLES]
    first = max(0, (len(between) - EXAMPLES) // 2)
    middle = between[first : first + EXAMPLES]
    parts = {("best", "最好"): best, ("middle", "居中"): middle, ("worst", "最差"): worst}
    # Few rows have no middle, or only best ones.
    parts = {part: numbers for part, numbers in parts.items() if numbers}
    return Examples(name, runs, rows, scores, parts)


def translations(page: Page, examples: Examples) -> None:
    """Source, reference, and the translations of the runs with their scores."""
    if not examples.runs:
        return
    name = examples.name
    page.heading("Translations", "译文对照")
    page.heading(name, level=3)
    page.note(
        "Scores of single sentences are sacreBLEU's sentence BLEU, for reading only: their mean "
        "is not the corpus BLEU.",
        "单句得分是 sacreBLEU 的 sentence BLEU，只供阅读参考：它们的平均不是语料级 BLEU。",
    )
    file = examples.runs[0].results[name]["data"]
    lines = []
    for part, numbers in examples.parts.items():
        for row in numbers:
            line = [part, *(Fact(row, text, f"{file}#{row}") for text in examples.rows[row])]
            for run, scores in zip(examples.runs, examples.scores):
                source = f"{run.name}/{name}.txt#{row}"
                line.append(Fact(row, run.hypotheses[name][row], source))
                line.append(Fact(scores[row], f"{scores[row]:.1f}", f"computed from {source}"))
            lines.append(line)
    header = ["", ("source", "原文"), ("reference", "参考译文")]
    for run in examples.runs:
        header += [run.name, ("score", "得分")]
    page.table(header, lines)


def draw_attention(examples: Examples) -> dict[str, object]:
    """Cross-attention of the scored checkpoints, for the shortest source of each part."""
    drawn = {}
    for run in examples.runs:
        try:
            average = run.results[examples.name].get("average", 1)
            trained = load_trained(run.scored(examples.name), average, log=lambda line: None)
        except UserError as error:
            run.missing.append((CROSS_ATTENTION, str(error)))
            continue
        tokenizers = (trained.source_tokenizer, trained.target_tokenizer)
        for number, rows in enumerate(examples.parts.values(), 1):
            row = min(rows, key=lambda row: len(examples.rows[row][0]))
            source, _ = examples.rows[row]
            translation = run.hypotheses[examples.name][row]
            found = attention_of(trained.model, tokenizers, source, translation, WIDEST)
            drawn[f"attention {number} {run.name}"] = picture(found)
    return drawn


def attention(page: Page, drawn: dict[str, object]) -> None:
    """The pictures of `draw_attention`."""
    if drawn:
        page.heading(*CROSS_ATTENTION)
        page.note(
            "Columns: source; rows: translation. Darker: more attention of the last layer.",
            "列是原文，行是译文；颜色越深，最后一层对该处的注意力越大。",
        )
        page.figures(drawn, "large")


def own_pictures(page: Page, runs: list[RunFiles]) -> None:
    """What the script drew itself, such as filters, and screenshots put into the run's folder."""
    pictures = {f"{run.name} {p.stem}": p.read_bytes() for run in runs for p in run.pictures}
    if pictures:
        page.heading("Pictures of the run", "训练中的图与截图")
        page.figures(pictures)


def settings(page: Page, runs: list[RunFiles]) -> None:
    """Every setting; marked where the runs differ."""
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    if not names:
        return
    page.heading("Settings", "全部设置")
    may_differ = {"run", "resume", "seed"}
    mark = set()
    for number, name in enumerate(names):
        values = {str(run.config.get(name)) for run in runs}
        if name not in may_differ and len(values) > 1:
            mark.add(number)
    if mark:
        page.note("Only what differs between the runs is marked.", "各次训练之间不同的设置已标出。")
    table(page, runs, [(f"config.json#{name}", f"--{name}") for name in names], mark)
