"""The sections of a report: functions that add to the page. Several runs have a column each.

To add one, write a function here (texts as in words.py) and call it in report.py. A row of a table
begins with where its values are: a place as `RunFiles.look_up` reads it, or a function of the run.
Then comes its text in English and, unless it is the same, in Chinese.
"""

import re
from dataclasses import dataclass, field

from engine.errors import UserError
from loading import load_trained
from text.bleu import FIGURES, sentence_scores
from text.cleaning import REASONS
from tools.reporting import figures
from tools.reporting.attention import attention_of, picture
from tools.reporting.comparing import shared_results
from tools.reporting.page import Page
from tools.reporting.reading import (
    ABOVE_PEAK,
    NO_BETTER_LOSS,
    NUMBER,
    SAMPLE_NOTE,
    WHY_STOPPED,
    Fact,
    RunFiles,
    TableFiles,
    is_number,
    rows_of,
)
from tools.reporting.words import Words

FLAG = re.compile("--[a-z_]+")
EXAMPLES = 3  # of the best, the middle and the worst translations each
WIDEST = 20  # tokens of a sentence in a picture of attention, which fits the page
PARAMETERS = ("train.log#parameters", "parameters", "参数量")
CROSS_ATTENTION = ("Cross-attention", "交叉注意力")
NO_ATTENTION = (
    "the decoder has no `nn.MultiheadAttention` to the source that gives its weights",
    "解码器里没有给出权重的、对原文的 `nn.MultiheadAttention`",
)


def table(
    page: Page, runs: list[RunFiles], rows: list[tuple], mark: set[int] = frozenset()
) -> bool:
    """A row for each (place, English, Chinese); `mark`: numbers of rows to colour.

    Returns whether there is any value.
    """
    cells = []
    for place, *texts in rows:
        values = [place(run) if callable(place) else run.look_up(place) for run in runs]
        cells.append([tuple(texts), *values])
    if len(runs) == 1:
        page.facts(cells)
    else:
        page.table([("run", "训练"), *(run.name for run in runs)], cells, mark)
    return any(value is not None for _, *values in cells for value in values)


# -------------------------------------------------------------------- the run


FIELDS: dict[str, Words] = {
    "name": ("Name", "姓名"),
    "number": ("Student number", "学号"),
    "course": ("Course", "课程"),
    "date": ("Date", "日期"),
}


def cover(page: Page, runs: list[RunFiles]) -> None:
    """Who hands it in; then what a reader must know before any number."""
    page.cover(FIELDS)
    for run in runs:
        if run.is_incomplete():
            after = run.logged(rf"stopped after step ({NUMBER})")
            step = f" after step {after.text}" if after else ""
            in_chinese = f"在第 {after.text} 步" if after else ""
            page.warning(
                f"{run.name} was interrupted{step}: all figures come from an unfinished run.",
                f"{run.name} {in_chinese}中断了：以下都是未完成的训练的结果。",
            )
        if run.is_of_sample():
            page.bullets([f"{run.name} · {page.text(SAMPLE_NOTE)}"], "missing")
    page.hint(
        "Write your own words into `report.md`, between the marks beside each ✎, and run the same "
        "command again: they appear here. Print this page to get a PDF. Hover over a number "
        "to see which file it comes from.",
        "在 `report.md` 里每个 ✎ 旁的记号之间写字，再运行同一条命令，文字就会出现在这里。"
        "用浏览器打印本页，可得到 PDF。鼠标停在数字上，会显示它来自哪个文件。",
    )


def summary(page: Page, runs: list[RunFiles]) -> None:
    """How the runs ended, their best figures, and what could not be read."""
    page.heading("Summary", "概览")
    rows = [
        (status, "status", "状态"),
        (RunFiles.seconds, "time", "总用时"),
        (last_step, "steps", "步数"),
        ("metrics.jsonl#train/loss#last", "last training loss", "最后的训练损失"),
        ("metrics.jsonl#valid/loss#min", "lowest validation loss", "最低的验证损失"),
        ("metrics.jsonl#valid/perplexity#min", "lowest validation perplexity", "最低的验证困惑度"),
        ("metrics.jsonl#test/accuracy#last:.2%", "test accuracy", "测试准确率"),
        (error_rate, "test error rate", "测试错误率"),
        ("metrics.jsonl#test/errors#last:,.0f", "test errors", "测试错误数"),
        ("eval/test.json#perplexity:.2f", "test perplexity", "测试困惑度"),
    ]
    if any(run.kind == "wikitext" for run in runs):
        rows.append(
            ("eval/test.json#accuracy:.2%", "accuracy of the next word", "下一个词的准确率")
        )
    rows.append((first_score, "BLEU, the handed-in score", "BLEU（要提交的得分）"))
    table(page, runs, rows)
    missing(page, runs)


