"""A program in the place of the engine's interpreter, for tests of how one is started.

It takes the command line of an SGLang server and is ready in a tenth of a second: it
says what an engine asks a server first, and answers every prompt with itself. Started
with ``-c``, as one is that is asked for its packages, it has none.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def reply(ids: list[int], length: int) -> dict[str, Any]:
    tokens = [ids[i % len(ids)] for i in range(length)]
    end = {"type": "length", "length": length}
    meta = {"prompt_tokens": len(ids), "completion_tokens": length}
    meta |= {"finish_reason": end, "weight_version": "default", "cached_tokens": 0}
    return {"text": "", "output_ids": tokens, "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model: str

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        content = json.loads(self.rfile.read(length) or b"null")
        path = self.path.partition("?")[0]
        config = json.loads((Path(self.model) / "config.json").read_text())
        context = config["max_position_embeddings"]
        answers: dict[str, Any] = {
            "/health": {},
            "/server_info": {"version": "0.5.23", "max_req_input_len": context - 6},
            "/model_info": {"model_path": self.model, "weight_version": "default"},
            "/v1/models": {"data": [{"id": "m", "max_model_len": context}]},
            "/v1/loads": {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]},
            "/abort_request": {},
            "/environment": dict(os.environ),
        }
        answers["/openapi.json"] = {"paths": {p: {} for p in ["/generate", *answers]}}
        if path == "/generate":
            rows, parameters = content["input_ids"], content["sampling_params"]
            many = isinstance(rows[0], list)
            rows = rows if many else [rows]
            parameters = (
                parameters if isinstance(parameters, list) else [parameters] * len(rows)
            )
            found = [
                reply(ids, own["max_new_tokens"])
                for ids, own in zip(rows, parameters, strict=True)
            ]
            answers["/generate"] = found if many else found[0]
        body = json.dumps(answers.get(path)).encode()
        self.send_response(200 if path in answers else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - The library's name.

    def log_message(self, *arguments: object) -> None:
        """Logs nothing."""


def main(arguments: list[str]) -> None:
    if "--port" not in arguments:
        return
    given = dict(itertools.pairwise(arguments))
    Handler.model = given["--model-path"]
    place = (given["--host"], int(given["--port"]))
    ThreadingHTTPServer(place, Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
