"""The program that stands in for Python does what Python does, and ends as its process ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

LOGGERS = """
import logging
handlers = [h for l in logging.root.manager.loggerDict.values() for h in getattr(l, "handlers", ())]
print([handler for handler in handlers if "pytest" in type(handler).__module__])
"""
PROGRAMS = {
    "arguments": ("-c", "import sys; print(sys.argv, __name__)", "a b", "ü"),
    "folder": ("-c", "import os, sys; print(os.getcwd(), sys.path[:2])"),
    "environment": ("-c", "import os; print(sorted(os.environ.items()))"),
    "input": ("-c", "print(input()); import sys; print('aside', file=sys.stderr)"),
    "module": ("-m", "sciftune.lab.command", "--version"),
    "loggers": ("-c", LOGGERS),
    "exit code": ("-c", "import sys; sys.exit(7)"),
    "sentence": ("-c", "import sys; sys.exit('what is wrong')"),
    "at exit": ("-c", "import atexit; atexit.register(print, 'the end')"),
    "signal": ("-c", "import os; os.kill(os.getpid(), 9)"),
    "interrupt": ("-c", "import signal; signal.raise_signal(signal.SIGINT)"),
}


def run(program, words, folder):
    environment = os.environ | dict(PYTHONPATH=str(folder), ODD="ü { } $HOME")
    done = subprocess.run(
        [program, *words],
        cwd=folder,
        env=environment,
        input="a line\n",
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr.splitlines()[-1:]


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_does_what_python_does(warm_python, tmp_path, root, name):
    (tmp_path / "sciftune").symlink_to(root / "sciftune")
    made = run(warm_python, PROGRAMS[name], tmp_path)
    assert made == run(sys.executable, PROGRAMS[name], tmp_path)


@pytest.fixture(scope="session")
def used():
    "This process as other tests leave it, before the fixture of the program is made."
    from accelerate.state import PartialState

    PartialState(cpu=True)


def test_nothing_of_other_tests_is_in_it(used, warm_python):
    code = "from accelerate.state import PartialState; print(PartialState._shared_state)"
    done = subprocess.run([warm_python, "-c", code], capture_output=True, text=True)
    assert done.stdout == "{}\n", done


def test_what_it_starts_is_warm_too(warm_python):
    code = "import subprocess, sys; print(sys.executable, 'torch' in sys.modules)"
    outer = f"{code}; subprocess.run([sys.executable, '-c', {code!r}])"
    done = subprocess.run([warm_python, "-u", "-c", outer], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{warm_python} True"] * 2, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_process(warm_python, number):
    code = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
time.sleep(3600)
"""
    process = subprocess.Popen([warm_python, "-c", code], stdout=subprocess.PIPE, text=True)
    inner = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait() == (5 if number == signal.SIGTERM else -number)
    while os.path.exists(f"/proc/{inner}"):
        time.sleep(0.05)
