"""A server with the interface of the Hugging Face Hub, for tests of downloads: repositories are folders on the disk."""

import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple


class Hub(NamedTuple):
    """url: for HF_ENDPOINT. asked: what was asked for, in order. sha: the commit of every repository."""

    url: str
    asked: list
    sha: str = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def served(repositories: dict[str, Path]):
    """Serve {"models/user/name" or "datasets/user/name": its folder}; yields a `Hub`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, body, code=200, **headers):
            self.send_response(code)
            for name, value in ({"Content-Length": len(body)} | headers).items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self):
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            if found := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
                name, what, _ = found.groups()
                if name not in repositories:
                    return self.answer(b"Repository not found", 404, X_Error_Code="RepoNotFound")
                folder = repositories[name]
                files = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
                sizes = {file: (folder / file).stat().st_size for file in files}
                tree = [{"type": "file", "path": file, "size": sizes[file], "oid": "0" * 40} for file in files]
                about = {"id": name.partition("/")[2], "sha": hub.sha, "siblings": [{"rfilename": f} for f in files]}
                return self.answer(
                    json.dumps(tree if what == "tree" else about).encode(), Content_Type="application/json"
                )
            if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                kind, name, file = found.groups()
                body = (repositories[f"{kind or 'models/'}{name}"] / file).read_bytes()
                return self.answer(body, ETag=f'"{hashlib.sha256(body).hexdigest()}"', X_Repo_Commit=hub.sha)
            return self.answer(b"", 404)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", [])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
