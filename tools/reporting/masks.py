"""`python -m tools.reporting.masks`: which place sees which, in a batch of two toy pairs."""

import unicodedata

import torch

WORDS = "<pad> <s> </s> 我 爱 你 好 I love you hello".split()  # an id is the place in this list
PAIRS = [([3, 4, 5], [7, 8, 9]), ([5, 6], [10])]  # 我爱你 → I love you; 你好 → hello


def explain_masks() -> None:
    """Print the batch, each mask with its axes labelled, and what the model combines."""
    from data import Collate
    from model import ModelConfig, Translator

    special = {"pad": 0, "bos": 1, "eos": 2}
    batch = Collate(special, special)(PAIRS)
    model = Translator(
        ModelConfig(len(WORDS), len(WORDS), d_model=8, dim_feedforward=8, max_length=8)
    )
    (B, S), T = batch.src.shape, batch.tgt_in.size(1)
    predicted = (
        torch.full((B * T,), special["pad"]).index_copy(0, batch.real, batch.tgt_out).view(B, T)
    )
    src, tgt_in, tgt_out = (
        [[WORDS[token] for token in row] for row in ids.tolist()]
        for ids in (batch.src, batch.tgt_in, predicted)
    )
    pairs, places = [f"B{row}" for row in range(B)], [f"S{s}" for s in range(S)]
    src_pad, causal = batch.src_pad.int().tolist(), model.causal_mask[:T, :T].int().tolist()

    print(
        f"B {B} 句对 pairs, S {S} 源 source tokens, T {T} 目标 target tokens, N {len(batch.tgt_out)} 要预测的 to predict\n"
        "掩码 masks: 1 = True = 看不见 may not be seen, 0 = 看得见 may be seen；"
        "与分词器的 attention_mask 相反 · the opposite of a tokenizer's attention_mask"
    )
    table("src (B, S)：句子、</s>、再补齐 · sentence, </s>, padding", places, pairs, src)
    table("src_pad (B, S)：补齐的位置 · where the padding is", places, pairs, src_pad)
    table(
        "tgt_in 与 and tgt_out (B, T)：同一句错开一位，每个位置预测下面的词；补齐处不算损失\n"
        "  the same sentence shifted by one: each place predicts the word below it; padding has no loss",
        [f"T{t}" for t in range(T)],
        [f"{name} {pair}" for pair in pairs for name in ("in ", "out")],
        [row for both in zip(tgt_in, tgt_out) for row in both],
    )
    print(
        "  tgt_out 只存 N 个真的词 · holds the N real ones alone; real (N,) = 在 B·T 中的位置 places: "
        f"{batch.real.tolist()}"
    )
    table(
        "causal_mask (T, T)：行 = 预测的位置，列 = tgt_in 中被看的位置，后面的看不见\n"
        "  row: the place that predicts; column: the place in tgt_in that it looks at, none after itself",
        tgt_in[0],
        tgt_in[0],
        causal,
    )

    src, tgt_in, pad = src[-1], tgt_in[-1], src_pad[-1]  # of the shorter pair
    print(f"\n合起来 combined, 句对 pair {pairs[-1]}")
    table(
        "编码器自注意力 encoder self-attention (S, S) = src_pad, 每行相同 the same in each row",
        src,
        src,
        [pad] * S,
    )
    table(
        "解码器自注意力 decoder self-attention (T, T) = causal_mask；补齐在句末，因果掩码已经挡住它\n"
        "  padding stands at the end of the sentence, where the causal mask hides it already",
        tgt_in,
        tgt_in,
        causal,
    )
    table(
        "交叉注意力 cross-attention (T, S) = src_pad, 行 row: tgt_in, 列 column: src",
        src,
        tgt_in,
        [pad] * T,
    )


def table(title: str, columns: list[str], labels: list[str], rows: list[list]) -> None:
    """A title, a line of column names, and a line for each row."""
    print(f"\n{title}")
    for cells in [["", *columns], *([label, *row] for label, row in zip(labels, rows))]:
        print("  " + "".join(padded(str(cell)) for cell in cells).rstrip())


def padded(text: str, width: int = 8) -> str:
    """Up to `width` columns of a terminal, where a Chinese character takes two."""
    return text + " " * (
        width - sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in text)
    )


if __name__ == "__main__":
    explain_masks()
