"""Where an agent first looks for the others: what `--peers` says, and the driver that turns it into addresses.

    HOST[:PORT],...     a list                                   known at once
    @FILE               a list, one or more a line, # comments   read by the command line, then a list
    slurm:              the hosts of the Slurm step, else job    known at once; `scontrol` is asked only about forms unknown here
    dns:NAME:PORT       all addresses behind a name              asked again every `ASK_AGAIN_S`: pods come and go

Contact points are hints, needed until the first view is decided and after a total loss; nobody on the list is special, save that
the first one forms view 0 of an elastic job (A10b), so the order is kept. Names are resolved when they are dialled, not here.
"""

import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.transport.addresses import Address, BadAddressError, parse_address, parse_host, parse_port
from hyperpodrun.agent.transport.hostlist import HostlistError, expand

ASK_AGAIN_S = 5.0
SCONTROL_LIMIT_S = 10.0
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
"""The step's first: `srun -N2` within a job of three nodes leaves the job's list as it is."""


class Listed(msgspec.Struct, frozen=True, tag="listed"):
    """These addresses, in this order."""

    addresses: tuple[Address, ...]


class Slurm(msgspec.Struct, frozen=True, tag="slurm"):
    """The hosts in Slurm's own short form."""

    hosts: str


class Dns(msgspec.Struct, frozen=True, tag="dns"):
    """All addresses of a name (a headless service), one port."""

    name: str
    port: int


Contact = Listed | Slurm | Dns


def parse_list(text: str) -> Listed:
    """`HOST[:PORT],...`. Raises BadAddressError."""
    return Listed(tuple(dict.fromkeys(parse_address(part.strip()) for part in text.split(","))))


def parse_file(content: str) -> Listed:
    """The text of an @FILE. Raises BadAddressError, also when it names no host."""
    lines = (line.partition("#")[0].strip(" \t\r,") for line in content.split("\n"))
    joined = ",".join(line for line in lines if line)
    if not joined:
        raise BadAddressError("the file names no host")
    return parse_list(joined)


def parse_contact(text: str, environ: Mapping[str, str], read_file: Callable[[str], str]) -> Contact:
    """One value of `--peers`. Raises BadAddressError with the reason, and what `read_file` raises."""
    if text.startswith("@"):
        return parse_file(read_file(text[1:]))
    if text.startswith("slurm:"):
        if text != "slurm:":
            raise BadAddressError("nothing may follow slurm:")
        for name in NODE_LISTS:
            if hosts := environ.get(name):
                return Slurm(hosts)
        raise BadAddressError("SLURM_JOB_NODELIST is not set, so this is no Slurm job")
    if text.startswith("dns:"):
        name, colon, port = text[4:].rpartition(":")
        if not colon:
            raise BadAddressError("it is not dns:NAME:PORT")
        return Dns(parse_host(name), parse_port(port))
    return parse_list(text)


def parse_endpoint(text: str) -> Listed:
    """`--rdzv-endpoint` and `--master-addr`: nothing for an empty text or for port 0 ("any"). Raises BadAddressError."""
    if not text:
        return Listed(())
    address = parse_address(text, smallest_port=0)
    return Listed(() if address.port == 0 else (address,))


Ask = Callable[[str, Callable[[list[str], str], None]], None]
"""`Resolver.ask`."""
WatchChild = Callable[[int, Callable[[int], None]], None]


class ContactPoints:
    """`on_addresses` gets all addresses known, each with a port, whenever that changes; at once those that need no waiting."""

    def __init__(
        self,
        reactor: Reactor,
        ask: Ask,
        watch_child: WatchChild,
        contacts: Sequence[Contact],
        default_port: int,
        on_addresses: Callable[[tuple[Address, ...]], None],
        say: Callable[[str], None],
    ) -> None:
        self._reactor = reactor
        self._ask = ask
        self._watch_child = watch_child
        self._contacts = tuple(contacts)
        self._default_port = default_port
        self._on_addresses = on_addresses
        self._say = say
        self._known: list[tuple[Address, ...]] = [() for _ in self._contacts]
        self._timers: dict[int, Timer] = {}
        self._silent_names: set[str] = set()
        self._open = True

    def start(self) -> None:
        """Begin; lists are reported before this returns."""
        for index, contact in enumerate(self._contacts):
            match contact:
                case Listed(addresses):
                    self._known[index] = tuple(address.with_port(self._default_port) for address in addresses)
                case Slurm(hosts):
                    self._expand(index, hosts)
                case Dns():
                    self._look_up(index, contact)
        self._report()

    def close(self) -> None:
        """Ask no more."""
        self._open = False
        for timer in self._timers.values():
            timer.cancel()

    def _found(self, index: int, addresses: tuple[Address, ...]) -> None:
        if self._open and addresses != self._known[index]:
            self._known[index] = addresses
            self._report()

    def _report(self) -> None:
        if known := tuple(dict.fromkeys(address for addresses in self._known for address in addresses)):
            self._on_addresses(known)

    # --- dns

    def _look_up(self, index: int, contact: Dns) -> None:
        def answered(hosts: list[str], reason: str) -> None:
            if not self._open:
                return
            self._timers[index] = self._reactor.call_later(ASK_AGAIN_S, lambda: self._look_up(index, contact))
            if hosts:
                self._silent_names.discard(contact.name)
                self._found(index, tuple(Address(host, contact.port) for host in sorted(hosts)))
            elif contact.name not in self._silent_names:
                # Those known stay: a name server that is away for a moment says nothing about the peers.
                self._silent_names.add(contact.name)
                self._say(f"no addresses behind {contact.name} yet ({reason}); the name is asked again every {ASK_AGAIN_S:.0f} s")

        self._ask(contact.name, answered)

    # --- slurm

    def _expand(self, index: int, hosts: str) -> None:
        try:
            self._known[index] = self._slurm_addresses(expand(hosts))
        except HostlistError as error:
            self._ask_scontrol(index, hosts, str(error))

    def _slurm_addresses(self, hosts: Sequence[str]) -> tuple[Address, ...]:
        return tuple(Address(host, self._default_port) for host in dict.fromkeys(hosts))

    def _ask_scontrol(self, index: int, hosts: str, why: str) -> None:
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        argv = ["scontrol", "show", "hostnames", hosts]
        try:
            pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)], setsigmask=[])
        except OSError as error:
            os.close(read)
            self._say(
                f"Slurm's node list {hosts[:200]!r} cannot be read ({why}), and scontrol cannot be run ({error.strerror}): "
                "name the nodes with --peers"
            )
            return
        finally:
            os.close(write)
        output: list[bytes] = []

        def readable() -> None:
            if chunk := os.read(read, 65536):
                output.append(chunk)
            else:
                self._reactor.forget(read)

        def exited(status: int) -> None:
            limit.cancel()
            self._reactor.forget(read)
            while chunk := _read_rest(read):
                output.append(chunk)
            os.close(read)
            found = b"".join(output).decode("ascii", "replace").split()
            if status == 0 and found:
                self._found(index, self._slurm_addresses(found))
            elif self._open:
                self._say(
                    f"scontrol did not expand Slurm's node list {hosts[:200]!r} (wait status {status}): "
                    "name the nodes with --peers"
                )

        limit = self._reactor.call_later(SCONTROL_LIMIT_S, lambda: os.kill(pid, 9))
        self._reactor.on_readable(read, readable)
        self._watch_child(pid, exited)


def _read_rest(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except BlockingIOError:  # a grandchild still holds the other end
        return b""
