"""A browser without a window, driven by the DevTools protocol over a pipe."""

import contextlib
import json
import os
import signal
import subprocess

from dev.screenshot import CHROMIUM


@contextlib.contextmanager
def chromium(folder):
    """Yields a function that sends a command of the DevTools protocol and returns its result, and all events so far."""
    (there, ask), (answer, here) = os.pipe(), os.pipe()
    os.set_inheritable(there, True), os.set_inheritable(here, True)

    def as_three_and_four():
        a, b = os.dup(there), os.dup(here)
        os.dup2(a, 3), os.dup2(b, 4)

    options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking"
    options += " --disable-component-update --disable-sync --remote-debugging-pipe"
    command = [CHROMIUM, *options.split(), f"--user-data-dir={folder}", "about:blank"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, preexec_fn=as_three_and_four, close_fds=False, start_new_session=True, **quiet)
    os.close(there), os.close(here)
    events, numbers, rest = [], iter(range(1, 10**6)), b""

    def send(method, session="", **parameters):
        nonlocal rest
        number = next(numbers)
        about = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(ask, json.dumps(about).encode() + b"\0")
        while True:
            while b"\0" not in rest:
                some = os.read(answer, 1 << 20)
                assert some, f"Chromium has ended: {method}"
                rest += some
            line, _, rest = rest.partition(b"\0")
            said = json.loads(line)
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]
            events.append(said)

    try:
        yield send, events
        send("Browser.close")
        process.wait(30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ask), os.close(answer)
