"""A Python that starts in 0.1 s with torch and diffusers imported, for commands under test.

`python()` is a program that takes the arguments of Python (`-m module`, `-c code` or a script). It
asks a process which has imported all that is slow to fork one that runs them, with the caller's
environment, folder and streams, passes signals on to it and ends as it ends. What it starts by
`sys.executable` is started in the same way. So `sciftune run` needs seconds of a processor for its
five processes in place of half a minute.

Not for what tests imports, or processes by their relations: the forked ones are no children of
their callers. Modules of `COLD` are run by Python itself, since who starts them knows their number;
what these start is forked again.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import json
import logging
import multiprocessing.process
import multiprocessing.resource_tracker
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from pathlib import Path

COLD = ("sciftune.strategies.agent",)  # its caller waits for the process that it started
PASSED_ON = ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
IMPORTED = (
    "forked",
    "ipykernel.kernelapp",
    "matplotlib_inline.backend_inline",
    "papermill.cli",
    "papermill.execute",
    "sciftune.lab.command",
    "sciftune.planner.plan",
)
INLINE = "module://matplotlib_inline.backend_inline"
BEGIN = """
import runpy, sys
sys.executable, sys.argv = {program!r}, sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
CLIENT = """#!{python} -IS
import os, signal, socket, sys
if not os.path.exists({address!r}):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
if sys.argv[1:2] == ["-m"] and sys.argv[2] in {cold}:
    os.execv({python!r}, [{python!r}, "-c", {begin!r}, *sys.argv[2:]])
import json
ignored = [n for n in {signals} if signal.getsignal(getattr(signal, n)) is signal.SIG_IGN]
made = dict(words=sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ), ignored=ignored)
server, asked, child = socket.socket(socket.AF_UNIX), [], 0
def pass_on(number, frame):
    os.kill(child, number) if child else asked.append(number)
for name in {signals}:
    if name not in ignored:
        signal.signal(getattr(signal, name), pass_on)
server.connect({address!r})
text = json.dumps(made).encode("utf-8", "surrogateescape")
socket.send_fds(server, [len(text).to_bytes(8, "little")], [0, 1, 2])
server.sendall(text)
answers = server.makefile("r")
child = int(answers.readline())
for number in asked:
    os.kill(child, number)
code = int(answers.readline() or 1)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Zygote:
    """The process that forks; it ends with the process that started it.

    What that process has done to its modules is in every child: start it before the tests.
    """

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="sciftune-warm-"))
        self.address, self.program = self.folder / "socket", self.folder / "python"
        self.pid = 0
        text = CLIENT.format(
            python=sys.executable,
            cold=repr(COLD),
            begin=BEGIN.format(program=str(self.program)),
            address=str(self.address),
            signals=repr(PASSED_ON),
        )
        self.program.write_text(text)
        self.program.chmod(0o755)

    def start(self) -> None:
        """Fork it from this process."""
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(self.address))
        listening.listen(64)
        alive, self.ours = socket.socketpair()  # its end says that this process has ended
        self.pid = os.fork()
        if not self.pid:
            with contextlib.suppress(KeyboardInterrupt):
                self.ours.close()
                os.setsid()
                serve(listening, alive, str(self.program))
            os._exit(0)
        listening.close()
        alive.close()

    def stop(self) -> None:
        """End it, and remove its folder."""
        if self.pid:
            self.ours.shutdown(socket.SHUT_RDWR)  # also where another child has it open
            self.ours.close()
            os.waitpid(self.pid, 0)
        for path in (self.address, self.program):
            path.unlink(missing_ok=True)
        self.folder.rmdir()


def serve(listening: socket.socket, alive: socket.socket, program: str) -> None:
    """Fork for each client until the other end of `alive` is closed."""
    for number in map(signal.Signals.__getitem__, PASSED_ON):
        signal.signal(number, signal.SIG_DFL)
    base = path_of_python()
    children = Children(listening, alive)
    while children.wait():
        for name in IMPORTED:  # for the first client; none may come
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        client, _ = listening.accept()
        children.add(begin(client, program, base), client)


def path_of_python() -> list[str]:
    """Where Python looks for modules, without the folder of the program and PYTHONPATH."""
    code = "import sys; print('\\n'.join(sys.path[1:]))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).split()


class Children:
    """The processes that run, each with its client; one ends with the other."""

    def __init__(self, listening: socket.socket, alive: socket.socket):
        self.listening, self.alive = listening, alive
        self.ends: dict[int, tuple[int, socket.socket]] = {}  # by what tells the end of a process
        self.poll = selectors.DefaultSelector()
        for one in (listening, alive):
            self.poll.register(one, selectors.EVENT_READ)

    def add(self, child: int, client: socket.socket) -> None:
        """Watch a new one."""
        end = os.pidfd_open(child)
        self.ends[end] = child, client
        self.poll.register(end, selectors.EVENT_READ)
        self.poll.register(client, selectors.EVENT_READ, child)

    def wait(self) -> bool:
        """Return when somebody has called: True for a client; False when all is over."""
        while True:
            ready = [key for key, _ in self.poll.select()]
            for key in ready:
                if key.fileobj in self.ends:
                    self._ended(key.fileobj)
            open_now = {key.fileobj for key in self.poll.get_map().values()}
            for key in ready:
                if key.data and key.fileobj in open_now:  # the client was killed
                    self.poll.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
            called = [key.fileobj for key in ready]
            if self.alive in called:
                for child, _ in self.ends.values():
                    os.kill(child, signal.SIGKILL)
                return False
            if self.listening in called:
                return True

    def _ended(self, end: int) -> None:
        """Let the client end as its process has."""
        child, client = self.ends.pop(end)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(OSError):
            client.sendall(f"{code}\n".encode())
        for one in (end, client):
            with contextlib.suppress(KeyError):
                self.poll.unregister(one)
        os.close(end)
        client.close()


def begin(client: socket.socket, program: str, base: list[str]) -> int:
    """Fork the process that `client` asks for; returns its number."""
    head, streams, _, _ = socket.recv_fds(client, 8, 3)
    text = b""
    while len(text) < int.from_bytes(head, "little"):
        text += client.recv(2**16)
    asked = json.loads(text.decode("utf-8", "surrogateescape"))
    child = os.fork()
    if not child:
        join_network(client)
        run(asked, streams, program, base)
    client.sendall(f"{child}\n".encode())
    for stream in streams:
        os.close(stream)
    return child


def join_network(client: socket.socket) -> None:
    """Enter the network namespace of the process at the other end, if it is another one."""
    who = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    theirs = f"/proc/{struct.unpack('3i', who)[0]}/ns/net"
    if os.readlink(theirs) == os.readlink("/proc/self/ns/net"):
        return
    with open(theirs) as namespace:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def run(asked: dict, streams: list[int], program: str, base: list[str]) -> None:
    """Be the Python that was asked for, to its end."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    forget()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in asked["ignored"]:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        lines = 1 if number == 2 else -1
        stream = open(number, "w", buffering=lines, closefd=False)  # noqa: SIM115
        if number == 2 or os.environ.get("PYTHONUNBUFFERED"):
            stream.reconfigure(write_through=True, line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.executable = program
    code = 1
    try:
        execute(asked["words"], base)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException as error:
        below = error.__traceback__.tb_next.tb_next  # the frames of this file are nobody's
        sys.excepthook(type(error), error, below)
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 255)


