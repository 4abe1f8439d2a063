"""Write tests/fixtures/tokenizer.json: two small vocabularies, and llama.cpp's ids of texts.

    python scripts/make_tokenizer_fixtures.py --tokenize PATH/llama-tokenize [--check]

The vocabularies are trained on the texts themselves without cutting them first, so merges reach
over every place where a pre-tokenizer may cut: a cut more or less changes the ids. Each text is
asked for under each name in `tokenizer.ggml.pre` that headrace knows, and with the sentencepiece
vocabulary. With --check the ids are made anew, from the vocabularies present, and compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from headrace.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, TokenType
from headrace.checkpoint.gguf_writer import GgufLayout, write_gguf

FIXTURE = Path(__file__).parent.parent / "tests" / "fixtures" / "tokenizer.json"
SENTENCEPIECE = "sentencepiece"
CONTROL = ("<|start|>", "<|end|>", "<s>")
USER_DEFINED = ("<tool>", "    ")

# Two or three characters of every general category, the last ones outside the basic plane if any.
CATEGORIES = {
    "Cc": "\x01\x1f\x7f\x85",
    "Cf": "\u00ad\u200d\u202e\U000e0041",
    "Co": "\ue000\U000f0000",
    "Cn": "\u0378\U0001fffe",
    "Ll": "e\u00df\u0451\U0001d41a",
    "Lm": "\u02b0\u3005\u30fc",
    "Lo": "\u00aa\u05d0\u4e2d\u304b\uac00\U00020000",
    "Lt": "\u01c5\u1f88",
    "Lu": "E\u00c4\u0416\U0001d400",
    "Mc": "\u0903\u0bbe",
    "Me": "\u0488\u20e3",
    "Mn": "\u0301\u094d\u05bc\U000e0100",
    "Nd": "7\u0663\uff15\U0001d7d8",
    "Nl": "\u2167\u3007",
    "No": "\u00b2\u00bd\u2460",
    "Pc": "_\u203f",
    "Pd": "-\u2014",
    "Pe": ")\u300d",
    "Pf": "\u00bb\u2019",
    "Pi": "\u00ab\u2018",
    "Po": "!'\u00bf\u3002\U0001107f",
    "Ps": "(\u300c\u201a",
    "Sc": "$\u20ac",
    "Sk": "^`\u00b4\U0001f3fb",
    "Sm": "+<\u2211\u00d7",
    "So": "\u00a9\u2603\U0001f600",
    "Zl": "\u2028",
    "Zp": "\u2029",
    "Zs": " \u00a0\u1680\u2003\u202f\u3000",
}
SPACES = "\t\n\x0b\x0c\r \x85\u00a0\u200b\u2028\u2029\u3000\ufeff"
TEXTS = (
    "",
    " ",
    "a",
    "Hello, world! How are you?",
    " leading",
    "trailing ",
    "two  spaces",
    "a   b",
    "   three before",
    "a\nb",
    "a\n\nb",
    "a \n b",
    "a\r\nb\r\n\r\nc",
    "\n\n\n",
    "\t\tx\t y",
    "line\n    indented\n\n\tTab \n",
    "x\n \ny",
    "    four and eight        spaces",
    "it's I'm you're we've he'd she'll don't",
    "IT'S I'M YOU'RE WE'VE HE'D SHE'LL DON'T",
    "'s 'S 'sa 'tis 'lll '' ' 't't",
    "it\u2019s we\u2019ll",
    "o'clock rock'n'roll O'Neill's",
    "1 12 123 1234 12345 123456 1234567",
    "3.14159 1,000,000 2024-12-31 0x1F 1e-9",
    "a1b22c333d4444",
    "\u0661\u0662\u0663\u0664 \u0967\u0968\u0969\u096a \u2167\u2168 \u00bd\u00bd\u00bd\u00bd",
    "camelCase HTTPServer iPhone XMLHttpRequest \u00c9tat\u00c9TAT \u0410\u0411\u0432\u0433\u0414",
    "def f(x):\n    return x**2 + 1  # square\n\n\nclass A:\n\tpass",
    "a//b /* c */ <tag/>\n/path/to/file\n",
    "!!! ??? ... ---\n===\n",
    "a_b __init__ $x @y #z %w ^v &u *t",
    '(a)[b]{c}<d>"e"`f`',
    "caf\u00e9 na\u00efve r\u00e9sum\u00e9",
    "cafe\u0301 nai\u0308ve \u1e9b\u0323 \u0344",
    "e\u0301\u0301 \u0301alone a\u0301b\u0302c 1\u0301 !\u0301 \u0301\u0301\u0301",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "\u0645\u064e\u0631\u0652\u062d\u064e\u0628\u064b\u0627",
    "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002123\u4e2d\u6587abc",
    "\u3053\u3093\u306b\u3061\u306f\u30ab\u30bf\u30ab\u30ca\u30fc \u6f22\u5b57",
    "\ud55c\uad6d\uc5b4 \uac00\ub098\ub2e4 \u1112\u1161\u11ab",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5",
    "\U0001f600\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd 1\ufe0f\u20e3 \u2764\ufe0f",
    "\ufeffmark",
    "a\u200bb\u200cc\u200dd",
    "\u202eabc\u202c \U000e0041",
    "\ufffd\ufffe \ufdd0",
    "<|start|>user\nHi<|end|>\n<|start|>",
    "a<|end|>b <|end|> c",
    "<|end|><|end|>\n\n<s> x",
    "<|End|> <|end <tool>x</tool> a<tool>",
    "<s>",
    "\x02a",
    "A\u00a0B\u2003C\u3000D",
    "\u00a0\u00a0 \u2003\n\u3000\u3000x",
    "\u2028\u2029x\u2028",
    "na\u0131ve \u0130stanbul \u017f 'D 'L 'RE 'VE",
    "\u01c5\u01c5a \u1f88\u03b1",
    "x\u00b2+y\u00b3=z\u2074 \u00bc",
    "\u4e00\u9fa5\u9fa6\u3040\u30ff\u3400 \u4e00a\u9fa51\u30ff!",
    "a\u0488b \u20e3\u20e3 \u0903\u0903x",
)


def texts() -> list[str]:
    """Every category between letters, alone and between digits; every space in runs; and TEXTS."""
    found = [
        f"a{c}b {c}{c} 1{c}2 {c}a A{c} !{c}" for chars in CATEGORIES.values() for c in chars
    ] + [f"a{c}b{c}{c}c {c} {c}\n{c}{c}{c}1{c}" for c in SPACES]
    return [*found, *TEXTS]


def byte_level_metadata(training: list[str]) -> dict[str, Any]:
    """A byte-level vocabulary whose merges reach over spaces, digits, signs and lines."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(training, trainer)
    model = json.loads(core.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = list(dict.fromkeys([*CONTROL, *USER_DEFINED, *pieces]))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": token_types(tokens),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
    }


