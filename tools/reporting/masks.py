"""Print the masks of a batch of two toy pairs, and what the model combines of them.

python -m tools.reporting.masks                # explained in Chinese
python -m tools.reporting.masks --language en  # explained in English
"""

from dataclasses import dataclass

import torch

from data import Collate
from engine.config import flag, parse_flags
from engine.tables import padded_to
from model import ModelConfig, make_translator

WORDS = "<pad> <s> </s> 我 爱 你 好 I love you hello".split()  # the index is the token's id
SPECIAL = {"pad": 0, "bos": 1, "eos": 2}
PAIRS = [([3, 4, 5], [7, 8, 9]), ([5, 6], [10])]  # 我爱你 -> I love you; 你好 -> hello

CHINESE = {
    "sizes": "B = {B} 个句对，S = {S} 个源词元，T = {T} 个目标词元，N = {N} 个要预测的词元\n"
    "掩码中 1（True）表示看不见，0 表示看得见；与分词器的 attention_mask 相反",
    "src": "src (B, S)：句子、</s>、填充",
    "src_pad": "src_pad (B, S)：哪些位置是填充",
    "tgt": "tgt_in 与 tgt_out (B, T)：同一句错开一位，每个位置预测它正下方的词；填充处不计损失",
    "positions": "  tgt_out 只保存 N 个真实的词元；"
    "它们在 B·T 个位置中的序号 target_positions (N,)：",
    "causal_mask": "causal_mask (T, T)：行是做预测的位置，列是 tgt_in 的位置；后面的词看不见",
    "combined": "模型对句对 B1 合并使用的掩码",
    "encoder": "编码器自注意力 (S, S) = src_pad，每行相同",
    "decoder": "解码器自注意力 (T, T) = causal_mask；填充在句末，因果掩码已经遮住它",
    "cross": "交叉注意力 (T, S) = src_pad；行是 tgt_in，列是 src",
}
ENGLISH = {
    "sizes": "B = {B} pairs, S = {S} source tokens, T = {T} target tokens, N = {N} to predict\n"
    "In a mask, 1 (True) hides a position and 0 shows it: the opposite of a tokenizer's "
    "attention_mask",
    "src": "src (B, S): sentence, </s>, padding",
    "src_pad": "src_pad (B, S): which positions are padding",
    "tgt": "tgt_in and tgt_out (B, T): the same sentence shifted by one; each position predicts "
    "the word below it, padding has no loss",
    "positions": "  tgt_out holds only the N real tokens; "
    "target_positions (N,) are their positions in B·T: ",
    "causal_mask": "causal_mask (T, T): rows predict, columns are the positions of tgt_in that "
    "they see; later words are hidden",
    "combined": "What the model combines for pair B1",
    "encoder": "encoder self-attention (S, S) = src_pad, the same in each row",
    "decoder": "decoder self-attention (T, T) = causal_mask, which also hides the padding",
    "cross": "cross-attention (T, S) = src_pad; rows are tgt_in, columns are src",
}


@dataclass
class Config:
    """The settings of this page."""

    language: str = flag("zh", "language of the explanations (zh|en)", "Options")


def explain_masks(language: str) -> None:
    """Print the batch, each mask with its axes labelled, and what the model combines."""
    texts = CHINESE if language == "zh" else ENGLISH
    batch = Collate(SPECIAL, SPECIAL)(PAIRS)
    B, S = batch.src.shape
    T = batch.tgt_in.size(1)
    model = make_translator(
        ModelConfig(len(WORDS), len(WORDS), d_model=8, dim_feedforward=8, max_length=8)
    )
    tgt_out = torch.full((B * T,), SPECIAL["pad"])  # as in tgt_in, where nothing is predicted
    tgt_out[batch.target_positions] = batch.tgt_out

    src = words_of(batch.src)
    tgt_in = words_of(batch.tgt_in)
    tgt_out = words_of(tgt_out.view(B, T))
    src_pad = batch.src_pad.int().tolist()
    causal_mask = model.causal_mask[:T, :T].int().tolist()

    pairs = [f"B{b}" for b in range(B)]
    source_labels = [f"S{s}" for s in range(S)]
    target_labels = [f"T{t}" for t in range(T)]
    print(texts["sizes"].format(B=B, S=S, T=T, N=len(batch.tgt_out)))
    table(texts["src"], source_labels, pairs, src)
    table(texts["src_pad"], source_labels, pairs, src_pad)
    labels = [f"{name} {pair}" for pair in pairs for name in ("in ", "out")]
    shifted = [row for both in zip(tgt_in, tgt_out) for row in both]
    table(texts["tgt"], target_labels, labels, shifted)
    print(f"{texts['positions']}{batch.target_positions.tolist()}")
    table(texts["causal_mask"], tgt_in[0], tgt_in[0], causal_mask)

    print(f"\n{texts['combined']}")
    src, tgt_in, padding = src[1], tgt_in[1], src_pad[1]
    table(texts["encoder"], src, src, [padding] * S)
    table(texts["decoder"], tgt_in, tgt_in, causal_mask)
    table(texts["cross"], src, tgt_in, [padding] * T)


def words_of(ids: torch.Tensor) -> list[list[str]]:
    """The words of a batch of ids."""
    return [[WORDS[token] for token in row] for row in ids.tolist()]


def table(title: str, columns: list[str], labels: list[str], rows: list[list]) -> None:
    """Print a title, a line of column names, and a line for each row."""
    print(f"\n{title}")
    for cells in [["", *columns], *([label, *row] for label, row in zip(labels, rows))]:
        print("  " + "".join(padded_to(8, str(cell)) for cell in cells).rstrip())


if __name__ == "__main__":
    explain_masks(parse_flags(Config, "the masks of a toy batch").language)
