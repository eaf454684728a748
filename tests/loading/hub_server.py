"""A server on this machine that answers as the hub does, and fails where a test wants it to."""

import json
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

LARGE = ".safetensors"  # such files lie in LFS, behind a redirect


@dataclass
class Hub:
    """Repositories by id and revision; a commit's hash stands for its files."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    num_busy: int = 0  # requests yet to reject
    num_cut: int = 0  # large files yet to break off
    requests: list[str] = field(default_factory=list)  # their paths

    def found(self, name: str, wanted: str) -> tuple[str, dict[str, bytes]] | None:
        """Returns the hash and the files of a revision, which may be a hash already."""
        for revision, files in self.repositories[name].items():
            commit = sha1(f"{name}@{revision}".encode()).hexdigest()
            if wanted in (revision, commit):
                return commit, files
        return None

    def blob(self, digest: str) -> bytes:
        versions = (each for name in self.repositories.values() for each in name.values())
        contents = (content for files in versions for content in files.values())
        return next(each for each in contents if sha256(each).hexdigest() == digest)


class Handler(BaseHTTPRequestHandler):
    """Answers one request for the `Hub` of its server."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path, hub = unquote(urlsplit(self.path).path), self.server.hub
        hub.requests.append(path)
        if hub.num_busy:
            hub.num_busy -= 1
            return self.answer(503, b"busy")
        if path.startswith("/cdn/"):
            hub.num_cut -= (is_cut := hub.num_cut > 0)
            digest = path.removeprefix("/cdn/")
            return self.answer(200, hub.blob(digest), {"ETag": f'"{digest}"'}, is_cut)
        parts = path.strip("/").split("/")
        parts = parts[2:] if parts[0] == "api" else parts
        name, kind, revision = "/".join(parts[:2]), *[*parts[2:4], "revision", "main"][:2]
        if name not in hub.repositories:
            return self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        if name in hub.gated:
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if (found := hub.found(name, revision)) is None:
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        commit, files = found
        if kind == "revision":
            listed = [{"rfilename": file} for file in files]
            return self.send_json({"id": name, "modelId": name, "sha": commit, "siblings": listed})
        if kind == "tree":
            return self.send_json([self.entry(file, files[file]) for file in files])
        file = path.partition(f"/resolve/{revision}/")[2]
        if file not in files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        self.send_file(files[file], commit, is_large=file.endswith(LARGE))

    def entry(self, file: str, content: bytes) -> dict:
        entry = {"type": "file", "path": file, "size": len(content)}
        entry["oid"] = sha1(content).hexdigest()
        if file.endswith(LARGE):
            digest = sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
        return entry

    def send_file(self, content: bytes, commit: str, is_large: bool):
        headers = {"X-Repo-Commit": commit}
        if not is_large:
            return self.answer(200, content, headers | {"ETag": f'"{sha1(content).hexdigest()}"'})
        digest = sha256(content).hexdigest()
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        address = f"http://localhost:{self.server.server_address[1]}/cdn/{digest}"
        self.answer(302, b"", headers | {"Location": address})

    def send_json(self, value):
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, content: bytes, headers=(), is_cut: bool = False):
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:1000] if is_cut else content)
        self.close_connection = is_cut


def serve(hub: Hub) -> ThreadingHTTPServer:
    """Starts a server on a free port of this machine; `shutdown` ends it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.hub = True, hub
    Thread(target=server.serve_forever, daemon=True).start()
    return server
