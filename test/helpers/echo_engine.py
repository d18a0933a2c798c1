"""A strict stand-in for SGLang's server program, for tests of starts.

It takes the command line that this package writes for a server, and exits with an error
for any other flag, for one that is missing, and for a model without ``config.json``. It
is ready in a tenth of a second and answers a prompt with itself. Started with ``-c``,
like an interpreter that is asked for its packages, it has none.

With ``ECHO_GATE`` in its environment, it serves when that named pipe has been opened
for writing. ``POST /end`` makes it exit with status 7.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REQUIRED = ("--model-path", "--host", "--port", "--device")
MEETINGS = ("--nccl-port", "--dist-init-addr")
"""One of these is required."""
VALUES = (
    *MEETINGS,
    *("--tp-size", "--nnodes", "--node-rank", "--attention-backend"),
    *("--dtype", "--mem-fraction-static", "--max-total-tokens", "--grammar-backend"),
    *("--log-level-http", "--random-seed", "--config", "--lora-backend"),
)
SWITCHES = ("--disable-overlap-schedule", "--sleep-on-idle", "--skip-server-warmup")


def make_interpreter(folder: Path) -> str:
    """Writes a program that runs this file in the place of SGLang's interpreter."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" "$@"\n')
    program.chmod(0o755)
    return str(program)


def reply(ids: list[int], length: int) -> dict[str, Any]:
    tokens = [ids[i % len(ids)] for i in range(length)]
    end = {"type": "length", "length": length}
    meta = {"prompt_tokens": len(ids), "completion_tokens": length}
    meta |= {"finish_reason": end, "weight_version": "default", "cached_tokens": 0}
    return {"text": "", "output_ids": tokens, "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model: str
    arguments: dict[str, Any]

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        content = json.loads(self.rfile.read(length) or b"null")
        path = self.path.partition("?")[0]
        if path == "/end":
            sys.stderr.write("It was told to end.\n")
            os._exit(7)
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
            "/arguments": self.arguments,
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
    if arguments[:1] == ["-c"]:
        return
    if arguments[:1] == ["-m"]:
        arguments = arguments[1:]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("program")
    for flag in REQUIRED:
        parser.add_argument(flag, required=True)
    for flag in VALUES:
        parser.add_argument(flag)
    for flag in SWITCHES:
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args(arguments)
    if not (given.nccl_port or given.dist_init_addr):
        parser.error(f"one of {' and '.join(MEETINGS)} is required")
    Handler.arguments = vars(given)
    if not (Path(given.model_path) / "config.json").is_file():
        sys.exit(f"There is no config.json in {given.model_path}.")
    if "ECHO_GATE" in os.environ:
        open(os.environ["ECHO_GATE"], "rb").close()
    Handler.model = given.model_path
    ThreadingHTTPServer((given.host, int(given.port)), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