def sentencepiece_metadata(training: list[str]) -> dict[str, Any]:
    """A sentencepiece vocabulary of pieces with scores; rarer characters are bytes."""
    core = tokenizers.Tokenizer(models.BPE())
    core.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(
        vocab_size=500, min_frequency=1, limit_alphabet=120, show_progress=False
    )
    core.train_from_iterator(training, trainer)
    vocab = json.loads(core.to_str())["model"]["vocab"]
    pieces = [p for p in sorted(vocab, key=vocab.__getitem__) if "\n" not in p]
    first = ["<unk>", *CONTROL, *USER_DEFINED, *(f"<0x{b:02X}>" for b in range(256))]
    tokens = list(dict.fromkeys([*first, *pieces]))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": token_types(tokens),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        "tokenizer.ggml.unknown_token_id": 0,
    }


def token_types(tokens: list[str]) -> list[int]:
    """What each token is, as GGUF counts."""
    types = {"<unk>": TokenType.UNKNOWN} | dict.fromkeys(CONTROL, TokenType.CONTROL)
    types |= dict.fromkeys(USER_DEFINED, TokenType.USER_DEFINED)
    types |= {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    return [int(types.get(token, TokenType.NORMAL)) for token in tokens]


def llamacpp_ids(tokenize: Path, metadata: Mapping[str, Any], cases: list[str]) -> list[list[int]]:
    """What llama.cpp makes of each text, its bos token included."""
    with tempfile.TemporaryDirectory() as folder:
        vocab, prompt = Path(folder, "vocab.gguf"), Path(folder, "text")
        content = {"general.architecture": "llama", **metadata}
        with write_gguf(vocab, GgufLayout(content, [])):
            pass
        command = [str(tokenize), "-m", str(vocab), "-f", str(prompt), "--ids", "--no-escape"]
        found = []
        for case in cases:
            prompt.write_bytes(case.encode())
            done = subprocess.run(command, capture_output=True)
            if done.returncode:
                raise SystemExit(f"{tokenize} failed\n{done.stderr.decode()[-2000:]}")
            found.append(json.loads(done.stdout))
    return found


def vocabularies(fixture: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Each name of a fixture, its metadata, and whether llama.cpp must be given NFC."""
    for name, known in PRE_TOKENIZERS.items():
        yield name, {**fixture["byte_level"], "tokenizer.ggml.pre": name}, known.has_nfc
    yield SENTENCEPIECE, fixture[SENTENCEPIECE], False


def answers(tokenize: Path, fixture: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each text the ids, and the names of the vocabularies that give them."""
    cases = [{"text": text, "ids": []} for text in texts()]
    for name, metadata, has_nfc in vocabularies(fixture):
        inputs = [unicodedata.normalize("NFC", t) if has_nfc else t for t in texts()]
        for case, ids in zip(cases, llamacpp_ids(tokenize, metadata, inputs), strict=True):
            same = next((item for item in case["ids"] if item[1] == ids), None)
            if same is None:
                case["ids"].append([[name], ids])
            else:
                same[0].append(name)
    return cases


def main() -> int:
    """Write the fixture, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenize", type=Path, required=True, help="llama.cpp's program")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args()
    if args.check:
        present = json.loads(FIXTURE.read_text())
        same = answers(args.tokenize, present) == present["cases"]
        print("equal" if same else "llama.cpp gives other ids", file=sys.stderr)
        return int(not same)
    training = texts() * 2
    fixture: dict[str, Any] = {
        "byte_level": byte_level_metadata(training),
        SENTENCEPIECE: sentencepiece_metadata(training),
    }
    fixture["cases"] = answers(args.tokenize, fixture)
    lines = (json.dumps(case) for case in fixture.pop("cases"))
    head = json.dumps(fixture)[:-1]
    FIXTURE.write_text(head + ', "cases": [\n' + ",\n".join(lines) + "\n]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
