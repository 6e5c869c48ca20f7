"""The forms of words in the sample grammar: word classes, English inflection, numbers, and small phrases.

Nothing is run here; lexicon.py builds its tables with these.  To write the data set:

    python sample/write_sample.py

A word is an object with two sides: str(word) is the Chinese one, word.en the English one.  English words also carry
the forms that a sentence may ask for (word.past, word.plural, person.object, ...).
"""

from dataclasses import dataclass

# ---------------------------------------------------------------------------------------------------- word classes


@dataclass(frozen=True)
class Word:
    zh: str
    en: str

    def __str__(self):
        return self.zh


@dataclass(frozen=True)
class Person(Word):
    object: str  # "me" in "Tom called me"
    possessive: str  # "Tom's" in "This is Tom's book"
    own: str  # "his" in "Tom lost his phone"
    pronoun: Word  # 他 / he, to mention the same person again
    agreement: int  # which form of "am|are|is" goes with this subject: 0, 1 or 2


@dataclass(frozen=True)
class Noun(Word):
    measure: str  # 本 in 一本书
    plural: str  # "cups of coffee"
    kind: str  # what one likes in general: "coffee", "books"


@dataclass(frozen=True)
class Place(Word):
    at: str  # "in the library", "at the bank"


@dataclass(frozen=True)
class Activity(Word):
    present: str  # "play|plays chess": the subject chooses one of the two
    past: str
    participle: str
    gerund: str


@dataclass(frozen=True)
class Separable(Activity):
    verb: str  # 打 and 球 in 打了两个小时球: the time goes between the two
    object: str


@dataclass(frozen=True)
class Country(Word):
    language: Word


@dataclass(frozen=True)
class Adjective(Word):
    comparative: str
    superlative: str


@dataclass(frozen=True)
class Described:
    noun: Word
    quality: Word  # one that is sensible for this noun

    def __str__(self):
        return self.noun.zh


@dataclass(frozen=True)
class Clock(Word):
    hour: str  # "half past eight"
    part: str  # "evening"


@dataclass(frozen=True)
class Manner(Word):
    adverb: Adjective  # 快 in 跑得快


# ------------------------------------------------------------------------------------------------ English morphology

IRREGULAR_PAST = {
    "buy": "bought",
    "do": "did",
    "drink": "drank",
    "drive": "drove",
    "eat": "ate",
    "get": "got",
    "go": "went",
    "have": "had",
    "make": "made",
    "read": "read",
    "ride": "rode",
    "run": "ran",
    "see": "saw",
    "sing": "sang",
    "sleep": "slept",
    "speak": "spoke",
    "swim": "swam",
    "take": "took",
    "write": "wrote",
}
# Only the participles that differ from the past form.
IRREGULAR_PARTICIPLE = {
    "do": "done",
    "drink": "drunk",
    "drive": "driven",
    "eat": "eaten",
    "go": "gone",
    "ride": "ridden",
    "run": "run",
    "see": "seen",
    "sing": "sung",
    "speak": "spoken",
    "swim": "swum",
    "take": "taken",
    "write": "written",
}
DOUBLED_CONSONANT = {"get", "run", "swim"}
VOWELS = "aeiou"


def add_s(word):
    """Plural of a noun, third person of a verb: box -> boxes, study -> studies, play -> plays."""
    if word.endswith(("s", "x", "ch", "sh", "o")):
        return word + "es"
    if word.endswith("y") and word[-2] not in VOWELS:
        return word[:-1] + "ies"
    return word + "s"


def third_person(verb):
    return "has" if verb == "have" else add_s(verb)


def past(verb):
    if verb in IRREGULAR_PAST:
        return IRREGULAR_PAST[verb]
    if verb.endswith("y") and verb[-2] not in VOWELS:
        return verb[:-1] + "ied"
    return verb + "d" if verb.endswith("e") else verb + "ed"


def participle(verb):
    return IRREGULAR_PARTICIPLE.get(verb) or past(verb)


def gerund(verb):
    if verb in DOUBLED_CONSONANT:
        return verb + verb[-1] + "ing"
    return verb[:-1] + "ing" if verb.endswith("e") else verb + "ing"


def with_article(phrase):
    """a book, an apple, an hour; no word of ours is like "a university"."""
    vowel_sound = phrase[0].lower() in VOWELS or phrase.startswith("hour")
    return ("an " if vowel_sound else "a ") + phrase


# --------------------------------------------------------------------------------------------------- short builders


