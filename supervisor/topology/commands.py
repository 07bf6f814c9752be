"""Rules about the kinds of engines, above all about the commands of servers. Pure.

A server of another maker brings its own weights, memory and queue: nothing of the cache, the zygote
or the KV arena applies to it, and whoever writes such a key expects something that does not happen.
"""

import re
from collections.abc import Iterator
from typing import Final

from supervisor.topology.findings import Issue, Place, Severity, closest
from supervisor.topology.schema import Engine, EngineKind, EngineRole, Group

__all__ = ["PLACEHOLDERS", "check_kinds", "placeholders_in"]

PLACEHOLDERS: Final = ("port", "socket")
_WORD_IN_BRACES: Final = re.compile(r"(?<!\{)\{([A-Za-z_][\w-]*)\}")
"""JSON and templates among the arguments have other braces, which are left alone."""

_EXAMPLE: Final = 'write command: [vllm, serve, my/model, --port, "{port}"]'


def check_kinds(group: Group, place: Place) -> Iterator[Issue]:
    """Every broken rule of one group."""
    for number, engine in enumerate(group.engines):
        here: Place = (*place, "engines", number)
        if engine.kind is not group.engines[0].kind:
            what = f"group {group.name!r} mixes the kinds {group.engines[0].kind} and {engine.kind}"
            instead = f"write {group.engines[0].kind}, or a group of its own for the other kind"
            yield Issue((*here, "kind"), what, instead, needs=((*place, "engines", 0, "kind"),))
        elif engine.kind is EngineKind.COMMAND:
            yield from _command(engine, here)
        elif engine.command is not None:
            what = f"engines of kind {engine.kind} take no command"
            yield Issue((*here, "command"), what, "write kind: command beside it, or leave it out",
                        needs=((*here, "kind"),))  # fmt: skip
    yield from (_group_of_commands if group.runs_commands else _group_of_natives)(group, place)


def _group_of_natives(group: Group, place: Place) -> Iterator[Issue]:
    kinds = tuple((*place, "engines", n, "kind") for n in range(len(group.engines)))
    is_native = all(engine.kind is EngineKind.NATIVE for engine in group.engines)
    if group.model is None and is_native:
        what = "the key 'model' is missing"
        yield Issue(place, what, "write model: {path: path/to/checkpoint}",
                    needs=((*place, "model"), *kinds))  # fmt: skip


def _group_of_commands(group: Group, place: Place) -> Iterator[Issue]:
    if group.cache.mode != "off":
        what = f"cache mode {group.cache.mode}, but servers keep their own copy of the weights"
        instead = "write mode: off, or leave the cache out"
        yield Issue((*place, "cache", "mode"), what, instead)
    for key in ("devices", "tensor_parallel"):
        if key in group.model_fields_set:
            what = f"{key} is not for servers: their commands say where they compute"
            yield Issue((*place, key), what, "leave it out", at_key=True)
    if "batch" in group.model_fields_set:
        what = "a group of servers has no batch engine that these rules could be for"
        yield Issue((*place, "batch"), what, "leave it out", Severity.WARNING, at_key=True)
    if group.model is not None:
        what = "the model is not read: the servers' commands say what they load"
        yield Issue((*place, "model"), what, "leave it out", Severity.WARNING, at_key=True)


def _command(engine: Engine, here: Place) -> Iterator[Issue]:
    if engine.command is None:
        yield Issue(here, "an engine of kind command needs its command", _EXAMPLE,
                    needs=((*here, "command"),))  # fmt: skip
    else:
        yield from _placeholders(engine.command, (*here, "command"))
    if engine.role is EngineRole.BATCH:
        what = "a server cannot be the batch engine: it cannot be frozen as a whole"
        yield Issue((*here, "role"), what, "write primary or standby")
    if engine.ballast:
        what = "ballast is memory of a native engine; a server has its own"
        yield Issue((*here, "ballast"), what, "leave it out")


def placeholders_in(word: str) -> list[str]:
    """Names in braces, known or not."""
    return _WORD_IN_BRACES.findall(word)


def _placeholders(command: list[str], place: Place) -> Iterator[Issue]:
    used: set[str] = set()
    for number, word in enumerate(command):
        if "\0" in word:
            yield Issue((*place, number), "a NUL cannot be handed to a program", "leave it out")
        for name in placeholders_in(word):
            if name in PLACEHOLDERS:
                used.add(name)
                continue
            meant = closest(name, PLACEHOLDERS) or "port"
            yield Issue((*place, number), f"{{{name}}} is not a placeholder", f"write {{{meant}}}")
            used.add(meant)
    if not used:
        what = "the command does not say where the server listens"
        instead = 'write "{port}" where its port goes, or "{socket}" where its Unix socket goes'
        yield Issue(place, what, instead)
    elif len(used) > 1:
        what = "the command has both {port} and {socket}, and only one of them would be used"
        yield Issue(place, what, "write one of the two")