def missing(page: Page, runs: list[RunFiles]) -> None:
    """What could not be read or drawn."""
    notes = [(run.name, *words) for run in runs for words in dict.fromkeys(run.missing)]
    if notes:
        page.heading("What is missing", "缺少的内容", level=3)
        page.bullets([" · ".join(map(page.text, note)) for note in notes], "missing")


def first_score(run: RunFiles) -> Fact | None:
    """The BLEU that the handout asks for: that of the first result."""
    return run.look_up(f"{next(iter(run.results), '')}.json#nltk:.2f")


def error_rate(run: RunFiles) -> Fact | None:
    """The share of test images with a wrong answer, in the unit of the curve."""
    accuracy = run.look_up("metrics.jsonl#test/accuracy#last")
    if accuracy is None:
        return None
    return Fact(accuracy.value, f"{100 - 100 * accuracy.value:.2f}%", accuracy.source)


def names_of_results(runs: list[RunFiles]) -> list[str]:
    """The evaluations of all runs, such as "eval/test-greedy"."""
    return list(dict.fromkeys(name for run in runs for name in run.results))


def status(run: RunFiles) -> Fact | Words | None:
    """Why it stopped, or that it runs."""
    if run.running:
        return ("under way", "正在运行")
    if not run.log:
        return None
    reason = run.reason()
    if not reason:
        return ("no final message", "没有正常结束")
    if reason in WHY_STOPPED:
        return WHY_STOPPED[reason]
    if stopped_early := NO_BETTER_LOSS.fullmatch(reason):
        count = stopped_early[1]
        return (
            f"early stopping: {count} validation(s) without a lower loss",
            f"早停：连续 {count} 次验证，损失都没有降低",
        )
    return Fact(reason, reason, f"{run.name}/train.log", is_code=True)


def last_step(run: RunFiles) -> Fact | None:
    """The step it stopped after; an interrupted run is some steps ahead of its last record."""
    stopped_after = run.logged(rf"stopped after step ({NUMBER})")
    if run.final_message() and stopped_after:
        return stopped_after
    if not run.records:
        return None
    step = run.records[-1]["step"]
    return Fact(step, f"{step:,}", f"{run.name}/metrics.jsonl#step#last")


def environment(page: Page, runs: list[RunFiles]) -> None:
    """The student's plan, the machine and the versions."""
    page.heading("Setup", "实验设置")
    page.to_write(
        "setup",
        "Setup: what do you want to find out, and how do you go about it?",
        "设置：想弄清什么问题，怎样安排实验？",
    )
    page.heading("Environment", "运行环境", level=3)
    rows = [
        (commands, "command", "命令"),
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
        ("environment.json#0.begun", "started", "开始时间"),
    ]
    table(page, runs, rows)


def commands(run: RunFiles) -> Fact | None:
    """How the script was started, each time."""
    fact = run.look_up("environment.json#*.command")
    return fact and Fact(fact.value, fact.text, fact.source, is_code=True)


REASONS_IN_CHINESE = {
    "empty": "有一边为空",
    "identical": "原文与译文相同",
    "held out": "划入验证集或测试集",
    "in validation or test": "有一边也在验证集或测试集中",
    "duplicate": "完全重复",
    "too long": "超过 `--max_length`",
    "length ratio": "两边长度相差太大",
    "unlike validation": "用词与验证集相差较大（`--select`）",
    "short target": "译文偏短（`--select`）",
}


