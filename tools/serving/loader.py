import ctranslate2
from transformers import AutoTokenizer

source, target = (
    AutoTokenizer.from_pretrained(".", subfolder=side) for side in ("source", "target")
)
translator = ctranslate2.Translator(".")
# As for the training data: control characters are spaces; no marks of writing direction, nothing
# of zero width, no ▁.
cleaned = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], " ")
removed = [0xAD, 0x200B, 0x2060, 0xFEFF, 0x200E, 0x200F, *range(0x202A, 0x202F)]
cleaned |= dict.fromkeys([*removed, *range(0x2066, 0x206A)]) | {0x2581: "_"}
stdin = open(0, encoding="utf-8-sig", newline="\n")
lines = [" ".join(line.translate(cleaned).split()) for line in stdin]
plain = dict(add_special_tokens=False, split_special_tokens=True)  # "<s>" in a text is text
words = [source.convert_ids_to_tokens(source.encode(line, **plain)) for line in lines]
options = dict(
    beam_size=1,
    max_batch_size=64,
    max_input_length=512,
    min_decoding_length=0,
    max_decoding_length=512,
)
for line, result in zip(lines, translator.translate_batch(words, **options)):
    ids = target.convert_tokens_to_ids(result.hypotheses[0])
    print(target.decode(ids, skip_special_tokens=True) if line else "")
