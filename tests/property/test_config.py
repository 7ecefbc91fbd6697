"""Whatever is written into the environment or the file, the answer is a Config or one sentence."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvobs.config import SETTINGS, Config, ConfigError, load

NAMES = st.sampled_from([setting.name for setting in SETTINGS])
# An environment can hold any text without NUL, undecodable bytes included (as lone surrogates).
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=30) | st.sampled_from(
    ["", "~", "~x", "off", "auto", "::", "[", "²", "٣", "1" * 5000, "9" * 20, "-0", "127.0.0.1:²", "0x10", "1_0"])


def one_sentence(error: ConfigError) -> bool:
    text = str(error)
    return text[0].isupper() and text.endswith((".", "?")) and "\n" not in text and "Traceback" not in text


@given(st.dictionaries(NAMES, TEXTS, max_size=4))
def test_any_environment_gives_a_configuration_or_one_sentence(values: dict[str, str]) -> None:
    """No text of any setting raises anything but a ConfigError, which is one sentence naming a setting that was set."""
    try:
        config = load({f"KVOBS_{name.upper()}": text for name, text in values.items()})
    except ConfigError as error:
        assert one_sentence(error)
        assert any(repr(name) in str(error) for name in values)
    else:
        assert isinstance(config, Config)
        assert 1 <= config.window_ms <= 60_000
        assert config.store_max_bytes >= 1024**2
        assert config.prometheus is None or 0 <= config.prometheus[1] <= 65_535


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
def test_any_file_gives_a_configuration_or_one_sentence(content: bytes) -> None:
    """No content of the config file raises anything but a ConfigError that names the file."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(content)
        file.flush()
        try:
            assert isinstance(load({"KVOBS_CONFIG": file.name}), Config)
        except ConfigError as error:
            assert one_sentence(error)
            assert file.name in str(error)


@given(NAMES, st.data())
def test_a_slip_of_one_character_names_the_setting(name: str, data: st.DataObject) -> None:
    """Dropping, doubling or changing one character of a setting's name is answered with that setting."""
    at = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from("qxzj"))
    wrong = data.draw(st.sampled_from([name[:at] + name[at + 1:], name[:at] + name[at] + name[at:],
                                       name[:at] + letter + name[at + 1:]]))
    if wrong == name:
        return
    try:
        load({"KVOBS_" + wrong.upper(): "1"})
    except ConfigError as error:
        assert f"{wrong!r}" in str(error)
        assert f"did you mean {name!r}" in str(error)
        assert one_sentence(error)
    else:
        raise AssertionError(f"{wrong} was accepted")


@given(st.dictionaries(NAMES, st.sampled_from(["1", "off", "64", "plain"]), max_size=3))
def test_a_file_and_the_environment_mean_the_same(values: dict[str, str]) -> None:
    """The same texts give the same configuration, or the same refusal but for the place, from file and environment."""
    def outcome(environ: dict[str, str]) -> object:
        try:
            return load(environ)
        except ConfigError as error:
            return str(error).partition(" from KVOBS_")[0].partition(" in /")[0]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kvobs.toml"
        path.write_text("".join(f'{name} = "{text}"\n' for name, text in values.items()), encoding="utf-8")
        assert outcome({"KVOBS_CONFIG": str(path)}) == outcome({f"KVOBS_{n.upper()}": t for n, t in values.items()})
