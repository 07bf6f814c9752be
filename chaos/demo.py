"""`make demo`: one minute with Understudy, on a laptop, with nothing faked.

Starts `configs/demo.yaml` as an operator would, asks it as a client would (the official `openai`
package), kills the primary in the middle of eight streams, and shows that every client got
exactly the text it would have got anyway. Then the batch engine gives its memory back and
returns. At the end it proves that nothing of all this is left on the machine.

Read it from `play` downwards: each act is one function. Exit code 0 means every promise held.
"""

import sys
import time
from dataclasses import dataclass, field
from typing import Final

import openai
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from cache.errors import UnderstudyError
from chaos.client import CacheView, EngineView, ProgressView, StatusView, wait_until
from chaos.judge import Interruption, Spread, check_streams, interruptions, reference_texts
from chaos.memory import mapped_memory
from chaos.streams import StreamFleet, StreamRecord, make_requests
from chaos.system import ROOT, RunningSystem, StartError, SystemOptions, free_ports, is_port_free

TOPOLOGY: Final = ROOT / "configs" / "demo.yaml"
STATE_DIR: Final = ROOT / "run" / "make-demo"  # beside that of a `supervisor run` on the same file
DEFAULT_PORTS: Final = (8000, 9400)  # gateway and admin, as the topology has them
STREAMS: Final = 8
STREAM_TOKENS: Final = 240
KILL_AFTER_TOKENS: Final = 60
MIB: Final = 1 << 20

PLAIN_WIDTH: Final = 100  # of output that goes into a file

out = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


class BrokenPromiseError(UnderstudyError):
    """Something that the demo shows did not happen."""

    code = "demo"


@dataclass(slots=True)
class Measured:
    """What the last act prints: name of a phase, milliseconds, who measured it."""

    rows: list[tuple[str, float, str]] = field(default_factory=list)

    def add(self, phase: str, duration_ms: float, seen_by: str) -> None:
        """Take one row."""
        self.rows.append((phase, duration_ms, seen_by))


def play() -> None:
    """The whole demo."""
    measured = Measured()
    system = make_system()
    out.print(f"[bold]Understudy[/]: supervisor run {TOPOLOGY.relative_to(ROOT)}")
    try:
        start(system, measured)
        show_one_copy(system)
        ask_as_a_client(system)
        kill_the_primary(system, measured)
        make_room_and_return(system, measured)
        show_table(measured)
        stop(system)
    finally:
        system.close(check=False)


def make_system() -> RunningSystem:
    """The demo topology; on other ports when somebody has the usual ones."""
    gateway_port, admin_port = DEFAULT_PORTS
    environment = {"UNDERSTUDY__STATE_DIR": str(STATE_DIR)}
    if not all(is_port_free(port) for port in DEFAULT_PORTS):
        gateway_port, admin_port = free_ports(2)
        environment |= {
            "UNDERSTUDY__GATEWAY__LISTEN": f"127.0.0.1:{gateway_port}",
            "UNDERSTUDY__ADMIN__LISTEN": f"127.0.0.1:{admin_port}",
        }
    STATE_DIR.parent.mkdir(exist_ok=True)
    system = RunningSystem(
        STATE_DIR.parent,
        SystemOptions(batch=True, extra_environment=environment),
        topology=TOPOLOGY,
        state_dir=STATE_DIR,
        ports=(gateway_port, admin_port),
    )
    if not system.own_processes():
        system.remove_state()  # each demo is a first start
    return system


def start(system: RunningSystem, measured: Measured) -> None:
    """Everything up: weights loaded once, primary serving, standby and batch engine ready."""
    scene("1", "Start: the weights are read from disk once")
    began = time.monotonic()
    system.spawn_supervisor()
    watch_loading(system)
    with out.status("engines attach and prove themselves"):
        system.wait_ready(timeout_s=120)
        wait_for_batch(system)
    measured.add("start of the whole system", since_ms(began), "demo")
    out.print(f"  OpenAI API on {system.base_url}")


def watch_loading(system: RunningSystem) -> None:
    """A bar with bytes, rate and time left, as the cache daemon reports them."""
    columns = (TextColumn("  weights"), BarColumn(40), DownloadColumn(binary_units=True))
    with Progress(*columns, TextColumn("{task.fields[pace]}"), console=out) as progress:
        task = progress.add_task("weights", total=None, pace="")

        def look() -> bool:
            system.require_alive()
            status = system.status()
            cache = status.group.cache[0] if status and status.group.cache else None
            if cache is None:
                return False
            seen = progress_of(cache)
            progress.update(
                task, completed=seen.bytes_done, total=seen.bytes_total or None, pace=pace(seen)
            )
            return cache.state == "serving"

        wait_until(look, "the weights in memory", timeout_s=120)


