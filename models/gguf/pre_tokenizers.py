"""Regexes with which byte-level BPE splits a text into words, for each ``tokenizer.ggml.pre``.

The names and flags are llama.cpp's. llama.cpp approximates some of the regexes, because its engine
knows no upper and lower case outside of ASCII. The regexes here are those of the models' own
``tokenizer.json``.
"""

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BREAKS
_LLAMA3 = _CONTRACTION + "|" + _WORD + r"|\p{N}{1,3}|" + _SYMBOLS
_QWEN2 = _CONTRACTION + "|" + _WORD + r"|\p{N}|" + _SYMBOLS
_QWEN35 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _BREAKS
)
_MINICPM5 = _CONTRACTION + "|" + _WORD + r"|\p{N}+|" + _SYMBOLS
_SEED_CODER = _CONTRACTION + "|" + _WORD + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _BREAKS
_EXAONE_MOE = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    + r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2 = (
    _CONTRACTION
    + "|"
    + _WORD
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)


def _cased(suffix: str, numbers: str, *, exclude: str = "", slash: str = "/") -> str:
    """Words split where lower case is followed by upper case, as in o200k and its relatives."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{exclude}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{exclude}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"
        rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{slash}]*|" + _BREAKS
    )


_GPT4O = _cased(_CONTRACTION + "?", r"\p{N}{1,3}")
_KIMI = r"[\p{Han}]+|" + _cased(
    _CONTRACTION + "?", r"\p{N}{1,3}", exclude=r"&&[^\p{Han}]", slash=""
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|" + _KANA
)
_DEEPSEEK_LETTERS = (  # cased letters of an earlier Unicode version
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134"
    "\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_FALCON_MARKS = r"[\p{P}\$\+<=>\^~\|`]+"
_LINES = r"[^\n]+|[\n]+"


@dataclass(frozen=True)
class PreTokenizer:
    """How a vocabulary's text is split, and what else llama.cpp derives from the name.

    Attributes:
      patterns: regexes that are applied one after another. Each regex splits the pieces that the
        previous one produced. A match is a piece, and so is the text between two matches.
      ignore_merges: a word that is a token is encoded as that token, whatever the merges.
      add_bos: whether BOS is added if the file has no ``tokenizer.ggml.add_bos_token``.
      byte_level: tokens are spelled in GPT-2's byte alphabet. Otherwise they are plain text with
        ``▁`` for spaces and tokens like ``<0x0A>`` for other bytes.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True


_NAMES: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 jina-es jina-de gigachat a.x-4.0 mellum modern-bert jina-v1-en roberta-bpe "
    "exaone4 mpt olmo jais trillion granite-docling": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2":
        PreTokenizer((r"\p{N}", _GPT2)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano":
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "jais-2": PreTokenizer((_JAIS2,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2":
        PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "ufakzeka": PreTokenizer((_WORD + r"|\p{N}|" + _SYMBOLS,)),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_BAILING,)),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "tekken": PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), ignore_merges=True),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "youtu": PreTokenizer(
        (_YOUTU, _cased(_CONTRACTION + "?", r"\p{N}")), ignore_merges=True),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_MARKS, r"\s+$", _EAST_ASIAN,
         r"\p{N}+")),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": PreTokenizer(
        (r"\p{N}{1,3}", _KANA, _DEEPSEEK3 + r"[\r\n]*|" + _BREAKS)),
    "spark2_5": PreTokenizer(
        (r"\p{N}{1,3}", _KANA, _DEEPSEEK3 + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "falcon": PreTokenizer((_FALCON_MARKS, _GPT2, "[0-9][0-9][0-9]")),
    "chameleon": PreTokenizer(
        ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
         r"[\p{P}!-/:-@\[-`{-~]", _GPT2), add_bos=True),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "gemma4 granite-embed-multi-311m": PreTokenizer((_LINES,), add_bos=True, byte_level=False),
    "sarvam-moe": PreTokenizer((_LINES,), byte_level=False),
}  # fmt: skip

PRE_TOKENIZERS = {name: value for names, value in _NAMES.items() for name in names.split()}
"""By the value of ``tokenizer.ggml.pre``."""
