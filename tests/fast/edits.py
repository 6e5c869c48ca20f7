"""Changes of model.py as readers make them: each a copy of the file with a few places edited.

A new one is one more entry of EDITS. `fast` says whether decoding keeps its cache: it does unless
the decoder is of another class or `decode` looks at more than one position.
"""

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).parents[2] / "model.py"
DECODE = "self.embed(self.target_embedding, tgt_in, first),"
EMBED = "return self.dropout(scaled + self.positions[first:end])"
LOGITS = "return self.output(hidden)"
LAST_LINE_OF_INIT = "        self.initialize()\n"
TRANSFORMER = "self.transformer = build_transformer(config)"


@dataclass
class Edit:
    """One change: the texts to replace and what stands in their place."""

    name: str
    replacements: dict[str, str]
    fast: bool = True


def also_in_init(lines: str) -> dict[str, str]:
    """Lines at the end of what __init__ sets up."""
    return {LAST_LINE_OF_INIT: f"{LAST_LINE_OF_INIT}        {lines}\n"}


RMS_NORMS = """self.transformer = build_transformer(config)
        for coder in (self.transformer.encoder, self.transformer.decoder):
            coder.norm = nn.RMSNorm(config.d_model)
            for layer in coder.layers:
                layer.norm1 = nn.RMSNorm(config.d_model)
                layer.norm2 = nn.RMSNorm(config.d_model)
                if hasattr(layer, "norm3"):
                    layer.norm3 = nn.RMSNorm(config.d_model)"""
GRU = """self.transformer = build_transformer(config)
        self.transformer.encoder = nn.GRU(config.d_model, config.d_model, batch_first=True)"""
RELATIVE = """class Relative(nn.MultiheadAttention):
    def forward(self, query, key, value, **masks):
        return super().forward(query, 2 * key, value, **masks)


def sinusoids("""
HALVED = """class Halved(nn.TransformerDecoderLayer):
    def forward(self, *inputs, **masks):
        return 0.5 * super().forward(*inputs, **masks)


def sinusoids("""

