"""The link that `sciftune lab` prints."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from sciftune.lab.jobs import free_port

ROOT = Path(__file__).resolve().parents[2]


def test_the_printed_link_opens_a_notebook():
    """Its token is the server's; other notebooks below the same folder can be opened, too."""
    command = [sys.executable, "-m", "sciftune.lab.command", "lab", "--no-browser", "--allow-root"]
    port = free_port()
    server = subprocess.Popen([*command, f"--port={port}"], stderr=subprocess.PIPE, text=True)
    link = server.stderr.readline().strip()
    drain = threading.Thread(target=server.stderr.read)
    drain.start()
    address, notebook, token = re.fullmatch(r"(.*)/lab/tree/(.*)\?token=(\w+)", link).groups()
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None
            time.sleep(0.2)
        assert urllib.request.urlopen(link).status == 200
        for path in (notebook, "nbs/own_loop.ipynb"):
            asked = f"{address}/api/contents/{path}?content=0&token={token}"
            assert json.load(urllib.request.urlopen(asked))["type"] == "notebook"
    finally:
        server.terminate()
        server.wait()
        drain.join()
        (ROOT / notebook).unlink()
