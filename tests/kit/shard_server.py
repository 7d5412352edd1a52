"""A server of files that misbehaves when it is told to, for tests of shards from an address; and shards to serve."""

import contextlib
import io
import json
import re
import socket
import struct
import tarfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np


class Served:
    """url     of the folder
    bytes      sent of each file
    asked      (name, where the asked bytes begin) in order
    answers    (name, status) of those that gave bytes
    trouble    {name: [what to do at the first request, at the second, ...]}; of a list of one, at each:
               a number -N: reset the connection after N bytes; "cut": end after half of the bytes that were announced;
               "slow": a piece of 1 kB each millisecond; "page": a web page with status 200; "no ranges": the whole,
               whatever was asked for; a whole number above 400: that status; (503, after): with Retry-After;
               an Event: stop in the middle until it is set; a function: called before the answer
    look       called at each request
    """

    def __init__(self, root):
        self.root, self.url = root, ""
        self.bytes, self.asked, self.answers = Counter(), [], []
        self.trouble, self.look = {}, lambda: None
        self.lock = threading.Lock()
        self.half_way = threading.Event()  # an answer waits for its Event

    def next_trouble(self, name):
        with self.lock:
            todo = self.trouble.get(name)
            if not todo:
                return None
            return todo[0] if len(todo) == 1 else todo.pop(0)


@contextlib.contextmanager
def served(root):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, code, body=b"", **headers):
            self.send_response(code)
            for name, value in ({"Content-Length": len(body)} | headers).items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            name = self.path.lstrip("/").partition("?")[0]
            begin = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
            with server.lock:
                server.asked.append((name, begin))
            server.look()
            todo = server.next_trouble(name)
            if callable(todo):
                todo = todo()
            try:
                data = (root / name).read_bytes()
            except FileNotFoundError:
                return self.answer(404)
            tag = f'"{hash(data)}"'
            if todo == "page":
                return self.answer(200, b"<html>Please log in</html>", Content_Type="text/html")
            if isinstance(todo, tuple):
                return self.answer(todo[0], Retry_After=todo[1])
            if isinstance(todo, int) and 400 <= todo < 600:
                return self.answer(todo)
            if todo == "no ranges" or self.headers.get("If-Range", tag) != tag:
                begin = 0
            if begin > len(data):
                return self.answer(416)
            part = data[begin:]
            self.send_response(206 if begin else 200)
            server.answers.append((name, 206 if begin else 200))
            self.send_header("Content-Length", str(len(part)))
            self.send_header("ETag", tag)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if todo == "cut":
                part, self.close_connection = part[: len(part) // 2], True
            if isinstance(todo, int) and todo < 0:
                self.send(name, part[:-todo])
                # An RST instead of a FIN: the reader sees ECONNRESET.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                return self.connection.close()
            if isinstance(todo, threading.Event):
                self.send(name, part[: len(part) // 2])
                server.half_way.set()
                todo.wait(60)
                part = part[len(part) // 2 :]
            if todo == "slow":
                for at in range(0, len(part), 1024):
                    time.sleep(0.001)  # the server's throttle, not a wait of the test
                    self.send(name, part[at : at + 1024])
                return None
            return self.send(name, part)

        def send(self, name, part):
            with contextlib.suppress(OSError):
                self.wfile.write(part)
                self.wfile.flush()
                with server.lock:
                    server.bytes[name] += len(part)

        def finish(self):
            with contextlib.suppress(OSError, ValueError):
                super().finish()

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 64

        def handle_error(self, *_):
            pass

    server = Served(root)
    with Server(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        http.shutdown()
        thread.join()


def write_shards(folder, kind="tar", shards=30, least=10, most=30, bytes_each=200, seed=0):
    """Samples {"id": their number, "data": random bytes or numbers}; return how many there are."""
    rng, at = np.random.default_rng(seed), 0
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(shards):
        numbers = range(at, at := at + int(rng.integers(least, most)))
        path = folder / f"{number:04}.{kind}"
        if kind == "tar":
            with tarfile.open(path, "w") as tar:
                for n in numbers:
                    for name, data in (("id", str(n).encode()), ("x.bin", rng.bytes(int(rng.integers(0, bytes_each))))):
                        about = tarfile.TarInfo(f"set/{n:06}.{name}")
                        about.size = len(data)
                        tar.addfile(about, io.BytesIO(data))
        elif kind == "jsonl":
            rows = [json.dumps({"id": n, "text": f"sample {n} " * int(rng.integers(1, 9))}) for n in numbers]
            path.write_text("\n".join(rows) + "\n" * (number % 2))
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            table = pa.table({"id": [*numbers], "state": [[float(n), -1.0] for n in numbers]})
            pq.write_table(table, path, row_group_size=7)
    return at