EDITS = [
    Edit("nothing", {}),
    Edit("a window of 16 tokens", {"square.triu(1)": "square.triu(1) | square.tril(-16)"}),
    Edit("a window of 40 tokens", {"square.triu(1)": "square.triu(1) | square.tril(-40)"}),
    Edit(
        "a window made in decode",
        {
            "tgt_mask=self.causal_mask[first:end, :end]": "tgt_mask=self.causal_mask[first:end, "
            ":end] | torch.ones(end, end, dtype=torch.bool).tril(-9)[first:]"
        },
    ),
    Edit("no causal mask", {"tgt_mask=self.causal_mask[first:end, :end],": ""}, fast=False),
    Edit("a hint that hides the mask", {"tgt_is_causal=False": "tgt_is_causal=True"}),
    Edit(
        "a hint that hides a window",
        {
            "square.triu(1)": "square.triu(1) | square.tril(-16)",
            "tgt_is_causal=False": "tgt_is_causal=True",
        },
    ),
    Edit(
        "a window in the encoder",
        {
            "self.transformer.encoder(embedded, src": "self.transformer.encoder(embedded, "
            "self.causal_mask[: src.size(1), : src.size(1)].T.roll(3, 0), src"
        },
    ),
    Edit("a token that does not see itself", {"square.triu(1)": "square.triu(0)"}),
    Edit(
        "a source of one token hidden",
        {"memory_key_padding_mask=src_pad": "memory_key_padding_mask=src_pad | (src_pad[:, 1:2])"},
    ),
    Edit("no mask at the source", {"            memory_key_padding_mask=src_pad,\n": ""}),
    Edit(
        "halved positions and a forbidden token",
        {"+ self.positions[first:end]": "+ 0.5 * self.positions[first:end]"}
        | also_in_init("self.output.bias.data[7] = -1e9"),
    ),
    Edit(
        "learned positions",
        {
            'self.register_buffer("positions", positions, persistent=False)': "self.positions = "
            "nn.Parameter(positions)"
        },
    ),
    Edit("no positions", {"+ self.positions[first:end]": ""}),
    Edit("a changed scale", {"math.sqrt(self.config.d_model)\n": "2.0\n"}),
    Edit("dropout of words", {EMBED: "return scaled + self.positions[first:end]"}),
    Edit(
        "a norm of the embeddings",
        also_in_init("self.embedding_norm = nn.LayerNorm(config.d_model)")
        | {EMBED: "return self.embedding_norm(scaled + self.positions[first:end])"},
    ),
    Edit(
        "one embedding module",
        {
            "self.target_embedding = nn.Embedding(config.target_vocab, config.d_model)": "self."
            "target_embedding = self.source_embedding"
        },
    ),
    Edit(
        "one embedding matrix",
        also_in_init("self.source_embedding.weight = self.target_embedding.weight"),
    ),
    Edit("an output that is not tied", {"self.output.weight = self.target_embedding.weight": ""}),
    Edit(
        "an output without bias",
        {
            "nn.Linear(config.d_model, config.target_vocab)": "nn.Linear(config.d_model, "
            "config.target_vocab, bias=False)",
            "        nn.init.zeros_(self.output.bias)\n": "",
        },
    ),
    Edit(
        "a deeper output",
        {
            "self.output = nn.Linear(config.d_model, config.target_vocab)": "self.output = nn."
            "Sequential(nn.Linear(config.d_model, 96), nn.Linear(96, config.target_vocab))",
            "self.output.weight = self.target_embedding.weight": "",
            "        nn.init.zeros_(self.output.bias)\n": "",
        },
    ),
    Edit(
        "a second output head",
        also_in_init("self.second = nn.Linear(config.d_model, config.target_vocab)")
        | {LOGITS: "return self.output(hidden) + self.second(hidden)"},
    ),
    Edit(
        "a token forbidden in logits",
        {
            LOGITS: "logits = self.output(hidden)\n        logits[..., 7] = -1e9\n"
            "        return logits"
        },
    ),
    Edit("a temperature", {LOGITS: "return self.output(hidden) / 2"}),
    Edit("a norm before the output", {LOGITS: "return self.output(F.normalize(hidden, dim=-1))"}),
    Edit(
        "one layer more than the config says",
        {
            "num_decoder_layers=config.num_decoder_layers, custom": "num_decoder_layers=1 + config."
            "num_decoder_layers, custom"
        },
    ),
    Edit(
        "a layer with a wider feed-forward part",
        {
            TRANSFORMER: f"{TRANSFORMER}\n        wide = self.transformer.decoder.layers[1]\n"
            "        wide.linear1 = nn.Linear(config.d_model, 192)\n"
            "        wide.linear2 = nn.Linear(192, config.d_model)"
        },
    ),
    Edit(
        "a layer with other heads",
        {
            TRANSFORMER: f"{TRANSFORMER}\n        self.transformer.decoder.layers[1].self_attn = "
            "nn.MultiheadAttention(config.d_model, 2, batch_first=True)"
        },
    ),
    Edit("GELU", {"batch_first=True,\n": "batch_first=True,\n        activation=F.gelu,\n"}),
    Edit("RMSNorm", {TRANSFORMER: RMS_NORMS}),
    Edit(
        "a recurrent encoder",
        {
            TRANSFORMER: GRU,
            "self.transformer.encoder(embedded, src_key_padding_mask=src_pad)": "self.transformer."
            "encoder(embedded)[0]",
        },
    ),
    Edit(
        "an attention of one's own",
        {
            "def sinusoids(": RELATIVE,
            TRANSFORMER: f"{TRANSFORMER}\n        for layer in self.transformer.decoder.layers:\n"
            "            layer.multihead_attn.__class__ = Relative",
        },
        fast=False,
    ),
    Edit(
        "a decoder layer of one's own",
        {
            "def sinusoids(": HALVED,
            TRANSFORMER: f"{TRANSFORMER}\n        for layer in self.transformer.decoder.layers:\n"
            "            layer.__class__ = Halved",
        },
        fast=False,
    ),
    Edit(
        "the length of the source beside each word",
        {DECODE: f"{DECODE.rstrip(',')} + (~src_pad).sum(1)[:, None, None] / 16,"},
    ),
    Edit(
        "a hook",
        {
            TRANSFORMER: f"{TRANSFORMER}\n        self.transformer.decoder.layers[0]."
            "register_forward_hook(lambda module, inputs, output: 0.5 * output)"
        },
        fast=False,
    ),
    Edit(
        "a convolution over the target",
        also_in_init("self.convolution = nn.Conv1d(config.d_model, config.d_model, 3, padding=2)")
        | {
            DECODE: "self.convolution(self.embed(self.target_embedding, tgt_in, first)"
            ".transpose(1, 2))[:, :, :-2].transpose(1, 2),"
        },
        fast=False,
    ),
    Edit(
        "a norm at the end of hidden",
        {
            "hidden = self.decode(memory, src_pad, tgt_in)  #": "hidden = 8 * F.normalize(self."
            "decode(memory, src_pad, tgt_in), dim=-1)  #"
        },
        fast=False,
    ),
    Edit(
        "the mean of the memory beside each word",
        {DECODE: f"{DECODE.rstrip(',')} + memory.mean(1, keepdim=True),"},
        fast=False,
    ),
    Edit(
        "the signature of before",
        {
            'src_pad: Tensor, tgt_in: Tensor, first: int = 0) -> Tensor:\n        """Memory': ""
            'src_pad: Tensor, tgt_in: Tensor) -> Tensor:\n        first = 0\n        """Memory'
        },
        fast=False,
    ),
]


@cache
def edited(name: str) -> ModuleType:
    """model.py with this edit, as a module of its own."""
    (edit,) = (edit for edit in EDITS if edit.name == name)
    text = SOURCE.read_text(encoding="utf-8")
    for old, new in edit.replacements.items():
        assert text.count(old) == 1, f"{edit.name}: {text.count(old)} places have {old!r}"
        text = text.replace(old, new)
    module = ModuleType(f"model_with_{name.replace(' ', '_')}")
    sys.modules[module.__name__] = module  # where dataclasses look for it
    exec(compile(text, module.__name__, "exec"), module.__dict__)
    return module
