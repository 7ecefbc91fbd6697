"""What ``kvobs doctor`` says of the profile: each value that it may set, and where that value came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvobs import config as configuration
from kvobs.config import Config
from kvobs.model import Availability

_DEPTHS = {"chain": "All spans of a turn are written",
           "edges": "Only the spans of turns and of the breaker are written"}
_MASKS = {"off": "Nothing is masked on spans", "secrets": "Credentials and personal data are masked on spans",
          "payloads": "Credentials, personal data and payloads are masked on spans"}


def profile(config: Config, origins: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[Availability]:
    """The profile and its settings. ``origins`` are ``kvobs.config.origins``."""
    if config.profile == "off":
        said = f"No profile is set; KVOBS_PROFILE takes {', '.join(configuration.PROFILES)}."
    else:
        own = [name for name in configuration.PROFILED
               if origins.get(name, "") != f"the profile {config.profile}"]
        said = f"The profile {config.profile} is set ({origins.get('profile', 'an option')})"
        said += f"; not by it: {', '.join(own)}." if own else "."
    yield Availability("profile", config.profile != "off", said)
    sentences = {
        "trace_sample": _sampling(config, environ),
        "retention": f"Stores and their rows are kept for {configuration.retention_text(config.retention)}"
                     if config.retention else "Stores are kept until the bound on their size",
        "span_depth": _DEPTHS[config.span_depth],
        "mask": _MASKS[config.mask],
        "record_prompts": "Token ids of prompts and replies are put on spans" if config.record_prompts
                          else "No prompts or replies are put on spans",
    }
    for name, sentence in sentences.items():
        yield Availability(f"setting {name}", True, f"{sentence} (from {origins.get(name, 'an option')}).")


def _sampling(config: Config, environ: Mapping[str, str]) -> str:
    if config.trace_sample is not None:
        return (f"{config.trace_sample:g} % of new traces are recorded, and whatever a caller decided to record; an "
                "application's own provider samples by its own rule")
    if named := environ.get(configuration.SAMPLER, "").strip():
        return f"Traces are sampled by {configuration.SAMPLER}={named}"
    return "Every trace is recorded that no caller decided against"