def progress_of(cache: CacheView) -> ProgressView:
    """How far the load is; at its end, what it was as a whole."""
    if cache.state != "serving" and cache.progress is not None:
        return cache.progress
    rate = cache.weights_bytes / cache.load_s if cache.load_s else 0.0
    return ProgressView(cache.weights_bytes, cache.weights_bytes, rate, 0.0)


def pace(seen: ProgressView) -> str:
    """Rate and time left, in words."""
    if not seen.bytes_per_s:
        return ""
    eta = f", {seen.eta_s:.0f} s left" if seen.eta_s is not None else ""
    return f"{mib(round(seen.bytes_per_s))}/s{eta}"


def show_one_copy(system: RunningSystem) -> None:
    """Three engines, one copy: the shares of all mappings add up to the size of the weights."""
    scene("2", "Three engines, one copy of the weights")
    status = system.admin.status()
    table = Table(box=None, padding=(0, 2), show_header=True, header_style="dim")
    for heading in ("engine", "role", "pid", "weights mapped", "its share"):
        table.add_column(heading)
    for engine in living_engines(status):
        memory = mapped_memory(engine.pid or 0)
        table.add_row(
            engine.name, engine.role, str(engine.pid), mib(memory.rss_bytes), mib(memory.pss_bytes)
        )
    out.print(table)
    size = status.group.cache[0].weights_bytes
    total = sum(mapped_memory(process.pid).pss_bytes for process in system.own_processes())
    out.print(f"  weights {mib(size)}, in memory once: all shares together are {mib(total)}")
    if not 0 < total <= size * 1.05 + 8192:
        raise BrokenPromiseError(f"the shares add up to {total} bytes, the weights have {size}")


def ask_as_a_client(system: RunningSystem) -> None:
    """Plain OpenAI requests; nothing in the client knows about Understudy."""
    scene("3", "Clients: the official openai package")
    with openai.OpenAI(base_url=system.base_url, api_key="unused", timeout=30) as client:
        question = "What is the capital of France?"
        out.print(f"  [dim]user[/]       {question}")
        out.print("  [dim]assistant[/]  ", end="")
        with client.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": question}],
            max_tokens=48,
            temperature=0,
            stream=True,
        ) as chunks:
            for chunk in chunks:
                if chunk.choices:
                    text = chunk.choices[0].delta.content or ""
                    out.print(Text(text.replace("\n", " ")), end="")
        out.print()
        answer = client.completions.create(
            model="chat:batch", prompt="Once upon a time", max_tokens=24, temperature=0
        )
        out.print("  [dim]batch[/]      Once upon a time", Text(one_line(answer.choices[0].text)))


def kill_the_primary(system: RunningSystem, measured: Measured) -> None:
    """SIGKILL in the middle of eight streams: every text is what it would have been."""
    scene("4", f"SIGKILL the primary while {STREAMS} streams run")
    requests = make_requests(STREAMS, max_tokens=STREAM_TOKENS)
    with out.status("reference: the same requests, undisturbed, in another order"):
        texts = reference_texts(system.base_url, requests)
    before = system.wait_whole().group

    with StreamFleet(system.base_url, requests, transport="openai") as fleet:
        fleet.wait_tokens(KILL_AFTER_TOKENS)
        victim, killed_ns = system.kill("primary")
        out.print(f"  killed {before.primary} (pid {victim.pid}) after {KILL_AFTER_TOKENS} tokens")
        system.wait_whole(not_led_by=victim)
        restored_ms = (time.monotonic_ns() - killed_ns) / 1e6
        records = fleet.wait_done()

    check_streams(records, texts)
    after = system.admin.status().group
    if after.epoch != before.epoch + 1:
        raise BrokenPromiseError(f"epoch {after.epoch} instead of {before.epoch + 1}")
    show_stream(records[1], killed_ns)
    out.print(
        f"  [green]{len(records)} of {len(records)} texts equal the undisturbed run[/]: no token "
        f"lost, repeated or changed; {after.primary} is primary, epoch {after.epoch}"
    )
    report_failover(system, interruptions(records, killed_ns), measured)
    measured.add("redundancy restored: a new standby, proven", restored_ms, "demo")


def show_stream(record: StreamRecord, killed_ns: int) -> None:
    """One client's text around the moment of the kill."""
    arrived = zip(record.arrivals_ns, record.texts, strict=True)
    pieces = [(moment > killed_ns, text) for moment, text in arrived]
    before = one_line("".join(text for is_later, text in pieces if not is_later))[-90:]
    later = one_line("".join(text for is_later, text in pieces if is_later))[:90]
    line = Text.assemble("  ...", before, (" ✕ ", "bold red"), (later, "green"), "...")
    out.print(line, soft_wrap=True)