def words(*pairs):
    return [Word(zh, en) for zh, en in pairs]


def named(zh, en, own):
    """A person in the third person; `own` ("his" or "her") tells the gender."""
    pronoun = Word("他", "he") if own == "his" else Word("她", "she")
    return Person(zh, en, en, en + "'s", own, pronoun, 2)


def noun(zh, measure, en):
    """A countable noun: 本 书 / book, books."""
    return Noun(zh, en, measure, add_s(en), add_s(en))


def portion(zh, measure, unit, kind):
    """A noun that English counts by a unit: 杯 咖啡 / cup of coffee, cups of coffee."""
    return Noun(zh, f"{unit} of {kind}", measure, f"{add_s(unit)} of {kind}", kind)


def activity(zh, en):
    """A verb phrase; its first English word is the verb and is the one that changes."""
    verb, space, rest = en.partition(" ")
    tail = space + rest
    present = f"{verb}|{third_person(verb)}{tail}"
    return Activity(
        zh, en, present, past(verb) + tail, participle(verb) + tail, gerund(verb) + tail
    )


def activities(*pairs):
    return [activity(zh, en) for zh, en in pairs]


def separable(verb, object, en):
    whole = activity(verb + object, en)
    return Separable(
        whole.zh, en, whole.present, whole.past, whole.participle, whole.gerund, verb, object
    )


def adjective(zh, en, comparative=""):
    """Without a written comparative the word takes "more" and "most"."""
    if not comparative:
        return Adjective(zh, en, f"more {en}", f"most {en}")
    superlative = {"better": "best"}.get(comparative) or comparative[:-1] + "st"
    return Adjective(zh, en, comparative, superlative)


def described(nouns, adjectives):
    return [Described(each, quality) for each in nouns for quality in adjectives]


# -------------------------------------------------------------------------------------------------------- numbers

ENGLISH_SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
ENGLISH_TENS = [
    "",
    "",
    "twenty",
    "thirty",
    "forty",
    "fifty",
    "sixty",
    "seventy",
    "eighty",
    "ninety",
]
ENGLISH_ORDINALS = [
    "",
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
]
CHINESE_DIGITS = "零一二三四五六七八九"


def english_number(number):
    """325 -> three hundred and twenty-five; from 0 to 9999."""
    if number < 20:
        return ENGLISH_SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return ENGLISH_TENS[tens] + (f"-{ENGLISH_SMALL[ones]}" if ones else "")
    unit, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    head, rest = divmod(number, unit)
    joint = " and " if rest < 100 else " "
    return f"{english_number(head)} {name}" + (joint + english_number(rest) if rest else "")


def chinese_numeral(number):
    """325 -> 三百二十五; as read in dates and ordinals, where 2 is 二."""
    if number < 10:
        return CHINESE_DIGITS[number]
    unit, name = next(
        (unit, name) for unit, name in ((1000, "千"), (100, "百"), (10, "十")) if number >= unit
    )
    head, rest = divmod(number, unit)
    if unit == 10:
        return (
            ("" if head == 1 else CHINESE_DIGITS[head])
            + name
            + (CHINESE_DIGITS[rest] if rest else "")
        )
    start = ("两" if head == 2 else CHINESE_DIGITS[head]) + name
    gap = "零" if 0 < rest < unit // 10 else ""
    one = "一" if 10 <= rest < 20 else ""  # 十二 alone, but 一百一十二
    return start + gap + one + (chinese_numeral(rest) if rest else "")


def chinese_number(number):
    """The same before a measure word, where 2 is 两: 两本书."""
    return "两" if number == 2 else chinese_numeral(number)


def numbers(*values):
    return [Word(chinese_number(value), english_number(value)) for value in values]


# ------------------------------------------------------------------------------------------- nouns within phrases


def counted(nouns, *values):
    """一本书 / a book, 两本书 / two books, ..."""
    return [
        Word(
            chinese_number(value) + each.measure + each.zh,
            with_article(each.en) if value == 1 else f"{english_number(value)} {each.plural}",
        )
        for each in nouns
        for value in values
    ]


def single(nouns):
    """没有猫 / not have a cat: Chinese says the bare noun."""
    return [Word(each.zh, with_article(each.en.removeprefix("the "))) for each in nouns]


def pointed(nouns):
    """这本书 / this book and 那本书 / that book."""
    return [
        Word(zh + each.measure + each.zh, f"{en} {each.en}")
        for each in nouns
        for zh, en in [("这", "this"), ("那", "that")]
    ]
