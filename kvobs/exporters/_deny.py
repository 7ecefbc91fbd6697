"""What is masked: keys whose values are secrets or payloads, and the shapes of secrets within texts. Pure.

A text loses only the secret in it; a value under a denied key is replaced whole. Numbers are never searched, as sizes
and times would be taken for card numbers; their key can deny them.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASKED = "[masked]"

# -- keys ------------------------------------------------------------------------------------------------

_SECRET_WORDS = frozenset({
    "password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials", "authorization",
    "cookie", "cookies", "apikey", "jwt", "csrf", "xsrf", "dsn"})
_SECRET_PAIRS = frozenset({
    ("api", "key"), ("api", "token"), ("access", "key"), ("access", "token"), ("auth", "token"), ("auth", "key"),
    ("refresh", "token"), ("id", "token"), ("session", "token"), ("bearer", "token"), ("private", "key"),
    ("secret", "key"), ("signing", "key"), ("encryption", "key"), ("connection", "string"), ("user", "email"),
    ("card", "number")})
# Names of the GenAI, database, HTTP and RPC conventions and of kvobs; a name that ends in a dot stands for all below.
PAYLOAD_KEYS = (
    "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.tool.call.arguments",
    "gen_ai.tool.call.result", "gen_ai.tool.definitions", "gen_ai.prompt", "gen_ai.prompt.", "gen_ai.completion",
    "gen_ai.completion.", "gen_ai.event.content", "kvobs.prompt.token_ids", "kvobs.reply.token_ids",
    "db.query.parameter.", "db.operation.parameter.", "db.statement.parameters", "http.request.header.",
    "http.response.header.", "http.request.body", "http.response.body", "url.query", "rpc.request.metadata.",
    "rpc.response.metadata.", "input.value", "output.value", "messaging.message.body")
# As in PGPASSWORD; not pwd, as OLDPWD is a directory.
_TOGETHER = re.compile(r"[a-z]*(?:password|passwd|passphrase|secret|credentials?|(?:api|access|private|secret)key"
                       r"|(?:api|access|auth|refresh|session|bearer|security)token)|idtoken")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def secret_key(key: str, value: object) -> bool:
    """Whether a key says that its value is a secret. A last word ``token`` does so of a text only: ids are numbers."""
    always, of_text = _denied(key)
    return always or (of_text and isinstance(value, str))


@functools.lru_cache(maxsize=4096)
def _denied(key: str) -> tuple[bool, bool]:
    words = [word.lower() for word in _WORDS.findall(key)]
    return (not _SECRET_WORDS.isdisjoint(words) or not _SECRET_PAIRS.isdisjoint(itertools.pairwise(words))
            or any(map(_TOGETHER.fullmatch, words)),
            words[-1:] == ["token"])


@functools.lru_cache(maxsize=4096)
def payload_key(key: str) -> bool:
    """Whether a key says that its value is what users wrote, or parameters."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in PAYLOAD_KEYS)


# -- shapes ----------------------------------------------------------------------------------------------

_MIXED = r"(?=[^\s\"',;]{20}|[^\s\"',;]{0,64}\d)"  # long, or with a digit: not a word of a sentence
_NAMED = (r"(?:pass(?:word|wd|phrase)|pwd|secret|credentials?|api[_\- ]?key|(?:access|private|secret|account|shared"
          r"[_\-]?access|signing|encryption|auth)[_\-]?key|(?:access|auth|refresh|id|session|bearer|api|security)"
          r"[_\-]?token|client[_\-]?secret|x-amz-signature|x-amz-credential)")
_VALUE = r"(?:(?<=\")[^\"\n]{1,4096}|(?<=')[^'\n]{1,4096}|[^\s\"'&;,)}\]<>]{1,4096})"
_LIST = (r"(?<![\"'\\])[\[(](?:'[^'\n]{0,4096}(?:'|\Z)|\"[^\"\n]{0,4096}(?:\"|\Z)|[^\])\n\"']){0,4096}"
         r"[\])]?")
