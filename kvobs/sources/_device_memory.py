"""Who holds a device's memory: parts that add up to its total. Pure.

``total`` and ``free`` come from one call of the driver, so their difference is the truth that everything else must
fit into. The list of processes and torch's own figure are read a moment later and may have run ahead: each part gets
its claim from what is left, in the order torch, context, others, and ``unexplained`` is what nobody claims. So a race
makes a part smaller by what was allocated in between, never negative, and the sum never wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

Process = tuple[int, int | None]
UNLISTED = ("The driver does not list this process (it lies in another PID namespace, say), so what is its own and "
            "what is others' cannot be told apart.")
UNTOLD = "The driver does not tell how much each process uses."


def owners(processes: Iterable[Process], pid: int, torch_bytes: int | None, *,
           namespaced: bool) -> tuple[int, int] | str:
    """Bytes of this process and of all others by the driver's list, or the reason why the list does not tell.

    A process may be listed several times. In a PID namespace of its own (``namespaced``) this process must be found in
    the list, else the list may be empty or in other numbers; and who holds torch memory holds memory.
    """
    own = others = 0
    listed = False
    for number, used in processes:
        if used is None:
            return UNTOLD
        if number == pid:
            own, listed = own + used, True
        else:
            others += used
    if not listed and (namespaced or torch_bytes):
        return UNLISTED
    if torch_bytes and not own:
        return UNTOLD
    return own, others


def split(total: int, free: int, torch_bytes: int | None, owned: tuple[int, int] | None) -> dict[str, int]:
    """The parts of a device's memory in bytes.

    With everything known they are torch, context, others, unexplained and free. Without ``owned`` the context and the
    others are within unexplained. Without ``torch_bytes`` torch and context are absent, and only then is the sum
    smaller than the total, by what this process holds.
    """
    free = min(max(free, 0), total)
    left = total - free
    own, others = owned if owned is not None else (torch_bytes or 0, None)
    claims = {"torch": torch_bytes, "context": None, "others": others}
    if torch_bytes is None:
        left -= min(own, left)
    elif owned is not None:
        claims["context"] = max(own - torch_bytes, 0)
    parts = {"free": free}
    for part, claim in claims.items():
        if claim is not None:
            parts[part] = min(claim, left)
            left -= parts[part]
    return parts | {"unexplained": left}