def forget() -> None:
    """Drop what belongs to the process that this one was forked from."""
    from sciftune.core import ownership

    faulthandler.disable()
    atexit._clear()
    weakref.finalize._registry.clear()
    for at_exit in (weakref.finalize._exitfunc, logging.shutdown):
        atexit.register(at_exit)
    multiprocessing.process._children.clear()
    tracker = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    logging.root.handlers.clear()
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", [])[:]:
            if type(handler).__module__.startswith("_pytest"):  # its file has been closed
                logger.removeHandler(handler)
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    sys.modules["__main__"] = types.ModuleType("__main__")
    # the client passes on how the parent ended; others have imported this function by name
    ownership.is_orphan.__code__ = (lambda parent: False).__code__
    warnings._showwarnmsg_impl = lambda said: sys.stderr.write(warnings._formatwarnmsg(said))
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)


def execute(words: list[str], base: list[str]) -> None:
    """What Python does with `words`."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = ["", *filter(None, path), *base]
    words = list(words)
    while words[0] in ("-u", "-B", "-I", "-S", "-IS"):
        words.pop(0)
    option, *rest = words
    if option == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif option == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = rest
        if rest[0].startswith("ipykernel"):  # what it sets is read when matplotlib is imported
            os.environ["MPLBACKEND"] = INLINE
            os.environ.pop("JPY_PARENT_PID", None)  # its parent is another one
            if "matplotlib" in sys.modules:
                sys.modules["matplotlib"].rcParams["backend"] = INLINE
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(option)
        sys.argv = words
        runpy.run_path(option, run_name="__main__")
