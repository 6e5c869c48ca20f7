"""Draw the model with the shapes of its tensors, as SVG.

    python -m tools.model_picture > docs/model.svg
    python -m tools.model_picture --language zh > docs/model.zh-CN.svg

The sizes are those of `ModelConfig`'s defaults, with vocabularies of 16,000 tokens.
"""

import argparse
from html import escape

from model import ModelConfig

WIDTH, HEIGHT = 400, 440  # pixels at which every text is readable
ENCODER, DECODER = 100, 300  # x of the middle of each column
BOX_WIDTH, BOX_HEIGHT = 160, 40
FRAME_WIDTH = 180
FONT = "system-ui, 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', sans-serif"
COLOURS = {
    "embedding": "#fde8d0",
    "attention": "#d8e8f8",
    "feed-forward": "#dcefdc",
    "output": "#eadff2",
}
WORDS = {
    "en": {
        "title": "The model, from the token ids at the bottom to the logits at the top",
        "batch": "B sentences; the longest source has",
        "lengths": "S tokens, the longest target T",
        "norm": "Each box in a frame adds its input",
        "norm 2": "to its result; layer norm follows.",
        "source": "source ids",
        "target": "begin token and target ids",
        "embedding": "embedding × √{d_model}",
        "positions": "+ sinusoids",
        "self-attention": "self-attention, {nhead} heads",
        "cross-attention": "cross-attention, {nhead} heads",
        "src_pad": "masked by src_pad",
        "causal_mask": "masked by causal_mask",
        "feed-forward": "feed-forward, ReLU",
        "output": "linear, tied to embedding",
        "memory": "memory",
        "logits": "logits",
        "encoder": "encoder × {num_encoder_layers}",
        "decoder": "decoder × {num_decoder_layers}",
    },
    "zh": {
        "title": "模型：最下面是词元 id，最上面是 logits",
        "batch": "一批 B 句；源句最长 S 个词元，",
        "lengths": "目标句最长 T 个词元",
        "norm": "虚线框里的每一步：结果加上输入",
        "norm 2": "（残差），再做层归一化",
        "source": "源句的词元 id",
        "target": "开始词元与目标句的词元 id",
        "embedding": "词嵌入 × √{d_model}",
        "positions": "+ 正弦位置编码",
        "self-attention": "自注意力，{nhead} 个头",
        "cross-attention": "交叉注意力，{nhead} 个头",
        "src_pad": "掩码 src_pad",
        "causal_mask": "掩码 causal_mask",
        "feed-forward": "前馈网络，ReLU",
        "output": "线性层，权重即词嵌入",
        "memory": "memory",
        "logits": "logits",
        "encoder": "编码器 × {num_encoder_layers}",
        "decoder": "解码器 × {num_decoder_layers}",
    },
}


def picture(config: ModelConfig, language: str) -> str:
    """The content of an SVG file; `language` is "en" or "zh". y grows downwards."""
    words = {name: words.format(**vars(config)) for name, words in WORDS[language].items()}
    width = config.d_model
    widths = f"{width} → {config.dim_feedforward:,} → {width}"
    vocabulary = f"{width} → {config.target_vocab:,}"
    logits = f"{words['logits']}  (B, T, {config.target_vocab:,})"
    parts = [
        label(ENCODER, 40, words["batch"]),
        label(ENCODER, 56, words["lengths"]),
        label(ENCODER, 84, words["norm"]),
        label(ENCODER, 100, words["norm 2"]),
        # The encoder, from below.
        label(ENCODER, 430, words["source"]),
        arrow(ENCODER, 416, 396, "(B, S)"),
        box(ENCODER, 356, "embedding", words["embedding"], words["positions"]),
        frame(ENCODER, 182, 308, words["encoder"]),
        arrow(ENCODER, 356, 298, f"(B, S, {width})", y_label=336),
        box(ENCODER, 258, "attention", words["self-attention"], words["src_pad"]),
        arrow(ENCODER, 258, 242),
        box(ENCODER, 202, "feed-forward", words["feed-forward"], widths),
        # The memory, from the encoder's last layer to each cross-attention.
        label(ENCODER, 152, f"{words['memory']}  (B, S, {width})"),
        path(f"M{ENCODER} 202 V160 H200 V222 H{DECODER - BOX_WIDTH / 2:g}"),
        # The decoder, from below.
        label(DECODER, 430, words["target"]),
        arrow(DECODER, 416, 396, "(B, T)"),
        box(DECODER, 356, "embedding", words["embedding"], words["positions"]),
        frame(DECODER, 126, 308, words["decoder"]),
        arrow(DECODER, 356, 298, f"(B, T, {width})", y_label=336),
        box(DECODER, 258, "attention", words["self-attention"], words["causal_mask"]),
        arrow(DECODER, 258, 242),
        box(DECODER, 202, "attention", words["cross-attention"], words["src_pad"]),
        arrow(DECODER, 202, 186),
        box(DECODER, 146, "feed-forward", words["feed-forward"], widths),
        arrow(DECODER, 146, 86, f"(B, T, {width})", y_label=112),
        box(DECODER, 46, "output", words["output"], vocabulary),
        arrow(DECODER, 46, 26),
        label(DECODER, 18, logits),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="{FONT}" font-size="11" fill="#222">'
    )
    title = f"<title>{escape(words['title'])}</title>"
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 Z" fill="#444"/></marker>'
    )
    # White, because a page may be dark.
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, title, tip, background, *parts, "</svg>"]) + "\n"


def label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    """A line of text; `y` is its baseline."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def box(x: float, y: float, kind: str, first: str, second: str) -> str:
    """A box with two lines of text; `y` is its upper edge."""
    shape = (
        f'<rect x="{x - BOX_WIDTH / 2:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" '
        f'rx="5" fill="{COLOURS[kind]}" stroke="#666"/>'
    )
    return "\n".join([shape, label(x, y + 17, first), label(x, y + 32, second)])


def frame(x: float, top: float, bottom: float, text: str) -> str:
    """The dashed frame of the layers that repeat, with its name in the lower left corner."""
    left = x - FRAME_WIDTH / 2
    shape = (
        f'<rect x="{left:g}" y="{top:g}" width="{FRAME_WIDTH}" height="{bottom - top:g}" rx="8" '
        'fill="none" stroke="#888" stroke-dasharray="4 3"/>'
    )
    return f"{shape}\n{label(left + 4, bottom + 14, text, anchor='start')}"


def arrow(x: float, start: float, end: float, shape: str = "", y_label: float = 0) -> str:
    """An upward arrow with the shape of what flows there, to its right."""
    name = label(x + 6, y_label or (start + end) / 2 + 6, shape, anchor="start")
    line = path(f"M{x:g} {start:g} V{end:g}")
    return f"{line}\n{name}" if shape else line


def path(points: str) -> str:
    """A line with a tip at its end."""
    return f'<path d="{points}" fill="none" stroke="#444" marker-end="url(#tip)"/>'


def main() -> None:
    """Print the picture."""
    parser = argparse.ArgumentParser(description="draw the model with its shapes, as SVG")
    parser.add_argument("--language", choices=WORDS, default="en")
    arguments = parser.parse_args()
    config = ModelConfig(source_vocab=16_000, target_vocab=16_000)
    print(picture(config, arguments.language), end="")


if __name__ == "__main__":
    main()