def data(page: Page, runs: list[RunFiles]) -> None:
    """The data set, the counts of its pairs and tokens, and why pairs were dropped."""
    if not any(run.data for run in runs):
        return
    page.heading("Data", "数据", level=3)
    rows = [
        ("config.json#data", "data set", "数据集"),
        ("data.json#counts.read", "pairs read", "读入句对"),
        ("data.json#counts.kept", "pairs kept", "保留句对"),
    ]
    for reason, english in REASONS.items():
        english = FLAG.sub(r"`\g<0>`", english)
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
    """The layers with their shapes and parameters; the same ones of several runs once."""
    page.heading("Model", "模型", level=3)
    rows = [
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
    if len(runs) > 1 or not runs[0].layers:  # else it is the last row below
        rows.insert(0, PARAMETERS)
    table(page, runs, rows)
    header = [
        ("layer", "层"),
        ("type", "类型"),
        ("output shape", "输出形状"),
        ("number", "个数"),
        ("parameters", "参数量"),
    ]
    shown: list = []
    for run in runs:
        if not run.layers or run.layers in shown:
            continue
        shown.append(run.layers)
        lines = []
        for layer in run.layers:
            shape = ", ".join(map(str, layer.shape))
            names = (f"`{layer.name}`", f"`{layer.type}`", f"({shape})", str(layer.count))
            lines.append([*names, f"{layer.parameters:,}"])
        total = sum(layer.parameters for layer in run.layers)
        lines.append([("all layers", "合计"), "", "", "", f"{total:,}"])
        if len(runs) > 1:
            page.heading(run.name, level=3)
        page.table(header, lines)
    if shown:
        page.note(
            "A `*` stands for the numbers of equal layers. B: sentence pairs, S and T: tokens of "
            "the source and the target. Shared weights are counted once.",
            "`*` 代表相同各层的编号。B 是句对数，S 与 T 是原文与译文的词元数。共享的权重只计一次。",
        )
    printed = {run.printed_model(): run.name for run in runs if not run.layers}
    for text, name in printed.items():
        if text:
            page.verbatim(text, f"{name}/train.log")


# -------------------------------------------------------------------- training


def curves(page: Page, runs: list[RunFiles]) -> None:
    """A figure for each quantity, all runs in it."""
    page.heading("Training", "训练过程")
    panels = figures.panels_of(runs)
    drawn = {}
    for name, tags in panels.items():
        caption = figures.label_of(runs, name)
        if name == "loss" and any(run.is_translation for run in runs):
            remark = (", without label smoothing", "，不含标签平滑")
            caption = tuple(page_text + more for page_text, more in zip(caption, remark))
        if name == "loss" and any(run.samples_the_softmax for run in runs):
            remark = (
                "; that of training is an estimate until the learning rate falls",
                "；学习率下降之前，训练损失是估计值",
            )
            caption = tuple(page_text + more for page_text, more in zip(caption, remark))
        if name == "bleu":
            caption = caption_of_bleu(runs)
        drawn[name] = (figures.curves(runs, name, tags, page.language), caption)
    if drawn:
        page.figures(drawn)


def caption_of_bleu(runs: list[RunFiles]) -> Words:
    """The curve is not the score: it is smoothed, and of a part of the rows."""
    counted = [run.logged(rf"({NUMBER}) of {NUMBER} rows, evenly spaced") for run in runs]
    rows = " / ".join(dict.fromkeys(fact.text for fact in counted if fact)) or "…"
    return (
        f"validation BLEU of {rows} rows, smoothed; the score under Results is another one: of all "
        "rows, without smoothing",
        f"验证 BLEU：只用 {rows} 行，带平滑（smoothed BLEU）；“评测结果”中的得分用全部行，不带平滑",
    )


def hardware(page: Page, runs: list[RunFiles]) -> None:
    """What nvidia-smi printed; utilisation, memory and power of GPU and CPU over the steps."""
    drawn = {}
    for run in runs:
        figure = figures.hardware(run, page.language)
        caption = (
            f"load of the hardware, {run.name}; 100 % of the CPU is one core",
            f"硬件负载，{run.name}；CPU 的 100 % 表示用满一个核",
        )
        if figure:
            drawn[f"hardware {run.name}"] = (figure, caption)
    tables = [run for run in runs if run.gpu_table]
    on_gpu = any(start.get("gpu") for run in runs for start in run.environment)
    if not (drawn or tables or on_gpu):
        return
    page.heading("Hardware use", "硬件使用情况", level=3)
    for run in tables:
        page.note(f"{run.name}, `nvidia-smi`")
        page.verbatim(run.gpu_table, f"{run.name}/nvidia-smi.txt")
    if on_gpu and not tables:
        page.to_add(
            "Add what nvidia-smi shows during training: a screenshot (PNG) or nvidia-smi.txt "
            "in the run's folder appears in this report.",
            "请补上训练时的 nvidia-smi：把截图（PNG）或 nvidia-smi.txt "
            "放进这次训练的文件夹，就会出现在报告里。",
        )
    if drawn:
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
    page.heading("Speed", "速度", level=3)
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
    if table(page, runs, rows):
        page.note(
            "Speeds and shares are medians over the run.", "速度与比例是整个训练过程的中位数。"
        )


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
    page.heading("Results", "评测结果")
    if not columns:
        return
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
    parts = {("best", "最好"): best, ("middle", "中等"): middle, ("worst", "最差"): worst}
    # Few rows have no middle, or only best ones.
    parts = {part: numbers for part, numbers in parts.items() if numbers}
    return Examples(name, runs, rows, scores, parts)


def translations(page: Page, examples: Examples) -> None:
    """Source, reference, and the translations of the runs with their scores."""
    if not examples.runs:
        return
    name = examples.name
    page.heading("Translations", "译文对照", level=3)
    page.note(f"`{name}`")
    page.note(
        "Scores of single sentences are sacreBLEU's sentence BLEU, for reading only: their mean "
        "is not the corpus BLEU.",
        "单句得分是 sacreBLEU 的 sentence BLEU，只供阅读参考：它们的平均不是语料级 BLEU。",
    )
    file = examples.runs[0].results[name]["data"]
    for part, numbers in examples.parts.items():
        lines = []
        for row in numbers:
            source, reference = (Fact(row, text, f"{file}#{row}") for text in examples.rows[row])
            lines.append([("source", "原文"), source, ""])
            lines.append([("reference", "参考译文"), reference, ""])
            for run, scores in zip(examples.runs, examples.scores):
                place = f"{run.name}/{name}.txt#{row}"
                text = Fact(row, run.hypotheses[name][row], place)
                score = Fact(scores[row], f"{scores[row]:.1f}", f"computed from {place}")
                who = run.name if len(examples.runs) > 1 else ("translation", "译文")
                lines.append([who, text, score])
        page.table([part, "", ("score", "得分")], lines)


def draw_attention(examples: Examples) -> dict[str, tuple[object, Words]]:
    """Cross-attention of the scored checkpoints, for the shortest source of each part."""
    drawn = {}
    for run in examples.runs:
        try:
            average = run.results[examples.name].get("average", 1)
            trained = load_trained(run.scored(examples.name), average, log=lambda line: None)
        except UserError as error:
            run.missing.append((CROSS_ATTENTION, f"`{error}`"))
            continue
        tokenizers = (trained.source_tokenizer, trained.target_tokenizer)
        for number, rows in enumerate(examples.parts.values(), 1):
            row = min(rows, key=lambda row: len(examples.rows[row][0]))
            source, _ = examples.rows[row]
            translation = run.hypotheses[examples.name][row]
            found = attention_of(trained.model, tokenizers, source, translation, WIDEST)
            if found is None:
                run.missing.append((CROSS_ATTENTION, NO_ATTENTION))
                break
            caption = (
                f"cross-attention, {run.name}: {source}",
                f"交叉注意力，{run.name}：{source}",
            )
            drawn[f"attention {number} {run.name}"] = (picture(found), caption)
    return drawn


def attention(page: Page, drawn: dict[str, tuple[object, Words]]) -> None:
    """The pictures of `draw_attention`."""
    if drawn:
        page.heading(*CROSS_ATTENTION, level=3)
        page.note(
            "Columns: source; rows: translation. Darker: more attention of the last layer.",
            "列是原文，行是译文；颜色越深，最后一层对该处的注意力越大。",
        )
        page.figures(drawn, "large")


def own_pictures(page: Page, runs: list[RunFiles]) -> None:
    """What the script drew itself, such as filters, and screenshots put into the run's folder."""
    pictures = {
        f"{run.name} {path.stem}": (path.read_bytes(), f"`{run.name}/{path.name}`")
        for run in runs
        for path in run.pictures
    }
    if pictures:
        page.heading("Pictures of the run", "训练中的图与截图", level=3)
        page.figures(pictures)


def observations(page: Page) -> None:
    """The student's own words on the results."""
    page.heading("Observations", "观察与分析")
    page.to_write(
        "observations",
        "Observations: what do curves, scores and translations show? Which problems did you meet, "
        "and how did you solve them?",
        "观察：曲线、得分与译文说明了什么？遇到哪些问题，怎样解决？",
    )


def conclusion(page: Page) -> None:
    """The student's own words at the end."""
    page.heading("Conclusion", "结论")
    page.to_write(
        "conclusion",
        "Conclusion: the answer to your question, in a few sentences.",
        "结论：用几句话回答开头的问题。",
    )


def settings(page: Page, runs: list[RunFiles]) -> None:
    """The settings that differ from their defaults or between the runs; all others folded."""
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    changed = {name for run in runs for name in run.changed_settings()}
    may_differ = {"run", "resume", "seed"}
    differing = {
        name
        for name in names
        if name not in may_differ and len({str(run.config.get(name)) for run in runs}) > 1
    }
    first = [name for name in names if name in changed | differing]
    others = [name for name in names if name not in first]
    if first:
        page.heading("Settings", "设置", level=3)
        page.note(
            "Those that were given or chosen automatically; what differs between runs is coloured.",
            "列出的是指定的或自动选择的设置；各次训练之间不同的，标有颜色。",
        )
        mark = {number for number, name in enumerate(first) if name in differing}
        table(page, runs, [(f"config.json#{name}", f"`--{name}`") for name in first], mark)
    if others:
        page.folded(f"{len(others)} settings at their defaults", f"其余 {len(others)} 项为默认值")
        table(page, runs, [(f"config.json#{name}", f"`--{name}`") for name in others])
        page.end_folded()


# -------------------------------------------------------------------- tables of labs.gpt

# Heads of table.md, in Chinese.
HEADS_IN_CHINESE = {
    "technique": "技术",
    "processes": "进程数",
    "tokens/s": "每秒词元数",
    "× row 1": "与第 1 行之比",
    "× DDP": "与 DDP 之比",
    "step": "每步时间",
    "CPU time a step": "每步 CPU 时间",
    "of measured peak": "占实测峰值",
    "memory a rank": "每进程内存",
    "loss": "损失",
    "scale": "规模",
    "cards": "卡数",
    "layers": "层数",
    "parameters": "参数量",
    "memory a card": "每卡内存",
    "time": "用时",
    "final loss": "最终损失",
    "loss < 7": "损失 < 7",
}
PERCENT = re.compile(r"([\d.]+) ?%")


def comparison(page: Page, each: TableFiles) -> None:
    """The table as the program wrote it, speed and memory as ratios, and the losses of its rows."""
    page.heading(each.name)
    head, *rows = each.cells
    source = f"{each.name}/table.md"
    above_peak = False
    lines = []
    for row in rows:
        cells: list = [row[0].replace("<br>", " ")]
        for title, cell in zip(head[1:], row[1:]):
            percent = PERCENT.fullmatch(cell)
            impossible = title == "of measured peak" and percent and float(percent[1]) > 100
            above_peak = above_peak or bool(impossible)
            cells.append(Fact(cell, cell, source) if cell and not impossible else None)
        lines.append(cells)
    page.table([(title, HEADS_IN_CHINESE.get(title, title)) for title in head], lines)
    if above_peak:
        english, chinese = ABOVE_PEAK
        page.note(f"of measured peak: {english}", f"占实测峰值：{chinese}")
    page.note(f"`{each.about}`")
    ratios(page, each)
    drawn: dict = {}
    runs = [run for run in each.runs.values() if run.series("train/loss")[1]]
    if runs:
        figure = figures.curves(runs, "loss", ["train/loss"], page.language)
        caption = ("training loss of each row (nats per token)", "各行的训练损失（nat/词元）")
        drawn[f"{each.name} loss"] = (figure, caption)
    for path in each.pictures:
        if path.stem != "losses":  # those above
            drawn[f"{each.name} {path.stem}"] = (path.read_bytes(), f"`{path.name}`")
    if drawn:
        page.figures(drawn, "large")


def ratios(page: Page, each: TableFiles) -> None:
    """Speed-up and memory of the rows of one model, relative to the first that was trained."""
    measured = []
    for cells, row in zip(each.cells[1:], each.rows):
        memory = row.get("peak_gib")
        peaks = [peak for peak in memory if is_number(peak)] if isinstance(memory, list) else []
        if is_number(row.get("tokens_per_second")) and max(peaks, default=0) > 0:
            name = " · ".join(cell.replace("<br>", " ") for cell in cells[:2])
            measured.append((name, row["tokens_per_second"], max(peaks), row.get("parameters")))
    has_ratios = any("×" in title for title in each.cells[0])
    if has_ratios or len(measured) < 2 or len({str(size) for *_, size in measured}) > 1:
        return
    first, speed, memory, _ = measured[0]
    source = f"computed from {each.name}/table.json"
    lines = []
    for name, own_speed, own_memory, _ in measured:
        values = (own_speed / speed, own_memory / memory)
        lines.append([name, *(Fact(value, f"{value:.2f} ×", source) for value in values)])
    page.table(["", ("speed-up", "加速比"), ("memory", "内存之比")], lines)
    page.note(f"Relative to the row {first}.", f"以 {first} 一行为 1。")