def report_failover(system: RunningSystem, felt: list[Interruption], measured: Measured) -> None:
    """Phases as the supervisor measured them, and the pause that clients felt."""
    operation = wait_until(
        lambda: next((o for o in reversed(system.admin.history()) if o.kind == "failover"), None),
        "the failover in the history",
        timeout_s=5,
    )
    for phase in ("detect", "fence", "promote", "verify", "route", "first_token", "total"):
        if phase in operation.phases_ms:
            measured.add(f"failover: {phase}", operation.phases_ms[phase], "supervisor")
    if not felt:
        raise BrokenPromiseError("no stream was under way at the kill")
    spread = Spread.of([one.next_token_ms for one in felt])
    measured.add("kill -> next token at the client, p50", spread.p50, f"{spread.count} clients")
    measured.add("kill -> next token at the client, worst", spread.worst, f"{spread.count} clients")


def make_room_and_return(system: RunningSystem, measured: Measured) -> None:
    """The batch engine is evicted and comes back."""
    scene("5", "The batch engine makes room, and returns")
    batch = wait_for_batch(system)
    began = time.monotonic()
    system.admin.post(f"/v1/evict/{batch.name}", hold=True, timeout_s=20)
    measured.add("batch evicted, its memory given back", since_ms(began), "demo")
    out.print(f"  evicted {batch.name} (pid {batch.pid}): its memory is free")
    began = time.monotonic()
    system.admin.post(f"/v1/resume/{batch.name}", timeout_s=30)
    returned = wait_for_batch(system)
    measured.add("batch resumed, answering again", since_ms(began), "demo")
    out.print(f"  resumed as pid {returned.pid}, forked from the zygote, weights still in memory")
    if returned.pid == batch.pid:
        raise BrokenPromiseError("the evicted process answers as if it had never gone")


def show_table(measured: Measured) -> None:
    """All figures of this run."""
    scene("6", "Measured in this run")
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("measured by")
    for phase, duration_ms, seen_by in measured.rows:
        table.add_row(phase, f"{duration_ms:,.1f}", seen_by)
    out.print(table)


def stop(system: RunningSystem) -> None:
    """`supervisor stop`, then a search for anything that is left."""
    scene("7", "Stop")
    system.take_inventory()
    began = time.monotonic()
    code = system.stop()
    if code != 0:
        raise BrokenPromiseError(f"the supervisor ended with {code}")
    if leftovers := system.leftovers():
        raise BrokenPromiseError("left behind: " + "; ".join(leftovers))
    out.print(
        f"  stopped in {since_ms(began):,.0f} ms; "
        "no process, socket, memory file or shared-memory file is left"
    )


def wait_for_batch(system: RunningSystem) -> EngineView:
    """The batch engine, once it serves."""

    def look() -> EngineView | None:
        status = system.status()
        engine = status.group.engine("batch") if status else None
        return engine if engine is not None and engine.state == "batch" else None

    return wait_until(look, "the batch engine", timeout_s=60)


def living_engines(status: StatusView) -> list[EngineView]:
    """Engines with a process, in the order of the file."""
    return [engine for engine in status.group.engines if engine.pid]


def scene(number: str, title: str) -> None:
    """A heading."""
    out.print(f"\n[bold cyan]{number}[/] [bold]{title}[/]")


def since_ms(began_s: float) -> float:
    """Milliseconds since a moment of the monotonic clock."""
    return (time.monotonic() - began_s) * 1000


def mib(size_bytes: int) -> str:
    """A size for people."""
    return f"{size_bytes / MIB:.1f} MiB"


def one_line(text: str) -> str:
    """Text without line breaks."""
    return " ".join(text.split())


def main() -> int:
    """Run the demo; 0 when every promise held."""
    began = time.monotonic()
    try:
        play()
    except KeyboardInterrupt:
        out.print("\ninterrupted; everything that was started has been stopped")
        return 130
    except StartError as error:
        out.print(Text(f"\ndemo failed: {error}", style="red"))
        return 1
    except (UnderstudyError, openai.OpenAIError, OSError) as error:
        out.print(Text(f"\ndemo failed: {error}", style="red"))
        out.print(f"logs: {STATE_DIR / 'logs'} and {STATE_DIR.parent / 'supervisor.out'}")
        return 1
    out.print(f"\n[green]every promise held[/] ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