# An option whose last word is a secret; a file, a length or a name of one is none.
_OPTION = r"(?<![\w.\-])--?(?:[\w.\-]{0,64}?(?:" + _NAMED + r"|\bhf[_\-]?token)|token)(?![\w.\-])"
_PROSE = (r"(?:(?<=[\"'])|(?!(?:an?|and|are|argument|flag|in|is|may|must|needs|not|of|option|or|requires|the"
          r"|to|was|with)(?![^\s.,;:])))")
_BETWEEN = r"(?:(?:[ \t]|\\\n){1,16}+[\"']?|[\"']\s{0,3},?\s{1,3}[\"']?|[\"'],[\"'])"
# The group ``keep`` stays, whatever else is found is masked.
SHAPES: dict[str, re.Pattern[str]] = {name: re.compile(shape) for name, shape in {
    "private key": r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?s:.*?)"
                   r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    # vLLM takes several keys after one option.
    "option": r"(?i:(?P<keep>" + _OPTION + _BETWEEN + r")(?!-|\[masked\])" + _PROSE + _VALUE
              + r"(?:(?<=[^\"'])[ \t]{1,3}(?!-)" + _MIXED + r"[A-Za-z0-9\-._~+=]{6,4096}(?=[\s\"']|\Z)){0,8})",
    "cookie": r"(?i:(?P<keep>\b(?:set-)?cookie[\"']?\s{0,3}[:=,]\s{0,3}b?[\"']?)(?=[^\s\"'=;,]{1,256}=)"
              r"(?:=\"[^\"\n]{0,4096}\"|[^\"'\n])+)",
    "password in a URL": r"(?P<keep>\b[A-Za-z][A-Za-z0-9+.\-]{0,30}://[^\s/?#@:\"']{0,256}:)[^\s/?#\"']{1,1024}(?=@)",
    "token of JSON (JWT)": r"\beyJ[A-Za-z0-9_\-]{6,8192}\.[A-Za-z0-9_\-]{4,8192}(?:\.[A-Za-z0-9_\-]{0,8192}){0,3}",
    "authorization": r"(?i:(?P<keep>\b(?:proxy-)?authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?)(?:(?:bearer|basic|digest"
                     r"|negotiate|token|apikey|aws4-hmac-sha256)\s[^\"'\n]{1,4096}|[^\s\"',;]{1,4096}))",
    "bearer token": r"(?i:(?P<keep>\b(?:bearer|basic)\s{1,3})" + _MIXED + r"[A-Za-z0-9\-._~+/]{6,8192}={0,2})",
    "key of a provider": r"\b(?:sk-" + _MIXED + r"[A-Za-z0-9_\-]{16,256}|[sr]k_(?:live|test)_[A-Za-z0-9]{10,256}"
                         r"|hf_[A-Za-z0-9]{20,256}|gh[oprsu]_[A-Za-z0-9]{20,256}|github_pat_[A-Za-z0-9_]{20,256}"
                         r"|glpat-[A-Za-z0-9_\-]{16,256}|xox[abeprs]-[A-Za-z0-9\-]{10,256}|(?:AKIA|ASIA)[A-Z0-9]{16}"
                         r"|AIza[A-Za-z0-9_\-]{35}|ya29\.[A-Za-z0-9_\-]{16,512}|npm_[A-Za-z0-9]{30,256}"
                         r"|pypi-[A-Za-z0-9_\-]{30,512}|SG\.[A-Za-z0-9_\-]{16,64}\.[A-Za-z0-9_\-]{16,64}"
                         r"|nvapi-[A-Za-z0-9_\-]{20,256}|gsk_[A-Za-z0-9]{20,256}|dop_v1_[a-f0-9]{32,128})",
    "named secret": r"(?i:(?P<keep>" + _NAMED + r"\\{0,3}[\"']?\s{0,3}(?:=>|[:=])\s{0,3}\\{0,3}[\"']?)"
                    r"(?!\[masked\])(?:" + _LIST + "|" + _VALUE + "))",
    "named token": r"(?i:(?P<keep>\btoken[\"']?\s{0,3}[:=]\s{0,3}[\"']?)(?=[^\s\"'&;,]{0,64}\d)(?=[^\s\"'&;,]{0,64}"
                   r"[a-z])[A-Za-z0-9\-._~+/=]{12,4096})",
    "e-mail address": r"(?<![\w.%+\-])[\w.%+\-]{1,64}@(?:[A-Za-z0-9\-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9])",
    "social security number": r"(?<![\w.\-])\d{3}-\d{2}-\d{4}(?![\w\-]|\.\d)",
}.items()}
_DIGITS = re.compile(r"(?<![A-Za-z0-9])(?<!\d\.)\d{1,19}(?:[ \-]\d{1,19})*+(?![A-Za-z0-9])(?!\.\d)")
# First digits of the card networks (ISO/IEC 7812), with the lengths of their numbers.
_NETWORKS = re.compile(r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}"
                       r"|3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}|6(?:011|4[4-9]\d|5\d\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}"
                       r"|62\d{14,17}")


