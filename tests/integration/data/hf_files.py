"""Writes tokenizer.json files in all the forms that test_hf.py compares, from one small trained vocabulary."""

import copy
import json
import os

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TRAINED_ON = [
    "the quick brown fox don't jump over 12 345 lazy dogs; they're in the house, in 2024!  And  again\n\n",
    "été à la plage naïve cafés, Ünïcode ångström, привет мир, 漢字かな交じり文, 가나다 라마바 \t tabs\r\n",
] * 3


def small():
    """The description of a byte-level BPE with 700 tokens."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    t.train_from_iterator(TRAINED_ON, trainer)
    return json.loads(t.to_str())


def added(content, i, **options):
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    return {"id": i, "content": content, **flags, **options}


def byte_level(**options):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False, **options}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(*parts):
    return {"type": "Sequence", "pretokenizers": [*parts, byte_level()]}


def template(before, after):
    ids = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in before + after}
    names = lambda pairs: [{"SpecialToken": {"id": name, "type_id": 0}} for name, _ in pairs]
    single = names(before) + [{"Sequence": {"id": "A", "type_id": 0}}] + names(after)
    return {"type": "TemplateProcessing", "single": single, "pair": single + [{"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": ids}


BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")

PATTERNS = (
    r"\s+", r"\d", r"\w+|[^\w\s]+", r"\b", r"[0-9]{2}", r"[a-c]*", r"(?i:THE|don't|k)", r"\p{Lu}?\p{Ll}+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[一-龥぀-ゟ゠-ヿ]+", r"\p{N}{1,3}", r"(?<=\d)(?=(?:\d{3})+(?!\d))", r"^.|.$", r"\S", r"[\S\n]{,3}", r"x{2}+|e{1,2}+",
    r"(?>a|ab)c|\h{3}", r"[\x{61}-\x7a&&&]|é" .replace("&&&", "&"), r"(?m:a.b)|a.b", r"\P{L}+", r"[^\P{L}e]+", r"\w{2}\B",
    r"\p{Han}+|\p{^L}", r"(t|th)(?:e)|q", r"[\]\[^-]+|-", r"\AThe|\z|!\Z", r"\s+$",
)


def forms():
    """(name, description) of every form that is provided."""
    base = small()
    n = len(base["model"]["vocab"])

    def form(name, **changes):
        d = copy.deepcopy(base)
        d.update(post_processor=None, decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True})
        d["model"].update(changes.pop("model", {}))
        d.update(changes)
        return name, d

    pairs = [m.split(" ") if isinstance(m, str) else m for m in base["model"]["merges"]]
    yield form("merges as pairs", model={"merges": pairs})
    yield form("merges as texts", model={"merges": [" ".join(m) for m in pairs]})
    name, backwards = form("merges before vocab, type behind them")
    backwards["model"] = dict(reversed(backwards["model"].items()))
    yield name, backwards
    yield form("ignore_merges", model={"ignore_merges": True, "merges": pairs[: len(pairs) // 2]})
    yield form("a prefix space", pre_tokenizer=byte_level(add_prefix_space=True, use_regex=True))
    yield form("no pattern", pre_tokenizer=byte_level())
    yield form("digits", pre_tokenizer=sequence({"type": "Digits", "individual_digits": True}))
    yield form("digits together", pre_tokenizer=sequence({"type": "Digits", "individual_digits": False}))
    yield form("digits, then GPT-2's pattern", pre_tokenizer={"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)]})
    yield form("a text as pattern", pre_tokenizer=sequence(split("the", "MergedWithNext", kind="String"), split(".*+?(", kind="String")))
    yield form("three patterns", pre_tokenizer=sequence(split(r"\p{N}{1,3}"), split(PATTERNS[9]), split(PATTERNS[8])))
    for pattern in PATTERNS:
        for behavior in BEHAVIORS:
            for invert in (False, True) if behavior in ("Removed", "MergedWithNext") else (False,):
                yield form(f"{pattern} {behavior} {invert}", pre_tokenizer=sequence(split(pattern, behavior, invert)))
    yield form("ids around the text", post_processor=template([("<s>", n), ("b", 5)], [("</s>", n + 1)]),
               added_tokens=[added("<s>", n), added("</s>", n + 1)])
    yield form("processors in a row", post_processor={"type": "Sequence", "processors": [
        byte_level(), template([("<s>", n)], [])]}, added_tokens=[added("<s>", n)])
    yield form("added tokens of all kinds", normalizer={"type": "NFC"}, added_tokens=[
        added("<s>", n), added("<|x|>", n + 1, lstrip=True), added("<|y|>", n + 2, rstrip=True),
        added("<|z|>", n + 3, lstrip=True, rstrip=True), added("fox", n + 4, single_word=True, special=False),
        added("été", n + 5, normalized=True, special=False), added("e\u0301te\u0301s", n + 6, normalized=True, special=False),
        added("<s><s>", n + 7), added("qz", n + 8, special=False), added("a b", n + 9, special=False),
        added("漢", n + 10, single_word=True, special=False, normalized=True), added(" ", n + 11, special=False, single_word=True),
    ])
    yield form("an added token that the model has", added_tokens=[
        added("the", base["model"]["vocab"]["the"], special=False), added("<pad>", n)])
    yield form("NFC in a sequence", normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]})


def sets():
    """The sets of characters that patterns name, each as a pattern of its own."""
    for pattern in (r"\w", r"[\p{P}\p{S}\s]|(?i:[k's])"):
        description = small()
        description["pre_tokenizer"] = sequence(split(pattern))
        yield f"every code point and {pattern}", description


def refused():
    """(what the error names, description)"""
    base = small()

    def form(what, **changes):
        d = copy.deepcopy(base)
        d["model"].update(changes.pop("model", {}))
        d.update(changes)
        return what, d

    for kind in ("Lowercase", "NFKC", "NFD", "Strip", "Prepend", "Replace", "Precompiled"):
        yield form(f"normalizer {kind}", normalizer={"type": kind})
    for kind in ("Whitespace", "WhitespaceSplit", "Metaspace", "BertPreTokenizer", "Punctuation", "UnicodeScripts"):
        yield form(f"pre_tokenizer {kind}", pre_tokenizer={"type": kind})
    yield form("pre_tokenizer null", pre_tokenizer=None)
    yield form("pre_tokenizer Split without ByteLevel", pre_tokenizer=split("a"))
    for pattern in ({"Regex": None, "String": " "}, {"Regex": 5}, {"String": None}, {}):
        yield form("no Regex or String", pre_tokenizer=sequence({**split("a"), "pattern": pattern}))
    yield form("behind ByteLevel", pre_tokenizer={"type": "Sequence", "pretokenizers": [byte_level(), split("a")]})
    yield form("add_prefix_space behind", pre_tokenizer={"type": "Sequence", "pretokenizers": [
        split("a"), byte_level(add_prefix_space=True)]})
    for kind in ("RobertaProcessing", "BertProcessing"):
        yield form(f"post_processor {kind}", post_processor={"type": kind})
    for kind in ("WordPiece", "Metaspace", "BPEDecoder", "ByteFallback"):
        yield form(f"decoder {kind}", decoder={"type": kind})
    for kind in ("WordPiece", "Unigram", "WordLevel"):
        yield form(f"type {kind}", model={"type": kind})
    yield form("dropout", model={"dropout": 0.1})
    yield form("continuing_subword_prefix", model={"continuing_subword_prefix": "##"})
    yield form("continuing_subword_prefix", model={"continuing_subword_prefix": "##", "merges": [["a", "##b"]]})
    yield form("end_of_word_suffix", model={"end_of_word_suffix": "</w>"})
    yield form("no token for byte", model={"vocab": {k: v for k, v in base["model"]["vocab"].items() if k != "Ġ"}})
    yield form("merges, entry 0", model={"merges": [["a", "zz"]]})
    for pattern, what in ((r"(?i:ss)", "ss, st"), (r"\X", "escape"), (r"(a)\1", "escape"), (r"[a&&b]", "&&"), (r"(?i)a", "option"),
                          (r"[[:alpha:]]", "class in a class"), (r"a**", "repetition"), (r"(?<n>a)", "kind of group"), ("(", ")"),
                          (r"\p{Alpha}", r"\p{...}"), ("[a", "]"), ("a{3,1}", "interval"),
                          ("a{2}{3}", "repetition"), ("a{123456}", "interval")):
        yield form(what, pre_tokenizer=sequence(split(pattern)))


def write(folder, description, **beside):
    os.makedirs(folder, exist_ok=True)
    for name, content in {"tokenizer": description, **beside}.items():
        with open(f"{folder}/{name}.json", "w", encoding="utf-8") as out:
            json.dump(content, out, ensure_ascii=False)
