"""The factories of sources."""

from __future__ import annotations

import pkgutil

from kvobs import sources


def test_no_factory_bears_a_module_s_name() -> None:
    """A submodule becomes an attribute of the package when it is first imported, and would stand in the factory's place
    from then on.
    """
    modules = {module.name for module in pkgutil.iter_modules(sources.__path__)}
    assert {"_failures", "vllm"} <= modules
    assert modules.isdisjoint(factory.__name__ for factory in sources.factories())
