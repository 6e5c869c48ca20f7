"""The sections that explain: positional encoding, and the sources of what the runs used.

The program fills in what it knows. `Page.to_write` marks what the student must add.
"""

import inspect
import json

import torch

import model
from tools.reporting.page import Page
from tools.reporting.reading import RunFiles
from tools.reporting.references import references_of


def positional_encoding(page: Page, runs: list[RunFiles]) -> None:
    """The code of `model.sinusoids`, and why it is so."""
    runs = [run for run in runs if run.is_translation]
    if not runs:
        return
    page.heading("Positional encoding", "位置编码")
    if not all(map(has_sinusoids, runs)):
        page.to_write(
            "positions",
            "`model.py` no longer adds the sinusoids of the paper. Show your code, and explain it "
            "line by line.",
            "`model.py` 用的不再是论文中的正弦编码。请贴出自己的代码，并逐行解释。",
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
                "每两列像钟表的一根指针，角度是 p 乘以频率。"
                "频率按等比数列下降：快的区分相邻的词，慢的区分相距远的位置。",
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
        "positions",
        "Explain the code line by line in your own words; `docs/positional_encoding.md` has the "
        "proofs and a picture.",
        "用自己的话逐行解释这段代码；证明与图见 `docs/positional_encoding.zh-CN.md`。",
    )


def has_sinusoids(run: RunFiles) -> bool:
    """Whether model.py, which a reader may have changed, adds the sinusoids of the paper."""
    try:
        saved = json.loads((run.folder / "model.json").read_text(encoding="utf-8"))
        # A small model, with all that the reader may have added as in the run.
        small = dict(source_vocab=1, target_vocab=1, d_model=8, nhead=1, max_length=16)
        sizes = model.ModelConfig(**saved | small)
        translator = model.make_translator(sizes).eval()
        ids = torch.zeros(1, 16, dtype=torch.long)
        added = []  # to the source's embeddings and to the target's, (16, 8) each
        for embedding in (translator.source_embedding, translator.target_embedding):
            embedding.weight.requires_grad_(False).zero_()
            added.append(translator.embed(embedding, ids)[0])
        inspect.getsource(model.sinusoids)
    except Exception:  # whatever the changed code raises
        return False
    angle = torch.arange(16.0)[:, None] / 10000 ** (torch.arange(0, 8, 2) / 8)  # (16, 4)
    expected = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)  # (16, 8)
    return all(
        each.shape == expected.shape
        and torch.allclose(each, expected, atol=1e-5)
        and not each.requires_grad  # as positions that are learned
        for each in added
    )


def sources(page: Page, runs: list[RunFiles]) -> None:
    """Papers and code that the runs used, then the student's understanding of them."""
    page.heading("Sources", "参考资料")
    by_reference: dict[str, list] = {}
    for reference, purpose, file in (use for run in runs for use in references_of(run)):
        uses = by_reference.setdefault(reference, [])
        if (purpose, file) not in uses:
            uses.append((purpose, file))
    lines = [[("this repository", "本仓库"), ("all code", "全部代码"), "`README.md`"]]
    for reference, uses in by_reference.items():
        purposes = "、" if page.language == "zh" else ", "
        words = purposes.join(dict.fromkeys(page.text(purpose) for purpose, _ in uses))
        files = ", ".join(f"`{file}`" for file in dict.fromkeys(file for _, file in uses))
        lines.append([reference, words, files])
    header = [("paper or code", "论文或代码"), ("used for", "用途"), ("where", "位置")]
    page.table(header, lines)
    page.to_write(
        "sources",
        "What you understood of these sources, and everything else that you read or were given: "
        "web pages, other people's code, assistants. Code without a source in the report counts "
        "as copied.",
        "写出自己对这些资料的理解，并补上其他参考：网页、别人的代码、AI 助手。"
        "报告中没有列出来源的代码会被视为抄袭。",
    )
