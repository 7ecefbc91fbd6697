"""The deny-list: every kind of secret that it knows, and what looks like one and is none."""

from __future__ import annotations

import pytest

from kvobs.exporters._deny import MASKED, PAYLOAD_KEYS, SHAPES, Rules, luhn, mask_text

# (text, what must be gone, what is left). Keys are the documented examples of their makers or drawn at random.
PLANTED = [
    ("Authorization: Bearer abc.def-ghi", "abc.def-ghi", "Authorization: [masked]"),
    ("{'authorization': 'Basic dXNlcjpwYXNz'}", "dXNlcjpwYXNz", "{'authorization': '[masked]'}"),
    ("got 401 with bearer 9f8e7d6c5b4a", "9f8e7d6c5b4a", "got 401 with bearer [masked]"),
    ("key sk-proj-a1B2c3D4e5F6g7H8i9J0 refused", "a1B2c3D4", "key [masked] refused"),
    ("sk-ant-api03-Zz9Yy8Xx7Ww6Vv5Uu4", "Zz9Yy8", "[masked]"),
    ("hf_QwErTyUiOpAsDfGhJkLzXcVbNm", "QwErTy", "[masked]"),
    ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", "16C7e42F", "[masked]"),
    ("github_pat_11ABCDEFG0123456789_abcdef", "11ABCDEFG", "[masked]"),
    ("glpat-20digitsAndLetters12", "20digits", "[masked]"),
    ("xoxb-123456789012-abcdef", "123456789012", "[masked]"),
    ("AKIAIOSFODNN7EXAMPLE is the id", "IOSFODNN7", "[masked] is the id"),
    ("AIzaSyA1234567890abcdefghijklmnopqrstuv", "SyA1234", "[masked]"),
    ("sk_live_4eC39HqLyjWDarjtT1zdp7dc", "4eC39Hq", "[masked]"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3", "eyJzdWIi", "[masked]"),
    ("postgresql://anna:hunter2@db:5432/app", "hunter2", "postgresql://anna:[masked]@db:5432/app"),
    ("redis://:p@ss:word@cache/0", "p@ss:word", "redis://:[masked]@cache/0"),
    ("GET /v1?api_key=12345&x=1", "12345", "GET /v1?api_key=[masked]&x=1"),
    ('{"password": "a b, c", "n": 1}', "a b, c", '{"password": "[masked]", "n": 1}'),
    ("password = 'it is'; x = 2", "it is", "password = '[masked]'; x = 2"),
    ("PGPASSWORD=xyz psql", "xyz", "PGPASSWORD=[masked] psql"),
    ("client_secret: s3cr3t, ok", "s3cr3t", "client_secret: [masked], ok"),
    ("accessToken=abc", "abc", "accessToken=[masked]"),
    ("AccountKey=Zm9v;EndpointSuffix=x", "Zm9v", "AccountKey=[masked];EndpointSuffix=x"),
    ("?token=a1b2c3d4e5f6&y", "a1b2c3", "?token=[masked]&y"),
    ("X-Amz-Signature=fe5f80f77d5fa3beca", "fe5f80", "X-Amz-Signature=[masked]"),
    ("write to anna.b+c@mail.example.org.", "anna.b", "write to [masked]."),
    ("SSN 078-05-1120 found", "078-05", "SSN [masked] found"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----\nrest", "MIIE", "[masked]\nrest"),
    ("-----BEGIN PRIVATE KEY-----\nMIIE cut off he", "MIIE", "[masked]"),
    ("run --password hunter2 now", "hunter2", "run --password [masked] now"),
    ("vllm serve tiny --api-key SECRET --port 80", "SECRET", "vllm serve tiny --api-key [masked] --port 80"),
    ("--api-key k1secret k2secret --port 80", "k2secret", "--api-key [masked] --port 80"),
    ("mysql --db-password 'a b' -h x", "a b", "mysql --db-password '[masked]' -h x"),
    ("-pwd abc", "abc", "-pwd [masked]"),
    ("x --hf-token abc", "abc", "x --hf-token [masked]"),
    ("x --token abc", "abc", "x --token [masked]"),
    ("x --api-key \\\n SECRET", "SECRET", "x --api-key \\\n [masked]"),
    ("['vllm', '--api-key', 'SECRET', '--port']", "SECRET", "['vllm', '--api-key', '[masked]', '--port']"),
    ("Cookie: sessionid=abc; theme=dark", "abc", "Cookie: [masked]"),
    ('set-cookie: id="a b"; Path=/; HttpOnly', "a b", "set-cookie: [masked]"),
    ("{'Cookie': 'sid=abc; x=y', 'Accept': '*'}", "abc", "{'Cookie': '[masked]', 'Accept': '*'}"),
    ("[(b'cookie', b'sid=abc'), 1]", "abc", "[(b'cookie', b'[masked]'), 1]"),
    ("args: {'api_key': ['k1', 'k]2'], 'n': [1]}", "k1", "args: {'api_key': [masked], 'n': [1]}"),
    ('api_key=("k1", "k2") cut: secrets', "k2", "api_key=[masked] cut: secrets"),
    # The card networks' own test numbers.
    *((f"paid with {number}.", number, "paid with [masked].") for number in (
        "4111111111111111", "4222222222222", "5555555555554444", "2223003122003222", "378282246310005",
        "6011111111111117", "30569309025904", "3530111333300000", "4111 1111 1111 1111", "3782-822463-10005")),
    ("1 2 4111-1111-1111-1111 3", "4111-1111", "1 2 [masked] 3"),
]
INNOCENT = [
    "--password-file /run/x", "--api-key --other", "--api-key", "--max-tokens abc", "--eos-token </s>",
    "--tokenizer tiny", "--tokenizer-mode auto", "--secret-name db", "--passwordless yes", "--api-key-header X-Key",
    "set --password to begin", "the --api-key option is missing", "pre--password x", "['--api-key', '--port']",
    "an option '--password' was given", "the cookie jar, x=1", "cookies: 3", "cookie: chocolate", "cookie banner = off",
    "", "Bearer authentication failed", "basic understanding of things", "token generation took 12 ms",
    "max_tokens: 512, input_tokens=17", "next token = 12", "tiny@cpu", "Llama-3.1-8B@cuda:0", "kvobs-1.2.3",
    "http://127.0.0.1:9464/metrics", "https://host:443/a@b", "grpc://host/x:y@z", "the secret of success",
    "passwords are never recorded", "1700000000000000000", "4111111111111112", "4111111111111111.5",
    "0.4111111111111111",
    "a4111111111111111", "0x4111111111111111", "9111111111111111", "41111111111111111111111",
    "2024-05-01 12:30:45", "0af7651916cd43dd8448eb211c80319c", "12345678-1234-1234-1234-123456789012",
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.69 GiB",
    "shape (1, 3, 64) at 0x7f3a", "ask-me-anything-about-it", "user@host", "@property", "a@b",
    'File "/srv/app.py", line 12, in generate', "secret_sauce.py", "Zugangsdaten fehlen \u2026", "\udcff\x00",
]
SECRET_KEYS = ["password", "db.password", "DB_PASSWORD", "userPassword", "api_key", "apiKey", "x-api-key", "APIKey",
               "http.request.header.authorization", "http.response.header.set-cookie", "aws.secret_access_key",
               "accessToken", "refresh-token", "auth.token", "hf.token", "session_token", "db.connection_string",
               "PGPASSWORD", "dbpassword", "clientsecret", "authtoken", "accesstoken", "sessiontoken", "OPENAIAPIKEY",
               "userpasswd", "myapitoken", "config.refreshtoken", "awsSecretkey", "idtoken",
               "credentials", "client_secret", "user.email", "sentry.dsn", "card.number"]
PLAIN_KEYS = ["gen_ai.usage.input_tokens", "gen_ai.token.type", "kvobs.session", "gen_ai.conversation.id", "db.system",
              "http.request.method", "kvobs.kv.bytes", "gen_ai.request.max_tokens", "compass.word", "secretary",
              "tokenizer", "max_tokens", "passwordless", "OLDPWD", "tokens",
              "maxtokens", "secretariat", "cookiecutter", "PGPASSFILE", "tokenizer.mode", "author_tokens",
              "key", "author", "url.full", "kvobs.cache", "bypass", "keyboard.layout", "pass"]


@pytest.mark.parametrize(("text", "gone", "left"), PLANTED)
def test_a_planted_secret_is_masked_and_nothing_else(text: str, gone: str, left: str) -> None:
    """The secret is gone and all around it stays, also within a longer text, and masking twice changes no more."""
    assert mask_text(text) == left
    assert gone not in left
    around = mask_text(f"before {text} \nafter")
    assert gone not in around
    assert around.startswith("before ")
    assert mask_text(left) == left


@pytest.mark.parametrize("text", INNOCENT)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    """Sizes, times, ids, sentences and the words of errors are left as they are, as the very same object."""
    assert mask_text(text) == text
    assert Rules(payloads=True).text(text) is text


def test_every_shape_of_the_list_is_planted() -> None:
    """No shape is without a secret in this test that it finds itself."""
    for name, shape in SHAPES.items():
        assert any(shape.search(text) for text, _, _ in PLANTED), name


@pytest.mark.parametrize("key", SECRET_KEYS)
@pytest.mark.parametrize("value", ["x", ["a", "b"], ("c",), b"d"])
def test_a_secret_key_masks_its_value_whole(key: str, value: object) -> None:
    """Whatever the value looks like; of the word token alone only texts, as ids are numbers."""
    expected = MASKED if key != "hf.token" or isinstance(value, str) else value
    assert Rules(payloads=False).value(key, value) == expected


@pytest.mark.parametrize("key", PLAIN_KEYS)
def test_a_plain_key_leaves_its_value(key: str) -> None:
    """Names that share letters with a denied one deny nothing."""
    for value in ("x", 7, 4111111111111111, 1.5, True, (1, 2), None):
        assert Rules(payloads=True).value(key, value) is value


@pytest.mark.parametrize("key", PAYLOAD_KEYS)
def test_payloads_are_masked_only_when_asked(key: str) -> None:
    """Message contents, token ids, headers and parameters stay with the profile staging and go with production."""
    whole = key + "x" if key.endswith(".") else key
    assert Rules(payloads=True).value(whole, "hello") == MASKED
    assert Rules(payloads=True).value(whole, (1, 2, 3)) == MASKED
    assert Rules(payloads=False).value(whole, "hello") == "hello"
    assert Rules(payloads=True).value(whole + "y" if not key.endswith(".") else key[:-1] + "y", "hello") == "hello"


def test_secrets_within_sequences_and_mappings_are_masked() -> None:
    """Lists, nested mappings and bytes are searched; keys within a mapping deny as those of attributes do."""
    rules = Rules(payloads=False)
    assert rules.value("argv", ["--x", "password=a"]) == ("--x", "password=[masked]")
    assert rules.value("config", {"n": 1, "db": {"password": "a", "url": "http://u:p@h"}}) == {
        "n": 1, "db": {"password": MASKED, "url": "http://u:[masked]@h"}}
    assert rules.value("body", b"\xffapi_key=abc") == b"\xffapi_key=[masked]"
    assert rules.attributes({"a": "b", "c": (1, "d")}) is None


class Counted(Rules):
    """Counts how many values are looked into."""

    def __init__(self) -> None:
        super().__init__(payloads=True)
        self.looks = 0

    def _within(self, value: object) -> object:
        self.looks += 1
        return super()._within(value)


@pytest.mark.parametrize("value", [tuple(range(100_000)), [0.5] * 9, [True, False], [1, None, 2], [], range(7)])
def test_a_list_of_numbers_is_not_searched_number_by_number(value: list[object]) -> None:
    """Token ids may be many, and this runs on the engine's thread; a key still masks them."""
    rules = Counted()
    assert rules.value("kvobs.ids", value) is value
    assert rules.looks == 1
    assert rules.value("kvobs.prompt.token_ids", value) == MASKED
    assert rules.value("password", value) == MASKED


def test_a_text_among_numbers_is_searched() -> None:
    """Mappings may hold lists of several types."""
    assert Rules(payloads=False).value("x", {"y": [1, "password=a"]}) == {"y": (1, "password=[masked]")}


ARGUMENTS = [
    (["run", "--password", "hunter2", "x"], ("run", "--password", MASKED, "x")),
    (["vllm", "--api-key", "k1", "k2", "--port", "80"], ("vllm", "--api-key", MASKED, MASKED, "--port", "80")),
    (("--dbPassword", "it is"), ("--dbPassword", MASKED)),
    (["--hf-token", "abc", "-token", "d"], ("--hf-token", MASKED, "-token", MASKED)),
    (["--password", MASKED, "--secret", "to"], ("--password", MASKED, "--secret", MASKED)),
]


@pytest.mark.parametrize(("words", "left"), ARGUMENTS)
def test_the_word_after_an_option_is_masked(words: list[str], left: tuple[str, ...]) -> None:
    """A command line comes as a list (``process.command_args``): option and value are neighbours there."""
    rules = Rules(payloads=False)
    assert rules.value("process.command_args", words) == left
    assert rules.value("process.command_args", left) is left


@pytest.mark.parametrize("words", [
    ["--password-file", "path"], ["--api-key", "--other", "x"], ["x", "--api-key"], ["--max-tokens", "x"],
    ["--eos-token", "</s>"], ["--tokenizer", "tiny"], ["password", "x"], ["--password=[masked]", "x"],
    ["--password", "", "-x", "y"], ["--token-type", "x"]])
def test_the_word_after_another_option_stays(words: list[str]) -> None:
    """The path of a file with a secret is none, nor is the next option."""
    assert Rules(payloads=False).value("process.command_args", words) is words


def test_the_checksum_of_cards() -> None:
    """Exactly one of ten last digits checks the others; the standard's example does."""
    assert luhn("79927398713")
    assert [digit for digit in "0123456789" if luhn("7992739871" + digit)] == ["3"]