_SHORT = 14  # a shorter text holds a secret only with one of these
_ANY = re.compile(r"[@:=\d\-]")
_IS_OPTION = re.compile(_OPTION, re.IGNORECASE)


def luhn(digits: str) -> bool:
    """Whether the last digit checks the others (ISO/IEC 7812-1, annex B)."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def _cards(found: re.Match[str]) -> str:
    groups = list(re.finditer(r"\d+", found[0]))
    out, at, first = "", 0, 0
    while first < len(groups):
        digits, last = "", first
        while last < len(groups) and len(digits) < 19:
            digits += groups[last][0]
            if 13 <= len(digits) <= 19 and _NETWORKS.fullmatch(digits) and luhn(digits):
                out += found[0][at:groups[first].start()] + MASKED
                at, first = groups[last].end(), last
                break
            last += 1
        first += 1
    return out + found[0][at:]


def mask_text(text: str) -> str:
    """The text without the secrets whose shape is known."""
    if len(text) < _SHORT and not _ANY.search(text):
        return text
    for shape in SHAPES.values():
        text = shape.sub(_keep if "keep" in shape.groupindex else MASKED, text)
    return _DIGITS.sub(_cards, text)


_SEVERAL = re.compile(r"api[_\-]?key\Z", re.IGNORECASE)  # vLLM takes several keys after one option
_NUMBERS = frozenset({int, float, bool, type(None)})


def _keep(found: re.Match[str]) -> str:
    return found["keep"] + MASKED


# -- values ----------------------------------------------------------------------------------------------


class Rules:
    """``payloads``: also mask what users wrote."""

    def __init__(self, *, payloads: bool) -> None:
        self._payloads = payloads

    def value(self, key: str, value: Any) -> Any:
        """The value of an attribute, or what is shown of it; the very same object where nothing is masked."""
        if secret_key(key, value) or (self._payloads and payload_key(key)):
            return MASKED
        return self._within(value)

    def attributes(self, found: Mapping[str, Any]) -> dict[str, Any] | None:
        """All attributes; None where nothing is masked."""
        out = {key: self.value(key, value) for key, value in found.items()}
        return None if all(out[key] is value for key, value in found.items()) else out

    def text(self, text: str) -> str:
        """A text; the very same object where nothing is masked."""
        masked = mask_text(text)
        return text if masked == text else masked

    def _items(self, value: Sequence[Any]) -> list[Any]:
        """What is shown of a list's items; those after an option that takes a secret are the secret."""
        items, secrets = [], 0
        for item in value:
            word = item if isinstance(item, str) else ""
            if secrets and word and not word.startswith("-"):
                items.append(item if item == MASKED else MASKED)
                secrets -= 1
            else:
                items.append(self._within(item))
                option = _IS_OPTION.fullmatch(word)
                secrets = 0 if option is None else len(value) if _SEVERAL.search(word) else 1
        return items

    def _within(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bytes):
            text = value.decode("utf-8", "surrogateescape")
            masked = self.text(text)
            return value if masked is text else masked.encode("utf-8", "surrogateescape")
        if isinstance(value, Mapping):
            pairs = self.attributes(value)
            return value if pairs is None else pairs
        if isinstance(value, Sequence):
            if _NUMBERS.issuperset(map(type, value)):  # token ids may be many
                return value
            items = self._items(value)
            return value if all(new is old for new, old in zip(items, value, strict=True)) else tuple(items)
        return value
